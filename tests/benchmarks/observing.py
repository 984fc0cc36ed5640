# ruff: noqa: T201 - a benchmark prints its tables
"""What it costs to observe pulls: a hook, a log of JSON lines, both, and metrics over HTTP.

    python -m tests.benchmarks.observing [--rounds 60] [--pulls 40] [--json out/observing.json]

One process has a worker for each way, and a further one without anything: the control, whose distance from 1 is noise.
In every round each worker makes the same number of pulls from one source process, in an order that rotates. A ratio
compares the CPU time of one round with that of the worker without anything in the same round. Bytecodes and calls
of one steady pull, its record and its release, which no load changes, come from a second process that traces every
instruction.
"""

import argparse
import asyncio
import logging
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvflow import WorkerConfig, configure_logging, open_worker
from kvflow.config import SECRET_VARIABLE
from kvflow.events import Event
from kvflow.tools.bench import Result, Table, header, quantile
from kvflow.tools.doctor.probe import Geometry
from tests.benchmarks.hot_path import KIB, US, packed, show
from tests.benchmarks.hot_path_calls import Calls
from tests.benchmarks.hot_path_children import Child
from tests.benchmarks.hot_path_sides import PullReader, open_source

WAYS = ("nothing", "control", "hook", "JSON lines", "hook and JSON lines", "http")
LOGGED = {"JSON lines", "hook and JSON lines"}

GOAL = 1.05

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

    async def calls(self, seed: int, blocks: int) -> dict[str, tuple[int, int]]:
        """Count calls and bytecodes of one steady pull, its record and its release, by way."""
        found = {}
        for way, reader in self._readers.items():
            _write_records(way in LOGGED)
            _, counted = await reader.calls(seed, blocks)
            found[way] = counted.calls, counted.bytecodes
        return found


def _write_records(wanted: bool) -> None:
    """Write the records of all workers from now on, or only warnings."""
    logging.getLogger("kvflow").setLevel(logging.INFO if wanted else logging.WARNING)


@asynccontextmanager
async def open_watched(geometry: Geometry, *, traced: bool) -> AsyncIterator[Watched]:
    """Open a source process, and a worker for each way.

    Args:
        geometry: of all caches.
        traced: count calls on all threads.
    """
    if traced:
        Calls.watch_threads()
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


def costs(rounds: int, pulls: int) -> list[Table]:
    """Compare the CPU time of pulls of several sizes."""
    tables = []
    for block_kib, blocks in ((32, 2), (32, 32), (256, 64)):
        count = max(4, min(pulls, pulls * 16 // blocks))
        geometry = packed(count * blocks + 1, block_kib * KIB)
        found = defaultdict(list)
        with Child(open_watched_for_time, geometry) as watched:
            watched.ask("round", 0, count, blocks)
            for turn in range(1, rounds + 1):
                show(f"{block_kib * blocks} KiB, round {turn} of {rounds}")
                for way, cpu_s in watched.ask("round", turn, count, blocks).items():
                    found[way].append(cpu_s)
        rows = []
        for way in WAYS[1:]:
            pairs = [*zip(found[way], found["nothing"], strict=True)]
            ratios = sorted(above / below for above, below in pairs)
            more = statistics.median((above - below) * US for above, below in pairs)
            low, high = quantile(ratios, 0.25), quantile(ratios, 0.75)
            cpu_us = statistics.median(found[way]) * US
            rows.append((way, cpu_us, more, statistics.median(ratios), low, high, *_interval(ratios)))
        name = f"{block_kib * blocks} KiB" if block_kib * blocks < 1024 else f"{block_kib * blocks // 1024} MiB"
        tables.append(
            Table(
                title=f"CPU of the reader for one pull of {name}, {rounds} rounds of {count} pulls; "
                f"with nothing {statistics.median(found['nothing']) * US:.1f} us",
                columns=("way", "CPU us", "more us", "ratio p50", "p25", "p75", "95 % from", "to"),
                rows=tuple(rows),
                notes=(f"control: a worker with nothing, as the one below each ratio. The goal is at most {GOAL}.",),
            )
        )
    return tables


def open_watched_for_time(geometry: Geometry) -> Any:
    """Open workers whose time is taken."""
    return open_watched(geometry, traced=False)


def open_watched_for_calls(geometry: Geometry) -> Any:
    """Open workers whose calls are counted."""
    return open_watched(geometry, traced=True)


def _interval(ordered: list[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median of an ascending sequence."""
    reach = 0.98 * len(ordered) ** 0.5
    middle = (len(ordered) - 1) / 2
    return ordered[max(0, round(middle - reach))], ordered[min(len(ordered) - 1, round(middle + reach))]


def counts() -> Table:
    """Count what a steady pull executes."""
    with Child(open_watched_for_calls, packed(1 << 10, 32 * KIB)) as watched:
        found = [watched.ask("calls", turn, 2) for turn in range(3)]
    least = {way: min((each[way] for each in found), key=lambda each: each[1]) for way in WAYS}
    calls, bytecodes = least["nothing"]
    return Table(
        title="Python calls and bytecodes of one steady pull of 64 KiB, with its record and its release, all threads",
        columns=("way", "calls", "bytecodes", "more calls", "more bytecodes"),
        rows=tuple((way, *least[way], least[way][0] - calls, least[way][1] - bytecodes) for way in WAYS),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.observing", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="of each size (default: %(default)s)")
    parser.add_argument("--pulls", type=int, default=40, help="of each worker in a round (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the result into this file, too")
    options = parser.parse_args()
    os.environ.setdefault(SECRET_VARIABLE, secrets.token_hex(32))
    about = header()
    tables = (counts(), *costs(options.rounds, options.pulls))
    show("")
    result = Result(name="observing", header=about, tables=tables)
    print(result)
    if options.json:
        options.json.write_bytes(msgspec.json.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
