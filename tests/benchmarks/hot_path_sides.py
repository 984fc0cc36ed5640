"""Who takes part in ``hot_path``: a source process, and readers that each have one of their own.

A reader reads pairs of block ids with bare NIXL, or pulls them with kvflow. Whatever is read is compared with what the
source holds, after the time was taken.
"""

import asyncio
import os
import secrets
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from kvflow import Ticket, TicketMint, TransferReport, Worker, WorkerConfig, configure_logging, open_worker
from kvflow.config import SECRET_VARIABLE
from kvflow.memory.cache import KVCache
from kvflow.planning.pairs import Int64s
from kvflow.reads.nixl.binding import Agent, load_binding
from kvflow.reads.reach import host_facts
from kvflow.tools.bench.ceilings import BareNixl, Opened
from kvflow.tools.doctor.probe import BLOCK_SIZE, Geometry
from tests.benchmarks.hot_path_calls import Calls, count_calls
from tests.benchmarks.hot_path_children import Child
from tests.benchmarks.loop import lag_during

LEASES = 1 << 14
LEASE_S = 600.0
URGENT = -100
"""Priority of the urgent pull: no bulk pull waits long enough to overtake it."""

URGENT_MAX = 256
"""Urgent pulls beside one bulk pull."""

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
        source_cpu_s: process time of the source for one offer, its admission and its release.
    """

    wall_s: list[float]
    cpu_s: float
    source_cpu_s: float = 0.0


# --- the source ---


class Source:
    """A cache that is offered by a worker, or registered with a bare agent."""

    def __init__(self, cache: KVCache, worker: Worker | None, opened: Opened) -> None:
        self._cache, self._worker, self._opened = cache, worker, opened
        self._offered_s = self._mark_s = 0.0

    async def opened(self) -> Opened:
        """Return what a bare reader needs."""
        return self._opened

    async def offer(self, lists: list[list[int]]) -> list[dict[str, Any]]:
        """Offer blocks."""
        assert self._worker is not None
        names = [secrets.token_hex(8) for _ in lists]
        started = time.process_time()
        tickets = [
            self._worker.offer(name, [ids], len(ids) * BLOCK_SIZE) for name, ids in zip(names, lists, strict=True)
        ]
        self._offered_s = time.process_time() - started
        return [ticket.to_params() for ticket in tickets]

    async def mark(self) -> None:
        """Note the process time from here on."""
        self._mark_s = time.process_time()

    async def offer_late(self, lists: list[list[int]], late_s: float) -> list[dict[str, Any]]:
        """Sign tickets in another mint's name, and admit each so late."""
        assert self._worker is not None
        mint = TicketMint(
            "source", [self._worker.rank_address], cluster_secret=os.environ[SECRET_VARIABLE], lease_s=LEASE_S
        )
        minted = [mint.offer(secrets.token_hex(8), block_ids=[ids], num_tokens=len(ids) * BLOCK_SIZE) for ids in lists]
        for _, grant in minted:
            asyncio.get_running_loop().call_later(late_s, self._worker.admit, grant)
        return [ticket.to_params() for ticket, _ in minted]

    async def settle(self) -> float:
        """Wait until all leases have ended; return the process time of the last offers and since the last mark."""
        assert self._worker is not None
        await asyncio.sleep(0.1)
        while self._worker.snapshot().leases:  # noqa: ASYNC110  # an event of each lease would cost time
            await asyncio.sleep(0.1)
        return self._offered_s + time.process_time() - self._mark_s


@asynccontextmanager
async def open_source(geometry: Geometry, *, bare: bool) -> AsyncIterator[Source]:
    """Open a cache whose every eight bytes hold their own number."""
    cache = geometry.build()
    number_words(cache)
    manifest = cache.manifest()
    encoded = msgspec.msgpack.encode(manifest)
    if bare:
        agent = Agent(load_binding(), f"bare-{secrets.token_hex(8)}", progress=True)
        agent.register(manifest.regions)
        yield Source(cache, None, Opened(host_facts(), encoded, "", agent.metadata(), ""))
        agent.destroy()
        return
    config = WorkerConfig.read({"engine_id": "source", "lease_s": LEASE_S, "lease_slots": LEASES})
    async with open_worker(config, cache) as worker:
        yield Source(cache, worker, Opened(host_facts(), encoded, "", b"", ""))


def number_words(cache: KVCache) -> None:
    """Write its own number into every eight bytes of a cache."""
    words = cache.backing.view(torch.int64)
    torch.arange(len(words), out=words)


# --- readers ---


