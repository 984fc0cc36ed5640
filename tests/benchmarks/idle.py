"""CPU of a worker with nothing to do: alone, and with 50 connected peers."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import numpy as np

from kvflow.config import WorkerConfig
from kvflow.tools.bench import Table, summarize
from kvflow.tools.bench.source import SourceProcess, open_source
from kvflow.tools.doctor.probe import BLOCK_SIZE, Geometry
from kvflow.worker.runtime import open_worker
from kvflow.worker.worker import Worker

PEERS = 50
WINDOW_S = 2.0
GEOMETRY = Geometry(layers=1, num_kv_heads=1, head_size=32, num_blocks=16, layout="BLHNC", kv="content")


async def run(rounds: int, seed: int, progress: Callable[[str], None]) -> tuple[Table, ...]:
    """Measure the CPU time of this process, which holds one worker, over ``rounds`` windows each."""
    del seed
    rows = []
    async with open_source() as source, AsyncExitStack() as stack:
        rows.append(("no worker", *await _windows("no worker", rounds, progress)))
        cache = GEOMETRY.build()
        worker = await stack.enter_async_context(open_worker(WorkerConfig(engine_id="idle"), cache))
        rows.append(("one worker", *await _windows("one worker", rounds, progress)))
        for index in range(PEERS):
            progress(f"meeting peer {index + 1} of {PEERS}")
            await _meet(worker, source, f"peer-{index}")
        rows.append((f"one worker, {PEERS} peers", *await _windows(f"{PEERS} peers", rounds, progress)))
    return (
        Table(
            title=f"CPU of an idle process, windows of {WINDOW_S:.0f} s",
            columns=("process", "p50 % of a core", "p90 % of a core"),
            rows=tuple(rows),
        ),
    )


async def _windows(name: str, rounds: int, progress: Callable[[str], None]) -> tuple[float, float]:
    shares = []
    for turn in range(rounds):
        progress(f"{name}, window {turn + 1} of {rounds}")
        started, used = time.perf_counter(), time.process_time()
        await asyncio.sleep(WINDOW_S)
        shares.append((time.process_time() - used) / (time.perf_counter() - started) * 100)
    summary = summarize(shares)
    return summary.p50, summary.p90


async def _meet(worker: Worker, source: SourceProcess, name: str) -> None:
    await source.open(name, GEOMETRY)
    ids = np.arange(1).tolist()
    (ticket,) = await source.offer(name, [ids], num_tokens=BLOCK_SIZE)
    await worker.pull(ticket, [ids])
