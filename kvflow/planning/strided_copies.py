"""Turn runs into strided copies: runs at regular distances on both sides become one strided copy.

A staging buffer is scattered with as few local copies as possible, because each copy costs as much as some KiB. The
rows of a token-major page, its keys and values, and its layers become axes of one copy if they are evenly spaced.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvflow.errors import PlanUnsound
from kvflow.planning.runs import Int64s, RunTable

AXES_MAX = 6
"""Axes of one copy around its contiguous bytes: tokens, heads, keys and values, layers, and two spare ones."""

RUNS_MAX = 1 << 16
"""Most runs of one unit. Finding those at even distances, and proving them, takes about half a microsecond each."""

FOLDED_MAX = 8192
"""Most stretches of runs at even distances: folding takes 7 us each. 128 layers of 32 heads have this many."""

COPIES_MAX = 512
"""Most copies of one unit. Proving one takes 70 us. For every unit, each copy takes some us of the read thread."""

FIXED = 7
"""Number of columns before those of the axes, see ``Scatter``."""

COLUMNS = FIXED + 3 * AXES_MAX


class TooManyCopies(Exception):
    """A unit cannot be scattered with few copies. The text says how many it would take."""


class Scatter(Struct, frozen=True, eq=False):
    """The copies from a staging buffer to the target.

    Attributes:
        table: int64, shape (copies, 25). The columns of each copy: bytes of one contiguous piece; offset of place 0 in
            the buffer; bytes between places; address of unit 0 in the target; bytes between the target's blocks, kernel
            blocks and units; and for each of six axes its count, and the bytes between its elements in the buffer and
            in the target. Unused axes count 1.
        places: units that a buffer holds.
        units: the target's numbers of blocks, kernel blocks in a block, and units in a kernel block.
    """

    table: npt.NDArray[np.int64]
    places: int
    units: tuple[int, int, int]


@dataclass(slots=True, frozen=True)
class _Item:
    """Runs that form one copy: the values that they share, the start on both sides, and the axes."""

    shared: tuple[int, ...]
    source: int
    target: int
    axes: tuple[tuple[int, int, int], ...] = ()


class StridedCopies:
    """The strided copies of one staged group, without addresses. Raises ``TooManyCopies``.

    Attributes:
        table: as ``Scatter.table``, with offsets in regions instead of addresses in the target.
        region: int64, shape (copies,): region of each copy in the target.
    """

    def __init__(self, scatter: RunTable) -> None:
        if len(scatter) > RUNS_MAX:
            raise TooManyCopies(f"a unit has {len(scatter):,} runs (limit {RUNS_MAX:,})")
        items = _folded_runs(_columns(scatter))
        for _ in range(AXES_MAX - 1):
            items = _folded(items)
        if len(items) > COPIES_MAX:
            raise TooManyCopies(f"a unit takes {len(items):,} copies (limit {COPIES_MAX:,})")
        self.region: Int64s = np.array([item.shared[2] for item in items], np.int64)
        self.table: Int64s = np.array([_row(item) for item in items], np.int64)

    def __len__(self) -> int:
        return len(self.table)

    def prove(self, scatter: RunTable) -> None:
        """Check that the expanded copies are exactly the runs, in order. Raises ``PlanUnsound``."""
        pieces = [(_opened(row, int(region))) for row, region in zip(self.table, self.region, strict=True)]
        opened = np.concatenate(pieces, axis=1)
        if opened.shape != _columns(scatter).shape or np.any(opened != _columns(scatter)):
            raise PlanUnsound("the strided copies of a staged read are not its runs")


def _folded_runs(columns: Int64s) -> list[_Item]:
    """Return items of at most one axis, with one step of Python per item. Raises: TooManyCopies."""
    count = columns.shape[1]
    steps = np.diff(columns[6:])
    joins = np.all(columns[:6, 1:] == columns[:6, :-1], axis=0) & np.all(steps >= 0, axis=0)
    goes_on = joins[1:] & joins[:-1] & np.all(steps[:, 1:] == steps[:, :-1], axis=0)
    ends = np.append(np.flatnonzero(~goes_on) + 2, count)  # a stretch of even steps ends before these runs
    stops = np.where(joins, ends[np.searchsorted(ends, np.arange(2, count + 1))], np.arange(1, count)).tolist()
    starts, at = [0], 0
    while at < count - 1 and (at := stops[at]) < count:
        starts.append(at)
    if len(starts) > FOLDED_MAX:
        raise TooManyCopies(f"a unit has {len(starts):,} irregular runs (limit {FOLDED_MAX:,})")
    counts = np.diff(starts, append=count).tolist()
    firsts = columns[:, starts].T.tolist()
    axes = np.append(steps, [[0], [0]], axis=1)[:, starts].T.tolist()
    return [
        _Item(tuple(first[:6]), first[6], first[7], ((number, *step),) if number > 1 else ())
        for first, number, step in zip(firsts, counts, axes, strict=True)
    ]


def _folded(items: list[_Item]) -> list[_Item]:
    """Join neighbors that share all values and have one distance on both sides. Every item gets a new axis, or none.

    The search is greedy: runs are sorted by target, so the innermost distance repeats before it changes.
    """
    joined: list[_Item] = []
    at = 0
    while at < len(items):
        first, end = items[at], at + 1
        steps = (0, 0)
        while end < len(items) and _can_join(first, items[end]):
            found = (items[end].source - items[end - 1].source, items[end].target - items[end - 1].target)
            if found[0] < 0 or found[1] < 0 or (end > at + 1 and found != steps):
                break
            steps, end = found, end + 1
        axes = ((end - at, *steps), *first.axes) if end > at + 1 else first.axes
        joined.append(_Item(first.shared, first.source, first.target, axes))
        at = end
    return joined


def _can_join(one: _Item, other: _Item) -> bool:
    return one.shared == other.shared and one.axes == other.axes


def _columns(scatter: RunTable) -> Int64s:
    """Return the columns of runs: what the runs of a copy share, then offsets in the buffer and in the target."""
    source, target = scatter.source, scatter.target
    return np.stack([scatter.nbytes, source[2], *target[[0, 2, 3, 4]], source[1], target[1]])


def _opened(row: Int64s, region: int) -> Int64s:
    """Return the runs of one copy, as ``_columns`` does."""
    axes = row[FIXED:].reshape(AXES_MAX, 3)
    index = np.indices(axes[:, 0].tolist(), np.int64).reshape(AXES_MAX, -1)
    source, target = row[1] + axes[:, 1] @ index, row[3] + axes[:, 2] @ index
    shared = np.array([row[0], row[2], region, *row[4:FIXED]], np.int64)
    return np.concatenate([np.repeat(shared[:, None], index.shape[1], axis=1), [source, target]])


def _row(item: _Item) -> list[int]:
    nbytes, slot_stride, _, *strides = item.shared
    axes = [*item.axes, *[(1, 0, 0)] * (AXES_MAX - len(item.axes))]
    return [nbytes, item.source, slot_stride, item.target, *strides, *(number for axis in axes for number in axis)]


def room_left(room: Int64s, counts: Int64s, strides: Int64s) -> Int64s:
    """Return the bytes that remain of ``room`` after every axis was walked to its end; -1 if an axis leaves it.

    No term may overflow, so nothing is multiplied before it is known to fit. All are int64: ``room`` of shape
    (copies,), ``counts``, at least 1, and ``strides``, not negative, of shape (copies, axes).
    """
    for axis in range(counts.shape[1]):
        steps, stride = counts[:, axis] - 1, strides[:, axis]
        fits = (steps == 0) | ((room >= 0) & (stride <= room // np.maximum(steps, 1)))
        room = np.where(fits, room - np.where(fits, stride, 0) * steps, -1)
    return room