class Reader:
    """What all readers have: block ids, clocks and the comparison of bytes."""

    def __init__(self, geometry: Geometry, source_geometry: Geometry, source: Child, cache: KVCache) -> None:
        self._geometry, self._source_geometry = geometry, source_geometry
        self._source = source
        self._cache = cache
        self._expected: KVCache | None = None
        self._parts = [
            (layer.name, part.role)
            for group in cache.manifest().groups
            for layer in group.layers
            for part in layer.components
        ]

    async def prepare(self, pairs: Pairs) -> list[Any]:
        """Return what ``read`` takes, for each pair; not measured."""
        raise NotImplementedError

    async def read(self, work: Any) -> Any:
        """Read once."""
        raise NotImplementedError

    async def read_all(self, work: Sequence[Any]) -> None:
        """Read all that is given, all of it in flight at once."""
        raise NotImplementedError

    async def one_by_one(self, seed: int, count: int, blocks: int, pause_s: float = 0.0) -> Sample:
        """Read so many times, one after the other."""
        pairs = self.pairs(seed, count, blocks)
        works = await self.prepare(pairs)
        walls: list[float] = []
        used = time.process_time()
        for work in works:
            started = time.perf_counter()
            await self.read(work)
            walls.append(time.perf_counter() - started)
            if pause_s:
                await asyncio.sleep(pause_s)
        used = time.process_time() - used
        self.compare(pairs)
        return Sample(walls, used / count)

    async def at_once(self, seed: int, count: int, blocks: int, *, scattered: bool = True, repeat: int = 1) -> Sample:
        """Have so many reads in flight."""
        walls: list[float] = []
        cpu_s = source_s = 0.0
        for turn in range(repeat):
            pairs = self.pairs(seed * repeat + turn, count, blocks, scattered=scattered)
            works = await self.prepare(pairs)
            await asyncio.to_thread(self._source.ask, "mark")
            used, started = time.process_time(), time.perf_counter()
            await self.read_all(works)
            walls.append(time.perf_counter() - started)
            cpu_s += time.process_time() - used
            source_s += await self.settle()
            self.compare(pairs)
        reads = count * repeat
        return Sample(walls, cpu_s / reads, source_s / reads)

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
        for at in range(0, len(source_ids), COMPARED_AT_ONCE):
            part = slice(at, at + COMPARED_AT_ONCE)
            if self._geometry.layout.startswith("B"):
                self._compare_rows(source_ids[part], target_ids[part])
            else:
                self._compare_layers(torch.as_tensor(source_ids[part]), torch.as_tensor(target_ids[part]))

    def _compare_rows(self, source_ids: Int64s, target_ids: Int64s) -> None:
        rows = self._cache.backing.numpy().view(np.int64).reshape(self._geometry.num_blocks, -1)
        words = rows.shape[1]
        if not np.array_equal(rows[target_ids], source_ids[:, None] * words + np.arange(words)):
            raise ValueError("other bytes than the source holds were read")
        rows[target_ids] = 0

    def _compare_layers(self, source_ids: torch.Tensor, target_ids: torch.Tensor) -> None:
        if self._expected is None:
            self._expected = self._source_geometry.build()
            number_words(self._expected)
        for layer, role in self._parts:
            found = self._cache.component(layer, role).view(torch.int16)
            expected = self._expected.component(layer, role).view(torch.int16)
            if not torch.equal(found[target_ids], expected[source_ids]):
                raise ValueError(f"other bytes than the source holds were read into {layer} {role}")
            found[target_ids] = 0


