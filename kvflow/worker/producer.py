"""The producer's side of a worker: offers, their leases, and the ends of these leases.

An engine calls ``offer``, ``admit`` and ``revoke`` from any thread. They are effective on return: one lock guards the
ticket issuer and the lease table, and a lease's epoch is raised under it.

A lease ends in two phases. First, under the lock, its epoch is raised, and its slot and blocks are freed. Then the end
is reported. Only after that is the request id free, so no caller can mistake this end for the end of the next offer
with this id.
"""

import asyncio
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import NamedTuple

from kvflow.errors import BlockIdsInvalid, CapacityExceeded, ConfigInvalid, KvflowError, RequestUnknown, shown
from kvflow.events import TIMED_OUT, LeaseEnded, OfferAdmitted, OfferRefused, Outcome
from kvflow.ids import Ids, LeaseKey, worker_name
from kvflow.leases.blocks import (
    as_digest_lists,
    as_ids,
    blocks_for,
    check_block_ids,
    complete_digests,
    join_loans,
)
from kvflow.leases.held import OpenGroups
from kvflow.leases.issuer import Issuer
from kvflow.leases.table import LeaseState, LeaseTable, Reader, ReaderAnswer
from kvflow.leases.tickets import Grant, Kind, RankAddress, Ticket
from kvflow.reads.serving import order_memory
from kvflow.worker.answers import Answers, Vouches
from kvflow.worker.environment import Shared

ENDED_MAX = 65536  # outcomes that are kept for a late ``wait_offer``

REFUSAL = "takes no offers"

WAITING_MAX = 4096  # offers that may wait for a slot: as many as there are slots

Digests = Sequence[Sequence[bytes]] | None
"""The content of each block of an offer, group by group; None if the engine does not give it."""

_Waiters = Sequence[tuple["asyncio.Future[Outcome]", Outcome]]
"""Futures of ``wait_offer`` calls whose leases have ended, each with the outcome."""

_Ends = tuple[Sequence[LeaseEnded], _Waiters]
"""Leases that have ended and are not announced yet, and who waits for that."""


class OfferRequest(NamedTuple):
    """The arguments of ``Worker.offer``, and the kind of the lease."""

    request_id: str
    block_ids: Sequence[Sequence[int]]
    num_tokens: int | Sequence[int]
    digests: Digests = None
    traceparent: str = ""
    kind: Kind = "offer"


@dataclass(slots=True, eq=False)
class _WaitingOffer:
    offer: OfferRequest
    ticket: asyncio.Future[Ticket]


