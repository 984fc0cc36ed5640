"""What it costs to observe pulls: a hook, a log of JSON lines, both, and metrics over HTTP. ``hot_path`` measures it.

One process has a worker for each way, and a further one without anything: the control, whose distance from 1 is noise.
In every round each worker makes the same number of pulls from one source process, in an order that rotates. A ratio
compares the CPU time of one round with that of the worker without anything in the same round.
"""

import asyncio
import logging
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from kvflow import WorkerConfig, configure_logging, open_worker
from kvflow.events import Event
from kvflow.tools.bench import median_ratio
from kvflow.tools.doctor.probe import Geometry
from tests.benchmarks.hot_path import KIB, US, packed, show
from tests.benchmarks.hot_path_children import Child
from tests.benchmarks.hot_path_sides import PullReader, open_source

WAYS = ("nothing", "control", "hook", "JSON lines", "hook and JSON lines", "http")
LOGGED = {"JSON lines", "hook and JSON lines"}

RECORD_BYTES_MIN = 200
"""Of one pull: what the log must grow by."""


class Taken:
    """A hook that takes every event."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, event: Event) -> None:
        """Count one event."""
        del event
        self.count += 1


class Watched:
    """Workers of one process that are observed in different ways.

    Args:
        readers: by way.
        hooks: what has counted the events of each worker that has a hook.
        log: file of the JSON lines.
    """

    def __init__(self, readers: dict[str, PullReader], hooks: dict[str, Taken], log: Path) -> None:
        self._readers, self._hooks, self._log = readers, hooks, log

    async def round(self, seed: int, pulls: int, blocks: int) -> dict[str, float]:
        """Pull with every worker in turn; return the process time of one pull, by way.

        Raises:
            RuntimeError: a worker was not observed as it should be.
        """
        found = {}
        for way in WAYS[seed % len(WAYS) :] + WAYS[: seed % len(WAYS)]:
            _write_records(way in LOGGED)
            size, taken = self._log.stat().st_size, {name: hook.count for name, hook in self._hooks.items()}
            found[way] = await self._cpu_s(self._readers[way], seed, pulls, blocks)
            untold = [name for name, hook in self._hooks.items() if name == way and hook.count - taken[name] < pulls]
            if untold or (way in LOGGED and self._log.stat().st_size - size < RECORD_BYTES_MIN * pulls):
                raise RuntimeError(f"{way} was not told of each pull")
        return found

    async def _cpu_s(self, reader: PullReader, seed: int, pulls: int, blocks: int) -> float:
        """Pull one after the other; return the process time of one pull, with the writing of its record."""
        pairs = reader.pairs(seed, pulls, blocks)
        works = await reader.prepare(pairs)
        used = time.process_time()
        for work in works:
            await reader.read(work)
            await asyncio.sleep(0)  # the next turn of the loop reports the pull
        for handler in logging.getLogger("kvflow").handlers:
            handler.flush()  # writes the records that are kept for 20 ms
        used = time.process_time() - used
        reader.compare(pairs)
        return used / pulls


def _write_records(wanted: bool) -> None:
    """Write the records of all workers from now on, or only warnings."""
    logging.getLogger("kvflow").setLevel(logging.INFO if wanted else logging.WARNING)


@asynccontextmanager
async def open_watched(geometry: Geometry) -> AsyncIterator[Watched]:
    """Open a source process, and a worker for each way. All their caches have one geometry."""
    hooks = {way: Taken() for way in WAYS if "hook" in way}
    readers = {}
    with tempfile.TemporaryDirectory() as folder, Child(open_whole_source, geometry) as source:
        log = Path(folder) / "log.jsonl"
        configure_logging(log)
        async with AsyncExitStack() as stack:
            for way in WAYS:
                config = WorkerConfig(engine_id=way.replace(" ", "-"), http="127.0.0.1:0" if way == "http" else None)
                cache = geometry.build()
                opening = open_worker(config, cache, hooks=[hooks[way]] if way in hooks else [])
                worker = await stack.enter_async_context(opening)
                readers[way] = PullReader(geometry, geometry, source, cache, worker=worker, way="pull")
            yield Watched(readers, hooks, log)


def open_whole_source(geometry: Geometry) -> Any:
    """Open a source for workers."""
    return open_source(geometry, bare=False)


def costs(rounds: int, pulls: int) -> Iterator[tuple[str, str, float, float, float]]:
    """Yield size and way, microseconds of CPU of a pull that nobody observes and of one that is, and their ratio."""
    for block_kib, blocks in ((32, 2), (32, 32), (256, 64)):
        count = max(4, min(pulls, pulls * 16 // blocks))
        geometry = packed(count * blocks + 1, block_kib * KIB)
        found = defaultdict(list)
        with Child(open_watched, geometry) as watched:
            watched.ask("round", 0, count, blocks)
            for turn in range(1, rounds + 1):
                show(f"{block_kib * blocks} KiB, round {turn} of {rounds}")
                for way, cpu_s in watched.ask("round", turn, count, blocks).items():
                    found[way].append(cpu_s)
        size = f"{block_kib * blocks} KiB" if block_kib * blocks < 1024 else f"{block_kib * blocks // 1024} MiB"
        for way in WAYS[1:]:
            more = statistics.median(above - below for above, below in zip(found[way], found["nothing"], strict=True))
            cpu = statistics.median(found[way])
            yield size, way, (cpu - more) * US, cpu * US, median_ratio(found[way], found["nothing"])
