"""Decide which chunk is next, which checks are due, and what each read waits for. Pure: no threads and no bytes.

Each peer has a *lane*: its reads that wait for a turn, and its work in flight. A read goes through these states:

| state    | it waits for                     | it leaves by                                             |
|----------|----------------------------------|----------------------------------------------------------|
| checking | its first check                  | held: it waits. Early or stale: it ends, no byte is read |
| waiting  | its turn, again for each chunk   | its last chunk is taken                                  |
| in flight| chunks in flight                 | all have arrived                                         |
| fencing  | its fence                        | any verdict: it ends                                     |
| failing  | chunks in flight                 | none is in flight: it ends                               |

Two rules always hold. A read ends once, and only while none of its chunks is in flight. A fence becomes due only after
the arrival of all chunks of its read was reported.

The caller takes a check or a chunk, posts it, and reports the result. Answers go to ``answer``.

Order: a lane has a queue for each priority, first come, first served. The next queue is the one that has waited longest
    since its first read was taken, or since its last turn if that is later. One step of priority counts like
    ``AGING_S`` of waiting. So peers take turns, and no read starves. A turn has as many chunks as the lane's weight.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType

from msgspec import Struct, field

from kvflow.errors import FailureCode
from kvflow.ids import PeerId
from kvflow.leases.epochs import judge
from kvflow.planning.pairs import UnitPairs, joined
from kvflow.reads.backend import NO_BUFFER, Cause, CheckedList, Chunk, Portion, Share
from kvflow.reads.bounds import OutOfBounds
from kvflow.reads.contract import SPAN_MAX, ArrivedChunk, Outstanding, RankRead, ReadEnded, Verdict
from kvflow.reads.pacing import Pace
from kvflow.reads.prepared import bind_portion, paced_pairs
from kvflow.reads.staging import Buffers

CHUNKS_IN_FLIGHT_MAX = 2
"""Chunks in flight per peer whose posts are not asynchronous (``pacing``). Over TCP the second chunk keeps the wire
busy between two polls: 1.60 GB/s against 1.49 GB/s with one (64 MiB over loopback, medians). With 4 or 8, urgent and
cancelled reads only wait longer."""

CHECKS_IN_FLIGHT_MAX = 8  # most checks in flight per peer, because a hung peer never ends its checks
AGING_S = 1.0  # waiting time that counts like one step of priority

OVERTAKEN_MAX = 8
"""How many more urgent chunks in a row may overtake the oldest read, which then gets one. So every read advances."""

NOTHING_REFUSED: Mapping[int, Cause] = MappingProxyType({})


class OpenRead(Struct, eq=False, gc=False):
    """A read that has not ended. The garbage collector does not visit it; ``Lanes.abandon`` cuts it from its lane."""

    read: RankRead
    prepared_lists: Sequence[CheckedList]  # one for each part
    lane: "Lane"
    pairs: UnitPairs  # of the part that is posted next
    taken_at: float
    age: int = 0  # orders the reads that wait for a turn
    overtaken: int = 0  # more urgent chunks that were posted before it since its last one
    waits: bool = False  # whether a chunk of it must still be posted
    part: int = 0  # that is posted next
    cursor: int = 0  # pairs of this part that were bound
    portion: Portion | None = None  # of this part that was bound and is not posted completely
    cut: int = 0  # of the portion, at which the next chunk begins
    alone: bool = False  # shares no chunk with other reads
    in_flight: int = 0
    failure: Cause | None = None  # why it ends ``failed`` as soon as nothing of it is in flight
    unserved: bool = False  # the exporter refused bytes because the lease was not held
    chunks: int = 0
    arrived_at: float = 0.0
    bind_s: float = 0.0
    post_s: float = 0.0
    scatter_s: float = 0.0

    @property
    def needs_buffer(self) -> bool:
        """Whether its next chunk is staged."""
        return self.prepared_lists[self.part].staged is not None

    @property
    def staged(self) -> bool:
        """Whether some of its chunks are staged."""
        return any(prepared_list.staged is not None for prepared_list in self.prepared_lists)


class Lane(Struct, eq=False):
    """The reads and the work in flight of one peer. If ``closed`` has a reason, the lane is closed and only drains."""

    peer: PeerId
    weight: int = 1  # chunks in one turn
    outstanding: Outstanding = field(default_factory=Outstanding)
    queues: "dict[int, Queue]" = {}  # by priority
    checks: list[OpenRead] = []  # whose first check is due
    fences: list[OpenRead] = []  # whose fence is due
    chunks_in_flight: int = 0
    checks_in_flight: int = 0
    closed: Cause | None = None
    pace: Pace | None = None  # of its chunks; None unless its posts may be asynchronous

    @property
    def has_room(self) -> bool:
        """Whether its window has room for more chunks than every peer may have in flight."""
        return self.pace is not None and self.pace.has_room(self.chunks_in_flight)

    def note_posted(self, now: float) -> None:
        """Record that something was posted."""
        if self.outstanding.since == math.inf:
            self.outstanding.since = now

    def note_completed(self, now: float) -> None:
        """Record that something that was posted has ended."""
        self.outstanding.since = now if self.chunks_in_flight or self.checks_in_flight else math.inf


class Queue(Struct, eq=False):
    """Waiting reads of one lane and one priority, the oldest first. Some may no longer wait."""

    lane: Lane
    priority: int
    reads: deque[OpenRead] = field(default_factory=deque)
    turn_at: float = -math.inf
    turn: int = 0  # number of its last turn, which orders queues with equal times
    taken: int = 0  # chunks of its present turn


class TakenChunk(Struct, eq=False):
    """A chunk that was taken. ``reads`` are in the order of its portion's shares."""

    lane: Lane
    chunk: Chunk
    prepared_list: CheckedList
    reads: list[OpenRead]
    nbytes: int
    bind_s: float  # 0 if an earlier chunk has that of the portion
    posted_at: float = 0.0
    post_s: float = 0.0
    scatter_s: float = 0.0

    @property
    def wanted(self) -> bool:
        """Whether it has bytes of a read that was not cancelled and has not failed."""
        return any(opened.failure is None for opened in self.reads)


