"""Which work is dispatched next: queues per peer, program and priority, and windows of what is in flight.

Fairness has two rules. Urgency grows with waiting, one step of priority for every ``aging_s``, so that no one
starves. Among equally urgent queues the one served longest ago goes first, so that peers take turns; a new queue counts
as served just now, or a stream of small pulls, each a new queue, would always go before a long one.
"""

from collections import deque
from dataclasses import dataclass, field

from msgspec import Struct

from kvflow.ids import PeerId
from kvflow.transfer.requests import Demand


class Limits(Struct, frozen=True, kw_only=True):
    """Bounds of batches and of what is in flight.

    Attributes:
        batch_bytes: most bytes of one batch. Four chunks: binding is amortised, urgent pulls wait little.
        batch_descriptors: most descriptors of one batch before merging: about 100 us of binding.
        shared_bytes: a batch with as much takes no pairs of a further leg, which would wait for these bytes and save
            only the millisecond that a batch of its own costs.
        peer_bytes: a peer with as much in flight gets no further batch; the last one may exceed it. Three batches: one
            is read while the others are bound and posted.
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


@dataclass(slots=True)
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
    nbytes: int = 0
    descriptors: int = 0


@dataclass(slots=True)
class _Queue:
    served: int
    pieces: deque[Piece] = field(default_factory=deque)


_Key = tuple[PeerId, int, int]


class ReadyQueues:
    """Work that waits, and windows that hold it back."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._queues: dict[_Key, _Queue] = {}
        self._windows: dict[PeerId, _Window] = {}
        self._total = _Window()
        self._turn = 0

    def add(self, peer: PeerId, priority: int, piece: Piece) -> None:
        """Queue a piece."""
        key = (peer, piece.demand.program_id, priority)
        if key not in self._queues:
            self._queues[key] = _Queue(served=self._turn)
        self._queues[key].pieces.append(piece)

    def remove_leg(self, leg_id: int) -> None:
        """Drop all pieces of a leg."""
        for key, queue in list(self._queues.items()):
            kept = deque(piece for piece in queue.pieces if piece.leg_id != leg_id)
            queue.pieces = kept
            if not kept:
                del self._queues[key]

    def cut(self, now: float) -> Batch | None:
        """Cut the next batch and count it as in flight; None when nothing waits or the windows are full."""
        open_keys = [key for key in self._queues if self._has_room(key[0])]
        if not open_keys:
            return None
        key = min(open_keys, key=lambda candidate: self._rank(candidate, now))
        queue = self._queues[key]
        self._turn += 1
        queue.served = self._turn
        # The aged rank travels along: the transport must not undo by priority what waiting has earned.
        batch = self._fill(key, queue, self._rank(key, now)[0])
        if not queue.pieces:
            del self._queues[key]
        window = self._windows.setdefault(key[0], _Window())
        for counted in (window, self._total):
            counted.nbytes += batch.nbytes
            counted.descriptors += batch.descriptors
        return batch

    def landed(self, batch: Batch) -> None:
        """Give a batch's room back."""
        window = self._windows[batch.peer]
        for counted in (window, self._total):
            counted.nbytes -= batch.nbytes
            counted.descriptors -= batch.descriptors
        if not window.descriptors:
            del self._windows[batch.peer]

    def in_flight(self) -> tuple[int, int]:
        """Return bytes and descriptors in flight from all peers."""
        return self._total.nbytes, self._total.descriptors

    def _has_room(self, peer: PeerId) -> bool:
        window = self._windows.get(peer)
        return self._total.nbytes < self._limits.total_bytes and (
            window is None
            or (window.nbytes < self._limits.peer_bytes and window.descriptors < self._limits.peer_descriptors)
        )

    def _rank(self, key: _Key, now: float) -> tuple[int, int]:
        queue = self._queues[key]
        waited_s = now - queue.pieces[0].queued_at
        return (key[2] - int(waited_s / self._limits.aging_s), queue.served)

    def _fill(self, key: _Key, queue: _Queue, priority: int) -> Batch:
        peer, program_id, _ = key
        batch = Batch(peer, program_id, priority, 0, 0, [])
        while queue.pieces:
            piece = queue.pieces[0]
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
                queue.pieces.popleft()
            if batch.nbytes >= self._limits.shared_bytes:
                break
        return batch
