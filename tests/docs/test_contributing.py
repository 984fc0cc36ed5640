"""CONTRIBUTING and SECURITY name folders, commands and releases that exist."""

import ast
import importlib.util
import re

import pytest

import kvflow
from tests.helpers.loops import looped
from tests.helpers.sources import ROOT, text_of, tree_of

from .pages import section

PAGE = "".join((ROOT / page).read_text() for page in ("CONTRIBUTING.md", "tests/README.md"))


@looped("folder", sorted(set(re.findall(r"`([\w/]+/)`", PAGE))))
def test_folders_are_there(folder):
    assert (ROOT / folder).is_dir()


def test_paths_of_the_page_on_extending_are_there():
    page = (ROOT / "docs" / "contributing" / "extend.md").read_text()
    named = re.findall(r"`((?:kvflow|handshake|tests)/[\w/.]+)`", page)
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


def listed(heading):
    """Return the modules of kvflow and handshake that a check list on extending names, and other paths."""
    lines = section("docs/contributing/extend.md", heading).splitlines()
    items = "".join(line for line in lines if line.startswith("- [ ] "))
    paths = set(re.findall(r"`((?:kvflow|handshake|tests)/[\w/.]+)`", items))
    tests = {path for path in paths if path.startswith("tests/")}
    return paths - tests, tests


def modules_with(word, folder):
    """Yield each module of a folder in whose text a word is, with the nodes of its tree."""
    for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.pyi")]:
        if word in text_of(path):
            yield path, ast.walk(tree_of(path))


def naming(word, folder="kvflow"):
    """Return the modules whose code has a name, or a text that is nothing else; imports and comments do not count."""
    found = set()
    for path, nodes in modules_with(word, folder):
        for node in nodes:
            match node:
                case ast.Name(id=name) | ast.Constant(value=str(name)) if name == word:
                    found.add(str(path.relative_to(ROOT)))
                case ast.alias(name=name) if path.suffix == ".pyi" and name == word:
                    found.add(str(path.relative_to(ROOT)))
    return found


def having(word, folder="kvflow"):
    """Return these modules, and those that have it as an attribute, or as a class of theirs."""
    found = naming(word, folder)
    for path, nodes in modules_with(word, folder):
        for node in nodes:
            match node:
                case ast.Attribute(attr=name) | ast.ClassDef(name=name) if name == word:
                    found.add(str(path.relative_to(ROOT)))
    return found


def test_the_list_for_a_data_plane_is_that_of_the_smallest():
    modules, tests = listed("Add a data plane")
    assert naming("loopback") | {"kvflow/reads/loopback.py", "kvflow/reads/backend.py"} <= modules
    others = modules - naming("loopback") - {"kvflow/reads/loopback.py", "kvflow/reads/backend.py"}
    assert others <= naming("nixl") & naming("tcp")
    assert {"tests/contract/kinds.py", "tests/integration/test_planes.py"} <= tests


def test_the_list_for_a_kind_of_layer_is_that_of_a_chunked_one():
    modules, tests = listed("Add a kind of layer")
    assert modules == naming("ChunkedLocal") | {"kvflow/layout/specs.py", "kvflow/__init__.pyi"}
    assert tests - {"tests/integration/combinations.py"} <= naming("ChunkedLocal", "tests")
    assert "ChunkedLocal" in (ROOT / "tests" / "integration" / "combinations.py").read_text()


@pytest.mark.parametrize(
    ("heading", "words"),
    [
        ("Add a setting", ["peer_weights"]),
        ("Add an event", ["ReaderReset"]),
        ("Add an error code", ["ContentMismatch", "CONTENT_MISMATCH"]),
        ("Add a message", ["Renew", "Renewed"]),
    ],
)
def test_a_list_is_that_of_its_neighbor(heading, words):
    modules, tests = listed(heading)
    assert modules == {path for word in words for folder in ("kvflow", "handshake") for path in having(word, folder)}
    pattern = re.compile("|".join(words), re.IGNORECASE)
    assert tests
    assert [path for path in tests if not pattern.search((ROOT / path).read_text())] == []


def test_the_list_for_a_kind_of_lease_has_what_knows_kept_ones():
    modules, tests = listed("Add a kind of lease")
    paths = {str(path.relative_to(ROOT)): path for path in (ROOT / "kvflow").rglob("*.py")}
    assert modules == {name for name, path in paths.items() if '"kept"' in path.read_text()}
    assert tests
    assert [path for path in tests if '"kept"' not in (ROOT / path).read_text()] == []


def test_the_list_for_an_engine_has_what_needs_no_vllm():
    modules, _ = listed("Add an engine")
    folder = ROOT / "kvflow" / "integrations" / "vllm"
    free = {
        path
        for path in folder.glob("*.py")
        if not re.search(r"^\s*(from|import) vllm\b", path.read_text(), re.MULTILINE)
    }
    assert modules == {str(path.relative_to(ROOT)) for path in free}


def test_every_folder_of_tests_is_named():
    folders = {
        f"tests/{path.name}/" for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name[0] not in "._"
    }
    assert sorted(folders - {"tests/data/", "tests/golden/"} - set(re.findall(r"`([\w/]+/)`", PAGE))) == []


def test_targets_of_make_are_there():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make ([\w-]+)", PAGE))
    assert len(named) >= 4
    assert named <= targets


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m (tests[\w.]+)", PAGE))))
def test_commands_are_modules(module):
    assert importlib.util.find_spec(module) is not None


def test_this_release_gets_fixes():
    minor = kvflow.__version__.rpartition(".")[0]
    assert f"| {minor} | yes |" in (ROOT / "SECURITY.md").read_text()
