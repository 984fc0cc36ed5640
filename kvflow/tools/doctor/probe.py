"""Known blocks: offered to each member of the cluster; read from another worker, compared byte by byte, and timed.

torch and NIXL are loaded by what opens a worker, and not by this module: the doctor itself runs without them.
"""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct
from msgspec.structs import replace

from kvflow.config import ENDPOINT_PATTERN, WorkerConfig
from kvflow.errors import KvflowError, ProtocolViolation, StaleLease
from kvflow.events import Event, PeerConnected, PeerSlow, PlaneOmitted
from kvflow.layout.shards import Shard
from kvflow.layout.specs import CacheSpec, FullAttention
from kvflow.leases.tickets import Ticket
from kvflow.reads.reach import HostFacts, host_facts, one_host
from kvflow.rendezvous.dialer import Asker, open_asker
from kvflow.report import TransferReport
from kvflow.tools.doctor.codes import FailureFigures, failure_of
from kvflow.worker.snapshot import TOLD_BYTES_MAX, decode_inspection

if TYPE_CHECKING:
    from kvflow.memory.cache import KVCache
    from kvflow.worker.worker import Worker

BLOCK_SIZE = 16

Dimension = Annotated[int, Meta(ge=1, le=1 << 20)]
ShortWord = Annotated[str, Meta(max_length=32)]


