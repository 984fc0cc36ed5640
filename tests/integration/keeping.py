"""An engine that keeps conversations and reuses their blocks as fast as it can.

The bytes of a block say which conversation it is of, and which block of it.
"""

import asyncio
import logging
import random
import sys
import threading
from collections import deque
from contextlib import asynccontextmanager

import kvflow
from tests.world.words import Words, digests_of

from .producing import configured
from .recycling import NUM_BLOCKS, TARGET

CONVERSATIONS = 32
BLOCKS_MAX = 8
"""Of one conversation, in each of two groups."""
KEPT = 24
CHECK_S = 0.05
SWITCH_S = 2e-4
"""Until the thread that recycles lets the event loop answer: with the usual 5 ms, a fetch would mostly wait."""


class Keeper:
    """Keeps one conversation after the other where the oldest was, on a thread of its own."""

    def __init__(self, worker, words, seed):
        self._worker, self._words = worker, words
        self._rng = random.Random(f"keeps {seed}")
        self._stopping = threading.Event()
        self._ring = deque()
        self.recycled = 0

    def run(self):
        """Keep what fits, then recycle until ``stop``."""
        free = list(range(NUM_BLOCKS))
        while not self._stopping.is_set():
            num_blocks = self._rng.randint(1, BLOCKS_MAX)
            while len(self._ring) >= KEPT:
                name, blocks = self._ring.popleft()
                assert self._worker.revoke(name)
                # They are written over in the moment after, before they are kept as something else.
                self._words.write(CONVERSATIONS, blocks)
                free += blocks[0] + blocks[1]
                self.recycled += 1
            self._rng.shuffle(free)
            blocks, free = [free[:num_blocks], free[num_blocks : 2 * num_blocks]], free[2 * num_blocks :]
            conversation = self._rng.randrange(CONVERSATIONS)
            self._words.write(conversation, blocks)
            name, digests = f"{self.recycled} {len(self._ring)}", digests_of(conversation, num_blocks)
            self._worker.keep(name, blocks, num_blocks * TARGET.block_size, [digests, digests])
            self._ring.append((name, blocks))

    def stop(self):
        self._stopping.set()

    def counts(self):
        return {"recycled": self.recycled}


class Running:
    """An engine on a thread of its own, while it runs; the references to blocks are checked again and again."""

    def __init__(self, worker, engine):
        self._worker, self._engine = worker, engine
        self.endpoint = worker.endpoint
        self._running = asyncio.create_task(asyncio.to_thread(engine.run))
        self._checking = asyncio.create_task(self._check_often())

    async def counted(self):
        """Stop it; return what it has counted."""
        self._engine.stop()
        await self._running
        await self._checking
        self._worker.check()
        snapshot = self._worker.snapshot()
        return self._engine.counts() | {"found": snapshot.found, "not_held": snapshot.not_held}

    async def _check_often(self):
        while not self._running.done():
            self._worker.check()
            await asyncio.wait([self._running], timeout=CHECK_S)


@asynccontextmanager
async def keeping(transport, seed=0):
    """Open one."""
    sys.setswitchinterval(SWITCH_S)
    logging.getLogger("kvflow").setLevel(logging.CRITICAL)  # lease.ended, thousands of times a second
    cache = TARGET.build()
    async with kvflow.open_worker(configured("keeper", transport=transport), cache) as worker:
        kept = Running(worker, Keeper(worker, Words(cache), seed))
        yield kept
        await kept.counted()
