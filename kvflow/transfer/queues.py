"""Which work is dispatched next: queues per peer, program and priority, and windows of what is in flight.

Fairness has two rules. Urgency grows with waiting, one step of priority for every ``aging_s``, so that no one
starves. What ages is waiting, not being served: a queue waits since its first piece was queued or since its last batch
was cut, whichever is later. Among equally urgent queues the one that has waited longest goes first, so that peers take
turns.

A window holds back what is as urgent as the work that fills it, or less. What is more urgent finds a quarter of the
window free for it, however much is in flight: a pull that is to overtake must not wait until a batch of a bulk pull has
landed. All that is in flight stays below twice the window and one batch.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from msgspec import Struct

from kvflow.heaps import Heap
from kvflow.ids import PeerId
from kvflow.transfer.requests import Demand

URGENT_SHARE = 4
"""One part in so many of a window is free for what is more urgent than the work that fills it: 24 MiB of one peer, and
96 MiB of all peers."""


class Limits(Struct, frozen=True, kw_only=True):
    """Bounds of batches and of what is in flight.

    Attributes:
        batch_bytes: most bytes of one batch. Four chunks: binding is amortised, urgent pulls wait little.
        batch_descriptors: most descriptors of one batch before merging: about 100 us of binding.
        shared_bytes: a batch with as much takes no pairs of a further leg, which would wait for these bytes and save
            only the millisecond that a batch of its own costs.
        peer_bytes: a peer with as much in flight gets no further batch, unless it is more urgent; the last one may
            exceed it. Three batches: one is read while the others are bound and posted.
        peer_descriptors: the same in descriptors.
        total_bytes: the same for all peers together, in bytes.
        pulls_max: pulls that may be open.
        aging_s: waiting time that is worth one step of priority.
    """

    batch_bytes: int = 32 << 20
    batch_descriptors: int = 8192
    shared_bytes: int = 4 << 20
    peer_bytes: int = 96 << 20
    peer_descriptors: int = 3 * 8192
    total_bytes: int = 384 << 20
    pulls_max: int = 65536
    aging_s: float = 1.0


@dataclass(slots=True, eq=False)
class Piece:
    """A demand of one leg, partly dispatched.

    Attributes:
        leg_id: whose.
        demand: what.
        queued_at: since when it waits.
        cursor: pairs before it were dispatched.
    """

    leg_id: int
    demand: Demand
    queued_at: float
    cursor: int = 0

    @property
    def remaining(self) -> int:
        """Pairs that wait."""
        return len(self.demand.pairs.source) - self.cursor


@dataclass(slots=True)
class Batch:
    """What was cut for one dispatch: slices of several legs' demands."""

    peer: PeerId
    program_id: int
    priority: int
    nbytes: int
    descriptors: int
    slices: list[tuple[int, Demand, int, int]]

    def legs(self) -> tuple[int, ...]:
        """Return the ids of the legs that it serves, each once."""
        return tuple(dict.fromkeys(leg_id for leg_id, _, _, _ in self.slices))


@dataclass(slots=True)
class _Window:
    """What is in flight, in all and by priority: bytes and descriptors."""

    nbytes: int = 0
    descriptors: int = 0
    by_priority: dict[int, tuple[int, int]] = field(default_factory=dict)

    def count(self, batch: Batch, sign: int) -> None:
        nbytes, descriptors = sign * batch.nbytes, sign * batch.descriptors
        held = self.by_priority.pop(batch.priority, (0, 0))
        self.nbytes += nbytes
        self.descriptors += descriptors
        if (left := (held[0] + nbytes, held[1] + descriptors)) != (0, 0):
            self.by_priority[batch.priority] = left

    def has_room(self, priority: int, bytes_max: float, descriptors_max: float = math.inf) -> bool:
        if self.nbytes < bytes_max and self.descriptors < descriptors_max:
            return True
        if self.nbytes >= 2 * bytes_max or self.descriptors >= 2 * descriptors_max:
            return False
        urgent = [held for other, held in self.by_priority.items() if other <= priority]
        return (
            sum(nbytes for nbytes, _ in urgent) < bytes_max / URGENT_SHARE
            and sum(descriptors for _, descriptors in urgent) < descriptors_max / URGENT_SHARE
        )


@dataclass(slots=True, eq=False)
class _Queue:
    """Pieces of one peer, program and priority, the oldest first."""

    peer: PeerId
    program_id: int
    priority: int
    served_at: float = -math.inf
    place: tuple[float, int] = (0.0, 0)
    pieces: OrderedDict[Piece, None] = field(default_factory=OrderedDict)

    @property
    def first(self) -> Piece:
        return next(iter(self.pieces))


