"""CONTRIBUTING and SECURITY name folders, commands and releases that exist."""

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
