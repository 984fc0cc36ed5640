"""No two classes of the product have one name, so that a name in a log, a traceback or a search means one thing."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def defined_classes(source: str) -> Iterator[str]:
    """Yield the name of each class that a module defines, also within classes and functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            yield node.name


def duplicates(sources: Iterable[str]) -> set[str]:
    """Return the class names that are defined more than once."""
    counts = Counter(name for source in sources for name in defined_classes(source))
    return {name for name, count in counts.items() if count > 1}


def product() -> list[str]:
    """Return the source of each module of the product."""
    return [path.read_text() for package in ("kvflow", "handshake") for path in (ROOT / package).rglob("*.py")]


def test_no_class_name_is_defined_twice():
    assert sorted(duplicates(product())) == []


def test_a_duplicate_is_found():
    once = "class A:\n    class B: ...\ndef f():\n    class C: ...\n"
    assert duplicates([once]) == set()
    assert duplicates([once, "class A: ...\n"]) == {"A"}
    assert duplicates([once, "async def g():\n    class B: ...\n"]) == {"B"}
    assert duplicates([once + "if True:\n    class C: ...\n"]) == {"C"}
