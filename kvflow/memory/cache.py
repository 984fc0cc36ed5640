"""A cache in memory: one allocation, and views of it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import msgspec
import torch

from kvflow.errors import SpecInvalid, counted
from kvflow.layout.component import Region
from kvflow.layout.describe import plan_cache
from kvflow.layout.groups import Group, plan_groups, resolve_layout
from kvflow.layout.manifest import Manifest
from kvflow.layout.placement import View, block_axes, view_of
from kvflow.layout.shards import Shard
from kvflow.layout.specs import CacheSpec
from kvflow.memory.device import TorchDeviceOrder
from kvflow.memory.mapping import ask_for_huge_pages, bytes_in_huge_pages, huge_page_size, map_bytes

Tensors = torch.Tensor | list[torch.Tensor]  # one layer in the form of its attention backend; a list for states


class KVCache:
    """The memory of one rank's cache and its description.

    Attributes:
        groups: in the order of block id lists.
        views: layer name -> tensor, in the form that an attention backend expects. ``kv="content"``: logical shape
            ``[block, head, token, 2 * head_size]``, K before V. ``kv="split"``: ``[2, block, token, head,
            head_size]``; ``kv="block_split"``: ``[block, 2, token, head, head_size]``. A latent: ``[block, token,
            head_size]``. States: a list of ``[block, *shape]``. Logical shapes do not depend on the layout; strides do.
        bytes_per_block: bytes of the allocation per block; all groups share them.
        num_blocks: blocks in the pool.
        storages: the memory itself, uint8, one per region of the manifest.

    Thread: any; a cache does not change after construction. The bytes of a block belong to the caller that holds its
        id.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        manifest: Manifest,
        storages: Sequence[torch.Tensor],
        views: Mapping[str, Tensors],
        bytes_per_block: int,
    ) -> None:
        self.groups = tuple(groups)
        self.views = dict(views)
        self.bytes_per_block = bytes_per_block
        self.num_blocks = manifest.num_blocks
        self.storages = tuple(storages)
        self._manifest = manifest
        self._components = {
            (layer, part.role): (part, group.kernel_blocks)
            for group in manifest.groups
            for layer, part in group.components
        }

    def __repr__(self) -> str:
        """Return the layers, the size and the device."""
        layers = f"{counted(len(self.views), 'layer')} in {counted(len(self.groups), 'group')}"
        blocks = f"{counted(self.num_blocks, 'block')} of {self.bytes_per_block:,} bytes"
        return f"<KVCache: {layers}, {blocks} on {self.backing.device}>"

    @property
    def backing(self) -> torch.Tensor:
        """The allocation as a flat uint8 tensor; for adopted memory, the first region."""
        return self.storages[0]

    @property
    def huge_page_bytes(self) -> int:
        """Bytes of host memory that are in huge pages now, as Linux reports; 0 where there are none."""
        return bytes_in_huge_pages(self._host_memory())

    def ask_for_huge_pages(self) -> int:
        """Ask the kernel for huge pages for the cache's host memory, and return ``huge_page_bytes``.

        Use it for adopted memory; ``allocate`` asks automatically. Call it before you open the worker, because
        registered memory may be pinned. Linux 6.1 and later copies pages that were written before into huge pages. It
        is not an error if the kernel refuses.
        """
        for address, nbytes in self._host_memory():
            ask_for_huge_pages(address, nbytes, now=True)
        return self.huge_page_bytes

    def _host_memory(self) -> list[tuple[int, int]]:
        return [(storage.data_ptr(), storage.nbytes) for storage in self.storages if storage.device.type == "cpu"]

    def manifest(self) -> Manifest:
        """Return the description of the cache that peers get. It needs no worker."""
        return self._manifest

    def write_marker(self) -> Callable[[], Callable[[], bool]] | None:
        """Return what marks the writes of a device, so that no lease is held before they are complete.

        To call it marks the end of the work that the calling thread's current stream has been given, and returns a
        function that returns whether the device has done this work. Neither waits. Any thread may call the function.
        Offer the blocks of a request when the mark after their last write has passed.

        Returns:
            None if the cache lies in host memory.
        """
        devices = {region.device for region in self._manifest.regions if region.memory == "VRAM"}
        orders = [TorchDeviceOrder(device) for device in sorted(devices)]

        def mark() -> Callable[[], bool]:
            marks = [order.mark() for order in orders]
            return lambda: all(is_passed() for is_passed in marks)

        return mark if orders else None

    def component(self, layer: str, role: str) -> torch.Tensor:
        """Return a view of one component in canonical axes.

        The axes are ``[block, head held here, token, content]``, or those of a state.

        Smaller kernel blocks count as blocks. If no single stride reaches all of them, they are an axis after the
        blocks.

        Raises:
            KeyError: the layer or the role is not there.
        """
        part, kernel_blocks = self._components[layer, role]
        blocks = block_axes(self.num_blocks, part.block_stride, kernel_blocks, part.kernel_stride)
        inner = zip(part.extents, part.strides, strict=True)
        return strided(self.storages[part.region], view_of(part.dtype, part.offset, *blocks, *inner))

    def held(self, layer: str, role: str) -> tuple[int, int, int]:
        """Return ``(first, count, total)`` along the sharded axis; ``(0, 1, 1)`` if the component is not divided.

        Raises:
            KeyError: the layer or the role is not there.
        """
        held = self._components[layer, role][0].held
        return (held.first, held.count, held.total)


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
    apart: Collection[str] = (),
    alignment: int = 1,
    huge_pages: Literal["auto", "never"] = "auto",
    rebuilt: Collection[str] = (),
) -> KVCache:
    """Allocate a zeroed cache in one allocation. Layers of different groups share its bytes.

    Args:
        specs: layer name -> spec, in model order.
        num_blocks: blocks in the pool; give either this or ``memory_bytes``.
        memory_bytes: budget of the backing allocation in bytes.
        layout: ``LBNHC``, ``LBHNC`` (a tensor per layer), ``BLHNC``, ``BLNHC``, ``BHLNC`` (one row per block)
            or ``auto``.
        kv: ``content`` (K and V side by side in the content axis), ``split`` (all K before all V where each layer has a
            separate tensor) or ``block_split`` (K before V within a block).
        groups: as ``plan_groups`` forms them when None.
        shard: which heads and tokens this rank holds; all of them when None.
        device: torch's name of the device.
        enable_cross_layers_blocks: with ``auto``, choose a packed layout.
        apart: layers that get separate tensors even in a packed layout, because their backend requires it.
        alignment: the stride of a row is a multiple of this many bytes.
        huge_pages: ``auto`` asks for huge pages for host memory; ``KVCache.huge_page_bytes`` returns what it got.
            ``never`` does not ask.
        rebuilt: layers that the engine can do without at first, such as those of a draft model: a pull leaves them
            unread if no rank of its ticket has them.

    Raises:
        SpecInvalid: names the field that cannot be used.
    """
    if huge_pages not in ("auto", "never"):
        raise SpecInvalid(f"huge_pages is {huge_pages!r}", remedy="Use auto or never.")
    shard = shard or Shard()
    layout = resolve_layout(specs, layout, enable_cross_layers_blocks=enable_cross_layers_blocks, shard=shard)
    plan = plan_cache(
        specs,
        plan_groups(specs, layout=layout, shard=shard) if groups is None else groups,
        layout=layout,
        kv=kv,
        shard=shard,
        num_blocks=num_blocks,
        memory_bytes=memory_bytes,
        apart=apart,
        alignment=alignment,
    )
    backing = _zeros(plan.nbytes, torch.device(device), huge=huge_pages == "auto")
    views: dict[str, Tensors] = {}
    for name, placed in plan.layers.items():
        tensors = [strided(backing, view) for view in placed.views]
        views[name] = tensors[0] if plan.specs[name].kind != "mamba" and len(tensors) == 1 else tensors
    manifest = msgspec.structs.replace(plan.manifest(region_of(backing)), rebuilt=tuple(rebuilt))
    return KVCache(plan.groups, manifest, [backing], views, plan.bytes_per_block)


