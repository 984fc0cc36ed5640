"""Find the states of a recurrent layer in an engine's tensors: one tensor per state, or one page of bytes for all."""

from collections.abc import Sequence

from kvflow.errors import SpecInvalid
from kvflow.layout.component import Component
from kvflow.layout.pages import page_bytes, states
from kvflow.layout.shards import Shard
from kvflow.layout.specs import ITEM_BYTES, CacheSpec, ComponentSpec
from kvflow.memory.axes import RAW_DTYPES, TensorLayout, aligned


def read_states(
    spec: CacheSpec, shard: Shard, tensors: Sequence[TensorLayout], *, listed: bool
) -> tuple[int, tuple[Component, ...]]:
    """Find the states of one layer.

    Args:
        spec: a spec of a layer that keeps no tokens.
        shard: the rank.
        tensors: one tensor per state, in the order of the spec, or one page of bytes.
        listed: whether the caller passed a list, in which each tensor is one state.

    Returns:
        The number of blocks, and the components in the order of the spec.

    Raises:
        SpecInvalid: dtype, shape or number of tensors does not fit the spec.
    """
    first = tensors[0]
    if not listed and not _is_state(spec, first):
        return _read_page(spec, shard, first)
    if len(tensors) != len(spec.components):
        raise SpecInvalid(
            f"{first.path.partition('[')[0]}: found {len(tensors)} tensors; expected one for each of "
            f"{[part.role for part in spec.components]}",
            remedy="Give a list with one tensor per state, in the order of the spec.",
        )
    components = tuple(_read_state(part, shard, tensor) for part, tensor in zip(spec.components, tensors, strict=True))
    for tensor in tensors:
        if tensor.shape[0] != first.shape[0]:
            raise SpecInvalid(
                f"{tensor.path}: has {tensor.shape[0]} blocks; expected {first.shape[0]} as {first.path}",
                remedy="Give the whole tensor of each state.",
            )
    return first.shape[0], components


def _is_state(spec: CacheSpec, tensor: TensorLayout) -> bool:
    """Return whether a tensor that is not in a list is the only state of its layer, and not a page of bytes."""
    page = tensor.dtype in RAW_DTYPES and len(tensor.shape) == 2
    return len(spec.components) == 1 and len(tensor.shape) == len(spec.components[0].shape) + 1 and not page


def _read_state(part: ComponentSpec, shard: Shard, tensor: TensorLayout) -> Component:
    """Find one state in ``[block, *shape]``. The two axes of a matrix may be exchanged if their lengths differ."""
    if tensor.dtype not in (part.dtype, *RAW_DTYPES):
        raise SpecInvalid(
            f"{tensor.path}: dtype is {tensor.dtype}; expected {part.dtype}, or int8 or uint8 as bytes",
            remedy=f"Give the tensor in the dtype of the spec, or set {part.role} to {tensor.dtype} in the spec.",
        )
    item = ITEM_BYTES[part.dtype]
    held = part.held_shape(shard)
    axes = tuple(range(len(held)))
    for order in (axes, axes[::-1]) if len(axes) == 2 else (axes,):
        wanted = [held[axis] for axis in order]
        wanted[-1] = wanted[-1] * item // tensor.item_bytes
        if tensor.shape[1:] == tuple(wanted) and tensor.shape[0] > 0:
            break
    else:
        wanted = [*held[:-1], held[-1] * item // tensor.item_bytes]
        raise SpecInvalid(
            f"{tensor.path}: shape of {part.role} is {list(tensor.shape)}; tried "
            f"[B, {', '.join(map(str, wanted))}]{' and its two axes exchanged' if len(axes) == 2 else ''}",
            remedy="Give what this rank holds of the state.",
        )
    strides = list(tensor.strides[1:])
    if tensor.item_bytes != item:
        if not tensor.dense_content:
            raise SpecInvalid(
                f"{tensor.path}: stride of the last axis is {tensor.strides[-1]} bytes; expected "
                f"{tensor.item_bytes}, because {tensor.dtype} stands for {part.dtype}",
                remedy=f"Give a tensor whose last axis is contiguous, or one of {part.dtype}.",
            )
        strides[-1] = item
    by_axis = dict(zip(order, strides, strict=True))
    return _component(part, shard, tensor, tensor.offset, tuple(by_axis[axis] for axis in axes))


def _read_page(spec: CacheSpec, shard: Shard, tensor: TensorLayout) -> tuple[int, tuple[Component, ...]]:
    """Find the states, one after the other, in a page of bytes: ``[block, bytes]`` or ``[block, 1, 1, bytes]``."""
    if tensor.dtype not in RAW_DTYPES:
        raise SpecInvalid(
            f"{tensor.path}: dtype is {tensor.dtype}; expected int8 or uint8 for a page of states",
            remedy="Give a list with one tensor per state, or the page as bytes.",
        )
    placed = states(spec, shard)
    last, inside = placed[-1]
    least, most = inside + last.nbytes(shard), page_bytes(spec, shard)
    blocks, *ones, nbytes = (*tensor.shape, 0) if len(tensor.shape) == 1 else tensor.shape
    if blocks < 1 or ones not in ([], [1, 1]) or not least <= nbytes <= most:
        size = str(least) if least == most else f"{least} to {most}"
        raise SpecInvalid(
            f"{tensor.path}: shape is {list(tensor.shape)}; tried [B, {size}], [B, 1, 1, {size}]",
            remedy="Give the page of this rank, or a list with one tensor per state.",
        )
    if not tensor.dense_content:
        raise SpecInvalid(
            f"{tensor.path}: stride of the last axis is {tensor.strides[-1]} bytes; expected 1",
            remedy="Give a page whose last axis is contiguous.",
        )
    components = []
    for part, inside in placed:
        strides = [ITEM_BYTES[part.dtype]]
        for extent in reversed(part.held_shape(shard)[1:]):
            strides.insert(0, strides[0] * extent)
        components.append(_component(part, shard, tensor, tensor.offset + inside, tuple(strides)))
    return blocks, tuple(components)


def _component(
    part: ComponentSpec, shard: Shard, tensor: TensorLayout, offset: int, strides: tuple[int, ...]
) -> Component:
    held = shard.heads(part.shape[part.shard_axis]) if part.shard_axis >= 0 else None
    component = Component(
        role=part.role,
        dtype=part.dtype,
        region=tensor.region,
        offset=offset,
        block_stride=tensor.strides[0],
        kernel_stride=0,
        extents=part.held_shape(shard),
        strides=strides,
        shard_axis=part.shard_axis,
        first=held.first if held else 0,
        total=held.total if held else 1,
        token_axis=-1,
    )
    return aligned(component, tensor)