@dataclass(slots=True, eq=False)
class _Lane:
    """What waits to be read from one peer.

    Attributes:
        queues: by program and priority; at least one.
        orders: the queues by age and urgency together, and by urgency alone; None where there has been but one queue,
            as of a peer that is read a little from now and then.
    """

    queues: dict[tuple[int, int], _Queue] = field(default_factory=dict)
    orders: tuple[Heap[_Queue], Heap[_Queue]] | None = None

    def add(self, queue: _Queue) -> None:
        self.queues[queue.program_id, queue.priority] = queue
        if self.orders is not None:
            self.orders[1].put(queue, queue.priority)
        elif len(self.queues) > 1:
            self.orders = Heap(), Heap()
            for each in self.queues.values():
                self.orders[0].put(each, each.place)
                self.orders[1].put(each, each.priority)

    def move(self, queue: _Queue) -> None:
        if self.orders is not None:
            self.orders[0].put(queue, queue.place)

    def remove(self, queue: _Queue) -> None:
        del self.queues[queue.program_id, queue.priority]
        if self.orders is not None:
            for order in self.orders:
                order.remove(queue)

    def first(self, *, urgent: bool = False) -> _Queue:
        """Return the queue that is served next, or the most urgent one."""
        if self.orders is None:
            return next(iter(self.queues.values()))
        found = self.orders[urgent].first()
        assert found is not None, "a lane without work is deleted"
        return found[1]


class ReadyQueues:
    """Work that waits, and windows that hold it back."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lanes: dict[PeerId, _Lane] = {}
        self._pieces: dict[int, dict[Piece, _Queue]] = {}
        self._windows: dict[PeerId, _Window] = {}
        self._total = _Window()
        self._turn = 0

    def add(self, peer: PeerId, priority: int, piece: Piece) -> None:
        """Queue a piece."""
        lane = self._lanes.get(peer)
        if lane is None:
            lane = self._lanes[peer] = _Lane()
        key = (piece.demand.program_id, priority)
        queue = lane.queues.get(key)
        if queue is None:
            queue = _Queue(peer, *key)
            lane.add(queue)
        queue.pieces[piece] = None
        self._pieces.setdefault(piece.leg_id, {})[piece] = queue
        if len(queue.pieces) == 1:
            self._stand_in_line(lane, queue)

    def remove_leg(self, leg_id: int) -> None:
        """Drop all pieces of a leg."""
        for piece, queue in self._pieces.pop(leg_id, {}).items():
            first = queue.first is piece
            del queue.pieces[piece]
            if first:
                self._stand_in_line(self._lanes[queue.peer], queue)

    def cut(self, now: float) -> Batch | None:
        """Cut the next batch and count it as in flight; None when nothing waits or the windows are full."""
        if not self._lanes:
            return None
        ready = [found for peer, lane in self._lanes.items() if (found := self._next_of(peer, lane)) is not None]
        if not ready:
            return None
        queue = ready[0] if len(ready) == 1 else min(ready, key=lambda queue: queue.place)
        batch = self._fill(queue)
        queue.served_at = now
        self._stand_in_line(self._lanes[queue.peer], queue)
        for window in (self._windows.setdefault(queue.peer, _Window()), self._total):
            window.count(batch, 1)
        return batch

    def landed(self, batch: Batch) -> None:
        """Give a batch's room back."""
        window = self._windows[batch.peer]
        for counted in (window, self._total):
            counted.count(batch, -1)
        if not window.descriptors:
            del self._windows[batch.peer]

    def in_flight(self) -> tuple[int, int]:
        """Return bytes and descriptors in flight from all peers."""
        return self._total.nbytes, self._total.descriptors

    def _next_of(self, peer: PeerId, lane: _Lane) -> _Queue | None:
        """Return which queue of a peer is served next, if there is room for it."""
        first = lane.first()
        if self._has_room(peer, first.priority):
            return first
        # The most urgent one may pass a full window; if it may not, no other may.
        urgent = lane.first(urgent=True)
        return urgent if urgent is not first and self._has_room(peer, urgent.priority) else None

    def _has_room(self, peer: PeerId, priority: int) -> bool:
        limits, total, window = self._limits, self._total, self._windows.get(peer)
        return (total.nbytes < limits.total_bytes or total.has_room(priority, limits.total_bytes)) and (
            window is None or window.has_room(priority, limits.peer_bytes, limits.peer_descriptors)
        )

    def _stand_in_line(self, lane: _Lane, queue: _Queue) -> None:
        """Put a queue where its waiting and its urgency place it, or forget it if it is empty."""
        if queue.pieces:
            self._turn += 1
            waits_since = max(queue.served_at, queue.first.queued_at)
            queue.place = (waits_since + queue.priority * self._limits.aging_s, self._turn)
            lane.move(queue)
            return
        lane.remove(queue)
        if not lane.queues:
            del self._lanes[queue.peer]

    def _fill(self, queue: _Queue) -> Batch:
        batch = Batch(queue.peer, queue.program_id, queue.priority, 0, 0, [])
        while queue.pieces:
            piece = queue.first
            demand = piece.demand
            room = min(
                (self._limits.batch_bytes - batch.nbytes) // demand.read_bytes,
                (self._limits.batch_descriptors - batch.descriptors) // demand.unit_descriptors,
            )
            count = min(piece.remaining, room)
            if count < 1:
                if batch.slices:
                    break
                count = 1  # a pair that exceeds the budget by itself travels alone
            batch.slices.append((piece.leg_id, demand, piece.cursor, piece.cursor + count))
            batch.nbytes += count * demand.read_bytes
            batch.descriptors += count * demand.unit_descriptors
            piece.cursor += count
            if not piece.remaining:
                self._forget(piece, queue)
            if batch.nbytes >= self._limits.shared_bytes:
                break
        return batch

    def _forget(self, piece: Piece, queue: _Queue) -> None:
        del queue.pieces[piece]
        pieces = self._pieces[piece.leg_id]
        del pieces[piece]
        if not pieces:
            del self._pieces[piece.leg_id]
