"""What one layer keeps for one block: the only place that knows kinds of cache.

A spec is the model's, not the rank's: head counts are global. Everything derived (components, page bytes)
comes from the spec and a ``Shard``, so that no size is typed in twice.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from kvflow.errors import SpecInvalid

LAYER_NAME_MAX = 256
"""Characters of a layer name; Hugging Face module paths stay far below."""

Positive = Annotated[int, Meta(ge=1, le=1 << 24)]
DType = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]

ITEM_BYTES: dict[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element, by torch's name of the dtype."""


class ComponentSpec(Struct, frozen=True):
    """One named tensor inside a page, before any shard or address.

    Attributes:
        role: ``k`` or ``v``.
        total_heads: heads of the whole model.
        num_tokens: tokens in one block.
        content_bytes: bytes of one head of one token.
        dtype: element type.
    """

    role: str
    total_heads: int
    num_tokens: int
    content_bytes: int
    dtype: str


class _Attention(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every kind of attention with keys and values per head has in common.

    Attributes:
        block_size: tokens in one block.
        num_kv_heads: the model's number of KV heads, not the rank's.
        head_size: elements of one head of one token.
        dtype: torch's name of the element type.
    """

    block_size: Positive
    num_kv_heads: Positive
    head_size: Positive
    dtype: DType

    @property
    def components(self) -> tuple[ComponentSpec, ...]:
        """The tensors inside one page, in the order in which they lie side by side."""
        content_bytes = self.head_size * ITEM_BYTES[self.dtype]
        return tuple(
            ComponentSpec(role, self.num_kv_heads, self.block_size, content_bytes, self.dtype) for role in ("k", "v")
        )


class FullAttention(_Attention, frozen=True, kw_only=True, tag="full", tag_field="kind"):
    """A layer that attends to every earlier token."""

    @property
    def kind(self) -> str:
        """Name of the kind, as in ``Group.kind``."""
        return "full"

    @property
    def window(self) -> int:
        """Zero: the layer attends to everything."""
        return 0


class SlidingWindow(_Attention, frozen=True, kw_only=True, tag="sliding", tag_field="kind"):
    """A layer that attends to the last ``window`` tokens, the current one included."""

    window: Positive

    @property
    def kind(self) -> str:
        """Name of the kind, as in ``Group.kind``."""
        return "sliding"


CacheSpec = FullAttention | SlidingWindow


def validate_specs(specs: Mapping[Any, Any]) -> None:
    """Check every field of every spec against its declared bounds.

    A ``Struct`` checks its fields when it is decoded, not when it is constructed; this closes that gap.

    Raises:
        SpecInvalid: names layer, field, and what was expected.
    """
    if not specs:
        raise SpecInvalid("specs is empty", remedy="Describe at least one layer.")
    for name, spec in specs.items():
        if not isinstance(name, str) or not 1 <= len(name) <= LAYER_NAME_MAX:
            raise SpecInvalid(f"layer name {name!r} is not a string of 1 to {LAYER_NAME_MAX} characters")
        if not isinstance(spec, CacheSpec):
            raise SpecInvalid(f"{name}: {spec!r} is not a cache spec")
        try:
            msgspec.convert(msgspec.to_builtins(spec), type=type(spec))
        except msgspec.ValidationError as error:
            raise SpecInvalid(f"{name}: {error}") from error
