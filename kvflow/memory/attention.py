"""Find the keys, values, latents and scales of a layer in an engine's tensors."""

from collections.abc import Sequence

from kvflow.errors import SpecInvalid
from kvflow.layout.component import Component
from kvflow.layout.pages import planes
from kvflow.layout.shards import Shard
from kvflow.layout.specs import ITEM_BYTES, CacheSpec
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
    """Find the axes of the tensors of a layer that keeps tokens.

    Args:
        spec: the layer's spec, with the block size of its group.
        shard: the rank.
        tensors: one tensor, or one for keys and one for values.
        place: the layer's place in a tensor of several layers.
        axes: the form that the caller names; None tries the usual forms.

    Raises:
        SpecInvalid: dtype or shape does not fit the spec.
    """
    sizes = [plane.cell_bytes for plane in planes(spec)]
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
    for index, plane in enumerate(planes(spec)):
        whole = found[index] if len(found) > 1 else found[0]
        start = whole.start + index * whole.stride("K") if len(found) == 1 else whole.start
        skipped = before if len(found) == 1 and "K" not in whole.form else 0
        before += plane.cell_bytes
        for part, inside in plane.parts:
            item = ITEM_BYTES[part.dtype]
            held = shard.heads(part.shape[0])
            component = Component(
                role=part.role,
                dtype=part.dtype,
                region=whole.tensor.region,
                offset=start + whole.content(skipped + inside),
                block_stride=whole.block_stride,
                kernel_stride=whole.kernel_stride,
                extents=part.held_shape(shard),
                strides=(
                    # One head has no stride of its own: take the stride of heads outside of tokens.
                    whole.stride("H") if "H" in whole.form else spec.kernel_tokens * whole.stride("N"),
                    whole.stride("N"),
                    whole.stride("C") if whole.tensor.item_bytes == item else item,
                ),
                shard_axis=0,
                first=held.first,
                total=held.total,
                token_axis=1,
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
    """Return the tensor if its bytes can be read as the spec's elements.

    Raises:
        SpecInvalid: the bytes of one element are not contiguous.
    """
    tensor = found.tensor
    if tensor.dense_content or all(ITEM_BYTES[part.dtype] == tensor.item_bytes for part in spec.components):
        return found
    raise SpecInvalid(
        f"{tensor.path}: stride of the last axis is {tensor.strides[-1]} bytes; expected {tensor.item_bytes}, "
        f"because {tensor.dtype} stands for elements of other sizes",
        remedy="Let the content of one head of one token lie together.",
    )
