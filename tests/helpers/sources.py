"""The modules of the product, each read and parsed once in a process, because many tests look at all of them."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def product() -> tuple[Path, ...]:
    """Return every module of kvflow and handshake."""
    return tuple(path for package in ("kvflow", "handshake") for path in sorted((ROOT / package).rglob("*.py")))


@cache
def text_of(path: Path) -> str:
    """Return the text of a module."""
    return path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a module, which nobody changes."""
    return ast.parse(text_of(path))
