# ruff: noqa: T201 - a script prints what it finds
"""What do pulls cost that wait for an admission, and how late is one that is admitted?

Two workers in one process; so many tickets of one producer are pulled before their leases are admitted. When the pauses
between two looks are as long as they become, it measures the CPU time of the process, beside that of the same process
before, and the time from an admission to the delivery of its pull. At the end all are admitted at once. From the root
of the repository::

    python -m tests.benchmarks.early_waiting
    python -m tests.benchmarks.early_waiting --waiting 10000 --transport tcp
"""

import argparse
import asyncio
import gc
import random
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import kvflow
from kvflow.config import Tuning
from kvflow.tools.doctor.probe import Geometry

SECRET = "a secret of a benchmark, of one process"
SETTLED_S = 2.5  # when the pause has become 0.5 s
WINDOW_S = 8.0
SLOTS = 32768


@asynccontextmanager
async def workers(transport: str, waiting: int) -> AsyncIterator[tuple[kvflow.Worker, kvflow.Worker]]:
    tuning = Tuning(fence_s=900.0, wire_s=900.0, queue_s=900.0, lease_slots=SLOTS)
    how = {"cluster_secret": SECRET, "transport": transport, "tuning": tuning}
    geometry = Geometry(layers=1, num_kv_heads=1, head_size=32, num_blocks=waiting + 64, layout="BLHNC", kv="content")
    caches = geometry.build(), geometry.build()
    prefill, decode = (kvflow.WorkerConfig(engine_id=name, **how) for name in ("prefill-0", "decode-0"))
    async with kvflow.open_worker(prefill, caches[0]) as producer, kvflow.open_worker(decode, caches[1]) as consumer:
        await consumer.pull(producer.offer("warm", [[0]], num_tokens=16), [[0]])
        yield producer, consumer


async def share() -> float:
    """Return the share of a core that this process uses now."""
    started, used = time.perf_counter(), time.process_time()
    await asyncio.sleep(WINDOW_S)
    return (time.process_time() - used) / (time.perf_counter() - started)


async def measure(transport: str, waiting: int, samples: int) -> str:
    """Return a row of the table."""
    draw = random.Random(waiting)
    async with workers(transport, waiting) as (producer, consumer):
        base = kvflow.TicketMint("prefill-0", [producer.rank_address], cluster_secret=SECRET, lease_s=900.0)
        for slot in range(8):  # the slots of the producer's own offers
            base.offer(f"nobody's {slot}", block_ids=[[0]], num_tokens=16)
        idle = await share()

        def start(number: int) -> tuple[object, kvflow.PullHandle]:
            ticket, grant = base.offer(f"early {number}", block_ids=[[1]], num_tokens=16)
            return grant, consumer.start_pull(ticket, [[1 + number % waiting]])

        held = [start(number) for number in range(waiting)]
        await asyncio.sleep(SETTLED_S)
        gc.collect()
        busy = await share()
        delays = []
        for number in range(samples):
            await asyncio.sleep(SETTLED_S if waiting == 1 else draw.uniform(0.0, 0.5))
            at = draw.randrange(len(held))
            grant, handle = held[at]
            admitted = time.perf_counter()
            producer.admit(grant)
            await handle
            delays.append(time.perf_counter() - admitted)
            if waiting == 1:
                held = [start(number + 1)]
            else:
                held.pop(at)
        used, admitted = time.process_time(), time.perf_counter()
        for grant, _ in held:
            producer.admit(grant)
        await asyncio.gather(*[handle for _, handle in held])
        all_s, cpu_s = time.perf_counter() - admitted, time.process_time() - used
    return (
        f"| {transport} | {waiting} | {100 * (busy - idle):.2f} ({100 * idle:.2f} without) "
        f"| {1e3 * statistics.median(delays):.0f} | {1e3 * max(delays):.0f} "
        f"| {all_s:.2f} | {1e6 * cpu_s / len(held):.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.early_waiting")
    parser.add_argument("--waiting", type=int, nargs="*", default=[1, 100, 10_000], help="pulls that wait")
    parser.add_argument("--transport", default="nixl", help="as in WorkerConfig")
    parser.add_argument("--samples", type=int, default=15, help="admissions of one pull")
    chosen = parser.parse_args()
    print("| plane | waiting | % of a core | admission to delivery, ms, p50 | longest | all at once, s | of each, us |")
    print("|---|---|---|---|---|---|---|")
    for waiting in chosen.waiting:
        print(asyncio.run(measure(chosen.transport, waiting, chosen.samples)), flush=True)


if __name__ == "__main__":
    main()
