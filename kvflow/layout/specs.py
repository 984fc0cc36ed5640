"""Cache specs: what one layer keeps for one block. Only this module knows kinds of cache.

A spec describes the whole model, not a rank: head counts are those of the model. A spec and a ``Shard`` give the
components and the page size of a rank.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from kvflow.errors import SpecInvalid, shown
from kvflow.layout.shards import Shard
from kvflow.validation import SuggestingMeta, find_fault

LAYER_NAME_MAX = 256  # Hugging Face module paths are much shorter
DIMS_MAX = 8  # attention has three axes, and no state of known models has more
ARRANGEMENT_MAX = 48  # a role appends the kernel block to the arrangement

Positive = Annotated[int, Meta(ge=1, le=1 << 24)]
Natural = Annotated[int, Meta(ge=0, le=1 << 24)]
ComponentRole = Annotated[str, Meta(min_length=1, max_length=64)]
DType = Literal[
    "float32", "float16", "bfloat16",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "int8", "uint8",
]  # fmt: skip
"""Torch's names of element types. Peers compare them: name what the bytes are, even if the tensor's dtype is uint8."""


ITEM_BYTES: dict[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int8": 1,
    "uint8": 1,
}

NVFP4_GROUP = 16  # elements that share one scale in nvfp4; two elements are packed into one byte


class ComponentSpec(Struct, frozen=True):
    """One named tensor inside a page, before any shard or address.

    Attributes:
        role: ``k``, ``v``, ``latent``, ``k_scale``, a state's name, ...
        dtype: element type.
        shape: shape of one block in the whole model, in elements: (heads, tokens, content), or that of a state.
        shard_axis: axis along which ranks divide it; -1 if every rank holds it whole.
        token_axis: axis of tokens; -1 for a state.
    """

    role: str
    dtype: DType
    shape: tuple[int, ...]
    shard_axis: int = 0
    token_axis: int = 1

    def held_shape(self, shard: Shard) -> tuple[int, ...]:
        """Return the shape of the part that one rank holds."""
        if self.shard_axis < 0:
            return self.shape
        count = shard.heads(self.shape[self.shard_axis]).count
        return (*self.shape[: self.shard_axis], count, *self.shape[self.shard_axis + 1 :])

    def nbytes(self, shard: Shard) -> int:
        """Return the bytes of one block on one rank."""
        return math.prod(self.held_shape(shard)) * ITEM_BYTES[self.dtype]


def _name_dtypes(struct: Struct) -> None:
    """Replace a ``torch.dtype`` by its name; torch itself is not imported."""
    for field in ("dtype", "rope_dtype"):
        value = getattr(struct, field, None)
        if type(value).__module__ == "torch":
            force_setattr(struct, field, str(value).removeprefix("torch."))


class _Spec(
    Struct, metaclass=SuggestingMeta, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Fields of every kind of cache.

    Attributes:
        block_size: tokens in one block.
        kernel_block_size: tokens in one block of the attention kernel, a divisor of ``block_size``; 0 if the kernel
            uses whole blocks. A page holds its kernel blocks one after the other.
        page_bytes: bytes of one page on one rank, padding included; None without padding.
    """

    block_size: Positive
    kernel_block_size: Natural = 0
    page_bytes: Annotated[int, Meta(ge=1, le=1 << 40)] | None = None

    def __post_init__(self) -> None:
        _name_dtypes(self)

    @property
    def kind(self) -> str:
        """Name of the kind, as in ``Group.kind``."""
        return str(self.__struct_config__.tag)

    @property
    def window(self) -> int:
        """Tokens of the window or the chunk; 0 if the layer attends to everything."""
        return 0

    @property
    def kernel_tokens(self) -> int:
        """Tokens of one kernel block, or of the block if it has no kernel blocks."""
        return self.kernel_block_size or self.block_size

    @property
    def components(self) -> tuple[ComponentSpec, ...]:
        """The tensors in one kernel block, in memory order."""
        raise NotImplementedError


