"""Runs join only where both sides are dense and move alike."""

import numpy as np
import pytest

from kvflow.transfer.match import ComponentPair, match_groups
from kvflow.transfer.runs import Run, RunTable, Side, Units, fragments, merged

from .helpers import full, manifest_of


def table(*runs):
    """Rows of (nbytes, source offset, target offset) in region 0, with strides of 1000, 100 and 10 on both sides."""
    columns = np.array(runs, np.int64).T
    strides = np.tile([[1000], [100], [10]], len(runs))
    sides = [np.vstack([np.zeros(len(runs), np.int64), column, strides]) for column in columns[1:]]
    return RunTable(columns[0], *sides)


def shapes(runs):
    return [(run.nbytes, run.source.offset, run.target.offset) for run in runs]


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([(4, 0, 0), (4, 4, 4)], [(8, 0, 0)]),
        ([(4, 4, 4), (4, 0, 0)], [(8, 0, 0)]),  # order of the target, whatever was given
        ([(4, 0, 0), (6, 4, 4), (2, 10, 10)], [(12, 0, 0)]),
        ([(4, 0, 0), (4, 5, 4)], [(4, 0, 0), (4, 5, 4)]),
        ([(4, 0, 0), (4, 4, 5)], [(4, 0, 0), (4, 4, 5)]),
        ([(4, 4, 0), (4, 0, 4)], [(4, 4, 0), (4, 0, 4)]),  # dense on both sides, in another order
    ],
)
def test_neighbours_on_both_sides_join(runs, expected):
    assert shapes(merged([table(*runs)])) == expected


@pytest.mark.parametrize("row", [0, 2, 3, 4])
@pytest.mark.parametrize("side", ["source", "target"])
def test_what_moves_differently_does_not_join(side, row):
    runs = table((4, 0, 0), (4, 4, 4))
    getattr(runs, side)[row, 1] += 1
    assert len(merged([runs])) == 2


def test_tables_of_several_components_join():
    assert shapes(merged([table((4, 0, 0)), table((4, 4, 4))])) == [(8, 0, 0)]


def test_fragments_are_one_head_of_one_token():
    manifest = manifest_of({"a": full(block_size=4, num_kv_heads=2, head_size=8)}, layout="BLNHC", kv="split")
    (group,) = match_groups(manifest, manifest)
    keys, values = group.pairs
    halves = Units(2, 2, 1)
    runs = fragments(keys, halves, halves)
    assert shapes(runs) == [(16, at, at) for at in (0, 32, 16, 48)]
    assert {(run.source.block_stride, run.source.unit_stride) for run in runs} == {(256, 64)}
    assert next(iter(fragments(values, halves, halves))) == Run(16, Side(0, 128, 256, 0, 64), Side(0, 128, 256, 0, 64))


def test_fragments_of_a_part_start_at_its_heads_on_both_sides():
    specs = {"a": full(block_size=1, num_kv_heads=4, head_size=8)}
    (group,) = match_groups(manifest_of(specs, tp=(1, 2)), manifest_of(specs))
    assert isinstance(group.pairs[0], ComponentPair)
    single = Units(1, 1, 1)
    runs = fragments(group.pairs[0], single, single)
    assert shapes(runs) == [(16, 0, 64), (16, 32, 96)]
    assert merged([runs]).unit_bytes == 32
