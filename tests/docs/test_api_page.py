"""The API reference is generated from the docstrings of the public names, and every public name has one."""

import inspect

import pytest

import kvflow

from .api_page import PAGE, markdown, members, page, public_names


def test_the_page_is_current():
    """If it differs: ``python -m tests.docs.api_page``."""
    assert PAGE.read_text() == page()


def test_every_public_name_has_an_entry():
    entries = {line.removeprefix("### ") for line in PAGE.read_text().splitlines() if line.startswith("### ")}
    modules = {name for name in kvflow.__all__ if inspect.ismodule(getattr(kvflow, name))}
    assert entries >= set(kvflow.__all__) - modules - {"__version__"}


@pytest.mark.parametrize("name", sorted(public_names()))
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
