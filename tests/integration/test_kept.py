"""Conversations that an engine keeps, and reuses as fast as it can, while another process finds and fetches them.

``KVFLOW_TEST_READS`` says how many fetches; ``make test-fence`` makes a hundred thousand over each data plane.
"""

import asyncio
import json
import os
import random
import sys
from contextlib import asynccontextmanager

import pytest

import kvflow
from kvflow import errors
from kvflow.worker.environment import PRODUCTION
from tests.benchmarks.fenceless import without_fence

from .keeping import BLOCKS_MAX, CONVERSATIONS
from .producing import configured
from .reading import Tally
from .recycling import NUM_BLOCKS, TARGET
from .words import Words, digests_of, origin

FETCHES = int(os.environ.get("KVFLOW_TEST_READS", "1500"))
READERS = 4
PAUSE_S = 0.003
"""After an answer that nothing is kept: a member may ask 2,000 times a second."""
FEW = 3
"""Wrong fetches that show that the fence is needed."""
ENOUGH = 30_000
"""Fetches after which a run without the fence must have shown them."""

pytestmark = [pytest.mark.nixl, pytest.mark.processes, pytest.mark.timeout(1800), pytest.mark.usefixtures("few_words")]


class Keeping:
    """The process that keeps; ``counted`` is what it says at its end."""

    def __init__(self, endpoint):
        self.endpoint = endpoint
        self.counted = {}


@asynccontextmanager
async def keeping(transport, seed=0):
    """Start the process, and end it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.keeping",
        transport,
        str(seed),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        found = Keeping((await process.stdout.readline()).decode().strip())
        assert found.endpoint, "the process has ended"
        yield found
    finally:
        process.stdin.close()
        last = await process.stdout.read()
        assert await process.wait() == 0
    found.counted = json.loads(last)


async def fetch_all(transport, enough, environment=PRODUCTION):
    """Fetch until ``enough(tally)``; return the tally, and what the process has counted."""
    tally, cache = Tally(), TARGET.build()
    async with (
        keeping(transport) as source,
        kvflow.open_worker(configured("reader", transport=transport), cache, environment=environment) as worker,
        asyncio.TaskGroup() as tasks,
    ):
        share = NUM_BLOCKS // READERS
        for number in range(READERS):
            blocks = range(number * share, (number + 1) * share)
            reader = Fetcher(worker, Words(cache), blocks, random.Random(f"{transport} {number}"), tally)
            tasks.create_task(reader.fetch(source.endpoint, enough))
    return tally, source.counted


class Fetcher:
    """Finds one conversation after the other, fetches what is there, and compares every word."""

    def __init__(self, worker, words, blocks, rng, tally):
        self._worker, self._words, self._blocks = worker, words, blocks
        self._rng, self._tally = rng, tally

    async def fetch(self, endpoint, enough):
        while not enough(self._tally):
            conversation = self._rng.randrange(CONVERSATIONS)
            digests = digests_of(conversation, self._rng.randint(1, BLOCKS_MAX))
            ticket, count = await self._worker.find(endpoint, digests)
            if ticket is None:
                await asyncio.sleep(PAUSE_S)
                continue
            assert 0 < count <= len(digests)
            held = len(ticket.grants[0].block_ids[0])
            ids = self._rng.sample(self._blocks, 2 * count)
            targets = [ids[:count], ids[count:]]
            try:
                await self._worker.pull(ticket, [each + [-1] * (held - count) for each in targets])
            except errors.StaleLease:
                self._tally.stale += 1
                continue
            self._tally.delivered += 1
            if len(wrong := self._words.wrong(conversation, targets)):
                self._tally.wrong += 1
                self._tally.examples.append(f"conversation {conversation} got {origin(int(wrong[0]))}")


@pytest.mark.parametrize("transport", ["nixl", "tcp"])
async def test_what_is_fetched_is_right_or_stale(transport, capsys):
    tally, counted = await fetch_all(transport, lambda tally: tally.reads >= FETCHES)
    with capsys.disabled():
        sys.stdout.write(f"\n{transport}: {tally}; {counted}")
    assert tally.wrong == 0, tally.examples
    assert min(tally.delivered, tally.stale, counted["recycled"], counted["not_held"]) > 0
    assert counted["found"] >= tally.reads


async def test_without_the_fence_wrong_bytes_are_fetched(capsys):
    tally, counted = await fetch_all(
        "nixl", lambda tally: tally.wrong >= FEW or tally.reads >= ENOUGH, environment=without_fence()
    )
    with capsys.disabled():
        sys.stdout.write(f"\nwithout the fence: {tally}; {counted}")
    assert tally.wrong >= FEW