class _Attention(_Spec, frozen=True, kw_only=True):
    """Fields of every kind of attention with keys and values per head.

    Attributes:
        num_kv_heads: the model's number of KV heads, not the rank's.
        head_size: elements of one head of one token.
        head_size_v: elements of one head of one token in the values, if different; otherwise 0.
        dtype: name of the element type, as torch names it; a ``torch.dtype`` is accepted.
        quantization: ``fp8_per_token_head``: one float32 scale per head and token; ``nvfp4``: two elements in a byte
            (``dtype`` is then ``uint8``) and a float8 scale for every 16; None: no scales.
    """

    num_kv_heads: Positive
    head_size: Positive
    head_size_v: Natural = 0
    dtype: DType
    quantization: Literal["fp8_per_token_head", "nvfp4"] | None = None

    @property
    def components(self) -> tuple[ComponentSpec, ...]:
        """Keys and values, each followed by its scales if it has any."""
        parts: list[ComponentSpec] = []
        for role, size in (("k", self.head_size), ("v", self.head_size_v or self.head_size)):
            cells = [(role, self.dtype, size)]
            if self.quantization == "fp8_per_token_head":
                cells.append((f"{role}_scale", "float32", 1))
            elif self.quantization == "nvfp4":
                cells = [(role, "uint8", size // 2), (f"{role}_scale", "float8_e4m3fn", size // NVFP4_GROUP)]
            parts += [
                ComponentSpec(name, dtype, (self.num_kv_heads, self.kernel_tokens, content))
                for name, dtype, content in cells
            ]
        return tuple(parts)


class FullAttention(_Attention, frozen=True, kw_only=True, tag="full", tag_field="kind"):
    """A layer that attends to every earlier token."""


class CrossAttention(_Attention, frozen=True, kw_only=True, tag="cross", tag_field="kind"):
    """A layer that attends to the tokens of an encoder. Its blocks count those tokens."""


class SlidingWindow(_Attention, frozen=True, kw_only=True, tag="sliding", tag_field="kind"):
    """A layer that attends to the last ``window`` tokens, including the current one."""

    # Overrides the property of every other kind.
    window: Positive


class ChunkedLocal(_Attention, frozen=True, kw_only=True, tag="chunked", tag_field="kind"):
    """A layer that attends to the tokens of the current chunk of ``chunk`` tokens, counted from token 0."""

    chunk: Positive

    @property
    def window(self) -> int:
        """The chunk."""
        return self.chunk


class MLA(_Spec, frozen=True, kw_only=True, tag="mla", tag_field="kind"):
    """A layer that keeps one compressed vector per token for all heads. Every rank holds the whole vector.

    Attributes:
        head_size: elements of the vector, including the part with the position, unless ``rope_size`` names it.
        dtype: name of the element type, as torch names it; a ``torch.dtype`` is accepted.
        rope_size: elements of a separate part with the position; 0 without one.
        rope_dtype: element type of that part, if different.
        scale_bytes: bytes of scales per token after the vector, for quantized vectors; 0 without.
        sliding_window: tokens of the window; 0 if the layer attends to everything.
        arrangement: name of the order of bytes in one kernel block, if it is not token by token; for example all
            values, then all scales. kvflow then moves only whole kernel blocks, between equal arrangements and kernel
            blocks.
    """

    head_size: Positive
    dtype: DType
    rope_size: Natural = 0
    rope_dtype: DType | None = None
    scale_bytes: Natural = 0
    sliding_window: Natural = 0
    arrangement: Annotated[str, Meta(max_length=ARRANGEMENT_MAX)] = ""

    @property
    def window(self) -> int:
        """As ``sliding_window``."""
        return self.sliding_window

    @property
    def components(self) -> tuple[ComponentSpec, ...]:
        """The vector, and its part with the position and its scales if it has them."""
        # Peers compare roles, so the role names the size and the arrangement of kernel blocks.
        arranged = f"{self.arrangement}_by_{self.kernel_tokens}"
        cells = [
            (arranged if self.arrangement else "latent", self.dtype, self.head_size),
            ("rope", self.rope_dtype or self.dtype, self.rope_size),
            ("scale", "uint8", self.scale_bytes),
        ]
        return tuple(
            ComponentSpec(role, dtype, (1, self.kernel_tokens, content)) for role, dtype, content in cells if content
        )


class State(Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a recurrent layer's state.

    Attributes:
        name: the role of its component: ``conv_x``, ``conv_B``, ``conv_C``, ``ssm``, ...
        shape: shape in the whole model, in elements, in memory order.
        dtype: name of the element type, as torch names it; a ``torch.dtype`` is accepted.
        shard_axis: axis that tensor parallelism divides; None if every rank holds the whole state.
    """

    name: ComponentRole
    shape: Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=DIMS_MAX)]
    dtype: DType
    shard_axis: Annotated[int, Meta(ge=0, le=DIMS_MAX - 1)] | None = 0

    def __post_init__(self) -> None:
        _name_dtypes(self)


class Mamba(_Spec, frozen=True, kw_only=True, tag="mamba", tag_field="kind"):
    """A recurrent layer: Mamba 1, Mamba 2, gated delta net. A block holds one copy of its state.

    Attributes:
        states: the states, in the order in which they lie in a page.
    """

    states: Annotated[tuple[State, ...], Meta(min_length=1, max_length=32)]

    @property
    def components(self) -> tuple[ComponentSpec, ...]:
        """The states."""
        return tuple(
            ComponentSpec(
                state.name, state.dtype, state.shape, -1 if state.shard_axis is None else state.shard_axis, -1
            )
            for state in self.states
        )


class Opaque(_Spec, frozen=True, kw_only=True, tag="opaque", tag_field="kind"):
    """A layer whose bytes kvflow does not interpret. It copies whole pages between equal pages.

    Attributes:
        nbytes: bytes of one block on one rank.
        arrangement: name of the contents and their order, which peers compare; empty if unnamed.
        ranks: number of ranks with different pages, in rank order; 1 if all have the same.
        window: tokens of the window; 0 if the layer attends to everything.
    """

    nbytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    arrangement: ComponentRole | Literal[""] = ""
    ranks: Annotated[int, Meta(ge=1, le=65535)] = 1
    # Overrides the property of every other kind.
    window: Natural = 0

    @property
    def components(self) -> tuple[ComponentSpec, ...]:
        """All bytes of the page."""
        role = self.arrangement or "page"
        if self.ranks == 1:
            return (ComponentSpec(role, "uint8", (self.nbytes,), -1, -1),)
        return (ComponentSpec(role, "uint8", (self.ranks, self.nbytes), 0, -1),)


CacheSpec = FullAttention | SlidingWindow | ChunkedLocal | CrossAttention | MLA | Mamba | Opaque


def validate_specs(specs: Mapping[Any, Any]) -> None:
    """Check the bounds of every field of every spec, which msgspec checks only when it decodes, and how fields relate.

    SpecInvalid names the layer, the field, and the expected value.
    """
    if not specs:
        raise SpecInvalid("specs is empty", remedy="Describe at least one layer.")
    for name, spec in specs.items():
        if not isinstance(name, str) or not 1 <= len(name) <= LAYER_NAME_MAX:
            raise SpecInvalid(
                f"layer name {shown(name)} must be text of 1 to {LAYER_NAME_MAX} characters",
                remedy="Use the layer names of the engine as keys of specs.",
            )
        if not isinstance(spec, CacheSpec):
            raise SpecInvalid(
                f"{name}: {shown(spec)} is not a cache spec",
                remedy="Pass a spec such as kvflow.FullAttention(block_size=16, ...).",
            )
        if fault := find_fault(spec):
            raise SpecInvalid(f"{name}: {fault}")
        problem = _problem(spec)
        if problem:
            raise SpecInvalid(f"{name}: {problem}")


def _problem(spec: CacheSpec) -> str:
    """Describe which fields of a spec contradict each other; empty if none do."""
    if spec.block_size % spec.kernel_tokens:
        return f"kernel_block_size {spec.kernel_block_size} does not divide block_size {spec.block_size}"
    if isinstance(spec, Mamba):
        return _states_problem(spec)
    if isinstance(spec, _Attention) and spec.quantization == "nvfp4":
        if spec.dtype != "uint8":
            return f"dtype is {spec.dtype}; nvfp4 is kept as uint8, two elements in a byte"
        if spec.head_size % NVFP4_GROUP or spec.head_size_v % NVFP4_GROUP:
            return f"head_size {spec.head_size} is not a multiple of {NVFP4_GROUP}, the elements of one scale"
    elif isinstance(spec, _Attention) and spec.quantization is not None and ITEM_BYTES[spec.dtype] != 1:
        return f"dtype is {spec.dtype}; {spec.quantization} needs one of one byte"
    return ""


def _states_problem(spec: Mamba) -> str:
    names = [state.name for state in spec.states]
    if len(set(names)) != len(names):
        return f"states {names} are not all named differently"
    if spec.kernel_block_size:
        return "kernel_block_size has no meaning for a state"
    for state in spec.states:
        if state.shard_axis is not None and state.shard_axis >= len(state.shape):
            return f"state {state.name!r}: shard_axis {state.shard_axis} is not an axis of {state.shape}"
    return ""
