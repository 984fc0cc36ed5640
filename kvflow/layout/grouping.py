"""Form groups by the rules of vLLM 0.32, from layers as one rank sees them.

Layers that need equally many slots per token form one group. Otherwise pages are made equal, and layers of one spec are
cut into groups of about one length, because layers of different groups at one position share memory. In a row of a
block-outermost layout pages may differ: groups are then cut to rows of about one length.

Source: vLLM 0.32.0, ``v1/core/kv_cache_utils.py``; ``tests/data/vllm_groups.json`` holds its answers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TypeVar

import msgspec

from kvflow.errors import SpecInvalid
from kvflow.layout.placement import has_tokens, page_bytes
from kvflow.layout.shards import Shard
from kvflow.layout.specs import (
    MLA,
    CacheSpec,
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    Mamba,
    Opaque,
    SlidingWindow,
)

GROUP_SIZE_RATIO_MAX = 1.5
"""Source: vLLM. Below this ratio padding the shorter bucket wastes less than cutting the longer one."""


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Sized:
    """One layer as one rank sees it: its own heads, its page with padding, and whether grouping has added padding."""

    name: str
    spec: CacheSpec
    nbytes: int
    padded: bool = False


def measure(specs: Mapping[str, CacheSpec], shard: Shard) -> list[Sized]:
    """Return the layers as the rank sees them, in the order of ``specs``."""
    return [Sized(name, _local(spec, shard), page_bytes(spec, shard, layer=name)) for name, spec in specs.items()]


def share_one_table(layers: Sequence[Sized]) -> bool:
    """Return whether all layers need equally many slots for the same tokens; their pages may differ."""
    return all(_same_type(layers[0], layer) for layer in layers[1:])


def with_equal_pages(layers: Sequence[Sized]) -> list[Sized]:
    """Return layers with pages as large as the largest: by more tokens per block where that fits, else by padding.

    Raises:
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
