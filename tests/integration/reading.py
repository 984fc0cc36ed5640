"""Readers of engines that take their blocks back: every read that is delivered is compared, word by word."""

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

import kvflow
from kvflow import errors
from kvflow.events import TransferRetried
from kvflow.worker.environment import PRODUCTION
from tests.world.ledger import Ledger
from tests.world.node import hosted
from tests.world.words import Words, latest_request

from .producing import configured
from .recycling import NUM_BLOCKS, PATHS, TARGET, recycling, threads_to_recycle

AT_ONCE = 2
"""Reads at the same time on one path: enough to share batches, and few enough to end within their leases."""


@dataclass
class Tally(Ledger):
    """What became of reads from engines that take their blocks back.

    Attributes:
        chunks: of all delivered reads.
        misread: delivered reads with a wrong word.
        torn: those of them with right words, too.
        caught: stale reads after which the target held words of a later request: wrong, had they been delivered.
        retried: fences that found a lease not admitted yet.
    """

    chunks: int = 0
    misread: int = 0
    torn: int = 0
    caught: int = 0
    retried: int = 0

    @property
    def delivered(self):
        return self.ends["completed"]

    @property
    def stale(self):
        return self.ends["stale_lease"]

    @property
    def reads(self):
        return self.delivered + self.stale

    def __str__(self):
        counts = ("reads", "delivered", "stale", "misread", "torn", "caught", "retried")
        text = ", ".join(f"{getattr(self, name):,} {name}" for name in counts)
        return "; ".join([text, *self.examples])


class Reader:
    """Reads one thing after the other into blocks where nobody else writes.

    Args:
        worker: that pulls.
        words: of its cache.
        blocks: as above.
        rng: of all that is random.
        tally: to count in.
    """

    def __init__(self, worker, words, blocks, rng, tally):
        self.worker, self.blocks, self.rng, self.tally = worker, blocks, rng, tally
        self._words = words

    async def read(self, source, enough):
        """Have something offered, or find it, and read it, until ``enough(tally)``."""
        raise NotImplementedError

    async def pull(self, number, ticket, targets, absent=0):
        """Read, and compare; ``absent``: blocks of each group, the last ones, that are not read."""
        tally = self.tally
        try:
            report = await self.worker.pull(ticket, [each + [-1] * absent for each in targets])
        except errors.StaleLease as stale:
            report, quarantined = None, stale.quarantined
        if report is None:
            assert not quarantined
            tally.ends["stale_lease"] += 1
            # Numbers grow: a later one is of whoever got the blocks, an earlier one was there before the read.
            tally.caught += latest_request(self._words.wrong(number, targets)) > number
            return
        tally.ends["completed"] += 1
        tally.chunks += report.reads
        wrong = tally.compare("wrong", self._words, number, targets)
        if len(wrong):
            tally.misread += 1
            tally.torn += len(wrong) < self._words.count(targets)


async def read_all(source, reader, at_once, enough, *, environment=PRODUCTION, name="", tally=None, **settings):
    """Have so many readers of a class read from a source until ``enough(tally)``; return the tally."""
    tally, cache = tally or Tally(), TARGET.build()

    def count_retries(event):
        tally.retried += isinstance(event, TransferRetried)

    async with kvflow.open_worker(
        configured("reader", **settings), cache, hooks=[count_retries], environment=environment
    ) as worker:
        async with asyncio.TaskGroup() as tasks:
            share = NUM_BLOCKS // at_once
            for number in range(at_once):
                blocks = range(number * share, (number + 1) * share)
                one = reader(worker, Words(cache), blocks, random.Random(f"{name} {number}"), tally)
                tasks.create_task(one.read(source, enough))
        snapshot = worker.snapshot()
        assert (snapshot.pulls, snapshot.quarantined) == (0, ())
    return tally


class Recycled(Reader):
    """Reads what an engine of ``recycling`` offers, on one path."""

    def __init__(self, *given, blocks_max):
        super().__init__(*given)
        self._blocks_max = blocks_max

    async def read(self, source, enough):
        """Read until it is enough. The first read, which dials, outlasts its lease: it counts for nothing."""
        (offer,) = await source.offer(1)
        with suppress(errors.StaleLease):
            await self.worker.pull(kvflow.Ticket.from_params(offer["params"]), [[block] for block in self.blocks[:2]])
        while not enough(self.tally):
            num_blocks = self.rng.randint(1, self._blocks_max)
            ids = self.rng.sample(self.blocks, 2 * num_blocks)
            (offer,) = await source.offer(num_blocks)
            ticket = kvflow.Ticket.from_params(offer["params"])
            await self.pull(offer["number"], ticket, [ids[:num_blocks], ids[num_blocks:]])


async def read(*, until, paths=tuple(PATHS), seed=0, environment=PRODUCTION, longer=1):
    """Read on these paths, each with a worker of its own, several reads at once, until ``until(tallies)``.

    Returns a tally for each path. Leases last ``longer`` times what the path says.
    """
    tallies = {path: Tally() for path in paths}
    async with hosted(threads_to_recycle) as node, asyncio.TaskGroup() as tasks:
        for path, tally in tallies.items():
            lasting = msgspec.structs.replace(PATHS[path], lease_s=longer * PATHS[path].lease_s)
            source = await node.open_another(recycling, path, lasting, seed)
            reader = partial(Recycled, blocks_max=PATHS[path].blocks_max)
            how = {"name": f"{path} {seed}", "tally": tally, "copy_threads": 2, **PATHS[path].target}
            enough = lambda _tally: until(tallies)  # noqa: E731
            tasks.create_task(read_all(source, reader, AT_ONCE, enough, environment=environment, **how))
    return tallies
