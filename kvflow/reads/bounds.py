"""Check every number that reaches the data plane, and merge descriptors as NIXL does. Pure.

NIXL's own checks are incomplete: it accepts zero lengths, and its sums wrap around at 2**64. Numbers that pass these
checks can be added in int64 without overflow. The peer's manifest and NIXL decide what the peer registered.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from kvflow.ids import Flags, Int32s, Int64s, Intps
from kvflow.layout.component import ADDRESS_MAX, Region
from kvflow.planning.bind import Bound
from kvflow.planning.pairs import UnitPairs
from kvflow.planning.staging import COLUMNS, FIXED, room_left
from kvflow.reads.contract import PreparedList

INDEX_MAX = (1 << 31) - 1  # descriptors are numbered by int32

EPOCH_MAX = (1 << 63) - 1

FEW_DESCRIPTORS = 128  # up to this many descriptors, a loop is faster than arrays

_INTEGERS = {int}
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_DTYPES = (_INT32, _INT32, _INT64)


class OutOfBounds(Exception):
    """A row, an index or a cut cannot be used. The text says which, and why."""


class CheckedRows(Struct, frozen=True, eq=False):
    """Checked strided rows: address, nbytes, device, stride, count.

    Attributes:
        table: int64, shape (rows, 5).
        firsts: int64, shape (rows,): number of each row's first descriptor.
        dense: shape (rows,): True if the descriptors of the row touch, and may merge.
        count: descriptors of all rows together, in [1, ``INDEX_MAX``].
        nbytes_max: length of the longest descriptor; ``uniform``: whether all are of that length.
    """

    table: Int64s
    firsts: Int64s
    dense: Flags
    count: int
    nbytes_max: int
    uniform: bool


class CheckedScatter(Struct, frozen=True, eq=False):
    """The copies of a staged list, and how its units are fetched; the first three as in ``Scatter``.

    Attributes:
        reach: int64, shape (boxes,): bytes of the target from a copy's address to the last byte that any unit reaches.
        unit_bytes: bytes that are written into one unit of the target.
        fetch_runs: descriptors that fetch one unit.
        source_units: units of the source; each run has a descriptor for each unit.
    """

    table: Int64s
    places: int
    units: tuple[int, int, int]
    reach: Int64s
    unit_bytes: int
    fetch_runs: int
    source_units: int


class MergedDescriptor(Struct, frozen=True):
    """One merged descriptor: contiguous bytes on both sides."""

    source_address: int
    target_address: int
    nbytes: int


def check_rows(table: Int64s) -> CheckedRows:
    """Check strided rows, but not where they lie. Return them C-contiguous.

    Raises:
        OutOfBounds: wrong shape or dtype, no row, a negative number, an empty or overlapping descriptor, or a row that
            exceeds int64 addresses.
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
    return CheckedRows(
        table=np.ascontiguousarray(table),
        firsts=np.cumsum(count) - count,
        dense=stride == nbytes,
        count=int(count.sum()),
        nbytes_max=int(nbytes.max()),
        uniform=bool((nbytes == nbytes[0]).all()),
    )


def check_inside(rows: CheckedRows, regions: Sequence[Region], memory: str) -> None:
    """Check that each row lies within one region of that memory kind and the row's device. Raises ``OutOfBounds``."""
    address, nbytes, device, stride, count = rows.table.T
    stop = address + np.where(count > 1, (count - 1) * stride, 0) + nbytes
    inside = np.zeros(len(rows.table), dtype=bool)
    for region in regions:
        if region.memory == memory:
            within = (address >= region.address) & (stop <= region.address + region.nbytes)
            inside |= within & (device == region.device)
    if not inside.all():
        raise OutOfBounds(f"row {_first(~inside)} lies outside the registered {memory} regions")


