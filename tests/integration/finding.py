"""Readers that find what another process has by its content, read it, and compare every word."""

import asyncio
import json
import os
import random
import sys
from contextlib import asynccontextmanager

import kvflow
from kvflow import errors
from kvflow.worker.environment import PRODUCTION
from tests.world.words import Words, origin

from .producing import configured
from .reading import Tally
from .recycling import NUM_BLOCKS, TARGET


class Host:
    """The other process, after its first line; ``counted`` is what it says at its end."""

    def __init__(self, endpoint, process):
        self.endpoint, self._process = endpoint, process
        self._awaited = {}
        self.counted = {}

    def tell(self, number, *words):
        """Write a line to it about a number; return a future that is done once it prints that number."""
        self._process.stdin.write(json.dumps([number, *words]).encode() + b"\n")
        return self._awaited.setdefault(number, asyncio.get_running_loop().create_future())

    async def hear(self):
        """Take what it prints, up to its end."""
        while line := await self._process.stdout.readline():
            said = json.loads(line)
            if isinstance(said, dict):
                self.counted = said
            elif (awaited := self._awaited.pop(said, None)) is not None:
                awaited.set_result(None)


@asynccontextmanager
async def hosted(module, transport, *arguments, seed=0):
    """Start the process of a module of this folder, and end it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"tests.integration.{module}",
        transport,
        str(seed),
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    host = Host((await process.stdout.readline()).decode().strip(), process)
    hearing = asyncio.create_task(host.hear())
    try:
        assert host.endpoint, "the process has ended"
        yield host
    finally:
        process.stdin.close()
        await hearing
        assert await process.wait() == 0


class Finder:
    """Reads one thing after the other into blocks where nobody else writes.

    Args:
        worker: that reads.
        words: of its cache.
        blocks: as above.
        rng: of all that is random.
        tally: to count in.
    """

    def __init__(self, worker, words, blocks, rng, tally):
        self.worker, self.blocks, self.rng, self.tally = worker, blocks, rng, tally
        self._words = words

    async def read(self, host, enough):
        """Find and read until ``enough(tally)``."""
        raise NotImplementedError

    async def pull(self, number, ticket, targets, absent=0):
        """Read what was found, and compare; ``absent``: blocks of each group, the last ones, that are not read."""
        try:
            await self.worker.pull(ticket, [each + [-1] * absent for each in targets])
        except errors.StaleLease:
            self.tally.stale += 1
            return
        self.tally.delivered += 1
        if len(wrong := self._words.wrong(number, targets)):
            self.tally.wrong += 1
            self.tally.examples.append(f"request {number} got {origin(int(wrong[0]))}")


async def find_all(hosted, finder, at_once, enough, *, transport, environment=PRODUCTION, **settings):
    """Have so many readers of a kind read until ``enough(tally)``; return the tally, and what the host counted."""
    tally, cache = Tally(), TARGET.build()
    config = configured("reader", transport=transport, **settings)
    async with (
        hosted as host,
        kvflow.open_worker(config, cache, environment=environment) as worker,
        asyncio.TaskGroup() as tasks,
    ):
        share = NUM_BLOCKS // at_once
        for number in range(at_once):
            blocks = range(number * share, (number + 1) * share)
            reader = finder(worker, Words(cache), blocks, random.Random(f"{transport} {number}"), tally)
            tasks.create_task(reader.read(host, enough))
    return tally, host.counted
