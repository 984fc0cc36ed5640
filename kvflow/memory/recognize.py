"""Find the components of a layer in an engine's tensors: keys, values, latents and scales, or recurrent states.

Which axis is which: the first form that fits, in a fixed order. A form has one letter per axis: ``L`` layers, ``B``
blocks, ``R`` kernel blocks of one block, ``K`` keys and values, ``H`` heads, ``N`` tokens, ``C`` content. Without
``R``, ``B`` counts kernel blocks. The spec gives the length of every axis but ``B``, so a wrong form rarely fits.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from kvflow.errors import SpecInvalid
from kvflow.layout.component import Component, dense_strides, place_component
from kvflow.layout.placement import bundles, page_bytes, states
from kvflow.layout.shards import Shard
from kvflow.layout.specs import ITEM_BYTES, MLA, CacheSpec, ComponentSpec

AXIS_NAMES = {
    "L": "layers",
    "R": "kernel blocks of one block",
    "K": "keys and values",
    "H": "heads on this rank",
    "N": "tokens of one block",
    "C": "content of one head and token",
}

LATENT_FORMS = ("BNC", "BHNC")
PAIR_FORMS = ("BNHC", "BHNC")  # of keys and values in two tensors
WHOLE_FORMS = ("BHNC", "KBNHC", "BKNHC", "KBHNC", "BKHNC")
"""Of keys and values in one tensor. Tokens before heads come first: nothing distinguishes them if N == H."""
CROSS_LAYER_FORMS = (
    "LBHNC",
    "BLHNC",
    *(order + inner for order in ("LKB", "BLK", "LBK", "KLB", "KBL", "BKL") for inner in ("NHC", "HNC")),
)
"""Of several layers in one tensor. A layer axis inside of heads must be named, as it may be as long as theirs."""
CROSS_LAYER_LATENT_FORMS = ("LBNC", "BLNC")

RAW_DTYPES = ("uint8", "int8")  # tensors of these may hold any type; their last axis is then counted in bytes


class TensorLayout(Struct, frozen=True):
    """One tensor of an engine: its path in errors, strides in bytes, and the offset of its first element in a region.

    ``alignment_offset`` is that of the region in the storage, from which torch counts elements.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    region: int
    offset: int
    alignment_offset: int

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def dense_content(self) -> bool:
        """Whether the last axis is contiguous, so that it can be read as bytes."""
        return self.shape[-1] == 1 or self.strides[-1] == self.item_bytes


class LayerSlice(Struct, frozen=True):
    """The place of one layer among the layers that share a tensor."""

    choices: tuple[tuple[int, int], ...] = ((1, 0),)  # length of the layer axis and index on it, in order of trial
    crosses: bool = False  # layers of one group share the tensor, which then needs a layer axis


class ReadTensor(Struct, frozen=True):
    """One tensor whose axes are known: a letter per axis, and the index on the layer axis."""

    tensor: TensorLayout
    form: str
    layer: int
    num_blocks: int
    kernel_blocks: int

    def stride(self, letter: str) -> int:
        """Return the stride of an axis in bytes; 0 if the form does not have it."""
        at = self.form.find(letter)
        return self.tensor.strides[at] if at >= 0 else 0

    @property
    def start(self) -> int:
        """Bytes from the start of the region to block 0 of the layer."""
        return self.tensor.offset + self.layer * self.stride("L")

    @property
    def block_stride(self) -> int:
        """Bytes between blocks."""
        return self.stride("B") * (1 if "R" in self.form else self.kernel_blocks)

    @property
    def kernel_stride(self) -> int:
        """Bytes between kernel blocks of one block; 0 if there is one."""
        if self.kernel_blocks == 1:
            return 0
        return self.stride("R") if "R" in self.form else self.stride("B")

    @property
    def inner_axes(self) -> tuple[tuple[int, int], ...]:
        """All axes below blocks and layers, as (extent, stride in bytes)."""
        kept = [
            (extent, stride)
            for letter, extent, stride in zip(self.form, self.tensor.shape, self.tensor.strides, strict=True)
            if letter not in "LBR"
        ]
        return ((self.kernel_blocks, self.kernel_stride), *kept)

    def content(self, nbytes: int) -> int:
        """Return the distance in memory that corresponds to ``nbytes`` bytes of content."""
        return nbytes // self.tensor.item_bytes * self.stride("C")


