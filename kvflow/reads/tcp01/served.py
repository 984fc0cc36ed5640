"""Turn the addresses of the wire of the release before back into blocks. Pure.

A *served list* is a peer's rows, checked once against the tracks of one group. Every descriptor lies in one block. The
rows and numbers come from a peer. Their bounds are checked before anything is walked, allocated or multiplied.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvflow.layout.tracks import ONE_BLOCK, Track
from kvflow.reads.bounds import CheckedRows, OutOfBounds, check_rows

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Intps = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]

LEVELS_MAX = 16
"""Memory that kvflow allocates or adopts has one or two levels."""


class Tracks(tuple[Track, ...]):  # noqa: SLOT001 - keeps what it computes
    """The tracks of one group, which are sorted once to be searched.

    Tracks of one stride may interleave, as the layers of packed pages do. Those within one stride make a *frame*.
    Frames whose bytes lie apart make a *level*; a place has one track in each.
    """

    @cached_property
    def levels(self) -> tuple["Level", ...]:
        """The tracks to search; none if they interleave at too many strides."""
        levels: list[list[_Frame]] = []
        ends: list[int] = []
        for frame in sorted(_frames(self), key=lambda frame: frame.tracks[0].address):
            base = frame.tracks[0].address
            level = next((level for level, end in enumerate(ends) if end <= base), len(ends))
            if level == LEVELS_MAX:
                return ()
            if level == len(ends):
                ends.append(0)
                levels.append([])
            levels[level].append(frame)
            ends[level] = frame.end
        return tuple(map(Level, levels))


class _Frame(NamedTuple):
    """Tracks of one stride, sorted by address; the first begins at most one stride before the last one ends."""

    tracks: list[Track]
    stride: int

    @property
    def end(self) -> int:
        last = self.tracks[-1]
        return last.address + (last.count - 1) * self.stride + last.span


def _frames(tracks: Sequence[Track]) -> Iterator[_Frame]:
    for (stride, count, _, _), alike in groupby(
        sorted(tracks, key=lambda track: (track[1], track[3:], track[0])), key=lambda track: (track[1], *track[3:])
    ):
        every = stride if count > 1 else ONE_BLOCK
        members: list[Track] = []
        for track in alike:
            if members and (
                track.address < members[-1].address + members[-1].span
                or track.address + track.span - members[0].address > every
                or count == 1
            ):
                yield _Frame(members, every)
                members = []
            members.append(track)
        yield _Frame(members, every)


class Level:
    """Frames that lie apart, as int64 arrays to search: three of shape (frames,), five of shape (tracks,)."""

    def __init__(self, frames: Sequence[_Frame]) -> None:
        tracks = [track for frame in frames for track in frame.tracks]
        self.bases = np.array([frame.tracks[0].address for frame in frames], np.int64)
        self.strides = np.array([frame.stride for frame in frames], np.int64)
        self.counts = np.array([frame.tracks[0].count for frame in frames], np.int64)
        self.starts = np.array([track.address for track in tracks], np.int64)
        self.stops = np.array([track.address + track.span for track in tracks], np.int64)
        self.frame = np.repeat(np.arange(len(frames)), [len(frame.tracks) for frame in frames])
        self.devices = np.array([track.device for track in tracks], np.int64)
        self.vram = np.array([track.memory == "VRAM" for track in tracks])

    def place(self, table: Int64s) -> tuple[Flags, Intps, Flags]:
        """Return for each checked row whether its descriptors lie in one block of one track, its frame, and if in VRAM.

        A row that steps from track to track is not taken: the runs of a plan lie in one component each.
        """
        address, nbytes, device, stride, count = table.T
        frame = np.maximum(self.bases.searchsorted(address, side="right") - 1, 0)
        base, every = self.bases[frame], self.strides[frame]
        block, inside = np.divmod(address - base, every)
        track = np.maximum(self.starts.searchsorted(base + inside, side="right") - 1, 0)
        # All sums are of numbers below 2**62, or differences of numbers that are not negative.
        behind = self.stops[track] - base - inside - nbytes
        fits = (self.frame[track] == frame) & (address >= base) & (behind >= 0) & (device == self.devices[track])
        walked = (count - 1) * np.where(count > 1, stride, 0)
        last = (address - base + walked) // every
        fits &= (block >= 0) & (last < self.counts[frame])
        # Within one block a row may begin and end anywhere. One that goes on visits, modulo the stride of the track, no
        # more than all places that are a greatest common divisor apart.
        step = np.gcd(stride, every)
        lowest = inside % step
        highest = lowest + every - step
        around = (base + lowest >= self.starts[track]) & (self.stops[track] - base - highest >= nbytes)
        return fits & ((walked <= behind) | around), frame, self.vram[track]


class Resolved(NamedTuple):
    """Where descriptors lie: int64, each of shape (n,). A descriptor lies in one block."""

    address: Int64s
    nbytes: Int64s
    block: Int64s


class ServedList:
    """The rows of a peer's prepared list. Each descriptor lies in one block of one group.

    ``device``: device of all rows; 0 for DRAM; None if they lie on several. Raises ``OutOfBounds`` if a row is invalid,
    does not lie in the blocks of the group, or the group is not served.
    """

    def __init__(self, rows: Int64s, tracks: Sequence[Track], group: int) -> None:
        checked = check_rows(rows)
        levels = (tracks if isinstance(tracks, Tracks) else Tracks(tracks)).levels
        self.group = group
        self.count = checked.count
        base, every, vram = _placed(checked, levels, group)
        if (vram != vram[0]).any():
            raise OutOfBounds(f"rows of group {group} lie in DRAM and in VRAM")
        address, nbytes, device, stride, count = checked.table.T
        self.memory = "VRAM" if vram[0] else "DRAM"
        self.device = int(device[0]) if (device == device[0]).all() else None
        # For each row: the number of its first descriptor, its stride, its offset in its frame, the frame's stride and
        # start, and its length.
        self._fields = np.stack([checked.firsts, stride, address - base, every, base, nbytes])
        self._firsts = checked.firsts
        self._each = int(count[0]) if (count == count[0]).all() else 0
        self._nbytes = checked.nbytes_max if checked.uniform else 0
        self._only = tuple(self._fields[:, 0].tolist()) if len(address) == 1 else None
        self._rows: list[list[int]] = self._fields.T.tolist()
        self._starts: list[int] = self._firsts.tolist()

    def resolve(self, index: Int32s) -> Resolved:
        """Return where descriptors lie, by int32 numbers of shape (n,). Raises ``OutOfBounds``."""
        if index.dtype != np.int32 or index.ndim != 1:
            raise OutOfBounds(f"numbers must be int32 of shape (n,), not {index.dtype} of {index.shape}")
        # As unsigned, a negative number is a huge one.
        if index.size and index.view(np.uint32).max() >= self.count:
            raise OutOfBounds(f"a descriptor's number leaves [0, {self.count})")
        at = index.astype(np.int64)
        if self._only is not None:
            _, stride, inside, every, base, nbytes = self._only
            at *= stride
            at += inside
            return Resolved(at + base, np.full(len(at), nbytes, np.int64), at // every)
        row = at // self._each if self._each else self._firsts.searchsorted(at, side="right") - 1
        first, stride, inside, every, base, nbytes = self._fields[:, row]
        at -= first
        at *= stride
        at += inside
        return Resolved(at + base, nbytes, at // every)

    def few(self, index: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return address, length and block of each of a few descriptors, as ``resolve`` does."""
        found = []
        for number in index:
            if not 0 <= number < self.count:
                raise OutOfBounds(f"a descriptor's number leaves [0, {self.count})")
            row = self._rows[bisect_right(self._starts, number) - 1] if self._only is None else self._only
            first, stride, inside, every, base, nbytes = row
            at = (number - first) * stride + inside
            found.append((at + base, nbytes, at // every))
        return found


def _placed(rows: CheckedRows, levels: Sequence[Level], group: int) -> tuple[Int64s, Int64s, Flags]:
    """Return the start and the stride of each row's frame, and whether it is in VRAM. Raises: OutOfBounds."""
    if not levels:
        raise OutOfBounds(f"group {group} is not served")
    shape = len(rows.table)
    placed, vram = np.zeros(shape, bool), np.zeros(shape, bool)
    base, every = np.zeros(shape, np.int64), np.ones(shape, np.int64)
    for level in levels:
        fits, frame, there = level.place(rows.table)
        base = np.where(fits, level.bases[frame], base)
        every = np.where(fits, level.strides[frame], every)
        vram = np.where(fits, there, vram)
        placed |= fits
    if not placed.all():
        raise OutOfBounds(f"row {int(np.argmin(placed))} does not lie in the blocks of group {group}")
    return base, every, vram
