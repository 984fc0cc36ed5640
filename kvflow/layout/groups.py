"""Which layers share a block table: groups as vLLM 0.32 forms them.

Layers of one spec form a bucket. Buckets are cut into groups of about one size, because layers of different
groups at the same position share memory: a group that is much longer than the others would leave most of
that memory unused, and one that is a little shorter only wastes the padding.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from kvflow.errors import SpecInvalid
from kvflow.layout.placement import page_bytes
from kvflow.layout.shards import Shard
from kvflow.layout.specs import CacheSpec, validate_specs

GROUP_SIZE_RATIO_MAX = 1.5
"""Source: vLLM's planner. Up to this ratio padding the shorter bucket wastes less than cutting the longer one."""


class Group(Struct, frozen=True):
    """Layers that share a block table.

    Attributes:
        layers: names, in the order of their positions.
        kind: ``full`` or ``sliding``.
        block_size: tokens in one block.
        window: tokens that a sliding window sees; 0 for full attention.
    """

    layers: tuple[str, ...]
    kind: str
    block_size: int
    window: int = 0


def plan_groups(specs: Mapping[str, CacheSpec], *, layout: str = "auto") -> tuple[Group, ...]:
    """Form the groups of a hybrid model.

    Args:
        specs: layer name -> spec, in model order.
        layout: layout the cache will have. Pages of one size give the same groups in every layout.

    Raises:
        SpecInvalid: there is no layer, or the layers' pages differ in size.
    """
    validate_specs(specs)
    require_one_page_size(specs, layout)
    buckets: dict[CacheSpec, list[str]] = {}
    for name, spec in specs.items():
        buckets.setdefault(spec, []).append(name)
    size = _group_size([len(names) for names in buckets.values()])
    return tuple(
        Group(tuple(layers), spec.kind, spec.block_size, spec.window)
        for spec, names in buckets.items()
        for layers in _cut(names, size)
    )


def require_one_page_size(specs: Mapping[str, CacheSpec], layout: str, shard: Shard | None = None) -> None:
    """Refuse pages of different sizes: positions of different groups could not share memory.

    Without a shard the whole model's pages are compared; ranks may still hold unequal parts of equal pages.

    Raises:
        SpecInvalid: names two layers whose pages differ.
    """
    sizes: dict[int, str] = {}
    for name, spec in specs.items():
        sizes.setdefault(page_bytes(spec, shard), name)
    if len(sizes) > 1:
        (bytes_a, name_a), (bytes_b, name_b), *_ = sizes.items()
        raise SpecInvalid(
            f"pages differ in size with layout {layout!r}: {name_a!r} has {bytes_a} bytes, {name_b!r} has {bytes_b}",
            remedy="Give all layers one page size, for example by their block_size.",
        )


def window_blocks(group: Group, num_tokens: int) -> int:
    """Return how many of the last blocks of ``num_tokens`` tokens the next token still reads.

    For a sliding window that is the blocks which hold any of the last ``window - 1`` tokens; for other
    kinds, all blocks.
    """
    total = -(-num_tokens // group.block_size)
    if group.kind != "sliding":
        return total
    first_token = max(0, num_tokens - (group.window - 1))
    return total - min(total, first_token // group.block_size)


def check_groups(specs: Mapping[str, CacheSpec], groups: Sequence[Group]) -> None:
    """Check that ``groups`` partition the layers of ``specs`` and agree with them.

    Raises:
        SpecInvalid: names the layer or field that is wrong.
    """
    if not all(group.layers for group in groups):
        raise SpecInvalid("a group has no layers", remedy="Leave it out.")
    listed = [name for group in groups for name in group.layers]
    if sorted(listed) != sorted(specs):
        odd = sorted(set(listed) ^ set(specs)) or sorted({name for name in listed if listed.count(name) > 1})
        raise SpecInvalid(f"groups and specs do not name the same layers once each: {odd[:5]}")
    for index, group in enumerate(groups):
        for name in group.layers:
            spec = specs[name]
            if (spec.kind, spec.block_size, spec.window) != (group.kind, group.block_size, group.window):
                raise SpecInvalid(f"group {index} is {group}, but its layer {name!r} is {spec}")


def _group_size(bucket_sizes: Sequence[int]) -> int:
    smallest, largest = min(bucket_sizes), max(bucket_sizes)
    return largest if largest < GROUP_SIZE_RATIO_MAX * smallest else smallest


def _cut(names: Sequence[str], size: int) -> list[Sequence[str]]:
    """Deal the layers out in turn, so that every pipeline stage keeps its groups about equally long."""
    num_groups = -(-len(names) // size)
    return [names[index::num_groups] for index in range(num_groups)]
