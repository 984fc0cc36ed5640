"""The pages of the documentation and their code blocks."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
"""Paths of all pages, relative to the repository."""


class Block(NamedTuple):
    """One fenced block of a page."""

    page: str  # path of the page, relative to the repository
    line: int  # number of its first line of code
    language: str  # what follows the opening fence; may be empty
    text: str  # the code

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def fenced(page: str) -> list[Block]:
    """Return the fenced blocks of a page, in order. A block of a list may be indented."""
    text = (ROOT / page).read_text()
    found = re.finditer(r"^( *)```([^\n`]*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [
        Block(page, text.count("\n", 0, each.start(3)) + 1, each[2], re.sub(rf"(?m)^{each[1]}", "", each[3]))
        for each in found
    ]


def section(page: str, heading: str) -> str:
    """Return the text under a heading of level two."""
    text = (ROOT / page).read_text()
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no section {heading!r}"
    return found[1]


def require_test(name: str) -> None:
    """Check that a test is there, by its path and name: ``tests/docs/test_blocks.py::test_...``."""
    path, _, function = name.partition("::")
    assert re.search(rf"^(async )?def {function}\(", (ROOT / path).read_text(), re.MULTILINE), name


def blocks(page: str, language: str) -> list[str]:
    """Return the code of all blocks of one language."""
    return [block.text for block in fenced(page) if block.language == language]