class Check(Struct, eq=False):
    """One read of the epoch slots ``first`` to ``last``, for all these reads. Each slot is compared with one epoch."""

    lane: Lane
    reads: list[OpenRead]
    first: int
    last: int
    fence: bool  # all bytes of the reads have arrived; otherwise it is their first check


Work = TakenChunk | Check


class Lanes:
    """Account for the reads of one transport, and choose what is next. Thread: one at a time.

    ``answer`` takes the answer of each read, ``clock`` returns seconds of a monotonic clock, and ``num_buffers`` are
    staging buffers for the chunks of staged reads.
    """

    def __init__(self, answer: Callable[[ReadEnded], None], clock: Callable[[], float], num_buffers: int = 0) -> None:
        self._answer = answer
        self._clock = clock
        self._buffers = Buffers(num_buffers)
        self._lanes: dict[PeerId, Lane] = {}
        self.reads: dict[int, OpenRead] = {}
        self._queues: dict[Queue, None] = {}  # where reads wait
        self._due: dict[Lane, None] = {}  # where checks are due
        self._numbers = 0

    def open(self, peer: PeerId, weight: int = 1) -> None:
        """Accept reads from a peer, with ``weight`` chunks per turn."""
        assert peer not in self._lanes
        self._lanes[peer] = Lane(peer, weight)

    def drained(self, peer: PeerId) -> bool:
        """Return whether a peer was abandoned, or never opened, and has nothing in flight."""
        return peer not in self._lanes

    def staging(self) -> tuple[int, int]:
        """Return how many staging buffers are taken, and how many of these have chunks of failing reads."""
        taken = self._buffers.taken
        return len(taken), sum(self.reads[read_id].failure is not None for read_id in taken.values())

    def waits(self, lane: Lane) -> bool:
        """Return whether a read of this lane waits for its turn."""
        return any(self._head(queue) is not None for queue in tuple(lane.queues.values()) if queue in self._queues)

    def waiting_for_buffer(self) -> frozenset[PeerId]:
        """Return the peers with nothing in flight because their next chunk needs a buffer and none is free."""
        if self._buffers.has_free or not self._buffers.taken:
            return frozenset()
        heads = [(queue.lane, self._head(queue)) for queue in tuple(self._queues) if not queue.lane.chunks_in_flight]
        return frozenset(lane.peer for lane, head in heads if head is not None and head.needs_buffer)

    def check(self) -> None:
        """Check the invariant of staging: each buffer is free, or has one chunk in flight, whose read has not ended."""
        self._buffers.check()
        assert set(self._buffers.taken.values()) <= self.reads.keys(), "a staging buffer has the chunk of no read"

    def admit(self, read: RankRead, prepared_lists: Sequence[CheckedList]) -> None:
        """Enter a checked read of an open peer, with the prepared list of each of its parts."""
        assert read.read_id not in self.reads, f"read id {read.read_id} is used twice"
        lane = self._lanes[read.peer]
        assert lane.closed is None
        now = self._clock()
        read.since, read.outstanding = now, lane.outstanding
        self.reads[read.read_id] = opened = OpenRead(read, prepared_lists, lane, read.parts[0].pairs, now)
        if read.check_first:
            lane.checks.append(opened)
            self._due[lane] = None
        else:
            self._queue(opened)

    def hold(self, read: RankRead, now: float) -> None:
        """Count what was posted of a read that the caller keeps, and that is the only open one."""
        lane = self._lanes[read.peer]
        read.phase, read.since, read.outstanding = "wire", now, lane.outstanding
        lane.note_posted(now)

    def let_go(self, read: RankRead, now: float) -> None:
        """Record that all of it has arrived."""
        read.phase, read.since = "fence", now
        self._lanes[read.peer].note_completed(now)

    def cancel(self, read_ids: Iterable[int]) -> None:
        """Drop the chunks of these reads that are not posted or not scattered. Reads with nothing to drop continue."""
        for read_id in read_ids:
            opened = self.reads.get(read_id)
            if opened is None or opened.failure is not None:
                continue
            if opened.waits or opened.read.phase == "queue" or (opened.in_flight and opened.staged):
                self._fail_read(opened, Cause(FailureCode.CANCELLED, "cancelled by the caller"))

    def abandon(self, peer: PeerId, reason: Cause) -> None:
        """Close a peer: each of its reads ends as soon as nothing of it is in flight. Then the peer is forgotten."""
        lane = self._lanes[peer]
        if lane.closed is not None:
            return
        lane.closed = reason
        for opened in [opened for opened in self.reads.values() if opened.lane is lane]:
            self._fail_read(opened, reason)
        for queue in lane.queues.values():
            self._queues.pop(queue, None)
        for each in (lane.queues, lane.checks, lane.fences):
            each.clear()
        self._due.pop(lane, None)
        self._forget_if_drained(lane)

    def take_check(self) -> Check | None:
        """Choose a due check for as many reads as one span of slots covers, and count it as in flight."""
        if not self._due:
            return None
        for lane in tuple(self._due):
            if lane.checks_in_flight >= CHECKS_IN_FLIGHT_MAX:
                continue
            fence = bool(lane.fences)
            if fence:
                reads, lane.fences = _one_span(lane.fences)
            else:
                reads, lane.checks = _one_span(lane.checks)
            if not lane.fences and not lane.checks:
                del self._due[lane]
            if reads:
                lane.checks_in_flight += 1
                lane.note_posted(self._clock())
                return Check(lane, reads, reads[0].read.lease.slot, reads[-1].read.lease.slot, fence)
        return None

    def take_chunk(self) -> TakenChunk | None:
        """Choose the chunk to post now, and count it as in flight. Reads that cannot be bound end with ``bounds``."""
        while (chosen := self._choose()) is not None:
            started = self._clock()
            prepared_list = chosen.prepared_lists[chosen.part]
            if chosen.portion is not None:
                return self._take([chosen], prepared_list, started, 0.0)
            reads = self._join(chosen, prepared_list)
            try:
                chosen.portion = _bind(reads, prepared_list)
            except OutOfBounds as error:
                if len(reads) == 1:
                    self._fail_read(chosen, Cause(FailureCode.BOUNDS, str(error)))
                for opened in reads:
                    opened.alone = True  # so that the next attempts find the read that fails
            else:
                return self._take(reads, prepared_list, started, self._clock() - started)
        return None

    def arrived(
        self,
        carried: TakenChunk,
        unheld: AbstractSet[tuple[int, int]] = frozenset(),
        refused: Mapping[int, Cause] = NOTHING_REFUSED,
    ) -> None:
        """Report that a chunk has arrived, and was scattered if its read still wants it.

        ``unheld`` and ``refused`` are those of its ``PostedWork``.
        """
        now = self._clock()
        if len(carried.reads) == 1:
            carried.reads[0].read.nbytes += carried.nbytes
        else:
            pair_bytes = carried.prepared_list.pair_bytes
            for share, opened in zip(carried.chunk.portion.shares, carried.reads, strict=True):
                opened.read.nbytes += share.pairs * pair_bytes
        for opened in carried.reads:
            opened.arrived_at = now
            if opened.read.arrived is not None:
                chunk, part = carried.chunk, carried.prepared_list.prepared_list.list_id
                traced = ArrivedChunk(part, carried.posted_at, now, opened.read.nbytes, chunk.stop - chunk.first)
                opened.read.arrived.append(traced)
            if unheld and (opened.read.lease.slot, opened.read.lease.epoch) in unheld:
                opened.unserved = True
            if refused and opened.read.read_id in refused:
                self._drop(opened, refused[opened.read.read_id])
            self._leave(carried, opened, now)
        self._chunk_is_over(carried, now)

    def checked(self, check: Check, values: Sequence[int]) -> None:
        """Report the values of a check's slots, from the first to the last."""
        first = check.first
        for opened in check.reads:
            if opened.failure is not None:  # was cancelled or abandoned, and answered
                continue
            lease = opened.read.lease
            observed = values[lease.slot - first]
            verdict = judge(lease.epoch, observed)
            if verdict == "held" and not check.fence:
                self._queue(opened)
            else:
                self._end(opened, verdict, observed)
        self._check_is_over(check)

    def failed(self, work: Work, reason: Cause) -> None:
        """Report that a chunk or a check failed, and will not write."""
        if isinstance(work, Check):
            for opened in work.reads:
                if opened.failure is None:
                    self._fail_read(opened, reason)
            self._check_is_over(work)
            return
        now = self._clock()
        for opened in work.reads:
            self._drop(opened, reason)
            self._leave(work, opened, now)
        self._chunk_is_over(work, now)

    def _queue(self, opened: OpenRead) -> None:
        self._numbers += 1
        opened.age = self._numbers
        opened.waits = True
        lane, priority = opened.lane, opened.read.priority
        queue = lane.queues.get(priority)
        if queue is None:
            queue = lane.queues[priority] = Queue(lane, priority)
        queue.reads.append(opened)
        self._queues[queue] = None

    def _choose(self) -> OpenRead | None:
        """Choose the read whose chunk is next: by waiting time and priority, and sometimes the oldest read."""
        chosen = oldest = None
        earliest = (math.inf, 0)
        for queue in tuple(self._queues):
            head = self._head(queue)
            if head is None or (queue.lane.chunks_in_flight >= CHUNKS_IN_FLIGHT_MAX and not queue.lane.has_room):
                continue
            if head.needs_buffer and not self._buffers.has_free:
                continue
            order = (max(head.taken_at, queue.turn_at) + queue.priority * AGING_S, queue.turn)
            if order < earliest:
                chosen, earliest = head, order
            if oldest is None or head.age < oldest.age:
                oldest = head
        if chosen is None or oldest is None:
            return None
        if chosen is not oldest and oldest.read.priority > chosen.read.priority:
            oldest.overtaken += 1
            if oldest.overtaken > OVERTAKEN_MAX:
                chosen = oldest
        if chosen is oldest:
            oldest.overtaken = 0
        return chosen

    def _head(self, queue: Queue) -> OpenRead | None:
        """Return the next read of a queue. Remove the reads before it that no longer wait."""
        reads = queue.reads
        while reads:
            if reads[0].waits:
                return reads[0]
            reads.popleft()
        del self._queues[queue]
        if queue.priority:  # keep the queue of the usual priority
            del queue.lane.queues[queue.priority]
        return None

    def _join(self, chosen: OpenRead, prepared_list: CheckedList) -> list[OpenRead]:
        """Return the chosen read and the reads that share its chunk: small neighbors of one list in a queue.

        If there are several, the chunk has the whole next part of each.
        """
        joined = [chosen]
        room = prepared_list.chunk_pairs - len(chosen.pairs.source)
        if room <= 0 or chosen.alone or chosen.cursor:
            return joined
        for opened in chosen.lane.queues[chosen.read.priority].reads:
            if opened.waits and opened is not chosen:
                room -= len(opened.pairs.source)
                if room < 0 or opened.prepared_lists[opened.part] is not prepared_list or opened.alone or opened.cursor:
                    break
                joined.append(opened)
        return joined

    def _take(self, reads: list[OpenRead], prepared_list: CheckedList, started: float, bind_s: float) -> TakenChunk:
        """Count the next chunk of a bound portion as in flight. The first read owns the portion."""
        leader = reads[0]
        portion, lane = leader.portion, leader.lane
        assert portion is not None
        first, stop, nbytes = 0, portion.source_index.size, portion.nbytes
        last = leader.cut + 2 == portion.cuts.size
        if leader.cut or not last:
            n, first, stop = stop, portion.cuts.item(leader.cut), portion.cuts.item(leader.cut + 1)
            # The bytes of a chunk are its share of the portion's; their sum is exact.
            nbytes = nbytes * stop // n - nbytes * first // n
        for opened in reads:
            opened.in_flight += 1
            opened.chunks += 1
            read = opened.read
            if read.phase == "queue":
                read.phase = "wire"
                read.since = read.started_at = started
            if not last:
                opened.cut += 1
                continue
            opened.portion, opened.cut = None, 0
            if opened.cursor == len(opened.pairs.source):
                opened.part += 1
                opened.cursor = 0
                opened.waits = opened.part < len(opened.prepared_lists)
                if opened.waits:
                    opened.pairs = read.parts[opened.part].pairs
        lane.chunks_in_flight += 1
        lane.note_posted(started)
        queue = lane.queues[leader.read.priority]
        queue.taken += 1
        if queue.taken >= lane.weight:
            self._numbers += 1
            queue.taken, queue.turn_at, queue.turn = 0, started, self._numbers
        buffer = NO_BUFFER if prepared_list.staged is None else self._buffers.take(leader.read.read_id)
        chunk = Chunk(portion, first, stop, buffer)
        return TakenChunk(lane, chunk, prepared_list, reads, nbytes, bind_s, started + bind_s)

    def _leave(self, carried: TakenChunk, opened: OpenRead, now: float) -> None:
        """Record that a chunk of a read has ended. After the last one, the fence is due or the read ends."""
        opened.bind_s += carried.bind_s
        opened.post_s += carried.post_s
        opened.scatter_s += carried.scatter_s
        opened.in_flight -= 1
        if opened.in_flight or opened.waits:
            return
        if opened.failure is not None:
            self._end(opened, "failed")
            return
        read, lane = opened.read, carried.lane
        read.phase, read.since = "fence", now
        lane.fences.append(opened)
        self._due[lane] = None

    def _chunk_is_over(self, carried: TakenChunk, now: float) -> None:
        if carried.chunk.buffer != NO_BUFFER:
            self._buffers.give_back(carried.chunk.buffer)
        carried.lane.chunks_in_flight -= 1
        carried.lane.note_completed(now)
        self._forget_if_drained(carried.lane)

    def _check_is_over(self, check: Check) -> None:
        check.lane.checks_in_flight -= 1
        check.lane.note_completed(self._clock())
        self._forget_if_drained(check.lane)

    def _forget_if_drained(self, lane: Lane) -> None:
        if lane.closed is not None and not lane.chunks_in_flight and not lane.checks_in_flight:
            del self._lanes[lane.peer]

    def _drop(self, opened: OpenRead, reason: Cause) -> None:
        """Let a read end ``failed`` when nothing of it is in flight. Its other chunks are never posted."""
        opened.failure = opened.failure or reason
        opened.waits, opened.portion = False, None

    def _fail_read(self, opened: OpenRead, reason: Cause) -> None:
        """Drop a read, and end it if nothing of it is in flight."""
        self._drop(opened, reason)
        if not opened.in_flight:
            self._end(opened, "failed")

    def _end(self, opened: OpenRead, verdict: Verdict, observed: int = 0) -> None:
        assert not opened.in_flight
        opened.waits = False
        read, failure = opened.read, opened.failure
        del self.reads[read.read_id]
        unserved = opened.unserved and verdict == "held"
        fenced = read.phase == "fence"
        self._answer(
            ReadEnded(
                read_id=read.read_id,
                verdict="early" if unserved else verdict,
                code="" if failure is None else failure.code,
                detail="" if failure is None else failure.detail,
                phase=read.phase,
                observed=observed,
                unserved=unserved,
                nbytes=read.nbytes,
                chunks=opened.chunks,
                started_at=read.started_at,
                arrived_at=opened.arrived_at,
                bind_s=opened.bind_s,
                post_s=opened.post_s,
                scatter_s=opened.scatter_s,
                fence_s=self._clock() - opened.arrived_at if fenced else 0.0,
            )
        )


