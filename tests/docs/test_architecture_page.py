"""The page on architecture names every package, modules that exist, and the function behind each behavior."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
WORDS_MAX = 2500


def chapter(heading):
    """Return the text under a heading of level two."""
    return re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]


def modules():
    """Return the modules of the tree; a package stands for its folder and is not listed."""
    paths = [path.relative_to(ROOT) for package in ("kvflow", "handshake") for path in (ROOT / package).rglob("*.py")]
    names = {".".join(path.with_suffix("").parts) for path in paths}
    return {name for name in names if not name.endswith(("__init__", "__main__"))}


def definition(name):
    """Return the class or function of ``module:Class.method``, or None."""
    module, _, path = name.partition(":")
    file = ROOT / (module.replace(".", "/") + ".py")
    body = ast.parse(file.read_text()).body if file.exists() else []
    node = None
    for part in path.split("."):
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        node = next((node for node in body if isinstance(node, kinds) and node.name == part), None)
        body = node.body if node else []
    return node


BEHAVIORS = re.findall(r"\| `([\w.]+:[\w.]+)` \|$", chapter("Where each behavior is implemented"), re.MULTILINE)


def test_the_page_is_short():
    assert len(PAGE.split()) <= WORDS_MAX


def test_the_page_has_two_diagrams():
    assert len(re.findall(r"^```\n", PAGE, re.MULTILINE)) == 4


def test_every_package_is_in_the_diagram():
    packages = {path.parent.name for path in (ROOT / "kvflow").glob("*/__init__.py")}
    diagram = chapter("Packages").split("```")[1]
    assert set(re.findall(r"kvflow\.(\w+)", diagram)) - {"config"} == packages


def test_modules_of_the_path_are_there():
    named = re.findall(r"`([a-z_]+\.[a-z_.]+)`", chapter("The path of one request"))
    assert len(named) > 15
    assert {f"kvflow.{name}" for name in named} <= modules()


@pytest.mark.parametrize("name", BEHAVIORS)
def test_a_behavior_is_where_the_page_says(name):
    assert definition(name) is not None


def test_at_least_ten_behaviors_are_named():
    assert len(BEHAVIORS) >= 10
    assert definition("kvflow.leases.epochs:EpochTable.lower") is None
    assert definition("kvflow.leases.nothing:EpochTable") is None
