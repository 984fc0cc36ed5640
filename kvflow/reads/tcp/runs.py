"""Runs of stretches instead of addresses: what a reader asks for, and where its bytes lie at the producer. Pure.

A reader translates each row of a prepared list once. A descriptor is then a block and a unit of it by two divisions.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvflow.ids import Int32s, Int64s
from kvflow.layout.tracks import Track
from kvflow.reads.bounds import CheckedRows, OutOfBounds, joined, joined_few
from kvflow.reads.tcp.wire import RUN, RUNS_MAX, Row

FEW_RUNS = 32  # up to this many descriptors or runs, a loop is faster than arrays
OFFSET_MAX = 1 << 46  # most bytes of an offset: products with ``RUNS_MAX`` fit int64
ENTRIES_MAX = 1 << 20  # units of a block in stretches of their own, for all rows of a list


class SourceList:
    """The source rows of a prepared list, as places in the stretches of the peer's group.

    Raises:
        OutOfBounds: a row does not go through all blocks, or leaves the stretches.
    """

    def __init__(self, rows: CheckedRows, published: Sequence[Row], num_blocks: int, memory: str) -> None:
        if not published:
            raise OutOfBounds("the peer does not serve this group")
        address, nbytes, device, stride, count = rows.table.T
        per_block, rest = np.divmod(count, num_blocks)
        if rest.any():
            raise OutOfBounds(f"row {int(np.argmax(rest))} does not go through all {num_blocks} blocks")
        stretches = _Stretches(published, memory)
        every = per_block * stride if num_blocks > 1 else np.zeros_like(stride)
        step = np.where(per_block > 1, stride, 0)
        stretch, offset = stretches.find(address, nbytes + (per_block - 1) * step, device, every)
        self._spread = bool((stretch < 0).any())
        if self._spread:  # units of a block lie in stretches of their own: each gets an entry
            if per_block.sum() > ENTRIES_MAX:
                raise OutOfBounds(f"more than {ENTRIES_MAX} units of a block in stretches of their own")
            row = np.repeat(np.arange(len(count)), per_block)
            unit = np.arange(len(row)) - (np.cumsum(per_block) - per_block)[row]
            stretch, offset = stretches.find(address[row] + unit * step[row], nbytes[row], device[row], every[row])
            if (stretch < 0).any():
                raise OutOfBounds(f"row {int(row[np.argmin(stretch)])} leaves the stretches that the peer serves")
        self._entry = np.cumsum(per_block) - per_block if self._spread else np.arange(len(count))
        self._places = np.stack([stretch, offset])
        self._rows = np.stack(
            [rows.firsts, per_block, self._entry, np.zeros_like(step) if self._spread else step, nbytes]
        )
        self._each = int(count[0]) if (count == count[0]).all() else 0
        self._few_rows: list[list[int]] = self._rows.T.tolist()
        self._few_places: list[list[int]] = self._places.T.tolist()
        self._firsts: list[int] = rows.firsts.tolist()

    def runs(self, index: Int32s) -> Int64s | list[list[int]]:
        """Return the runs of checked descriptors, int32 of shape (n,), in their order: seven numbers each."""
        return self._few(index.tolist()) if len(index) <= FEW_RUNS else self._many(index.astype(np.int64))

    def _few(self, index: list[int]) -> list[list[int]]:
        pieces: list[list[int]] = []  # place of the first unit, unit, block, times, row
        for number in index:
            row = bisect_right(self._firsts, number) - 1
            first, per_block, _, _, _ = self._few_rows[row]
            block, unit = divmod(number - first, per_block)
            if pieces and not self._spread and pieces[-1][:2] == [row, block] and unit == sum(pieces[-1][2:4]):
                pieces[-1][3] += 1
            else:
                pieces.append([row, block, unit, 1])
        runs: list[list[int]] = []
        before: list[int] = []
        for row, block, unit, times in pieces:
            if before == [row, unit, times] and block == runs[-1][1] + runs[-1][2]:
                runs[-1][2] += 1
                continue
            before = [row, unit, times]
            _, _, entry, step, nbytes = self._few_rows[row]
            stretch, offset = self._few_places[entry + unit if self._spread else entry]
            whole = step == nbytes
            runs.append(
                [stretch, block, 1, offset + unit * step, nbytes * times if whole else nbytes]
                + ([0, 1] if whole or times == 1 else [step, times])
            )
        return runs

    def _many(self, index: Int64s) -> Int64s:
        row = index // self._each if self._each else self._rows[0].searchsorted(index, side="right") - 1
        first, per_block, entry, step, nbytes = self._rows[:, row]
        block, unit = np.divmod(index - first, per_block)
        if self._spread:
            entry, unit = entry + unit, np.zeros_like(unit)
        times = np.ones_like(block)
        if not self._spread and (per_block > 1).any():
            at = _starts(np.diff(row) == 0, np.diff(block) == 0, np.diff(unit) == 1)
            times = np.diff(at, append=len(index))
            entry, block, unit, step, nbytes = (each[at] for each in (entry, block, unit, step, nbytes))
        at = _starts(np.diff(entry) == 0, np.diff(unit) == 0, np.diff(times) == 0, np.diff(block) == 1)
        count = np.diff(at, append=len(entry))
        entry, block, unit, step, nbytes, times = (each[at] for each in (entry, block, unit, step, nbytes, times))
        stretch, offset = self._places[:, entry]
        whole = step == nbytes
        nbytes = np.where(whole, nbytes * times, nbytes)
        times = np.where(whole, 1, times)
        return np.stack(
            [stretch, block, count, offset + unit * step, nbytes, np.where(times > 1, step, 0), times], axis=1
        )


def _starts(*follows: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Return where something begins that does not follow what is before it."""
    return np.flatnonzero(np.concatenate(([True], ~np.logical_and.reduce(follows))))