def check_pairs(pairs: UnitPairs, source_units: int, target_units: int) -> None:
    """Check that pairs of units can be bound. OutOfBounds: wrong dtype or shape, no pair, or no such unit."""
    source, target = pairs.source, pairs.target
    if isinstance(source, tuple) and isinstance(target, tuple) and len(source) == len(target):
        both = source + target
        inside = set(map(type, both)) == _INTEGERS and min(both) >= 0
        if inside and max(source) < source_units and max(target) < target_units:
            return
    n = len(source) if isinstance(source, tuple) else getattr(source, "size", 0)
    for name, units, count in (("source", source, source_units), ("target", target, target_units)):
        if isinstance(units, tuple):
            right = len(units) == n and set(map(type, units)) == _INTEGERS and min(units) >= 0 and max(units) < count
        else:
            right = _numbered(units, _INT64, n, count)
        if not right:
            raise OutOfBounds(f"{name} units must be int64 of shape (n,), n > 0, in [0, {count}): {units!r}")


def check_bound(bound: Bound, pairs: int, source: CheckedRows, target: CheckedRows) -> None:
    """Check what a binding returned for ``pairs`` pairs of units against the rows of their prepared list.

    Raises:
        OutOfBounds: wrong dtype or shape, an index without a descriptor, a pair of different lengths, cuts that do not
            ascend from 0 to n, an n that is not a multiple of the pairs, or a total that is not ``nbytes``.
    """
    n = _check_index(bound, source.count, target.count)
    if n % pairs:
        raise OutOfBounds(f"{n} descriptors are not the same number for each of {pairs} pairs")
    nbytes = source.nbytes_max * n
    if nbytes > ADDRESS_MAX:
        raise OutOfBounds(f"{n} descriptors of this prepared list are more than an address can count")
    if source.uniform and target.uniform:
        differ = source.nbytes_max != target.nbytes_max
    else:
        lengths = source.table[_row_of(source, bound.source_index), 1]
        differ = bool((lengths != target.table[_row_of(target, bound.target_index), 1]).any())
        nbytes = int(lengths.sum())
    if differ:
        raise OutOfBounds("source and target descriptors differ in length")
    if nbytes != bound.nbytes:
        raise OutOfBounds(f"the descriptors hold {nbytes} bytes, not {bound.nbytes}")


def check_ends(bound: Bound, units: tuple[int, int], source: CheckedRows, target: CheckedRows) -> None:
    """Check what a linear binding returned for the pair of the first units of both sides and that of their last units.

    If this passes, ``check_bound`` passes for all pairs: each run has all units of a side in one row, one by one.

    Raises:
        OutOfBounds: as ``check_bound``, or a run is not one row.
    """
    check_bound(bound, 2, source, target)
    for rows, index, count in ((source, bound.source_index, units[0]), (target, bound.target_index, units[1])):
        first, last = index.reshape(-1, 2).T
        if ((last - first != count - 1) | (_row_of(rows, first) != _row_of(rows, last))).any():
            raise OutOfBounds(f"the {count} units of a run are not one row")


def check_staged_bound(bound: Bound, pairs: int, scatter: CheckedScatter) -> None:
    """Check what a binding of a staged list returned, as ``check_bound`` does.

    Raises OutOfBounds also if a chunk has more units than a buffer has places, or there are not as many as pairs.
    """
    n = _check_index(bound, scatter.source_units, math.prod(scatter.units))
    if n != pairs:
        raise OutOfBounds(f"{n} units are not the {pairs} pairs")
    if (bound.cuts[1:] - bound.cuts[:-1]).max() > scatter.places:
        raise OutOfBounds(f"a chunk has more units than the {scatter.places} places of a staging buffer")
    if n * scatter.unit_bytes != bound.nbytes:
        raise OutOfBounds(f"the units hold {n * scatter.unit_bytes} bytes, not {bound.nbytes}")


def _check_index(bound: Bound, source_count: int, target_count: int) -> int:
    """Check both index arrays and the cuts. Return the number of descriptors."""
    source, target, cuts = bound.source_index, bound.target_index, bound.cuts
    n = source.size
    if (
        0 < n <= FEW_DESCRIPTORS
        and source.shape == target.shape == (n,)
        and (source.dtype, target.dtype, cuts.dtype) == _DTYPES
    ):
        here, there = source.tolist(), target.tolist()
        inside = min(here + there) >= 0 and max(here) < source_count and max(there) < target_count
        if inside and cuts.tolist() == [0, n]:
            return n
    for name, index, count in (("source", source, source_count), ("target", target, target_count)):
        if not _numbered(index, _INT32, n, count):
            raise OutOfBounds(f"{name}_index must be int32 of shape (n,), n > 0, in [0, {count}): {index!r}")
    _check_cuts(cuts, n)
    return n


