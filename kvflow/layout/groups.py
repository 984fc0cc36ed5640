"""Groups: layers that share a block table. They are formed as in vLLM 0.32, from layers as one rank sees them.

Layers that need equally many slots per token form one group. Otherwise pages are made equal, and layers of one spec are
cut into groups of about one length, because layers of different groups at one position share memory. In a row of a
block-outermost layout pages may differ: groups are then cut to rows of about one length.

Source: vLLM 0.32.0, ``v1/core/kv_cache_utils.py``; ``tests/data/vllm_groups.json`` holds its answers.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import lcm
from typing import TypeVar

import msgspec
from msgspec import Struct

from kvflow.errors import ArgumentInvalid, SpecInvalid
from kvflow.ids import ABSENT
from kvflow.layout.placement import LAYOUTS, has_tokens, page_bytes
from kvflow.layout.shards import ALL_TOKENS, Shard, Stripe
from kvflow.layout.specs import (
    MLA,
    CacheSpec,
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    Mamba,
    Opaque,
    SlidingWindow,
    validate_specs,
)

LAYER_OUTERMOST = "LBNHC"  # what "auto" means for most models: every attention backend supports it
PACKED = "BLHNC"  # what "auto" means if one block must be one row: this packed layout divides heads without gaps

STRIPED = ("full", "mla", "mixed")
"""Kinds of groups that keep every token, so that decode context parallelism divides them."""

SETTLES = frozenset(("full", "mla"))
"""Kinds of layers whose blocks settle one after another; those of others settle at the seal."""

GROUP_SIZE_RATIO_MAX = 1.5
"""Source: vLLM. Below this ratio padding the shorter bucket wastes less than cutting the longer one."""

Item = TypeVar("Item")


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

    @property
    def settles(self) -> bool:
        """Whether its blocks settle one after another as a request is computed. Others may be written until its end."""
        return self.kind in SETTLES


@dataclass(frozen=True, slots=True)
class Sized:
    """One layer as one rank sees it: its own heads, its page with padding, and whether grouping has added padding."""

    name: str
    spec: CacheSpec
    nbytes: int
    padded: bool = False


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
    layers = [Sized(name, _local(spec, shard), page_bytes(spec, shard, layer=name)) for name, spec in specs.items()]
    if all(_same_type(layers[0], layer) for layer in layers[1:]):
        return (_group(layers),)  # all need equally many slots for the same tokens; their pages may differ
    if layout.startswith("B") and len({layer.nbytes for layer in layers}) > 1:
        return tuple(_group(group) for group in cut_to_one_row(layers))
    try:
        layers = with_equal_pages(layers)
    except SpecInvalid:
        promoted = promoted_to_full(layers)
        if promoted is None:
            raise
        return (_group(promoted),)
    padding = _padding_of_uneven_ranks(specs, layers, shard)
    return tuple(_group(group, padding) for group in cut_to_one_length(layers))


def resolve_layout(
    specs: Mapping[str, CacheSpec],
    layout: str,
    *,
    enable_cross_layers_blocks: bool = False,
    shard: Shard | None = None,
) -> str:
    """Return the layout, with ``auto`` replaced by the layout that it means.

    A model with MLA and other attention whose pages have several sizes is always packed, because its pages fit no
    common grid. Any other model is packed only with ``enable_cross_layers_blocks``. Source: vLLM pull request 46252.

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


