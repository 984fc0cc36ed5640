"""Modules, functions, classes and names of tests stay small enough to be read."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.helpers.loops import looped
from tests.helpers.sources import ROOT, product, text_of, tree_of

MODULE_LINES_MAX = 700
FUNCTION_LINES_MAX = 70
CLASS_ATTRIBUTES_MAX = 25
TEST_NAME_MAX = 70

LARGER = {
    "kvflow/reads/core.py": "the module has",  # all that a transport decides: half of it would ask the other half
    "kvflow/config.py": "Tuning has",  # one list of settings is searched once, and each stands alone
}
"""What may be larger, because dividing it would make it harder to read."""


def excesses(source: str, tree: ast.Module | None = None) -> Iterator[str]:
    """Say what is too large in one module."""
    if (lines := source.count("\n")) > MODULE_LINES_MAX:
        yield f"the module has {lines} lines, more than {MODULE_LINES_MAX}"
    for node in ast.walk(tree or ast.parse(source)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if (lines := node.end_lineno - node.lineno + 1) > FUNCTION_LINES_MAX:
                    yield f"{node.name} has {lines} lines, more than {FUNCTION_LINES_MAX}"
            case ast.ClassDef():
                if (count := len(attributes(node))) > CLASS_ATTRIBUTES_MAX:
                    yield f"{node.name} has {count} attributes, more than {CLASS_ATTRIBUTES_MAX}"


def attributes(definition: ast.ClassDef) -> set[str]:
    """Return the names that a class declares as fields, or that its methods assign to ``self``."""
    fields = {
        node.target.id
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assigned = {
        node.attr
        for node in ast.walk(definition)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return fields | assigned


@looped("path", product())
def test_module_is_small(path):
    excused = LARGER.get(str(path.relative_to(ROOT)))
    found = excesses(text_of(path), tree_of(path))
    assert [words for words in found if excused is None or not words.startswith(excused)] == []


def test_there_are_modules_to_check():
    assert {path.relative_to(ROOT).parts[0] for path in product()} == {"kvflow", "handshake"}


def test_a_long_module_is_found():
    assert list(excesses("pass\n" * MODULE_LINES_MAX)) == []
    assert list(excesses("pass\n" * (MODULE_LINES_MAX + 1))) == ["the module has 701 lines, more than 700"]


@pytest.mark.parametrize("keyword", ["def", "async def"])
def test_a_long_function_is_found(keyword):
    def function(lines):
        return f"class A:\n    {keyword} f(self):\n" + "        pass\n" * (lines - 1)

    assert list(excesses(function(FUNCTION_LINES_MAX))) == []
    assert list(excesses(function(FUNCTION_LINES_MAX + 1))) == ["f has 71 lines, more than 70"]


def test_a_class_with_many_attributes_is_found():
    fields = "class A:\n" + "".join(f"    f{index}: int\n" for index in range(20)) + "    def f(self):\n"
    few = (
        fields + "        self.a, (self.b, self.c) = 1, (2, 3)\n        self.d: int = 4\n        self.f1 = self.e = 5\n"
    )
    assert list(excesses(few)) == []
    assert list(excesses(few + "        self.one_too_many += 1\n")) == ["A has 26 attributes, more than 25"]


def long_names(source: str) -> list[str]:
    """Return the names of tests that are too long."""
    names = re.findall(r"^\s*(?:async def|def|class) (test\w*)", source, re.MULTILINE | re.IGNORECASE)
    return [name for name in names if len(name) > TEST_NAME_MAX]


def test_names_of_tests_are_short():
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    assert len(paths) > 100
    found = {str(path.relative_to(ROOT)): long_names(path.read_text()) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_long_name_is_found():
    fits, long = "test_" + 65 * "x", "test_" + 66 * "x"
    assert long_names(f"def {fits}(): ...\nasync def {long}(): ...\nclass A:\n    def {long}y(self): ...\n") == [
        long,
        f"{long}y",
    ]
