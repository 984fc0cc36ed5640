"""A shell and a transport for the scheduler that keep books of their own, and check every effect against them.

Every pair of units has a target number that no other pair has, so that each dispatched pair can be traced to
the leg that asked for it.
"""

from dataclasses import dataclass, field
from itertools import chain, groupby, pairwise

import numpy as np

from kvflow.cache.epochs import judge
from kvflow.transfer.events import (
    TransferCompleted,
    TransferFailed,
    TransferQuiesced,
    TransferRetried,
    TransferStarted,
)
from kvflow.transfer.pairs import UnitPairs
from kvflow.transfer.queues import Limits
from kvflow.transfer.requests import (
    NOT_HELD,
    Budgets,
    CancelReads,
    Demand,
    Dispatch,
    LegRequest,
    Look,
    PullRequest,
    RenewLease,
)
from kvflow.transfer.scheduler import Scheduler

LIMITS = Limits(
    batch_bytes=64,
    batch_descriptors=12,
    peer_bytes=128,
    peer_descriptors=24,
    total_bytes=256,
    pulls_max=8,
    aging_s=1.0,
)
BUDGETS = Budgets(queue_s=4.0, wire_s=3.0, fence_s=2.0)
LEASE_S = 6.0
PEERS = ("p/0/a", "p/1/b", "q/0/c")
PROGRAMS = {10: (1, 1), 11: (16, 3), 20: (5, 2), 21: (100, 1), 30: (8, 20), 31: (32, 4)}
"""Program -> bytes and descriptors of one pair; some pairs exceed a batch by themselves."""
EPOCH = 1000


