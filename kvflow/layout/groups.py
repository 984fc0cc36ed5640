"""Groups: layers that share a block table. Groups are formed as in vLLM 0.32."""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from kvflow.errors import ArgumentInvalid, SpecInvalid
from kvflow.layout import grouping
from kvflow.layout.grouping import Sized
from kvflow.layout.placement import LAYOUTS, has_tokens, page_bytes
from kvflow.layout.shards import ALL_TOKENS, Shard, Stripe
from kvflow.layout.specs import MLA, CacheSpec, Mamba, Opaque, validate_specs

LAYER_OUTERMOST = "LBNHC"
"""What "auto" means for most models: every attention backend supports it."""

PACKED = "BLHNC"
"""What "auto" means if one block must be one row: this packed layout divides heads without gaps."""

STRIPED = ("full", "mla", "mixed")
"""Kinds of groups that keep every token, so that decode context parallelism divides them."""


class Group(Struct, frozen=True):
    """Layers that share a block table.

    Attributes:
        layers: names of the layers, in the order of their positions.
        kind: kind of its layers: ``full``, ``sliding``, ``chunked``, ``mla``, ``cross``, ``mamba``, ``opaque``;
            ``mixed`` if they are of several kinds.
        block_size: tokens in one block. It overrides the specs' block size, which may be smaller.
        window: tokens of the sliding window or the chunk; 0 for other kinds.
        page_bytes: bytes of one page of each layer on every rank, padding included; 0 if grouping added none.
    """

    layers: tuple[str, ...]
    kind: str
    block_size: int
    window: int = 0
    page_bytes: int = 0


def plan_groups(
    specs: Mapping[str, CacheSpec], *, layout: str = "auto", shard: Shard | None = None
) -> tuple[Group, ...]:
    """Form the groups of a model.

    The sizes of pages are those of the engine's first rank, which holds the most heads. So all ranks form the same
    groups.

    Args:
        specs: layer name -> spec, in model order.
        layout: layout of the cache, or ``auto``; it decides how pages of different sizes are grouped.
        shard: a rank of the engine; None for an engine of one rank.

    Raises:
        SpecInvalid: there is no layer, a field is out of bounds, the layout is unknown, or the layout needs equal pages
            and they cannot be made equal.
    """
    layout = resolve_layout(specs, layout, shard=shard)
    shard = Shard(tp_size=shard.tp_size if shard else 1)
    layers = grouping.measure(specs, shard)
    if grouping.share_one_table(layers):
        return (_group(layers),)
    if layout.startswith("B") and len({layer.nbytes for layer in layers}) > 1:
        return tuple(_group(group) for group in grouping.cut_to_one_row(layers))
    try:
        layers = grouping.with_equal_pages(layers)
    except SpecInvalid:
        promoted = grouping.promoted_to_full(layers)
        if promoted is None:
            raise
        return (_group(promoted),)
    padding = _padding_of_uneven_ranks(specs, layers, shard)
    return tuple(_group(group, padding) for group in grouping.cut_to_one_length(layers))


def resolve_layout(
    specs: Mapping[str, CacheSpec],
    layout: str,
    *,
    enable_cross_layers_blocks: bool = False,
    shard: Shard | None = None,
) -> str:
    """Return the layout, with ``auto`` replaced by the layout that it means.

    A model with MLA and other attention whose pages have several sizes is always packed, because its pages fit no
    common grid. Any other model is packed only on request. Source: vLLM pull request 46252.

    Args:
        specs: layer name -> spec.
        layout: ``auto``, or one of ``LAYOUTS``.
        enable_cross_layers_blocks: choose a packed layout for ``auto``.
        shard: a rank of the engine; None for an engine of one rank.

    Raises:
        ArgumentInvalid: the switch is not a bool.
        SpecInvalid: the layout is unknown, or a field of a spec is out of bounds.
    """
    validate_specs(specs)
    if not isinstance(enable_cross_layers_blocks, bool):
        remedy = "Pass True for a packed layout, or False."
        raise ArgumentInvalid("enable_cross_layers_blocks", "a bool", enable_cross_layers_blocks, remedy=remedy)
    if layout in LAYOUTS:
        return layout
    if layout != "auto":
        raise SpecInvalid(f"layout {layout!r} is unknown", remedy=f"Use auto, or one of {', '.join(LAYOUTS)}.")
    first = Shard(tp_size=shard.tp_size if shard else 1)
    attention = {name: spec for name, spec in specs.items() if has_tokens(spec)}
    pages = {page_bytes(spec, first, layer=name) for name, spec in attention.items()}
    compound = len(pages) > 1 and any(isinstance(spec, MLA) for spec in attention.values())
    return PACKED if enable_cross_layers_blocks or compound else LAYER_OUTERMOST


def stripe_of(group: Group, shard: Shard) -> Stripe:
    """Return which tokens of a request a rank holds in one group.

    Decode context parallelism divides the tokens of groups that keep all of them. Windows, chunks, encoder tokens and
    states stay whole on each rank. Source: vLLM 0.33, ``dcp_sharded`` of its specs, and pull request 47181.
    """
    return shard.stripe if shard.dcp_size > 1 and group.kind in STRIPED and not group.window else ALL_TOKENS


