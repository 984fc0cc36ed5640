"""Prompts that an engine computes, preempts and writes over as fast as it can, while another process follows them.

``KVFLOW_TEST_READS`` says how many offers; ``make test-fence`` makes a hundred thousand over each data plane.
"""

import asyncio
import json
import os
import random
import sys
from contextlib import asynccontextmanager
from itertools import count

import pytest

import kvflow
from kvflow import errors

from .opening import BLOCKS_MAX, WINDOW_BLOCKS
from .producing import configured
from .reading import Tally
from .recycling import NUM_BLOCKS, TARGET
from .words import Words, digests_of, origin

OFFERS = int(os.environ.get("KVFLOW_TEST_READS", "1500"))
READERS = 6
WAIT_S = 0.2
"""For an offer: one that is preempted before it is found is found never."""
FEW = 3
"""Wrong reads that show that blocks must be written before they settle."""
ENOUGH = 30_000
"""Reads after which a run with early settlements must have shown them."""

pytestmark = [pytest.mark.nixl, pytest.mark.processes, pytest.mark.timeout(3600), pytest.mark.usefixtures("few_words")]


class Opening:
    """The process that computes; ``counted`` is what it says at its end."""

    def __init__(self, endpoint, process):
        self.endpoint, self._process = endpoint, process
        self.counted = {}

    def compute(self, number, num_blocks):
        """Have it offer one more prompt, and compute it."""
        self._process.stdin.write(json.dumps([number, num_blocks]).encode() + b"\n")


@asynccontextmanager
async def opening(transport, how, seed=0):
    """Start the process, and end it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.opening",
        transport,
        str(seed),
        how,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        found = Opening((await process.stdout.readline()).decode().strip(), process)
        assert found.endpoint, "the process has ended"
        yield found
    finally:
        process.stdin.close()
        last = await process.stdout.read()
        assert await process.wait() == 0
    found.counted = json.loads(last)


async def follow_all(transport, enough, how="right"):
    """Follow prompts until ``enough(tally)``; return the tally, and what the process has counted."""
    tally, cache, numbers = Tally(), TARGET.build(), count(1)
    settings = {"transport": transport, "follow_bytes_min": 1}
    async with (
        opening(transport, how) as source,
        kvflow.open_worker(configured("reader", **settings), cache) as worker,
        asyncio.TaskGroup() as tasks,
    ):
        share = NUM_BLOCKS // READERS
        for number in range(READERS):
            blocks = range(number * share, (number + 1) * share)
            reader = Follower(worker, Words(cache), blocks, random.Random(f"{transport} {number}"), tally)
            tasks.create_task(reader.follow(source, numbers, enough))
    return tally, source.counted


class Follower:
    """Has one prompt after the other computed, finds and follows it, and compares every word."""

    def __init__(self, worker, words, blocks, rng, tally):
        self._worker, self._words, self._blocks = worker, words, blocks
        self._rng, self._tally = rng, tally

    async def follow(self, source, numbers, enough):
        while not enough(self._tally):
            number, num_blocks = next(numbers), self._rng.randint(1, BLOCKS_MAX)
            source.compute(number, num_blocks)
            digests = digests_of(number, num_blocks)
            ticket, _ = await self._worker.find(source.endpoint, digests, WAIT_S, at_least=num_blocks)
            if ticket is None:
                self._tally.stale += 1
                continue
            ids = self._rng.sample(self._blocks, num_blocks + WINDOW_BLOCKS)
            targets = [ids[:num_blocks], ids[num_blocks:]]
            try:
                await self._worker.pull(ticket, targets)
            except errors.StaleLease:
                self._tally.stale += 1
                continue
            self._tally.delivered += 1
            if len(wrong := self._words.wrong(number, targets)):
                self._tally.wrong += 1
                self._tally.examples.append(f"prompt {number} got {origin(int(wrong[0]))}")


@pytest.mark.parametrize("transport", ["nixl", "tcp"])
async def test_what_is_followed_is_right_or_stale(transport, capsys):
    tally, counted = await follow_all(transport, lambda tally: tally.reads >= OFFERS)
    with capsys.disabled():
        sys.stdout.write(f"\n{transport}: {tally}; {counted}")
    assert tally.wrong == 0, tally.examples
    assert min(tally.delivered, tally.stale, counted["preempted"], counted["sealed"]) > 0
    assert counted["found"] >= tally.delivered


@pytest.mark.parametrize("transport", ["nixl", "tcp"])
async def test_what_settles_before_it_is_written_is_read_wrong(transport, capsys):
    tally, counted = await follow_all(transport, lambda tally: tally.wrong >= FEW or tally.reads >= ENOUGH, how="early")
    with capsys.disabled():
        sys.stdout.write(f"\nsettled early, {transport}: {tally}; {counted}")
    assert tally.wrong >= FEW
