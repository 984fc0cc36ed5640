"""The consumer's side of a worker: pulls, from a ticket to a report.

The scheduler decides, this module does. Where all peers of a ticket are connected, a pull is checked, paired and handed
to the data plane within the call that starts it. Otherwise a task connects the peers first.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, cast

from kvflow.cache.destinations import DestinationLedger, Quarantined
from kvflow.cache.quarantine import DUE_AFTER_S, LastResort
from kvflow.cache.tickets import MAC_BYTES, Member, Ticket
from kvflow.clock import Clock
from kvflow.errors import (
    ArgumentInvalid,
    ContentMismatch,
    DeadlineExceeded,
    KvflowError,
    StaleLease,
    TicketInvalid,
    TransferCancelled,
)
from kvflow.ids import PeerId
from kvflow.layout.manifest import Manifest
from kvflow.observability.events import ReaderReset
from kvflow.observability.logs import Reporter
from kvflow.transfer.bind_plan import AnyBinding
from kvflow.transfer.events import TransferFailed, TransferQuiesced, TransferStarted
from kvflow.transfer.pairs import UnitPairs, check_block_ids
from kvflow.transfer.pulls import Budgets, Pull
from kvflow.transfer.requests import PRIORITY_MAX, LeaseName, RankRead, ReadEnded
from kvflow.transfer.scheduler import CancelReads, Delivered, Effect, Scheduler, StartReads
from kvflow.transport import base
from kvflow.transport.base import INLINE_S_MAX, PeerAdded, PeerFailed, StagingUse, Transport, TransportEvent
from kvflow.worker.ending import Call, Ending
from kvflow.worker.failures import CANCELLED, transfer_error
from kvflow.worker.handle import PullHandle
from kvflow.worker.leases_held import LeasesHeld
from kvflow.worker.parts import check_expected, parts_of, require_content
from kvflow.worker.peers import PeerPool
from kvflow.worker.programs import Route
from kvflow.worker.stages import Stage, later, require_open, require_running

TICK_S = 0.02
"""Deadlines and retries are looked at this often while the data plane has a read; nothing else waits for it."""

BlockLists = Sequence[Sequence[int]]
PullItem = tuple[Ticket, BlockLists] | tuple[Ticket, BlockLists, str]
"""A ticket, our block ids for it, and the engine's own name of the request if it has one."""


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
        tasks: asyncio.TaskGroup,
        clock: Clock,
        wall: Clock,
        report: Reporter,
    ) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._ledger = ledger
        self._last_resort = last_resort
        self._transport = transport
        self._manifest = manifest
        self._budgets = budgets
        self._verify = verify
        self._tasks = tasks
        self._clock = clock
        self.ending = Ending(pool=pool, clock=clock, wall=wall, report=report, cancel=self._give_up)
        self._report = report
        self._calls: dict[int, Call] = {}
        self._held = LeasesHeld(pool, clock, wall)
        self._fresh: list[Call] = []  # opened since the last tick
        self._busy = asyncio.Event()
        self._collected: dict[int, Call] = {}  # checked, and not posted yet
        self._collecting = False
        self._turn_until: float | None = None
        self._stage: Stage = "open"

    def start(
        self,
        ticket: Ticket,
        block_ids: BlockLists,
        *,
        priority: int = 0,
        local_request_id: str = "",
        expected_digests: Sequence[Sequence[bytes]] | None = None,
    ) -> PullHandle:
        """Start to read a ticket's blocks into ours. See ``Worker.start_pull``. Whatever fails, the handle tells."""
        call = self.ending.begin(ticket, local_request_id)
        try:
            if priority != 0:
                _check_priority(priority)
            if self._stage != "open":
                require_open(self._stage, "pulls nothing")
            if call.ticket is None:
                _check_ticket(ticket)
            self._verify(ticket)
            if self._held.kept:
                self._held.forget(ticket.members())
            call.targets = check_block_ids(
                block_ids, num_blocks=self._manifest.num_blocks, aliases=self._ledger.aliases, unique=True
            )
            expected = None if expected_digests is None else check_expected(expected_digests, call.targets)
            route = self._pool.route(ticket)
            if route is None or route.may_be_over(ticket):
                call.held = self._held.hold(ticket.members())
                self._calls[call.pull_id] = call
                closing = TransferCancelled("the worker is closing", request_id=call.request_id)
                self._spawn(self._connect(call, ticket, priority, expected), call, closing)
            else:
                self._begin(call, ticket, route, priority, expected)
        except Exception as error:  # noqa: BLE001 - the handle tells
            self._fail(call, error)
        return call.handle

    def start_many(self, batch: Sequence[tuple[Ticket, BlockLists, str]], *, priority: int = 0) -> list[PullHandle]:
        """Start many pulls and hand them to the data plane together. See ``Worker.pull_many``."""
        before, self._collecting = self._collecting, True
        handles = [
            self.start(ticket, block_ids, priority=priority, local_request_id=name) for ticket, block_ids, name in batch
        ]
        self._collecting = before
        self._flush()
        return handles

    def keep(self, ticket: Ticket) -> None:
        """Renew a ticket's leases until it is pulled or released. See ``Worker.keep``."""
        require_open(self._stage, "keeps nothing")
        _check_ticket(ticket)
        self._verify(ticket)
        self._held.keep(ticket.members())

    async def release(self, ticket: Ticket) -> None:
        """Give a ticket back without reading it. See ``Worker.release``."""
        require_running(self._stage, "releases nothing")
        _check_ticket(ticket)
        self._verify(ticket)
        self._held.forget(ticket.members())
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
        """Wait until nothing may write into the blocks of any pull of this name. See ``Worker.quiesced``."""
        while call := next((call for call in self._calls.values() if call.request_id == request_id), None):
            await call.handle.quiesced()

    async def wait_idle(self) -> None:
        """Wait until no pull is left; of use when new ones are refused.

        Cancellation: safe.
        """
        while call := next(iter(self._calls.values()), None):
            await call.handle.quiesced()

    def check(self) -> None:
        """Check the laws: of destination blocks, and of reads in flight."""
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
        return len(self._calls)

    def requests(self) -> tuple[str, ...]:
        """Return the producers' names of what these pulls read, one for each pull."""
        return tuple(call.request_id for call in self._calls.values())

    def on_transport_event(self, event: TransportEvent) -> None:
        """Take what the data plane reports."""
        match event:
            case ReadEnded():
                self._apply(self._scheduler.on_read_ended(event, self._clock()))
            case PeerAdded(peer=peer, carrier=carrier):
                self._pool.on_added(peer, carrier)
            case PeerFailed(peer=peer, code=code, detail=detail):
                self._pool.on_failed(peer, code, detail)
                self.on_peer_dropped(peer, code, detail)
            case base.ReaderReset():
                demand = self._last_resort.ended()
                if event.ended:
                    self._report(
                        ReaderReset(demand.setting, demand.num_blocks, event.ended, event.drain_s, event.reset_s)
                    )

    def on_peer_dropped(self, peer: PeerId, code: str, detail: str) -> None:
        """End every pull that needs a peer which is gone."""
        self._flush()
        self._apply(self._scheduler.on_peer_failed(peer, code=code, detail=detail, now=self._clock()))

    async def tick_while_busy(self) -> None:
        """Apply deadlines and retries until cancelled; costs nothing while no pull is open."""
        while True:
            await self._busy.wait()
            await asyncio.sleep(TICK_S)  # first: a pull is most often over by then
            now = self._clock()
            self._apply(self._scheduler.tick(now))
            self._hold_leases()
            starved = self._transport.staging().starved
            if self._last_resort.due(self._ledger.standing(now, DUE_AFTER_S), now, starved=starved):
                self._transport.reset_reader()
            if not self._scheduler.busy:
                self._busy.clear()

    def _hold_leases(self) -> None:
        """Hold the leases of pulls that were opened since the last tick; those that are over need no renewal."""
        fresh, self._fresh = self._fresh, []
        for call in fresh:
            if call.ticket is not None and not call.handle.done():
                call.held = self._held.hold(call.ticket.members())

    def drain(self) -> None:
        """Take no more pulls, and finish those that were called."""
        self._stage = later(self._stage, "draining")

    def close(self) -> int:
        """Cancel every open pull and take no more; return how many there were."""
        self._stage = "closing"
        open_calls = list(self._calls.values())
        for call in open_calls:
            self._cancel(call, "the worker is closing")
        self._held.close()
        return len(open_calls)

    async def _connect(
        self, call: Call, ticket: Ticket, priority: int, expected: tuple[tuple[bytes, ...], ...] | None
    ) -> None:
        """Connect the peers of a ticket, then begin to read."""

        def blame(member: Member) -> None:
            call.peer = call.peer or str(member.peer)  # the first that could not be met is to blame

        call.phase = "handshake"
        try:
            route = await self._pool.connect(ticket, blame)
            if not call.handle.done():  # it was not cancelled meanwhile
                require_running(self._stage, "pulls nothing")  # a worker that drains finishes what was called before
                self._begin(call, ticket, route, priority, expected)
        except Exception as error:  # noqa: BLE001 - the handle tells
            self._fail(call, error)

    def _begin(
        self,
        call: Call,
        ticket: Ticket,
        route: Route,
        priority: int,
        expected: tuple[tuple[bytes, ...], ...] | None,
    ) -> None:
        """Pair block ids, take our blocks, and hand the reads to the data plane; raise and leave all as it was."""
        call.phase, call.route = "plan", route
        grants = ticket.grants
        call.leases = [(peer.link.peer, grants[at].slot, int(grants[at].epoch)) for peer, at in route.ranks]
        reads: list[RankRead] = []
        given: list[tuple[AnyBinding, UnitPairs]] = []
        nbytes = 0
        for peer, at, programs in route.legs:
            grant = grants[at]
            if grant.slot >= peer.num_slots:
                raise TicketInvalid(f"{peer.link.peer} has no epoch slot {grant.slot}")
            parts = parts_of(grant, peer, programs, call.targets, given)
            if expected is not None:
                require_content(grant, programs, self._manifest, expected)
            if parts:
                lease = LeaseName(grant.slot, int(grant.epoch), ticket.sealed[at][:MAC_BYTES])
                peer_id, first = peer.link.peer, not grant.admitted
                reads.append(RankRead(next(self._scheduler.read_ids), peer_id, lease, tuple(parts), first, priority))
        for binding, pairs in given:
            nbytes += len(pairs.source) * binding.unit_bytes
        call.given, call.reads, call.nbytes = given, reads, nbytes
        now = call.submitted_at = self._clock()
        if not reads:  # every target block is absent
            self._complete(call, ())
            return
        self._scheduler.require_room(len(self._collected))
        self._ledger.take(call.pull_id, call.targets)
        if self._turn_until is None:
            self._turn_until = now + INLINE_S_MAX
            asyncio.get_running_loop().call_soon(self._end_turn)
        if self._collecting or now > self._turn_until:
            call.phase = "queue"
            self._calls[call.pull_id] = self._collected[call.pull_id] = call
        else:
            self._hand_over([call])

    def _end_turn(self) -> None:
        self._turn_until, self._collecting = None, False
        self._flush()

    def _flush(self) -> None:
        """Hand over together all that was collected."""
        if self._collected:
            calls, self._collected = self._collected, {}
            self._hand_over(list(calls.values()))

    def _hand_over(self, calls: Sequence[Call]) -> None:
        """Post the reads of pulls together, complete the pulls that are answered at once, and open the others."""
        reads = calls[0].reads if len(calls) == 1 else [read for call in calls for read in call.reads]
        answers = self._post(reads)
        held = [ended for ended in answers if ended.verdict == "held"]
        if len(calls) == 1 and len(held) == len(reads):
            self._complete(calls[0], held)
            return
        by_read = {ended.read_id: ended for ended in held}
        opened: set[int] = set()
        delivered = []
        for call in calls:
            ended = [by_read[read.read_id] for read in call.reads if read.read_id in by_read]
            if len(ended) == len(call.reads):
                delivered.append((call, ended))
            else:
                self._open(call)
                opened.update([read.read_id for read in call.reads])
        for call, ended in delivered:  # when the others are open: its caller may cancel them
            self._complete(call, ended)
        self._take([ended for ended in answers if ended.read_id in opened])

    def _open(self, call: Call) -> None:
        """Let the scheduler have a pull that was posted and is not over."""
        self._calls[call.pull_id] = call
        if not call.held:
            self._fresh.append(call)
        call.phase, call.submitted = "wire", True  # until the scheduler says where it failed
        pull = Pull(call.pull_id, call.request_id, self._budgets, call.nbytes, call.submitted_at)
        self._scheduler.submit(pull, call.reads)
        self._busy.set()
        if self._report.wants(TransferStarted):
            self._report(TransferStarted(call.pull_id, call.request_id))

    def _post(self, reads: Sequence[RankRead]) -> list[ReadEnded]:
        """Hand reads to the data plane, and return the answers that it has already.

        If there are fewer, what follows in this turn of the loop is collected, and posted together at its end.
        """
        answers = self._transport.post(reads)
        if len(answers) < len(reads):
            self._collecting = self._turn_until is not None
        return answers

    def _take(self, answers: Iterable[ReadEnded]) -> None:
        for ended in answers:
            self._apply(self._scheduler.on_read_ended(ended, self._clock()))

    def _apply(self, effects: Sequence[Effect]) -> None:
        """Do what the scheduler says, in its order."""
        for effect in effects:
            match effect:
                case Delivered(pull=pull):
                    self._complete(self._calls[pull.pull_id], pull.ended, pull.early, pull.early_bytes)
                case StartReads(reads=reads):
                    self._take(self._post(reads))
                case CancelReads(read_ids=read_ids):
                    self._transport.cancel(read_ids)
                case TransferFailed():
                    self._on_failed(effect)
                case TransferQuiesced():
                    call = self._calls.pop(effect.pull_id)
                    self._ledger.give_back(effect.pull_id)
                    self.ending.quiesce(call, effect)
                case _:
                    self._report(effect)

    def _complete(self, call: Call, ended: Sequence[ReadEnded], early: int = 0, early_bytes: int = 0) -> None:
        self._calls.pop(call.pull_id, None)
        if call.reads:
            self._ledger.give_back(call.pull_id)
        if call.held:
            self._held.drop(call.held)
        self._held.release(call.leases, read=True)
        call.handle.complete(self.ending.complete(call, ended, early, early_bytes))

    def _on_failed(self, event: TransferFailed) -> None:
        """Take a failure that the scheduler tells: the pull's blocks are quarantined until it says more."""
        call = self._calls[event.pull_id]
        call.failure = event
        self._ledger.quarantine(event.pull_id, event.code, self._clock())
        error = transfer_error(event)
        if isinstance(error, StaleLease) and self._stage != "closing":
            self._spawn(self._explain(call, error), call, error)
        else:
            self._fail(call, error)
        if event.code == DeadlineExceeded.code and event.phase == "wire":
            # It hangs, or its host does: what else it owes us ends now, and it is connected again when it is needed.
            member = call.member(event.peer)
            if member is not None:
                self._pool.drop(member.peer, event.code, event.detail)

    async def _explain(self, call: Call, error: StaleLease) -> None:
        self._fail(call, await self.ending.explain(call, error))

    def _spawn(self, work: Coroutine[Any, Any, None], call: Call, error: KvflowError) -> None:
        """Run what goes on with a pull. Cut short, even before its first step, the pull ends with ``error``."""
        task = self._tasks.create_task(work)
        task.add_done_callback(lambda ended: self._fail(call, error) if ended.cancelled() else None)

    def _fail(self, call: Call, error: BaseException) -> None:
        """End a pull that has failed; does nothing if it has ended."""
        if call.handle.done():
            return
        self._held.drop(call.held)
        if isinstance(error, ContentMismatch):
            self._held.release(call.leases, read=False)  # this request will not read it
        if not call.submitted:
            self._calls.pop(call.pull_id, None)
        self.ending.fail(call, error)
        if not call.submitted:
            call.handle.settle()

    def _give_up(self, pull_id: int) -> None:
        call = self._calls.get(pull_id)
        if call is not None:
            self._cancel(call, CANCELLED)

    def _cancel(self, call: Call, detail: str) -> None:
        """Give up a pull, wherever it is; does nothing if the data plane is just answering it."""
        if call.submitted:
            now = self._clock()
            self._apply(self._scheduler.cancel(call.pull_id, code=TransferCancelled.code, detail=detail, now=now))
        elif not call.reads or self._collected.pop(call.pull_id, None) is not None:
            if call.reads:
                self._ledger.give_back(call.pull_id)
            self._fail(call, TransferCancelled(detail, request_id=call.request_id))


def open_item(item: object) -> tuple[Ticket, BlockLists, str]:
    """Return ticket, block ids and name of an item of a batch; of anything else a pull that is refused."""
    if isinstance(item, tuple | list) and len(item) in {2, 3}:
        return item[0], item[1], item[2] if len(item) == 3 else ""
    return cast("Ticket", item), (), ""


def _check_ticket(ticket: object) -> None:
    if not isinstance(ticket, Ticket):
        raise ArgumentInvalid("ticket", "a Ticket, made with Ticket.from_params", ticket)


def _check_priority(priority: object) -> None:
    if not isinstance(priority, int) or abs(priority) > PRIORITY_MAX:
        raise ArgumentInvalid("priority", "an integer from -2**31 to 2**31", priority)