def _numbered(numbers: Int64s | Int32s, dtype: object, n: int, count: int) -> bool:
    """Return whether these are ``n`` numbers of one type, at least one, all in ``[0, count)``."""
    if getattr(numbers, "dtype", None) is not dtype or numbers.ndim != 1 or numbers.size != n or not n:
        return False
    return bool(np.minimum.reduce(numbers) >= 0 and np.maximum.reduce(numbers) < count)


def _check_cuts(cuts: Int64s, n: int) -> None:
    if cuts.dtype is not _INT64 or cuts.ndim != 1 or cuts.size < 2 or cuts.item(0) != 0 or cuts.item(-1) != n:
        raise OutOfBounds(f"cuts must be int64 and lead from 0 to {n}")
    if cuts.size > 2 and (cuts[1:] <= cuts[:-1]).any():
        raise OutOfBounds("cuts do not ascend")


def check_scatter(
    prepared_list: PreparedList,
    source: CheckedRows,
    target: CheckedRows,
    *,
    buffer_bytes: int,
    regions: Sequence[Region],
) -> CheckedScatter:
    """Check that what a staged list fetches fits a buffer, and that its copies stay in the buffer and in one region.

    Its checked ``target`` rows count addresses from the start of a buffer. ``buffer_bytes`` is 0 if there are none.

    Raises:
        OutOfBounds: names what cannot be used, and why.
    """
    scatter = prepared_list.scatter
    assert scatter is not None
    table, places, units = scatter.table, scatter.places, scatter.units
    if table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != COLUMNS or not len(table):
        raise OutOfBounds(f"copies must be int64 of shape (boxes, {COLUMNS}), not {table.dtype} of {table.shape}")
    counts, here, there = (table[:, FIXED + first :: 3] for first in range(3))
    if (table < 0).any() or (table[:, 0] < 1).any() or (counts < 1).any():
        raise OutOfBounds("a copy has a negative number, or no bytes")
    if places < 1 or min(units) < 1 or units[0] > INDEX_MAX // units[1] // units[2]:
        raise OutOfBounds(f"{places} places and units of {units} cannot be numbered")
    source_units = _check_fetch(source, target, places)
    check_inside(target, [Region(0, buffer_bytes)] if buffer_bytes else [], "DRAM")
    place_count = np.full((len(table), 1), places, np.int64)
    left = room_left(
        np.where(table[:, 1] > buffer_bytes, 0, buffer_bytes - table[:, 1]) - table[:, 0],
        np.concatenate([place_count, counts], axis=1),
        np.concatenate([table[:, 2:3], here], axis=1),
    )
    if (left < 0).any():
        raise OutOfBounds(f"copy {_first(left < 0)} leaves its staging buffer")
    reach = np.full(len(table), -1, np.int64)
    numbers = np.broadcast_to(np.array(units, np.int64), (len(table), 3))
    if prepared_list.target_memory != "DRAM":
        raise OutOfBounds(f"staging memory is DRAM, and the target is {prepared_list.target_memory}")
    for region in regions:
        behind = region.nbytes - np.maximum(table[:, 3] - region.address, 0)
        room = np.where((table[:, 3] < region.address) | (table[:, 0] > behind), -1, behind - table[:, 0])
        left = room_left(room, np.concatenate([numbers, counts], axis=1), np.concatenate([table[:, 4:FIXED], there], 1))
        if region.memory == "DRAM":
            reach = np.where(left >= 0, table[:, 0] + room - left, reach)
    if (reach < 0).any():
        raise OutOfBounds(f"copy {_first(reach < 0)} lies outside the registered DRAM regions")
    return CheckedScatter(
        table=np.ascontiguousarray(table),
        places=places,
        units=units,
        reach=reach,
        unit_bytes=sum(row[0] * math.prod(row[FIXED::3]) for row in table.tolist()),
        fetch_runs=len(target.table),
        source_units=source_units,
    )


