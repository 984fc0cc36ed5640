"""Who takes part in ``hot_path``: a process of readers that take turns, and the process of their source.

A reader reads pairs of block ids with bare NIXL, or pulls them with kvflow. Whatever is read is compared with what the
source holds, after the time was taken.
"""

import asyncio
import os
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import msgspec
import numpy as np
import torch

from kvflow import Ticket, TicketMint, TransferReport, Worker, WorkerConfig, open_worker
from kvflow.config import SECRET_VARIABLE
from kvflow.ids import Int64s
from kvflow.memory.cache import KVCache
from kvflow.reads.nixl.binding import Agent, load_binding
from kvflow.reads.reach import host_facts
from kvflow.report import PHASES
from kvflow.tools.bench.ceilings import BareNixl, Opened
from kvflow.tools.doctor.probe import BLOCK_SIZE, Geometry
from tests.benchmarks.hot_path_calls import Calls, count_calls
from tests.benchmarks.hot_path_children import Child
from tests.benchmarks.loop import lag_during

LEASES = 1 << 14
LEASE_S = 600.0
URGENT = -100
"""Priority of the urgent pull: no bulk pull waits long enough to overtake it."""

URGENT_MAX = 64
"""Urgent pulls beside one bulk pull."""

PEERS = 100

WINDOW_S = 2.0
"""In which the CPU time of pulls that wait is taken."""

KEPT = 16
"""Every so many reports are kept: all of them would fill the caches of the pulls that follow."""

STEADY = 50
"""Pulls in a row, of which the last one is counted."""

COMPARED_AT_ONCE = 1 << 10
"""Blocks."""

Pairs = list[tuple[Int64s, Int64s]]
"""Of each read: the source's block ids, and ours."""


@dataclass(frozen=True)
class Sample:
    """What some reads took.

    Attributes:
        wall_s: of each, or of all together where they were in flight at once.
        cpu_s: process time of the reader, all threads, for one read.
        phases_s: medians of what the reports say; empty if there are none.
        source_cpu_s: process time of the source for one offer, its admission and its release.
        on_thread: how many of them the read thread has made.
    """

    wall_s: list[float]
    cpu_s: float
    source_cpu_s: float = 0.0
    on_thread: int = 0
    phases_s: Mapping[str, float] = field(default_factory=dict)


# --- the source ---


class Source:
    """A cache that workers offer, and that may be registered with a bare agent beside them."""

    def __init__(self, workers: Sequence[Worker], opened: Opened) -> None:
        self._workers, self._opened = workers, opened
        self._offered_s = self._mark_s = 0.0

    async def opened(self) -> Opened:
        """Return what a bare reader needs."""
        return self._opened

    async def offer(self, lists: list[list[int]], peers: int = 1) -> list[dict[str, Any]]:
        """Offer blocks, by so many workers in turn."""
        works = zip([secrets.token_hex(8) for _ in lists], lists, cycle(self._workers[:peers]), strict=False)
        started = time.process_time()
        tickets = [worker.offer(name, [ids], len(ids) * BLOCK_SIZE) for name, ids, worker in works]
        self._offered_s = time.process_time() - started
        return [ticket.to_params() for ticket in tickets]

    async def mark(self) -> None:
        """Note the process time from here on."""
        self._mark_s = time.process_time()

    async def offer_late(self, lists: list[list[int]], late_s: float) -> list[dict[str, Any]]:
        """Sign tickets in another mint's name, and admit each so late."""
        worker = self._workers[0]
        mint = TicketMint(
            "source-0", [worker.rank_address], cluster_secret=os.environ[SECRET_VARIABLE], lease_s=LEASE_S
        )
        minted = [mint.offer(secrets.token_hex(8), block_ids=[ids], num_tokens=len(ids) * BLOCK_SIZE) for ids in lists]
        for _, grant in minted:
            asyncio.get_running_loop().call_later(late_s, worker.admit, grant)
        return [ticket.to_params() for ticket, _ in minted]

    async def settle(self) -> float:
        """Wait until all leases have ended; return the process time of the last offers and since the last mark."""
        await asyncio.sleep(0.1)
        while any(worker.snapshot().leases for worker in self._workers):  # noqa: ASYNC110  # an event of each lease would cost time
            await asyncio.sleep(0.1)
        return self._offered_s + time.process_time() - self._mark_s


