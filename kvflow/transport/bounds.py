"""Check every number that reaches the data plane, and merge descriptors as NIXL does. Pure.

NIXL's own bounds checks have holes: it accepts zero lengths, and its sums wrap around 2**64. Whatever passes
here can be added up in int64 without overflow. What the peer registered is for its manifest and NIXL to tell.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvflow.layout.region import ADDRESS_MAX, Region
from kvflow.transport.base import Read

INDEX_MAX = (1 << 31) - 1
"""Descriptors are numbered by int32."""

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Intps = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]


class OutOfBounds(Exception):
    """A row, an index or a cut cannot be used; the text says which and why."""


class Rows(Struct, frozen=True, eq=False):
    """Checked strided rows, and where the numbers of their descriptors begin.

    Attributes:
        table: int64, shape (rows, 5): address, nbytes, device, stride, count.
        firsts: int64, shape (rows,): number of each row's first descriptor.
        dense: shape (rows,): True where neighbours touch, so that they may merge.
        count: descriptors of all rows together, in [1, ``INDEX_MAX``].
        nbytes_max: length of the longest descriptor.
        uniform: whether all descriptors are of that length.
    """

    table: Int64s
    firsts: Int64s
    dense: Flags
    count: int
    nbytes_max: int
    uniform: bool


class Run(Struct, frozen=True):
    """One merged descriptor: this many bytes, dense on both sides."""

    source_address: int
    target_address: int
    nbytes: int


def check_rows(table: Int64s) -> Rows:
    """Check that strided rows make sense by themselves.

    Args:
        table: int64, shape (rows, 5), at least one row.

    Returns:
        The same rows, C-contiguous.

    Raises:
        OutOfBounds: wrong shape or dtype, a negative number, an empty or overlapping descriptor, or a row
            that reaches beyond the int64 addresses.
    """
    if table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != 5 or not len(table):
        raise OutOfBounds(f"rows must be int64 of shape (rows, 5), not {table.dtype} of {table.shape}")
    if (table < 0).any():
        raise OutOfBounds(f"row {_first(table.min(axis=1) < 0)} has a negative number")
    address, nbytes, _, stride, count = table.T
    if ((nbytes < 1) | (count < 1)).any():
        raise OutOfBounds(f"row {_first((nbytes < 1) | (count < 1))} is empty")
    if ((stride < nbytes) & (count > 1)).any():
        raise OutOfBounds(f"row {_first((stride < nbytes) & (count > 1))} overlaps itself: stride < nbytes")
    # No term may overflow, so nothing is multiplied and every difference is taken from something larger.
    room = np.where(nbytes > ADDRESS_MAX - address, -1, ADDRESS_MAX - address - nbytes)
    beyond = (room < 0) | ((count > 1) & (stride > room // np.maximum(count - 1, 1)))
    if beyond.any():
        raise OutOfBounds(f"row {_first(beyond)} reaches beyond the address space")
    if (count > INDEX_MAX).any() or int(count.sum()) > INDEX_MAX:
        raise OutOfBounds("more descriptors than int32 can number")
    return Rows(
        table=np.ascontiguousarray(table),
        firsts=np.cumsum(count) - count,
        dense=stride == nbytes,
        count=int(count.sum()),
        nbytes_max=int(nbytes.max()),
        uniform=bool((nbytes == nbytes[0]).all()),
    )


def check_inside(rows: Rows, regions: Sequence[Region], memory: str) -> None:
    """Check that each row lies within one region of that memory kind and the row's device.

    Raises:
        OutOfBounds: naming the first row that does not.
    """
    address, nbytes, device, stride, count = rows.table.T
    stop = address + np.where(count > 1, (count - 1) * stride, 0) + nbytes
    inside = np.zeros(len(rows.table), dtype=bool)
    for region in regions:
        if region.memory == memory:
            within = (address >= region.address) & (stop <= region.address + region.nbytes)
            inside |= within & (device == region.device)
    if not inside.all():
        raise OutOfBounds(f"row {_first(~inside)} lies outside the registered {memory} regions")


def check_read(read: Read, source: Rows, target: Rows) -> None:
    """Check a read's index arrays and cuts against the rows of its program.

    Raises:
        OutOfBounds: wrong dtype or shape, an index that no descriptor has, a pair of different lengths, cuts
            that do not ascend from 0 to n, or a total that is not ``nbytes``.
    """
    n = read.source_index.size
    for name, index, rows in (("source", read.source_index, source), ("target", read.target_index, target)):
        if index.dtype != np.int32 or index.shape != (n,) or not n:
            raise OutOfBounds(f"{name}_index must be int32 of shape (n,), not {index.dtype} of {index.shape}")
        # Seen as unsigned, a negative index is a huge one.
        if index.view(np.uint32).max() >= rows.count:
            raise OutOfBounds(f"{name}_index leaves [0, {rows.count})")
    cuts = read.cuts
    if cuts.dtype != np.int64 or cuts.ndim != 1 or len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != n:
        raise OutOfBounds(f"cuts must be int64 and lead from 0 to {n}")
    if len(cuts) > 2 and (cuts[1:] <= cuts[:-1]).any():
        raise OutOfBounds("cuts do not ascend")
    if source.nbytes_max * n > ADDRESS_MAX:
        raise OutOfBounds(f"{n} descriptors of this program are more than an address can count")
    if source.uniform and target.uniform:
        differ, nbytes = source.nbytes_max != target.nbytes_max, n * source.nbytes_max
    else:
        lengths = source.table[_row_of(source, read.source_index), 1]
        differ = bool((lengths != target.table[_row_of(target, read.target_index), 1]).any())
        nbytes = int(lengths.sum())
    if differ:
        raise OutOfBounds("source and target descriptors differ in length")
    if nbytes != read.nbytes:
        raise OutOfBounds(f"the descriptors hold {nbytes} bytes, not {read.nbytes}")


def merge(source: Rows, source_index: Int32s, target: Rows, target_index: Int32s) -> list[Run]:
    """Merge checked descriptor pairs as NIXL does.

    Neighbours merge when both indices ascend by one, both stay in their row and both rows are dense.
    """
    source_row, target_row = _row_of(source, source_index), _row_of(target, target_index)
    joins = _joins(source, source_index, source_row) & _joins(target, target_index, target_row)
    at = np.concatenate(([0], np.flatnonzero(~joins) + 1))
    lengths = source.table[source_row[at], 1] * np.diff(at, append=len(source_index))
    source_at = _addresses(source, source_index[at], source_row[at])
    target_at = _addresses(target, target_index[at], target_row[at])
    return [Run(*run) for run in zip(source_at.tolist(), target_at.tolist(), lengths.tolist(), strict=True)]


def _joins(rows: Rows, index: Int32s, row: Intps) -> Flags:
    """Tell of each descriptor but the first whether it continues the one before it in memory."""
    joins: Flags = (index[1:] - index[:-1] == 1) & (row[1:] == row[:-1]) & rows.dense[row[1:]]
    return joins


def _addresses(rows: Rows, index: Int32s, row: Intps) -> Int64s:
    addresses: Int64s = rows.table[row, 0] + (index - rows.firsts[row]) * rows.table[row, 3]
    return addresses


def _row_of(rows: Rows, index: Int32s) -> Intps:
    return rows.firsts.searchsorted(index, side="right") - 1


def _first(flags: Flags) -> int:
    return int(np.argmax(flags))
