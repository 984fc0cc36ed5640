"""The soak's end of the processes that it starts, closes, kills and starts again."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import msgspec

from tests.integration.elsewhere import Child

NUMBERS = 1 << 18
"""Of one life of an engine: more than one uses."""
LIVES = 1 << 6
"""Whose numbers differ; words have 24 bits for them."""

BLOCKS_MAX = 3
"""Of each group of one offer."""
FRESH_S = 0.5
"""Offers that have lain about for longer are left to run out."""

_lives = count()


class AwayError(Exception):
    """Whoever was asked is being restarted."""


class Host:
    """A process that is started again when it was killed.

    Attributes:
        child: the process.
    """

    def __init__(self, module):
        self._module = module
        self._killed = 0
        self.child = None

    @property
    def pid(self):
        return self.child.process.pid

    async def start(self):
        self.child = await asyncio.to_thread(Child, self._module)

    async def ask(self, op, **fields):
        """Ask for one answer.

        Raises:
            AwayError: the process was killed before it has answered.
        """
        child = self.child
        try:
            return await child.ask(op, **fields)
        except (AssertionError, BrokenPipeError, ValueError):  # the end of its output, or ours of its input
            if child.process.pid != self._killed:
                raise
            raise AwayError from None

    async def restart(self):
        """End the process without a word, and start another one."""
        self._killed = self.pid
        await asyncio.to_thread(self.child.kill)
        await self.end()
        await self.start()

    async def end(self):
        """End the process politely if it lives, and close its pipes."""
        await asyncio.to_thread(self.child.go)


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
    stock: deque = field(default_factory=deque)

    @property
    def is_open(self):
        return self.lives % 2 == 1

    async def open(self, seed):
        path, first = msgspec.to_builtins(self.path), 1 + (next(_lives) % LIVES) * NUMBERS
        how = {"path": path, "endpoints": self.endpoints, "transport": self.transport}
        self.endpoints = await self._ask("open", **how, first=first, seed=seed)
        self.lives += 1

    async def close(self):
        self.lives += 1
        await self._ask("close")

    async def offer(self, rng):
        """Have one to three blocks of each group offered.

        Raises:
            AwayError: it is closed, or killed.
        """
        while self.stock:
            offer = self.stock.popleft()
            if offer.lives == self.lives and time.monotonic() - offer.asked_s < FRESH_S:
                return offer
        lives, asked_s = self.lives, time.monotonic()
        num_blocks = [rng.randint(1, BLOCKS_MAX) for _ in range(self.at_once)]
        answers = await self._ask("offer", num_blocks=num_blocks)
        if answers is None:
            raise AwayError
        offers = [
            Offer(**answer, num_blocks=number, asked_s=asked_s, lives=lives)
            for answer, number in zip(answers, num_blocks, strict=True)
        ]
        self.stock.extend(offers[1:])
        return offers[0]

    async def check(self):
        """Have the law of blocks checked; return how many blocks are not free."""
        return await self._ask("check")

    async def outcome(self, number):
        """Wait until the lease of an offer has ended; return how."""
        return await self._ask("outcome", number=number)

    async def _ask(self, op, **fields):
        return await self.host.ask(op, name=self.name, **fields)