class Geometry(Struct, frozen=True, kw_only=True):
    """One cache of full-attention layers with bfloat16 and 16 tokens to a block, as ``kvflow.allocate`` makes it.

    ``tp_size`` ranks divide the heads; this is the first of them.
    """

    layers: Dimension
    num_kv_heads: Dimension
    head_size: Dimension
    num_blocks: Dimension
    layout: ShortWord
    kv: ShortWord
    tp_size: Dimension = 1
    huge_pages: Literal["auto", "never"] = "auto"
    device: ShortWord = "cpu"

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all layers, K and V, where heads are not divided."""
        return self.layers * 2 * self.num_kv_heads * self.head_size * 2 * BLOCK_SIZE

    def build(self) -> "KVCache":
        """Allocate the cache and touch every page, so that no measurement pays for page faults."""
        from kvflow.memory.cache import allocate  # noqa: PLC0415 - loads torch
        from kvflow.memory.device import TorchDeviceOrder  # noqa: PLC0415 - likewise

        specs: dict[str, CacheSpec] = {
            f"layers.{index}": FullAttention(
                block_size=BLOCK_SIZE, num_kv_heads=self.num_kv_heads, head_size=self.head_size, dtype="bfloat16"
            )
            for index in range(self.layers)
        }
        cache = allocate(
            specs,
            num_blocks=self.num_blocks,
            layout=self.layout,
            kv=self.kv,
            shard=Shard(tp_size=self.tp_size),
            huge_pages=self.huge_pages,
            device=self.device,
        )
        cache.backing.fill_(1)
        if cache.backing.is_cuda:
            TorchDeviceOrder(cache.backing.device.index).settle()  # other streams read it
        return cache


GEOMETRY = Geometry(layers=1, num_kv_heads=2, head_size=128, num_blocks=1, layout="BLHNC", kv="content")
"""Of one block of probes."""

BLOCK_BYTES = GEOMETRY.block_bytes

LARGE_BYTES = 64 << 20
"""Enough that a read of 50 GB/s lasts a millisecond, and small enough that every host has room."""

SMALL_BLOCKS = (1, 4)
"""Of small reads: 16 KiB and 64 KiB."""

LARGE_BLOCKS_MIN = 64
"""Of the large read, where memory is short: 1 MiB."""

MEMORY_SHARE = 8
"""The cache takes at most this part of the memory that is free."""

SMALL_OFFERS, LARGE_OFFERS = 4, 2
"""Tickets of each size that wait to be used. A read takes one, and another one takes its place."""

SMALL_READS, LARGE_READS = 12, 4
"""Reads of each small size, and large reads. Fewer are possible: each takes a ticket, and time."""

TIME_S = 20.0
"""After this time no further read is begun: over a slow network, one large read takes seconds."""

ASK_AGAIN_S = 0.3
"""A worker makes a report at most each 0.25 s, and answers four questions in a second."""

USED_MAX = 20
"""Tickets in a row that another reader may have used before us, and questions for another one."""

SHORT_MAX = 256
SHORT = Annotated[str, Meta(max_length=SHORT_MAX)]
Variables = Annotated[dict[SHORT, SHORT], Meta(max_length=32)]
Params = Annotated[dict[SHORT, Annotated[str, Meta(max_length=TOLD_BYTES_MAX)]], Meta(max_length=4)]
SmallSize = Annotated[int, Meta(ge=1, le=SMALL_BLOCKS[-1])]


class ProbeOffer(Struct, frozen=True, kw_only=True):
    """What ``kvflow doctor --listen`` tells a member of the cluster.

    Attributes:
        seed: of the bytes of the cache.
        missing: data planes that could not start there, and why.
        advertised: the control endpoint that its tickets name.
        small: tickets, by number of blocks.
        large: tickets for all blocks, of which there are ``large_blocks``.
    """

    seed: Annotated[int, Meta(ge=0, lt=1 << 32)]
    device: SHORT
    transport: SHORT
    missing: Variables
    advertised: Annotated[str, Meta(max_length=300, pattern=rf"^{ENDPOINT_PATTERN}\Z")]
    small: Annotated[
        dict[SmallSize, Annotated[tuple[Params, ...], Meta(max_length=8)]], Meta(min_length=1, max_length=4)
    ]
    large: Annotated[tuple[Params, ...], Meta(max_length=4)]
    large_blocks: Annotated[int, Meta(ge=LARGE_BLOCKS_MIN, le=LARGE_BYTES // BLOCK_BYTES)]
    facts: HostFacts


class Reads(Struct, frozen=True, kw_only=True):
    """Reads of one size.

    Attributes:
        seconds: of each, from the call of ``pull`` to its result.
        gb_per_s: rate of each, while bytes moved.
        wrong_bytes: that differ from what was offered, in all of them.
    """

    nbytes: int
    seconds: tuple[float, ...]
    gb_per_s: tuple[float, ...]
    wrong_bytes: int


class ProbeFigures(Struct, frozen=True, kw_only=True):
    """What one reader found.

    Attributes:
        reads: by size, the smallest first.
        failure: why the reads ended early; None if they did not.
        plane: that was chosen; empty if no connection was made. The next three as in ``PeerConnected``.
        missing: data planes that could not start here, and why.
        may_copy: whether the kernel lets us copy the other process's memory; None if that process is elsewhere.
        slow: what ``peer.slow`` said, and its remedy; empty if it did not come.
    """

    reads: tuple[Reads, ...]
    failure: FailureFigures | None
    plane: str
    transport: str
    known_by: str
    passed_over: str
    missing: dict[str, str]
    may_copy: bool | None
    slow: tuple[str, ...]
    facts: HostFacts


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ProbeOffer)


def encode(offer: ProbeOffer) -> bytes:
    """Return an offer as a worker tells it."""
    return _encoder.encode(offer)


def decode(told: bytes, *, peer: str) -> ProbeOffer | None:
    """Read what a worker has told; None if it offers no probe.

    Raises:
        ProtocolViolation: it is malformed.
    """
    if not told:
        return None
    try:
        return _decoder.decode(told)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(f"{peer} offers a malformed probe: {error}", peer=peer) from error


async def ask(visit: Asker) -> ProbeOffer | None:
    """Return what a worker offers now; None if it offers no probe.

    Raises:
        ProtocolViolation: its report, or what it offers, is malformed.
    """
    _, report = await visit.ping(report=True)
    return decode(decode_inspection(report, peer=visit.endpoint).told, peer=visit.endpoint)


def shares_pids(ours: HostFacts, theirs: HostFacts) -> bool:
    """Return whether a process id means the same process on both sides."""
    return one_host(ours, theirs) and ours.pid_namespace == theirs.pid_namespace


def large_blocks(free_bytes: int) -> int:
    """Return how many blocks the large read has, of the free memory."""
    return max(LARGE_BLOCKS_MIN, min(LARGE_BYTES, free_bytes // MEMORY_SHARE) // BLOCK_BYTES)


def free_memory() -> int:
    """Return the free bytes of host memory."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def content(seed: int, num_blocks: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of the cache: no two blocks are equal, and no byte is certain without the seed."""
    words = np.arange(num_blocks * BLOCK_BYTES // 8, dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64(seed)
    return words.view(np.uint8)


def build_cache(device: str, num_blocks: int) -> "KVCache":
    """Allocate a cache of probe blocks."""
    from kvflow.memory.device import require_device  # noqa: PLC0415 - loads torch

    require_device(device)
    return replace(GEOMETRY, num_blocks=num_blocks, device=device).build()


def _write(cache: "KVCache", content: npt.NDArray[np.uint8]) -> None:
    part = cache.backing[: content.size]
    on_host = part.cpu()
    on_host.numpy()[:] = content
    part.copy_(on_host)


class _Notes:
    """What the events of our worker say. ``notice`` is a hook."""

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


@asynccontextmanager
async def listening(config: WorkerConfig, *, device: str = "cpu") -> AsyncIterator["Worker"]:
    """Open a worker that offers probe blocks until the block is left.

    Raises:
        KvflowError: as of ``open_worker``; ``ConfigInvalid``, too, if torch cannot use the device.
    """
    from kvflow.worker.environment import PRODUCTION  # noqa: PLC0415 - loads torch
    from kvflow.worker.runtime import open_worker  # noqa: PLC0415 - likewise

    seed, large = secrets.randbits(32), large_blocks(free_memory())
    cache = await asyncio.to_thread(build_cache, device, large)
    _write(cache, content(seed, large))
    notes, advertised = _Notes(), ""
    tickets: dict[int, dict[int, Ticket]] = {size: {} for size in (*SMALL_BLOCKS, large)}

    def tell() -> bytes:
        told = {size: tuple(each.to_params() for each in held.values()) for size, held in tickets.items()}
        offer = ProbeOffer(
            seed=seed,
            device=device,
            transport=config.transport,
            missing={plane: detail[:SHORT_MAX] for plane, detail in notes.missing.items()},
            advertised=advertised,
            large=told.pop(large),
            small=told,
            large_blocks=large,
            facts=host_facts(),
        )
        return encode(offer)

    environment = replace(PRODUCTION, tell=tell)
    async with open_worker(config, cache, hooks=[notes.notice], environment=environment) as worker:
        advertised = worker.endpoint
        places = [(size, slot) for size in tickets for slot in range(LARGE_OFFERS if size == large else SMALL_OFFERS)]
        holding = [asyncio.create_task(_hold(worker, size, slot, tickets[size])) for size, slot in places]
        try:
            yield worker
        finally:
            for each in holding:
                each.cancel()
            await asyncio.wait(holding)


async def _hold(worker: "Worker", size: int, slot: int, held: dict[int, Ticket]) -> None:
    """Hold an offer until cancelled: one that is used, or expires, is replaced."""
    for number in count():
        name = f"probe-{size}-{slot}-{number}"
        held[slot] = worker.offer(name, [list(range(size))], size * BLOCK_SIZE)
        await worker.wait_offer(name)


async def read_probe(endpoint: str, config: WorkerConfig, *, device: str = "cpu", key: str = "") -> ProbeFigures | None:
    """Read from a worker that offers probe blocks; None if it offers none.

    Raises:
        KvflowError: the other worker is not reached, or ours does not open.
    """
    from kvflow.reads.nixl.binding import may_copy_from  # noqa: PLC0415 - what runs in the doctor itself needs no NIXL
    from kvflow.worker.runtime import open_worker  # noqa: PLC0415 - loads torch

    async with open_asker(endpoint, config, server_key=key) as visit:
        offer = await ask(visit)
        if offer is None:
            return None
        cache = await asyncio.to_thread(build_cache, device, offer.large_blocks)
        notes, facts, failure = _Notes(), host_facts(), None
        config = replace(config, engine_id=f"doctor-{secrets.token_hex(4)}")
        reads: list[Reads] = []
        async with open_worker(config, cache, hooks=[notes.notice]) as worker:
            reader = _ProbeReader(visit, offer, worker, cache)
            try:
                for size in sorted(offer.small):
                    reads += [await reader.read(size, SMALL_READS)]
                reads += [await reader.read(offer.large_blocks, LARGE_READS)]
            except KvflowError as error:
                failure = failure_of(error)
    connected = notes.connected
    return ProbeFigures(
        reads=tuple(reads),
        failure=failure,
        plane="" if connected is None else connected.plane,
        transport="" if connected is None else connected.transport,
        known_by="" if connected is None else connected.transport_known_by,
        passed_over="" if connected is None else connected.passed_over,
        missing=notes.missing,
        may_copy=may_copy_from(offer.facts.pid) if shares_pids(offer.facts, facts) else None,
        slow=notes.slow,
        facts=facts,
    )


class _ProbeReader:
    """Reads with the tickets of another worker, each used once."""

    def __init__(self, visit: Asker, offer: ProbeOffer, worker: "Worker", cache: "KVCache") -> None:
        self._visit = visit
        self._offer = offer
        self._worker = worker
        self._cache = cache
        self._expected = content(offer.seed, offer.large_blocks)
        self._used: set[str] = set()
        self._until = time.monotonic() + TIME_S

    async def read(self, num_blocks: int, times: int) -> Reads:
        """Read the first blocks as often as there is time for, at least once, and compare each byte."""
        nbytes, wrong = num_blocks * BLOCK_BYTES, 0
        expected = self._expected[:nbytes]
        reports: list[TransferReport] = []
        while len(reports) < times and not (reports and time.monotonic() > self._until):
            _write(self._cache, ~expected)  # what stays of it was not read
            reports.append(await self._pull(num_blocks))
            wrong += int(np.count_nonzero(self._cache.backing[:nbytes].cpu().numpy() != expected))
        return Reads(
            nbytes=nbytes,
            seconds=tuple(report.timings_s["total"] for report in reports),
            gb_per_s=tuple(report.gb_per_s for report in reports),
            wrong_bytes=wrong,
        )

    async def _pull(self, num_blocks: int) -> TransferReport:
        """Pull with a ticket that no other reader was faster to use."""
        for _ in range(USED_MAX):
            ticket = await self._take(num_blocks)
            try:
                return await self._worker.pull(ticket, [list(range(num_blocks))])
            except StaleLease:  # another reader has used it, or it has expired
                continue
        raise StaleLease(f"{USED_MAX} tickets in a row had ended: many readers use this worker", ended_by="used")

    async def _take(self, num_blocks: int) -> Ticket:
        """Return a ticket that was not used here; ask for others as long as there is none."""
        for _ in range(USED_MAX):
            for params in self._offer.small.get(num_blocks, self._offer.large):
                if (text := "".join(params.values())) not in self._used:
                    self._used.add(text)
                    return Ticket.from_params(params)
            await asyncio.sleep(ASK_AGAIN_S)
            self._offer = await ask(self._visit) or self._offer
        raise StaleLease(f"the worker offers no further ticket for {num_blocks} blocks", ended_by="used")
