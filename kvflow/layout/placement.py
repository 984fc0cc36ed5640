"""Where layers lie in pages, rows and tensors.

A layout is an order of axes, outermost first: ``L`` layers, ``B`` blocks, ``H`` heads, ``N`` tokens, and ``K`` the pair
of keys and values. ``K`` lies right before the content (``kv="content"``: one head of one token has K and V side by
side), inside each block (``kv="block_split"``), or outside all blocks where each layer has a separate tensor
(``kv="split"``). Strides are running products over that order, innermost first.
"""

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct

from kvflow.errors import SpecInvalid
from kvflow.layout.component import Component, dense_strides, place_component
from kvflow.layout.shards import Shard
from kvflow.layout.specs import ITEM_BYTES, CacheSpec, ComponentSpec


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


class Bundle(Struct, frozen=True):
    """Components that stay together, token by token: keys with their scales, values with theirs, a latent.

    ``parts`` are the components with their offsets in a cell, which is one head of one token.
    """

    parts: tuple[tuple[ComponentSpec, int], ...]
    cell_bytes: int


def bundles(spec: CacheSpec) -> tuple[Bundle, ...]:
    """Return the bundles of a spec whose components have tokens: two for keys and values, one for a latent."""
    named: dict[str, list[ComponentSpec]] = {}
    for part in spec.components:
        named.setdefault(part.role[0] if part.role[0] in "kv" else "", []).append(part)
    found = []
    for parts in named.values():
        offsets, end = side_by_side(
            [(part.shape[-1] * ITEM_BYTES[part.dtype], ITEM_BYTES[part.dtype]) for part in parts]
        )
        found.append(Bundle(tuple(zip(parts, offsets, strict=True)), end))
    return tuple(found)


def states(spec: CacheSpec, shard: Shard) -> tuple[tuple[ComponentSpec, int], ...]:
    """Return the states of a spec, each with its offset in the rank's page."""
    sizes = [(part.nbytes(shard), ITEM_BYTES[part.dtype]) for part in spec.components]
    return tuple(zip(spec.components, side_by_side(sizes)[0], strict=True))


def side_by_side(sizes: list[tuple[int, int]]) -> tuple[list[int], int]:
    """Lay pieces of (bytes, alignment) side by side; return their offsets and the bytes of all, padded to repeat."""
    offsets, end = [], 0
    for nbytes, alignment in sizes:
        offsets.append(round_up(end, alignment))
        end = offsets[-1] + nbytes
    return offsets, round_up(end, math.lcm(*(alignment for _, alignment in sizes)))


