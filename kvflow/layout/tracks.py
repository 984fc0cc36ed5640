"""Where the blocks of each group lie, as the bytes that a block owns: what a worker that serves reads looks up.

Each component is cut at the axes that lie outside of blocks, as heads may. What remains is one *stretch* of bytes in
each block, and a *track* of it through all blocks; stretches that touch are one track. Bytes between the elements of a
stretch belong to the track, so they must not be another block's: such a stretch is cut at more axes.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from kvflow.ids import Flags, Int64s, Intps
from kvflow.layout.component import Component
from kvflow.layout.manifest import Manifest

TRACKS_MAX = 1 << 15
"""Of one group, before neighbors merge: 128 layers with keys and values of 128 heads outside of blocks. A group with
more is not served."""

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


def tracks_of(manifest: Manifest) -> tuple[tuple[Track, ...], ...]:
    """Return the tracks of each group of a worker's own manifest; none for a group that cannot be served."""
    manifest.check()
    served = _cut_all(manifest)
    groups = range(len(manifest.groups))
    return tuple(tuple(_merged(manifest, [cut for cut in served if cut.group == group])) for group in groups)


def _cut_all(manifest: Manifest) -> list[_Cut]:
    """Cut every component until no stretch has bytes of other blocks; return the cuts of groups that can be served."""
    cuts = [
        _cut(index, component, group.kernel_blocks, manifest.num_blocks)
        for index, group in enumerate(manifest.groups)
        for _, component in group.components
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
