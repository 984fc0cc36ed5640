"""A producer, and a reader to which something happens in the middle of a large pull. ``readers`` has them as processes.

The large pull is in the middle when some of its target blocks hold bytes of the producer and others do not. A thread of
the reader watches one word of some 64 of these blocks, and does there and then what is to happen: no line has to cross
a pipe first. This needs nothing of the data plane, so it is the same for all of them.
"""

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import torch

import kvflow
from kvflow import errors
from tests.integration.producing import configured
from tests.integration.shapes import Shape
from tests.stopping import stop_process
from tests.world.processes import thread_pool
from tests.world.words import Words

from .descriptors import descriptors
from .engine import RIGHT, WRONG

BLOCK_SIZE = 16
BLOCK_BYTES = 128 << 10
"""Of one group: two layers, K and V, 16 tokens of 8 heads of 128 elements."""
SMALL = 32
"""Blocks of each group that an honest reader pulls: 8 MiB in all. ``Words`` knows 512."""
FILLED = 0x11
"""The bytes of the large request. Memory of a reader is zeros."""
THREADS = 4
"""Of the producer's executor, from the start: threads are counted."""
WATCHED = 64
WATCH_S = 0.0005


def shape(mib):
    """Return a cache with room for a request of so many MiB, and a small one."""
    num_blocks = (mib << 20) // BLOCK_BYTES + 2 * SMALL
    return Shape(num_blocks=num_blocks, block_size=BLOCK_SIZE, heads=8, head_size=128)


def large_and_small(num_blocks):
    """Return the block ids of both requests: every other one, since neighbors would be read as one."""
    small = list(range(2 * SMALL))
    large = list(range(2 * SMALL, num_blocks))
    return [large[::2], large[1::2]], [small[::2], small[1::2]]


class Producer:
    """Offers one large request, and small ones; says when they have ended."""

    def __init__(self, worker, cache):
        self.worker = worker
        self.endpoint = worker.endpoint
        self._large, self._small = large_and_small(cache.num_blocks)
        self._words = Words(cache)
        self._ends = {}
        cache.backing.fill_(FILLED)

    async def offer(self, number):
        """Offer the large request if its number is 0, else a small one; return what a router carries."""
        block_ids = self._large if number == 0 else self._small
        if number:
            self._words.write(number, block_ids)
        ticket = self.worker.offer(str(number), block_ids, len(block_ids[0]) * BLOCK_SIZE)
        self._ends[number] = asyncio.create_task(self.worker.wait_offer(str(number)))
        return ticket.to_params()

    async def ended(self, number):
        """Wait until a lease has ended; say how."""
        return await self._ends[number]

    async def level(self):
        """Describe every file descriptor, and name every thread."""
        return descriptors(), threads()

    async def audit(self):
        """Check every law; return how many leases are held."""
        self.worker.check()
        return self.worker.snapshot().leases

    async def aclose(self):
        for task in self._ends.values():
            task.cancel()


class Reader:
    """Opens a worker for each of its reads: an honest one, or one in whose middle something happens."""

    endpoint = ""

    def __init__(self, cache, engine_id, settings):
        self._cache = cache
        self._large, self._small = large_and_small(cache.num_blocks)
        self._opening = (configured(engine_id, **settings), cache)
        self._left = asyncio.Event()
        self._life = None
        self._pull = None
        self._pull_ended_s = 0.0

    async def read(self, number, params):
        """Read a small request with a new worker, which stays open; return how that ended, and over what or why."""
        worker = await self._open()
        ticket = kvflow.Ticket.from_params(params)
        Words(self._cache).write(0, self._small)
        try:
            report = await worker.pull(ticket, self._small)
        except errors.KvflowError as error:
            return error.code, str(error)
        return WRONG if len(Words(self._cache).wrong(number, self._small)) else RIGHT, report.transport

    async def begin(self, params, producer, happens):
        """Begin the large pull, act once it is in the middle, and tell whether it still was then.

        Args:
            params: of its ticket.
            producer: process that is stopped then; 0 for none.
            happens: ``killed`` or ``hangs``: to this process; ``closes`` or ``cut``: nothing yet.
        """
        worker = await self._open()
        self._pull = asyncio.create_task(self._pulling(worker, kvflow.Ticket.from_params(params)))
        middle = await asyncio.to_thread(self._act, self._watched(), producer, happens)
        if middle and happens in ("closes", "hangs"):
            middle = not self._pull.done()
            await self.leave()
        return middle

    async def finish(self):
        """Wait for the end of the large pull; return how and when, in seconds of the clock that processes share."""
        return await self._pull, self._pull_ended_s

    async def leave(self):
        """Close the worker in order, if one is open."""
        self._left.set()
        if self._life is not None:
            await self._life

    async def _open(self):
        await self.leave()
        self._left = asyncio.Event()
        opened = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(opened))
        await asyncio.wait([self._life, opened], return_when=asyncio.FIRST_COMPLETED)
        if self._life.done():
            await self._life  # why it could not be opened
        return await opened

    async def _live(self, opened):
        async with kvflow.open_worker(*self._opening) as worker:
            opened.set_result(worker)
            await self._left.wait()

    async def _pulling(self, worker, ticket):
        try:
            await worker.pull(ticket, self._large)
        except errors.KvflowError as error:
            return error.code
        except asyncio.CancelledError:
            return "cancelled"
        else:
            return RIGHT
        finally:
            self._pull_ended_s = time.monotonic()

    def _watched(self):
        """Return the words to watch: a number of tensors that share the cache's memory."""
        words = []
        for group, ids in zip(self._cache.groups, self._large, strict=True):
            cells = self._cache.component(group.layers[0], "k").view(torch.int64)
            words += [cells[block, 0, 0, 0] for block in ids[:: max(1, 2 * len(ids) // WATCHED)]]
        return words

    def _act(self, watched, producer, happens):
        """Wait for the middle, and act; tell whether it still was the middle then. Thread: one of its own."""

        def is_middle():
            return 0 < sum(int(word) != 0 for word in watched) < len(watched) and not self._pull.done()

        while not is_middle():
            if self._pull.done():
                return False
            time.sleep(WATCH_S)
        if producer:
            with suppress(ProcessLookupError):  # that it has died is seen by its parent
                stop_process(producer)
        if not is_middle():
            return False
        if happens in ("killed", "hangs"):
            os.kill(os.getpid(), signal.SIGKILL if happens == "killed" else signal.SIGSTOP)
        return True


def threads():
    """Name every thread of this process."""
    return sorted((task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir())


@asynccontextmanager
async def producing(engine_id, mib, **settings):
    asyncio.get_running_loop().set_default_executor(thread_pool(THREADS))
    cache = shape(mib).allocate()
    async with kvflow.open_worker(configured(engine_id, **settings), cache) as worker:
        producer = Producer(worker, cache)
        try:
            yield producer
        finally:
            await producer.aclose()


@asynccontextmanager
async def reading(engine_id, mib, **settings):
    cache = shape(mib).allocate()
    reader = Reader(cache, engine_id, settings)
    try:
        yield reader
    finally:
        await reader.leave()
