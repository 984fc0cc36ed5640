"""No two types of the product have one name, so that a name in a log, a traceback or a search means one thing."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from tests.helpers.sources import product, tree_of

ALIAS = re.compile("_?[A-Z]\\w*[a-z]\\w*")  # ``Digests``; no constant, and no ``T`` of a generic function


def defined_types(module: ast.Module) -> Iterator[str]:
    """Yield the name of each class that a module defines, also within classes and functions, and of each alias."""
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in module.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (each.id for each in targets if isinstance(each, ast.Name) and ALIAS.fullmatch(each.id))


def repeated(modules: Iterable[ast.Module]) -> set[str]:
    """Return the names of types that are defined more than once."""
    counts = Counter(name for module in modules for name in defined_types(module))
    return {name for name, count in counts.items() if count > 1}


def duplicates(sources: Iterable[str]) -> set[str]:
    """Return these names of modules that a test makes up."""
    return repeated(map(ast.parse, sources))


def test_no_name_of_a_type_is_defined_twice():
    assert sorted(repeated(map(tree_of, product()))) == []


def test_a_duplicate_is_found():
    once = "class A:\n    class B: ...\ndef f():\n    class C: ...\n"
    assert duplicates([once]) == set()
    assert duplicates([once, "class A: ...\n"]) == {"A"}
    assert duplicates([once, "async def g():\n    class B: ...\n"]) == {"B"}
    assert duplicates([once + "if True:\n    class C: ...\n"]) == {"C"}


@pytest.mark.parametrize("second", ["Name = bytes\n", "Name: TypeAlias = bytes\n", "class Name: ...\n"])
def test_an_alias_counts_as_a_name(second):
    assert duplicates(["Name = str\nNAME = 1\nT = TypeVar('T')\n", "NAME = 2\nT = TypeVar('T')\n", second]) == {"Name"}
