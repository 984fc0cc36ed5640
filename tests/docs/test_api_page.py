"""The API reference is generated from the docstrings of the public names, and every public name has one."""

import inspect

import pytest

from tests.helpers.loops import looped

from .api_page import CALLED, HEADS, REFERENCE, markdown, members, page, public_names


@pytest.mark.parametrize("file", HEADS)
def test_a_page_is_current(file):
    """If it differs: ``python -m tests.docs.api_page``."""
    assert (REFERENCE / file).read_text() == page(file)


def test_the_page_of_what_an_engine_calls_says_how_many_names_it_has():
    assert public_names().keys() >= CALLED
    assert f"The {len(CALLED)} names" in HEADS["api.md"]


@looped("name", sorted(public_names()))
def test_every_public_name_and_method_has_a_docstring(name):
    value = public_names()[name]
    if inspect.isclass(value) or inspect.isroutine(value):
        assert inspect.getdoc(value)
    if inspect.isclass(value):
        undocumented = [
            member
            for base in value.__mro__
            if base.__module__.startswith("kvflow")
            for member, found in vars(base).items()
            if not member.startswith("_") and inspect.isroutine(found) and not inspect.getdoc(found)
        ]
        assert undocumented == []
        assert all(not member.startswith("_") for member, _ in members(value))


def test_docstrings_become_markdown():
    doc = "Return ``x``.\n\nArgs:\n    a, b: both\n        of them < 3.\n    c: one.\n\nThread: any."
    assert [line for line in markdown(doc) if line] == [
        "Return `x`.",
        "**Args**",
        "- `a`, `b`: both of them \\< 3.",
        "- `c`: one.",
        "**Thread:** any.",
    ]
