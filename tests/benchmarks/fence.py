"""What the fence and the release of a pull cost: the same pulls with them and without, in turns.

``kvflow bench fence`` runs this, from a checkout only: a worker without a fence is no part of the package.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import cycle, permutations

import numpy as np
from msgspec import Struct

from kvflow.config import WorkerConfig
from kvflow.leases.tickets import Ticket
from kvflow.tools.bench import Table, median_ratio, summarize
from kvflow.tools.bench.source import open_source
from kvflow.tools.doctor.probe import BLOCK_SIZE, Geometry
from kvflow.worker.environment import PRODUCTION, Environment
from kvflow.worker.runtime import open_worker
from kvflow.worker.worker import Worker
from tests.benchmarks.fenceless import LeftOut, without_fence, without_release

GEOMETRY = Geometry(layers=4, num_kv_heads=2, head_size=128, num_blocks=1 << 10, layout="BLHNC", kv="content")
"""Blocks of 64 KiB; the pool is 64 MiB."""

SIZES = {"64 KiB": (1, 120), "1 MiB": (16, 80), "64 MiB": (1 << 10, 6)}
"""Name -> blocks of a pull, and pulls in a row. A release is sent 5 ms after its pull and delays later ones, so that a
row must take much longer."""

SETTLE_S = 0.02
"""Between two rows: what one worker still has to release must not delay the next one."""

PULLS_MAX = 6000
"""Of one size and worker: a source has leases for 16,384, and two of three workers give none back."""

BUDGET_S = 20.0
"""Time for the rounds of one size."""

WHOLE, FENCE_ONLY, WITHOUT = "fence and release", "fence", "neither"

US = 1e6

Offer = Callable[..., Awaitable[list[Ticket]]]
"""Has blocks offered: their ids, ``num_tokens``, and how often as ``count``."""


class Sample(Struct, frozen=True):
    """One pull: the seconds that the caller waited, and the CPU seconds of our process."""

    elapsed_s: float
    cpu_s: float


class Variant(Struct, frozen=True):
    """One way to pull.

    Attributes:
        environment: of the worker that pulls so.
        left_out: what this worker has not done.
    """

    environment: Environment
    left_out: LeftOut


def variants(base: Environment = PRODUCTION) -> dict[str, Variant]:
    """Return all ways to pull, by what they do after they have read."""
    counts = {name: LeftOut() for name in (WHOLE, FENCE_ONLY, WITHOUT)}
    silent = without_release(base, counts[FENCE_ONLY])
    bare = without_fence(without_release(base, counts[WITHOUT]), counts[WITHOUT])
    environment = {WHOLE: base, FENCE_ONLY: silent, WITHOUT: bare}
    return {name: Variant(environment[name], counts[name]) for name in counts}


@asynccontextmanager
async def open_variants(
    found: Mapping[str, Variant], geometry: Geometry = GEOMETRY
) -> AsyncIterator[dict[str, Worker]]:
    """Open a worker for each."""
    async with AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(
                open_worker(
                    WorkerConfig(engine_id=f"target {name}"),
                    geometry.build(),
                    environment=variant.environment,
                )
            )
            for name, variant in found.items()
        }


async def run(rounds: int, seed: int, progress: Callable[[str], None]) -> tuple[Table, ...]:
    """Measure every size, at most ``rounds`` rounds of each; ids are consecutive."""
    del seed
    rows: list[tuple[object, ...]] = []
    found = variants()
    pulls = 0
    async with open_source() as source:
        for name, (num_blocks, in_a_row) in SIZES.items():
            progress(f"fence, {name}")
            await source.open("fence", GEOMETRY)
            async with open_variants(found) as workers:
                samples = await measure(partial(source.offer, "fence"), workers, num_blocks, in_a_row, rounds)
            await source.close_caches()
            rows += [(name, kind, *_row(samples[kind], samples[WITHOUT])) for kind in (FENCE_ONLY, WHOLE)]
            pulls += len(samples[WITHOUT]) + in_a_row  # those in front that are not counted
    left_out = {name: (variant.left_out.fences, variant.left_out.releases) for name, variant in found.items()}
    assert left_out[WHOLE] == (0, 0), left_out
    assert left_out[FENCE_ONLY][0] == 0, left_out
    assert left_out[WITHOUT][0] == pulls, left_out
    assert min(left_out[FENCE_ONLY][1], left_out[WITHOUT][1]) > 0, left_out
    return (
        Table(
            title="one pull of consecutive blocks, beside the same pull with neither fence nor release",
            columns=("size", "with", "pulls", "p10 us", "neither", "p50 us", "neither", "added us", "ratio", "CPU us"),
            rows=tuple(rows),
            notes=(
                "added, ratio: medians of the differences and ratios pull by pull. CPU: likewise, of all our threads.",
                "p10 is less disturbed by what else runs. Pulls follow each other: a release can delay the next one.",
                "A release that is left out is made and dropped before its socket.",
            ),
        ),
    )


async def measure(
    offer: Offer, workers: Mapping[str, Worker], num_blocks: int, in_a_row: int, rounds: int
) -> dict[str, list[Sample]]:
    """Pull with every worker in turns, in changing order; return the samples of each."""
    ids = [np.arange(num_blocks).tolist()]
    offered = partial(offer, ids, num_tokens=num_blocks * BLOCK_SIZE, count=in_a_row)
    samples: dict[str, list[Sample]] = {name: [] for name in workers}
    for worker in workers.values():  # connections, plans and page tables are warm from here on
        await _pull(worker, await offered(), ids)
    until = time.perf_counter() + BUDGET_S
    orders = cycle(permutations(workers.items()))  # each is as often behind each other one
    for turn in range(min(rounds, PULLS_MAX // in_a_row)):
        if turn >= 5 and time.perf_counter() > until:
            break
        for name, worker in next(orders):
            tickets = await offered()
            await asyncio.sleep(SETTLE_S)
            samples[name] += await _pull(worker, tickets, ids)
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


def _row(ours: Sequence[Sample], without: Sequence[Sample]) -> tuple[object, ...]:
    elapsed, reference = [one.elapsed_s for one in ours], [one.elapsed_s for one in without]
    above, below = summarize(elapsed), summarize(reference)
    added = summarize([(one - other) * US for one, other in zip(elapsed, reference, strict=True)])
    cpu = summarize([(one.cpu_s - other.cpu_s) * US for one, other in zip(ours, without, strict=True)])
    quantiles = (above.p10 * US, below.p10 * US, above.p50 * US, below.p50 * US)
    return len(ours), *quantiles, added.p50, median_ratio(elapsed, reference), cpu.p50
