"""From specs, groups and a layout to a manifest, without touching memory."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from kvflow.errors import SpecInvalid
from kvflow.layout.groups import Group, check_groups, require_one_page_size
from kvflow.layout.manifest import Layer, Manifest, ManifestGroup
from kvflow.layout.placement import Placement, page_bytes, place
from kvflow.layout.region import Region
from kvflow.layout.shards import Shard
from kvflow.layout.specs import CacheSpec, validate_specs


class CachePlan(Struct, frozen=True):
    """How a cache lies in one backing allocation that does not exist yet.

    Attributes:
        groups: in the order in which block ids are given.
        placements: layer name -> strides and offset.
        bytes_per_block: of the backing allocation, all groups overlaid.
        num_blocks: blocks in the pool.
        shard: the rank.
    """

    groups: tuple[Group, ...]
    placements: dict[str, Placement]
    bytes_per_block: int
    num_blocks: int
    shard: Shard

    @property
    def nbytes(self) -> int:
        """Bytes of the backing allocation."""
        return self.num_blocks * self.bytes_per_block

    def manifest(self, specs: Mapping[str, CacheSpec], region: Region) -> Manifest:
        """Return the manifest of this cache once it lies in ``region``."""
        groups = tuple(
            ManifestGroup(
                kind=group.kind,
                block_size=group.block_size,
                window=group.window,
                layers=tuple(
                    Layer(name, self.placements[name].components(specs[name], self.shard)) for name in group.layers
                ),
            )
            for group in self.groups
        )
        return Manifest(self.num_blocks, (region,), groups)


def plan_cache(
    specs: Mapping[str, CacheSpec],
    groups: Sequence[Group],
    *,
    layout: str,
    kv: str,
    shard: Shard,
    num_blocks: int | None = None,
    memory_bytes: int | None = None,
) -> CachePlan:
    """Place every layer in one backing allocation: layers of different groups at one position alias.

    Exactly one of ``num_blocks`` and ``memory_bytes`` is given.

    Raises:
        SpecInvalid: a spec, the groups, the layout or the budget cannot be used.
    """
    validate_specs(specs)
    check_groups(specs, groups)
    require_one_page_size(specs, layout, shard)
    page = page_bytes(next(iter(specs.values())), shard)
    num_positions = max(len(group.layers) for group in groups)
    bytes_per_block = page * num_positions
    num_blocks = _budget(num_blocks, memory_bytes, bytes_per_block)
    placements = {
        name: place(
            specs[name],
            position=position,
            num_positions=num_positions,
            num_blocks=num_blocks,
            layout=layout,
            kv=kv,
            shard=shard,
        )
        for group in groups
        for position, name in enumerate(group.layers)
    }
    return CachePlan(tuple(groups), placements, bytes_per_block, num_blocks, shard)


def _budget(num_blocks: int | None, memory_bytes: int | None, bytes_per_block: int) -> int:
    if (num_blocks is None) == (memory_bytes is None):
        raise SpecInvalid("give exactly one of num_blocks and memory_bytes")
    if num_blocks is None:
        assert memory_bytes is not None
        num_blocks = memory_bytes // bytes_per_block
    if num_blocks < 1:
        raise SpecInvalid(
            f"the budget holds {num_blocks} blocks; one block needs {bytes_per_block} bytes",
            remedy="Give memory for at least one block.",
        )
    return num_blocks
