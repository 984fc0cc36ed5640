"""What the fence and the release of a pull cost: the same pulls with them and without, in turns."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
from msgspec import Struct

from kvflow.bench.fenceless import open_fenceless
from kvflow.bench.geometry import BLOCK_SIZE, Geometry
from kvflow.bench.result import Table
from kvflow.bench.sourcing import SourceProcess, open_source
from kvflow.bench.stats import median_ratio, summarise
from kvflow.cache.tickets import Ticket
from kvflow.config import WorkerConfig
from kvflow.worker.runtime import open_worker
from kvflow.worker.surroundings import REAL, Surroundings
from kvflow.worker.worker import Worker

GEOMETRY = Geometry(layers=4, num_kv_heads=2, head_size=128, num_blocks=1 << 10, layout="BLHNC", kv="content")
"""Blocks of 64 KiB; the pool is 64 MiB."""

SIZES = {"64 KiB": (1, 8), "1 MiB": (16, 8), "64 MiB": (1 << 10, 2)}
"""Name -> blocks of a pull, and pulls in a row. The release of one pull can delay the next one, and never itself."""

BUDGET_S = 20.0
"""Time for the rounds of one size."""

US = 1e6


class Sample(Struct, frozen=True):
    """One pull: the seconds that the caller waited, and the CPU seconds of our process."""

    elapsed_s: float
    cpu_s: float


async def run(rounds: int, seed: int, progress: Callable[[str], None]) -> tuple[Table, ...]:
    """Measure every size, at most ``rounds`` rounds of each; ids are consecutive."""
    del seed
    rows: list[tuple[object, ...]] = []
    bare = Surroundings(open_transport=open_fenceless)
    async with (
        open_source() as source,
        _opened("with", REAL) as whole,
        _opened("fence only", REAL) as fenced,
        _opened("without", bare) as without,
    ):
        await source.open("fence", GEOMETRY)
        for worker in (fenced, without):
            _release_nothing(worker)
        for name, (num_blocks, in_a_row) in SIZES.items():
            progress(f"fence, {name}")
            ours, ours_fenced, theirs = await _measure(source, (whole, fenced, without), num_blocks, in_a_row, rounds)
            rows += [(name, *_row("fence", ours_fenced, theirs)), (name, *_row("fence and release", ours, theirs))]
    return (
        Table(
            title="one pull of consecutive blocks, beside the same pull without fence and release",
            columns=("size", "with", "pulls", "p10 us", "without", "p50 us", "without", "added us", "ratio", "CPU us"),
            rows=tuple(rows),
            notes=(
                "added, ratio: medians of the differences and ratios pull by pull. CPU: likewise, of all our threads.",
                "p10 is less disturbed by what else runs. Pulls follow each other: a release can delay the next one.",
            ),
        ),
    )


@asynccontextmanager
async def _opened(name: str, surroundings: Surroundings) -> AsyncIterator[Worker]:
    config = WorkerConfig(engine_id=f"target {name}", role="decode")
    async with open_worker(config, GEOMETRY.build(), surroundings=surroundings) as worker:
        yield worker


def _release_nothing(worker: Worker) -> None:
    """Have a worker keep its releases to itself. There is no setting for this, so it is done to its insides."""
    vars(worker._consumer)["_release"] = lambda members: None  # noqa: SLF001


async def _measure(
    source: SourceProcess, workers: Sequence[Worker], num_blocks: int, in_a_row: int, rounds: int
) -> list[list[Sample]]:
    """Pull with every worker in turns, in changing order; return the samples of each."""
    ids = [np.arange(num_blocks).tolist()]
    offer = partial(source.offer, "fence", ids, num_tokens=num_blocks * BLOCK_SIZE, count=in_a_row)
    samples: list[list[Sample]] = [[] for _ in workers]
    turns = [*enumerate(workers)]
    for worker in workers:  # connections, plans and page tables are warm from here on
        await _pull(worker, await offer(), ids)
    until = time.perf_counter() + BUDGET_S
    while len(samples[0]) < 5 * in_a_row or (len(samples[0]) < rounds * in_a_row and time.perf_counter() < until):
        turns.append(turns.pop(0))
        for number, worker in turns:
            samples[number] += await _pull(worker, await offer(), ids)
    return samples


async def _pull(worker: Worker, tickets: list[Ticket], ids: list[list[int]]) -> list[Sample]:
    """Pull one ticket after the other; return what each pull took."""
    samples = []
    for ticket in tickets:
        started, used = time.perf_counter(), time.process_time()
        await worker.pull(ticket, ids)
        elapsed, cpu = time.perf_counter() - started, time.process_time() - used
        samples.append(Sample(elapsed, cpu))
    return samples


def _row(name: str, ours: Sequence[Sample], without: Sequence[Sample]) -> tuple[object, ...]:
    elapsed, reference = [one.elapsed_s for one in ours], [one.elapsed_s for one in without]
    above, below = summarise(elapsed), summarise(reference)
    added = summarise([(one - other) * US for one, other in zip(elapsed, reference, strict=True)])
    cpu = summarise([(one.cpu_s - other.cpu_s) * US for one, other in zip(ours, without, strict=True)])
    quantiles = (above.p10 * US, below.p10 * US, above.p50 * US, below.p50 * US)
    return name, len(ours), *quantiles, added.p50, median_ratio(elapsed, reference), cpu.p50
