"""The blocks of a cache as rows of other memory: one contiguous row for each block, whatever the cache's layout."""

import numpy as np
import numpy.typing as npt
from msgspec import structs

from kvflow.errors import SpecInvalid
from kvflow.layout.component import Component
from kvflow.layout.manifest import Layer, Manifest, ManifestGroup
from kvflow.layout.pages import round_up
from kvflow.layout.tracks import Tracks, tracks_of, why_unserved

ROW_ALIGNMENT = 64
"""Bytes that the start of each stretch in a row, and of each row, is a multiple of. Elements have up to 8 bytes."""

Int64s = npt.NDArray[np.int64]


def rows_of(manifest: Manifest) -> tuple[tuple[ManifestGroup, ...], int]:
    """Return the groups of a cache as if each block were a row of region 0, and the bytes of a row.

    The stretches of a block lie in the row in the order of their addresses; within a stretch nothing changes. All
    groups use the same rows, each from the start, because a block id belongs to one group at a time.

    Raises:
        SpecInvalid: the elements of a component would not be evenly spaced, or a group has too many stretches.
    """
    tracks = tracks_of(manifest)
    for index, found in enumerate(tracks):
        if not found:
            raise SpecInvalid(f"group {index} cannot be divided into blocks: {why_unserved(manifest, index)}")
    rows = [_Row(found) for found in tracks]
    row_bytes = max(row.nbytes for row in rows)
    groups = tuple(
        structs.replace(
            group,
            layers=tuple(
                structs.replace(
                    layer,
                    components=tuple(row.placed(manifest, group, layer, part, row_bytes) for part in layer.components),
                )
                for layer in group.layers
            ),
        )
        for group, row in zip(manifest.groups, rows, strict=True)
    )
    return groups, row_bytes


class _Row:
    """Where the stretches of one group lie in a row.

    Attributes:
        nbytes: of all stretches, padding included.
    """

    def __init__(self, tracks: Tracks) -> None:
        ordered = sorted(tracks, key=lambda track: track.address)
        self._starts = np.array([track.address for track in ordered], np.int64)
        self._stops = self._starts + np.array([track.span for track in ordered], np.int64)
        sizes = [round_up(track.span, ROW_ALIGNMENT) for track in ordered]
        self._offsets = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
        self.nbytes = sum(sizes)

    def placed(
        self, manifest: Manifest, group: ManifestGroup, layer: Layer, part: Component, row_bytes: int
    ) -> Component:
        """Return a component with its place in the row."""
        first = manifest.regions[part.region].address + part.offset
        axes = [(part.kernel_stride, group.kernel_blocks), *zip(part.strides, part.extents, strict=True)]
        strides = [self._stride(first, *axis) for axis in axes]
        # Axes whose stride stays lie within a stretch: their ends must be where the stretch of their start is.
        moved = [axis for axis, stride in zip(axes, strides, strict=True) if stride not in (None, axis[0])]
        kept = sum((extent - 1) * axis for (axis, extent), stride in zip(axes, strides, strict=True) if stride == axis)
        places = np.zeros(1, np.int64)
        expected = self._place(np.array([first]))
        for (stride, extent), new in zip(axes, strides, strict=True):
            if (stride, extent) in moved and new is not None:
                places = (places[:, None] + np.arange(extent) * stride).ravel()
                expected = (expected[:, None] + np.arange(extent) * new).ravel()
        reach = kept + part.item_bytes - 1
        is_even = None not in strides and all(
            np.array_equal(self._place(first + places + end), expected + end) for end in (0, reach)
        )
        if not is_even:
            raise SpecInvalid(
                f"{layer.name}.{part.role}: its elements would not be evenly spaced in rows of host memory",
                remedy="Use another VLLM_KV_CACHE_LAYOUT, such as LBHNC, or leave kv_buffer_device out.",
            )
        kernel_stride, *inner = [int(stride or 0) for stride in strides]
        return structs.replace(
            part,
            region=0,
            offset=int(self._place(np.array([first]))[0]),
            block_stride=row_bytes,
            kernel_stride=kernel_stride,
            strides=tuple(inner),
        )

    def _stride(self, first: int, stride: int, extent: int) -> int | None:
        """Return the stride of an axis in the row; None if it is not even there."""
        if extent == 1:
            return stride
        steps = np.diff(self._place(first + stride * np.arange(extent, dtype=np.int64)))
        return int(steps[0]) if np.all(steps == steps[0]) and steps[0] > 0 else None

    def _place(self, addresses: Int64s) -> Int64s:
        """Return where bytes of block 0 lie in the row; -1 for a byte that is in no stretch."""
        track = np.maximum(self._starts.searchsorted(addresses, side="right") - 1, 0)
        inside = addresses - self._starts[track]
        places: Int64s = np.where((inside >= 0) & (addresses < self._stops[track]), self._offsets[track] + inside, -1)
        return places
