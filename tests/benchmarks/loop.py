"""Lag of the event loop while 1 GiB moves, and while nothing does."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import numpy as np

from kvflow.tools.bench import Table, summarize
from kvflow.tools.bench.pull import Session, open_session
from kvflow.tools.bench.source import open_source
from kvflow.tools.doctor.probe import Geometry

TICK_S = 0.001
GIB = 1 << 30
GEOMETRY = Geometry(layers=4, num_kv_heads=8, head_size=128, num_blocks=1 << 12, layout="BLHNC", kv="content")
"""Blocks of 256 KiB; the pool is 1 GiB."""


async def run(rounds: int, seed: int, progress: Callable[[str], None]) -> tuple[Table, ...]:
    """Measure lag idle and busy, in turns; blocks in random order, so that descriptors do not merge."""
    rng = np.random.default_rng(seed)
    idle: list[float] = []
    busy: list[float] = []
    rates: list[float] = []
    async with open_source() as source, open_session("loop", source, GEOMETRY) as session:
        for turn in range(rounds):
            progress(f"1 GiB, round {turn + 1} of {rounds}")
            elapsed = await _pull_all(session, rng, busy)
            rates.append(GIB / elapsed / 1e9)
            await lag_during(asyncio.sleep(elapsed), idle)
    rows = tuple(
        (name, summary.count, summary.p50 * 1e3, summary.p99 * 1e3, max(samples) * 1e3)
        for name, samples in (("idle", idle), ("while 1 GiB moves", busy))
        for summary in (summarize(samples),)
    )
    return (
        Table(
            title=f"lateness of a task that sleeps 1 ms; the pull ran at {summarize(rates).p50:.1f} GB/s",
            columns=("loop", "samples", "p50 ms", "p99 ms", "max ms"),
            rows=rows,
        ),
    )


async def _pull_all(session: Session, rng: np.random.Generator, lags: list[float]) -> float:
    source_ids, target_ids = rng.permutation(GEOMETRY.num_blocks), rng.permutation(GEOMETRY.num_blocks)
    (ticket,) = await session.offer(source_ids)
    started = time.perf_counter()
    await lag_during(session.pull(ticket, target_ids), lags)
    return time.perf_counter() - started


async def lag_during(work: Awaitable[object], lags: list[float]) -> None:
    """Await ``work`` while a second task notes how late each of its sleeps ends."""
    ended = asyncio.Event()

    async def tick() -> None:
        while not ended.is_set():
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            lags.append(max(0.0, time.perf_counter() - due))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(tick())
        try:
            await work
        finally:
            ended.set()
