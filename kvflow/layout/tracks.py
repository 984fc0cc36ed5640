"""Where the blocks of each group lie, as the bytes that a block owns: what a worker that serves reads looks up.

Each component is cut at the axes that lie outside of blocks, as heads may. What remains is one *stretch* of bytes in
each block, and a *track* of it through all blocks; stretches that touch are one track. Bytes between the elements of a
stretch belong to the track, so they must not be another block's: such a stretch is cut at more axes.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvflow.layout.component import Component
from kvflow.layout.manifest import Manifest

Int64s = npt.NDArray[np.int64]
Intps = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]

TRACKS_MAX = 1 << 15
"""Of one group, before neighbors merge: 128 layers with keys and values of 128 heads outside of blocks. A group with
more is not served."""

LEVELS_MAX = 16
"""Memory that kvflow allocates or adopts has one or two levels."""

ONE_BLOCK = 1 << 62
"""Stride of a pool of one block: nothing recurs."""

PAIRS_MAX = 1 << 18
"""Pieces that are compared at a time: some 25 MiB."""


class Track(NamedTuple):
    """The bytes ``[address + b * stride, address + b * stride + span)`` of block ``b``, which no other block has.

    With one block ``stride`` means nothing, otherwise it is at least ``span``. ``device`` is 0 for DRAM.
    """

    address: int
    stride: int
    span: int
    count: int  # type: ignore[assignment]  # no one counts equal fields of a track
    memory: str = "DRAM"
    device: int = 0


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


class _Cut(NamedTuple):
    """Where a component is cut: the first ``depth`` axes (stride, extent), the largest first, lie outside stretches."""

    group: int
    component: Component
    axes: tuple[tuple[int, int], ...]
    depth: int

    @property
    def pieces(self) -> int:
        return math.prod(extent for _, extent in self.axes[: self.depth])

    @property
    def span(self) -> int:
        reach = sum((extent - 1) * stride for stride, extent in self.axes[self.depth :])
        return reach + self.component.item_bytes

    @property
    def loose(self) -> bool:
        """Whether there are bytes between the elements of a stretch."""
        inside = math.prod(extent for _, extent in self.axes[self.depth :])
        return self.span > inside * self.component.item_bytes

    def offsets(self) -> Int64s:
        """Return where the pieces begin, from the component's first byte."""
        offsets = np.zeros(1, np.int64)
        for stride, extent in self.axes[: self.depth]:
            offsets = (offsets[:, None] + np.arange(extent, dtype=np.int64) * stride).ravel()
        return offsets


