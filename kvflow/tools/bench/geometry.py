"""Caches to measure with, small enough to be named in one line and sent to the other process."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvflow.layout.shards import Shard
from kvflow.layout.specs import CacheSpec, FullAttention
from kvflow.memory.cache import KVCache, allocate
from kvflow.memory.device import TorchDeviceOrder

BLOCK_SIZE = 16

Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Word = Annotated[str, Meta(max_length=32)]


class Geometry(Struct, frozen=True, kw_only=True):
    """One cache of full-attention layers with bfloat16 and 16 tokens to a block.

    Attributes:
        layers: how many.
        num_kv_heads: heads of each.
        head_size: elements of one head of one token.
        num_blocks: blocks in the pool.
        layout: as ``kvflow.allocate`` names it.
        kv: ``content`` or ``split``.
        tp_size: ranks that divide the heads; this is the first of them.
        huge_pages: as ``kvflow.allocate`` names it.
        device: torch's name of the device that the cache lies on.
    """

    layers: Count
    num_kv_heads: Count
    head_size: Count
    num_blocks: Count
    layout: Word
    kv: Word
    tp_size: Count = 1
    huge_pages: Literal["auto", "never"] = "auto"
    device: Word = "cpu"

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all layers, K and V, where heads are not divided."""
        return self.layers * 2 * self.num_kv_heads * self.head_size * 2 * BLOCK_SIZE

    def build(self) -> KVCache:
        """Allocate the cache and touch every page, so that no measurement pays for page faults."""
        specs: dict[str, CacheSpec] = {
            f"layers.{index}": FullAttention(
                block_size=BLOCK_SIZE, num_kv_heads=self.num_kv_heads, head_size=self.head_size, dtype="bfloat16"
            )
            for index in range(self.layers)
        }
        shard = Shard(tp_size=self.tp_size)
        cache = allocate(
            specs,
            num_blocks=self.num_blocks,
            layout=self.layout,
            kv=self.kv,
            shard=shard,
            huge_pages=self.huge_pages,
            device=self.device,
        )
        cache.backing.fill_(1)
        if cache.backing.is_cuda:
            TorchDeviceOrder(cache.backing.device.index).settle()  # other streams read it
        return cache


class Devices(Struct, frozen=True, kw_only=True):
    """The devices that the caches of a benchmark lie on, by torch's names.

    Attributes:
        here: of the process that reads.
        there: of the source process.
    """

    here: str = "cpu"
    there: str = "cpu"

    @property
    def in_host_memory(self) -> bool:
        """Whether both caches lie in host memory, so that sockets and the kernel may copy them."""
        return self.here == self.there == "cpu"

    @property
    def alike(self) -> bool:
        """Whether both caches lie in host memory, or both on a device: only then reads are staged."""
        return (self.here == "cpu") == (self.there == "cpu")


HOST = Devices()
