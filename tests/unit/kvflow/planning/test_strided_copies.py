"""Runs at even distances become axes of one strided copy."""

import numpy as np
import pytest

from kvflow.layout.component import ADDRESS_MAX
from kvflow.planning.runs import RunTable
from kvflow.planning.staging import (
    AXES_MAX,
    COLUMNS,
    COPIES_MAX,
    FIXED,
    FOLDED_MAX,
    RUNS_MAX,
    CannotStage,
    StridedCopies,
    room_left,
)
from tests.helpers.loops import looped


def table_of(*runs, slot_stride=4096, region=0):
    """Runs of (nbytes, offset in the buffer, offset in the target)."""
    nbytes = np.array([nbytes for nbytes, _, _ in runs], np.int64)
    nothing = np.zeros(len(runs), np.int64)
    source = np.stack([nothing, [source for _, source, _ in runs], nothing + slot_stride, nothing, nothing])
    target = np.stack([nothing + region, [target for _, _, target in runs], nothing + 777, nothing + 77, nothing + 7])
    return RunTable(nbytes, source, target)


def axes_of(boxes):
    """Axes of more than one element, of each box."""
    return [[tuple(row[at : at + 3]) for at in range(FIXED, COLUMNS, 3) if row[at] > 1] for row in boxes.table.tolist()]


def moved(boxes):
    """Every piece of every box: nbytes, offset in the buffer, offset in the target."""
    pieces = []
    for row in boxes.table.tolist():
        axes = [row[at : at + 3] for at in range(FIXED, COLUMNS, 3)]
        for index in np.ndindex(*(count for count, _, _ in axes)):
            source, target = (sum(i * axis[side] for i, axis in zip(index, axes, strict=True)) for side in (1, 2))
            pieces.append((row[0], row[1] + source, row[3] + target))
    return sorted(pieces)


@looped(
    "runs, axes",
    [
        ([(8, 0, 0)], [[]]),
        ([(8, 0, 0), (8, 16, 8)], [[(2, 16, 8)]]),
        ([(8, 16 * i, 8 * i) for i in range(5)], [[(5, 16, 8)]]),
        # tokens inside layers
        ([(8, 1000 * i + 16 * j, 500 * i + 8 * j) for i in range(3) for j in range(4)], [[(3, 1000, 500), (4, 16, 8)]]),
        # a piece of another length ends a box
        ([(8, 0, 0), (8, 16, 8), (4, 32, 16), (4, 40, 20)], [[(2, 16, 8)], [(2, 8, 4)]]),
        # uneven distances on one side
        ([(8, 0, 0), (8, 16, 8), (8, 40, 16)], [[(2, 16, 8)], []]),
        # backwards in the buffer
        ([(8, 100, 0), (8, 50, 8), (8, 0, 16)], [[], [], []]),
    ],
)
def test_runs_at_even_distances_are_one_box(runs, axes):
    boxes = StridedCopies(table_of(*runs))
    assert axes_of(boxes) == axes
    assert moved(boxes) == sorted(runs)


def test_a_box_keeps_what_leads_from_unit_to_unit():
    (row,) = StridedCopies(table_of((8, 0, 0), (8, 16, 8), slot_stride=4096, region=3)).table.tolist()
    assert row[:FIXED] == [8, 0, 4096, 0, 777, 77, 7]
    assert StridedCopies(table_of((8, 0, 0), region=3)).region.tolist() == [3]


def regular(count):
    """Runs at even distances."""
    return [(8, 16 * index, 8 * index) for index in range(count)]


def uneven(count):
    """Pairs of runs, each pair at a distance from the next that differs from all others: two pairs make one box."""
    return [(8, 100 * index * index + 16 * half, 64 * index + 8 * half) for index in range(count) for half in (0, 1)]


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (regular(RUNS_MAX + 1), "has 65,537 runs .limit 65,536"),
        (uneven(FOLDED_MAX + 1), "has 8,193 irregular runs .limit 8,192"),
        (uneven(2 * COPIES_MAX + 1), "takes 513 copies .limit 512"),
    ],
    ids=["runs", "stretches", "copies"],
)
def test_what_would_take_long_to_fold_or_to_prove_is_refused(runs, words):
    with pytest.raises(CannotStage, match=words):
        StridedCopies(table_of(*runs))


def test_as_much_as_the_bounds_allow_is_folded():
    assert axes_of(StridedCopies(table_of(*regular(RUNS_MAX)))) == [[(RUNS_MAX, 16, 8)]]
    assert len(StridedCopies(table_of(*uneven(2 * COPIES_MAX)))) == COPIES_MAX


def test_more_axes_than_there_are_columns_make_more_boxes():
    axes = AXES_MAX + 2
    runs = [
        (1, sum(4**a for a in range(axes) if n >> a & 1), sum(3**a for a in range(axes) if n >> a & 1))
        for n in range(1 << axes)
    ]
    boxes = StridedCopies(table_of(*runs))
    assert len(boxes) == 4
    assert moved(boxes) == sorted(runs)


@looped(
    "room, axes, left",
    [
        (0, [(1, 0)], 0),
        (100, [(5, 25)], 0),
        (100, [(5, 26)], -1),
        (100, [(2, 60), (2, 40)], 0),
        (100, [(2, 60), (2, 41)], -1),
        (-1, [(1, 5)], -1),
        (100, [(1 << 62, 1 << 62)], -1),
        (ADDRESS_MAX, [(2, ADDRESS_MAX)], 0),
        (ADDRESS_MAX, [(3, ADDRESS_MAX)], -1),
        (ADDRESS_MAX, [(2, ADDRESS_MAX), (2, 1)], -1),
        (100, [(1, ADDRESS_MAX)], 100),
    ],
)
def test_room_is_counted_without_overflow(room, axes, left):
    counts, strides = (np.array([[axis[side] for axis in axes]], np.int64) for side in (0, 1))
    assert room_left(np.array([room], np.int64), counts, strides).tolist() == [left]