class LeaseManager:
    """Offers and leases of one worker. ``issuer`` assigns slots, and signs the tickets of the worker's own offers.

    ``vouches``: see ``Serving``.

    ``answers``: to the questions of members about these leases.

    Thread: ``offer``, ``admit``, ``advance``, ``revoke``, ``listed``, ``requests`` and ``highest_epoch`` from any
        thread; everything else on the event loop.
    """

    def __init__(self, shared: Shared, leases: LeaseTable, issuer: Issuer, vouches: Vouches) -> None:
        identity, manifest = shared.local.identity, shared.manifest
        self._name = worker_name(identity.engine_id, identity.rank, identity.incarnation)
        self._leases = leases
        self._account = shared.account
        self._issuer = issuer
        self._lent: dict[str, tuple[Ids, ...]] = {}
        self._num_blocks = manifest.num_blocks
        self._groups = OpenGroups.of(manifest)
        self._lease_s, self._unread_s = shared.config.lease_s, shared.config.tuning.unread_s
        self._offers = shared.config.role != "consumer"
        self._lifecycle = shared.lifecycle
        self._clock = shared.environment.clock
        self._loop = asyncio.get_running_loop()
        self._report = shared.report
        self._lock = threading.Lock()
        self.answers = Answers(
            leases,
            self._groups,
            self._lock,
            sign=issuer.sign_again,
            vouches=vouches,
            clock=self._clock,
            keys_differ=shared.local.security.allowed is not None,
            tells=shared.config.tuning.tell,
        )
        self._ended: OrderedDict[str, Outcome] = OrderedDict()
        self._waiters: dict[str, list[asyncio.Future[Outcome]]] = {}
        self._waiting_offers: deque[_WaitingOffer] = deque()
        self._changed = asyncio.Event()
        self._expires_at = math.inf  # when ``expire_leases`` runs next

    def offer(self, offer: OfferRequest) -> Ticket:
        """Sign a ticket and hold its lease."""
        try:
            return self._offer(offer)
        except KvflowError as error:
            self._report_refusal(offer.request_id, error)
            raise

    async def offer_when_possible(self, offer: OfferRequest, timeout_s: float | None) -> Ticket:
        """Wait for a slot, then offer."""
        try:
            if len(self._waiting_offers) >= WAITING_MAX:
                raise CapacityExceeded("offers that wait for a slot", WAITING_MAX)
            waiting = _WaitingOffer(offer, self._loop.create_future())
            self._waiting_offers.append(waiting)
            # Also if others wait: no waiter learns about a slot that was freed before this offer was in the queue.
            self._serve_waiting()
            return await self._wait_for_slot(waiting, timeout_s)
        except KvflowError as error:
            self._report_refusal(offer.request_id, error)
            raise

    def admit(self, grant: Grant, digests: Digests = None) -> None:
        """Hold the lease of a grant that a mint elsewhere signed. ``digests``: by which peers find what is kept."""
        try:
            ids = self._check(grant)
            found = self._digests_of(grant, digests)
            whole = self._groups.whole_digests(grant, found)
            with self._lock:
                ends = self._hold(grant, ids, found, whole)
        except KvflowError as error:
            self._report_refusal(grant.request_id, error)
            raise
        self._announce_admission(grant, ends)

    def advance(
        self,
        request_id: str,
        num_tokens: int | None,
        new_block_ids: Sequence[Sequence[int]] = (),
        digests: Digests = None,
    ) -> bool:
        """Say what else has settled of an open lease, and renew it; ``num_tokens`` None: all, so that it is sealed.

        Return False if it has ended.
        """
        new_ids = new_block_ids or [()] * len(self._groups.sizes)
        ids = check_block_ids(new_ids, num_blocks=self._num_blocks, aliases=self._account.aliases, unique=False)
        new = tuple([each if isinstance(each, tuple) else tuple(each.tolist()) for each in ids])
        sealed = num_tokens is None
        with self._lock:
            lease = self._leases.unsealed(request_id)
            if lease is None:
                return False
            most = lease.grant.num_tokens[0]
            try:
                settled = most if num_tokens is None else index(num_tokens)
            except TypeError as error:
                raise BlockIdsInvalid(f"num_tokens must be an integer, not {shown(num_tokens)}") from error
            if not lease.settled <= settled <= most:
                fault = f"num_tokens is {settled}: {lease.settled} tokens have settled, of {most}"
                raise BlockIdsInvalid(fault, remedy="Advance to more tokens, up to those of the offer.")
            whole = self._groups.whole(settled)
            blocks, told = self._groups.extend(lease.grant, lease.blocks, lease.told, new, whole, sealed=sealed)
            found = self._digests_of(lease.grant, digests)
            self._account.lend(ids)
            lease.told |= told
            self._lent[request_id] = as_ids(blocks) if sealed else blocks
            ends = self._groups.counts(whole)
            served = blocks if sealed else tuple([each[:end] for each, end in zip(blocks, ends, strict=True)])
            order_memory()  # a reader that learns what has settled also sees its bytes
            self._leases.advance(lease, blocks, served, settled, self._clock(), sealed=sealed)
            if found:
                self._leases.name(lease, found[-1])
            self.answers.note((request_id, *found))
        return True

    def revoke(self, request_id: str, grant: Grant | None = None) -> bool:
        """End a lease now. ``grant``: which is void, also if it was not admitted."""
        with self._lock:
            ends = self._note(self._leases.revoke(request_id, self._clock()))
        self._announce(*ends)
        if grant is not None and self._name in _names(grant.engine_id, grant.ranks):
            self._void(grant)
        return bool(ends[0])

    def _void(self, grant: Grant) -> None:
        with self._lock:
            ended = self._leases.void(grant, self._clock())
            self.answers.note([grant.slot])
            ends = self._note(ended)
        self._announce(*ends)

    def listed(self, limit: int) -> tuple[LeaseState, ...]:
        """Return the leases that are held, at most ``limit``, the oldest first."""
        with self._lock:
            return self._leases.listed(self._clock(), limit)

    def __len__(self) -> int:
        with self._lock:
            return len(self._lent)

    def requests(self) -> tuple[str, ...]:
        """Return the requests whose leases are held."""
        with self._lock:
            return tuple(self._lent)

    def highest_epoch(self) -> int:
        """Return the highest epoch that any slot has held."""
        with self._lock:
            return self._leases.highest_epoch

    async def wait_offer(self, request_id: str) -> Outcome:
        """Wait until a lease has ended."""
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
            self._drop_waiter(request_id, future)

    async def wait_idle(self) -> None:
        """Wait until no lease is held, when new ones are refused. Cancellation: safe."""
        while requests := self.requests():
            with suppress(RequestUnknown):  # it has ended, and its outcome was dropped
                await self.wait_offer(requests[0])

    def on_release(self, leases: Sequence[LeaseKey], reader: Reader, *, read: bool = False) -> list[ReaderAnswer]:
        """Count the releases of a reader, which has read the blocks or not, and answer each."""
        with self._lock:
            answers, ended = self._leases.release(leases, reader, self._clock(), read=read)
            ends = self._note(ended)
            if self.answers.at and "held" in answers:  # one that was given back may answer another question
                for slot, epoch in leases:
                    lease = self._leases.held(slot, epoch)
                    if lease is not None:
                        self.answers.note(lease.names.for_one)
        self._announce(*ends)
        return answers

    def on_renew(self, leases: Sequence[LeaseKey], reader: Reader | None = None) -> tuple[list[ReaderAnswer], float]:
        """Renew leases for a reader. Return an answer for each, and how many seconds they last from now."""
        with self._lock:
            return self._leases.renew(leases, self._clock(), reader), self._lease_s

    def past(self, lease: LeaseKey) -> tuple[str, float] | None:
        """Return how a lease has ended and how many seconds ago; None if unknown."""
        with self._lock:
            past = self._leases.past(*lease)
            return None if past is None else (past.ended_by, self._clock() - past.ended_at)

    async def expire_leases(self) -> None:
        """End leases as they expire. Runs until it is cancelled."""
        while True:
            self._changed.clear()
            now = self._clock()
            with self._lock:
                ends = self._note(self._leases.expire(now, self.answers.at))
                deadline = self._leases.next_deadline()
                self._expires_at = math.inf if deadline is None else deadline
            self._announce(*ends)
            delay = None if deadline is None else max(0.0, deadline - now)
            try:
                # Not ``wait_for``: before Python 3.12 it loses a cancellation that comes together with the event.
                async with asyncio.timeout(delay):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def drain(self, kept_s: float) -> None:
        """Refuse new leases. End those that are kept in ``kept_s``, if ``end_kept`` has not, and no others."""
        self._stop(self._lifecycle.drain, lambda _: [])
        self._loop.call_later(kept_s, self.end_kept)

    def end_kept(self) -> None:
        """End the leases that are kept, in a worker that drains."""
        self._stop(self._lifecycle.drain, self._leases.revoke_kept)

    def close(self) -> int:
        """Revoke every lease at once and refuse new ones. Return how many leases there were."""
        return self._stop(self._lifecycle.close, self._leases.revoke_all)

    def _stop(self, refuse: Callable[[], None], revoke: Callable[[float], list[LeaseEnded]]) -> int:
        with self._lock:
            refuse()
            ends = self._note(revoke(self._clock()))
        self._announce(*ends)
        self._serve_waiting()
        return len(ends[0])

    def check(self) -> None:
        """Check the invariant: what is lent is exactly the sum of the held leases."""
        with self._lock:
            self._account.check(lent=self._lent.values())

    def _offer(self, offer: OfferRequest, waiting: _WaitingOffer | None = None) -> Ticket:
        """Hold the lease of an offer that is the first of those that wait, or that leaves each of them a slot."""
        if self._lifecycle.stage != "open":
            self._lifecycle.require_open(REFUSAL)
        with self._lock:
            line, most = len(self._waiting_offers), self._issuer.slots
            if waiting is None and line and line + self._leases.num_offers >= most:
                raise CapacityExceeded(
                    "leases beside the offers that wait",
                    most,
                    remedy="Wait for a slot in turn with offer_when_possible, or raise lease_slots.",
                )
            ticket, grant = self._issuer.issue(*offer[:5], kind=offer.kind)
            found = tuple(offer.digests[0]) if offer.digests and grant.contents else ()
            try:
                ids = self._check(grant, decoded=True)
                ends = self._hold(grant, ids, found, self._groups.whole_digests(grant, found))
            except BaseException:
                self._issuer.retire(offer.request_id)
                raise
            if waiting is not None:
                self._waiting_offers.popleft()  # with the slot, so that ``offer`` never counts it twice
        self._announce_admission(grant, ends)
        return ticket

    def _digests_of(self, grant: Grant, digests: Digests) -> tuple[bytes, ...]:
        """Return the digests of the first group, by which peers find a lease; none if there are none yet."""
        if digests is None:
            return ()
        if not grant.is_open:
            return as_digest_lists("digests", digests, grant.block_ids)[0]
        complete = complete_digests(digests, self._groups.sizes, grant.num_tokens)
        return complete[0] if complete else ()

    async def _wait_for_slot(self, waiting: _WaitingOffer, timeout_s: float | None) -> Ticket:
        try:
            async with asyncio.timeout(timeout_s):
                return await waiting.ticket
        except TimeoutError:
            if waiting.ticket.done() and not waiting.ticket.cancelled():
                return waiting.ticket.result()  # it came at the last moment
            self._leave(waiting)
            remedy = f"Its turn did not come within {timeout_s} s: wait for longer, or raise lease_slots."
            raise CapacityExceeded("leases", self._issuer.slots, remedy=remedy) from None
        except asyncio.CancelledError:
            if _has_ticket(waiting):
                self.revoke(waiting.offer.request_id)  # the caller never gets this ticket
            self._leave(waiting)
            raise

    def _serve_waiting(self) -> None:
        """Serve waiting offers, first come, first served, until every slot is taken or none waits."""
        while self._waiting_offers:
            waiting = self._waiting_offers[0]
            if waiting.ticket.cancelled():  # its caller may have been cancelled and not run yet
                self._waiting_offers.popleft()
                continue
            try:
                ticket = self._offer(waiting.offer, waiting)
            except CapacityExceeded:
                return  # the end of the next lease calls this again
            except Exception as error:  # noqa: BLE001 - its caller gets it; later ones must be served
                self._waiting_offers.popleft()
                waiting.ticket.set_exception(error)
            else:
                waiting.ticket.set_result(ticket)

    def _leave(self, waiting: _WaitingOffer) -> None:
        waiting.ticket.cancel()
        if waiting in self._waiting_offers:
            self._waiting_offers.remove(waiting)

    def _report_refusal(self, request_id: str, error: KvflowError) -> None:
        """Report an offer that failed before its lease was held. Its ticket is void."""
        self._report(OfferRefused(str(request_id), error.code, error.message, error.remedy))

    def _check(self, grant: Grant, *, decoded: bool = False) -> tuple[Ids, ...]:
        """Refuse a grant for another worker or incarnation, or that does not fit the cache. Return its blocks.

        ``decoded``: whether its fields were checked: a grant is decoded again before it is signed.
        """
        if not self._offers:
            raise ConfigInvalid(
                "the role of this worker is consumer, so that its peers cannot read its cache",
                remedy="Set role to both, or to producer.",
            )
        # Compare the name only: a mint may know this worker by another endpoint.
        if self._name not in _names(grant.engine_id, grant.ranks):
            raise BlockIdsInvalid(
                f"the grant for {grant.request_id!r} does not name this worker, {self._name}",
                remedy="Make a new mint with the rank_address of every worker after a restart.",
            )
        checked = check_block_ids(
            grant.block_ids, num_blocks=self._num_blocks, aliases=self._account.aliases, unique=False, decoded=decoded
        )
        for group, (ids, tokens, size) in enumerate(
            zip(grant.block_ids, grant.num_tokens, self._groups.sizes, strict=True)
        ):
            most = blocks_for(tokens, size)
            if len(ids) > most:
                raise BlockIdsInvalid(
                    f"group {group}: {len(ids)} blocks for {tokens} tokens, which at most {most} can hold",
                    group=group,
                    remedy="The last block of a list must hold the last token: leave out blocks behind it.",
                )
            if len(ids) < most and not grant.is_open and len(ids) < (least := self._groups.least(group, tokens)):
                raise BlockIdsInvalid(
                    f"group {group}: {len(ids)} blocks for {tokens} tokens, and the next token needs the last {least}",
                    group=group,
                    remedy="List each of these blocks; -1 stands for one that is absent.",
                )
        return checked

    def _hold(
        self, grant: Grant, ids: tuple[Ids, ...], digests: tuple[bytes, ...], whole: tuple[bytes, ...] | None
    ) -> _Ends:
        """Hold the lease of a grant, under the lock. It ends at once if its readers have already released it.

        A lease that left its slot to this one ends. ``whole``: see ``Lease``.
        """
        if self._lifecycle.stage != "open":
            self._lifecycle.require_open(REFUSAL)
        now, told = self._clock(), None
        if grant.is_open:
            nothing = ((),) * len(grant.block_ids)
            _, told = self._groups.extend(grant, nothing, set(), grant.block_ids, 0, sealed=False)
        self._account.lend(ids)
        try:
            ended = self._leases.admit(grant, now, digests, told, whole)
        except BaseException:
            self._account.end_loan(ids)
            raise
        self._lent[grant.request_id] = ids
        self._ended.pop(grant.request_id, None)
        expires_at = now + min(grant.lease_ms / 1000, self._unread_s) if grant.ends_by_readers else math.inf
        # Usually ``expire_leases`` need not wake: the first lease to expire was admitted before.
        if expires_at < self._expires_at or now >= self._expires_at:
            self._expires_at = min(expires_at, self._expires_at)
            self._on_loop(self._changed.set)
        if self.answers.at:
            self.answers.note([grant.slot, *digests])
        return self._note(ended) if ended else ((), ())

    def _note(self, ended: Sequence[LeaseEnded]) -> _Ends:
        """Free the blocks and slots of ended leases, under the lock. Return them, and who waits for these ends."""
        if not ended:
            return (), ()
        names = [end.request_id for end in ended]
        self._account.end_loan(join_loans([self._lent.pop(name) for name in names]))
        self._issuer.vacate(names)
        if self.answers.at:
            self.answers.note(names)
        for end in ended:
            self._ended[end.request_id] = end.outcome
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        if not self._waiters:
            return ended, ()
        return ended, [(future, end.outcome) for end in ended for future in self._waiters.pop(end.request_id, ())]

    def _announce_admission(self, grant: Grant, ends: _Ends) -> None:
        if self._report.wants(OfferAdmitted):
            lease_s = grant.lease_s if grant.ends_by_readers else 0.0
            blocks = sum(map(len, grant.block_ids))
            self._report(OfferAdmitted(grant.request_id, blocks, lease_s, grant.trace, grant.kind))
        if ends[0]:
            self._announce(*ends)

    def _announce(self, ended: Sequence[LeaseEnded], waiters: _Waiters) -> None:
        """Report ends, then free their request ids. The lock is not held, because a hook may call this manager."""
        if not ended:
            return
        if ended[0].outcome in TIMED_OUT or self._report.wants(LeaseEnded):
            self._report.take_all([(end, {}) for end in ended])
        with self._lock:
            for end in ended:
                self._issuer.retire(end.request_id)
        if waiters:
            self._on_loop(_resolve, waiters)
        if self._waiting_offers:
            self._on_loop(self._serve_waiting)

    def _drop_waiter(self, request_id: str, future: "asyncio.Future[Outcome]") -> None:
        """Drop the future of a caller that gave up, so that repeated timeouts do not fill the list."""
        with self._lock:
            waiters = self._waiters.get(request_id, [])
            if future in waiters:
                waiters.remove(future)
                if not waiters:
                    del self._waiters[request_id]

    def _on_loop(self, call: Callable[..., object], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)


@lru_cache(maxsize=64)
def _names(engine_id: str, ranks: tuple[RankAddress, ...]) -> frozenset[str]:
    """Return the names of the workers in a grant. Cached, because all grants of an engine name the same workers."""
    return frozenset(worker_name(engine_id, rank.rank, rank.incarnation) for rank in ranks)


def _resolve(waiters: _Waiters) -> None:
    for future, outcome in waiters:
        if not future.done():
            future.set_result(outcome)


def _has_ticket(waiting: _WaitingOffer) -> bool:
    future = waiting.ticket
    return future.done() and not future.cancelled() and future.exception() is None
