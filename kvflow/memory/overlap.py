"""Check that no byte belongs to two blocks, or to two components of one group, in memory that an engine laid out.

Each tensor of each layer is an affine map. First it is checked alone: every stride must be at least the extent below
it. It is then cut at the axes outside of blocks into *pieces*: runs of bytes that recur every block stride. Pieces
whose bytes interleave must recur at one stride, S. Modulo S, each run of block ``b`` is an interval, with the number of
its row counted from ``b``. Two pieces share a byte only where their intervals intersect, and then at one block id only
if the rows are equal. So two sorts of one interval per run decide for all block ids.

The check refuses every overlap. It also refuses pieces that interleave at different strides, and maps whose axes
interleave, even if they share no byte. No known engine lays out memory so.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from msgspec import Struct

from kvflow.errors import SpecInvalid
from kvflow.ids import Int64s

PIECES_MAX = 1 << 12  # of one tensor: layers, keys and values, and heads outside of blocks
RUNS_MAX = 1 << 16  # of one piece: 16 per token and head of a large block; if there are more, gaps count as occupied
ONE_BLOCK = 1 << 62  # the stride of a pool of one block, in which nothing recurs


class LiveBytes(Struct, frozen=True):
    """The bytes of one layer in one tensor: from ``offset`` in its region on; axes are (length, stride in bytes)."""

    path: str
    group: int
    region: int
    offset: int
    block_stride: int
    axes: tuple[tuple[int, int], ...]
    item_bytes: int


class _Piece(Struct, frozen=True):
    """Runs that recur every block stride; they begin at ``start + lows``, on an axis on which regions do not touch."""

    owner: int
    start: int
    lows: Int64s
    run_bytes: int


def check_overlaps(live: Sequence[LiveBytes], *, num_blocks: int, region_bytes: Sequence[int]) -> None:
    """Check that no byte belongs to two blocks, or to two components in one block of one group.

    Layers of different groups may share the bytes of a block id. ``region_bytes`` are the lengths of the regions.

    Raises:
        SpecInvalid: names the layers, and the strides or blocks that overlap.
    """
    bases = np.cumsum([0, *region_bytes])
    stride = np.array([each.block_stride if num_blocks > 1 else ONE_BLOCK for each in live], np.int64)
    pieces = [
        piece
        for owner, each in enumerate(live)
        for piece in _pieces(owner, each, num_blocks, int(bases[each.region]) + each.region)
    ]
    cluster_start = _clusters(live, pieces, stride, num_blocks)
    counts = [len(piece.lows) for piece in pieces]
    owner = np.repeat([piece.owner for piece in pieces], counts)
    base = np.repeat(cluster_start, counts)
    low = np.concatenate([piece.start + piece.lows for piece in pieces]) - base
    row, low = np.divmod(low, stride[owner])
    high = low + np.repeat([piece.run_bytes for piece in pieces], counts)
    # A run that reaches into the next row is two intervals.
    wraps = high > stride[owner]
    owner = np.concatenate([owner, owner[wraps]])
    base = np.concatenate([base, base[wraps]])
    rest = high[wraps] - stride[owner[: len(wraps)]][wraps]
    row = np.concatenate([row, row[wraps] + 1])
    low = np.concatenate([low, np.zeros_like(rest)]) + base
    high = np.concatenate([np.where(wraps, stride[owner[: len(wraps)]], high), rest]) + base
    _check_groups(live, owner, low, high, row)
    _check_blocks(live, owner, low, high, row)


def _pieces(owner: int, each: LiveBytes, num_blocks: int, base: int) -> Iterator[_Piece]:
    """Cut a layer's bytes in a tensor at the axes outside of blocks, and merge dense parts."""
    axes = sorted((stride, extent) for extent, stride in each.axes if extent > 1)
    _check_nested(each, axes, num_blocks)
    inner = [axis for axis in axes if num_blocks == 1 or axis[0] < each.block_stride]
    outer = axes[len(inner) :]
    run, lows = each.item_bytes, np.zeros(1, np.int64)
    while inner and (inner[0][0] == run or math.prod(extent for _, extent in inner) > RUNS_MAX):
        stride, extent = inner.pop(0)
        run += (extent - 1) * stride
    for stride, extent in inner:
        lows = (np.arange(extent, dtype=np.int64)[:, None] * stride + lows).ravel()
    if math.prod(extent for _, extent in outer) > PIECES_MAX:
        raise SpecInvalid(
            f"{each.path}: stride of blocks is {each.block_stride} bytes, below those of {outer}: expected at most "
            f"{PIECES_MAX} pieces outside of blocks",
            remedy="Let the tokens of a block lie together.",
        )
    for steps in product(*(range(0, extent * stride, stride) for stride, extent in outer)):
        yield _Piece(owner, base + each.offset + sum(steps), lows, run)


