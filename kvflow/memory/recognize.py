"""Find the components of a layer in an engine's tensors: keys, values, latents and scales, or recurrent states."""

from collections.abc import Sequence

from kvflow.errors import SpecInvalid
from kvflow.layout.component import Component, dense_strides, place_component
from kvflow.layout.placement import bundles, page_bytes, states
from kvflow.layout.shards import Shard
from kvflow.layout.specs import ITEM_BYTES, CacheSpec, ComponentSpec
from kvflow.memory.axes import (
    RAW_DTYPES,
    LayerSlice,
    ReadTensor,
    TensorLayout,
    aligned,
    blocks_of,
    described,
    forms_to_try,
    sole_mismatch,
)


def read_attention(
    spec: CacheSpec, shard: Shard, tensors: Sequence[TensorLayout], place: LayerSlice, axes: str | None
) -> tuple[ReadTensor, ...]:
    """Find the axes of one tensor of a layer that keeps tokens, or of two: keys and values.

    ``axes`` is the form that the caller names; None tries the usual forms.

    Raises:
        SpecInvalid: dtype or shape does not fit the spec.
    """
    sizes = [bundle.cell_bytes for bundle in bundles(spec)]
    apart = len(tensors) > 1
    if apart and len(tensors) != len(sizes):
        expected = "one" if len(sizes) == 1 else f"one, or {len(sizes)} if keys and values are apart"
        raise SpecInvalid(
            f"{tensors[0].path.partition('[')[0]}: found a list of {len(tensors)} tensors; expected {expected}",
            remedy="Give the layer one tensor.",
        )
    for tensor in tensors:
        _check_dtype(spec, tensor)
    extents = {
        "K": 2,
        "R": spec.block_size // spec.kernel_tokens,
        "H": shard.heads(spec.components[0].shape[0]).count,
        "N": spec.kernel_tokens,
    }
    tried, nearest = [], ""
    for form in forms_to_try(spec, apart, place, axes):
        if "K" in form and len(set(sizes)) != 1:
            continue  # keys and values of different sizes do not fit one axis
        for count, position in place.choices if "L" in form else ((1, 0),):
            each = sizes if apart else [sizes[0] if "K" in form else sum(sizes)]
            wanted = [{**extents, "L": count, "C": nbytes} for nbytes in each]
            blocks = {blocks_of(form, tensor, want) for tensor, want in zip(tensors, wanted, strict=True)}
            if len(blocks) == 1 and 0 not in blocks:
                num_blocks = blocks.pop()
                return tuple(_dense(spec, ReadTensor(t, form, position, num_blocks, extents["R"])) for t in tensors)
            tried.append(described(form, tensors, wanted))
            if not nearest and (mismatch := sole_mismatch(form, tensors[0], wanted[0])):
                nearest = f"Only one axis differs from {form}: {mismatch}. "
    shapes = " and ".join(str(list(tensor.shape)) for tensor in tensors)
    several = ", given for several layers of its group" if place.crosses else ""
    raise SpecInvalid(
        f"{tensors[0].path}: shape is {shapes}{several}; tried {', '.join(dict.fromkeys(tried)) or 'no form'}",
        remedy=f"{nearest}Give tensors of the spec's heads, tokens and head size on this rank, "
        "or name their axes (axes=).",
    )


def attention_components(spec: CacheSpec, shard: Shard, found: Sequence[ReadTensor]) -> tuple[Component, ...]:
    """Return the components of a layer that keeps tokens, in the order of its spec.

    Raises:
        SpecInvalid: an element is not aligned to its size.
    """
    components = []
    before = 0
    for index, bundle in enumerate(bundles(spec)):
        whole = found[index] if len(found) > 1 else found[0]
        start = whole.start + index * whole.stride("K") if len(found) == 1 else whole.start
        skipped = before if len(found) == 1 and "K" not in whole.form else 0
        before += bundle.cell_bytes
        for part, inside in bundle.parts:
            item = ITEM_BYTES[part.dtype]
            component = place_component(
                part,
                shard,
                region=whole.tensor.region,
                offset=start + whole.content(skipped + inside),
                block_stride=whole.block_stride,
                kernel_stride=whole.kernel_stride,
                strides=(
                    # One head has no stride of its own: take the stride of heads outside of tokens.
                    whole.stride("H") if "H" in whole.form else spec.kernel_tokens * whole.stride("N"),
                    whole.stride("N"),
                    whole.stride("C") if whole.tensor.item_bytes == item else item,
                ),
            )
            components.append(aligned(component, whole.tensor))
    return tuple(components)


def _check_dtype(spec: CacheSpec, tensor: TensorLayout) -> None:
    own = list(dict.fromkeys(part.dtype for part in spec.components))
    if len(own) > 1:
        own = [dtype for dtype in own if ITEM_BYTES[dtype] == 1]  # content of several dtypes is counted in bytes
    if tensor.dtype not in (*own, *RAW_DTYPES):
        accepted = list(dict.fromkeys((*own, *RAW_DTYPES)))
        raise SpecInvalid(
            f"{tensor.path}: dtype is {tensor.dtype}; expected {' or '.join(accepted)}",
            remedy="Give the tensor in the spec's dtype, or as bytes.",
        )


def _dense(spec: CacheSpec, found: ReadTensor) -> ReadTensor:
    """Return the tensor, or refuse it if its bytes cannot be read as the spec's elements."""
    tensor = found.tensor
    if tensor.dense_content or all(ITEM_BYTES[part.dtype] == tensor.item_bytes for part in spec.components):
        return found
    raise SpecInvalid(
        f"{tensor.path}: stride of the last axis is {tensor.strides[-1]} bytes; expected {tensor.item_bytes}, "
        f"because {tensor.dtype} stands for elements of other sizes",
        remedy="Let the content of one head of one token lie together.",
    )


def read_states(
    spec: CacheSpec, shard: Shard, tensors: Sequence[TensorLayout], *, listed: bool
) -> tuple[int, tuple[Component, ...]]:
    """Return the number of blocks, and the states of a layer in the order of its spec.

    ``tensors`` has one tensor per state, or one page of bytes. In a list of the caller (``listed``) each is one state.

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
    return _state(part, shard, tensor, tensor.offset, tuple(by_axis[axis] for axis in axes))


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
        strides = dense_strides(part.held_shape(shard), ITEM_BYTES[part.dtype])
        components.append(_state(part, shard, tensor, tensor.offset + inside, strides))
    return blocks, tuple(components)


def _state(part: ComponentSpec, shard: Shard, tensor: TensorLayout, offset: int, strides: tuple[int, ...]) -> Component:
    block_stride = tensor.strides[0]
    component = place_component(
        part, shard, region=tensor.region, offset=offset, block_stride=block_stride, strides=strides
    )
    return aligned(component, tensor)
