"""The consumer's side of a worker: pulls, from a ticket to a report.

This module carries out what the scheduler decides. If all peers of a ticket are connected, the call that starts a pull
also checks it, pairs its blocks and posts its reads. Otherwise a task connects the peers first.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from itertools import islice
from typing import Any, cast

from msgspec.structs import replace

from kvflow.errors import (
    ArgumentInvalid,
    CapacityExceeded,
    ContentMismatch,
    DeadlineExceeded,
    KvflowError,
    StaleLease,
    TicketInvalid,
    TransferCancelled,
)
from kvflow.events import PullFailed, ReaderReset, TransferQuiesced, TransferStarted
from kvflow.ids import PeerId
from kvflow.leases.blocks import as_digest_lists, check_block_ids
from kvflow.leases.tickets import Member, Ticket, lease_name
from kvflow.reads import contract
from kvflow.reads.contract import (
    PRIORITY_MAX,
    TURN_S_MAX,
    CancelReads,
    PeerAdded,
    PeerFailed,
    RankRead,
    RateLearned,
    ReadEnded,
    TransportEvent,
)
from kvflow.reads.pacing import HandOver
from kvflow.reads.pulls import Pull, SourceRank
from kvflow.reads.scheduler import Delivered, Effect, LeaseEarly, Scheduler, StartReads
from kvflow.rendezvous.issuer import TicketKey
from kvflow.rendezvous.questions import LEASES_ASKED_MAX
from kvflow.worker.askers import PrefixReader
from kvflow.worker.connections import CANCELLED, as_ours, transfer_error
from kvflow.worker.destinations import DUE_AFTER_S, DestinationTable, Quarantined, ReaderResetPolicy
from kvflow.worker.environment import Shared
from kvflow.worker.following import Following
from kvflow.worker.open_pulls import OpenPull, OpenPulls, PullHandle
from kvflow.worker.peers import PeerPool
from kvflow.worker.prepared import Route, parts_of, require_content
from kvflow.worker.renewals import LeaseRenewer
from kvflow.worker.snapshot import PullState, state_of

TICK_S = 0.02  # interval at which deadlines are checked while the data plane has a read

RETRY_S_MAX = 0.5
"""Longest time between two reads of an early lease of which its producer says nothing new, or lies. It grows with the
time since the lease was found early, because an engine may take seconds."""

REVOCATION_PAUSE_S = 0.5
"""Pause between two questions to other ranks: nearly all leases are admitted before the first."""

BlockLists = Sequence[Sequence[int]]
PullItem = tuple[Ticket, BlockLists] | tuple[Ticket, BlockLists, str]
"""A ticket, our block ids for it, and optionally the engine's own name of the request."""