def round_up(nbytes: int, alignment: int) -> int:
    """Return the smallest multiple of ``alignment`` that is not below ``nbytes``."""
    return -(-nbytes // alignment) * alignment


def has_tokens(spec: CacheSpec) -> bool:
    """Return whether a spec keeps something for every token, rather than a state."""
    return spec.components[0].token_axis >= 0


def kernel_page_bytes(spec: CacheSpec, shard: Shard) -> int:
    """Return the bytes of one kernel block on one rank; of a state, those of all."""
    if not has_tokens(spec):
        return side_by_side([(part.nbytes(shard), ITEM_BYTES[part.dtype]) for part in spec.components])[1]
    heads = shard.heads(spec.components[0].shape[0]).count
    return heads * spec.kernel_tokens * sum(bundle.cell_bytes for bundle in bundles(spec))


def content_bytes(spec: CacheSpec, shard: Shard) -> int:
    """Return the bytes of one page on one rank without padding at its end."""
    return spec.block_size // spec.kernel_tokens * kernel_page_bytes(spec, shard)


def page_bytes(spec: CacheSpec, shard: Shard | None = None, *, layer: str = "") -> int:
    """Return the bytes of one page on one rank, padding included; without ``shard``, one rank holds the whole model.

    Raises:
        SpecInvalid: the padded page is too small for its content; names the layer, both sizes and the rank.
    """
    shard = shard or Shard()
    content = content_bytes(spec, shard)
    if spec.page_bytes is None:
        return content
    if spec.page_bytes < content:
        raise SpecInvalid(
            f"{layer}{': ' if layer else ''}page_bytes is {spec.page_bytes}, but a page of tp_rank {shard.tp_rank} "
            f"of {shard.tp_size} holds {content} bytes",
            remedy=f"Set page_bytes to at least {content}, or compute it for this tp_size.",
        )
    return spec.page_bytes


def item_alignment(spec: CacheSpec) -> int:
    """Return the alignment of pages at which each element is aligned."""
    return math.lcm(*(ITEM_BYTES[part.dtype] for part in spec.components))


LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC")
KV_FORMS = ("content", "split", "block_split")


class PlacedLayer(Struct, frozen=True):
    """One layer in region 0. It has one view, one per state, or one for K and one for V where their sizes differ."""

    components: tuple[Component, ...]
    views: tuple[View, ...]


class Pool(Struct, frozen=True):
    """What all layers of one allocation share."""

    num_blocks: int
    shard: Shard
    layout: str
    kv: str

    @property
    def axes(self) -> str:
        """Order of axes, outermost first."""
        return axes_of(self.layout, self.kv)

    @property
    def packed(self) -> bool:
        """Whether a block of all layers is one row."""
        return self.axes[0] == "B"


def axes_of(layout: str, kv: str) -> str:
    """Return the order of axes of a layout; SpecInvalid if it, or the form of K and V, is unknown."""
    if layout not in LAYOUTS or kv not in KV_FORMS:
        raise SpecInvalid(
            f"layout {layout!r} with kv {kv!r} is unknown",
            remedy=f"Use one of {', '.join(LAYOUTS)} with one of {', '.join(KV_FORMS)}.",
        )
    if kv == "content":
        return layout.replace("C", "K")
    before = "B" if kv == "block_split" and layout.startswith("L") else "L"  # the axis that the pair lies in
    return layout.removesuffix("C").replace(before, f"{before}K")


def place_row(
    specs: Mapping[str, CacheSpec], names: Sequence[str], pool: Pool, row_bytes: int
) -> dict[str, PlacedLayer]:
    """Place the layers of one group in rows of ``row_bytes``, one row per block.

    Layers with pages of one shape may interleave, as the layout says. Bands of different shapes lie side by side.
    """
    placed = {}
    for band, offset in _bands(specs, names, pool)[0]:
        first = specs[band[0]]
        inner = pool.axes.replace("B", "")
        if not _dense(first, pool.shard):
            inner = "L" + inner.replace("L", "")  # padding and kernel blocks keep a page together
        for position, name in enumerate(band):
            at = _Band(inner, {"L": len(band)}, position, offset, row_bytes)
            placed[name] = _place(specs[name], pool, at)
    return placed


def row_bytes(specs: Mapping[str, CacheSpec], names: Sequence[str], pool: Pool) -> int:
    """Return how many bytes the layers of one group need in a row."""
    return _bands(specs, names, pool)[1]


def place_column(
    specs: Mapping[str, CacheSpec], names: Sequence[str], pool: Pool, offset: int, column_bytes: int
) -> dict[str, PlacedLayer]:
    """Place layers of different groups over each other, in a tensor of ``num_blocks * column_bytes`` bytes.

    The layout begins with ``L``. All keys lie before all values only if every layer cuts the tensor at the same place,
    so that no block of one layer lies on another block of the next.
    """
    cuts = {_bundle_bytes(specs[name], pool.shard) for name in names}
    whole = len(cuts) == 1 and sum(next(iter(cuts))) == column_bytes
    inner = pool.axes[1:] if whole else pool.axes[1:].replace("B", "")
    at = _Band(inner, {"B": pool.num_blocks}, 0, offset, column_bytes)
    return {name: _place(specs[name], pool, at) for name in names}


class _Band(Struct, frozen=True):
    """One layer among those it interleaves with; ``inner`` orders the axes within a row or within a layer's tensor."""

    inner: str
    extents: dict[str, int]
    position: int
    offset: int
    block_stride: int


def _bands(specs: Mapping[str, CacheSpec], names: Sequence[str], pool: Pool) -> tuple[list[tuple[list[str], int]], int]:
    """Put layers with pages of one shape together; return each band with its offset, and the bytes of all."""
    bands: dict[object, list[str]] = {}
    for name in names:
        spec = specs[name]
        shapes = tuple((part.held_shape(pool.shard), part.dtype) for part in spec.components)
        bands.setdefault((shapes, spec.block_size, spec.page_bytes), []).append(name)
    sizes = []
    for band in bands.values():
        first = specs[band[0]]
        alignment = item_alignment(first)
        sizes.append((round_up(page_bytes(first, pool.shard), alignment) * len(band), alignment))
    offsets, end = side_by_side(sizes)
    return list(zip(bands.values(), offsets, strict=True)), end


def _dense(spec: CacheSpec, shard: Shard) -> bool:
    """Return whether a page is nothing but heads, tokens and content, so that any order of axes will do."""
    whole = has_tokens(spec) and spec.kernel_tokens == spec.block_size
    return whole and page_bytes(spec, shard) == kernel_page_bytes(spec, shard)


def _bundle_bytes(spec: CacheSpec, shard: Shard) -> tuple[int, ...]:
    """Return the bytes of each bundle of a dense page; of any other, nothing."""
    if not _dense(spec, shard):
        return ()
    heads = shard.heads(spec.components[0].shape[0]).count
    return tuple(heads * spec.kernel_tokens * bundle.cell_bytes for bundle in bundles(spec))


def _place(spec: CacheSpec, pool: Pool, at: _Band) -> PlacedLayer:
    if not has_tokens(spec):
        page = round_up(page_bytes(spec, pool.shard), item_alignment(spec))
        return _place_states(spec, pool, at.offset + at.position * page, at.block_stride)
    layer_bundles = bundles(spec)
    heads = pool.shard.heads(spec.components[0].shape[0]).count
    extents = {**at.extents, "H": heads, "N": spec.kernel_tokens}
    strides, starts = _running(at.inner, extents, [bundle.cell_bytes for bundle in layer_bundles])
    for bundle in strides:
        bundle.setdefault("B", at.block_stride)
        if not _dense(spec, pool.shard):
            bundle["L"] = round_up(page_bytes(spec, pool.shard), item_alignment(spec))
    base = [at.offset + at.position * bundle["L"] + start for bundle, start in zip(strides, starts, strict=True)]
    kernel_blocks = spec.block_size // spec.kernel_tokens
    kernel_stride = kernel_page_bytes(spec, pool.shard) if kernel_blocks > 1 else 0
    components = tuple(
        place_component(
            part,
            pool.shard,
            offset=start + inside,
            block_stride=bundle["B"],
            kernel_stride=kernel_stride,
            strides=(bundle["H"], bundle["N"], ITEM_BYTES[part.dtype]),
        )
        for bundle, start, held in zip(strides, base, layer_bundles, strict=True)
        for part, inside in held.parts
    )
    tensors = [
        BundleAxes(
            start,
            held.cell_bytes,
            block_axes(pool.num_blocks, bundle["B"], kernel_blocks, kernel_stride),
            (heads, bundle["H"]),
            (spec.kernel_tokens, bundle["N"]),
        )
        for bundle, start, held in zip(strides, base, layer_bundles, strict=True)
    ]
    return PlacedLayer(components, attention_views(spec, tensors, pool.kv))


def _running(axes: str, extents: Mapping[str, int], cells: Sequence[int]) -> tuple[list[dict[str, int]], list[int]]:
    """Return the strides of each bundle and where it begins, by running products over the order of axes."""
    running = list(cells)
    strides: list[dict[str, int]] = [{"L": 0} for _ in cells]
    starts = [0] * len(cells)
    for axis in reversed(axes):
        if axis == "K":
            ends = [sum(running[: index + 1]) for index in range(len(running))]
            starts = [0, *ends[:-1]]
            running = [ends[-1]] * len(running)
            continue
        for bundle, nbytes in enumerate(running):
            strides[bundle][axis] = nbytes
            running[bundle] = nbytes * extents[axis]
    return strides, starts


def _place_states(spec: CacheSpec, pool: Pool, offset: int, block_stride: int) -> PlacedLayer:
    components, views = [], []
    for part, inside in states(spec, pool.shard):
        strides = dense_strides(part.held_shape(pool.shard), ITEM_BYTES[part.dtype])
        component = place_component(
            part, pool.shard, offset=offset + inside, block_stride=block_stride, strides=strides
        )
        components.append(component)
        axes = ((pool.num_blocks, block_stride), *zip(component.extents, strides, strict=True))
        views.append(view_of(part.dtype, component.offset, *axes))
    return PlacedLayer(tuple(components), tuple(views))
