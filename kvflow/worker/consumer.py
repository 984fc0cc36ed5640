"""The consumer's side of a worker: pulls, from a ticket to a report.

The scheduler decides, this module does: it meets the peers, binds and posts what is dispatched, and settles
each pull's future with what the scheduler reports.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from kvflow.cache.destinations import DestinationLedger, Quarantined
from kvflow.cache.quarantine import DUE_AFTER_S, LastResort
from kvflow.cache.tickets import Member, Ticket
from kvflow.clock import Clock
from kvflow.errors import ArgumentInvalid, ContentMismatch, DeadlineExceeded, KvflowError, StaleLease
from kvflow.ids import LeaseKey, PeerId
from kvflow.layout.manifest import Manifest
from kvflow.observability.events import ReaderRenewed
from kvflow.transfer.events import TransferCompleted, TransferFailed, TransferQuiesced
from kvflow.transfer.pairs import Int64s, check_block_ids
from kvflow.transfer.report import TransferReport
from kvflow.transfer.requests import (
    PRIORITY_MAX,
    Budgets,
    CancelReads,
    Dispatch,
    Effect,
    EpochCheck,
    LegRequest,
    Look,
    PullRequest,
    RenewLease,
)
from kvflow.transfer.scheduler import Scheduler
from kvflow.transport.base import (
    CHUNK_BYTES_MAX,
    CHUNK_DESCRIPTORS_MAX,
    Fence,
    FenceFailed,
    FenceJudged,
    PeerAdded,
    PeerFailed,
    Read,
    ReadCompleted,
    ReadFailed,
    RenewalEnded,
    StagingUse,
    Transport,
    TransportEvent,
)
from kvflow.worker.demands import check_expected, demands_of, require_content
from kvflow.worker.ending import Call, Ending, empty_report
from kvflow.worker.failures import CANCELLED, transfer_error
from kvflow.worker.keeping import Keeping
from kvflow.worker.peers import PeerPool
from kvflow.worker.programs import Peer
from kvflow.worker.releasing import Releasing
from kvflow.worker.stages import Stage, later, require_open, require_running
from kvflow.worker.unsettled import Unsettled

TICK_S = 0.02
"""Deadlines, renewals and retries are looked at this often while a pull is open; nothing else waits for it."""


class Consumer:
    """Pulls of one worker.

    Attributes:
        ending: of its pulls.

    Thread: the event loop.
    """

    def __init__(
        self,
        *,
        pool: PeerPool,
        scheduler: Scheduler,
        ledger: DestinationLedger,
        last_resort: LastResort,
        transport: Transport,
        manifest: Manifest,
        budgets: Budgets,
        verify: Callable[[Ticket], None],
        clock: Clock,
        wall: Clock,
        report: Callable[..., None],
    ) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._ledger = ledger
        self._last_resort = last_resort
        self._transport = transport
        self._manifest = manifest
        self._budgets = budgets
        self._verify = verify
        self._clock = clock
        self.ending = Ending(pool=pool, clock=clock, wall=wall, report=report)
        self._report = report
        self._pulls: dict[int, Call] = {}
        self._unsettled = Unsettled()
        self._keeping = Keeping(pool, clock)
        self.renew_kept = self._keeping.renew_while_any
        self._busy = asyncio.Event()
        self._pumping = False
        self._releasing = Releasing(pool)
        self._stage: Stage = "open"

    async def pull(
        self,
        ticket: Ticket,
        block_ids: Sequence[Sequence[int]],
        *,
        priority: int = 0,
        local_request_id: str = "",
        expected_digests: Sequence[Sequence[bytes]] | None = None,
    ) -> TransferReport:
        """Read a ticket's blocks into ours. See ``Worker.pull``.

        Whatever ends it ends it here, or in ``_on_completed``; ``Ending`` writes the one record of each call.
        """
        call = self.ending.begin(ticket, local_request_id)
        try:
            try:
                return await self._read(call, ticket, block_ids, priority, expected_digests)
            except StaleLease as error:
                if error.ended_by:
                    raise
                raise await self.ending.explain(call, error) from None
        except BaseException as error:
            self.ending.fail(call, error, quarantined=call.pull_id in self._pulls)
            raise

    async def _read(
        self,
        call: Call,
        ticket: Ticket,
        block_ids: Sequence[Sequence[int]],
        priority: int,
        expected_digests: Sequence[Sequence[bytes]] | None,
    ) -> TransferReport:
        """Check a call, meet its peers, and wait for what the scheduler makes of it."""
        _check_priority(priority)
        require_open(self._stage, "pulls nothing")
        self._check(ticket)
        targets = check_block_ids(
            block_ids, num_blocks=self._manifest.num_blocks, aliases=self._ledger.aliases, unique=True
        )
        expected = None if expected_digests is None else check_expected(expected_digests, targets)
        call.context["num_local_blocks"] = sum(map(len, targets))
        self._unsettled.begin(call.pull_id, call.request_id)
        try:
            # However they were joined: ranks in another order are the same ranks, divided and prepared once.
            members = tuple(sorted(ticket.members(), key=lambda member: member.address.rank))
            legs = await self._legs(call, members, await self._meet(call, members), targets, expected)
            call.handshake_s = self._clock() - call.called_at
            require_running(self._stage, "pulls nothing")  # one that drains finishes what was called before
            call.result = asyncio.get_running_loop().create_future()
            effects = self._submit(call, targets, legs, priority) if legs else []
            call.phase = "wire"  # until the scheduler says where it failed
        except ContentMismatch:
            self._unsettled.end(call.pull_id)
            self._releasing.add(members, read=False)  # nobody will read it for this request
            raise
        except BaseException:
            self._unsettled.end(call.pull_id)
            raise
        finally:
            self._keeping.end(ticket.members())
        if not legs:
            self._unsettled.end(call.pull_id)
            self._releasing.after_caller(members)
            return self.ending.complete(call, empty_report(ticket))
        self._busy.set()
        self._apply(effects)
        try:
            return await call.result
        except asyncio.CancelledError:
            self._cancel(call.pull_id, CANCELLED)
            raise

    def keep(self, ticket: Ticket) -> None:
        """Renew a ticket's leases until it is pulled or released. See ``Worker.keep``."""
        require_open(self._stage, "keeps nothing")
        self._check(ticket)
        self._keeping.begin(ticket.members())

    async def release(self, ticket: Ticket) -> None:
        """Give a ticket back without reading it. See ``Worker.release``."""
        require_running(self._stage, "releases nothing")
        self._check(ticket)
        self._keeping.end(ticket.members())
        lost: list[KvflowError] = []
        for member in ticket.members():
            try:
                link = await self._pool.reach(member)
            except KvflowError as error:
                lost.append(error)  # the other ranks can be told all the same
            else:
                link.release([(member.grant.slot, member.grant.epoch_value)], read=False)
        if lost:
            raise lost[0]

    async def quiesced(self, request_id: str) -> None:
        """Wait until nothing may write into the request's blocks any more. See ``Worker.quiesced``."""
        await self._unsettled.quiesced(request_id)

    async def wait_idle(self) -> None:
        """Wait until no pull is left; of use when new ones are refused.

        Cancellation: safe.
        """
        await self._unsettled.wait_idle()

    def check(self) -> None:
        """Check the laws: of destination blocks, and of windows."""
        self._ledger.check()
        self._scheduler.check()

    def quarantined(self) -> list[Quarantined]:
        """List destinations whose pulls have ended while something may still write."""
        return self._ledger.quarantined()

    def staging(self) -> StagingUse:
        """Return how many staging buffers are taken."""
        return self._transport.staging()

    def open_pulls(self) -> int:
        """Return how many pulls are open or draining."""
        return len(self._unsettled)

    def requests(self) -> tuple[str, ...]:
        """Return the producers' names of what these pulls read."""
        return self._unsettled.requests()

    def on_transport_event(self, event: TransportEvent) -> None:
        """Feed what the data plane reports to whom it concerns."""
        now = self._clock()
        match event:
            case ReadCompleted(read_id=read_id, posted_s=posted_s, scattered_s=scattered_s, unheld=unheld):
                effects = self._scheduler.on_read_completed(
                    read_id, posted_s=posted_s, scattered_s=scattered_s, unheld=unheld, now=now
                )
            case ReadFailed(read_id=read_id, code=code, detail=detail):
                effects = self._scheduler.on_read_failed(read_id, code=code, detail=detail, now=now)
            case FenceJudged(fence_id=fence_id, observed=observed, fence_s=fence_s):
                effects = self._scheduler.on_fence_judged(fence_id, observed=observed, fence_s=fence_s, now=now)
            case FenceFailed(fence_id=fence_id, code=code, detail=detail):
                effects = self._scheduler.on_fence_failed(fence_id, code=code, detail=detail, now=now)
            case PeerAdded(peer=peer, carrier=carrier):
                self._pool.on_added(peer, carrier)
                effects = []
            case PeerFailed(peer=peer, code=code, detail=detail):
                self._pool.on_failed(peer, code, detail)
                effects = self._scheduler.on_peer_failed(peer, code=code, detail=detail, now=now)
            case RenewalEnded():
                self._on_renewal_ended(event)
                effects = []
        self._apply(effects)

    def on_peer_dropped(self, peer: PeerId, code: str, detail: str) -> None:
        """End every pull that needs a peer which is gone."""
        self._apply(self._scheduler.on_peer_failed(peer, code=code, detail=detail, now=self._clock()))

    async def tick_while_busy(self) -> None:
        """Drive deadlines, renewals and retries, for ever; costs nothing while no pull is open."""
        while True:
            await self._busy.wait()
            await asyncio.sleep(TICK_S)  # first: a pull is most often over by then
            now = self._clock()
            staging = self._transport.staging()
            self._apply(self._scheduler.tick(now, held_up=staging.waiting))
            if self._last_resort.due(self._ledger.standing(now, DUE_AFTER_S), now, starved=staging.starved):
                self._transport.renew_reader()
            if not self._scheduler.busy:
                self._busy.clear()

    def drain(self) -> None:
        """Take no more pulls, and finish those that were called."""
        self._stage = later(self._stage, "draining")

    def close(self) -> int:
        """Cancel every open pull and take no more; return how many there were."""
        self._stage = "closing"
        open_pulls = self._scheduler.open_pulls()
        for pull_id in open_pulls:
            self._cancel(pull_id, "the worker is closing")
        self._releasing.flush()
        return len(open_pulls)

    async def _meet(self, call: Call, members: Sequence[Member]) -> list[Peer]:
        """Meet every peer that a ticket names."""
        call.phase = "handshake"
        if len(members) == 1:
            call.peer = str(members[0].peer)
            peers = [await self._pool.meet(members[0])]
        else:
            peers = list(await asyncio.gather(*(self._meet_one(call, member) for member in members)))
        call.transport = "+".join(dict.fromkeys(peer.carrier.name for peer in peers))
        call.plane = "+".join(dict.fromkeys(peer.carrier.plane for peer in peers))
        return peers

    async def _meet_one(self, call: Call, member: Member) -> Peer:
        try:
            return await self._pool.meet(member)
        except BaseException:
            call.peer = call.peer or str(member.peer)  # the first that could not be met is to blame
            raise

    async def _legs(
        self,
        call: Call,
        members: Sequence[Member],
        peers: Sequence[Peer],
        targets: Sequence[Int64s],
        expected: tuple[tuple[bytes, ...], ...] | None,
    ) -> tuple[LegRequest, ...]:
        """Say what each source rank must give; ranks that give nothing have no leg."""
        call.phase = "plan"
        legs = []
        for leg in await self._pool.legs(peers):
            member = members[leg.member]
            demands = demands_of(member, peers[leg.member].manifest, leg.programs, targets)
            if expected is not None:
                require_content(member.grant, leg.programs, self._manifest, expected)
            if demands:
                grant = member.grant
                lease = (grant.slot, grant.epoch_value, grant.lease_s)
                legs.append(LegRequest(member.peer, *lease, demands, admitted=grant.admitted, mac=member.mac))
        return tuple(legs)

    def _submit(
        self, call: Call, targets: Sequence[Int64s], legs: tuple[LegRequest, ...], priority: int
    ) -> list[Effect]:
        """Take the blocks of a pull and hand it to the scheduler, or leave everything as it was.

        The first of a turn of the loop is dispatched at once, and all that follow it together at the end of the turn.
        """
        self._ledger.take(call.pull_id, targets)
        try:
            request = PullRequest(call.pull_id, call.request_id, legs, priority, self._budgets)
            effects = self._scheduler.submit(request, self._clock(), hold=self._pumping)
        except BaseException:
            self._ledger.give_back(call.pull_id)
            raise
        self._pulls[call.pull_id] = call
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)
        return effects

    def _pump(self) -> None:
        self._pumping = False
        self._apply(self._scheduler.pump(self._clock()))

    def _cancel(self, pull_id: int, detail: str) -> None:
        self._apply(self._scheduler.cancel(pull_id, code="transfer_cancelled", detail=detail, now=self._clock()))

    def _apply(self, effects: Sequence[Effect]) -> None:
        """Do what the scheduler says, in its order; the renewals of one peer travel together."""
        renewals: dict[PeerId, dict[LeaseKey, None]] = {}
        for effect in effects:
            match effect:
                case Dispatch():
                    self._post(effect)
                case Look(peer=peer, check=check):
                    self._transport.look(peer, _fence(check))
                case CancelReads(read_ids=read_ids):
                    self._transport.cancel(read_ids)
                case RenewLease(peer=peer, slot=slot, epoch=epoch):
                    # Pulls of one ticket need its lease together, and it is renewed for all of them once.
                    renewals.setdefault(peer, {})[slot, epoch] = None
                case TransferCompleted():
                    self._on_completed(effect)
                case TransferFailed():
                    self._on_failed(effect)
                case TransferQuiesced():
                    self._on_quiesced(effect)
                case _:
                    self._report(effect)
        for peer, leases in renewals.items():
            link = self._pool.link(peer)
            if link is not None:
                link.renew(list(leases))

    def _post(self, dispatch: Dispatch) -> None:
        started = self._clock()
        binding = self._pool.bindings.get(dispatch.program_id)
        if binding is None:
            # The peer was dropped in this very moment; its end is on the way to the scheduler as well.
            lost = partial(
                self._scheduler.on_read_failed, dispatch.read_id, code="peer_lost", detail="the peer was dropped"
            )
            asyncio.get_running_loop().call_soon(lambda: self._apply(lost(now=self._clock())))
            return
        bound = binding.bind(dispatch.pairs, chunk_bytes=CHUNK_BYTES_MAX, chunk_descriptors=CHUNK_DESCRIPTORS_MAX)
        self._transport.post(
            Read(
                read_id=dispatch.read_id,
                peer=dispatch.peer,
                program_id=dispatch.program_id,
                source_index=bound.source_index,
                target_index=bound.target_index,
                cuts=bound.cuts,
                nbytes=bound.nbytes,
                leases=dispatch.leases,
                priority=dispatch.priority,
                fences=tuple(_fence(check) for check in dispatch.fences),
                looks=tuple(_fence(check) for check in dispatch.looks),
            )
        )
        spent = self._clock() - started
        for pull_id in dispatch.pull_ids:
            self._pulls[pull_id].bind_s += spent

    def _on_renewal_ended(self, event: RenewalEnded) -> None:
        demand = self._last_resort.ended()
        if event.ended:
            self._report(ReaderRenewed(demand.setting, demand.num_blocks, event.ended, event.drain_s, event.renew_s))

    def _on_completed(self, event: TransferCompleted) -> None:
        call = self._pulls[event.pull_id]
        self._settle(event.pull_id)
        report = self.ending.complete(call, event.report)
        if call.result is not None and not call.result.done():
            call.result.set_result(report)
        self._releasing.after_caller(call.members())

    def _on_failed(self, event: TransferFailed) -> None:
        call = self._pulls[event.pull_id]
        call.failure = event
        self._ledger.quarantine(event.pull_id, event.code, self._clock())
        if call.result is not None and not call.result.done():
            call.result.set_exception(transfer_error(event))
        if event.code == DeadlineExceeded.code and event.phase == "wire":
            # It hangs, or its host does: what else it owes us ends now, and it is met anew when it is needed.
            member = call.member(event.peer)
            if member is not None:
                self._pool.drop(member.peer, event.code, event.detail)

    def _on_quiesced(self, event: TransferQuiesced) -> None:
        call = self._pulls[event.pull_id]
        self._settle(event.pull_id)
        self.ending.quiesce(call, event)

    def _settle(self, pull_id: int) -> None:
        """Give a pull's blocks back: nothing writes into them any more."""
        self._ledger.give_back(pull_id)
        del self._pulls[pull_id]
        self._unsettled.end(pull_id)

    def _check(self, ticket: object) -> None:
        if not isinstance(ticket, Ticket):
            raise ArgumentInvalid("ticket", "a Ticket, made with Ticket.from_params", ticket)
        self._verify(ticket)


def _check_priority(priority: object) -> None:
    if not isinstance(priority, int) or abs(priority) > PRIORITY_MAX:
        raise ArgumentInvalid("priority", "an integer from -2**31 to 2**31", priority)


def _fence(check: EpochCheck) -> Fence:
    return Fence(check.fence_id, check.slot, check.epoch, check.after)
