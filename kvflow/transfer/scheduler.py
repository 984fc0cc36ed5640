"""The scheduler: requests in, batches out, one decision per event. Sans-IO.

Every method takes what happened and ``now`` (seconds of a monotonic clock) and returns what the shell must do,
in order: ``Dispatch``, ``CancelReads``, ``RenewLease``, and the events to report. A completion frees window
and dispatches the next batch in the same call; nothing waits for a timer or an engine step.

A pull has one leg per source rank. Each leg is fenced by itself, after all its bytes have arrived; the pull is
complete when every leg is delivered, and fails as a whole with the first leg that fails. A fence that finds the lease
held proves that it had not ended before the bytes were read, and not that it had begun. A lease that may be admitted
after its ticket was handed out is therefore looked at before its bytes are read, too, by the transport, in the same go.
If it is not held then, nothing is read. It is looked at again every now and then, and read once it is held.
"""

from collections.abc import Collection

from msgspec.structs import replace

from kvflow.cache.epochs import judge
from kvflow.errors import CapacityExceeded
from kvflow.heaps import Heap
from kvflow.ids import PeerId
from kvflow.transfer.events import (
    TransferFailed,
    TransferQuiesced,
    TransferRetried,
    TransferStarted,
)
from kvflow.transfer.flights import Flights
from kvflow.transfer.pairs import UnitPairs
from kvflow.transfer.pulls import Leg, Pull
from kvflow.transfer.queues import Batch, Limits, Piece, ReadyQueues
from kvflow.transfer.requests import (
    NOT_HELD,
    CancelReads,
    Dispatch,
    Effect,
    EpochCheck,
    LeaseShare,
    Look,
    PullRequest,
    RenewLease,
    join_pairs,
    join_shares,
)
from kvflow.transfer.states import LegState

_PHASES: dict[LegState, str] = {"queued": "queue", "reading": "wire", "fencing": "fence"}
"""Where a pull is that fails together with a peer."""

RENEWALS_PER_LEASE = 3
"""Two renewals may be lost before a lease runs out under a pull."""


