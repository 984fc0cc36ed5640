"""The producer's side of a worker: leases that are held, and how they end.

``admit`` and ``revoke`` are called by an engine from any thread and are effective on return: a lock
guards the lease table, and the epoch is raised inside it. Whoever waits for an end is told on the event loop.
"""

import asyncio
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain

import numpy as np

from kvflow.cache.blocks import BlockAccount, Ids
from kvflow.cache.leases import Answer, LeaseEnded, LeaseTable, Outcome, Reader
from kvflow.cache.tickets import Grant, RankAddress
from kvflow.clock import Clock
from kvflow.errors import BlockIdsInvalid, KvflowError, RequestUnknown
from kvflow.ids import LeaseKey, worker_name
from kvflow.observability.events import OfferAdmitted, OfferRefused
from kvflow.observability.logs import Reporter
from kvflow.transfer.pairs import FEW, check_block_ids
from kvflow.worker.stages import Stage, later, require_open

ENDED_MAX = 65536
"""Outcomes that are kept for a late ``wait_offer``."""

_Waiting = Sequence[tuple["asyncio.Future[Outcome]", Outcome]]
"""Who waits for the end of a lease, and how it has ended."""


class LeaseKeeper:
    """Leases of one worker.

    Args:
        leases: the table, over the worker's epochs.
        account: of the worker's blocks, which it lends.
        num_blocks: blocks in the pool.
        block_sizes: tokens in one block, group by group; 0 for states, of which a request has one.
        lease_s: how long a renewed lease lasts.
        name: our own, ``engine/rank/incarnation``.
        clock: of the leases.
        loop: on which waiters are told.
        report: takes events.

    Thread: ``admit``, ``revoke`` and ``held`` from any thread; everything else on the event loop.
    """

    def __init__(
        self,
        *,
        leases: LeaseTable,
        account: BlockAccount,
        num_blocks: int,
        block_sizes: Sequence[int],
        lease_s: float,
        name: str,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        report: Reporter,
    ) -> None:
        self._name = name
        self._leases = leases
        self._account = account
        self._lent: dict[str, tuple[Ids, ...]] = {}
        self._num_blocks = num_blocks
        self._block_sizes = tuple(block_sizes)
        self._lease_s = lease_s
        self._clock = clock
        self._loop = loop
        self._report = report
        self._lock = threading.Lock()
        self._ended: OrderedDict[str, Outcome] = OrderedDict()
        self._waiters: dict[str, list[asyncio.Future[Outcome]]] = {}
        self._changed = asyncio.Event()
        self._looks_at = math.inf  # when ``expire_leases`` looks for leases that have run out
        self._idle: list[asyncio.Future[None]] = []
        self._around_ends: list[tuple[Callable[[Sequence[str]], object], Callable[[Sequence[str]], object]]] = []
        self._stage: Stage = "open"

    def call_around_ends(
        self, before: Callable[[Sequence[str]], object], after: Callable[[Sequence[str]], object]
    ) -> None:
        """Have both called with the requests whose leases end, on whatever thread ended them; they must be quick.

        Args:
            before: called before anyone hears of the ends.
            after: called when all listeners have.
        """
        self._around_ends.append((before, after))

    def require_open(self) -> None:
        """Refuse what would be a new promise.

        Raises:
            WorkerDraining, WorkerClosed: the worker makes none any more.
        """
        if self._stage != "open":
            require_open(self._stage, "takes no offers")

    def drain(self) -> None:
        """Refuse new leases, and keep those that are held."""
        with self._lock:
            self._stage = later(self._stage, "draining")

    async def wait_idle(self) -> None:
        """Wait until no lease is held; of use when new ones are refused.

        Cancellation: safe.
        """
        with self._lock:
            if not len(self._leases):
                return
            future: asyncio.Future[None] = self._loop.create_future()
            self._idle.append(future)
        try:
            await future
        finally:
            if future in self._idle:  # it gave up
                self._idle.remove(future)

    def admit(self, grant: Grant) -> None:
        """Hold the lease of a grant. See ``Worker.admit``."""
        try:
            self.hold(grant)
        except KvflowError as error:
            self.report_refusal(grant.request_id, error)
            raise

    def report_refusal(self, request_id: str, error: KvflowError) -> None:
        """Report an offer that ends before its lease is held: its ticket, if anybody has it, is void."""
        self._report(OfferRefused(str(request_id), error.code, error.message, error.remedy))

    def hold(self, grant: Grant) -> None:
        """Hold the lease of a grant; the caller reports a refusal."""
        ids = self._check(grant)
        with self._lock:
            if self._stage != "open":
                self.require_open()
            now = self._clock()
            self._account.lend(ids)
            try:
                end = self._leases.admit(grant, now)
            except BaseException:
                self._account.end_loan(ids)
                raise
            self._lent[grant.request_id] = ids
            self._ended.pop(grant.request_id, None)
            ends_at = now + grant.lease_ms / 1000
            # Most often it is in time: the first lease to end is one that was admitted before, and is waited for.
            looks_late = ends_at < self._looks_at or now >= self._looks_at
            if looks_late:
                self._looks_at = min(ends_at, self._looks_at)
            waiting = () if end is None else self._note([end])
        if self._report.wants(OfferAdmitted):
            self._report(OfferAdmitted(grant.request_id, sum(map(len, grant.block_ids)), grant.lease_s))
        if end is not None:
            self._announce([end], waiting)
        if looks_late:
            self._on_loop(self._changed.set)

    def revoke(self, request_id: str) -> bool:
        """End a lease now. See ``Worker.revoke``."""
        with self._lock:
            end = self._leases.revoke(request_id, self._clock())
            ended = [] if end is None else [end]
            waiting = self._note(ended)
        self._announce(ended, waiting)
        return bool(ended)

    def held(self) -> int:
        """Return how many leases are held."""
        with self._lock:
            return len(self._leases)

    def requests(self) -> tuple[str, ...]:
        """Return the requests whose leases are held."""
        with self._lock:
            return tuple(self._lent)

    def highest_epoch(self) -> int:
        """Return the highest epoch that any slot has held."""
        with self._lock:
            return self._leases.highest_epoch

    async def wait_offer(self, request_id: str) -> Outcome:
        """Wait until a lease has ended. See ``Worker.wait_offer``."""
        with self._lock:
            if request_id in self._ended:
                return self._ended[request_id]
            if request_id not in self._leases:
                raise RequestUnknown(request_id)
            future: asyncio.Future[Outcome] = self._loop.create_future()
            self._waiters.setdefault(request_id, []).append(future)
        try:
            return await future
        finally:
            self._forget(request_id, future)

    def on_release(self, leases: Sequence[LeaseKey], reader: Reader, *, read: bool = False) -> list[Answer]:
        """Count a reader's releases, which say whether it has read; answer each."""
        with self._lock:
            answers, ended = self._leases.release(leases, reader, self._clock(), read=read)
            waiting = self._note(ended)
        self._announce(ended, waiting)
        return answers

    def on_renew(self, leases: Sequence[LeaseKey]) -> tuple[list[Answer], float]:
        """Renew leases; answer each, with the seconds that they last from now."""
        with self._lock:
            return self._leases.renew(leases, self._clock()), self._lease_s

    def past(self, lease: LeaseKey) -> tuple[str, float] | None:
        """Return how a lease has ended, and how many seconds ago; None if that is not remembered."""
        with self._lock:
            past = self._leases.past(*lease)
            return None if past is None else (past.ended_by, self._clock() - past.ended_at)

    async def expire_leases(self) -> None:
        """End leases as they run out, for ever."""
        while True:
            self._changed.clear()
            now = self._clock()
            with self._lock:
                ended = self._leases.expire(now)
                waiting = self._note(ended)
                deadline = self._leases.next_deadline()
                self._looks_at = math.inf if deadline is None else deadline
            self._announce(ended, waiting)
            delay = None if deadline is None else max(0.0, deadline - now)
            try:
                # Not ``wait_for``: before Python 3.12 it loses a cancellation that comes together with the event.
                async with asyncio.timeout(delay):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def close(self) -> int:
        """Revoke every lease at once and refuse new ones; return how many there were."""
        with self._lock:
            self._stage = "closing"
            ended = self._leases.revoke_all(self._clock())
            waiting = self._note(ended)
        self._announce(ended, waiting)
        return len(ended)

    def check(self) -> None:
        """Check the law: what is lent is exactly the sum of the leases that are held."""
        with self._lock:
            self._account.check(lent=self._lent.values())

    def _check(self, grant: Grant) -> tuple[Ids, ...]:
        """Refuse a grant that is not for this worker in this life, or that does not fit its cache; return its ids."""
        # By its name only: a mint may know us by another endpoint than we do.
        if self._name not in _names(grant.engine_id, grant.ranks):
            raise BlockIdsInvalid(
                f"the grant for {grant.request_id!r} does not name this worker, {self._name}",
                remedy="Make a new mint with the rank_address of every worker after a restart.",
            )
        checked = check_block_ids(
            grant.block_ids, num_blocks=self._num_blocks, aliases=self._account.aliases, unique=False
        )
        for group, (ids, tokens, size) in enumerate(
            zip(grant.block_ids, grant.num_tokens, self._block_sizes, strict=True)
        ):
            most = -(-tokens // size) if size else 1  # a request has one state
            if len(ids) > most:
                raise BlockIdsInvalid(
                    f"group {group}: {len(ids)} blocks for {tokens} tokens, which at most {most} can hold",
                    group=group,
                    remedy="The last block of a list must hold the last token: leave out blocks behind it.",
                )
        return checked

    def _note(self, ended: Sequence[LeaseEnded]) -> _Waiting:
        """Remember that leases have ended, and return who waits for that; under the lock."""
        if not ended:
            return ()
        outcome = ended[0].outcome  # of them all
        names = [end.request_id for end in ended]
        self._account.end_loan(_joined([self._lent.pop(name) for name in names]))
        self._ended.update(dict.fromkeys(names, outcome))
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        if not self._waiters:
            return ()
        return [(future, outcome) for name in names for future in self._waiters.pop(name, ())]

    def _announce(self, ended: Sequence[LeaseEnded], waiting: _Waiting) -> None:
        """Tell of ends; not under the lock, because whoever is told may ask in turn, or wait for a thread that does."""
        if not ended:
            return
        # Whoever hears of it may offer in turn, so its slot must be free by then; but not its name, because the
        # end must not be taken for that of the next offer of that name.
        names = [end.request_id for end in ended]
        for before, _ in self._around_ends:
            before(names)
        if ended[0].outcome == "expired" or self._report.wants(LeaseEnded):
            self._report.take_all([(end, {}) for end in ended])
        for _, after in self._around_ends:
            after(names)
        if waiting:
            self._on_loop(_resolve, waiting)
        if self._idle:
            self._on_loop(self._tell_if_idle)

    def _forget(self, request_id: str, future: "asyncio.Future[Outcome]") -> None:
        """Drop one that waits no more: whoever asks again and again, with a time limit, must not fill the list."""
        with self._lock:
            waiters = self._waiters.get(request_id, [])
            if future in waiters:
                waiters.remove(future)
                if not waiters:
                    del self._waiters[request_id]

    def _tell_if_idle(self) -> None:
        if not self.held():
            waiting, self._idle = self._idle, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def _on_loop(self, call: Callable[..., object], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)


@lru_cache(maxsize=64)
def _names(engine_id: str, ranks: tuple[RankAddress, ...]) -> frozenset[str]:
    """Return the workers that a grant names: the same ones in every grant of an engine."""
    return frozenset(worker_name(engine_id, rank.rank, rank.incarnation) for rank in ranks)


def order_stores() -> None:
    """Keep every store of this thread before the call ahead of every store after it, on weakly ordered machines, too.

    To release a lock and then to acquire one is such a barrier on every machine that CPython runs on; either of them
    alone is not. "Why no stale byte is delivered" in the architecture says why. The lock is nobody else's, so that
    nothing is waited for.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


def _joined(loans: Sequence[tuple[Ids, ...]]) -> Sequence[Ids]:
    """Return the blocks of many loans, group by group: a block stands there once for each loan that has it."""
    if len(loans) == 1:
        return loans[0]
    joined: list[Ids] = []
    for lists in zip(*loans, strict=True):
        few = list(chain.from_iterable(ids for ids in lists if isinstance(ids, list)))
        many = [ids for ids in lists if not isinstance(ids, list)]
        joined.append(np.concatenate([np.array(few, np.int64), *many]) if many or len(few) > FEW else few)
    return joined


def _resolve(waiting: _Waiting) -> None:
    for future, outcome in waiting:
        if not future.done():
            future.set_result(outcome)
