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


@looped("page", PAGES)
def test_python_is_python(page):
    for block in blocks(str(page.relative_to(ROOT)), "python"):
        compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        relative = page.relative_to(ROOT / "docs")
        assert relative.name == "index.md" or f"({relative})" in index, relative