def window_blocks(group: Group, num_tokens: int, *, shard: Shard | None = None) -> int:
    """Return how many of the last blocks of ``num_tokens`` tokens the next token needs.

    For a sliding window, these are the blocks from the first of the last ``window - 1`` tokens on. For a chunk, they
    begin at the first token of the next token's chunk, and include a block that is not full yet. A state has one block.
    Other kinds need all blocks; there are fewer if ``shard`` divides tokens among ranks, because a block then stands
    for more tokens.
    """
    if group.kind == "mamba":
        return 1
    total = -(-num_tokens // (group.block_size * stripe_of(group, shard or Shard()).size))
    if not group.window:
        return total
    if group.kind == "chunked":
        first_token = num_tokens // group.window * group.window
    else:
        first_token = max(0, num_tokens - (group.window - 1))
    return total - min(total, first_token // group.block_size)


def check_groups(specs: Mapping[str, CacheSpec], groups: Sequence[Group], shard: Shard | None = None) -> None:
    """Check that ``groups`` partition the layers of ``specs`` and agree with them and with the rank.

    Raises:
        SpecInvalid: names the group, the layer and the field that is wrong.
    """
    if not all(group.layers for group in groups):
        raise SpecInvalid("a group has no layers", remedy="Leave it out.")
    listed = [name for group in groups for name in group.layers]
    if sorted(listed) != sorted(specs):
        odd = sorted(set(listed) ^ set(specs)) or sorted({name for name in listed if listed.count(name) > 1})
        raise SpecInvalid(
            f"groups and specs do not name the same layers once each: {odd[:5]}",
            remedy="Name each layer of specs in exactly one group, or form groups with plan_groups.",
        )
    for index, group in enumerate(groups):
        for name in group.layers:
            problem = _disagreement(group, specs[name])
            if problem:
                raise SpecInvalid(f"group {index}, layer {name!r}: {problem}", remedy="Form groups with plan_groups.")
        _check_tokens(index, group, [specs[name] for name in group.layers], shard or Shard())


def _check_tokens(index: int, group: Group, specs: Sequence[CacheSpec], shard: Shard) -> None:
    unknown = [isinstance(spec, Opaque) for spec in specs]
    if any(unknown) and not all(unknown):
        raise SpecInvalid(
            f"group {index}: layers of kind 'opaque' share a block table with {sorted({spec.kind for spec in specs})}",
            remedy="Give them a group of their own: what their blocks stand for is not known.",
        )
    stripe = stripe_of(group, shard)
    if shard.dcp_size > 1 and any(unknown):
        raise SpecInvalid(
            f"group {index} is of kind 'opaque' and dcp_size is {shard.dcp_size}: where its tokens lie is not known",
            remedy="Describe its layers by what they keep.",
        )
    arranged = [spec.arrangement for spec in specs if isinstance(spec, MLA) and spec.arrangement]
    if stripe.size > 1 and arranged:
        raise SpecInvalid(
            f"group {index} is arranged as {arranged[0]!r} and dcp_size is {shard.dcp_size}: where its tokens lie is "
            "not known",
            remedy="Serve without decode context parallelism.",
        )
    if stripe.size > 1 and not has_tokens(specs[0]):
        raise SpecInvalid(
            f"group {index} is of kind {group.kind!r} and keeps states, but dcp_size is {shard.dcp_size}",
            remedy="Form groups with plan_groups.",
        )
    if stripe.size > 1 and group.block_size % stripe.width:
        raise SpecInvalid(
            f"dcp_interleave is {stripe.width}: expected a divisor of the {group.block_size} tokens "
            f"in a block of group {index}",
            remedy="Choose another interleave or block size.",
        )


def _disagreement(group: Group, spec: CacheSpec) -> str:
    """Describe how a group contradicts the spec of one of its layers; empty if it does not."""
    if group.kind == "mixed":
        # Windows of several kinds have nothing in common, so a mixed group keeps every block.
        if group.window:
            return f"window is {group.window}, but a group of kind 'mixed' has none: expected 0"
    elif group.kind != spec.kind:
        return f"kind is {group.kind!r}, but the spec is {spec.kind!r}"
    elif group.window != spec.window:
        return f"window is {group.window}, but the spec has {spec.window}"
    match spec:
        case Mamba():
            return ""  # a state's page does not depend on the number of tokens
        case Opaque():
            fits = group.block_size == spec.block_size
        case _:
            fits = group.block_size > 0 and group.block_size % spec.block_size == 0
    return "" if fits else f"block_size is {group.block_size}, which is no multiple of the spec's {spec.block_size}"


def _group(layers: Sequence[Sized], padding: int = 0) -> Group:
    first = layers[0].spec
    mixed = len({layer.spec.kind for layer in layers}) > 1
    return Group(
        layers=tuple(layer.name for layer in layers),
        kind="mixed" if mixed else first.kind,
        block_size=first.block_size,
        window=0 if mixed else first.window,
        page_bytes=padding or max(layer.nbytes if layer.padded else 0 for layer in layers),
    )


def _padding_of_uneven_ranks(specs: Mapping[str, CacheSpec], layers: Sequence[Sized], first: Shard) -> int:
    """Return the page that all layers need on every rank if pages of some rank would differ from each other, else 0."""
    own = [
        msgspec.structs.replace(spec, block_size=layer.spec.block_size)
        for spec, layer in zip(specs.values(), layers, strict=True)
        if not layer.padded
    ]
    page = layers[0].nbytes
    agreed = {page} if any(layer.padded for layer in layers) else set()
    parts = [part for spec in own for part in spec.components if part.shard_axis >= 0]
    extents = {part.shape[part.shard_axis] for part in parts}
    for rank in sorted({extent % first.tp_size for extent in extents if extent > first.tp_size} - {0}):
        shard = Shard(tp_rank=rank, tp_size=first.tp_size)
        if len(agreed | {page_bytes(spec, shard) for spec in own}) > 1:
            return page
    return 0
