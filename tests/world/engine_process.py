"""Engines that offer and recycle for a soak, in a process of their own, told what to do by lines of JSON.

``open`` opens one, on the addresses of an earlier life if there are any, and is answered with its addresses. ``offer``
is answered with what a router carries, or with nothing if there is no such engine. ``check`` asserts the law of blocks
and says how many are not free. ``outcome`` waits for the end of a lease, and says how it ended. ``close`` closes an
engine in the middle of whatever its readers do. The end of the input ends the process.
"""

import asyncio
import json
import logging
import random
import sys
from contextlib import AsyncExitStack

import msgspec
import uvloop

import kvflow
from tests.integration.producing import configured
from tests.integration.recycling import NUM_BLOCKS, THREADS, Path, Recycler
from tests.world.words import Words

from .processes import PLANES, one_arena, thread_pool


class Life:
    """An engine, from its opening to its closing."""

    def __init__(self, recycler, workers, opened):
        self._recycler = recycler
        self._workers = workers
        self._opened = opened

    async def offer(self, num_blocks):
        """Offer once for each number of blocks."""
        return [await self._recycler.offer(number) for number in num_blocks]

    async def check(self):
        for worker in self._workers:
            worker.check()
        return NUM_BLOCKS - self._recycler.free()

    async def outcome(self, number):
        """Wait until the lease of an offer has ended, and say how."""
        return await self._workers[0].wait_offer(str(number))

    async def close(self):
        """Close the workers, which ends all leases, and then wait for those who follow them."""
        await self._opened.aclose()
        await self._recycler.__aexit__(None, None, None)


async def begin(name, path, endpoints, *, transport, first, seed):
    """Open an engine; return its life and its addresses."""
    path = msgspec.convert(path, Path)
    async with AsyncExitStack() as stack:
        workers, words = [], []
        for rank in range(path.ranks):
            cache = msgspec.structs.replace(path.source, tp_rank=rank, tp_size=path.ranks).build()
            more = {**PLANES[transport], **({"bind": endpoints[rank]} if endpoints else {})}
            config = configured(name, rank=rank, num_ranks=path.ranks, lease_s=path.lease_s, **more)
            workers.append(await stack.enter_async_context(kvflow.open_worker(config, cache)))
            words.append(Words(cache))
        recycler = Recycler(name, path, workers, words, random.Random(f"{name} {first} {seed}"), first=first)
        await recycler.__aenter__()
        return Life(recycler, workers, stack.pop_all()), [worker.endpoint for worker in workers]


async def main():
    one_arena()
    logging.getLogger("kvflow").setLevel(logging.CRITICAL)  # leases run out and are revoked all the time
    loop = asyncio.get_running_loop()
    loop.set_default_executor(thread_pool(THREADS))
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    lives = {}
    while line := await lines.readline():
        command = json.loads(line)
        op, name = command.pop("op"), command.pop("name", "")
        match op:
            case "open":
                lives[name], answer = await begin(name, **command)
            case "close":
                answer = await lives.pop(name).close()
            case "stop":
                break
            case _:
                answer = await getattr(lives[name], op)(**command) if name in lives else None
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for life in lives.values():
        await life.close()


if __name__ == "__main__":
    uvloop.run(main())
