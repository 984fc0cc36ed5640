"""CONTRIBUTING and SECURITY name folders, commands and releases that exist."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import kvflow

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("folder", sorted(set(re.findall(r"`([\w/]+/)`", PAGE))))
def test_folders_are_there(folder):
    assert (ROOT / folder).is_dir()


def test_paths_of_the_page_on_extending_are_there():
    named = re.findall(r"`((?:kvflow|tests)/[\w/.]+)`", (ROOT / "docs" / "contributing" / "extend.md").read_text())
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


def listed(heading):
    """Return the modules of kvflow that a check list on extending names, and other paths."""
    page = (ROOT / "docs" / "contributing" / "extend.md").read_text()
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)[1]
    items = "".join(line for line in section.splitlines() if line.startswith("- [ ] "))
    paths = set(re.findall(r"`((?:kvflow|tests)/[\w/.]+)`", items))
    return {path for path in paths if path.startswith("kvflow/")}, {path for path in paths if path.startswith("tests/")}


def naming(word, folder="kvflow"):
    """Return the modules whose code has a name, or a text that is nothing else; imports and comments do not count."""
    found = set()
    for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.pyi")]:
        for node in ast.walk(ast.parse(path.read_text())):
            exported = path.suffix == ".pyi" and isinstance(node, ast.alias) and node.name == word
            if exported or getattr(node, "value", None) == word or getattr(node, "id", None) == word:
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
