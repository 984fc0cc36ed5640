"""Batches in flight: the room that they take, and whether their peers get on with them."""

from dataclasses import dataclass

from kvflow.ids import PeerId
from kvflow.transfer.pulls import Leg
from kvflow.transfer.queues import Batch, ReadyQueues


@dataclass(slots=True)
class _Flight:
    """A batch that was dispatched.

    Attributes:
        batch: what it reads.
        dispatched_at: when.
        counted: whether it takes room in the windows; what a lost peer owes does not.
    """

    batch: Batch
    dispatched_at: float
    counted: bool = True


class Flights:
    """All batches that were dispatched and have not ended.

    Args:
        ready: whose windows have the room.
    """

    def __init__(self, ready: ReadyQueues) -> None:
        self._ready = ready
        self._flights: dict[int, _Flight] = {}
        self._progress: dict[PeerId, float] = {}

    def begin(self, read_id: int, batch: Batch, now: float) -> None:
        """Note that a batch is dispatched."""
        self._flights[read_id] = _Flight(batch, now)

    def land(self, read_id: int) -> Batch:
        """Take a batch out of the window, unless its peer's failure did so before."""
        flight = self._flights.pop(read_id)
        if flight.counted:
            self._ready.landed(flight.batch)
        return flight.batch

    def legs(self, read_id: int) -> tuple[int, ...]:
        """Return the ids of the legs that have a part of a batch."""
        return self._flights[read_id].batch.legs()

    def progressed(self, peer: PeerId, now: float) -> None:
        """Note that a peer has done what it owed, or owes nothing until now."""
        self._progress[peer] = now

    def write_off(self, peer: PeerId) -> None:
        """Take no room any more for what a lost peer has in flight, and forget how it got on."""
        for flight in self._flights.values():
            if flight.batch.peer == peer and flight.counted:
                flight.counted = False
                self._ready.landed(flight.batch)
        self._progress.pop(peer, None)

    def overdue(self, leg: Leg, now: float) -> str:
        """Return the phase of a leg that has taken longer than its budget; "" if none has."""
        budgets = leg.pull.request.budgets
        if leg.state == "queued" and leg.bytes_at is None:
            return "queue" if now - leg.queued_at > budgets.queue_s else ""
        if leg.state == "reading":
            peer = leg.request.peer
            # Without a read of its own in flight a leg waits for room. If its peer has reads in flight, room comes with
            # their progress; if it has none, others take all the room there is, and that is no fault of this peer.
            reads = leg.reads or {read_id for read_id, flight in self._flights.items() if flight.batch.peer == peer}
            if not reads:
                since = self._progress.get(peer, leg.queued_at)
                return "queue" if now - since > budgets.queue_s else ""
            oldest = min(self._flights[read_id].dispatched_at for read_id in reads)
            since = max(oldest, self._progress.get(peer, oldest))
            return "wire" if now - since > budgets.wire_s else ""
        return "fence" if leg.bytes_at is not None and now - leg.bytes_at > budgets.fence_s else ""

    def check(self) -> None:
        """Check the law: the windows hold exactly what is in flight, less what lost peers owe."""
        batches = [flight.batch for flight in self._flights.values() if flight.counted]
        held = (sum(batch.nbytes for batch in batches), sum(batch.descriptors for batch in batches))
        assert held == self._ready.in_flight(), "room in a window was lost or given back twice"
