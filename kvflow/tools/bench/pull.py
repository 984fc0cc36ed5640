"""Latency and throughput of one pull by size, with the fence, by phase, beside what else could move the bytes."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import numpy as np

from kvflow.config import WorkerConfig
from kvflow.ids import Int64s
from kvflow.leases.tickets import Ticket
from kvflow.memory.cache import KVCache
from kvflow.report import PHASES, TransferReport
from kvflow.tools.bench import Table, median_ratio, summarize, tail
from kvflow.tools.bench.ceilings import BareNixl, Opened, Streams, memcpy, open_bare, process_vm_readv
from kvflow.tools.bench.source import HOST, Devices, SourceProcess, open_source
from kvflow.tools.doctor.facts import shown_size
from kvflow.tools.doctor.probe import BLOCK_SIZE, Geometry
from kvflow.worker.runtime import open_worker
from kvflow.worker.worker import Worker


class Session:
    """Pull through kvflow, or read as much in another way.

    Attributes:
        bare: bare NIXL; None where it does not reach the source.
        streams: plain TCP, as many connections as the worker's TCP plane has; None unless both caches lie in host
            memory.
    """

    def __init__(
        self,
        offer: Callable[..., Awaitable[list[Ticket]]],
        opened: Opened,
        cache: KVCache,
        worker: Worker,
        *,
        bare: BareNixl | None,
        streams: Streams | None,
    ) -> None:
        self._offer = offer
        self._worker = worker
        self._bare_first = False
        self.opened = opened
        self.cache = cache
        self.bare = bare
        self.streams = streams

    async def offer(self, source_ids: Int64s, *, count: int = 1) -> list[Ticket]:
        """Have blocks offered; what this costs is not measured."""
        ids = source_ids.tolist()
        return await self._offer([ids], num_tokens=len(ids) * BLOCK_SIZE, count=count)

    async def pull(self, ticket: Ticket, target_ids: Int64s) -> tuple[float, TransferReport]:
        """Pull once; return the seconds that the caller waited, and the report."""
        ids = [target_ids.tolist()]
        started = time.perf_counter()
        report = await self._worker.pull(ticket, ids)
        return time.perf_counter() - started, report

    async def paired(self, source_ids: Int64s, target_ids: Int64s) -> tuple[float, float | None, TransferReport]:
        """Measure kvflow and bare NIXL, if there is one, on the same blocks, in turns one or the other first."""
        (ticket,) = await self.offer(source_ids)
        if self.bare is None:
            ours_s, report = await self.pull(ticket, target_ids)
            return ours_s, None, report
        bound = self.bare.bind(source_ids, target_ids)
        self._bare_first = not self._bare_first
        bare_s = self.bare.read(bound) if self._bare_first else 0.0
        ours_s, report = await self.pull(ticket, target_ids)
        return ours_s, bare_s or self.bare.read(bound), report


@asynccontextmanager
async def open_session(name: str, source: SourceProcess, geometry: Geometry, **settings: Any) -> AsyncIterator[Session]:
    """Open both ends, ours with more settings, and read once, so that connections and page tables are warm."""
    opened = await source.open(name, geometry)
    cache = msgspec.structs.replace(geometry, device=source.devices.here).build()
    config = WorkerConfig(engine_id=f"target-{name}", **settings)
    async with AsyncExitStack() as stack:
        bare = open_bare(opened, cache)
        if bare is not None:
            stack.callback(bare.close)
        streams = None
        if source.devices.in_host_memory:
            streams = Streams(opened.streams, config.tuning.tcp_connections, cache.backing.numpy().data.cast("B"))
            stack.callback(streams.close)
        worker = await stack.enter_async_context(open_worker(config, cache))
        session = Session(partial(source.offer, name), opened, cache, worker, bare=bare, streams=streams)
        await session.paired(np.arange(1), np.arange(1))
        yield session


KIB = 1024
SMALL = Geometry(layers=1, num_kv_heads=1, head_size=32, num_blocks=1 << 10, layout="BLHNC", kv="content")
"""Blocks of 2 KiB, for sizes below 64 KiB."""
LARGE = Geometry(layers=4, num_kv_heads=2, head_size=128, num_blocks=1 << 12, layout="BLHNC", kv="content")
"""Blocks of 64 KiB; the pool is 256 MiB."""

SIZES = tuple(4 * KIB << shift for shift in range(0, 17, 2))
"""4 KiB to 256 MiB in steps of four."""

BUDGET_S = 3.0
"""Time for the rounds of one size: many of a small one, at least five of a large one."""


async def run(
    rounds: int,
    seed: int,
    progress: Callable[[str], None],
    source_address: str | None = None,
    *,
    devices: Devices = HOST,
) -> tuple[Table, ...]:
    """Measure every size, at most ``rounds`` times. Block ids are consecutive, so ``seed`` is unused."""
    del seed
    speed: list[tuple[object, ...]] = []
    phases: list[tuple[object, ...]] = []
    for geometry, sizes in ((SMALL, [size for size in SIZES if size < 64 * KIB]), (LARGE, SIZES[2:])):
        async with open_source(source_address, devices) as source, open_session("pull", source, geometry) as session:
            for size in sizes:
                progress(f"pull {shown_size(size)}")
                one_speed, one_phases = await _measure(session, size, geometry.block_bytes, rounds)
                speed.append(one_speed)
                phases.append(one_phases)
    return (
        Table(
            title="one pull of consecutive blocks, with its fence",
            columns=(
                "size",
                "rounds",
                "p50 us",
                "p99 or max us",
                "floor us",
                "GB/s",
                "bare NIXL GB/s",
                "streams GB/s",
                "readv GB/s",
                "memcpy GB/s",
                "of bare",
                "of streams",
            ),
            rows=tuple(speed),
            notes=(
                "of bare: bare NIXL's time over ours, round by round; bare NIXL reads no fence.",
                "bare NIXL, floor: - where NIXL does not reach the other process; its own TCP is never used.",
                "streams: plain TCP, as many connections as the TCP plane has, with a thread for each on both sides.",
                "floor: bare NIXL reads the same and eight bytes more, on the thread that asks.",
                "streams, readv, memcpy: - unless both caches lie in host memory.",
                "readv: - if the two processes share no PID namespace; the kernel copies only within one.",
            ),
        ),
        Table(
            title="phases, median us",
            columns=("size", *PHASES, "total"),
            rows=tuple(phases),
        ),
    )


async def _measure(
    session: Session, size: int, block_bytes: int, rounds: int
) -> tuple[tuple[object, ...], tuple[object, ...]]:
    ids = np.arange(size // block_bytes)
    await session.paired(ids, ids)
    ours: list[float] = []
    bare: list[float | None] = []
    streams: list[float] = []
    readv: list[float | None] = []
    copied: list[float] = []  # and the three of them empty unless both caches lie in host memory
    floor: list[float] = []
    reports: list[TransferReport] = []
    until = time.perf_counter() + BUDGET_S
    while len(ours) < 5 or (len(ours) < rounds and time.perf_counter() < until):
        one, other, report = await session.paired(ids, ids)
        ours.append(one)
        bare.append(other)
        if session.bare is not None:
            floor.append(session.bare.read_fenced(session.bare.bind(ids, ids)))
        if session.streams is not None:
            streams.append(session.streams.read(size))
            readv.append(process_vm_readv(session.opened, session.cache, size))
            copied.append(memcpy(size))
        reports.append(report)
    summary = summarize(ours)
    rates = [_rate(size, samples) for samples in (ours, bare, streams, readv, copied)]
    found = [sample for sample in bare if sample is not None]
    medians = [summarize([report.timings_s[phase] for report in reports]).p50 * 1e6 for phase in (*PHASES, "total")]
    name = shown_size(size)
    return (
        (
            name,
            len(ours),
            summary.p50 * 1e6,
            tail(ours, 1e6),
            summarize(floor).p50 * 1e6 if floor else None,
            *rates,
            median_ratio(found, ours) if found else None,
            median_ratio(streams, ours) if streams else None,
        ),
        (name, *medians),
    )


def _rate(size: int, samples: Sequence[float | None]) -> float | None:
    """Return the median rate in 10**9 bytes per second, or None if that cannot be measured here."""
    seconds = [sample for sample in samples if sample is not None]
    return size / summarize(seconds).p50 / 1e9 if seconds else None
