"""The page of the reference that names every combination; run as a module, it prints it."""

import sys

from .combinations import COMBINATIONS

HEAD = """# Combinations

Pairs of engines whose transfers are tested over NIXL between processes, with a worker for every rank of both sides. Of
each, every byte of every target rank is compared with what the model keeps there, and every byte beside it with what
was there before.

Tests and this table are made from one list. `PYTHONPATH=tests .venv/bin/python -m integration.combination_table` prints
it. A layout is named as in the [glossary](glossary.md): by letters in physical order, and by how keys and values lie.
*Descriptors* is what NIXL sees for one block of every group of a target rank, before neighboring blocks merge: the
fewest and the most of all ranks, where they differ.

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
