"""The page of the reference that names every combination; run as a module, it prints it."""

import sys

from .combinations import COMBINATIONS

HEAD = """# Combinations

The transfers of these pairs of engines are tested over NIXL between processes, with a worker for every rank of both
sides. Each test compares every byte of every target rank with what the model keeps there, and every other byte with
its earlier value.

Tests and table come from one list, which `PYTHONPATH=tests .venv/bin/python -m integration.combination_table` prints.
The [glossary](glossary.md#layouts) explains the names of layouts. *Descriptors* is the number that NIXL sees for one
block of every group of a target rank, before neighboring blocks merge: the minimum and maximum over all ranks, if
they differ.

| combination | source | target | shows | descriptors |
|---|---|---|---|---|
"""


def page():
    """Return the whole page."""
    rows = []
    for name, each in COMBINATIONS.items():
        low, high = each.descriptors_per_block()
        count = f"{low}" if low == high else f"{low} to {high}"
        rows.append(f"| {name} | {each.source} | {each.target} | {each.shows} | {count} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