class Consumer:
    """The pulls of one worker, their peers, and the leases that they renew. Thread: the event loop."""

    def __init__(self, shared: Shared, tasks: asyncio.TaskGroup, key: TicketKey) -> None:
        environment, tuning = shared.environment, shared.config.tuning
        self.peers = PeerPool(shared, tasks, self.on_peer_dropped)
        security = shared.local.security
        self.prefixes = PrefixReader(tasks, shared.config, network=environment.network, security=security)
        self._destinations = DestinationTable(shared.account)
        self._early: dict[PeerId, list[SourceRank]] = {}  # to be asked for in this turn
        self._reset_policy = ReaderResetPolicy(tuning, shared.bytes_per_block)
        self._transport = shared.transport
        self._shared = shared
        self.key = key
        self._tasks = tasks
        self._lifecycle = shared.lifecycle
        self._report = shared.report
        self._clock, wall = environment.clock, environment.network.wall
        self.pulls = OpenPulls(
            pool=self.peers,
            clock=self._clock,
            wall=wall,
            report=self._report,
            cancel=self._cancel_by_id,
            log_every=tuning.log_every,
        )
        self._pulls_max = environment.pulls_max
        self._scheduler = Scheduler(tuning)
        self._renewals = LeaseRenewer(self.peers, self._clock, tuning.compute_s)
        self._fresh: list[OpenPull] = []  # opened since the last tick
        self._busy = asyncio.Event()
        self._collected: dict[int, OpenPull] = {}  # checked, but not posted yet
        self._collecting = False
        self._turn_until: float | None = None
        self._handing_over = HandOver()
        self.posted_inline = self.posted_on_thread = 0  # reads of pulls since the start

    def start(
        self,
        ticket: Ticket,
        block_ids: BlockLists,
        *,
        priority: int = 0,
        local_request_id: str = "",
        expected_digests: Sequence[Sequence[bytes]] | None = None,
    ) -> PullHandle:
        """Start to read a ticket's blocks into ours; the handle has every failure."""
        pull = self.pulls.begin(ticket, local_request_id)
        try:
            if priority != 0:
                _check_priority(priority)
                pull.priority = priority
            if self._lifecycle.stage != "open":
                self._lifecycle.require_open("pulls nothing")
            if len(self.pulls.by_id) >= self._pulls_max:
                raise CapacityExceeded("open pulls", self._pulls_max)
            self.key.check(ticket)
            if self._renewals.held:
                self._renewals.end_ticket(ticket.members(), local_request_id)
            pull.targets = check_block_ids(
                block_ids, num_blocks=self._shared.manifest.num_blocks, aliases=self._destinations.aliases, unique=True
            )
            if expected_digests is not None:
                pull.expected = as_digest_lists("expected_digests", expected_digests, pull.targets)
            route = self.peers.route(ticket)
            if route is None:
                pull.held = self._renewals.start(ticket.members())
                self.pulls.by_id[pull.pull_id] = pull
                closing = TransferCancelled("the worker is closing", request_id=pull.request_id)
                self._spawn(self._connect(pull, ticket), pull, closing)
            else:
                self._begin(pull, ticket, route)
        except Exception as error:  # noqa: BLE001 - the handle tells
            self._fail(pull, error)
        return pull.handle

    def start_many(self, batch: Sequence[tuple[Ticket, BlockLists, str]], *, priority: int = 0) -> list[PullHandle]:
        """Start many pulls and hand them to the data plane together."""
        before, self._collecting = self._collecting, True
        handles = [
            self.start(ticket, block_ids, priority=priority, local_request_id=name) for ticket, block_ids, name in batch
        ]
        self._collecting = before
        self._flush()
        return handles

    def hold(self, ticket: Ticket, local_request_id: str) -> None:
        """Renew a ticket's leases until it is pulled or released."""
        self._lifecycle.require_open("holds nothing")
        self.key.check(ticket)
        self._renewals.hold_ticket(ticket.members(), local_request_id)

    async def release(self, ticket: Ticket, local_request_id: str) -> None:
        """Release a ticket without reading it."""
        self._lifecycle.require_running("releases nothing")
        self.key.check(ticket)
        await self._renewals.release_ticket(tuple(ticket.members()), local_request_id)

    def check(self) -> None:
        """Check the invariants of destination blocks and of reads in flight."""
        self._destinations.check()
        self._scheduler.check()

    def listed(self, limit: int) -> tuple[PullState, ...]:
        """Return the pulls that are open or draining, at most ``limit``, the oldest first."""
        now = self._clock()
        return tuple(state_of(pull, now) for pull in islice(self.pulls.by_id.values(), limit))

    def quarantined(self) -> list[Quarantined]:
        """Return the destinations of ended pulls into which a read may still write."""
        return self._destinations.quarantined()

    def on_transport_event(self, event: TransportEvent) -> None:
        """Handle an event of the data plane."""
        match event:
            case ReadEnded():
                now = self._clock()
                if event.read_id == self._handing_over.read_id:
                    self._handing_over.end(event, now)
                self._apply(self._scheduler.on_read_ended(event, now))
            case PeerAdded(peer=peer, carrier=carrier):
                self.peers.on_added(peer, carrier)
            case RateLearned():
                self.peers.on_measured(event)
            case PeerFailed(peer=peer, code=code, detail=detail):
                self.peers.on_failed(peer, code, detail)
                self.on_peer_dropped(peer, code, detail)
            case contract.ResetDone():
                reason = self._reset_policy.ended()
                if event.ended:
                    self._report(
                        ReaderReset(reason.setting, reason.num_blocks, event.ended, event.drain_s, event.reset_s)
                    )

    def on_peer_dropped(self, peer: PeerId, code: str, detail: str) -> None:
        """Fail every pull that needs a peer that was dropped."""
        self._flush()
        now = self._clock()
        self._apply(self._scheduler.on_peer_failed(peer, code=code, detail=detail, now=now))
        for pull in tuple(self.pulls.by_id.values()):
            if pull.following is None or not pull.following.needs(peer):
                continue
            if pull.submitted:  # what it still reads may be of other ranks
                self._apply(self._scheduler.cancel(pull.pull_id, code=code, detail=detail, peer=peer, now=now))
            else:
                pull.failure = PullFailed(
                    pull.pull_id, pull.request_id, code, pull.step, str(peer), detail, quarantined=False
                )
                self._give_up(pull, transfer_error(pull.failure))

    async def tick_while_busy(self) -> None:
        """Apply deadlines until cancelled; sleep while no pull is open."""
        while True:
            await self._busy.wait()
            await asyncio.sleep(TICK_S)  # before the first check: most pulls have ended by then
            now = self._clock()
            self._apply(self._scheduler.tick(now))
            self._renew_leases()
            starved = self._transport.staging().starved
            if self._reset_policy.due(self._destinations.standing(now, DUE_AFTER_S), now, starved=starved):
                self._transport.reset_reader()
            if not self._scheduler.busy:
                self._busy.clear()

    def _renew_leases(self) -> None:
        """Renew the leases of pulls that were opened since the last tick and are still open."""
        fresh, self._fresh = self._fresh, []
        for pull in fresh:
            if pull.ticket is not None and not pull.handle.done():
                pull.held = self._renewals.start(pull.ticket.members())

    def close(self) -> int:
        """Cancel every open pull; return how many were open."""
        open_pulls = list(self.pulls.by_id.values())
        for pull in open_pulls:
            self._cancel(pull, "the worker is closing")
        self._renewals.close()
        self.prefixes.close()
        return len(open_pulls)

    async def _connect(self, pull: OpenPull, ticket: Ticket) -> None:
        """Connect the peers of a ticket, then begin to read."""

        def blame(member: Member) -> None:
            pull.peer = pull.peer or str(member.peer)  # the first peer that could not be connected

        pull.step = "handshake"
        try:
            route = await self.peers.connect_ticket(ticket, blame)
            if not pull.handle.done():  # not cancelled meanwhile
                self._lifecycle.require_running("pulls nothing")  # a draining worker finishes what was started before
                self._begin(pull, ticket, route)
        except Exception as error:  # noqa: BLE001 - the handle tells
            self._fail(pull, error)

    def _begin(self, pull: OpenPull, ticket: Ticket, route: Route) -> None:
        """Pair block ids, take our blocks, and post the reads. An exception leaves everything as it was."""
        pull.step, pull.route = "plan", route
        grants = ticket.grants
        reads: list[RankRead] = []
        nbytes = 0
        for peer, at, prepared in route.sources:
            grant = grants[at]
            peer.issued_ms = max(peer.issued_ms, grant.issued_ms or 0)
            if grant.slot >= peer.num_slots:
                raise TicketInvalid(f"{peer.link.peer} has no epoch slot {grant.slot}")
            if grant.is_open:  # not to be read before its producer was asked
                self._follow(pull, ticket)
                return
            lease = lease_name(ticket, at)
            parts = parts_of(grant, peer, prepared, pull.targets)
            if pull.expected is not None:
                require_content(grant, prepared, self._shared.manifest, pull.expected)
            if parts:
                first = not grant.admitted or peer.link.may_be_over(grant)
                read_id = next(self._scheduler.read_ids)
                reads.append(RankRead(read_id, peer.link.peer, lease, parts, first, pull.priority))
                for part in parts:
                    assert part.binding is not None
                    nbytes += len(part.pairs.source) * part.binding.unit_bytes
        pull.nbytes, now = nbytes, self._clock()
        pull.submitted_at = now
        if not reads:  # every target block is absent
            self._complete(pull)
            return
        self._destinations.take(pull.pull_id, pull.targets)
        pull.ranges = (Pull(pull.pull_id, pull.request_id, now, reads, nbytes),)
        if self._turn_until is None:
            self._turn_until = now + TURN_S_MAX / 2
            asyncio.get_running_loop().call_soon(self._end_turn)
        if self._collecting or now > self._turn_until:
            pull.step = "queue"
            self.pulls.by_id[pull.pull_id] = self._collected[pull.pull_id] = pull
        else:
            self._hand_over([pull])

    def _follow(self, pull: OpenPull, ticket: Ticket) -> None:
        """Take our blocks, and read an open offer, range by range, while its producer computes it."""
        manifest, tuning = self._shared.manifest, self._shared.config.tuning
        following = Following(ticket, pull.route.sources, pull.targets, manifest, tuning)
        if pull.expected is not None:
            for _, at, prepared in pull.route.sources:
                require_content(ticket.grants[at], prepared, manifest, pull.expected)
        self._destinations.take(pull.pull_id, pull.targets)
        self.pulls.by_id[pull.pull_id] = pull
        pull.held = pull.held or self._renewals.start(ticket.members())
        pull.step, pull.submitted_at = "compute", self._clock()
        pull.following, pull.nbytes = following, following.nbytes
        following.task = self._tasks.create_task(self._read_on(pull, following))
        following.task.add_done_callback(lambda _: self._cancel(pull, "the worker is closing"))

    async def _read_on(self, pull: OpenPull, following: Following) -> None:
        """Read what is settled, and ask meanwhile what else is, until all has arrived."""
        try:
            while not following.sealed:
                await following.hear(self._clock() - pull.submitted_at)
                if following.sealed:
                    pull.sealed_at = self._clock()
                await following.arrived.wait()
                settled = following.cut(pull.pull_id, pull.priority, self._scheduler.read_ids, self._clock())
                if settled is not None:
                    pull.ranges = (*pull.ranges, settled)
                    pull.nbytes = max(pull.nbytes, sum([each.nbytes for each in pull.ranges]))
                    self._hand_over([pull])
            await following.arrived.wait()
        except Exception as error:  # noqa: BLE001 - the handle tells
            if pull.handle.done():  # ``gather`` loses a cancellation that comes with an error
                return
            await following.arrived.wait()  # so that nothing is in flight
            ours = as_ours(error, pull.request_id)
            self._give_up(pull, await self.pulls.explain(pull, ours) if isinstance(ours, StaleLease) else ours)
        else:
            self._complete(pull)

    def _end_turn(self) -> None:
        self._turn_until, self._collecting = None, False
        if self.pulls.completed:
            self.pulls.write_completed()
        if self._collected:
            self._flush()

    def _flush(self) -> None:
        """Post everything that was collected, in one call."""
        if self._collected:
            collected, self._collected = self._collected, {}
            self._hand_over(list(collected.values()))

    def _hand_over(self, pulls: Sequence[OpenPull]) -> None:
        """Post what is read next of pulls together, deliver what is answered at once, and open the others."""
        last = pulls[0].ranges[-1]
        reads = last.reads if len(pulls) == 1 else [read for pull in pulls for read in pull.ranges[-1].reads]
        if self.pulls.traced:
            for read in reads:
                read.arrived = []
        answers = self._post(reads)
        if len(reads) == len(answers) == 1 and answers[0].verdict == "held":  # quickly
            last.ended = answers
            self.posted_inline += 1
            self._delivered(pulls[0])
            return
        by_read = {ended.read_id: ended for ended in answers if ended.verdict == "held"}
        opened: set[int] = set()
        delivered = []
        for pull in pulls:
            last = pull.ranges[-1]
            ended = [by_read[read.read_id] for read in last.reads if read.read_id in by_read]
            if len(ended) == len(last.reads):
                last.ended = ended
                delivered.append(pull)
            else:
                self._open(pull)
                opened.update([read.read_id for read in last.reads])
        self.posted_inline += len(delivered)
        self.posted_on_thread += len(pulls) - len(delivered)
        for pull in delivered:  # once the others are open: a caller may cancel them
            self._delivered(pull)
        self._take([ended for ended in answers if ended.read_id in opened])

    def _open(self, pull: OpenPull) -> None:
        """Submit to the scheduler what is read of a pull, because not all of it has arrived."""
        self.pulls.by_id[pull.pull_id] = pull
        if not pull.held:
            self._fresh.append(pull)
        pull.submitted = True
        self._scheduler.submit(pull.ranges[-1])
        self._busy.set()
        if self._report.wants(TransferStarted) and len(pull.ranges) == 1:
            self._report(TransferStarted(pull.pull_id, pull.request_id))

    def _post(self, reads: Sequence[RankRead]) -> list[ReadEnded]:
        """Post reads, and return what is answered at once. If some are not, collect the next pulls of this turn."""
        now = self._clock()
        answers = self._transport.post(reads, self._handing_over.seconds)
        if len(answers) < len(reads):
            self._collecting = self._turn_until is not None
            if len(reads) == 1 and not self._scheduler.busy:
                self._handing_over.begin(reads[0].read_id, now)
        return answers

    def _take(self, answers: Iterable[ReadEnded]) -> None:
        for ended in answers:
            self._apply(self._scheduler.on_read_ended(ended, self._clock()))

    def _apply(self, effects: Sequence[Effect]) -> None:
        """Carry out what the scheduler decided, in its order."""
        for effect in effects:
            match effect:
                case Delivered(pull=pull):
                    self._delivered(self.pulls.by_id[pull.pull_id])
                case StartReads(reads=reads):
                    self._take(self._post(reads))
                case CancelReads(read_ids=read_ids):
                    self._transport.cancel(read_ids)
                case PullFailed():
                    self._on_failed(effect)
                case TransferQuiesced():
                    self._destinations.give_back(effect.pull_id)
                    self.pulls.quiesce(self.pulls.by_id.pop(effect.pull_id), effect)
                case LeaseEarly(rank=rank, again=again):
                    self._ask_soon(rank)
                    if not again and (others := self.pulls.by_id[rank.pull_id].others(rank.read.peer)):
                        self._tasks.create_task(self._await_revocation(rank, others))
                case _:
                    self._report(effect)

    def _ask_soon(self, rank: SourceRank) -> None:
        """Ask for the lease of an early rank, together with those of its peer that are found early in this turn."""
        peer = rank.read.peer
        asked = self._early.get(peer)
        if asked is None or len(asked) >= LEASES_ASKED_MAX:
            asked = self._early[peer] = []
            self._tasks.create_task(self._await_admissions(peer, asked))
        asked.append(rank)

    async def _await_admissions(self, peer: PeerId, asked: list[SourceRank]) -> None:
        """Ask which early leases of a peer are admitted or have ended, and read these again: at once, but only once.

        If it says nothing new, or nothing in time, all are read again after a pause.
        """
        if self._early.get(peer) is asked:
            del self._early[peer]
        ranks, asked_at = [rank for rank in asked if rank.state == "waiting"], self._clock()
        if not ranks:
            return
        leases = [rank.read.lease for rank in ranks]
        answers = await self.peers.settled(peer, leases, self._shared.config.tuning.fence_s / 4)
        news = [rank for rank, each in zip(ranks, answers, strict=False) if each.block_ids or each.ended]
        told = [rank for rank in news if not rank.told]
        if not told:
            pause_s = min(RETRY_S_MAX, max(TICK_S, asked_at - ranks[0].early_at))
            await asyncio.sleep(asked_at + pause_s - self._clock())
        for rank in ranks:
            if rank in told:
                rank.told = True
            elif told and rank.state == "waiting":
                self._ask_soon(rank)
        self._apply(self._scheduler.read_again(told or ranks, self._clock()))

    async def _await_revocation(self, rank: SourceRank, others: Sequence[PeerId]) -> None:
        """Fail the pull of an early rank once another rank has revoked its grant, of which this one may never hear."""
        while True:
            await asyncio.sleep(REVOCATION_PAUSE_S)
            for peer in others:
                if not rank.early:
                    return
                answers = await self.peers.settled(peer, [rank.read.lease], 0.0)
                if any(each.ended == "revoked" for each in answers) and rank.early:
                    detail, now = "the lease was revoked before every rank has admitted it", self._clock()
                    code = StaleLease.code
                    self._apply(self._scheduler.cancel(rank.pull_id, code=code, detail=detail, peer=peer, now=now))
                    return

    def _delivered(self, pull: OpenPull) -> None:
        """Complete a pull; of an open offer, go on with the next range."""
        if pull.following is None:
            self._complete(pull)
            return
        pull.submitted = False
        pull.following.on_arrived(self._clock())

    def _complete(self, pull: OpenPull) -> None:
        self.pulls.by_id.pop(pull.pull_id, None)
        if pull.ranges or pull.following is not None:
            self._destinations.give_back(pull.pull_id)
        if pull.held:
            self._renewals.stop(pull.held)
        self._renewals.release(pull.leases, read=True)
        pull.handle.complete(self.pulls.complete(pull, self._turn_until))

    def _on_failed(self, event: PullFailed) -> None:
        """Fail a pull that the scheduler has failed, and quarantine its blocks until nothing writes into them."""
        pull = self.pulls.by_id[event.pull_id]
        member = pull.member(event.peer)
        if member is not None:
            event = replace(event, detail=self.peers.located(member.peer, event.code, event.detail))
        pull.failure = event
        self._destinations.quarantine(event.pull_id, event.code, self._clock())
        error = transfer_error(event)
        if isinstance(error, StaleLease) and self._lifecycle.stage != "closing":
            self._spawn(self._explain(pull, error), pull, error)
        else:
            self._fail(pull, error)
        if event.code == DeadlineExceeded.code and event.phase == "wire" and member is not None:
            # The peer or its host hangs. Drop it, which ends its other reads; it is connected again when it is needed.
            self.peers.drop(member.peer, event.code, event.detail)

    async def _explain(self, pull: OpenPull, error: StaleLease) -> None:
        self._fail(pull, await self.pulls.explain(pull, error))

    def _spawn(self, work: Coroutine[Any, Any, None], pull: OpenPull, error: KvflowError) -> None:
        """Run a task of a pull. If the task is cancelled, even before its first step, fail the pull with ``error``."""
        task = self._tasks.create_task(work)
        task.add_done_callback(lambda ended: self._fail(pull, error) if ended.cancelled() else None)

    def _fail(self, pull: OpenPull, error: BaseException) -> None:
        """End a pull with an error; do nothing if it has ended."""
        if pull.handle.done():
            return
        self._renewals.stop(pull.held)
        if pull.following is not None:
            pull.following.task.cancel()
        if isinstance(error, ContentMismatch):
            self._renewals.release(pull.leases, read=False)  # this request will not read it
        if not pull.submitted:
            self.pulls.by_id.pop(pull.pull_id, None)
        self.pulls.fail(pull, error)
        if not pull.submitted:
            pull.handle.quiesce()

    def _give_up(self, pull: OpenPull, error: KvflowError) -> None:
        """Fail a pull that has our blocks, and of which nothing is read; do nothing if it has ended."""
        if not pull.handle.done():
            self._destinations.give_back(pull.pull_id)
            self._fail(pull, error)

    def _cancel_by_id(self, pull_id: int) -> None:
        pull = self.pulls.by_id.get(pull_id)
        if pull is not None:
            self._cancel(pull, CANCELLED)

    def _cancel(self, pull: OpenPull, detail: str) -> None:
        """Cancel a pull in any phase; do nothing while the data plane is answering it."""
        if pull.submitted:
            now = self._clock()
            self._apply(self._scheduler.cancel(pull.pull_id, code=TransferCancelled.code, detail=detail, now=now))
        elif pull.following is not None or self._collected.pop(pull.pull_id, None) is not None:
            self._give_up(pull, TransferCancelled(detail, request_id=pull.request_id))
        elif not pull.ranges:
            self._fail(pull, TransferCancelled(detail, request_id=pull.request_id))


def open_item(item: object) -> tuple[Ticket, BlockLists, str]:
    """Return ticket, block ids and name of an item of a batch; for a malformed item, arguments that are refused."""
    if isinstance(item, tuple | list) and len(item) in {2, 3}:
        return item[0], item[1], item[2] if len(item) == 3 else ""
    return cast("Ticket", item), (), ""


def _check_priority(priority: object) -> None:
    if not isinstance(priority, int) or abs(priority) > PRIORITY_MAX:
        remedy = "Pass a small integer; lower is more urgent, and 0 is the default."
        raise ArgumentInvalid("priority", "an integer from -2**31 to 2**31", priority, remedy=remedy)
