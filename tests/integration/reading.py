"""Whoever reads from engines that recycle: every read that is delivered is compared, word by word."""

import asyncio
import json
import os
import random
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path

import kvflow
from kvflow import errors
from kvflow.events import TransferRetried
from kvflow.worker.environment import PRODUCTION
from tests.world.words import Words, latest_request, origin

from .producing import configured
from .recycling import NUM_BLOCKS, PATHS, TARGET

TESTS = Path(__file__).parents[1]
AT_ONCE = 2
"""Reads at the same time on one path: enough to share batches, and few enough to end within their leases."""
SHOWN = 3


@dataclass
class Tally:
    """What became of reads.

    Attributes:
        chunks: of all delivered reads.
        delivered: reads that ended with a report.
        stale: reads that ended with ``StaleLease``.
        wrong: delivered reads with a wrong word.
        torn: those of them with right words, too.
        caught: stale reads after which the target held words of a later request: wrong, had they been delivered.
        retried: fences that found a lease not admitted yet.
        examples: the first wrong words.
    """

    chunks: int = 0
    delivered: int = 0
    stale: int = 0
    wrong: int = 0
    torn: int = 0
    caught: int = 0
    retried: int = 0
    examples: list = field(default_factory=list)

    @property
    def reads(self):
        return self.delivered + self.stale

    def add(self, other):
        """Count what another tally has counted."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def __str__(self):
        counts = ("reads", "delivered", "stale", "wrong", "torn", "caught", "retried")
        text = ", ".join(f"{getattr(self, name):,} {name}" for name in counts)
        return "; ".join([text, *self.examples])


class Recyclers:
    """The process of the engines that recycle."""

    def __init__(self, process, seed):
        self._process = process
        self.seed = seed
        self._turn = asyncio.Lock()

    async def offer(self, path, num_blocks):
        """Have one more request offered."""
        async with self._turn:
            self._process.stdin.write(json.dumps([path, num_blocks, self.seed]).encode() + b"\n")
            answer = await self._process.stdout.readline()
        assert answer, "the recycling process has ended"
        return json.loads(answer)


@asynccontextmanager
async def recyclers(seed):
    """Start them, and end them."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"{Path(__file__).parent.name}.recycling",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        limit=1 << 20,
    )
    try:
        yield Recyclers(process, seed)
    finally:
        process.stdin.close()
        await process.wait()


async def read(*, until, paths=tuple(PATHS), seed=0, environment=PRODUCTION):
    """Read on these paths, each with a worker of its own, several reads at once, until ``until(tallies)``.

    Returns a tally for each path.
    """
    tallies = {path: Tally() for path in paths}
    async with recyclers(seed) as source, asyncio.TaskGroup() as tasks:
        for path, tally in tallies.items():
            tasks.create_task(_read_on(path, tally, source, lambda: until(tallies), environment))
    return tallies


async def _read_on(path, tally, source, until, environment):
    """Read on one path."""
    cache = TARGET.build()

    def count_retries(event):
        tally.retried += isinstance(event, TransferRetried)

    config = configured("reader", copy_threads=2, **PATHS[path].target)
    async with kvflow.open_worker(config, cache, hooks=[count_retries], environment=environment) as worker:
        share = NUM_BLOCKS // AT_ONCE
        async with asyncio.TaskGroup() as tasks:
            for number in range(AT_ONCE):
                blocks = range(number * share, (number + 1) * share)
                reader = Reader(worker, Words(cache), blocks, random.Random(f"{path} {source.seed} {number}"), tally)
                tasks.create_task(reader.read(path, source, until))
        snapshot = worker.snapshot()
        assert (snapshot.pulls, snapshot.quarantined) == (0, ())


class Reader:
    """Reads one request after the other.

    Args:
        worker: that pulls.
        words: of its cache.
        blocks: where nobody else writes.
        rng: chooses among them.
        tally: to count in.
    """

    def __init__(self, worker, words, blocks, rng, tally):
        self._worker = worker
        self._words = words
        self._blocks = blocks
        self._rng = rng
        self._tally = tally

    async def read(self, path, source, until):
        """Read until it is enough. The first read, which dials, outlasts its lease: it counts for nothing."""
        await self._pull(await source.offer(path, 1), [[block] for block in self._blocks[:2]])
        while not until():
            num_blocks = self._rng.randint(1, PATHS[path].blocks_max)
            ids = self._rng.sample(self._blocks, 2 * num_blocks)
            targets = [ids[:num_blocks], ids[num_blocks:]]
            offer = await source.offer(path, num_blocks)
            report = await self._pull(offer, targets)
            self._count(report, offer["number"], targets)

    async def _pull(self, offer, targets):
        """Return what was delivered: a report, or None."""
        try:
            return await self._worker.pull(kvflow.Ticket.from_params(offer["params"]), targets)
        except errors.StaleLease as error:
            stale = error
        assert not stale.quarantined
        return None

    def _count(self, report, number, targets):
        tally = self._tally
        wrong = self._words.wrong(number, targets)
        if report is None:
            tally.stale += 1
            # Numbers grow: a later one is of whoever got the blocks, an earlier one was there before the read.
            tally.caught += latest_request(wrong) > number
            return
        tally.delivered += 1
        tally.chunks += report.reads
        if len(wrong):
            tally.wrong += 1
            tally.torn += len(wrong) < self._words.count(targets)
            if len(tally.examples) < SHOWN:
                tally.examples.append(f"request {number} got {origin(int(wrong[0]))}")
