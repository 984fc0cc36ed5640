"""One worker and the engine around it, which reuses its blocks as soon as it may, and notices what it should not find.

Every element of its cache says whose it is (``tests.world.words``). Numbers name requests, and nothing
else has a number that another thing has: what was on offer is written over with its successor's number in the moment
its lease has ended, and the target of a pull with a mark of its own when nothing may write to it any more. So a byte
that comes from a block too late, or goes into one, is seen, and tells where it comes from.
"""

import asyncio
import random
import time
from contextlib import asynccontextmanager

import kvflow
from kvflow import errors
from tests.integration.producing import configured
from tests.integration.shapes import Shape
from tests.world.words import Words, digests_of

from .ledger import Ledger
from .measuring import descriptors, threads
from .middle import WATCHED, act
from .process import logged_errors

BLOCK_SIZE = 16
BLOCKS_MAX = 32
"""Of one request and group: 1 MiB in all, some 5 ms over TCP."""
HELD = ("leases", "pulls", "quarantined", "blocks", "slots")
"""What an audit counts that must be nothing in the end."""
RIGHT = "right"
WRONG = "wrong"
NOT_HELD = "not_held"
"""Nobody has offered what was asked for."""
STEP_S_MAX = 0.02
STEP_BLOCKS_MAX = 8
"""Of what is computed while it is on offer: some four steps for the largest request, and as many reads."""
FIND_S = 8.0
"""How long a question for content waits: longer than a busy machine takes to offer it."""


class Slot:
    """Blocks that pulls go into, and the number of whoever has written to them last."""

    def __init__(self, number, blocks_max):
        ids = list(range(number * 2 * blocks_max, (number + 1) * 2 * blocks_max))
        self.targets = [ids[::2], ids[1::2]]
        self.mark = 0

    def of(self, num_blocks):
        return [ids[:num_blocks] for ids in self.targets]