def _check_fetch(source: CheckedRows, target: CheckedRows, places: int) -> int:
    """Check that each row of a buffer is filled from descriptors of equal length. Return the number of units."""
    runs = len(target.table)
    units, rest = divmod(source.count, runs)
    if rest or (target.table[:, 4] != places).any():
        raise OutOfBounds(f"{source.count} source descriptors do not fill {runs} rows of {places} places")
    run = source.firsts // units
    ends = source.firsts + source.table[:, 4] - 1
    if (ends // units != run).any() or (source.table[:, 1] != target.table[run, 1]).any():
        raise OutOfBounds("source rows and the rows of a staging buffer differ")
    return units


class Places:
    """Where the descriptors of checked rows lie, for a few or for many descriptors."""

    def __init__(self, rows: CheckedRows) -> None:
        self._rows = rows
        self._firsts = rows.firsts.tolist()
        self._fields = rows.table[:, [0, 3, 1]].tolist()

    def table(self, index: Int32s) -> Int64s:
        """Return address and length of descriptors, by checked numbers, in order: int64, shape (n, 2).

        Neighbors that touch are joined.
        """
        if len(index) > FEW_DESCRIPTORS:
            row = _row_of(self._rows, index)
            return np.stack(joined(_addresses(self._rows, index, row), self._rows.table[row, 1]), axis=1)
        parts = []
        for number in index.tolist():
            at = bisect_right(self._firsts, number) - 1
            address, stride, nbytes = self._fields[at]
            parts.append((address + (number - self._firsts[at]) * stride, nbytes))
        return np.array(joined_few(parts), np.int64).T.copy()


def joined_few(parts: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Join a few addresses and lengths as ``joined`` does."""
    starts: list[int] = []
    lengths: list[int] = []
    end = -1
    for address, nbytes in parts:
        if address == end:
            lengths[-1] += nbytes
        else:
            starts.append(address)
            lengths.append(nbytes)
        end = address + nbytes
    return starts, lengths


def joined(address: Int64s, nbytes: Int64s) -> tuple[Int64s, Int64s]:
    """Join neighbors that touch. Return address and length of each stretch."""
    first = np.concatenate(([0], np.flatnonzero(address[1:] != address[:-1] + nbytes[:-1]) + 1))
    return address[first], np.add.reduceat(nbytes, first)


def merge(
    source: CheckedRows, source_index: Int32s, target: CheckedRows, target_index: Int32s
) -> list[MergedDescriptor]:
    """Merge checked pairs as NIXL does: both indices ascend by one and stay in their row, and both rows are dense."""
    source_row, target_row = _row_of(source, source_index), _row_of(target, target_index)
    joins = _joins(source, source_index, source_row) & _joins(target, target_index, target_row)
    at = np.concatenate(([0], np.flatnonzero(~joins) + 1))
    lengths = source.table[source_row[at], 1] * np.diff(at, append=len(source_index))
    source_at = _addresses(source, source_index[at], source_row[at])
    target_at = _addresses(target, target_index[at], target_row[at])
    return [
        MergedDescriptor(*run) for run in zip(source_at.tolist(), target_at.tolist(), lengths.tolist(), strict=True)
    ]


def _joins(rows: CheckedRows, index: Int32s, row: Intps) -> Flags:
    """Return for each descriptor but the first whether it continues the previous one in memory."""
    joins: Flags = (index[1:] - index[:-1] == 1) & (row[1:] == row[:-1]) & rows.dense[row[1:]]
    return joins


def _addresses(rows: CheckedRows, index: Int32s, row: Intps) -> Int64s:
    addresses: Int64s = rows.table[row, 0] + (index - rows.firsts[row]) * rows.table[row, 3]
    return addresses


def _row_of(rows: CheckedRows, index: Int32s) -> Intps:
    return rows.firsts.searchsorted(index, side="right") - 1


def _first(flags: Flags) -> int:
    return int(np.argmax(flags))
