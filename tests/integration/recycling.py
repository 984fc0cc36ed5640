"""Engines that take their blocks back at random moments while somebody reads them, in a process of their own.

An offer lives until its reader has released it, until its lease of a few milliseconds has run out, or until it is
revoked at a random moment about when a read of it may go on. In the last two cases its blocks are written over at once.
Some are offered before they are computed. What is preempted then is offered again, in other blocks.
"""

import asyncio
import logging
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from itertools import count

import msgspec
from msgspec import Struct

import kvflow
from kvflow import errors
from tests.world.words import Words, digests_of

from .producing import SECRET, configured
from .shapes import Shape

NUM_BLOCKS = 512
REVOKED = 0.6
"""Where nothing else is said."""
STEP_S_MAX = 0.004
"""Until some more blocks are computed."""
LATE_S = 0.02
"""How long after its ticket a lease may be admitted: about two looks of a reader."""
USUAL_S_MAX = 0.05
"""A read on a machine that is busy. Revocations come about when reads go on; without a bound they come later and later,
since a reader that waits for an admission looks less and less often, which makes the usual read longer."""
THREADS = 32
"""More than there are offers at a time: none waits for another one's moment."""
OVER_TCP = {"transport": "tcp"}
DIRECT = {"staging_bytes": 0}
TARGET = Shape(num_blocks=NUM_BLOCKS, block_size=16, heads=4, head_size=32)


class Path(Struct, frozen=True, kw_only=True):
    """One way in which a ticket and its bytes come about.

    Attributes:
        source: how one rank keeps its cache; the target is ``TARGET``.
        ranks: that divide the heads.
        lease_s: of every offer.
        minted: whether a mint signs one ticket for all ranks, who write and admit it later; else every rank offers.
        blocks_max: most blocks of one request, per group.
        revoked: share of the offers that are revoked, if they live so long.
        computing: share of the offers that are made before they are computed.
        source_settings: more settings of the engine.
        target: more settings of the reader.
    """

    source: Shape = TARGET
    ranks: int = 1
    lease_s: float = 0.03
    minted: bool = False
    blocks_max: int = 8
    revoked: float = REVOKED
    computing: float = 0.0
    source_settings: dict = {}
    target: dict = {}


PATHS = {
    "one rank": Path(),
    # Tokens of a head lie apart here, heads of a token there: every head of every token is a descriptor, unless staged.
    "staged": Path(source=msgspec.structs.replace(TARGET, layout="LBNHC"), blocks_max=6, lease_s=0.02),
    "many chunks": Path(
        source=msgspec.structs.replace(TARGET, layout="LBNHC"), blocks_max=6, lease_s=0.02, target=DIRECT
    ),
    "two ranks": Path(ranks=2, lease_s=0.03),
    "admitted late": Path(ranks=2, minted=True, lease_s=0.06),
    "over TCP": Path(ranks=2, lease_s=0.02, source_settings=OVER_TCP),
    "over TCP, admitted late": Path(ranks=2, minted=True, lease_s=0.06, source_settings=OVER_TCP),
    "over TCP, many chunks": Path(
        source=msgspec.structs.replace(TARGET, layout="LBNHC"),
        blocks_max=6,
        lease_s=0.02,
        source_settings=OVER_TCP,
        target=DIRECT,
    ),
}
"""Name -> path. A path that moves its bytes in another way is one more entry."""


