"""Which chunk is next, which fence is due, and what has ended. Pure: no threads, no clock, no bytes.

Every read that is admitted or refused here ends in exactly one ``ReadCompleted`` or ``ReadFailed``, each of its
fences in exactly one ``FenceJudged`` or ``FenceFailed``. A read ends only when none of its chunks is in flight:
the events are terminal by construction. A fence becomes due only when each read it waits for has completed. A look is
a fence that is due at once. The reads that have it wait for it, and are not posted unless it finds the lease held.

The caller alternates: ``take`` a piece of work, post it, and report ``arrived``, ``judged`` or ``failed`` once
it is terminal. Methods return the events that follow, in order.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvflow.cache.epochs import judge
from kvflow.ids import PeerId
from kvflow.transfer.requests import NOT_HELD
from kvflow.transport.base import (
    Fence,
    FenceFailed,
    FenceJudged,
    Read,
    ReadCompleted,
    ReadFailed,
    TransportEvent,
)
from kvflow.transport.buffers import Buffers

CHUNKS_IN_FLIGHT_MAX = 2
"""Per peer. On shared memory none is ever in flight: the post is the copy. On TCP the second keeps the wire busy
between two polls: 1.60 against 1.49 GB/s with one (64 MiB over loopback, medians), and 4 or 8 add nothing but
delay for whatever is urgent or cancelled."""

FENCES_IN_FLIGHT_MAX = 8
"""Per peer. A hung peer keeps its fences in flight for ever; this bounds what it can hold."""

OVERTAKEN_MAX = 8
"""Chunks in a row that may go before the oldest read because they are more urgent. Then the oldest read has one: urgent
reads keep eight ninths of the wire, and every other read gets on. Beside an endless stream of urgent reads a batch of
four chunks takes 1.5 s at 0.2 GB/s, a twentieth of the time that a hung peer is given."""

ENDED_MAX = 1 << 16
"""How many ended reads are remembered for fences that name them later: hundreds of requests of hundreds of reads."""

NO_BUFFER = -1
"""Of a chunk that lands where it belongs."""

Events = list[TransportEvent]


class Chunk(Struct, frozen=True, eq=False):
    """Descriptors ``[first, stop)`` of a read, or units if it has a staging ``buffer``."""

    read: Read
    first: int
    stop: int
    buffer: int = NO_BUFFER

    @property
    def peer(self) -> PeerId:
        """Whom it is read from."""
        return self.read.peer


class DueFence(Struct, frozen=True, eq=False):
    """A fence whose reads have all completed.

    Attributes:
        peer: whose slot it reads.
        fence: what the caller gave.
        after: ids of the reads that it fences, its own among them; empty for a look.
    """

    peer: PeerId
    fence: Fence
    after: frozenset[int] = frozenset()


Work = Chunk | DueFence


class Reason(Struct, frozen=True):
    """Why something failed: a code of the contract, and words."""

    code: str
    detail: str


@dataclass(slots=True, eq=False)
class _WaitingFence:
    fence: Fence
    peer: PeerId
    after: frozenset[int]
    missing: set[int]


@dataclass(slots=True, eq=False)
class _OpenRead:
    read: Read
    staged: bool = False
    chunk_next: int = 0
    in_flight: int = 0
    doom: Reason | None = None
    turn: int = 0
    posted_s: float = 0.0
    scattered_s: float = 0.0
    unheld: set[tuple[int, int]] = field(default_factory=set)
    wire_from: float = 0.0
    fences: list[_WaitingFence] = field(default_factory=list)
    looks: set[int] = field(default_factory=set)

    @property
    def unposted(self) -> bool:
        return self.doom is None and self.chunk_next < len(self.read.cuts) - 1

    @property
    def unfinished(self) -> bool:
        """Whether there is anything left to drop: a chunk that is not posted, or one that was not scattered."""
        return self.unposted or (self.doom is None and self.staged and self.in_flight > 0)


@dataclass(slots=True, eq=False)
class _Lane:
    """What one peer has to do. Closed when ``closed`` gives the reason; then it only drains.

    Attributes:
        waiting: reads by priority and age; those that have no chunk left may be among them.
        reads: all reads that have not ended, the oldest first.
        due: fences that can be posted.
    """

    waiting: list[tuple[int, int, _OpenRead]] = field(default_factory=list)
    reads: OrderedDict[int, _OpenRead] = field(default_factory=OrderedDict)
    due: deque[DueFence] = field(default_factory=deque)
    chunks_in_flight: int = 0
    fences_in_flight: int = 0
    served: int = 0
    closed: Reason | None = None


class Ledger:
    """Account for the reads and fences of one transport. Thread: one only.

    Args:
        num_buffers: staging buffers for the chunks of staged reads.
    """

    def __init__(self, num_buffers: int = 0) -> None:
        self._buffers = Buffers(num_buffers)
        self._lanes: dict[PeerId, _Lane] = {}
        self._reads: dict[int, _OpenRead] = {}
        self._ended: OrderedDict[int, Reason | None] = OrderedDict()
        self._looks: dict[int, list[_OpenRead]] = {}
        self._looked: OrderedDict[int, Reason | None] = OrderedDict()
        self._turns = 0
        self._overtaken = 0

    @property
    def reads(self) -> frozenset[int]:
        """Ids of the reads that have not ended."""
        return frozenset(self._reads)

    def open(self, peer: PeerId) -> None:
        """Begin to take reads for a peer."""
        assert peer not in self._lanes
        self._lanes[peer] = _Lane()

    def drained(self, peer: PeerId) -> bool:
        """Tell whether a peer was abandoned, or never opened, and has nothing in flight."""
        return peer not in self._lanes

    def staging(self) -> tuple[int, int]:
        """Return how many staging buffers are taken, and how many of these by chunks that nobody wants any more."""
        taken = self._buffers.taken
        return len(taken), sum(self._reads[read_id].doom is not None for read_id in taken.values())

    def waiting_for_buffer(self) -> frozenset[PeerId]:
        """Return the peers that owe us nothing, because what is next of them needs a buffer and none is free."""
        if self._buffers.has_free or not self._buffers.taken:
            return frozenset()
        return frozenset(
            peer
            for peer, lane in self._lanes.items()
            if not lane.chunks_in_flight and (opened := _next_read(lane)) is not None and opened.staged
        )

    def check(self) -> None:
        """Check the law of staging: each buffer is free, or has one chunk in flight of a read that has not ended."""
        self._buffers.check()
        assert set(self._buffers.taken.values()) <= self._reads.keys(), "a staging buffer has the chunk of no read"

    def wanted(self, chunk: Chunk) -> bool:
        """Tell whether a chunk that has arrived is to be scattered: its read is neither cancelled nor failed."""
        return self._reads[chunk.read.read_id].doom is None

    def admit(self, read: Read, *, staged: bool = False) -> Events:
        """Take a checked read of an open peer.

        Args:
            read: checked.
            staged: whether each of its chunks needs a staging buffer.
        """
        assert read.read_id not in self._reads, f"read id {read.read_id} is used twice"
        lane = self._lanes[read.peer]
        assert lane.closed is None
        after = {read_id for fence in read.fences for read_id in fence.after} & self._reads.keys()
        assert all(self._reads[read_id].read.peer == read.peer for read_id in after), "a fence spans two peers"
        opened = _OpenRead(read, staged)
        self._reads[read.read_id] = lane.reads[read.read_id] = opened
        self._turns += 1
        opened.turn = self._turns
        heapq.heappush(lane.waiting, (read.priority, self._turns, opened))
        return self._admit_fences(read) + self._admit_looks(lane, opened)

    def refuse(self, read: Read, reason: Reason) -> Events:
        """End a read that was not admitted, and its fences."""
        self._remember(read.read_id, reason)
        looks = [look for look in read.looks if not self._knows_look(look)]
        failed = [FenceFailed(fence.fence_id, reason.code, reason.detail) for fence in (*looks, *read.fences)]
        for look in looks:
            self._remember_look(look.fence_id, reason)
        return [ReadFailed(read.read_id, reason.code, reason.detail), *failed]

    def cancel(self, read_ids: Iterable[int]) -> Events:
        """Drop what is not posted, or not scattered, of these reads; those with nothing left to drop go on."""
        reads = [self._reads[read_id] for read_id in read_ids if read_id in self._reads]
        return self._drop(reads, Reason("cancelled", "cancelled by the caller"))

    def abandon(self, peer: PeerId, reason: Reason) -> Events:
        """Close a peer: drop all that is not posted, and fail its fences. It drains, then it is forgotten."""
        lane = self._lanes[peer]
        if lane.closed is not None:
            return []
        lane.closed = reason
        reads = tuple(lane.reads.values())
        events = self._drop(reads, reason)
        for opened in reads:
            for waiting in tuple(opened.fences):
                events += self._fail_fence(waiting, reason)
        for due in lane.due:
            events += [FenceFailed(due.fence.fence_id, reason.code, reason.detail), *self._end_look(due, reason)]
        lane.due.clear()
        self._forget_if_drained(peer)
        return events

    @property
    def fence_due(self) -> bool:
        """Tell whether ``take`` would give a fence."""
        return any(lane.due and lane.fences_in_flight < FENCES_IN_FLIGHT_MAX for lane in self._lanes.values())

    def take(self) -> Work | None:
        """Choose what to post now, and count it as in flight. Fences first: they are small and end requests."""
        for lane in self._lanes.values():
            if lane.due and lane.fences_in_flight < FENCES_IN_FLIGHT_MAX:
                lane.fences_in_flight += 1
                return lane.due.popleft()
        opened = self._choose()
        if opened is None:
            return None
        lane = self._lanes[opened.read.peer]
        self._turns += 1
        lane.served = self._turns
        lane.chunks_in_flight += 1
        first, stop = opened.read.cuts[opened.chunk_next : opened.chunk_next + 2].tolist()
        opened.chunk_next += 1
        opened.in_flight += 1
        return Chunk(opened.read, first, stop, self._buffers.take(opened.read.read_id) if opened.staged else NO_BUFFER)

    def posted(self, chunk: Chunk, started: float, ended: float) -> None:
        """Note how long a posting call took, in seconds of one clock."""
        opened = self._reads[chunk.read.read_id]
        opened.posted_s += ended - started
        # Time that later chunks spend in posting calls is not wire time: the origin moves along with it.
        opened.wire_from = ended if chunk.first == 0 else opened.wire_from + ended - started

    def scattered(self, chunk: Chunk, elapsed: float) -> None:
        """Note how long it took to copy a chunk out of its buffer, in seconds."""
        opened = self._reads[chunk.read.read_id]
        opened.scattered_s += elapsed
        opened.wire_from += elapsed

    def arrived(self, chunk: Chunk, now: float, unheld: AbstractSet[tuple[int, int]] = frozenset()) -> Events:
        """Report that a chunk is there, and scattered if that is wanted. ``unheld``: see ``ReadCompleted``."""
        self._reads[chunk.read.read_id].unheld |= unheld
        return self._leave_flight(chunk, now)

    def look(self, peer: PeerId, fence: Fence) -> None:
        """Have an epoch slot of an open peer read for its own sake."""
        self._lanes[peer].due.append(DueFence(peer, fence))

    def judged(self, due: DueFence, observed: int, fence_s: float) -> Events:
        """Report the value of an epoch slot; reads that wait for it go on only if their lease is held."""
        events = self._end_look(due, _not_held(due.fence, observed))
        self._lanes[due.peer].fences_in_flight -= 1
        self._forget_if_drained(due.peer)
        return [FenceJudged(due.fence.fence_id, observed, fence_s), *events]

    def failed(self, work: Work, reason: Reason) -> Events:
        """Report that a piece of work failed and that nothing of it will write any more."""
        if isinstance(work, Chunk):
            opened = self._reads[work.read.read_id]
            opened.doom = opened.doom or reason
            return self._leave_flight(work, 0.0)
        events = self._end_look(work, reason)
        self._lanes[work.peer].fences_in_flight -= 1
        self._forget_if_drained(work.peer)
        return [FenceFailed(work.fence.fence_id, reason.code, reason.detail), *events]

    def _admit_fences(self, read: Read) -> Events:
        events: Events = []
        for fence in read.fences:
            after = frozenset((*fence.after, read.read_id))
            waiting = _WaitingFence(fence, read.peer, after, set(after & self._reads.keys()))
            for read_id in waiting.missing:
                self._reads[read_id].fences.append(waiting)
            for read_id in sorted(after - waiting.missing):
                reason = self._ended.get(read_id, Reason("transport_error", f"read {read_id} is not known"))
                if reason is not None:
                    events += self._fail_fence(waiting, reason)
        return events

    def _admit_looks(self, lane: _Lane, opened: _OpenRead) -> Events:
        """Have a read wait for its looks, of which those that no read before it has had are due now."""
        for look in opened.read.looks:
            if look.fence_id in self._looked:
                reason = self._looked[look.fence_id]
                if reason is not None:
                    return self._drop([opened], reason)
                continue
            if look.fence_id not in self._looks:
                self._looks[look.fence_id] = []
                lane.due.append(DueFence(opened.read.peer, look))
            self._looks[look.fence_id].append(opened)
            opened.looks.add(look.fence_id)
        return []

    def _end_look(self, due: DueFence, reason: Reason | None) -> Events:
        """Let the reads go on that have waited for a look, or fail with it; nothing happens if it is no look."""
        reads = self._looks.pop(due.fence.fence_id, None)
        if reads is None:
            return []
        self._remember_look(due.fence.fence_id, reason)
        for opened in reads:
            opened.looks.discard(due.fence.fence_id)
        # Some have ended meanwhile, because nobody wanted them any more.
        return (
            [] if reason is None else self._drop([each for each in reads if each.read.read_id in self._reads], reason)
        )

    def _knows_look(self, look: Fence) -> bool:
        return look.fence_id in self._looks or look.fence_id in self._looked

    def _remember_look(self, fence_id: int, reason: Reason | None) -> None:
        self._looked[fence_id] = reason
        if len(self._looked) > ENDED_MAX:
            self._looked.popitem(last=False)

    def _fail_fence(self, waiting: _WaitingFence, reason: Reason) -> Events:
        """Fail a fence once: it is taken off every read that it waits for."""
        if not waiting.missing:
            return []
        for read_id in waiting.missing:
            self._reads[read_id].fences.remove(waiting)
        waiting.missing.clear()
        return [FenceFailed(waiting.fence.fence_id, reason.code, reason.detail)]

    def _drop(self, reads: Iterable[_OpenRead], reason: Reason) -> Events:
        events: Events = []
        for opened in reads:
            if opened.unfinished:
                opened.doom = reason
                if not opened.in_flight:
                    events += self._end(opened, 0.0)
        return events

    def _leave_flight(self, chunk: Chunk, now: float) -> Events:
        opened = self._reads[chunk.read.read_id]
        if chunk.buffer != NO_BUFFER:
            self._buffers.give_back(chunk.buffer)
        opened.in_flight -= 1
        events = [] if opened.in_flight or opened.unposted else self._end(opened, now)
        self._lanes[chunk.peer].chunks_in_flight -= 1
        self._forget_if_drained(chunk.peer)
        return events

    def _end(self, opened: _OpenRead, now: float) -> Events:
        read = opened.read
        assert not opened.in_flight
        self._remember(read.read_id, opened.doom)
        if opened.doom is not None:
            events: Events = [ReadFailed(read.read_id, opened.doom.code, opened.doom.detail)]
            for waiting in tuple(opened.fences):
                events += self._fail_fence(waiting, opened.doom)
            self._forget(read)
            return events
        self._forget(read)
        wire_s = max(0.0, now - opened.wire_from)
        events = [ReadCompleted(read.read_id, opened.posted_s, wire_s, opened.scattered_s, frozenset(opened.unheld))]
        for waiting in opened.fences:
            waiting.missing.remove(read.read_id)
            if not waiting.missing:
                self._lanes[waiting.peer].due.append(DueFence(waiting.peer, waiting.fence, waiting.after))
        return events

    def _forget(self, read: Read) -> None:
        del self._reads[read.read_id]
        del self._lanes[read.peer].reads[read.read_id]

    def _remember(self, read_id: int, reason: Reason | None) -> None:
        self._ended[read_id] = reason
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def _choose(self) -> _OpenRead | None:
        """Choose the read whose chunk is next: the most urgent, but now and then the oldest, so that no one starves."""
        ready = [(lane, opened) for lane in self._lanes.values() if (opened := self._ready(lane)) is not None]
        if not ready:
            return None
        _, chosen = min(ready, key=lambda found: (found[1].read.priority, found[0].served))
        oldest = min((self._oldest(lane) or opened for lane, opened in ready), key=lambda opened: opened.turn)
        if oldest.read.priority > chosen.read.priority:
            self._overtaken += 1
            if self._overtaken > OVERTAKEN_MAX:
                chosen = oldest
        if chosen is oldest:
            self._overtaken = 0
        return chosen

    def _ready(self, lane: _Lane) -> _OpenRead | None:
        """Return the most urgent read of a lane if a chunk of it can be posted."""
        opened = _next_read(lane)
        if opened is None or opened.looks or lane.chunks_in_flight >= CHUNKS_IN_FLIGHT_MAX:
            return None  # what waits behind a look waits as well: it is over in one small read
        return opened if self._buffers.has_free or not opened.staged else None

    def _oldest(self, lane: _Lane) -> _OpenRead | None:
        """Return the oldest read of a lane that has a chunk left, if that can be posted.

        Those before it are in flight as a whole, so they are few.
        """
        opened = next((opened for opened in lane.reads.values() if opened.unposted), None)
        if opened is None or opened.looks or (opened.staged and not self._buffers.has_free):
            return None
        return opened

    def _forget_if_drained(self, peer: PeerId) -> None:
        lane = self._lanes[peer]
        if lane.closed is not None and not lane.chunks_in_flight and not lane.fences_in_flight:
            del self._lanes[peer]


def lease_numbers(chunk: Chunk) -> npt.NDArray[np.uint16] | None:
    """Tell which lease vouches for each descriptor of a chunk that is posted.

    Returns:
        uint16, shape (descriptors,): an index into ``chunk.read.leases``. None: the read has one lease or none.
    """
    leases = chunk.read.leases
    if len(leases) < 2:
        return None
    counts = np.array([share.pairs for share in leases], np.int64)
    of_pair = np.repeat(np.arange(len(leases), dtype=np.uint16), counts)
    of_descriptor: npt.NDArray[np.uint16] = of_pair[np.arange(chunk.first, chunk.stop) % len(of_pair)]
    return of_descriptor


def _not_held(fence: Fence, observed: int) -> Reason | None:
    """Return why nothing may be read after this look; None if the lease is held."""
    verdict = judge(fence.epoch, observed)
    if verdict == "held":
        return None
    return Reason(NOT_HELD, f"the lease is {verdict}: epoch {fence.epoch}, slot {fence.slot} holds {observed}")


def _next_read(lane: _Lane) -> _OpenRead | None:
    """Return the read of which the next chunk is, and forget those before it that have none left."""
    while lane.waiting and not lane.waiting[0][2].unposted:
        heapq.heappop(lane.waiting)
    return lane.waiting[0][2] if lane.waiting else None
