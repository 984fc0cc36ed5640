"""Whoever reads in a soak: pulls, gives up wherever a pull can wait, and looks at every word that arrives."""

import asyncio
import inspect
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import kvflow
from kvflow import errors
from kvflow.events import PullFailed, TransferCompleted, TransferRetried, TransferStarted
from tests.integration.producing import configured
from tests.integration.recycling import TARGET
from tests.world.words import Words, digests_of

from .ledger import Ledger
from .measuring import PLANES

OURS = ("kvflow", "handshake")
AGAIN_S = 0.2
"""How long to ask for what was preempted."""
NOBODY = 0
"""Number of the request whose words are put into blocks that received nothing: none that is offered has it."""
LOOKED_AT_AGAIN = 0.2
"""Share of the delivered pulls whose words are looked at again, after another pull; of those that failed it is all."""
EVENTS = (TransferStarted, TransferRetried, TransferCompleted, PullFailed)
"""After which a pull may be given up."""
ENOUGH_TOO_LATE = 8
"""Pulls that had ended before they were given up, after which a sweep starts again: others take longer."""


@dataclass
class Tally(Ledger):
    """What became of pulls, and of those that were given up.

    Attributes:
        aborts: pulls that were given up before they had ended, by what it waited for.
        points: where those pulls waited.
        followed: how pulls of open offers ended; ``again``, those of what was preempted and offered again.
        turns_max: most turns of the loop after which a pull was given up.
    """

    aborts: Counter = field(default_factory=Counter)
    points: Counter = field(default_factory=Counter)
    followed: Counter = field(default_factory=Counter)
    again: Counter = field(default_factory=Counter)
    turns_max: int = 0


class Sweep:
    """Numbers of turns, from none to well past the end of a pull, and again."""

    def __init__(self):
        self._next = 0
        self._too_late = 0

    def take(self):
        turns, self._next = self._next, self._next + 1
        return turns

    def too_late(self):
        """Note that a pull had ended by then."""
        self._too_late += 1
        if self._too_late > ENOUGH_TOO_LATE:
            self._next = self._too_late = 0


class Station:
    """A worker that pulls, which may be closed and opened again over the same cache.

    Attributes:
        seeks: whether it asks again for what was preempted.
        worker: as long as it is open.
        lives: grows by one when it opens, and by one when it closes.
        ready: set while it is open.
    """

    def __init__(self, engine_id, transport, *, seeks):
        self.seeks = seeks
        self._config = configured(engine_id, follow_bytes_min=1, **PLANES[transport])
        self._cache = TARGET.build()
        self._life = AsyncExitStack()
        self._watched = {}
        self.words = Words(self._cache)
        self.sweep = Sweep()
        self.ready = asyncio.Event()
        self.worker = None
        self.lives = 0

    async def open(self):
        self.worker = await self._life.enter_async_context(
            kvflow.open_worker(self._config, self._cache, hooks=[self._notice])
        )
        self.lives += 1
        self.ready.set()

    async def close(self):
        self.lives += 1
        self.ready.clear()
        await self._life.aclose()

    def watch(self, request_id, kind, task):
        """Give up a pull after an event of it."""
        self._watched[request_id] = (kind, task)
        task.add_done_callback(lambda _: self._watched.pop(request_id, None))

    def _notice(self, event):
        kind, task = self._watched.get(getattr(event, "request_id", None), (None, None))
        if kind is not None and isinstance(event, kind):
            task.cancel()


class Lane:
    """Pulls one after the other, into two sets of blocks by turns.

    Args:
        station: whose worker pulls.
        blocks: where nobody else writes.
        rng: of all that is random.
        tally: to count in.
    """

    def __init__(self, station, blocks, rng, tally):
        half = len(blocks) // 2
        self._station = station
        self._halves = [blocks[:half], blocks[half:]]
        self._holds = [None, None]
        self._rng = rng
        self._tally = tally

    async def pull(self, number, params, num_blocks, *, priority=0, abort=None):
        """Pull, look at what has come and at what an earlier pull has left, and return how it ended."""
        self._halves.reverse()
        self._holds.reverse()
        if self._holds[0] is not None and (self._holds[0][0] == NOBODY or self._rng.random() < LOOKED_AT_AGAIN):
            self._look_again()
        ids = self._rng.sample(self._halves[0], 2 * num_blocks)
        targets = [ids[:num_blocks], ids[num_blocks:]]
        ticket = kvflow.Ticket.from_params(params)
        end = await self._end_of(ticket, targets, priority, abort)
        if ticket.grants[0].kind == "open":
            self._tally.followed[end] += 1
            if end == "stale_lease" and (again := await self._found_again(ticket, number, num_blocks)) is not None:
                end = await self._end_of(again, targets, priority, None)
                self._tally.again[end] += 1
        self._tally.ends[end] += 1
        words = self._station.words
        if end == "completed":
            self._tally.compare("wrong", words, number, targets)
        else:
            number = NOBODY
            words.write(number, targets)
        self._holds[0] = (number, targets)
        return end

    def look_again(self):
        """Look at all that earlier pulls have left."""
        for _ in self._halves:
            self._look_again()
            self._holds.reverse()

    async def _found_again(self, ticket, number, num_blocks):
        """Return a new ticket of what was preempted, if it is offered again; ranks that sign alone cannot be asked."""
        if self._station.seeks and len(ticket.grants) == 1:
            digests = digests_of(number, num_blocks)
            with suppress(errors.KvflowError):  # its engine is gone, or our worker
                endpoint = str(ticket.grants[0].ranks[0].endpoint)
                return (await self._station.worker.find(endpoint, digests, AGAIN_S, at_least=num_blocks))[0]
        return None

    async def _end_of(self, ticket, targets, priority, abort):
        worker = self._station.worker
        task = asyncio.create_task(worker.pull(ticket, targets, priority=priority))
        if abort == "turns":
            await self._give_up_after_turns(task)
        elif abort is not None:
            self._station.watch(ticket.request_id, abort, task)
        await asyncio.wait([task])
        if task.cancelled():
            self._tally.aborts[abort if isinstance(abort, str) else abort.__name__] += 1
            end = "cancelled"
        elif (error := task.exception()) is None:
            return "completed"
        elif isinstance(error, errors.KvflowError):
            end = error.code
        else:
            raise error
        await worker.quiesced(ticket.request_id)
        return end

    async def _give_up_after_turns(self, task):
        turns = self._station.sweep.take()
        for _ in range(turns):
            if task.done():
                self._station.sweep.too_late()
                return
            await asyncio.sleep(0)
        point = waits_at(task)
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            self._tally.points[point] += 1
            self._tally.turns_max = max(self._tally.turns_max, turns)

    def _look_again(self):
        if self._holds[0] is not None:
            number, targets = self._holds[0]
            self._tally.compare("late", self._station.words, number, targets)
            self._holds[0] = None


def waits_at(task):
    """Name the function and line of ours in which a task waits, and whether what it waits for has come."""
    awaited, name = task.get_coro(), ""
    if inspect.getcoroutinestate(awaited) == inspect.CORO_CREATED:
        return "not begun"
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        path = Path(frame.f_code.co_filename)
        if set(OURS) & set(path.parts):
            name = f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
        awaited = awaited.cr_await
    # What it waits for has a name of CPython's own only.
    waiter = getattr(task, "_fut_waiter", None)
    return f"{name}, woken" if waiter is None or waiter.done() else name
