"""Where each component lies in one backing allocation: strides by the order of axes.

A layout is an order of axes, outermost first: ``L`` layers, ``B`` blocks, ``H`` heads, ``N`` tokens, and
``K`` the pair of keys and values, which lies right before the content (``kv="content"``: one head of one
token has K and V side by side) or further out (``kv="split"``). Strides are running products over that
order, innermost first. That is all a layout is; nothing outside this module knows their names.
"""

from typing import Annotated

from msgspec import Meta, Struct

from kvflow.errors import SpecInvalid
from kvflow.layout.shards import Held, Shard
from kvflow.layout.specs import CacheSpec

AXIS_ORDERS: dict[tuple[str, str], str] = {
    ("LBNHC", "content"): "LBNHK",
    ("LBHNC", "content"): "LBHNK",
    ("BLNHC", "content"): "BLNHK",
    ("BLHNC", "content"): "BLHNK",
    ("BHLNC", "content"): "BHLNK",
    ("LBNHC", "split"): "LKBNH",
    ("LBHNC", "split"): "LKBHN",
    ("BLNHC", "split"): "BLKNH",
    ("BLHNC", "split"): "BLKHN",
    ("BHLNC", "split"): "BHLKN",
}
"""(layout, kv) -> axes, outermost first. The content of one head of one token is innermost in all of them."""

LAYOUTS = tuple(dict.fromkeys(layout for layout, _ in AXIS_ORDERS))
KV_FORMS = ("content", "split")

Extent = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]


class Component(Struct, frozen=True):
    """One named tensor inside the pages of one layer, as an affine map from coordinates to bytes.

    Content byte ``c`` of token ``t`` of held head ``h`` of block ``b`` lies at
    ``offset + b * block_stride + h * head_stride + t * token_stride + c`` of its region.

    Attributes:
        role: ``k`` or ``v``.
        dtype: element type.
        first_head: global number of the first head held here.
        num_heads: heads held here.
        total_heads: heads of the whole model.
        num_tokens: tokens in one block.
        content_bytes: bytes of one head of one token, contiguous.
        region: index into the manifest's regions.
        offset: bytes from the start of the region to block 0.
        block_stride: bytes.
        head_stride: bytes.
        token_stride: bytes.
    """

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    dtype: Annotated[str, Meta(min_length=1, max_length=32)]
    first_head: Extent
    num_heads: Count
    total_heads: Count
    num_tokens: Count
    content_bytes: Count
    region: Annotated[int, Meta(ge=0, le=1 << 16)]
    offset: Extent
    block_stride: Extent
    head_stride: Extent
    token_stride: Extent

    @property
    def held(self) -> Held:
        """The part of the global head axis that is here."""
        return Held(self.first_head, self.num_heads, self.total_heads)

    def extent(self, num_blocks: int) -> int:
        """Return the first byte of the region past the last one that ``num_blocks`` blocks reach."""
        return (
            self.offset
            + (num_blocks - 1) * self.block_stride
            + (self.num_heads - 1) * self.head_stride
            + (self.num_tokens - 1) * self.token_stride
            + self.content_bytes
        )


class Placement(Struct, frozen=True):
    """The strides of one layer's cache inside a backing allocation.

    Attributes:
        axes: order of axes, outermost first.
        offset: bytes from the start of the allocation to block 0 of the layer.
        strides: axis letter -> bytes.
        extents: axis letter -> length.
    """

    axes: str
    offset: int
    strides: dict[str, int]
    extents: dict[str, int]

    def components(self, spec: CacheSpec, shard: Shard) -> tuple[Component, ...]:
        """Describe the layer's components in region 0."""
        return tuple(
            Component(
                role=part.role,
                dtype=part.dtype,
                first_head=shard.heads(part.total_heads).first,
                num_heads=self.extents["H"],
                total_heads=part.total_heads,
                num_tokens=part.num_tokens,
                content_bytes=part.content_bytes,
                region=0,
                offset=self.offset + index * self.strides["K"],
                block_stride=self.strides["B"],
                head_stride=self.strides["H"],
                token_stride=self.strides["N"],
            )
            for index, part in enumerate(spec.components)
        )


def page_bytes(spec: CacheSpec, shard: Shard | None = None) -> int:
    """Return the bytes of one layer in one block on one rank (without a shard: of the whole model)."""
    shard = shard or Shard()
    return sum(shard.heads(part.total_heads).count * part.num_tokens * part.content_bytes for part in spec.components)


def place(
    spec: CacheSpec, *, position: int, num_positions: int, num_blocks: int, layout: str, kv: str, shard: Shard
) -> Placement:
    """Place one layer at a position that layers of other groups share.

    Args:
        spec: the layer.
        position: index of the layer in its group, in ``[0, num_positions)``.
        num_positions: layers in the longest group.
        num_blocks: blocks in the pool.
        layout: one of ``LAYOUTS``.
        kv: one of ``KV_FORMS``.
        shard: the rank.

    Raises:
        SpecInvalid: the layout or the form of K and V is unknown.
    """
    try:
        axes = AXIS_ORDERS[layout, kv]
    except KeyError:
        raise SpecInvalid(
            f"layout {layout!r} with kv {kv!r} is unknown",
            remedy=f"Use one of {', '.join(LAYOUTS)} with one of {', '.join(KV_FORMS)}.",
        ) from None
    first = spec.components[0]
    extents = {
        "L": num_positions,
        "B": num_blocks,
        "K": len(spec.components),
        "H": shard.heads(first.total_heads).count,
        "N": first.num_tokens,
    }
    strides: dict[str, int] = {}
    running = first.content_bytes
    for axis in reversed(axes):
        strides[axis] = running
        running *= extents[axis]
    return Placement(axes, position * strides["L"], strides, extents)