class _Pieces:
    """The pieces of all cuts, as columns. Groups of one ``kin`` share block ids, so that one has an id at a time."""

    def __init__(self, manifest: Manifest, cuts: Sequence[_Cut]) -> None:
        offsets = [cut.offsets() + _address(manifest, cut.component) for cut in cuts]
        self.cut = np.repeat(np.arange(len(cuts)), [len(each) for each in offsets])
        owner = np.array([cut.group for cut in cuts], np.int64)
        strides = [cut.component.block_stride if manifest.num_blocks > 1 else ONE_BLOCK for cut in cuts]
        self.start = np.concatenate(offsets)
        self.owner = owner[self.cut]
        self.kin = np.array(manifest.aliases, np.int64)[self.owner]
        self.span = np.array([cut.span for cut in cuts], np.int64)[self.cut]
        self.stride = np.array(strides, np.int64)[self.cut]
        self.end = (
            self.start + self.span + (manifest.num_blocks - 1) * np.where(self.stride < ONE_BLOCK, self.stride, 0)
        )
        self._num_blocks = manifest.num_blocks

    def foreign(self, suspects: Flags) -> set[int]:
        """Return the suspect cuts with bytes of other blocks, or of another kin, in the stretch of a block."""
        order = np.argsort(self.start)
        starts, reached = self.start[order], np.maximum.accumulate(self.end[order])
        mine = np.flatnonzero(suspects[self.cut])
        first = reached.searchsorted(self.start[mine], side="right")
        counts = np.maximum(starts.searchsorted(self.end[mine], side="left") - first, 0)
        found: set[int] = set()
        for begin in range(0, len(mine), step := max(1, PAIRS_MAX // max(1, int(counts.max(initial=0))))):
            some = counts[begin : begin + step]
            one = np.repeat(mine[begin : begin + step], some)
            within = np.arange(len(one)) - np.repeat(np.cumsum(some) - some, some)
            other = order[np.repeat(first[begin : begin + step], some) + within]
            found.update(np.unique(self.cut[one[self._meet(one, other)]]).tolist())
        return found

    def _meet(self, one: Intps, other: Intps) -> Flags:
        """Return for each pair whether a block of the one has bytes of another block of the other in its stretch."""
        apart = self.start[other] - self.start[one]
        same = self.stride[one] == self.stride[other]
        every = np.gcd(self.stride[one], self.stride[other])
        # How many blocks the other's is ahead of the one's where the two have bytes in common.
        least, most = (-self.span[other] - apart) // every + 1, (self.span[one] - apart - 1) // every
        ahead = self._num_blocks - 1
        least, most = np.where(same, np.maximum(least, -ahead), least), np.where(same, np.minimum(most, ahead), most)
        kin = self.kin[one] == self.kin[other]
        # What recurs at unlike strides in groups of one kin has its block ids from one pool, and the engine's word.
        elsewhere = np.where(kin, same & ((least < 0) | (most > 0)), True)
        return (least <= most) & elsewhere


def tracks_of(manifest: Manifest) -> tuple[Tracks, ...]:
    """Return the tracks of each group of a worker's own manifest; none for a group that cannot be served."""
    manifest.check()
    served = _cut_all(manifest)
    tracks = []
    for group in range(len(manifest.groups)):
        found = Tracks(_merged(manifest, [cut for cut in served if cut.group == group]))
        tracks.append(found if found.levels else Tracks())
    return tuple(tracks)


def _cut_all(manifest: Manifest) -> list[_Cut]:
    """Cut every component until no stretch has bytes of other blocks; return the cuts of groups that can be served."""
    cuts = [
        _cut(index, component, group.kernel_blocks, manifest.num_blocks)
        for index, group in enumerate(manifest.groups)
        for layer in group.layers
        for component in layer.components
    ]
    refused: set[int] = set()
    while True:
        pieces = [0] * len(manifest.groups)
        for cut in cuts:
            pieces[cut.group] += cut.pieces
        refused |= {group for group, count in enumerate(pieces) if count > TRACKS_MAX}
        # Of a group that is not served, the whole extent counts as occupied.
        cuts = [cut._replace(depth=0) if cut.group in refused else cut for cut in cuts]
        loose = np.array([cut.loose and cut.group not in refused for cut in cuts])
        foreign = _Pieces(manifest, cuts).foreign(loose) if loose.any() else set()
        if not foreign:
            return [cut for cut in cuts if cut.group not in refused]
        cuts = [cut._replace(depth=cut.depth + 1) if index in foreign else cut for index, cut in enumerate(cuts)]


def _cut(group: int, component: Component, kernel_blocks: int, num_blocks: int) -> _Cut:
    """Cut a component at the axes that lie outside of blocks."""
    axes = [*zip(component.strides, component.extents, strict=True), (component.kernel_stride, kernel_blocks)]
    axes = sorted(((stride, extent) for stride, extent in axes if extent > 1), reverse=True)
    outside = sum(stride >= component.block_stride for stride, _ in axes) if num_blocks > 1 else 0
    return _Cut(group, component, tuple(axes), outside)


def _address(manifest: Manifest, component: Component) -> int:
    return manifest.regions[component.region].address + component.offset


def _merged(manifest: Manifest, cuts: Sequence[_Cut]) -> Iterator[Track]:
    """Yield the tracks of one group: stretches that touch, in one region and at one stride, are one."""
    several = manifest.num_blocks > 1
    stretches = sorted(
        (cut.component.region, cut.component.block_stride if several else ONE_BLOCK, address, cut.span)
        for cut in cuts
        for address in (cut.offsets() + _address(manifest, cut.component)).tolist()
    )
    for (index, stride), alike in groupby(stretches, key=lambda stretch: stretch[:2]):
        region = manifest.regions[index]
        spans: list[tuple[int, int]] = []
        for _, _, address, span in alike:
            if spans and address <= spans[-1][1] and max(spans[-1][1], address + span) - spans[-1][0] <= stride:
                spans[-1] = (spans[-1][0], max(spans[-1][1], address + span))
            else:
                spans.append((address, address + span))
        for start, stop in spans:
            yield Track(
                start, stride if several else 0, stop - start, manifest.num_blocks, region.memory, region.device
            )