def _zeros(nbytes: int, device: torch.device, *, huge: bool) -> torch.Tensor:
    """Return zeroed memory with every page present, so that no read waits for a page."""
    if huge and device.type == "cpu" and nbytes >= huge_page_size() > 0:
        return torch.from_numpy(map_bytes(nbytes, huge=True)).zero_()
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def region_of(storage: torch.Tensor) -> Region:
    """Return where a flat tensor of bytes lies. Raises SpecInvalid: it is on a device that no data plane reads."""
    device = storage.device
    if device.type not in {"cpu", "meta", "cuda"}:  # torch calls ROCm devices cuda, too
        raise SpecInvalid(
            f"the cache is in the memory of device {str(device)!r}: expected cpu or cuda",
            remedy="Serve on a CPU, or on a GPU with CUDA or ROCm.",
        )
    return Region(
        address=storage.data_ptr(),
        nbytes=storage.nbytes,
        memory="DRAM" if device.type in ("cpu", "meta") else "VRAM",
        device=device.index or 0,
    )


def strided(storage: torch.Tensor, view: View) -> torch.Tensor:
    """Return a view of a flat tensor of bytes. The strides and the offset of ``view`` are in bytes."""
    dtype = getattr(torch, view.dtype)
    size = dtype.itemsize
    # A region of adopted memory may begin anywhere in its storage, but torch counts elements from the start of the
    # storage.
    offset = (int(storage.storage_offset()) + view.offset) // size
    strides = [stride // size for stride in view.strides]
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage.untyped_storage(), offset, view.shape, strides)
