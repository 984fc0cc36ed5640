"""Find out which axis of an engine's tensor is which: the first form that fits, in a fixed order.

A form has one letter per axis: ``L`` layers, ``B`` blocks, ``R`` kernel blocks of one block, ``K`` keys and values,
``H`` heads, ``N`` tokens, ``C`` content. Without ``R``, ``B`` counts kernel blocks. The spec gives the length of every
axis but ``B``, so a wrong form rarely fits.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from kvflow.errors import SpecInvalid
from kvflow.layout.component import Component
from kvflow.layout.specs import ITEM_BYTES, MLA, CacheSpec

AXIS_NAMES = {
    "L": "layers",
    "R": "kernel blocks of one block",
    "K": "keys and values",
    "H": "heads on this rank",
    "N": "tokens of one block",
    "C": "content of one head and token",
}

LATENT_FORMS = ("BNC", "BHNC")
PAIR_FORMS = ("BNHC", "BHNC")
"""Of keys and values in two tensors."""
WHOLE_FORMS = ("BHNC", "KBNHC", "BKNHC", "KBHNC", "BKHNC")
"""Of keys and values in one tensor. Tokens before heads come first: nothing distinguishes them if N == H."""
CROSS_LAYER_FORMS = (
    "LBHNC",
    "BLHNC",
    *(order + inner for order in ("LKB", "BLK", "LBK", "KLB", "KBL", "BKL") for inner in ("NHC", "HNC")),
)
"""Of several layers in one tensor. A layer axis inside of heads must be named, as it may be as long as theirs."""
CROSS_LAYER_LATENT_FORMS = ("LBNC", "BLNC")

RAW_DTYPES = ("uint8", "int8")
"""Tensors of these may hold any type; their last axis is then counted in bytes."""


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
    """The place of one layer among the layers that share a tensor.

    ``choices`` are (length of the layer axis, index on it), in the order in which they are tried. ``crosses`` says that
    layers of one group share the tensor, which then needs a layer axis.
    """

    choices: tuple[tuple[int, int], ...] = ((1, 0),)
    crosses: bool = False


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
    """Return the component.

    Raises:
        SpecInvalid: an element is not aligned to its size, so no tensor of its dtype can contain it.
    """
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
    """Check a form that the caller names.

    Raises:
        SpecInvalid: it is not a form, or lacks an axis that the spec needs.
    """
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
