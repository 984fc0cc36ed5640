"""The page on architecture names every package, modules and records that exist, and the code behind each behavior."""

import ast
import re
from functools import cache, partial

import pytest

from tests.helpers.loops import looped
from tests.helpers.sources import ROOT, product, tree_of

from .pages import section

PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
PATHS = (
    "A pull, from a router's ticket to its report",
    "A prompt that is read while it is computed",
    "A prefix, from question to kept lease",
)


chapter = partial(section, "docs/explanation/architecture.md")


def drawing(heading):
    """Return the drawing of a chapter."""
    _, drawn, _ = chapter(heading).split("```")
    return drawn


def modules():
    """Return the modules of the tree; a package stands for its folder and is not listed."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in product()}
    return {name for name in names if not name.endswith(("__init__", "__main__"))}


def rooms(text):
    """Return the modules that a drawing or a text names, below kvflow."""
    named = re.findall(r"(?<![\w.])[a-z]+(?:\.[a-z_]+)+(?![\w.(])", text)
    return {re.sub(r"^vllm\.", "integrations.vllm.", name) for name in named}


@cache
def records():
    """Return the classes of the tree."""
    return {node.name for path in product() for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)}


def definition(name):
    """Return the class or function of ``module:Class.method``, or None."""
    module, _, path = name.partition(":")
    file = ROOT / (module.replace(".", "/") + ".py")
    body = tree_of(file).body if file.exists() else []
    node = None
    for part in path.split("."):
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        node = next((node for node in body if isinstance(node, kinds) and node.name == part), None)
        body = node.body if node else []
    return node


BEHAVIORS = re.findall(r": `([\w.]+:[\w.]+)`$", chapter("Where each behavior is implemented"), re.MULTILINE)


def test_every_package_is_in_the_diagram():
    packages = {path.parent.name for path in (ROOT / "kvflow").glob("*/__init__.py")}
    assert set(re.findall(r"kvflow\.(\w+)", drawing("Packages"))) - {"config"} == packages


@pytest.mark.parametrize("path", PATHS)
def test_rooms_and_records_of_a_path_are_there(path):
    known, drawn = modules(), drawing(path)
    named = rooms(drawn)
    assert len(named) >= 8
    assert {name for name in named if f"kvflow.{name}" not in known} == set()
    handed = set(re.findall(r"\b[A-Z]\w+", drawn))
    assert len(handed) >= 4
    assert handed - records() == set()


@pytest.mark.parametrize("path", [*PATHS, "How layouts become copies"])
def test_files_to_read_first_are_there(path):
    listed = re.search(r"^Read first: (.*?\.)\n(?=\n|\Z)", chapter(path), re.MULTILINE | re.DOTALL)[1]
    named = re.findall(r"`([\w/]+\.py)`", listed)
    assert len(named) >= 3
    assert [name for name in named if not (ROOT / "kvflow" / name).is_file()] == []


def test_modules_in_the_text_are_there():
    named = rooms(" ".join(re.findall(r"`([\w.]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))))
    named -= {"integrations.vllm.", "vllm."}
    roots = {"handshake.rates"}
    assert {name for name in named - roots if f"kvflow.{name}" not in modules()} == set()
    assert roots <= modules()


@looped("name", BEHAVIORS)
def test_a_behavior_is_where_the_page_says(name):
    assert definition(name) is not None


def test_at_least_ten_behaviors_are_named():
    assert len(BEHAVIORS) >= 10
    assert definition("kvflow.leases.epochs:EpochTable.lower") is None
    assert definition("kvflow.leases.nothing:EpochTable") is None


def test_what_is_not_there_is_noticed():
    assert rooms("vllm.nothing --Widget--> the lease") - modules() == {"integrations.vllm.nothing"}
