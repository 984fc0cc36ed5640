"""A cache in memory: one backing allocation, and views that alias it."""

from collections.abc import Mapping, Sequence

import torch

from kvflow.layout.describe import CachePlan, plan_cache
from kvflow.layout.groups import Group, plan_groups
from kvflow.layout.manifest import Manifest
from kvflow.layout.placement import Component, Placement
from kvflow.layout.region import Region
from kvflow.layout.shards import Shard
from kvflow.layout.specs import CacheSpec

AUTO_LAYOUTS = {True: "BLHNC", False: "LBNHC"}
"""``layout="auto"``, by ``enable_cross_layers_blocks``: packed, or a tensor per layer as every backend takes it."""


class KVCache:
    """The memory of one rank's cache and its description.

    Attributes:
        groups: in the order in which block ids are given.
        views: layer name -> tensor, as an attention backend wants it. ``kv="content"``: logical shape
            ``[block, head, token, 2 * head_size]``, K before V. ``kv="split"``: ``[2, block, token, head,
            head_size]``. Logical shapes do not depend on the layout; strides do.
        bytes_per_block: of the backing allocation, all groups overlaid.
        num_blocks: blocks in the pool.
        backing: the allocation itself, uint8, shape ``[num_blocks * bytes_per_block]``.

    Thread: immutable after construction; the bytes belong to whoever holds the block.
    """

    def __init__(self, plan: CachePlan, specs: Mapping[str, CacheSpec], backing: torch.Tensor, kv: str) -> None:
        device = backing.device
        self.backing = backing
        self.groups = plan.groups
        self.bytes_per_block = plan.bytes_per_block
        self.num_blocks = plan.num_blocks
        self._manifest = plan.manifest(
            specs,
            Region(
                address=backing.data_ptr(),
                nbytes=backing.nbytes,
                memory="DRAM" if device.type == "cpu" else "VRAM",
                device=device.index or 0,
            ),
        )
        self._components = {
            (layer.name, part.role): part
            for group in self._manifest.groups
            for layer in group.layers
            for part in layer.components
        }
        self.views = {name: _view(backing, specs[name], plan.placements[name], kv) for name in specs}

    def manifest(self) -> Manifest:
        """Return the canonical KV metadata; needs no worker."""
        return self._manifest

    def component(self, layer: str, role: str) -> torch.Tensor:
        """Return one component in canonical axes: ``[block, head held here, token, content]``, a view.

        Raises:
            KeyError: the layer or the role is not there.
        """
        part = self._components[layer, role]
        dtype = getattr(torch, part.dtype)
        shape = (self.num_blocks, part.num_heads, part.num_tokens, part.content_bytes // dtype.itemsize)
        strides = (part.block_stride, part.head_stride, part.token_stride, dtype.itemsize)
        return _strided(self.backing, dtype, shape, strides, part.offset)

    def held(self, layer: str, role: str) -> tuple[int, int, int]:
        """Return ``(first, count, total)`` along the head axis.

        Raises:
            KeyError: the layer or the role is not there.
        """
        part: Component = self._components[layer, role]
        return (part.first_head, part.num_heads, part.total_heads)


def allocate(
    specs: Mapping[str, CacheSpec],
    *,
    num_blocks: int | None = None,
    memory_bytes: int | None = None,
    layout: str = "auto",
    kv: str = "content",
    groups: Sequence[Group] | None = None,
    shard: Shard | None = None,
    device: str = "cpu",
    enable_cross_layers_blocks: bool = False,
) -> KVCache:
    """Allocate a zeroed cache: one backing allocation, layers of different groups overlaid.

    Args:
        specs: layer name -> spec, in model order.
        num_blocks: blocks in the pool; or give ``memory_bytes``.
        memory_bytes: budget of the backing allocation in bytes.
        layout: ``LBNHC``, ``LBHNC`` (a tensor per layer), ``BLHNC``, ``BLNHC``, ``BHLNC`` (one row per block)
            or ``auto``.
        kv: ``content`` (K and V side by side in the content axis) or ``split``.
        groups: as ``plan_groups`` forms them when None.
        shard: which heads this rank holds; all of them when None.
        device: torch's name of the device.
        enable_cross_layers_blocks: with ``auto``, choose a packed layout.

    Raises:
        SpecInvalid: names the field that cannot be used.
    """
    if layout == "auto":
        layout = AUTO_LAYOUTS[enable_cross_layers_blocks]
    plan = plan_cache(
        specs,
        plan_groups(specs, layout=layout) if groups is None else groups,
        layout=layout,
        kv=kv,
        shard=shard or Shard(),
        num_blocks=num_blocks,
        memory_bytes=memory_bytes,
    )
    backing = torch.zeros(plan.nbytes, dtype=torch.uint8, device=device)
    return KVCache(plan, specs, backing, kv)


def _view(backing: torch.Tensor, spec: CacheSpec, placement: Placement, kv: str) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    content, extents, strides = spec.head_size, placement.extents, placement.strides
    if kv == "content":
        axes, content = "BHN", content * extents["K"]
    else:
        axes = "KBNH"
    return _strided(
        backing,
        dtype,
        (*(extents[axis] for axis in axes), content),
        (*(strides[axis] for axis in axes), dtype.itemsize),
        placement.offset,
    )


def _strided(
    backing: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int
) -> torch.Tensor:
    """View bytes of ``backing`` as ``dtype``; strides and offset are in bytes."""
    size = dtype.itemsize
    return torch.as_strided(backing.view(dtype), shape, [stride // size for stride in strides], offset // size)
