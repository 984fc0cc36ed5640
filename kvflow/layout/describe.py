"""From specs, groups and a layout to a manifest, without touching memory."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import msgspec
from msgspec import Struct

from kvflow.errors import SpecInvalid
from kvflow.layout.component import Region
from kvflow.layout.groups import Group, check_groups, stripe_of
from kvflow.layout.manifest import Layer, Manifest, ManifestGroup
from kvflow.layout.placement import (
    PlacedLayer,
    Pool,
    has_tokens,
    item_alignment,
    page_bytes,
    place_column,
    place_row,
    round_up,
    row_bytes,
)
from kvflow.layout.shards import Shard, whole_number
from kvflow.layout.specs import CacheSpec, validate_specs


class CachePlan(Struct, frozen=True):
    """How a cache lies in one backing allocation that does not exist yet."""

    groups: tuple[Group, ...]
    specs: dict[str, CacheSpec]  # with the block size and the padding of its group
    layers: dict[str, PlacedLayer]
    bytes_per_block: int  # all groups share them
    num_blocks: int
    packed: bool  # a block of one group is one row
    shard: Shard

    @property
    def nbytes(self) -> int:
        """Bytes of the backing allocation."""
        return self.num_blocks * self.bytes_per_block

    def manifest(self, region: Region) -> Manifest:
        """Return the manifest of this cache in ``region``."""
        groups = tuple(manifest_group(group, self.specs, self.layers, self.shard) for group in self.groups)
        return Manifest(self.num_blocks, (region,), groups)


def manifest_group(
    group: Group, specs: Mapping[str, CacheSpec], layers: Mapping[str, PlacedLayer], shard: Shard
) -> ManifestGroup:
    """Return the entry of one group in a manifest."""
    return ManifestGroup(
        kind=group.kind,
        block_size=group.block_size,
        layers=tuple(
            Layer(name, specs[name].kind, specs[name].window, layers[name].components) for name in group.layers
        ),
        stripe=stripe_of(group, shard),
    )


def fitted_specs(specs: Mapping[str, CacheSpec], groups: Sequence[Group]) -> dict[str, CacheSpec]:
    """Return the specs in model order, each with the block size and the padded page of its group."""
    group_of = {name: group for group in groups for name in group.layers}
    return {
        name: msgspec.structs.replace(
            spec,
            block_size=group_of[name].block_size if has_tokens(spec) else spec.block_size,
            page_bytes=group_of[name].page_bytes or spec.page_bytes,
        )
        for name, spec in specs.items()
    }


def plan_cache(
    specs: Mapping[str, CacheSpec],
    groups: Sequence[Group],
    *,
    layout: str,
    kv: str,
    shard: Shard,
    num_blocks: int | None = None,
    memory_bytes: int | None = None,
    apart: Collection[str] = (),
    alignment: int = 1,
) -> CachePlan:
    """Place every layer in one backing allocation, in which groups share rows, or tensors of their positions.

    ``layout`` is one of ``LAYOUTS``, and ``kv`` one of ``KV_FORMS``. Give either the blocks of the pool or the bytes of
    the allocation. Layers ``apart`` get separate tensors also in a packed layout. The stride of a row, or of a tensor's
    blocks, is a multiple of ``alignment`` bytes.

    Raises:
        SpecInvalid: a spec, the groups, the layout or the budget cannot be used.
    """
    validate_specs(specs)
    check_groups(specs, groups, shard)
    probe = Pool(1, shard, layout, kv)
    axes = probe.axes
    alignment = whole_number("alignment", alignment)
    if alignment < 1:
        raise SpecInvalid(
            f"alignment is {alignment}: expected at least 1", remedy="Give a number of bytes, such as 4096."
        )
    unknown = sorted(set(apart) - set(specs))
    if unknown:
        raise SpecInvalid(
            f"apart names layers that are not in specs: {unknown[:5]}", remedy="Name layers of specs only."
        )
    fitted = fitted_specs(specs, groups)
    _check_kernel_blocks(fitted, groups)
    shared = [[name for name in group.layers if name not in apart] for group in groups]
    # Every tensor begins where the elements of any layer may.
    alignment = math.lcm(alignment, *(item_alignment(spec) for spec in fitted.values()))
    heights = _heights(fitted, shared, probe, alignment)
    columns = [round_up(page_bytes(fitted[name], shard, layer=name), alignment) for name in apart]
    num_blocks = _budget(num_blocks, memory_bytes, sum(heights) + sum(columns))
    layers = _place_shared(fitted, shared, Pool(num_blocks, shard, layout, kv), heights)
    alone = Pool(num_blocks, shard, "LBHNC" if axes.index("H") < axes.index("N") else "LBNHC", kv)
    for index, name in enumerate(apart):
        offset = num_blocks * (sum(heights) + sum(columns[:index]))
        layers |= place_column(fitted, [name], alone, offset, columns[index])
    return CachePlan(tuple(groups), fitted, layers, sum(heights) + sum(columns), num_blocks, probe.packed, shard)


def _check_kernel_blocks(specs: Mapping[str, CacheSpec], groups: Sequence[Group]) -> None:
    """Refuse groups whose layers have different kernel blocks: a block is cut into units once, for all its layers."""
    for index, group in enumerate(groups):
        tokens = {name: specs[name].kernel_tokens if has_tokens(specs[name]) else 0 for name in group.layers}
        for first, name in pairwise(group.layers):
            if tokens[name] != tokens[first]:
                raise SpecInvalid(
                    f"group {index}: kernel blocks of {first!r} have {tokens[first]} tokens, "
                    f"those of {name!r} have {tokens[name]}",
                    remedy="Give the layers of a group one kernel_block_size, and states a group of their own.",
                )


def _heights(specs: Mapping[str, CacheSpec], shared: Sequence[Sequence[str]], pool: Pool, alignment: int) -> list[int]:
    """Return the bytes of one block in each shared tensor: one row, or one page per position."""
    if pool.packed:
        return [round_up(max(row_bytes(specs, names, pool) for names in shared), alignment)]
    return [
        round_up(max(page_bytes(specs[name], pool.shard, layer=name) for name in column), alignment)
        for column in _columns(shared)
    ]


def _place_shared(
    specs: Mapping[str, CacheSpec], shared: Sequence[Sequence[str]], pool: Pool, heights: Sequence[int]
) -> dict[str, PlacedLayer]:
    if pool.packed:
        rows = [place_row(specs, names, pool, heights[0]) for names in shared]
        return {name: placed for row in rows for name, placed in row.items()}
    placed: dict[str, PlacedLayer] = {}
    for at, column in enumerate(_columns(shared)):
        placed |= place_column(specs, column, pool, pool.num_blocks * sum(heights[:at]), heights[at])
    return placed


def _columns(shared: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the layers at each position, of all groups."""
    return [[names[at] for names in shared if at < len(names)] for at in range(max(map(len, shared)))]


def _budget(num_blocks: int | None, memory_bytes: int | None, bytes_per_block: int) -> int:
    if (num_blocks is None) == (memory_bytes is None):
        given = "neither" if num_blocks is None else "both"
        remedy = "Give num_blocks, or memory_bytes to fill a budget."
        raise SpecInvalid(f"found {given} of num_blocks and memory_bytes: expected exactly one", remedy=remedy)
    if num_blocks is not None:
        num_blocks = whole_number("num_blocks", num_blocks)
        if num_blocks < 1:
            raise SpecInvalid(f"num_blocks is {num_blocks}: expected at least 1", remedy="Give at least one block.")
        return num_blocks
    budget = whole_number("memory_bytes", memory_bytes)
    if budget < bytes_per_block:
        raise SpecInvalid(
            f"memory_bytes is {budget}, but one block needs {bytes_per_block} bytes",
            remedy="Give memory for at least one block.",
        )
    return budget // bytes_per_block