class _Stretches:
    """The stretches of block 0 of one group in one kind of memory, sorted by address."""

    def __init__(self, published: Sequence[Row], memory: str) -> None:
        times = np.array([row.times for row in published], np.int64)
        fields = np.array([(row.address, row.step, row.span, row.stride, row.device) for row in published], np.int64)
        row = np.repeat(np.arange(len(times)), times)
        within = np.arange(len(row)) - (np.cumsum(times) - times)[row]
        address, step, self._span, self._stride, self._device = fields.T[:, row]
        self._address = address + within * step
        self._order = np.argsort(self._address, kind="stable")
        self._vram = memory == "VRAM"

    def find(self, address: Int64s, reach: Int64s, device: Int64s, every: Int64s) -> tuple[Int64s, Int64s]:
        """Return the stretch that has these bytes of block 0, -1 if none has, and the offset in it."""
        at = self._address[self._order].searchsorted(address, side="right") - 1
        stretch = self._order[np.maximum(at, 0)]
        offset = address - self._address[stretch]
        fits = (at >= 0) & (offset <= self._span[stretch] - reach) & ((every == 0) | (every == self._stride[stretch]))
        fits &= self._device[stretch] == (device if self._vram else -1)
        return np.where(fits, stretch, -1), offset


class ServedGroup:
    """The tracks of one group of ours, where runs of readers are looked up. ``device``: -1 for host memory.

    A run names bytes of one stretch only, so all of its bytes are those of the blocks that it names.
    """

    def __init__(self, tracks: Sequence[Track]) -> None:
        self.num_blocks = tracks[0].count if tracks else 0
        self._list = [
            (track.address, track.stride, track.span, track.device if track.memory == "VRAM" else -1)
            for track in tracks
        ]
        self._table = np.array(self._list, np.int64).reshape(-1, 4)
        span_max = min(int(self._table[:, 2].max(initial=0)), OFFSET_MAX)
        self._limits = np.array([len(tracks) - 1, self.num_blocks, self.num_blocks, *[span_max] * 3, RUNS_MAX])

    def resolve(self, body: bytes) -> "Resolved":
        """Return where the bytes of runs lie, as a READ has them. Raises ``OutOfBounds``."""
        if not self._list:
            raise OutOfBounds("this group is not served")
        few = len(body) <= FEW_RUNS * RUN.size and self._few(body)
        return few or self._many(np.frombuffer(body, "<i8").reshape(-1, 7))

    def _few(self, body: bytes) -> "Resolved | None":
        """Resolve a few runs of a few pieces; None if they are more."""
        pieces: list[tuple[int, int]] = []
        blocks: list[range] = []
        devices: set[int] = set()
        for stretch, first, count, offset, nbytes, stride, times in RUN.iter_unpack(body):
            if min(stretch, first, offset, stride) < 0 or min(count, nbytes, times) < 1 or stretch >= len(self._list):
                raise OutOfBounds(f"a run of stretch {stretch} has a number out of bounds")
            address, every, span, device = self._list[stretch]
            if first + count > self.num_blocks or offset + stride * (times - 1) + nbytes > span:
                raise OutOfBounds(f"a run leaves the blocks or the bytes of stretch {stretch}")
            if len(pieces) + count * times > 4 * FEW_RUNS:
                return None
            devices.add(device)
            blocks.append(range(first, first + count))
            pieces += [
                (address + block * every + offset + at * stride, nbytes) for block in blocks[-1] for at in range(times)
            ]
        return Resolved([block for each in blocks for block in each], *joined_few(pieces), devices)

    def _many(self, runs: Int64s) -> "Resolved":
        # Limits first: no sum or product of numbers within them leaves int64.
        if (runs < 0).any() or (runs > self._limits).any() or (runs[:, [2, 4, 6]] < 1).any():
            raise OutOfBounds("a run has a number out of bounds")
        stretch, first, count, offset, nbytes, stride, times = runs.T
        address, every, span, device = self._table[stretch].T
        if (first + count > self.num_blocks).any() or (offset + stride * (times - 1) + nbytes > span).any():
            raise OutOfBounds("a run leaves the blocks or the bytes of its stretch")
        pieces = count * times
        if int(pieces.sum()) > RUNS_MAX:
            raise OutOfBounds(f"runs of {int(pieces.sum())} pieces, more than {RUNS_MAX}")
        run, at = _numbered(pieces)
        block, at = np.divmod(at, times[run])
        block += first[run]
        start = address[run] + block * every[run] + offset[run] + at * stride[run]
        return Resolved(block, *joined(start, nbytes[run]), set(np.unique(device).tolist()))


def _numbered(counts: Int64s) -> tuple[Int64s, Int64s]:
    """Return for each of these many things which count it belongs to, and its number there."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - (np.cumsum(counts) - counts)[which]


class Resolved:
    """Where bytes lie: blocks, addresses and lengths in order, lists or int64, and their devices."""

    __slots__ = ("blocks", "devices", "lengths", "nbytes", "starts")

    def __init__(
        self, blocks: Int64s | list[int], starts: Int64s | list[int], lengths: Int64s | list[int], devices: set[int]
    ) -> None:
        self.blocks = blocks
        self.starts = starts
        self.lengths = lengths
        self.devices = devices
        self.nbytes = int(sum(lengths) if isinstance(lengths, list) else lengths.sum())
