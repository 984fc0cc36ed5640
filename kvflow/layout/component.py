"""A registered address range, and one named tensor in it: an affine map from canonical coordinates to bytes."""

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvflow.layout.shards import Held, Shard
from kvflow.layout.specs import DIMS_MAX, ITEM_BYTES, ComponentRole, ComponentSpec, DType

ADDRESS_MAX = (1 << 63) - 1
"""Addresses and lengths are int64 in descriptor lists; no user address of a 64-bit machine reaches this."""

METADATA_BYTES_MAX = 1 << 20  # largest metadata of a transport; NIXL needs about 44 bytes per region

Address = Annotated[int, Meta(ge=0, le=ADDRESS_MAX)]


class Region(Struct, frozen=True):
    """A contiguous address range that one worker registers with its transport.

    Attributes:
        address: address of the first byte, in the owner's address space.
        nbytes: length.
        memory: ``DRAM`` or ``VRAM``.
        device: device index; 0 for DRAM.
    """

    address: Address
    nbytes: Annotated[int, Meta(ge=1, le=ADDRESS_MAX)]
    memory: Literal["DRAM", "VRAM"] = "DRAM"
    device: Annotated[int, Meta(ge=0, le=1023)] = 0


Extent = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Length = Annotated[int, Meta(ge=1, le=1 << 40)]
Axis = Annotated[int, Meta(ge=-1, le=DIMS_MAX - 1)]


class Component(Struct, frozen=True, array_like=True):
    """One named tensor inside the pages of one layer.

    Element ``(i0, i1, ...)`` of kernel block ``r`` of block ``b`` lies at ``offset + b * block_stride +
    r * kernel_stride + i0 * strides[0] + i1 * strides[1] + ...`` of its region. Attention has the axes (head held
    here, token, content); a state has its own, and one kernel block.

    Attributes:
        role: ``k``, ``v``, ``latent``, ``conv_x``, ``ssm``, ``k_scale``, ...
        dtype: element type.
        region: index into the manifest's regions.
        offset: bytes from the start of the region to block 0.
        block_stride: bytes between blocks.
        kernel_stride: bytes between kernel blocks of one block; 0 if there is one.
        extents: lengths of the axes that this rank holds, in elements.
        strides: strides in bytes, one per axis.
        shard_axis: axis that ranks divide; -1 if every rank holds all.
        first: first index that this rank holds along it, counted in the whole model.
        total: length of that axis in the whole model; 1 without such an axis.
        token_axis: axis of tokens; -1 for a state.
    """

    role: ComponentRole
    dtype: DType
    region: Annotated[int, Meta(ge=0, le=1 << 16)]
    offset: Extent
    block_stride: Extent
    kernel_stride: Extent
    extents: Annotated[tuple[Length, ...], Meta(min_length=1, max_length=DIMS_MAX)]
    strides: Annotated[tuple[Extent, ...], Meta(min_length=1, max_length=DIMS_MAX)]
    shard_axis: Axis = 0
    first: Extent = 0
    total: Length = 1
    token_axis: Axis = 1

    @property
    def held(self) -> Held:
        """The part of the sharded axis that this rank holds; one of one without such an axis."""
        count = self.extents[self.shard_axis] if self.shard_axis >= 0 else 1
        return Held(self.first, count, self.total)

    @property
    def num_tokens(self) -> int:
        """Tokens of one kernel block; 0 for a state."""
        return self.extents[self.token_axis] if self.token_axis >= 0 else 0

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of one kernel block, without gaps between its elements."""
        return math.prod(self.extents) * self.item_bytes

    @property
    def span(self) -> int:
        """Bytes from the first to the last of one kernel block."""
        reach = sum((extent - 1) * stride for extent, stride in zip(self.extents, self.strides, strict=True))
        return reach + self.item_bytes

    def kernel_blocks(self, block_size: int) -> int:
        """Return how many kernel blocks a block has."""
        return block_size // self.num_tokens if self.num_tokens else 1

    def end(self, num_blocks: int, kernel_blocks: int = 1) -> int:
        """Return the offset in the region after the last byte of the blocks."""
        last = (num_blocks - 1) * self.block_stride + (kernel_blocks - 1) * self.kernel_stride
        return self.offset + last + self.span


def place_component(
    part: ComponentSpec,
    shard: Shard,
    *,
    region: int = 0,
    offset: int,
    block_stride: int,
    kernel_stride: int = 0,
    strides: tuple[int, ...],
) -> Component:
    """Return what one rank holds of a component, at this place. Offset and strides are in bytes."""
    held = shard.heads(part.shape[part.shard_axis]) if part.shard_axis >= 0 else Held(0, 1, 1)
    return Component(
        role=part.role,
        dtype=part.dtype,
        region=region,
        offset=offset,
        block_stride=block_stride,
        kernel_stride=kernel_stride,
        extents=part.held_shape(shard),
        strides=strides,
        shard_axis=part.shard_axis,
        first=held.first,
        total=held.total,
        token_axis=part.token_axis,
    )


def dense_strides(extents: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Return the strides in bytes of a contiguous tensor."""
    strides = [item_bytes]
    for extent in reversed(extents[1:]):
        strides.insert(0, strides[0] * extent)
    return tuple(strides)