def _check_nested(each: LiveBytes, axes: Sequence[tuple[int, int]], num_blocks: int) -> None:
    """Check that each stride, including that of blocks, is at least the extent below it."""
    block = [(each.block_stride, num_blocks)] if num_blocks > 1 else []
    reach = each.item_bytes
    for stride, extent in sorted([*axes, *block]):
        if stride < reach:
            what = "blocks" if (stride, extent) in block else f"an axis of {extent}"
            raise SpecInvalid(
                f"{each.path}: stride of {what} is {stride} bytes, but {reach} bytes lie below it: expected at least "
                f"{reach}",
                remedy="Give tensors whose elements are all at different addresses, not expanded or overlapping ones.",
            )
        reach += (extent - 1) * stride


def _clusters(live: Sequence[LiveBytes], pieces: Sequence[_Piece], stride: Int64s, num_blocks: int) -> Int64s:
    """Return for each piece the start of the first piece that it interleaves with, directly or through others."""
    start = np.array([piece.start for piece in pieces], np.int64)
    owner = np.array([piece.owner for piece in pieces], np.int64)
    reach = np.array([piece.lows[-1] + piece.run_bytes for piece in pieces], np.int64)
    end = start + reach + (stride[owner] * (num_blocks - 1) if num_blocks > 1 else 0)
    order = np.argsort(start, kind="stable")
    first = _island_firsts(start[order], end[order])
    differs = np.flatnonzero(stride[owner[order]] != stride[owner[order[first]]])
    if differs.size:
        ours, theirs = live[owner[order[differs[0]]]], live[owner[order[first[differs[0]]]]]
        raise SpecInvalid(
            f"{ours.path}: lies among the bytes of {theirs.path}, but its blocks are {ours.block_stride} bytes apart: "
            f"expected {theirs.block_stride}",
            remedy="Let tensors that share memory have one block stride, or memory of their own.",
        )
    starts = np.empty_like(start)
    starts[order] = start[order[first]]
    return starts


def _island_firsts(low: Int64s, high: Int64s) -> Int64s:
    """Return for each interval, sorted by start, the first interval that it is connected with by overlaps."""
    reached = np.maximum.accumulate(high)
    begins = np.ones(len(low), bool)
    begins[1:] = low[1:] >= reached[:-1]
    firsts: Int64s = np.flatnonzero(begins)[np.cumsum(begins) - 1]
    return firsts


def _check_groups(live: Sequence[LiveBytes], owner: Int64s, low: Int64s, high: Int64s, row: Int64s) -> None:
    """Check that the intervals of one group are disjoint: after sorting, none begins before its neighbor ends."""
    group = np.array([each.group for each in live], np.int64)[owner]
    order = np.lexsort((low, group))
    before, after = order[:-1], order[1:]
    meets = np.flatnonzero((group[before] == group[after]) & (high[before] > low[after]))
    if meets.size:
        ours, theirs = after[meets[0]], before[meets[0]]
        apart = int(row[ours] - row[theirs])
        raise _meeting(live[owner[ours]], live[owner[theirs]], apart, "a layer of its own group: expected none")


def _check_blocks(live: Sequence[LiveBytes], owner: Int64s, low: Int64s, high: Int64s, row: Int64s) -> None:
    """Check that intervals that intersect have the same row number. If all connected ones agree, all pairs agree."""
    order = np.argsort(low, kind="stable")
    first = order[_island_firsts(low[order], high[order])]
    for ours in order[row[order] != row[first]]:
        meets = np.flatnonzero((low < high[ours]) & (low[ours] < high) & (row != row[ours]))
        if meets.size:
            apart = int(row[ours] - row[meets[0]])
            whose = "a layer of another group: expected those of the same block only"
            raise _meeting(live[owner[ours]], live[owner[meets[0]]], apart, whose)


def _meeting(ours: LiveBytes, theirs: LiveBytes, apart: int, whose: str) -> SpecInvalid:
    """Return the error that names the layers and blocks that share bytes. Our row is ``apart`` rows after theirs."""
    block = max(0, -apart)
    return SpecInvalid(
        f"{ours.path}: block {block} has bytes of block {block + apart} of {theirs.path}, {whose}",
        remedy="Give layers of one group memory of their own; other groups may share it block by block.",
    )
