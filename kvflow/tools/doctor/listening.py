"""Offer probe blocks to each member of the cluster: ``kvflow doctor --listen``."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvflow.config import WorkerConfig
from kvflow.events import Event, PlaneOmitted
from kvflow.leases.tickets import Ticket
from kvflow.memory.cache import KVCache
from kvflow.memory.device import require_device
from kvflow.reads.reach import host_facts
from kvflow.tools.bench.geometry import Geometry
from kvflow.tools.doctor import probe
from kvflow.worker.environment import PRODUCTION, Environment
from kvflow.worker.runtime import open_worker
from kvflow.worker.worker import Worker

GEOMETRY = Geometry(layers=1, num_kv_heads=2, head_size=128, num_blocks=1, layout="BLHNC", kv="content")
"""Of one block of probes."""

assert GEOMETRY.block_bytes == probe.BLOCK_BYTES, "the geometry has other blocks"

SMALL_OFFERS, LARGE_OFFERS = 4, 2
"""Tickets of each size that wait to be used. A read takes one, and another one takes its place."""


class Offers:
    """The tickets that are held at this moment.

    Args:
        seed: of the bytes of the cache.
        device: that it lies on.
        transport: the setting of the worker.
        large: blocks of the large read.
    """

    def __init__(self, seed: int, device: str, transport: str, large: int) -> None:
        self._seed = seed
        self._device = device
        self._transport = transport
        self._large = large
        self._tickets: dict[int, dict[int, Ticket]] = {size: {} for size in (*probe.SMALL_BLOCKS, large)}
        self._missing: dict[str, str] = {}
        self._advertised = ""

    def notice(self, event: Event) -> None:
        """Remember which data planes are missing. A hook of the worker."""
        if isinstance(event, PlaneOmitted):
            self._missing[event.plane] = event.detail[:256]

    def tell(self) -> bytes:
        """Return what a member of the cluster gets that asks. Called on the loop of the worker."""
        told = {size: tuple(each.to_params() for each in held.values()) for size, held in self._tickets.items()}
        large = told.pop(self._large)
        offer = probe.ProbeOffer(
            seed=self._seed,
            device=self._device,
            transport=self._transport,
            missing=self._missing,
            advertised=self._advertised,
            small=told,
            large=large,
            large_blocks=self._large,
            facts=host_facts(),
        )
        return probe.encode(offer)

    async def keep(self, worker: Worker) -> None:
        """Hold offers of each size until cancelled; each that is used, or expires, is replaced."""
        self._advertised = worker.endpoint
        async with asyncio.TaskGroup() as tasks:
            for size, held in self._tickets.items():
                for slot in range(LARGE_OFFERS if size == self._large else SMALL_OFFERS):
                    tasks.create_task(_keep_one(worker, size, slot, held))


async def _keep_one(worker: Worker, size: int, slot: int, held: dict[int, Ticket]) -> None:
    for number in count():
        name = f"probe-{size}-{slot}-{number}"
        held[slot] = worker.offer(name, [list(range(size))], probe.tokens(size))
        await worker.wait_offer(name)


@asynccontextmanager
async def listening(
    config: WorkerConfig, *, device: str = "cpu", environment: Environment = PRODUCTION
) -> AsyncIterator[Worker]:
    """Open a worker that offers probe blocks until the block is left.

    Args:
        config: of the worker.
        device: that its cache lies on.
        environment: as of ``open_worker``.

    Raises:
        ConfigInvalid: torch cannot use the device, or a setting is wrong.
        KvflowError: as of ``open_worker``.
    """
    seed, large = secrets.randbits(32), probe.large_blocks(probe.free_memory())
    cache = await asyncio.to_thread(build_cache, device, large)
    write(cache, probe.content(seed, large))
    offers = Offers(seed, device, config.transport, large)
    environment = replace(environment, tell=offers.tell)
    async with open_worker(config, cache, hooks=[offers.notice], environment=environment) as worker:
        keeping = asyncio.create_task(offers.keep(worker))
        try:
            yield worker
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])


def build_cache(device: str, num_blocks: int) -> KVCache:
    """Allocate a cache of probe blocks.

    Raises:
        ConfigInvalid: torch cannot use the device.
    """
    require_device(device)
    return replace(GEOMETRY, num_blocks=num_blocks, device=device).build()


def write(cache: KVCache, content: npt.NDArray[np.uint8]) -> None:
    """Write bytes to the start of a cache."""
    part = cache.backing[: content.size]
    on_host = part.cpu()
    on_host.numpy()[:] = content
    part.copy_(on_host)


def read(cache: KVCache, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return the first bytes of a cache."""
    held: npt.NDArray[np.uint8] = cache.backing[:nbytes].cpu().numpy()
    return held