class Engine:
    """Offers and pulls, each beside the others; ends all of them in ``__aexit__``.

    Args:
        worker: its worker.
        cache: its cache: the slots that pulls go into, and room for what is on offer.
        num_slots: pulls at the same time, blocks in quarantine included.
        blocks_max: of each group of one pull.
    """

    def __init__(self, worker, cache, num_slots, blocks_max):
        self.worker = worker
        self.endpoint = worker.endpoint
        self._words = Words(cache)
        self._slots: asyncio.Queue[Slot] = asyncio.Queue()
        slots = [Slot(number, blocks_max) for number in range(num_slots)]
        for slot in slots:
            self._words.write(slot.mark, slot.targets)
            self._slots.put_nowait(slot)
        self._num_slots = num_slots
        self._first_targets = slots[0].targets if slots else []
        self._free = list(range(2 * num_slots * blocks_max, cache.num_blocks))
        self._num_offered = len(self._free)
        self._freed = asyncio.Condition()
        self._tasks = set()
        self._ledger = Ledger()
        self._carriers = set()
        self._large = None

    async def offer(self, number, successor, num_blocks, *, patience_s=0.0, computing=False):
        """Write a request and offer it; return what a router carries, or the code of the refusal.

        Args:
            number: of the request.
            successor: of whoever gets its blocks.
            num_blocks: of each group.
            patience_s: how long to wait for a lease slot.
            computing: offer it first, and write it while it is read.
        """
        ids = await self._take(2 * num_blocks)
        block_ids = [ids[:num_blocks], ids[num_blocks:]]
        request = (str(number), block_ids, num_blocks * BLOCK_SIZE)
        computed = None
        try:
            if computing:
                digests = digests_of(number, num_blocks)
                request = (request[0], [[], []], request[2])
                offer = self.worker.offer_progressive(*request, digests=[digests, digests])
                ticket, computed = offer.ticket, self._spawn(self._compute(offer, number, *block_ids))
            else:
                self._words.write(number, block_ids)
                if patience_s:
                    ticket = await self.worker.offer_when_possible(*request, timeout_s=patience_s)
                else:
                    ticket = self.worker.offer(*request)
        except errors.CapacityExceeded as error:
            await self._give_back(ids)
            return error.code
        self._spawn(self._reuse(number, successor, block_ids, computed))
        return ticket.to_params()

    def revoke(self, number):
        """End a lease."""
        return self.worker.revoke(str(number))

    async def pull(self, number, mark, params, num_blocks):
        """Pull a request into free blocks; return how it ended, and of wrong words where they come from.

        Args:
            number: of the request.
            mark: number that is written over it when it is over.
            params: of its ticket; or the endpoint of who is asked for one.
            num_blocks: of each group.
        """
        slot = await self._slots.get()
        self._look_at(slot)
        targets = slot.of(num_blocks)
        try:
            if isinstance(params, str):
                digests = digests_of(number, num_blocks)
                ticket, _ = await self.worker.find(params, digests, FIND_S, at_least=num_blocks)
                if ticket is None:
                    return NOT_HELD, []
            else:
                ticket = kvflow.Ticket.from_params(params)
            report = await self.worker.pull(ticket, targets)
        except errors.KvflowError as error:
            return error.code, []
        else:
            self._carriers.add(report.transport)
            wrong = self._ledger.compare("wrong", self._words, number, targets)
            return (WRONG if len(wrong) else RIGHT), self._ledger.take()["examples"]
        finally:
            self._spawn(self._settle(number, mark, slot))

    async def pull_to_the_middle(self, number, mark, params, num_blocks, producer, happens):  # noqa: PLR0917
        """Begin a pull into the first slot, act in the middle, and tell whether it still was then; see ``middle``."""
        watched = self._words.first(self._first_targets, WATCHED)
        self._large = asyncio.create_task(self._pull_large(number, mark, params, num_blocks))
        return await asyncio.to_thread(act, watched, self._large, producer, happens)

    async def finish(self):
        """Wait for the end of this pull; return how and when, in seconds of the clock that processes share."""
        return await self._large

    def carriers(self):
        """Return what has carried bytes so far."""
        return sorted(self._carriers)

    async def _pull_large(self, *arguments):
        return (await self.pull(*arguments))[0], time.monotonic()

    async def audit(self):
        """Check every law, and say what is held; see ``at_rest``."""
        self.worker.check()
        snapshot = self.worker.snapshot()
        return {
            "leases": snapshot.leases,
            "pulls": snapshot.pulls,
            "quarantined": len(snapshot.quarantined),
            "blocks": self._num_offered - len(self._free),
            "slots": self._num_slots - self._slots.qsize(),
            "descriptors": descriptors(),
            "threads": threads(),
        }

    async def at_rest(self, patience_s):
        """Return the audit once nothing is held any more, or when patience ends."""
        deadline = time.monotonic() + patience_s
        while True:
            audit = await self.audit()
            if not any(audit[name] for name in HELD) or time.monotonic() > deadline:
                return audit
            await asyncio.sleep(0.05)  # leases that nobody releases end by themselves, and file descriptors tell nobody

    async def overwritten(self):
        """Return what was found in blocks that nobody may write to, all that are free now included."""
        for _ in range(self._slots.qsize()):
            self._look_at(slot := self._slots.get_nowait())
            self._slots.put_nowait(slot)
        return self._ledger.take()["examples"]

    async def logged(self):
        """Return what was logged as an error in this process, if anybody listens."""
        return logged_errors()

    async def aclose(self):
        """Forget what has not ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _compute(self, offer, number, full, window):
        """Write and settle some blocks after the other; what a window holds settles with the last of them."""
        rng, done, held = random.Random(number), 0, True
        while held and done < len(full):
            await asyncio.sleep(rng.uniform(0, STEP_S_MAX))
            blocks = [full[done : done + rng.randint(1, STEP_BLOCKS_MAX)], []]
            self._words.write(number, blocks, first=done)
            done += len(blocks[0])
            if done < len(full):
                held = offer.advance(done * BLOCK_SIZE, blocks)
            else:
                self._words.write(number, [[], window])
                offer.seal([blocks[0], window])

    async def _reuse(self, number, successor, block_ids, computed):
        await self.worker.wait_offer(str(number))
        if computed is not None:
            computed.cancel()
        self._words.write(successor, block_ids)
        await self._give_back([block for ids in block_ids for block in ids])

    async def _settle(self, number, mark, slot):
        await self.worker.quiesced(str(number))
        self._words.write(mark, slot.targets)
        slot.mark = mark
        self._slots.put_nowait(slot)

    def _look_at(self, slot):
        self._ledger.compare("late", self._words, slot.mark, slot.targets)

    async def _take(self, num_blocks):
        async with self._freed:
            await self._freed.wait_for(lambda: len(self._free) >= num_blocks)
            taken, self._free = self._free[:num_blocks], self._free[num_blocks:]
        return taken

    async def _give_back(self, ids):
        async with self._freed:
            self._free += ids
            self._freed.notify_all()

    def _spawn(self, coroutine):
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


@asynccontextmanager
async def engine(engine_id, *, num_offered=0, num_slots=0, blocks_max=BLOCKS_MAX, heads=4, head_size=32, **settings):
    """Open one with room for so many blocks on offer."""
    num_blocks = num_offered + 2 * num_slots * blocks_max
    cache = Shape(num_blocks=num_blocks, block_size=BLOCK_SIZE, heads=heads, head_size=head_size).build()
    async with kvflow.open_worker(configured(engine_id, **settings), cache) as worker:
        running = Engine(worker, cache, num_slots, blocks_max)
        try:
            yield running
        finally:
            await running.aclose()
