"""Strided runs: what one pair of blocks copies, without an address.

Blocks of different sizes on the two sides are cut into *units* of ``gcd`` tokens: a run copies ``nbytes``
contiguous bytes of one unit; unit ``u`` of block ``b`` lies ``b * block_stride + u * unit_stride`` further on.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvflow.transfer.match import ComponentPair

Int64s = npt.NDArray[np.int64]


class Side(Struct, frozen=True):
    """Where a run lies on one side: bytes from the start of a region, for unit 0 of block 0."""

    region: int
    offset: int
    block_stride: int
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
        source: int64, shape (4, runs): region, offset, block stride, unit stride.
        target: int64, shape (4, runs).
    """

    def __init__(self, nbytes: Int64s, source: Int64s, target: Int64s) -> None:
        self.nbytes = nbytes
        self.source = source
        self.target = target

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


def fragments(pair: ComponentPair, unit_tokens: int) -> RunTable:
    """Cut one component into runs of one head of one token each: the finest, always right."""
    heads = pair.first_head + np.arange(pair.num_heads, dtype=np.int64)[:, None]
    tokens = np.arange(unit_tokens, dtype=np.int64)[None, :]
    sides = []
    for part in (pair.source, pair.target):
        offsets = part.offset + (heads - part.first_head) * part.head_stride + tokens * part.token_stride
        columns = np.empty((4, offsets.size), np.int64)
        columns[0] = part.region
        columns[1] = offsets.ravel()
        columns[2] = part.block_stride
        columns[3] = unit_tokens * part.token_stride
        sides.append(columns)
    source, target = sides
    return RunTable(np.full(source.shape[1], pair.target.content_bytes, np.int64), source, target)


def merged(tables: Sequence[RunTable]) -> RunTable:
    """Join runs that are adjacent on both sides and move alike from unit to unit and block to block.

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
        for row in (0, 2, 3):
            joined[1:] &= side[row, :-1] == side[row, 1:]
    starts = np.flatnonzero(~joined)
    return RunTable(np.add.reduceat(nbytes, starts), source[:, starts], target[:, starts])