class BareReader(Reader):
    """Reads with bare NIXL: one by one with a fence's read and a thread hop, all at once without them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._bare = BareNixl(self._source.ask("opened"), self._cache)
        self._hop = Hop()

    async def prepare(self, pairs: Pairs) -> list[Any]:
        return [self._bare.bind(*pair) for pair in pairs]

    async def read(self, work: Any) -> None:
        await self._hop(partial(self._read_and_look, work))

    async def read_all(self, work: Sequence[Any]) -> None:
        for bound in work:
            self._bare.read(bound)

    def _read_and_look(self, bound: Any) -> None:
        self._bare.read(bound)
        self._bare.read_word()

    def close(self) -> None:
        """End the thread, and the agent."""
        self._hop.close()
        self._bare.close()


class PullReader(Reader):
    """Pulls with a worker.

    Args:
        way: the worker's method that ``read_all`` uses: ``pull``, ``start_pull`` or ``pull_many``.
    """

    def __init__(self, *arguments: Any, worker: Worker, way: str) -> None:
        super().__init__(*arguments)
        self._worker = worker
        self._pull = worker.pull
        self._many = worker.pull_many if way == "pull_many" else partial(_each, getattr(worker, way))
        self._by_handles = way != "pull"

    async def prepare(self, pairs: Pairs) -> list[Any]:
        return await self._tickets("offer", pairs)

    async def _tickets(self, kind: str, pairs: Pairs, *arguments: Any) -> list[Any]:
        lists = [source_ids.tolist() for source_ids, _ in pairs]
        params = await asyncio.to_thread(self._source.ask, kind, lists, *arguments)
        return [
            (Ticket.from_params(each), [target_ids.tolist()])
            for each, (_, target_ids) in zip(params, pairs, strict=True)
        ]

    async def read(self, work: Any) -> TransferReport:
        return await self._pull(*work)

    async def read_all(self, work: Sequence[Any]) -> None:
        if not self._by_handles:
            await asyncio.gather(*self._many(work))
            return
        for handle in self._many(work):  # gather would make a task of each
            await handle

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

    async def urgent(self, seed: int, blocks: int, pause_s: float) -> dict[str, Any]:
        """Pull much at once alone, and with one urgent pull of a block after the other beside it, in either order."""
        sources, targets = (ids[0] for ids in zip(*self.pairs(seed, 1, blocks + URGENT_MAX), strict=True))
        bulk = [(sources[:blocks], targets[:blocks])]
        small = [(sources[at : at + 1], targets[at : at + 1]) for at in range(blocks, blocks + URGENT_MAX)]
        seconds, latest = {}, {}
        for beside in (False, True)[:: 1 if seed % 2 else -1]:
            (work,) = await self.prepare(bulk)
            urgent = await self.prepare(small if beside else [])
            task = asyncio.ensure_future(self._timed(work))
            latencies = [await self._urgent_pull(each, pause_s) for each in urgent if not task.done()]
            seconds[beside] = await task
            self.compare([*bulk, *small[: len(latencies)]])
            latest[beside] = latencies
            for ticket, _ in urgent[len(latencies) :]:
                await self._worker.release(ticket)
        return {"urgent": latest[True], "alone_s": seconds[False], "beside_s": seconds[True]}

    async def _timed(self, work: Any) -> float:
        started = time.perf_counter()
        await self.read(work)
        return time.perf_counter() - started

    async def _urgent_pull(self, work: Any, pause_s: float) -> float:
        await asyncio.sleep(pause_s)
        started = time.perf_counter()
        await self._worker.pull(*work, priority=URGENT)
        return time.perf_counter() - started

    async def late(self, seed: int, count: int, blocks: int, late_s: float) -> dict[str, Any]:
        """Pull tickets that are admitted late; return the bytes that were read in vain, and how long after it ended."""
        pairs = self.pairs(seed, count, blocks)
        started = time.perf_counter()
        works = await self._tickets("offer_late", pairs, late_s)
        reports = await asyncio.gather(*(self.read(work) for work in works))
        after_s = time.perf_counter() - started - late_s
        self.compare(pairs)
        return {
            "nbytes": sum(report.nbytes for report in reports),
            "in_vain": sum(report.early_bytes for report in reports),
            "after_s": after_s,
        }

    async def calls_of_many(self, seed: int, count: int, blocks: int) -> Calls:
        """Count calls of so many pulls at once, until the last of them returns."""
        before, pairs = self.pairs(2 * seed, count, blocks), self.pairs(2 * seed + 1, count, blocks)
        await self.read_all(await self.prepare(before))
        self.compare(before)
        works = await self.prepare(pairs)
        with count_calls() as calls:
            await self.read_all(works)
        self.compare(pairs)
        return calls

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


class Hop:
    """A thread that works when an eventfd wakes it, and wakes the event loop by another: no hand-over takes less."""

    def __init__(self) -> None:
        self._there, self._back = os.eventfd(0), os.eventfd(0, os.EFD_NONBLOCK)
        self._work: Callable[[], object] | None = None
        self._done: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._back, self._returned)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    async def __call__(self, work: Callable[[], object]) -> None:
        self._work, self._done = work, self._loop.create_future()
        os.eventfd_write(self._there, 1)
        await self._done

    def _run(self) -> None:
        while os.eventfd_read(self._there) and self._work is not None:
            self._work()
            os.eventfd_write(self._back, 1)

    def _returned(self) -> None:
        os.eventfd_read(self._back)
        assert self._done is not None
        self._done.set_result(None)

    def close(self) -> None:
        """End the thread."""
        self._work = None
        os.eventfd_write(self._there, 1)
        self._thread.join()
        self._loop.remove_reader(self._back)


@asynccontextmanager
async def open_reader(kind: str, geometry: Geometry, source_geometry: Geometry) -> AsyncIterator[Reader]:
    """Open a reader and its source.

    Args:
        kind: ``bare``, or a method of the worker. ``pull, logged`` writes a log; ``pull, traced`` can count calls.
        geometry: of the reader's cache.
        source_geometry: of the source's.
    """
    cache = geometry.build()
    way, _, extra = kind.partition(", ")
    if extra == "traced":
        Calls.watch_threads()
    with (
        Child(partial(open_source, bare=way == "bare"), source_geometry) as source,
        tempfile.TemporaryDirectory() as at,
    ):
        if way == "bare":
            bare = BareReader(geometry, source_geometry, source, cache)
            yield bare
            bare.close()
            return
        if extra == "logged":
            configure_logging(Path(at) / "log.jsonl")
        async with open_worker(WorkerConfig(engine_id="target"), cache) as worker:
            yield PullReader(geometry, source_geometry, source, cache, worker=worker, way=way)
