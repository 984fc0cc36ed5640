"""Runs join only where both sides are dense and move alike."""

import numpy as np

from kvflow.layout.specs import MLA, Mamba, State
from kvflow.planning.match import ComponentPair, match_groups
from kvflow.planning.runs import Run, RunTable, Side, Units, cut_fragments, merge_runs
from tests.helpers.loops import looped

from .helpers import full, manifest_of


def table(*runs):
    """Rows of (nbytes, source offset, target offset) in region 0, with strides of 1000, 100 and 10 on both sides."""
    columns = np.array(runs, np.int64).T
    strides = np.tile([[1000], [100], [10]], len(runs))
    sides = [np.vstack([np.zeros(len(runs), np.int64), column, strides]) for column in columns[1:]]
    return RunTable(columns[0], *sides)


def shapes(runs):
    return [(run.nbytes, run.source.offset, run.target.offset) for run in runs]


@looped(
    "runs, expected",
    [
        ([(4, 0, 0), (4, 4, 4)], [(8, 0, 0)]),
        ([(4, 4, 4), (4, 0, 0)], [(8, 0, 0)]),  # order of the target, whatever was given
        ([(4, 0, 0), (6, 4, 4), (2, 10, 10)], [(12, 0, 0)]),
        ([(4, 0, 0), (4, 5, 4)], [(4, 0, 0), (4, 5, 4)]),
        ([(4, 0, 0), (4, 4, 5)], [(4, 0, 0), (4, 4, 5)]),
        ([(4, 4, 0), (4, 0, 4)], [(4, 4, 0), (4, 0, 4)]),  # dense on both sides, in another order
    ],
)
def test_neighbors_on_both_sides_join(runs, expected):
    assert shapes(merge_runs([table(*runs)])) == expected


@looped("row", [0, 2, 3, 4])
@looped("side", ["source", "target"])
def test_what_moves_differently_does_not_join(side, row):
    runs = table((4, 0, 0), (4, 4, 4))
    getattr(runs, side)[row, 1] += 1
    assert len(merge_runs([runs])) == 2


def test_tables_of_several_components_join():
    assert shapes(merge_runs([table((4, 0, 0)), table((4, 4, 4))])) == [(8, 0, 0)]


def test_fragments_are_one_head_of_one_token():
    manifest = manifest_of({"a": full(block_size=4, num_kv_heads=2, head_size=8)}, layout="BLNHC", kv="split")
    (group,) = match_groups(manifest, manifest)
    keys, values = group.pairs
    halves = Units(2, 2, 1)
    runs = cut_fragments([keys], halves, halves)
    assert shapes(runs) == [(16, at, at) for at in (0, 32, 16, 48)]
    assert {(run.source.block_stride, run.source.unit_stride) for run in runs} == {(256, 64)}
    [first, *_] = cut_fragments([values], halves, halves)
    assert first == Run(16, Side(0, 128, 256, 0, 64), Side(0, 128, 256, 0, 64))


def test_fragments_of_a_part_start_at_its_heads_on_both_sides():
    specs = {"a": full(block_size=1, num_kv_heads=4, head_size=8)}
    (group,) = match_groups(manifest_of(specs, tp=(1, 2)), manifest_of(specs))
    assert isinstance(group.pairs[0], ComponentPair)
    single = Units(1, 1, 1)
    runs = cut_fragments([group.pairs[0]], single, single)
    assert shapes(runs) == [(16, 0, 64), (16, 32, 96)]
    assert merge_runs([runs]).unit_bytes == 32


@looped(
    "units, offsets",
    [
        (Units(16, 1, 1), [0]),
        (Units(0, 1, 1), [0]),  # a state
        (Units(4, 4, 1), [0, 10, 20, 30]),
        (Units(16, 1, 4), [0, 100, 200, 300]),
        (Units(8, 2, 3), [0, 10, 100, 110, 200, 210]),
    ],
)
def test_units_lie_kernel_block_by_kernel_block(units, offsets):
    kernel_stride, unit_stride = np.array([100, 0]), np.array([10, 0])
    assert units.per_block == len(offsets)
    assert units.offsets(kernel_stride, unit_stride).tolist() == [[offset, 0] for offset in offsets]


@looped(
    "units, strides, step, even",
    [
        (Units(16, 1, 1), (1000, 0, 0), 1000, True),
        (Units(0, 1, 1), (1000, 0, 0), 1000, True),
        (Units(4, 4, 1), (400, 0, 100), 100, True),
        (Units(4, 4, 1), (1000, 0, 100), 100, False),  # something lies between two blocks
        (Units(4, 4, 1), (400, 0, 10), 10, False),  # heads before tokens
        (Units(16, 1, 4), (400, 100, 0), 100, True),
        (Units(16, 1, 4), (1000, 100, 0), 100, False),
        (Units(8, 2, 3), (300, 100, 50), 50, True),
        (Units(8, 2, 3), (300, 100, 10), 10, False),  # even from kernel block to kernel block, but not inside
        (Units(8, 2, 3), (300, 110, 50), 50, False),  # even from block to block, but not inside
        (Units(8, 2, 3), (1000, 100, 50), 50, False),
    ],
)
def test_a_step_holds_throughout_the_pool_only_where_nothing_lies_between(units, strides, step, even):
    """The second run lies as a state does: it never holds for it unless a block is a unit."""
    side = np.array([[0, 0], [0, 7], *([stride, 1] for stride in strides)])
    steps, holds = units.step(side)
    assert (steps[0], holds[0]) == (step, even)
    assert steps[1] == 1
    assert holds[1] == (units.per_block == 1)


def test_tokens_are_always_walked_and_what_touches_on_both_sides_is_not():
    """One head of one token is contiguous; a state may be as a whole."""
    assert walk_of(full(), full()) == (2, 16)
    latent = MLA(block_size=16, head_size=8, dtype="float16")
    assert walk_of(latent, latent) == (2, 16)  # also where tokens touch each other
    state = Mamba(block_size=16, states=(State("ssm", (4, 3, 2), "float32"),))
    assert walk_of(state, state) == (0, 96)
    assert walk_of(state, state, tp=(1, 2)) == (0, 48)
    across = Mamba(block_size=16, states=(State("conv", (3, 4), "float16", shard_axis=1),))
    assert walk_of(across, across) == (0, 24)
    assert walk_of(across, across, tp=(1, 2)) == (1, 4)  # half of each row: the rows are apart on the source


def walk_of(source, target, tp=(0, 1)):
    (group,) = match_groups(manifest_of({"a": source}), manifest_of({"a": target}, tp=tp))
    return group.pairs[0].walk
