"""The examples of the documentation run as they are printed."""

import ast

import pytest

from tests.helpers.loops import looped

from .pages import PAGES, ROOT, blocks
from .test_blocks import run_program

__all__ = ["ROOT", "blocks"]


@pytest.mark.nixl
def test_readme_runs_as_printed(tmp_path, monkeypatch):
    [program] = blocks("README.md", "python")
    assert len([line for line in program.splitlines() if line.strip()]) <= 20
    promised = program.rpartition("  # ")[2].strip()
    monkeypatch.chdir(tmp_path)
    assert run_program(program).splitlines() == [promised]


def test_the_program_of_the_tutorial_is_short():
    [program] = blocks("docs/tutorial/first-transfer.md", "python")
    assert len(program.splitlines()) < 40


def test_readme_says_on_its_first_screen_what_it_is():
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:45])
    for phrase in ("It is a library", "**For whom?**", "**What does it save?**", "make demo", "make test", "KVFlow"):
        assert phrase in screen


@looped("page", PAGES)
def test_python_is_python(page):
    for block in blocks(str(page.relative_to(ROOT)), "python"):
        compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        relative = page.relative_to(ROOT / "docs")
        assert relative.name == "index.md" or f"({relative})" in index, relative