def peer_of(program_id):
    return PEERS[program_id // 10 - 1]


@dataclass
class Leg:
    """One source rank of one pull."""

    pull: "Pull"
    peer: str
    slot: int
    pairs: dict
    waiting: set
    queued_at: float
    admitted: bool = True  # known to be held before what is read now
    awaits: bool = False  # found not to be admitted yet: nothing of it is read until it is
    held: bool = False
    early: bool = False


@dataclass
class Pull:
    """What was submitted, and everything that was reported of it."""

    request: PullRequest
    submitted_at: float
    legs: list = field(default_factory=list)
    reported: list = field(default_factory=list)
    doomed: bool = False  # a fence was stale, and it is told once the other ranks are quiet

    @property
    def kinds(self):
        return [type(event) for event in self.reported]

    @property
    def live(self):
        return not self.doomed and not {TransferCompleted, TransferFailed} & {*self.kinds}


class World:
    """The scheduler under test, and all that is known of what it did."""

    def __init__(self, budgets=BUDGETS):
        self.scheduler = Scheduler(LIMITS)
        self.budgets = budgets
        self.now = 100.0
        self.pulls = {}
        self.legs = {}
        self.owner = {}
        self.demand = {}
        self.flights = {}
        self.landed = set()
        self.lost = set()
        self.unread = set()  # ended because a lease of theirs was not held
        self.written_off = set()
        self.fences = {}
        self.looks = {}  # of reads, and alone
        self.looked = set()
        self.renewals = []
        self.served = {}  # (peer, program, priority) -> when it was dispatched from last
        self.overtaken = {}  # the same, and since when it waits -> dispatches that went before it after it had aged

    def submit(self, parts, *, priority, admitted=True):
        """Open a pull; ``parts`` is a list of (program, number of pairs)."""
        pull_id = len(self.pulls) + 1
        pull = Pull(None, self.now)
        by_peer = {}
        for program_id, count in parts:
            first = len(self.owner)
            targets = range(first, first + count)
            nbytes, descriptors = PROGRAMS[program_id]
            pairs = UnitPairs(np.arange(count, dtype=np.int64), np.array(targets, np.int64))
            demands, numbers = by_peer.setdefault(peer_of(program_id), ([], {}))
            demands.append(Demand(program_id, pairs, nbytes, descriptors, descriptors * len(pairs.source)))
            numbers |= dict.fromkeys(targets, program_id)
            self.owner |= dict.fromkeys(targets)
            self.demand |= dict.fromkeys(targets, first)
        requests = []
        for peer, (demands, numbers) in by_peer.items():
            slot = 1000 - len(self.legs)  # descending, so that the order of pairs is not that of slots
            leg = self.legs[slot] = Leg(pull, peer, slot, numbers, {*numbers}, self.now, admitted)
            pull.legs.append(leg)
            self.owner |= dict.fromkeys(numbers, leg)
            requests.append(LegRequest(peer, slot, EPOCH, LEASE_S, tuple(demands), admitted))
        pull.request = PullRequest(pull_id, f"request-{pull_id}", tuple(requests), priority, self.budgets)
        self.pulls[pull_id] = pull
        self.apply(self.scheduler.submit(pull.request, self.now))

    def complete(self, read_id):
        """Let the bytes of a batch arrive; nothing of it is read before its looks were judged."""
        for look_id in self.open_looks(read_id):
            self.settle_look(look_id, EPOCH)
        self.flights.pop(read_id)
        self.landed.add(read_id)
        self.apply(self.scheduler.on_read_completed(read_id, posted_s=0.001, now=self.now))

    def fail(self, read_id, code="transport_error"):
        """Let a batch end early."""
        flight = self.flights.pop(read_id)
        self.lost.add(read_id)
        if code == NOT_HELD:
            self.unread.add(read_id)
            for target in flight.pairs.target.tolist():
                leg = self.owner[target]
                if leg.pull.live and not leg.awaits:
                    leg.waiting.add(target)
                    leg.queued_at = self.now
        self.apply(self.scheduler.on_read_failed(read_id, code=code, detail="as told", now=self.now))

    def open_looks(self, read_id=None):
        """Looks that are not judged yet: all, or those that a read waits for."""
        wanted = self.looks if read_id is None else [look.fence_id for look in self.flights[read_id].looks]
        return sorted(look_id for look_id in wanted if look_id not in self.looked)

    def settle_look(self, look_id, observed):
        """Report a look: judged, or failed. Then every read that waits for it fails, unless the lease is held."""
        check = self.looks[look_id]
        self.looked.add(look_id)
        leg = self.legs[check.slot]
        waiting = [read_id for read_id, flight in self.flights.items() if check in flight.looks]
        if observed is None:
            alone = leg.pull.live and leg.awaits
            effects = self.scheduler.on_fence_failed(look_id, code="peer_lost", detail="as told", now=self.now)
            assert alone == any(isinstance(effect, TransferFailed) for effect in effects)
            self.apply(effects)
            verdict, code = None, "peer_lost"
        else:
            verdict, code = judge(check.epoch, observed), NOT_HELD
            if leg.pull.live:
                leg.admitted, leg.early = verdict == "held", verdict == "early"
                leg.pull.doomed = verdict == "stale" and self._in_flight(leg.pull)
                if verdict == "held" and leg.awaits:
                    leg.awaits, leg.waiting, leg.queued_at = False, {*leg.pairs}, self.now
            self.apply(self.scheduler.on_fence_judged(look_id, observed=observed, fence_s=0.001, now=self.now))
        for read_id in waiting if verdict != "held" else ():
            self.fail(read_id, code)

    def due_fences(self):
        """Fences whose reads have all ended: the transport reports each once."""
        return sorted(fence_id for fence_id, check in self.fences.items() if not {*check.after} & {*self.flights})

    def settle_fence(self, fence_id, observed):
        """Report a due fence: judged if its reads have arrived and something was observed, failed otherwise."""
        check = self.fences.pop(fence_id)
        leg = self.legs[check.slot]
        if observed is None or {*check.after} & self.lost:
            effects = self.scheduler.on_fence_failed(fence_id, code="peer_lost", detail="as told", now=self.now)
            assert not leg.pull.live or bool(effects) != bool({*check.after} & self.unread)
        else:
            if leg.pull.live:
                leg.pull.doomed = judge(check.epoch, observed) == "stale" and self._in_flight(leg.pull)
                leg.early = judge(check.epoch, observed) == "early"
                leg.held = judge(check.epoch, observed) == "held"
            effects = self.scheduler.on_fence_judged(fence_id, observed=observed, fence_s=0.001, now=self.now)
        self.apply(effects)

    def fail_peer(self, peer):
        """Let a peer be lost: what it has in flight takes no room any more."""
        self.written_off |= {read_id for read_id, flight in self.flights.items() if flight.peer == peer}
        self.apply(self.scheduler.on_peer_failed(peer, code="peer_lost", detail="gone", now=self.now))

    def tick(self, seconds):
        self.now += seconds
        self.apply(self.scheduler.tick(self.now))

    def apply(self, effects):
        for effect in effects:
            match effect:
                case Dispatch():
                    self._dispatched(effect)
                case Look(peer=peer, check=check):
                    leg = self.legs[check.slot]
                    assert leg.awaits
                    assert leg.peer == peer
                    self._note_look(check)
                case CancelReads(read_ids=read_ids):
                    for read_id in read_ids:
                        assert not any(self.pulls[pull_id].live for pull_id in self.flights[read_id].pull_ids)
                case RenewLease(slot=slot, epoch=epoch):
                    assert self.legs[slot].pull.live
                    assert epoch == EPOCH
                    self.renewals.append((slot, self.now))
                case _:
                    self._reported(effect)
        for dispatch in (effect for effect in effects if isinstance(effect, Dispatch)):
            assert all(TransferStarted in self.pulls[pull_id].kinds for pull_id in dispatch.pull_ids)
        self.check()

    def _dispatched(self, dispatch):
        """A batch is within its budgets, its window was open, and its pairs were waiting for it."""
        nbytes, descriptors = PROGRAMS[dispatch.program_id]
        targets = dispatch.pairs.target.tolist()
        count = len(targets)
        assert count == 1 or count * nbytes <= LIMITS.batch_bytes
        assert count == 1 or count * descriptors <= LIMITS.batch_descriptors
        assert self.has_room(dispatch.peer, dispatch.priority)
        self._overtake(dispatch)
        vouching = [(share.slot, share.epoch) for share in dispatch.leases]
        assert all(one != other for one, other in pairwise(vouching)), "neighbours of one lease are one share"
        of_pairs = [lease for lease, share in zip(vouching, dispatch.leases, strict=True) for _ in range(share.pairs)]
        assert of_pairs == [(self.owner[target].slot, EPOCH) for target in targets]
        runs = [[*run] for _, run in groupby(targets, key=self.demand.__getitem__)]
        assert len(runs) == len({self.demand[run[0]] for run in runs}), "the pairs of one demand stay together"
        assert [*chain(*map(sorted, runs))] == targets, "and ascend"
        legs = {id(self.owner[target]): self.owner[target] for target in targets}.values()
        for target in targets:
            leg = self.owner[target]
            assert leg.pairs[target] == dispatch.program_id
            leg.waiting.remove(target)
        assert sorted(dispatch.pull_ids) == sorted(leg.pull.request.pull_id for leg in legs)
        self.flights[dispatch.read_id] = dispatch
        for leg in legs:
            assert leg.pull.live
            assert leg.peer == dispatch.peer
            assert leg.pull.request.priority == dispatch.priority
        assert {check.slot for check in dispatch.looks} == {leg.slot for leg in legs if not leg.admitted}
        for check in dispatch.looks:
            self._note_look(check)
        fenced = {check.slot: check for check in dispatch.fences}
        assert {*fenced} == {leg.slot for leg in legs if not leg.waiting}
        for slot, check in fenced.items():
            assert {*check.after} == {read_id for read_id in self.flights if self._carries(read_id, slot)}
            assert check.fence_id not in self.fences
            self.fences[check.fence_id] = check

    def _note_look(self, check):
        """A lease is looked at once at a time."""
        assert check.fence_id not in self.fences
        self.looks[check.fence_id] = check
        slots = [self.looks[look_id].slot for look_id in self.open_looks() if self.legs[check.slot].pull.live]
        assert len({*slots}) == len(slots)

    def _overtake(self, dispatch):
        """Once a queue has waited until it is as urgent as any, each of the others goes before it once at most."""
        waits = self._waiting_since()
        most_urgent = min((priority for _, _, priority in waits), default=dispatch.priority)
        most_urgent = min(most_urgent, dispatch.priority)  # what is tried again was not waiting
        served = (dispatch.peer, dispatch.program_id, dispatch.priority)
        for queue, since in waits.items():
            peer, _, priority = queue
            aged = self.now - since > (priority - most_urgent) * LIMITS.aging_s
            if queue != served and aged and self.has_room(peer, priority):
                self.overtaken[queue, since] = (*self.overtaken.get((queue, since), ()), served)
                assert len({*self.overtaken[queue, since]}) == len(self.overtaken[queue, since])
        self.served[served] = self.now

    def _waiting_since(self):
        """Since when each queue waits: since its first pair was queued, or since it was served last."""
        queued = {}
        for leg in self.legs.values():
            if leg.pull.live:
                for program_id in {leg.pairs[target] for target in leg.waiting}:
                    queue = (leg.peer, program_id, leg.pull.request.priority)
                    queued[queue] = min(queued.get(queue, leg.queued_at), leg.queued_at)
        return {queue: max(since, self.served.get(queue, since)) for queue, since in queued.items()}

    def _reported(self, event):
        """Each pull starts once, ends once, and is quiescent only after it has failed."""
        pull = self.pulls[event.pull_id]
        assert event.request_id == pull.request.request_id
        match event:
            case TransferStarted():
                assert pull.kinds == []
            case TransferRetried():
                leg = next(leg for leg in pull.legs if leg.early and leg.peer == event.peer)
                leg.early, leg.admitted, leg.awaits, leg.waiting = False, False, True, set()
                assert pull.live
            case TransferCompleted(report=report):
                assert pull.live
                assert all(leg.admitted and leg.held and not leg.waiting for leg in pull.legs)
                assert not self._in_flight(pull)
                assert report.nbytes == sum(PROGRAMS[part][0] for leg in pull.legs for part in leg.pairs.values())
            case TransferFailed():
                assert pull.live or (pull.doomed and TransferFailed not in pull.kinds)
                assert event.quarantined == self._in_flight(pull)
                if event.code == "deadline_exceeded":
                    assert event.peer in PEERS
                    blamed = {flight.peer for flight in self._flights_of(pull)}
                    assert not (pull.doomed and blamed) or event.peer in blamed, "a peer that owes nothing is blamed"
            case TransferQuiesced():
                assert TransferFailed in pull.kinds
                assert TransferQuiesced not in pull.kinds
                assert not self._in_flight(pull)
        pull.reported.append(event)

    def has_room(self, peer, priority):
        """Whether a batch may be added: the windows are not full, or a quarter is for it because it is urgent."""
        limits = LIMITS.peer_bytes, LIMITS.peer_descriptors, LIMITS.total_bytes
        held = *self.in_flight(peer), self.in_flight()[0]
        urgent = *self.in_flight(peer, priority), self.in_flight(None, priority)[0]
        numbers = [*zip(limits, held, urgent, strict=True)]
        return all(
            all(now < limit for limit, now, _ in window)
            or all(now < 2 * limit and ahead < limit / 4 for limit, now, ahead in window)
            for window in (numbers[:2], numbers[2:])
        )

    def in_flight(self, peer=None, priority=None):
        """Bytes and descriptors in flight, of what is as urgent as that or more."""
        sizes = [
            [len(flight.pairs.target) * unit for unit in PROGRAMS[flight.program_id]]
            for read_id, flight in self.flights.items()
            if peer in (None, flight.peer) and read_id not in self.written_off
            if priority is None or flight.priority <= priority
        ]
        return tuple(sum(column) for column in zip(*sizes, strict=True)) or (0, 0)

    def check(self):
        """What holds after every call."""
        assert self.scheduler.in_flight() == self.in_flight()
        for pull in self.pulls.values():
            failed, quiesced = TransferFailed in pull.kinds, TransferQuiesced in pull.kinds
            assert quiesced == (failed and not self._in_flight(pull))
        open_pulls = {number for number, pull in self.pulls.items() if pull.live or self._in_flight(pull)}
        assert {*self.scheduler.open_pulls()} == open_pulls
        assert self.scheduler.busy == bool(open_pulls)
        for pull in self.pulls.values():
            if pull.live:
                for leg in pull.legs:
                    has_room = self.has_room(leg.peer, pull.request.priority)
                    assert not (leg.waiting and has_room), "there is work and room, and nothing was dispatched"

    def _in_flight(self, pull):
        return bool(self._flights_of(pull))

    def _flights_of(self, pull):
        return [flight for flight in self.flights.values() if pull.request.pull_id in flight.pull_ids]

    def _carries(self, read_id, slot):
        return any(self.owner[target].slot == slot for target in self.flights[read_id].pairs.target.tolist())