@asynccontextmanager
async def open_source(geometry: Geometry, *, bare: bool, peers: int = 1) -> AsyncIterator[Source]:
    """Open a cache whose every eight bytes hold their own number, with so many workers, and for bare NIXL if asked."""
    cache = geometry.build()
    words = cache.backing.view(torch.int64)
    torch.arange(len(words), out=words)
    manifest = cache.manifest()
    encoded = msgspec.msgpack.encode(manifest)
    async with AsyncExitStack() as stack:
        metadata = b""
        if bare:
            agent = Agent(load_binding(), f"bare-{secrets.token_hex(8)}", progress=True)
            stack.callback(agent.destroy)
            agent.register(manifest.regions)
            metadata = agent.metadata()
        settings = {"lease_s": LEASE_S, "lease_slots": LEASES}
        configs = [WorkerConfig.read({"engine_id": f"source-{number}", **settings}) for number in range(peers)]
        workers = [await stack.enter_async_context(open_worker(config, cache)) for config in configs]
        yield Source(workers, Opened(host_facts(), encoded, "", metadata, ""))


# --- readers ---


class Reader:
    """What all readers have: block ids, clocks and the comparison of bytes. A block of their cache is one row."""

    def __init__(self, geometry: Geometry, source_geometry: Geometry, source: Child, cache: KVCache) -> None:
        self._geometry, self._source_geometry = geometry, source_geometry
        self._source = source
        self._cache = cache

    async def prepare(self, pairs: Pairs) -> list[Any]:
        """Return what ``read`` takes, for each pair; not measured."""
        raise NotImplementedError

    async def read(self, work: Any) -> Any:
        """Read once."""
        raise NotImplementedError

    async def read_all(self, work: Sequence[Any]) -> Sequence[Any]:
        """Read all that is given, all of it in flight at once; return the reports, if there are any."""
        raise NotImplementedError

    async def one_by_one(self, seed: int, count: int, blocks: int, pause_s: float = 0.0) -> Sample:
        """Read so many times, one after the other."""
        pairs = self.pairs(seed, count, blocks)
        works = await self.prepare(pairs)
        walls: list[float] = []
        before = self.on_thread()
        reports = []
        used = time.process_time()
        for number, work in enumerate(works):
            started = time.perf_counter()
            report = await self.read(work)
            walls.append(time.perf_counter() - started)
            if number % KEPT == 0:
                reports.append(report)
            if pause_s:
                await asyncio.sleep(pause_s)
        used = time.process_time() - used
        self.compare(pairs)
        return Sample(walls, used / count, on_thread=self.on_thread() - before, phases_s=phases_of(reports))

    async def at_once(self, seed: int, count: int, blocks: int, *, scattered: bool = True, repeat: int = 1) -> Sample:
        """Have so many reads in flight."""
        walls: list[float] = []
        before = self.on_thread()
        cpu_s = source_s = 0.0
        for turn in range(repeat):
            pairs = self.pairs(seed * repeat + turn, count, blocks, scattered=scattered)
            works = await self.prepare(pairs)
            await asyncio.to_thread(self._source.ask, "mark")
            used, started = time.process_time(), time.perf_counter()
            reports = await self.read_all(works)
            walls.append(time.perf_counter() - started)
            cpu_s += time.process_time() - used
            source_s += await self.settle()
            self.compare(pairs)
        reads = count * repeat
        return Sample(walls, cpu_s / reads, source_s / reads, self.on_thread() - before, phases_of(reports))

    def on_thread(self) -> int:
        """Return how many pulls the read thread has made since the start."""
        return 0

    async def settle(self) -> float:
        """Wait until the source holds no lease; return its process time for what was read."""
        return 0.0

    def pairs(self, seed: int, count: int, blocks: int, *, scattered: bool = True) -> Pairs:
        """Draw block ids: at random, or all in order. No block of ours is read into twice; block 0 is left out."""
        first, numbers = 1, np.random.default_rng(seed)
        ours, theirs = self._geometry.num_blocks - first, self._source_geometry.num_blocks - first
        assert count * blocks <= ours, "too few blocks"
        targets = numbers.permutation(ours)[: count * blocks] if scattered else np.arange(count * blocks)
        sources = [
            numbers.choice(theirs, blocks, replace=False) if scattered else np.arange(blocks) for _ in range(count)
        ]
        return list(zip([ids + first for ids in sources], (targets + first).reshape(count, blocks), strict=True))

    def compare(self, pairs: Pairs) -> None:
        """Compare what was read with what the source holds, and clear it.

        Raises:
            ValueError: other bytes were read.
        """
        source_ids, target_ids = (np.concatenate(ids) for ids in zip(*pairs, strict=True))
        rows = self._cache.backing.numpy().view(np.int64).reshape(self._geometry.num_blocks, -1)
        words = rows.shape[1]
        for at in range(0, len(source_ids), COMPARED_AT_ONCE):
            theirs, ours = source_ids[at : at + COMPARED_AT_ONCE], target_ids[at : at + COMPARED_AT_ONCE]
            if not np.array_equal(rows[ours], theirs[:, None] * words + np.arange(words)):
                raise ValueError("other bytes than the source holds were read")
            rows[ours] = 0