def aligned(component: Component, tensor: TensorLayout) -> Component:
    """Return the component; SpecInvalid if an element is not aligned, so that no tensor of its dtype can contain it."""
    steps = [stride for extent, stride in zip(component.extents, component.strides, strict=True) if extent > 1]
    start = tensor.alignment_offset + component.offset
    for nbytes in (start, component.block_stride, component.kernel_stride, *steps):
        if nbytes % component.item_bytes:
            raise SpecInvalid(
                f"{tensor.path}.{component.role}: lies at byte {start} of its storage with strides of "
                f"{component.block_stride} bytes per block and {list(component.strides)} within; expected multiples "
                f"of {component.item_bytes}, the size of {component.dtype}",
                remedy="Let every component begin at a multiple of its element size.",
            )
    return component


def forms_to_try(spec: CacheSpec, apart: bool, place: LayerSlice, axes: str | None) -> list[str]:
    """Return the forms to try, in order."""
    if axes is not None:
        return [axes]
    latent = isinstance(spec, MLA)
    plain = PAIR_FORMS if apart else LATENT_FORMS if latent else WHOLE_FORMS
    crossing = () if apart else CROSS_LAYER_LATENT_FORMS if latent else CROSS_LAYER_FORMS
    forms = crossing if place.crosses else (*plain, *crossing)
    if spec.kernel_tokens == spec.block_size:
        return list(forms)
    return [variant for form in forms for variant in (form, form.replace("B", "BR"))]


def check_axes(path: str, spec: CacheSpec, axes: str, *, apart: bool) -> None:
    """Check a form that the caller names; SpecInvalid if it is none, or lacks an axis that the spec needs."""
    latent = isinstance(spec, MLA)
    needed = "BNC" if latent else "BHNC"
    optional = "LRH" if latent else "R" if apart else "LRK"
    if len(set(axes)) != len(axes) or not set(needed) <= set(axes) <= {*needed, *optional} or not axes.endswith("C"):
        raise SpecInvalid(
            f"{path}: axes is {axes!r}; expected each of {', '.join(needed)} once, {', '.join(optional)} at most "
            "once, and C at the end",
            remedy="Name the tensor's axes from the first to the last, for example 'KBHNC'.",
        )


def blocks_of(form: str, tensor: TensorLayout, extents: Mapping[str, int]) -> int:
    """Return the number of blocks of a tensor, if it has this form; otherwise 0."""
    if len(form) != len(tensor.shape):
        return 0
    found = dict(zip(form, tensor.shape, strict=True))
    found["C"] *= tensor.item_bytes
    blocks = found.pop("B")
    if any(extents[letter] != extent for letter, extent in found.items()):
        return 0
    merged = 1 if "R" in form else extents["R"]
    return 0 if blocks % merged else blocks // merged


def sole_mismatch(form: str, tensor: TensorLayout, extents: Mapping[str, int]) -> str:
    """Describe the only axis whose length does not fit a form; return empty text if several do not, or none."""
    if len(form) != len(tensor.shape):
        return ""
    found = dict(zip(form, tensor.shape, strict=True))
    wrong = [letter for letter in form if letter != "B" and found[letter] != _elements(letter, tensor, extents)]
    if len(wrong) != 1:
        return ""
    letter = wrong[0]
    return f"axis {letter} ({AXIS_NAMES[letter]}) is {found[letter]}, expected {_elements(letter, tensor, extents):g}"


def _elements(letter: str, tensor: TensorLayout, extents: Mapping[str, int]) -> float:
    return extents[letter] / (tensor.item_bytes if letter == "C" else 1)


def described(form: str, tensors: Sequence[TensorLayout], wanted: Sequence[Mapping[str, int]]) -> str:
    """Write a form with the lengths that the spec requires, for example ``KBNHC = [2, B, 16, 8, 64]``."""
    texts = []
    for tensor, extents in zip(tensors, wanted, strict=True):
        multiple = "" if "R" in form or extents["R"] == 1 else f"{extents['R']} * "
        named = {
            **{letter: str(extent) for letter, extent in extents.items()},
            "B": f"{multiple}B",
            "C": f"{extents['C'] / tensor.item_bytes:g}",
        }
        texts.append(f"[{', '.join(named[letter] for letter in form)}]")
    return f"{form} = {' and '.join(texts)}"


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
    """Return the components of a layer that keeps tokens, in the order of its spec. Raises as ``aligned`` does."""
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