class Scheduler:
    """Decide what is read when.

    Thread: not thread-safe; it belongs to the worker's event loop.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._ready = ReadyQueues(limits)
        self._pulls: dict[int, Pull] = {}
        self._legs: dict[int, Leg] = {}
        self._by_peer: dict[PeerId, dict[int, Leg]] = {}
        # When each leg is to be looked at by ``tick``, which looks at no other.
        self._due: Heap[int] = Heap()
        self._flights = Flights(self._ready)
        self._fences: dict[int, int] = {}
        self._looks: dict[int, int] = {}
        self._next_id = 0

    @property
    def busy(self) -> bool:
        """Whether any pull is open, draining ones included: then ``tick`` must be called."""
        return bool(self._pulls)

    def open_pulls(self) -> tuple[int, ...]:
        """Return the ids of all pulls that have not ended or are draining."""
        return tuple(self._pulls)

    def in_flight(self) -> tuple[int, int]:
        """Return bytes and descriptors in flight."""
        return self._ready.in_flight()

    def check(self) -> None:
        """Check the law: the windows hold exactly what is in flight, less what lost peers owe."""
        self._flights.check()

    def submit(self, request: PullRequest, now: float, *, hold: bool = False) -> list[Effect]:
        """Open a pull.

        Args:
            request: what to read.
            now: seconds.
            hold: dispatch nothing yet, because others may follow in the same turn; ``pump`` does. Requests that are
                there together share batches: a small one costs more to bind, post and fence than to read.

        Raises:
            CapacityExceeded: too many pulls are open.
        """
        if len(self._pulls) >= self._limits.pulls_max:
            raise CapacityExceeded("open pulls", self._limits.pulls_max)
        pull = Pull(request, now)
        self._pulls[request.pull_id] = pull
        for leg_request in request.legs:
            leg_id = self._new_id()
            # A ticket may have spent most of its lease in a router: the first renewal is due at once.
            leg = Leg(pull, leg_request, renew_at=now, queued_at=now, admitted=leg_request.admitted)
            self._legs[leg_id] = leg
            self._by_peer.setdefault(leg_request.peer, {})[leg_id] = leg
            self._due.put(leg_id, now)
            pull.legs.append(leg_id)
            self._enqueue(leg_id, leg, now)
        return [] if hold else self.pump(now)

    def pump(self, now: float) -> list[Effect]:
        """Dispatch batches while there is work and room."""
        effects: list[Effect] = []
        while (batch := self._ready.cut(now)) is not None:
            effects += self._dispatch(batch, now)
        return effects

    def on_read_completed(
        self,
        read_id: int,
        *,
        posted_s: float,
        now: float,
        scattered_s: float = 0.0,
        unheld: Collection[tuple[int, int]] = (),
    ) -> list[Effect]:
        """Note that every byte of a batch has arrived, except of leases that were not held (``unheld``)."""
        batch = self._flights.land(read_id, now)
        effects: list[Effect] = []
        for leg_id, demand, first, last in batch.slices:
            self._legs[leg_id].nbytes += (last - first) * demand.unit_bytes
        for leg_id in batch.legs():
            leg = self._legs[leg_id]
            leg.reads.discard(read_id)
            leg.unheld |= (leg.request.slot, leg.request.epoch) in unheld
            leg.pull.posted_s += posted_s
            leg.pull.scattered_s += scattered_s
            leg.pull.arrived_at = now
            if leg.state == "draining":
                effects += self._drain(leg.pull)
            elif not leg.reads and not leg.waiting:
                leg.move("bytes_arrived")
                leg.bytes_at = now
        return effects + self.pump(now)

    def on_read_failed(self, read_id: int, *, code: str, detail: str, now: float) -> list[Effect]:
        """Note that a batch has ended early, and will not write any more."""
        batch = self._flights.land(read_id)
        legs = [self._legs[leg_id] for leg_id in batch.legs()]
        for leg in legs:
            leg.reads.discard(read_id)
        if code == NOT_HELD:
            self._queue_again(batch, now)
        effects: list[Effect] = []
        for leg in legs:
            if leg.pull.failed:
                effects += self._drain(leg.pull)
            elif code != NOT_HELD:
                effects += self._fail(leg.pull, code, phase="wire", peer=batch.peer, detail=detail, now=now)
        return effects + self.pump(now)

    def on_fence_judged(self, fence_id: int, *, observed: int, fence_s: float, now: float) -> list[Effect]:
        """Take what the epoch slot held after the data had been read, or before if it was a look."""
        if fence_id in self._looks:
            return self._on_looked(self._looks.pop(fence_id), observed, now)
        return self._on_fenced(fence_id, observed, fence_s, now)

    def on_fence_failed(self, fence_id: int, *, code: str, detail: str, now: float) -> list[Effect]:
        """Note that the epoch could not be read: without it nothing is delivered."""
        leg: Leg | None
        if fence_id in self._looks:
            leg = self._legs[self._looks.pop(fence_id)]
            if not leg.awaits_admission:
                return []  # its reads fail with it
        else:
            leg = self._fenced(fence_id)
        if leg is None:
            return []
        return self._fail(leg.pull, code, phase="fence", peer=leg.request.peer, detail=detail, now=now) + self.pump(now)

    def on_peer_failed(self, peer: PeerId, *, code: str, detail: str, now: float) -> list[Effect]:
        """End every pull that needs this peer.

        What it has in flight stays in quarantine, but no longer takes room from other peers.
        """
        effects: list[Effect] = []
        self._flights.write_off(peer)
        for leg in tuple(self._by_peer.get(peer, {}).values()):
            if leg.state in ("queued", "reading", "fencing") and not leg.pull.failed:
                effects += self._fail(leg.pull, code, phase=_PHASES[leg.state], peer=peer, detail=detail, now=now)
        return effects + self.pump(now)

    def cancel(self, pull_id: int, *, code: str, detail: str, now: float) -> list[Effect]:
        """Give up a pull; does nothing if it has ended."""
        pull = self._pulls.get(pull_id)
        if pull is None or pull.failed:
            return []
        states = {self._legs[leg_id].state for leg_id in pull.legs}
        phase = "wire" if "reading" in states else "queue" if "queued" in states else "fence"
        return self._fail(pull, code, phase=phase, peer=None, detail=detail, now=now) + self.pump(now)

    def tick(self, now: float, held_up: Collection[PeerId] = ()) -> list[Effect]:
        """Apply deadlines, renewals and retries. Worth calling every few tens of milliseconds while ``busy``.

        Args:
            now: seconds.
            held_up: peers that the transport has asked for nothing yet of what was dispatched. They owe us no
                completion, so their budgets begin when they are asked.
        """
        effects: list[Effect] = []
        for peer in held_up:
            if peer in self._by_peer:
                self._flights.progressed(peer, now)
        for leg_id in self._due.take_until(now):
            leg = self._legs.get(leg_id)
            if leg is None:
                continue  # its pull has just ended with another of its legs
            if leg.pull.failed:
                effects += self._stop_holding_back(leg.pull, now)
            elif leg.state != "delivered":
                effects += self._look_after(leg_id, leg, now)
        return effects + self.pump(now)

    def _look_after(self, leg_id: int, leg: Leg, now: float) -> list[Effect]:
        """Do what is due for a leg, and note when something will be."""
        effects: list[Effect] = []
        request = leg.request
        if leg.retry_at is not None and leg.retry_at <= now:
            leg.retry_at = None
            effects.append(Look(request.peer, self._look(leg_id)))
        if leg.renew_at <= now:
            leg.renew_at = now + request.lease_s / RENEWALS_PER_LEASE
            effects.append(RenewLease(request.peer, request.slot, request.epoch))
        overdue, again_at = self._flights.overdue(leg, now)
        if overdue:
            detail = f"{overdue} took longer than its budget"
            failed = self._fail(leg.pull, "deadline_exceeded", phase=overdue, peer=request.peer, detail=detail, now=now)
            return effects + failed
        waits_until = again_at if leg.retry_at is None else leg.retry_at
        self._due.put(leg_id, min(again_at, leg.renew_at, waits_until))
        return effects

    def _on_fenced(self, fence_id: int, observed: int, fence_s: float, now: float) -> list[Effect]:
        """Take what the epoch slot held after the data had been read."""
        leg_id, leg = self._fences.get(fence_id, -1), self._fenced(fence_id)
        if leg is None:
            return []
        pull = leg.pull
        pull.fence_s = max(pull.fence_s, fence_s)
        verdict = judge(leg.request.epoch, observed)
        if verdict == "stale":
            return self._fail_stale(leg, observed, now)
        if verdict == "early":
            leg.move("fence_early")
            return self._await_admission(leg_id, leg, now)
        if leg.unheld:
            return self._read_again(leg_id, leg, now)
        leg.move("fence_held")
        if any(self._legs[leg_id].state != "delivered" for leg_id in pull.legs):
            return []
        self._forget(pull)
        return [pull.completed()]

    def _on_looked(self, leg_id: int, observed: int, now: float) -> list[Effect]:
        """Take what the epoch slot held before the data were read, or while their lease was waited for."""
        leg = self._legs[leg_id]
        leg.look_id = -1
        verdict = judge(leg.request.epoch, observed)
        if verdict == "stale":
            return self._fail_stale(leg, observed, now)
        if verdict == "held":
            leg.admitted = True
            return self._read(leg_id, leg, now) if leg.awaits_admission else []
        if leg.state == "reading":
            self._ready.remove_leg(leg_id)
            leg.move("look_early")
        return self._await_admission(leg_id, leg, now)

    def _await_admission(self, leg_id: int, leg: Leg, now: float) -> list[Effect]:
        """Look at a lease again later, because it is not admitted yet."""
        leg.count_early()
        self._due.put(leg_id, leg.wait_for_admission(now))
        request = leg.pull.request
        return [TransferRetried(request.pull_id, request.request_id, str(leg.request.peer))]

    def _queue_again(self, batch: Batch, now: float) -> None:
        """Queue what was not read because of another pull's lease, and count a read of none of its pulls."""
        for leg_id in batch.legs():
            self._legs[leg_id].pull.reads -= 1
        for leg_id, demand, first, last in batch.slices:
            leg = self._legs[leg_id]
            if leg.state == "reading":
                pairs = UnitPairs(demand.pairs.source[first:last], demand.pairs.target[first:last])
                leg.waiting += last - first
                self._ready.add(batch.peer, batch.priority, Piece(leg_id, replace(demand, pairs=pairs), now))

    def _fail_stale(self, leg: Leg, observed: int, now: float) -> list[Effect]:
        detail = f"the lease ended before the read did: epoch {leg.request.epoch}, the slot holds {observed}"
        failed = self._fail(leg.pull, "stale_lease", phase="fence", peer=leg.request.peer, detail=detail, now=now)
        return failed + self.pump(now)

    def _read_again(self, leg_id: int, leg: Leg, now: float) -> list[Effect]:
        """Read all that a leg must give once more: its lease is held, and something was not served."""
        if leg.again:
            detail = "the producer holds the lease, and does not serve its blocks"
            failed = self._fail(
                leg.pull, "transport_error", phase="fence", peer=leg.request.peer, detail=detail, now=now
            )
            return failed + self.pump(now)
        leg.again = True
        leg.move("lease_found")
        return self._read(leg_id, leg, now)

    def _read(self, leg_id: int, leg: Leg, now: float) -> list[Effect]:
        """Read all that a leg must give, with budgets from now on."""
        leg.queued_at, leg.bytes_at = now, None
        self._enqueue(leg_id, leg, now)
        return self.pump(now)

    def _enqueue(self, leg_id: int, leg: Leg, now: float) -> None:
        """Queue all that a leg must give."""
        leg.waiting = leg.nbytes = 0
        leg.unheld = False
        for demand in leg.request.demands:
            leg.waiting += len(demand.pairs.source)
            self._ready.add(leg.request.peer, leg.pull.request.priority, Piece(leg_id, demand, now))

    def _dispatch(self, batch: Batch, now: float) -> list[Effect]:
        read_id = self._new_id()
        legs = batch.legs()
        self._flights.begin(read_id, batch, now, wanted_by=len(legs))
        started: list[Effect] = []
        shares: list[LeaseShare] = []
        for leg_id, _, first, last in batch.slices:
            leg = self._legs[leg_id]
            pull = leg.pull
            lease = leg.request
            shares.append(LeaseShare(lease.slot, lease.epoch, last - first, lease.mac))
            leg.reads.add(read_id)
            leg.waiting -= last - first
            leg.move("dispatched")
            if pull.started_at is None:
                pull.started_at = now
                queue_s = now - pull.submitted_at
                started.append(TransferStarted(pull.request.pull_id, pull.request.request_id, queue_s))
        for leg_id in legs:
            self._legs[leg_id].pull.reads += 1
        dispatch = Dispatch(
            read_id=read_id,
            peer=batch.peer,
            program_id=batch.program_id,
            pairs=join_pairs([(demand.pairs, first, last) for _, demand, first, last in batch.slices]),
            leases=join_shares(shares),
            priority=batch.priority,
            fences=tuple(self._fence(leg_id) for leg_id in legs if not self._legs[leg_id].waiting),
            looks=tuple(self._look(leg_id) for leg_id in legs if not self._legs[leg_id].admitted),
            pull_ids=tuple(self._legs[leg_id].pull.request.pull_id for leg_id in legs),
        )
        return [dispatch, *started]  # bytes before words

    def _fence(self, leg_id: int) -> EpochCheck:
        """Fence a leg whose last pair has just been dispatched, behind all its reads in flight."""
        leg = self._legs[leg_id]
        leg.fence_id = self._new_id()
        self._fences[leg.fence_id] = leg_id
        return EpochCheck(leg.fence_id, leg.request.slot, leg.request.epoch, tuple(sorted(leg.reads)))

    def _look(self, leg_id: int) -> EpochCheck:
        """Return the look at a leg's lease, one for all batches until its verdict is known."""
        leg = self._legs[leg_id]
        if leg.look_id < 0:
            leg.look_id = self._new_id()
            self._looks[leg.look_id] = leg_id
        return EpochCheck(leg.look_id, leg.request.slot, leg.request.epoch, ())

    def _fenced(self, fence_id: int) -> Leg | None:
        """Return the leg that a verdict is about; None when its pull has ended meanwhile."""
        leg = self._legs.get(self._fences.pop(fence_id, -1))
        return leg if leg is not None and leg.fence_id == fence_id and leg.state == "fencing" else None

    def _fail(self, pull: Pull, code: str, *, phase: str, peer: PeerId | None, detail: str, now: float) -> list[Effect]:
        """End a pull: queued work is dropped, posted work is waited for."""
        pull.failed = True
        reads: set[int] = set()
        legs = [self._legs[leg_id] for leg_id in pull.legs]
        arrived = all(leg.state in ("fencing", "delivered") for leg in legs)
        timings_s = pull.timings_s(pull.arrived_at if arrived else now)
        if arrived:
            timings_s["fence"] = max(pull.fence_s, now - pull.arrived_at)
        for leg_id, leg in zip(pull.legs, legs, strict=True):
            leg.move("failed")
            self._ready.remove_leg(leg_id)
            self._due.remove(leg_id)
            self._fences.pop(leg.fence_id, None)
            self._looks.pop(leg.look_id, None)
            reads |= leg.reads
        request = pull.request
        failure = TransferFailed(
            request.pull_id,
            request.request_id,
            code,
            phase,
            "" if peer is None else str(peer),
            detail,
            quarantined=bool(reads),
            nbytes=sum(leg.nbytes for leg in legs),
            nbytes_wanted=request.nbytes,
            timings_s=timings_s,
        )
        effects: list[Effect] = [failure]
        if code == "stale_lease" and reads:
            # A stale lease implies quiescence: it is told when the other ranks' reads have ended as well.
            pull.held_back, pull.held_since = replace(failure, quarantined=False), now
            self._due.put(pull.legs[0], now + request.budgets.wire_s)
            effects.clear()
        unwanted = tuple(sorted(read_id for read_id in reads if self._flights.give_up(read_id)))
        if unwanted:
            effects.append(CancelReads(unwanted))
        return effects + self._drain(pull)

    def _stop_holding_back(self, pull: Pull, now: float) -> list[Effect]:
        """Tell of a failure whose reads do not end, as what it is by now: a peer that took too long."""
        failure = pull.held_back
        if failure is None:
            return []
        if now - pull.held_since <= pull.request.budgets.wire_s:
            self._due.put(pull.legs[0], now)
            return []
        pull.held_back = None
        hung = next(leg.request.peer for leg in map(self._legs.__getitem__, pull.legs) if leg.reads)
        detail = "wire took longer than its budget"
        return [
            replace(failure, code="deadline_exceeded", phase="wire", peer=str(hung), detail=detail, quarantined=True)
        ]

    def _drain(self, pull: Pull) -> list[Effect]:
        """Report quiescence once nothing of a failed pull is in flight."""
        if any(self._legs[leg_id].reads for leg_id in pull.legs):
            return []
        for leg_id in pull.legs:
            self._legs[leg_id].move("drained")
        self._forget(pull)
        held_back: list[Effect] = [] if pull.held_back is None else [pull.held_back]
        return [*held_back, TransferQuiesced(pull.request.pull_id, pull.request.request_id)]

    def _forget(self, pull: Pull) -> None:
        del self._pulls[pull.request.pull_id]
        for leg_id in pull.legs:
            leg = self._legs.pop(leg_id)
            self._due.remove(leg_id)
            self._fences.pop(leg.fence_id, None)
            self._looks.pop(leg.look_id, None)
            of_peer = self._by_peer[leg.request.peer]
            del of_peer[leg_id]
            if not of_peer:
                del self._by_peer[leg.request.peer]

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id