def phases_of(reports: Sequence[Any]) -> dict[str, float]:
    """Return the median of each phase of pulls; nothing of other reads."""
    timings = [report.timings_s for report in reports if isinstance(report, TransferReport)]
    return {phase: statistics.median(each[phase] for each in timings) for phase in PHASES} if timings else {}


class BareReader(Reader):
    """Reads with bare NIXL on the calling thread: one by one with a fence's read, all at once without it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._bare = BareNixl(self._source.ask("opened"), self._cache)

    async def prepare(self, pairs: Pairs) -> list[Any]:
        return [self._bare.bind(*pair) for pair in pairs]

    async def read(self, work: Any) -> None:
        self._bare.read_fenced(work)

    async def read_all(self, work: Sequence[Any]) -> Sequence[Any]:
        for bound in work:
            self._bare.read(bound)
        return ()

    def close(self) -> None:
        """End the agent."""
        self._bare.close()


class PullReader(Reader):
    """Pulls with a worker.

    Args:
        way: the worker's method that ``read_all`` uses: ``pull``, ``start_pull`` or ``pull_many``.
        read_before: have the worker read and verify tickets before the time is taken.
    """

    def __init__(self, *arguments: Any, worker: Worker, way: str, read_before: bool = False) -> None:
        super().__init__(*arguments)
        self._worker = worker
        self._pull = worker.pull
        self._many = worker.pull_many if way == "pull_many" else partial(_each, getattr(worker, way))
        self._by_handles = way != "pull"
        self._read_ticket: Callable[[Any], Ticket] = Ticket.from_params
        if read_before:
            self._read_ticket = worker.read_ticket  # type: ignore[attr-defined]

    async def prepare(self, pairs: Pairs) -> list[Any]:
        return await self._tickets("offer", pairs)

    async def _tickets(self, kind: str, pairs: Pairs, *arguments: Any) -> list[Any]:
        lists = [source_ids.tolist() for source_ids, _ in pairs]
        params = await asyncio.to_thread(self._source.ask, kind, lists, *arguments)
        return [
            (self._read_ticket(each), [target_ids.tolist()])
            for each, (_, target_ids) in zip(params, pairs, strict=True)
        ]

    async def read(self, work: Any) -> TransferReport:
        return await self._pull(*work)

    async def read_all(self, work: Sequence[Any]) -> Sequence[Any]:
        if not self._by_handles:
            return await asyncio.gather(*self._many(work))
        return [await handle for handle in self._many(work)]  # gather would make a task of each

    def on_thread(self) -> int:
        return self._worker.snapshot(limit=0).posted_on_thread

    async def settle(self) -> float:
        used: float = await asyncio.to_thread(self._source.ask, "settle")
        return used

    async def lag(self, seed: int, blocks: int) -> dict[str, Any]:
        """Pull once, and note the lag of the event loop meanwhile, and as long without a pull."""
        pairs = self.pairs(seed, 1, blocks)
        (work,) = await self.prepare(pairs)
        busy: list[float] = []
        idle: list[float] = []
        started = time.perf_counter()
        await lag_during(self.read(work), busy)
        wall_s = time.perf_counter() - started
        await lag_during(asyncio.sleep(wall_s), idle)
        self.compare(pairs)
        return {"busy": busy, "idle": idle, "wall_s": wall_s}

    async def urgent(self, seed: int, blocks: int, pause_s: float, wanted: int) -> dict[str, Any]:
        """Pull much at once alone, and with an urgent pull of a block now and then beside it, in turns.

        This goes on until as many urgent pulls as wanted were made.
        """
        sources, targets = (ids[0] for ids in zip(*self.pairs(seed, 1, blocks + URGENT_MAX), strict=True))
        bulk = [(sources[:blocks], targets[:blocks])]
        small = [(sources[at : at + 1], targets[at : at + 1]) for at in range(blocks, blocks + URGENT_MAX)]
        seconds: dict[bool, list[float]] = {False: [], True: []}
        latencies: list[float] = []
        made = 0
        while len(latencies) < wanted:
            for beside in (False, True)[:: 1 if (seed + len(seconds[True])) % 2 else -1]:
                (work,) = await self.prepare(bulk)
                urgent = await self.prepare(small if beside else [])
                task = asyncio.ensure_future(self._timed(work))
                found = [await self._urgent_pull(each, pause_s) for each in urgent if not task.done()]
                seconds[beside].append(await task)
                latencies += found
                made = max(made, len(found))
                for ticket, _ in urgent[len(found) :]:
                    await self._worker.release(ticket)
        self.compare([*bulk, *small[:made]])
        return {"urgent": latencies, "alone_s": seconds[False], "beside_s": seconds[True]}

    async def _timed(self, work: Any) -> float:
        started = time.perf_counter()
        await self.read(work)
        return time.perf_counter() - started

    async def _urgent_pull(self, work: Any, pause_s: float) -> float:
        await asyncio.sleep(pause_s)
        started = time.perf_counter()
        await self._worker.pull(*work, priority=URGENT)
        return time.perf_counter() - started

    async def waiting(self, seed: int, count: int, late_s: float) -> dict[str, float]:
        """Return the share of a core that pulls take which wait for their admission, and that of none."""
        pairs = self.pairs(seed, count, 1)
        none = await self._share_of_core()
        works = await self._tickets("offer_late", pairs, late_s)
        handles = [self._worker.start_pull(*work) for work in works]
        while await self._share_of_core(0.25) > 0.5:  # until each has been read early once, and waits
            pass
        share = await self._share_of_core()
        if any(handle.done() for handle in handles):
            raise ValueError("pulls were admitted while the time was taken")
        for handle in handles:
            await handle
        self.compare(pairs)
        await self.settle()
        return {"none": none, "waiting": share}

    @staticmethod
    async def _share_of_core(window_s: float = WINDOW_S) -> float:
        used, since = time.process_time(), time.perf_counter()
        await asyncio.sleep(window_s)
        return (time.process_time() - used) / (time.perf_counter() - since)

    async def of_peers(self, seed: int, count: int) -> dict[int, float]:
        """Pull a block each from one peer, and from all, in turns; return the process time of a pull, by peers."""
        found = {}
        for peers in (1, PEERS)[:: 1 if seed % 2 else -1]:
            pairs = self.pairs(seed, count, 1)
            works = await self._tickets("offer", pairs, peers)
            used = time.process_time()
            await self.read_all(works)
            found[peers] = (time.process_time() - used) / count
            await self.settle()
            self.compare(pairs)
        return found

    async def calls(self, seed: int, blocks: int) -> tuple[Calls, Calls]:
        """Pull in a row, and count calls until the last pull returns; of another row also its release, by itself."""
        counted = []
        for settle_s in (0.0, 0.05):
            pairs = self.pairs(seed, STEADY, blocks)
            *before, last = await self.prepare(pairs)
            for work in before:
                await self.read(work)
            await asyncio.sleep(2 * settle_s)  # the releases of those before are sent
            with count_calls() as calls:
                await self.read(last)
                if settle_s:
                    await asyncio.sleep(settle_s)
            self.compare(pairs)
            counted.append(calls)
        return counted[0], counted[1]


def _each(pull: Callable[..., Any], works: Sequence[Any]) -> list[Any]:
    return [pull(*work) for work in works]


class Together:
    """Readers of one process and one source, which take turns."""

    def __init__(self, readers: Mapping[str, Reader]) -> None:
        self._readers = readers

    async def each(self, operation: str, seed: int, *arguments: Any, only: Sequence[str] = (), **named: Any) -> Any:
        """Ask every reader for one measurement, in an order that rotates with ``seed``; return what each has found."""
        names = [name for name in self._readers if not only or name in only]
        turned = names[seed % len(names) :] + names[: seed % len(names)]
        return {name: await getattr(self._readers[name], operation)(seed, *arguments, **named) for name in turned}


@asynccontextmanager
async def open_readers(
    kinds: Sequence[str], geometry: Geometry, source_geometry: Geometry, peers: int = 1
) -> AsyncIterator[Together]:
    """Open readers, with one cache, and a source process with as many workers as there are peers.

    Args:
        kinds: ``bare``, or a method of the worker; after a comma ``traced`` (its calls can be counted), ``read before``
            (tickets are verified before the time is taken) or a number of ``copy_threads``.
        geometry: of the readers' cache.
        source_geometry: of the source's.
    """
    cache = geometry.build()
    if any(kind.endswith("traced") for kind in kinds):
        Calls.watch_threads()
    opens = partial(open_source, bare="bare" in kinds, peers=peers)
    readers: dict[str, Reader] = {}
    with Child(opens, source_geometry) as source:
        async with AsyncExitStack() as stack:
            for kind in kinds:
                way, _, extra = kind.partition(", ")
                if way == "bare":
                    bare = readers[kind] = BareReader(geometry, source_geometry, source, cache)
                    stack.callback(bare.close)
                    continue
                words = {"engine_id": kind.replace(", ", "-").replace(" ", "-")}
                words["copy_threads"] = int(extra) if extra.isdecimal() else 2
                worker = await stack.enter_async_context(open_worker(WorkerConfig.read(words), cache))
                before = extra == "read before"
                readers[kind] = PullReader(
                    geometry, source_geometry, source, cache, worker=worker, way=way, read_before=before
                )
            yield Together(readers)
