"""``python -m tests.docs.failing``: write the logs of a cluster in which a request fails, and another one is slow.

Real workers, in three processes: a prefill worker whose process is killed while it is read, another one whose cache has
another layout than the reader's, and the decode worker, which is this process.
"""

import asyncio
import json
import logging
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import kvflow
from kvflow import models
from tests.helpers.settings import flat_config
from tests.helpers.waiting import until
from tests.stopping import stop_process

SECRET = "a long random string, the same on every worker"
MODEL = "llama-3.1-8b"
BLOCKS = [list(range(16))]
NUM_TOKENS = 256
PATIENCE_S = 100


def config(engine_id, **settings):
    """Return the settings of a worker that is read over TCP, for which the producer's process must run."""
    return flat_config(engine_id=engine_id, cluster_secret=SECRET, transport="tcp", model=MODEL, **settings)


def allocate(layout):
    """Allocate a cache of the model."""
    return kvflow.allocate(models.load(MODEL), num_blocks=16, layout=layout)


def configure_logging(name):
    """Log into a file, with each read and block of a transfer."""
    kvflow.configure_logging(Path(f"{name}.jsonl"))
    logging.getLogger("kvflow.transfer").setLevel(logging.DEBUG)


async def prefill(name, layout):
    """Be a prefill worker: print a ticket for each request that is named on standard input."""
    configure_logging(name)
    async with kvflow.open_worker(config(name, lease_s=600.0), allocate(layout)) as worker:
        while request := (await asyncio.to_thread(sys.stdin.readline)).strip():
            sys.stdout.write(json.dumps(worker.offer(request, BLOCKS, NUM_TOKENS).to_params()) + "\n")
            sys.stdout.flush()


class Prefill:
    """A prefill worker in a process of its own."""

    def __init__(self, process):
        self.process = process

    def offer(self, request):
        """Return what a router brings to the decode worker."""
        self.process.stdin.write(f"{request}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@contextmanager
def prefilling(name, layout):
    """Start a prefill worker, and end it."""
    command = [sys.executable, "-m", "tests.docs.failing", name, layout]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Prefill(process)
        finally:
            process.stdin.close()
            process.wait(PATIENCE_S)


async def decode():
    """Pull from both prefill workers."""
    configure_logging("decode-0")
    with prefilling("prefill-0", "BLHNC") as good, prefilling("prefill-1", "LBNHC") as other:
        opening = kvflow.open_worker(config("decode-0", staging_bytes=0), allocate("BLHNC"))
        async with asyncio.timeout(PATIENCE_S), opening as worker:
            for connected, prefill_worker in enumerate((good, other), 1):  # one after the other, as clocks differ
                ticket = kvflow.Ticket.from_params(prefill_worker.offer(f"chat-{connected}"))
                worker.hold(ticket)  # links
                await until(lambda: len(worker.snapshot().producers) == connected)  # noqa: B023
                await until(lambda: {each.state for each in worker.snapshot().producers} <= {"linked", "connected"})
                await worker.pull(ticket, BLOCKS)
            await lose(worker, good.process, kvflow.Ticket.from_params(good.offer("chat-3")))


async def lose(worker, process, ticket):
    """Kill the process of a prefill worker while it is read."""
    stop_process(process.pid)  # it answers nothing from now on
    pull = worker.start_pull(ticket, BLOCKS)
    await until(lambda: any(each.phase == "wire" for each in worker.snapshot().open_pulls))
    process.kill()
    try:
        await pull
    except kvflow.errors.PeerLost:
        return
    raise AssertionError("the pull succeeded")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asyncio.run(prefill(*sys.argv[1:]) if sys.argv[1:] else decode())
