"""The soak's end of the processes that it starts, closes, kills and starts again, and what is in them."""

import asyncio
import logging
import random
import time
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from tests.integration.recycling import NUM_BLOCKS, recycling

from .measuring import PLANES, one_arena, thread_pool
from .node import Node, NodeDied
from .reader import Lane, Station, Tally

NUMBERS = 1 << 18
"""Of one life of an engine: more than one uses."""
LIVES = 1 << 6
"""Whose numbers differ; words have 24 bits for them."""

BLOCKS_MAX = 3
"""Of each group of one offer."""
AT_ONCE_MAX = 16
"""Pulls of the reader in a process of its own."""
FRESH_S = 0.5
"""Offers that have lain about for longer are left to run out."""

_lives = count()


class AwayError(Exception):
    """Whoever was asked is being restarted."""


@contextmanager
def prepared(threads):
    """Prepare a process so that what it takes of memory and threads says something."""
    one_arena()
    logging.getLogger("kvflow").setLevel(logging.CRITICAL)  # leases run out and are revoked all the time
    asyncio.get_running_loop().set_default_executor(thread_pool(threads))
    yield


class Host:
    """A process that is started again when it was killed.

    Attributes:
        node: the process.
    """

    def __init__(self, name, threads):
        self._name = name
        self._threads = threads
        self.node = None

    async def start(self):
        self.node = await asyncio.to_thread(Node, self._name)
        await self.node.open(prepared, self._threads)

    async def restart(self):
        """End the process without a word, and start another one."""
        await asyncio.to_thread(self.node.end)
        await self.start()

    async def end(self):
        """End the process politely if it lives."""
        if self.node is not None:
            await asyncio.to_thread(self.node.go)


async def answered(asked):
    """Return an answer.

    Raises:
        AwayError: the process was killed before it has answered.
    """
    try:
        return await asked
    except NodeDied as died:
        if not died.node.killed:
            raise
        raise AwayError from None


class Beside:
    """A reader in a process of its own, which is killed now and then."""

    def __init__(self, station, seed):
        self._station = station
        self._tally = Tally()
        share = NUM_BLOCKS // AT_ONCE_MAX
        self._lanes = [
            Lane(station, range(n * share, (n + 1) * share), random.Random(f"{n} {seed}"), self._tally)
            for n in range(AT_ONCE_MAX)
        ]

    async def pull(self, offers):
        """Pull all at once; return how each ended, and the ledger."""
        ends = await asyncio.gather(*(lane.pull(*offer) for lane, offer in zip(self._lanes, offers, strict=False)))
        self._station.worker.check()
        return ends, self._tally.take()


@asynccontextmanager
async def reading_beside(seed, transport):
    """Open one."""
    station = Station("decode-1", transport, seeks=False)
    await station.open()
    try:
        yield Beside(station, seed)
    finally:
        await station.close()


class Offer(NamedTuple):
    """What an engine offers, and what was true when it was asked for."""

    number: int
    params: dict
    revoked: bool
    num_blocks: int
    asked_s: float
    lives: int


@dataclass
class Engine:
    """An engine that offers.

    Attributes:
        name: of the engine.
        path: what it is like.
        host: where it is.
        weight: how often it is asked, compared with others.
        certain: whether what nobody disturbs must be delivered: its leases do not run out on purpose.
        at_once: how many offers are asked for at a time, and pulled soon.
        transport: of its workers.
        endpoints: of its first life, and of all others.
        lives: grows by one when it goes, and by one when it is back.
        there: it, there.
    """

    name: str
    path: object
    host: Host
    weight: int
    certain: bool = False
    at_once: int = 1
    transport: str = "auto"
    endpoints: tuple = ()
    lives: int = 0
    there: object = None
    stock: deque = field(default_factory=deque)

    @property
    def is_open(self):
        return self.lives % 2 == 1

    async def open(self, seed):
        how = {"endpoints": self.endpoints, "first": 1 + (next(_lives) % LIVES) * NUMBERS, **PLANES[self.transport]}
        self.there = await self.host.node.open_another(recycling, self.name, self.path, seed, **how)
        self.endpoints = self.there.endpoint
        self.lives += 1

    async def close(self):
        self.lives += 1
        await answered(self.there.close())

    async def offer(self, rng):
        """Have one to three blocks of each group offered.

        Raises:
            AwayError: it is closed, or killed.
        """
        while self.stock:
            offer = self.stock.popleft()
            if offer.lives == self.lives and time.monotonic() - offer.asked_s < FRESH_S:
                return offer
        if not self.is_open:
            raise AwayError
        lives, asked_s = self.lives, time.monotonic()
        num_blocks = [rng.randint(1, BLOCKS_MAX) for _ in range(self.at_once)]
        answers = await answered(self.there.offer(*num_blocks))
        if not answers:
            raise AwayError
        offers = [
            Offer(**answer, num_blocks=number, asked_s=asked_s, lives=lives)
            for answer, number in zip(answers, num_blocks, strict=True)
        ]
        self.stock.extend(offers[1:])
        return offers[0]

    async def check(self):
        """Have the law of blocks checked; return how many blocks are not free."""
        return await answered(self.there.check())

    async def outcome(self, number):
        """Wait until the lease of an offer has ended; return how."""
        return await answered(self.there.outcome(number))