def whole_tokens(
    reaches: Sequence[Collection[Group]], block_ids: Sequence[Sequence[int]], num_tokens: Sequence[int], most: int
) -> Iterator[int]:
    """Yield after how many of the first ``most`` tokens no window lacks a block that the next token needs.

    The largest comes first. All are above 0, and fill whole blocks of every group or are all that there are.

    Args:
        reaches: kinds, block sizes and windows of the layers of each group.
        block_ids: of each group, the last blocks of its tokens; -1 for one that is absent.
        num_tokens: those that the blocks of each group hold.
        most: at most as many as those of each group.
    """
    layers = [layer for group in reaches for layer in group if layer.kind != "mamba"]
    unit = lcm(*[layer.block_size for layer in layers])
    windows = [
        (layer, ids, -(-tokens // layer.block_size) - len(ids))
        for group, ids, tokens in zip(reaches, block_ids, num_tokens, strict=True)
        for layer in group
        if layer.window
    ]
    end = most if all(tokens == most for tokens in num_tokens) else most - most % unit
    while end > 0:
        whole = end  # so many may be whole
        for layer, ids, first in windows:
            last = -(-end // layer.block_size) - first
            begin = last - window_blocks(layer, end)
            if begin < 0:
                whole = min(whole, (first + begin) * layer.block_size)
            elif ABSENT in (needed := ids[begin:last]):
                whole = min(whole, (first + begin + needed.index(ABSENT)) * layer.block_size)
        if whole == end:
            yield end
            whole -= 1
        end = whole - whole % unit


def check_groups(specs: Mapping[str, CacheSpec], groups: Sequence[Group], shard: Shard | None = None) -> None:
    """Check that ``groups`` partition the layers of ``specs`` and agree with them and with the rank.

    Raises:
        SpecInvalid: names the group, the layer and the field that is wrong.
    """
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
    if stripe.size > 1 and specs and not has_tokens(specs[0]):
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


def with_equal_pages(layers: Sequence[Sized]) -> list[Sized]:
    """Return layers with pages as large as the largest: by more tokens per block where that fits, else by padding.

    SpecInvalid: the page of an MLA layer does not divide the largest; its kernels cannot step over padding.
    """
    largest = max(layers, key=lambda layer: layer.nbytes)
    return [_enlarged(layer, largest) for layer in layers]


def cut_to_one_length(layers: Sequence[Sized]) -> list[list[Sized]]:
    """Deal layers with pages of one size to groups of about one length, each of one spec."""
    buckets: dict[CacheSpec, list[Sized]] = {}
    for layer in layers:
        buckets.setdefault(layer.spec, []).append(layer)
    lengths = [len(bucket) for bucket in buckets.values()]
    shortest, longest = min(lengths), max(lengths)
    length = longest if longest < GROUP_SIZE_RATIO_MAX * shortest else shortest
    return [group for bucket in buckets.values() for group in _dealt_out(bucket, _ceil_div(len(bucket), length))]


def cut_to_one_row(layers: Sequence[Sized]) -> list[list[Sized]]:
    """Deal layers with pages of several sizes to groups whose rows are about equally long."""
    buckets: list[_Bucket] = []
    for layer in layers:
        for bucket in buckets:
            if _same_type(bucket.layers[0], layer):
                bucket.layers.append(layer)
                break
        else:
            buckets.append(_Bucket([layer]))
    repeats = _repeats_per_group(buckets)
    row = max(
        bucket.row_bytes(len(bucket.layers) if bucket.is_state(repeats) else bucket.num_groups(repeats))
        for bucket in buckets
    )
    groups: list[list[Sized]] = []
    for bucket in buckets:
        num_groups = bucket.num_groups(repeats)
        if bucket.is_state(repeats):
            # States can stand alone, so they fill the row that the others need and never widen it.
            per_group = max(row // bucket.layers[0].nbytes, 1)
            num_groups = max(num_groups, _ceil_div(len(bucket.layers), per_group))
        groups += bucket.cut(num_groups)
    return groups


def promoted_to_full(layers: Sequence[Sized]) -> list[Sized] | None:
    """Return MLA layers and sliding windows with blocks for all tokens of both, so that they share a table.

    vLLM does so where the pages of an MLA model and of a draft with windows cannot be made equal. None if the layers
    are of other kinds, or still share no table.
    """
    kinds = {(layer.spec.kind, layer.spec.window > 0) for layer in layers}
    if not {("mla", False), ("sliding", True)} <= kinds <= {("mla", False), ("sliding", True), ("full", False)}:
        return None
    lasting = {layer.spec.block_size for layer in layers if layer.spec.kind != "sliding"}
    sizes = {layer.spec.block_size for layer in layers}
    if len(lasting) > 1 or any(max(lasting) % size for size in sizes):
        return None
    if any(layer.spec.page_bytes and layer.spec.block_size not in lasting for layer in layers):
        return None  # a page that was padded for fewer tokens has no known size for more
    block_size = max(lasting)
    return [replace(layer, spec=msgspec.structs.replace(layer.spec, block_size=block_size)) for layer in layers]


@dataclass(slots=True)
class _Bucket:
    """Layers that could share a table, before they are cut into groups."""

    layers: list[Sized]

    def by_page(self) -> dict[int, list[Sized]]:
        sizes: dict[int, list[Sized]] = {}
        for layer in self.layers:
            sizes.setdefault(layer.nbytes, []).append(layer)
        return sizes

    def repeats(self) -> int:
        """Return how often the pattern of one layer per page size occurs; the most frequent size decides."""
        return max(len(names) for names in self.by_page().values())

    def is_balanced(self) -> bool:
        """Return whether each page size has equally many layers."""
        return len({len(names) for names in self.by_page().values()}) == 1

    def is_state(self, repeats: int | None) -> bool:
        """Return whether few blocks per request stay alive, so that a group may be as short as one layer."""
        spec = self.layers[0].spec
        return isinstance(spec, Mamba) or (repeats is None and _slides(spec))

    def num_groups(self, repeats: int | None) -> int:
        """Return how many groups the pattern needs; a bucket without one stays whole."""
        return _ceil_div(self.repeats(), repeats) if repeats is not None and self.is_balanced() else 1

    def row_bytes(self, num_groups: int) -> int:
        return sum(_ceil_div(len(layers), num_groups) * nbytes for nbytes, layers in self.by_page().items())

    def cut(self, num_groups: int) -> list[list[Sized]]:
        """Deal the repeats of the pattern out in turn."""
        if num_groups == 1:
            return [self.layers]
        # Sizes of unequal number leave gaps in the last repeats. vLLM drops the layers there; they are kept here.
        repeats = [[layer for layer in repeat if layer] for repeat in zip_longest(*self.by_page().values())]
        dealt = _dealt_out(repeats, min(num_groups, len(repeats)))
        return [[layer for repeat in group for layer in repeat] for group in dealt]


def _repeats_per_group(buckets: Iterable[_Bucket]) -> int | None:
    """Return the repeats per group that leave the fewest places empty, or None; of equals the larger."""
    balanced = [bucket for bucket in buckets if bucket.is_balanced()]
    least = max((bucket.repeats() for bucket in balanced if len(bucket.by_page()) > 1), default=0)
    if not least:
        return None
    lengths = [bucket.repeats() for bucket in balanced]
    return min(
        range(least, max(lengths) + 1),
        key=lambda repeats: (sum(-length % repeats for length in lengths), -repeats),
    )


def _same_type(first: Sized, other: Sized) -> bool:
    """Return whether a layer may share the table of a group; as in vLLM, a window takes in MLA, but not the reverse."""
    spec = other.spec
    same_window = spec.window == first.spec.window
    match first.spec:
        case FullAttention():
            alike = _lasts(spec)
        case MLA():
            alike = isinstance(spec, MLA) and same_window if first.spec.window else _lasts(spec)
        case SlidingWindow():
            alike = _slides(spec) and same_window
        case ChunkedLocal():
            alike = isinstance(spec, ChunkedLocal) and same_window
        case CrossAttention():
            alike = isinstance(spec, CrossAttention)
        case Mamba() | Opaque():
            alike = spec.kind == first.spec.kind and other.nbytes == first.nbytes
    kernels = spec.kernel_block_size == first.spec.kernel_block_size  # a plan cuts all layers of a group alike
    return alike and kernels and spec.block_size == first.spec.block_size


def _lasts(spec: CacheSpec) -> bool:
    """Return whether every token's slot is kept to the end of the request."""
    return isinstance(spec, FullAttention) or (isinstance(spec, MLA) and not spec.window)


def _slides(spec: CacheSpec) -> bool:
    """Return whether slots behind a window are freed."""
    return isinstance(spec, SlidingWindow) or (isinstance(spec, MLA) and spec.window > 0)


def _local(spec: CacheSpec, shard: Shard) -> CacheSpec:
    """Return what one rank holds, so that layers that differ only on other ranks are alike."""
    if isinstance(spec, FullAttention | SlidingWindow | ChunkedLocal | CrossAttention):
        return msgspec.structs.replace(spec, num_kv_heads=shard.heads(spec.num_kv_heads).count)
    return spec


def _enlarged(layer: Sized, largest: Sized) -> Sized:
    if layer.nbytes == largest.nbytes:
        return layer
    spec = layer.spec
    ratio, rest = divmod(largest.nbytes, layer.nbytes)
    # More tokens per block make neither a state larger nor a page that is padded already.
    if not rest and has_tokens(spec) and not spec.page_bytes:
        longer = msgspec.structs.replace(spec, block_size=spec.block_size * ratio)
        return replace(layer, spec=longer, nbytes=largest.nbytes)
    if isinstance(spec, MLA) and not spec.window:
        raise SpecInvalid(
            f"{layer.name}: the page of {layer.nbytes} bytes does not divide the largest, "
            f"{largest.nbytes} bytes of {largest.name!r}, and a page of MLA cannot be padded to it",
            remedy="Use a layout with blocks outermost, such as BLHNC, or a block_size that makes the pages divide.",
        )
    return replace(
        layer,
        spec=msgspec.structs.replace(spec, page_bytes=largest.nbytes),
        nbytes=largest.nbytes,
        padded=True,
    )


def _dealt_out(items: Sequence[Item], num_groups: int) -> list[list[Item]]:
    """Deal items out in turn, so that every pipeline stage keeps groups of about equal length."""
    return [list(items[index::num_groups]) for index in range(num_groups)]


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)