class Recycler:
    """An engine that offers, and takes back.

    Args:
        name: of the engine.
        path: what it is like.
        workers: one per rank.
        words: of each rank's cache.
        rng: of all that is random.
        first: number of the first request.

    Attributes:
        endpoint: of each rank.
    """

    def __init__(self, name, path, workers, words, rng, *, first=1):
        self._path = path
        self._workers = workers
        self.endpoint = [worker.endpoint for worker in workers]
        self._turn = asyncio.Lock()
        self._is_over = False
        self._words = words
        self._rng = rng
        self._free = list(range(NUM_BLOCKS))
        self._freed = asyncio.Event()
        self._numbers = count(first)
        self._usual_s = 0.002
        self._tasks = asyncio.TaskGroup()
        if path.minted:
            ranks = [worker.rank_address for worker in workers]
            self._mint = kvflow.TicketMint(name, ranks, cluster_secret=SECRET, lease_s=path.lease_s)

    async def __aenter__(self):
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *error):
        return await self._tasks.__aexit__(*error)

    async def offer(self, *num_blocks):
        """Offer once for each number of blocks of each group, unless it is being closed.

        Returns:
            Of each request its number and parameters, and whether it is revoked.
        """
        async with self._turn:
            return [] if self._is_over else [await self._offer(number) for number in num_blocks]

    async def end(self):
        """Let no more be offered."""
        async with self._turn:
            self._is_over = True

    def check(self):
        """Check the law of blocks; return how many blocks are not free."""
        for worker in self._workers:
            worker.check()
        return NUM_BLOCKS - len(self._free)

    async def outcome(self, number):
        """Wait until the lease of an offer has ended, and say how."""
        return await self._workers[0].wait_offer(str(number))

    async def _offer(self, num_blocks):
        block_ids = await self._take(num_blocks)
        number, num_tokens = next(self._numbers), num_blocks * TARGET.block_size
        name = str(number)
        revoked = self._rng.random() < self._path.revoked
        if self._path.computing and self._rng.random() < self._path.computing:
            ticket = self._offer_early(number, block_ids, revoked)
        elif self._path.minted:
            ticket, grant = self._mint.offer(name, block_ids=block_ids, num_tokens=num_tokens)
            self._tasks.create_task(self._admit_late(number, grant, revoked))
        else:
            self._write(number, block_ids)
            ticket = kvflow.join_tickets([worker.offer(name, block_ids, num_tokens) for worker in self._workers])
            self._follow(number, block_ids, revoked)
        return {"number": number, "params": ticket.to_params(), "revoked": revoked}

    def _offer_early(self, number, block_ids, revoked):
        """Offer a request, and compute it; return its ticket."""
        num_blocks = len(block_ids[0])
        request = (str(number), [[], []], num_blocks * TARGET.block_size)
        digests = digests_of(number, num_blocks)
        if self._path.minted:
            ticket, grant = self._mint.offer_progressive(*request)
            for worker in self._workers:
                worker.admit(grant)
        else:
            offers = [worker.offer_progressive(*request, digests=[digests, digests]) for worker in self._workers]
            ticket = kvflow.join_tickets([offer.ticket for offer in offers])
        computing = self._tasks.create_task(self._compute(number, *block_ids))
        self._follow(number, block_ids, revoked, computing)
        return ticket

    async def _compute(self, number, full, window):
        """Write and settle some blocks after the other, rank by rank; the window's with the last of them."""
        done, name = 0, str(number)
        with suppress(errors.WorkerClosed):
            while done < len(full):
                blocks = [full[done : done + self._rng.randint(1, len(full))], []]
                settled = done + len(blocks[0])
                for worker, words in zip(self._workers, self._words, strict=True):
                    await asyncio.sleep(self._rng.uniform(0, STEP_S_MAX))
                    words.write(number, blocks, first=done)
                    if settled == len(full):
                        words.write(number, [[], window])
                        held = worker.seal(name, [blocks[0], window])
                    else:
                        held = worker.advance(name, settled * TARGET.block_size, blocks)
                    if not held:
                        return
                done = settled

    def _follow(self, number, block_ids, revoked, computing=None):
        """Let an offer live, and revoke it or not."""
        delay_s = self._rng.uniform(0, 2 * self._usual_s) if revoked else None
        self._tasks.create_task(self._live(number, block_ids, next(self._numbers), delay_s, computing))

    async def _admit_late(self, number, grant, revoked):
        delay_s = self._rng.uniform(0, LATE_S)
        await asyncio.to_thread(self._write_and_admit, number, grant, delay_s)
        self._follow(number, grant.block_ids, revoked)

    def _write_and_admit(self, number, grant, delay_s):
        time.sleep(delay_s)  # this is the random moment, about when the blocks are read
        for worker, words in zip(self._workers, self._words, strict=True):
            words.write(number, grant.block_ids)
            with suppress(errors.WorkerClosed):  # of an engine that is restarted
                worker.admit(grant)

    async def _live(self, number, block_ids, successor, delay_s, computing):
        """Follow one offer to its end on every rank, then its blocks are free."""
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as ends:
            if delay_s is not None:
                ends.create_task(asyncio.to_thread(self._recycle, number, block_ids, successor, delay_s))
            outcomes = [
                ends.create_task(self._end(rank, number, block_ids, successor)) for rank in range(self._path.ranks)
            ]
        if {outcome.result() for outcome in outcomes} == {"released"}:
            self._usual_s += 0.05 * (min(USUAL_S_MAX, time.monotonic() - began_s) - self._usual_s)
        if self._path.minted:
            self._mint.retire(str(number))
        if computing is not None:
            computing.cancel()
        self._give_back(block_ids)
        preempted = (
            computing is not None and delay_s is not None and {each.result() for each in outcomes} == {"revoked"}
        )
        if preempted and not self._path.minted:
            block_ids = await self._take(len(block_ids[0]))
            try:
                self._offer_early(number, block_ids, revoked=False)
            except errors.WorkerClosed:
                self._give_back(block_ids)

    def _give_back(self, block_ids):
        self._free += [block for ids in block_ids for block in ids]
        self._freed.set()

    def _recycle(self, number, block_ids, successor, delay_s):
        """Revoke an offer, and write over its blocks the moment after: in a thread, as fast as an engine would."""
        time.sleep(delay_s)  # this is the random moment, about when the blocks are read
        for worker, words in zip(self._workers, self._words, strict=True):
            if worker.revoke(str(number)):
                words.write(successor, block_ids)

    async def _end(self, rank, number, block_ids, successor):
        outcome = "released"
        with suppress(errors.RequestUnknown):
            outcome = await self._workers[rank].wait_offer(str(number))
        if outcome == "expired":
            self._words[rank].write(successor, block_ids)
        return outcome

    def _write(self, number, block_ids):
        for words in self._words:
            words.write(number, block_ids)

    async def _take(self, num_blocks):
        """Take so many blocks for each group, which nobody reads, at random."""
        while len(self._free) < 2 * num_blocks:
            self._freed.clear()
            await self._freed.wait()
        self._rng.shuffle(self._free)
        taken, self._free = self._free[: 2 * num_blocks], self._free[2 * num_blocks :]
        return [taken[:num_blocks], taken[num_blocks:]]


@asynccontextmanager
async def recycling(name, path: Path, seed, *, endpoints=(), first=1, **settings):
    """Open an engine, on the addresses of an earlier one if there are any; its end ends all leases."""
    logging.getLogger("kvflow").setLevel(logging.CRITICAL)  # every second lease runs out or is revoked
    async with AsyncExitStack() as followed, AsyncExitStack() as opened:
        workers, words = [], []
        for rank in range(path.ranks):
            cache = msgspec.structs.replace(path.source, tp_rank=rank, tp_size=path.ranks).build()
            more = path.source_settings | settings | ({"bind": endpoints[rank]} if endpoints else {})
            config = configured(name, rank=rank, num_ranks=path.ranks, lease_s=path.lease_s, **more)
            workers.append(await opened.enter_async_context(kvflow.open_worker(config, cache)))
            words.append(Words(cache))
        recycler = Recycler(name, path, workers, words, random.Random(f"{name} {first} {seed}"), first=first)
        yield await followed.enter_async_context(recycler)
        await recycler.end()


@contextmanager
def threads_to_recycle():
    """Give a process a thread for each moment that is awaited at the same time."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
    yield
