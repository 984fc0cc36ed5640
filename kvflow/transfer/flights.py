"""Batches in flight: the room that they take, and whether their peers get on with them."""

from collections import OrderedDict
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
        wanted_by: how many legs have a part of it and have not failed.
        counted: whether it takes room in the windows; what a lost peer owes does not.
    """

    batch: Batch
    dispatched_at: float
    wanted_by: int
    counted: bool = True


class Flights:
    """All batches that were dispatched and have not ended.

    Args:
        ready: whose windows have the room.
    """

    def __init__(self, ready: ReadyQueues) -> None:
        self._ready = ready
        self._flights: dict[int, _Flight] = {}
        self._by_peer: dict[PeerId, OrderedDict[int, _Flight]] = {}
        self._progress: dict[PeerId, float] = {}

    def begin(self, read_id: int, batch: Batch, now: float, wanted_by: int) -> None:
        """Note that a batch is dispatched, and how many legs have a part of it."""
        flight = _Flight(batch, now, wanted_by)
        self._flights[read_id] = flight
        self._by_peer.setdefault(batch.peer, OrderedDict())[read_id] = flight

    def land(self, read_id: int, arrived_at: float | None = None) -> Batch:
        """Take a batch out of the window, unless its peer's failure did so before.

        Args:
            read_id: of the batch.
            arrived_at: when all of it had arrived, if it has: its peer has done what it owed.
        """
        flight = self._flights.pop(read_id)
        peer = flight.batch.peer
        del self._by_peer[peer][read_id]
        if not self._by_peer[peer]:
            del self._by_peer[peer]
        if flight.counted:
            self._ready.landed(flight.batch)
            if arrived_at is not None:
                self.progressed(peer, arrived_at)
        return flight.batch

    def give_up(self, read_id: int) -> bool:
        """Note that one leg no longer wants its part of a batch; tell whether no leg wants any."""
        flight = self._flights[read_id]
        flight.wanted_by -= 1
        return flight.wanted_by == 0

    def progressed(self, peer: PeerId, now: float) -> None:
        """Note that a peer has done what it owed, or owes nothing until now."""
        self._progress[peer] = now

    def write_off(self, peer: PeerId) -> None:
        """Take no room any more for what a lost peer has in flight, and forget how it got on."""
        for flight in self._by_peer.get(peer, {}).values():
            if flight.counted:
                flight.counted = False
                self._ready.landed(flight.batch)
        self._progress.pop(peer, None)

    def overdue(self, leg: Leg, now: float) -> tuple[str, float]:
        """Tell which phase of a leg has taken longer than its budget, and when to ask again.

        Returns:
            The phase, or "" if none has; and a time that no budget of the leg ends before, whatever happens to it.
        """
        budgets = leg.pull.request.budgets
        phase, since = self._owed(leg)
        budget_s = {"queue": budgets.queue_s, "wire": budgets.wire_s, "fence": budgets.fence_s}[phase]
        if now - since > budget_s:
            return phase, now
        # What begins later ends later than any budget that begins now.
        return "", min(since + budget_s, now + min(budgets.queue_s, budgets.wire_s, budgets.fence_s))

    def _owed(self, leg: Leg) -> tuple[str, float]:
        """Return what a leg waits for, and since when."""
        if leg.state == "queued" and leg.bytes_at is None:
            return "queue", leg.queued_at
        if leg.state != "reading":
            assert leg.bytes_at is not None
            return "fence", leg.bytes_at
        # Without a read of its own in flight a leg waits for room. If its peer has reads in flight, room comes with
        # their progress; if it has none, others take all the room there is, and that is no fault of this peer.
        peer = leg.request.peer
        oldest = min(leg.reads) if leg.reads else next(iter(self._by_peer.get(peer, ())), None)
        if oldest is None:
            return "queue", self._progress.get(peer, leg.queued_at)
        dispatched_at = self._flights[oldest].dispatched_at
        return "wire", max(dispatched_at, self._progress.get(peer, dispatched_at))

    def check(self) -> None:
        """Check the law: the windows hold exactly what is in flight, less what lost peers owe."""
        batches = [flight.batch for flight in self._flights.values() if flight.counted]
        held = (sum(batch.nbytes for batch in batches), sum(batch.descriptors for batch in batches))
        assert held == self._ready.in_flight(), "room in a window was lost or given back twice"
