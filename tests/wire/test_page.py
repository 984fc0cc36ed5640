"""The page of the wire shows vectors, names the versions, and is short enough to be read."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import fenced
from tests.wire.test_vectors import VERSIONS
from tests.wire.vectors import GOLDEN

PAGE = "docs/reference/wire.md"
TEXT = (Path(__file__).parents[2] / PAGE).read_text()
WORDS_MAX = 5000
VECTORS = "".join(file.read_text() for file in sorted(GOLDEN.glob("*.json")))
SECTIONS = ["control channel", "manifest", "ticket", "Leases and epochs", "Questions", "TCP plane"]


def examples():
    """Yield the bytes of each example: lines of hexadecimal digits, each with a remark after three spaces or more."""
    for block in fenced(PAGE):
        for example in block.text.split("\n\n"):
            columns = [re.split(r" {3,}", line.strip())[0].replace(" ", "") for line in example.splitlines()]
            if all(re.fullmatch("[0-9a-f]{4,}", column) for column in columns):
                yield "".join(columns)


@pytest.mark.parametrize("example", list(examples()), ids=lambda example: example[:16])
def test_an_example_is_a_vector(example):
    assert example in VECTORS


def test_each_section_has_an_example():
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    for name in SECTIONS:
        [section] = [each for each in sections if name in each.partition("\n")[0]]
        assert "\nExample" in section, name
    assert len([*examples()]) >= 12


def test_it_names_the_versions():
    for name, version in VERSIONS.items():
        assert re.search(rf"^\| {name} \| `?{version}`? \|", TEXT, re.MULTILINE), name


def test_it_names_every_file_of_vectors():
    assert [file.name for file in GOLDEN.glob("*.json") if f"`{file.name}`" not in TEXT] == []


def test_it_is_short():
    assert len(TEXT.split()) <= WORDS_MAX
