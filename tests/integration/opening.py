"""An engine that offers prompts while it computes them, and preempts some at random moments.

Peers find a prompt by its content. The bytes of a block say whose it is. It may also settle first, and then write.
"""

import asyncio
import logging
import queue
import random
import sys
from contextlib import asynccontextmanager

import kvflow
from kvflow.events import LeaseEnded, OnlyEvents
from tests.world.words import Words, digests_of

from .keeping import SWITCH_S, Running
from .producing import configured
from .recycling import NUM_BLOCKS, TARGET

BLOCKS_MAX = 12
"""Of one prompt."""
WINDOW_BLOCKS = 1
PREEMPTED = 0.15
"""Of the steps behind the first one."""
OTHER = 0
"""The number of what a block holds when it is nobody's."""
LEASE_S = 2.0
"""Of what nobody finds any more."""


class Prompt:
    """One prompt that is computed, and its blocks so far."""

    def __init__(self, number, num_blocks, offer, absent):
        self.number, self.num_blocks, self.offer = number, num_blocks, offer
        self.absent = absent  # blocks of the window before the last ones
        self.full, self.window = [], []


class Computer:
    """Computes prompts by turns, on a thread of its own; takes blocks back in the moment in which it may."""

    def __init__(self, worker, words, ended, group, *, early, seed):
        self._group = group  # that of the window
        self._worker, self._words, self._ended = worker, words, ended
        self._early = early
        self._rng = random.Random(f"opens {seed}")
        self._free = list(range(NUM_BLOCKS))
        self._computed, self._sealed = [], {}
        self.todo = queue.SimpleQueue()
        self.preempted = self.sealed = 0

    def run(self):
        """Compute until None comes."""
        while True:
            self._take_back()
            if not self._computed or not self.todo.empty():
                wanted = self.todo.get()
                if wanted is None:
                    return
                if wanted:
                    self._begin(*wanted)
            else:
                prompt = self._rng.choice(self._computed)
                if prompt.full and self._rng.random() < PREEMPTED:
                    self._computed.remove(prompt)
                    self._preempt(prompt)
                else:
                    self._step(prompt)

    def stop(self):
        self.todo.put(None)

    def counts(self):
        return {"preempted": self.preempted, "sealed": self.sealed}

    def _begin(self, number, num_blocks):
        digests = digests_of(number, num_blocks)
        name, tokens = str(number), num_blocks * TARGET.block_size - self._rng.randrange(TARGET.block_size)
        absent = max(0, kvflow.window_blocks(self._group, tokens) - WINDOW_BLOCKS)
        ends = [b""] * absent + digests[-WINDOW_BLOCKS:]
        offer = self._worker.offer_progressive(name, [[], []], tokens, digests=[digests, ends])
        self._computed.append(Prompt(number, num_blocks, offer, absent))

    def _step(self, prompt):
        """Compute some more blocks, and say so."""
        count = min(self._rng.randint(1, 4), prompt.num_blocks - len(prompt.full))
        last = len(prompt.full) + count == prompt.num_blocks
        blocks = [self._claim(count), self._claim(WINDOW_BLOCKS if last else 0)]
        ends = [blocks[0], [-1] * prompt.absent + blocks[1]]
        settle = lambda: prompt.offer.seal(ends) if last else prompt.offer.advance(tokens, blocks)  # noqa: E731
        tokens = (len(prompt.full) + count) * TARGET.block_size
        held = not self._early or settle()
        if held:
            self._words.write(prompt.number, [blocks[0], []], first=len(prompt.full))
            self._words.write(prompt.number, [[], blocks[1]])
            held = self._early or settle()
        if not held:  # its lease has run out, or its reader has given up
            self._computed.remove(prompt)
            self._give_back(blocks)
            self._give_back([prompt.full, prompt.window])
            return
        prompt.full += blocks[0]
        prompt.window += blocks[1]
        if last:
            self.sealed += 1
            self._computed.remove(prompt)
            self._sealed[str(prompt.number)] = prompt

    def _preempt(self, prompt):
        """End the lease, and write over the blocks in the moment after."""
        self.preempted += prompt.offer.abort()
        self._give_back([prompt.full, prompt.window])

    def _take_back(self):
        while not self._ended.empty():
            prompt = self._sealed.pop(self._ended.get(), None)
            if prompt is not None:
                self._give_back([prompt.full, prompt.window])

    def _claim(self, count):
        self._rng.shuffle(self._free)
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count
        return taken

    def _give_back(self, blocks):
        self._words.write(OTHER, blocks)
        self._free += blocks[0] + blocks[1]


class Opener(Running):
    """Such an engine, while it runs."""

    def __init__(self, worker, computer, ended):
        super().__init__(worker, computer)
        self._ended = ended

    async def compute(self, number, num_blocks):
        """Offer one more prompt of so many blocks; return when its lease has ended."""
        ended = self._ended[str(number)] = asyncio.get_running_loop().create_future()
        self._engine.todo.put((number, num_blocks))
        await asyncio.wait([ended, self._running], return_when=asyncio.FIRST_COMPLETED)


@asynccontextmanager
async def opening(transport, how, seed=0):
    """Open one. ``how``: ``right``, or ``early``: settled, then written."""
    sys.setswitchinterval(SWITCH_S)
    logging.getLogger("kvflow").setLevel(logging.CRITICAL)  # lease.ended, thousands of times a second
    cache, ended, awaited = TARGET.build(), queue.SimpleQueue(), {}
    loop = asyncio.get_running_loop()

    def tell(name):
        if (waiting := awaited.pop(name, None)) is not None and not waiting.done():
            waiting.set_result(None)

    def on_ended(event):
        ended.put(event.request_id)
        loop.call_soon_threadsafe(tell, event.request_id)

    config = configured("opener", transport=transport, lease_s=LEASE_S)
    async with kvflow.open_worker(config, cache, hooks=[OnlyEvents(LeaseEnded, on_ended)]) as worker:
        words = Words(cache)
        words.write(OTHER, [list(range(NUM_BLOCKS)), []])
        words.write(OTHER, [[], list(range(NUM_BLOCKS))])
        computer = Computer(worker, words, ended, cache.groups[1], early=how == "early", seed=seed)
        opener = Opener(worker, computer, awaited)
        yield opener
        await opener.counted()
