"""Views of a layer in the form that an attention backend expects: strides and offset of one or more tensors."""

from collections.abc import Sequence

from msgspec import Struct

from kvflow.layout.specs import ITEM_BYTES, CacheSpec


class View(Struct, frozen=True):
    """A tensor as an attention backend expects it; strides and offset are bytes of the allocation."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class BundleAxes(Struct, frozen=True):
    """One bundle of one layer, with its axes as (length, stride in bytes)."""

    offset: int
    cell_bytes: int
    blocks: tuple[tuple[int, int], ...]
    heads: tuple[int, int]
    tokens: tuple[int, int]


def block_axes(
    num_blocks: int, block_stride: int, kernel_blocks: int, kernel_stride: int
) -> tuple[tuple[int, int], ...]:
    """Return the axis of blocks as (length, stride): that of kernel blocks if one stride reaches all, or both."""
    if kernel_blocks == 1:
        return ((num_blocks, block_stride),)
    if block_stride == kernel_blocks * kernel_stride:
        return ((num_blocks * kernel_blocks, kernel_stride),)
    return ((num_blocks, block_stride), (kernel_blocks, kernel_stride))


def attention_views(spec: CacheSpec, tensors: Sequence[BundleAxes], kv: str) -> tuple[View, ...]:
    """Return ``[block, head, token, content]``; with ``split`` K and V ``[2, block, token, head, content]``.

    With ``block_split`` the pair comes after the block. A latent is ``[block, token, content]``. Kernel blocks count as
    blocks if one stride reaches all of them; otherwise they are a separate axis after the blocks. If the components
    differ in dtype, the view is of bytes.
    """
    dtypes = {part.dtype for part in spec.components}
    dtype = dtypes.pop() if len(dtypes) == 1 else "uint8"
    size = ITEM_BYTES[dtype]
    first, cells = tensors[0], [tensor.cell_bytes for tensor in tensors]
    if len(tensors) == 1:
        return (view_of(dtype, first.offset, *first.blocks, first.tokens, (first.cell_bytes // size, size)),)
    if kv == "content":
        return (view_of(dtype, first.offset, *first.blocks, first.heads, first.tokens, (sum(cells) // size, size)),)
    if len(set(cells)) == 1:
        pair, content = (2, tensors[1].offset - first.offset), (first.cell_bytes // size, size)
        outer = (pair, *first.blocks) if kv == "split" else (*first.blocks, pair)
        return (view_of(dtype, first.offset, *outer, first.tokens, first.heads, content),)
    return tuple(
        view_of(dtype, each.offset, *each.blocks, each.tokens, each.heads, (each.cell_bytes // size, size))
        for each in tensors
    )


def view_of(dtype: str, offset: int, *axes: tuple[int, int]) -> View:
    """Return the view with these axes, each as (length, stride in bytes)."""
    return View(dtype, tuple(extent for extent, _ in axes), tuple(stride for _, stride in axes), offset)