def _bind(reads: list[OpenRead], prepared_list: CheckedList) -> Portion:
    """Bind the next pairs of these reads: for one read as many as a portion holds, for several their whole parts."""
    leader = reads[0]
    if len(reads) > 1:
        parts = [opened.pairs for opened in reads]
        pairs = joined(parts)
        shares = tuple([Share(opened.read.read_id, opened.read.lease, len(opened.pairs.source)) for opened in reads])
        portion = bind_portion(prepared_list, pairs, shares)
        if portion.cuts.size > 2:
            raise OutOfBounds("the pairs of several reads were cut into several chunks")
        for opened, share in zip(reads, shares, strict=True):
            opened.cursor = share.pairs
        return portion
    pairs, first = leader.pairs, leader.cursor
    count, pace = len(pairs.source), leader.lane.pace
    stop = min(count, first + (prepared_list.portion_pairs if pace is None else paced_pairs(prepared_list, pace)))
    if stop - first < count:
        pairs = UnitPairs(pairs.source[first:stop], pairs.target[first:stop])
    shares = (Share(leader.read.read_id, leader.read.lease, stop - first),)
    if pace is None:
        portion = bind_portion(prepared_list, pairs, shares)
    else:
        portion = bind_portion(prepared_list, pairs, shares, pace.chunk_bytes, pace.chunk_descriptors)
    leader.cursor = stop
    return portion


def _one_span(due: list[OpenRead]) -> tuple[list[OpenRead], list[OpenRead]]:
    """Divide due reads into those that one check covers, ordered by slot, and the others.

    A check returns one value per slot, and an exporter that serves reads compares it with one epoch. So a check covers
    reads of only one epoch of a slot.
    """
    if len(due) == 1:
        return (due if due[0].failure is None else []), []
    due.sort(key=_by_slot)
    reads: list[OpenRead] = []
    left: list[OpenRead] = []
    end, before = math.inf, (-1, 0)
    for opened in due:
        if opened.failure is not None:  # answered
            continue
        slot, epoch = opened.read.lease.slot, opened.read.lease.epoch
        if not reads:
            end = slot + SPAN_MAX
        if slot >= end or (slot == before[0] and epoch != before[1]):
            left.append(opened)
        else:
            reads.append(opened)
            before = (slot, epoch)
    return reads, left


def _by_slot(opened: OpenRead) -> tuple[int, int]:
    lease = opened.read.lease
    return lease.slot, lease.epoch
