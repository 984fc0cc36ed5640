"""Strided runs: the copies of one pair of blocks, without addresses.

If the kernel blocks of both sides differ, both are cut into *units* of ``gcd`` tokens, which also divide the contiguous
tokens of a stripe. A run copies ``nbytes`` contiguous bytes of one unit. Unit ``u`` of kernel block ``r`` of block
``b`` begins ``b * block_stride + r * kernel_stride + u * unit_stride`` bytes after unit 0. A state is one unit.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import force_setattr

from kvflow.errors import counted
from kvflow.ids import Int64s
from kvflow.layout.shards import ALL_TOKENS, Stripe
from kvflow.planning.match import ComponentPair

Bools = npt.NDArray[np.bool_]

UNITS_MAX = 1 << 22  # of one list. 4 M units of 16 tokens are 64 M tokens, and take 100 MiB while they are paired


class Side(Struct, frozen=True):
    """Where unit 0 of block 0 lies on one side, in bytes from the start of a region. Unused strides are 0."""

    region: int
    offset: int
    block_stride: int
    kernel_stride: int
    unit_stride: int


class Run(Struct, frozen=True):
    """One contiguous piece that each pair of units copies."""

    nbytes: int
    source: Side
    target: Side


class RunTable:
    """Runs as columns, sorted by target region and offset.

    Attributes:
        nbytes: int64, shape (runs,).
        source: int64, shape (5, runs): region, offset, block stride, kernel stride, unit stride.
        target: int64, shape (5, runs).
    """

    def __init__(self, nbytes: Int64s, source: Int64s, target: Int64s) -> None:
        self.nbytes = nbytes
        self.source = source
        self.target = target

    def __repr__(self) -> str:
        """Return the number of runs."""
        return f"<RunTable: {counted(len(self), 'run')}>"

    def __len__(self) -> int:
        return len(self.nbytes)

    def __getitem__(self, index: int) -> Run:
        source = Side(*(int(value) for value in self.source[:, index]))
        target = Side(*(int(value) for value in self.target[:, index]))
        return Run(int(self.nbytes[index]), source, target)

    def __iter__(self) -> Iterator[Run]:
        return (self[index] for index in range(len(self)))

    @property
    def unit_bytes(self) -> int:
        """Bytes that one pair of units copies."""
        return int(self.nbytes.sum())


class Units(Struct, frozen=True):
    """How the blocks of one side are cut; 0 tokens for a state. ``per_block`` follows from the other fields."""

    tokens: int
    per_kernel_block: int
    kernel_blocks: int
    stripe: Stripe = ALL_TOKENS
    per_block: int = 0

    def __post_init__(self) -> None:
        force_setattr(self, "per_block", self.per_kernel_block * self.kernel_blocks)

    def offsets(self, kernel_stride: Int64s, unit_stride: Int64s) -> Int64s:
        """Return the offset of each unit of a block from unit 0, in bytes, shape (units, runs)."""
        unit = np.arange(self.per_block, dtype=np.int64)[:, None]
        inside = unit % self.per_kernel_block * unit_stride
        offsets: Int64s = unit // self.per_kernel_block * kernel_stride + inside
        return offsets

    def step(self, side: Int64s) -> tuple[Int64s, Bools]:
        """Return the bytes from each unit to the next, and the runs for which this is constant in the pool."""
        _, _, block_stride, kernel_stride, unit_stride = side
        step = unit_stride if self.per_kernel_block > 1 else kernel_stride if self.kernel_blocks > 1 else block_stride
        even = np.ones(len(step), bool)
        if self.kernel_blocks > 1 and self.per_kernel_block > 1:
            even &= kernel_stride == self.per_kernel_block * step
        even &= block_stride == self.per_block * step
        return step, even


def group_by_shape(pairs: Sequence[ComponentPair]) -> list[list[ComponentPair]]:
    """Divide pairs into lists of equal lengths and strides, so that one walk over coordinates serves a whole list."""
    found: dict[object, list[ComponentPair]] = {}
    for pair in pairs:
        source, target = pair.source, pair.target
        axes = (target.shard_axis, target.token_axis, target.item_bytes)
        key = (pair.count, target.extents, axes, source.strides, target.strides)
        found.setdefault(key, []).append(pair)
    return list(found.values())


def cut_fragments(pairs: Sequence[ComponentPair], source_units: Units, target_units: Units) -> RunTable:
    """Cut components of one shape into the finest runs that are contiguous on both sides."""
    walked, nbytes = pairs[0].walk
    extents = pairs[0].extents(target_units.tokens)[:walked]
    index = np.indices(extents, np.int64).reshape(walked, math.prod(extents))
    sides = []
    for parts, units in (
        ([pair.source for pair in pairs], source_units),
        ([pair.target for pair in pairs], target_units),
    ):
        unit_stride = units.tokens * parts[0].strides[parts[0].token_axis] if units.per_kernel_block > 1 else 0
        firsts = [
            (
                part.region,
                pair.start(part),
                part.block_stride,
                part.kernel_stride if units.kernel_blocks > 1 else 0,
                unit_stride,
            )
            for pair, part in zip(pairs, parts, strict=True)
        ]
        # Use broadcasting, which lets other threads run; ``repeat`` and ``tile`` do not.
        columns = np.empty((len(firsts[0]), len(pairs), index.shape[1]), np.int64)
        columns[...] = np.array(firsts, np.int64).T[:, :, None]
        columns[1] += np.array(parts[0].strides[:walked], np.int64) @ index
        sides.append(columns.reshape(len(columns), -1))
    source, target = sides
    return RunTable(np.full(source.shape[1], nbytes, np.int64), source, target)


def merge_runs(tables: Sequence[RunTable]) -> RunTable:
    """Join runs that are adjacent on both sides and have equal strides between units and blocks.

    This one rule merges across content, tokens, heads, components and layers.
    """
    nbytes = np.concatenate([table.nbytes for table in tables])
    source = np.concatenate([table.source for table in tables], axis=1)
    target = np.concatenate([table.target for table in tables], axis=1)
    order = np.lexsort((target[1], target[0]))
    nbytes, source, target = nbytes[order], source[:, order], target[:, order]
    joined = np.ones(len(nbytes), bool)
    joined[0] = False
    for side in (source, target):
        joined[1:] &= side[1, :-1] + nbytes[:-1] == side[1, 1:]
        for row in (0, 2, 3, 4):
            joined[1:] &= side[row, :-1] == side[row, 1:]
    starts = np.flatnonzero(~joined)
    return RunTable(np.add.reduceat(nbytes, starts), source[:, starts], target[:, starts])
