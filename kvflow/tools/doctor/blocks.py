"""Offer known blocks to each member of the cluster, read those of another worker, compare each byte, and measure."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct
from msgspec.structs import replace

from kvflow.config import WorkerConfig
from kvflow.errors import KvflowError, StaleLease
from kvflow.events import Event, PeerConnected, PeerSlow, PlaneOmitted
from kvflow.layout.shards import Shard
from kvflow.layout.specs import CacheSpec, FullAttention
from kvflow.leases.tickets import Ticket
from kvflow.memory.cache import KVCache, allocate
from kvflow.memory.device import TorchDeviceOrder, require_device
from kvflow.reads.nixl.binding import may_copy_from
from kvflow.reads.reach import host_facts
from kvflow.rendezvous.visitor import Visit, open_visit
from kvflow.report import TransferReport
from kvflow.tools.doctor import probe
from kvflow.worker.environment import PRODUCTION, Environment
from kvflow.worker.runtime import open_worker
from kvflow.worker.snapshot import decode_inspection
from kvflow.worker.worker import Worker

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


SMALL_READS, LARGE_READS = 12, 4
"""Reads of each small size, and large reads. Fewer are possible: each takes a ticket, and time."""

TIME_S = 20.0
"""After so much time no further read is begun: over a slow network, one large read takes seconds."""

ASK_AGAIN_S = 0.3
"""A worker makes a report at most each 0.25 s, and answers four questions in a second."""

USED_MAX = 20
"""Tickets in a row that another reader may have used before us, and questions for another one."""


class _Notes:
    """What the events of our worker say. A hook."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}
        self.connected: PeerConnected | None = None
        self.slow: tuple[str, ...] = ()

    def notice(self, event: Event) -> None:
        match event:
            case PlaneOmitted(plane=plane, detail=detail):
                self.missing[plane] = detail
            case PeerConnected():
                self.connected = event
            case PeerSlow(detail=detail, remedy=remedy):
                self.slow = (detail, remedy)


class _Tickets:
    """Tickets of the other worker, each given once."""

    def __init__(self, visit: Visit, offer: probe.ProbeOffer) -> None:
        self._visit = visit
        self._offer = offer
        self._given: set[str] = set()

    async def take(self, num_blocks: int) -> Ticket:
        """Return a ticket for so many blocks that nobody here has used; ask for others as long as there is none."""
        for _ in range(USED_MAX):
            offered = self._offer.small.get(num_blocks, self._offer.large)
            for params in offered:
                if (text := "".join(params.values())) not in self._given:
                    self._given.add(text)
                    return Ticket.from_params(params)
            await asyncio.sleep(ASK_AGAIN_S)
            inspection = decode_inspection(await self._visit.ask_report(), peer=self._visit.endpoint)
            self._offer = probe.decode(inspection.told, peer=self._visit.endpoint) or self._offer
        raise StaleLease(f"the worker offers no further ticket for {num_blocks} blocks", ended_by="used")


async def read_probe(
    endpoint: str, config: WorkerConfig, *, device: str = "cpu", key: str = ""
) -> probe.ProbeFigures | None:
    """Read from a worker that offers probe blocks; None if it offers none.

    Args:
        endpoint: ``tcp://HOST:PORT`` of its control endpoint.
        config: of our worker, which reads.
        device: that our cache lies on.
        key: public key of the other worker, if it has its own.

    Raises:
        KvflowError: the other worker is not reached, or ours does not open.
    """
    async with open_visit(endpoint, config, server_key=key) as visit:
        inspection = decode_inspection(await visit.ask_report(), peer=endpoint)
        offer = probe.decode(inspection.told, peer=endpoint)
        if offer is None:
            return None
        cache = await asyncio.to_thread(build_cache, device, offer.large_blocks)
        expected = probe.content(offer.seed, offer.large_blocks)
        notes, facts, failure = _Notes(), host_facts(), None
        config = replace(config, engine_id=f"doctor-{secrets.token_hex(4)}")
        reads: list[probe.Reads] = []
        async with open_worker(config, cache, hooks=[notes.notice]) as worker:
            tickets, until = _Tickets(visit, offer), time.monotonic() + TIME_S
            try:
                for size in (*sorted(offer.small), offer.large_blocks):
                    times = LARGE_READS if size == offer.large_blocks else SMALL_READS
                    nbytes = size * probe.BLOCK_BYTES
                    reports: list[TransferReport] = []
                    wrong = 0
                    for _ in range(times):
                        if reports and time.monotonic() > until:
                            break
                        write(cache, ~expected[:nbytes])  # what stays of it was not read
                        reports.append(await _pull(worker, tickets, size))
                        wrong += int(np.count_nonzero(read(cache, nbytes) != expected[:nbytes]))
                    reads.append(_reads(nbytes, reports, wrong))
            except KvflowError as error:
                failure = probe.ReadFailure(code=str(error.code), message=error.message, remedy=error.remedy)
    near = offer.facts.boot_id == facts.boot_id and offer.facts.pid_namespace == facts.pid_namespace
    connected = notes.connected
    return probe.ProbeFigures(
        reads=tuple(reads),
        failure=failure,
        plane="" if connected is None else connected.plane,
        transport="" if connected is None else connected.transport,
        known_by="" if connected is None else connected.transport_known_by,
        missing=notes.missing,
        may_copy=may_copy_from(offer.facts.pid) if near else None,
        slow=notes.slow,
        facts=facts,
    )


async def _pull(worker: Worker, tickets: _Tickets, num_blocks: int) -> TransferReport:
    """Pull with a ticket that no other reader was faster to use."""
    for _ in range(USED_MAX):
        ticket = await tickets.take(num_blocks)
        try:
            return await worker.pull(ticket, [list(range(num_blocks))])
        except StaleLease:  # another reader has used it, or it has expired
            continue
    raise StaleLease(f"{USED_MAX} tickets in a row had ended: many readers use this worker", ended_by="used")


def _reads(nbytes: int, reports: list[TransferReport], wrong: int) -> probe.Reads:
    return probe.Reads(
        nbytes=nbytes,
        seconds=tuple(report.timings_s["total"] for report in reports),
        gb_per_s=tuple(report.gb_per_s for report in reports),
        wrong_bytes=wrong,
    )
