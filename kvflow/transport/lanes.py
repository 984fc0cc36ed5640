"""Whose chunk is next, which checks are due, and what each read waits for. Pure: no threads and no bytes.

Each peer has a *lane*: its reads that wait for a turn, and what of it is in flight. A read goes through these states:

| state    | it waits for                     | it leaves by                                             |
|----------|----------------------------------|----------------------------------------------------------|
| checking | its first check                  | held: it waits. Early or stale: it ends, no byte is read |
| waiting  | its turn, again for each chunk   | its last chunk is taken                                  |
| flying   | chunks in flight                 | all have arrived                                         |
| fencing  | its fence                        | any verdict: it ends                                     |
| doomed   | chunks in flight                 | none is in flight: it ends                               |

Two laws hold by construction. A read ends only while none of its chunks is in flight, and it ends once. A fence becomes
due only when the arrival of all chunks of its read was reported.

The caller takes a check or a chunk, posts it, and reports what became of it. Answers go to ``answer`` as they follow.

Order: a lane has a queue for each priority, first come, first served. The queue is next that has waited longest, since
its first read was taken, or since its last turn if that is later; one step of priority is worth ``AGING_S`` of it. So
waiting makes urgent, being served does not, and peers take turns. A turn is as many chunks as the lane's weight.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType

from kvflow.cache.epochs import judge
from kvflow.ids import PeerId
from kvflow.transfer.pairs import UnitPairs, joined
from kvflow.transfer.requests import RankRead, ReadEnded, Verdict
from kvflow.transport.bounds import OutOfBounds
from kvflow.transport.buffers import Buffers
from kvflow.transport.mover import NO_BUFFER, SPAN_MAX, Chunk, Portion, Prepared, Reason, Share
from kvflow.transport.open_reads import Carried, Check, Lane, OpenRead, Queue, Work
from kvflow.transport.programs import bind_portion

CHUNKS_IN_FLIGHT_MAX = 2
"""Per peer. On shared memory none is ever in flight: the post is the copy. On TCP the second keeps the wire busy
between two polls: 1.60 against 1.49 GB/s with one (64 MiB over loopback, medians), and 4 or 8 add nothing but
delay for whatever is urgent or cancelled."""

CHECKS_IN_FLIGHT_MAX = 8
"""Per peer. A hung peer never ends its checks; this bounds what it can hold."""

AGING_S = 1.0
"""Waiting time that is worth one step of priority."""

OVERTAKEN_MAX = 8
"""Chunks in a row that may go before the oldest read because they are more urgent. Then the oldest read has one: urgent
reads keep eight ninths of the wire, and every other read gets on."""

NOTHING_REFUSED: Mapping[int, Reason] = MappingProxyType({})


class Lanes:
    """Account for the reads of one transport, and choose what is next. Thread: one at a time.

    Args:
        answer: takes the answer of each read.
        clock: seconds of a monotonic clock.
        num_buffers: staging buffers for the chunks of staged reads.

    Attributes:
        reads: what has not ended, by its id.
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
        """Begin to take reads for a peer, whose turns have so many chunks."""
        assert peer not in self._lanes
        self._lanes[peer] = Lane(peer, weight)

    def drained(self, peer: PeerId) -> bool:
        """Tell whether a peer was abandoned, or never opened, and has nothing in flight."""
        return peer not in self._lanes

    def staging(self) -> tuple[int, int]:
        """Return how many staging buffers are taken, and how many of these by chunks of doomed reads."""
        taken = self._buffers.taken
        return len(taken), sum(self.reads[read_id].doom is not None for read_id in taken.values())

    def waiting_for_buffer(self) -> frozenset[PeerId]:
        """Return the peers that owe us nothing, because what is next of them needs a buffer and none is free."""
        if self._buffers.has_free or not self._buffers.taken:
            return frozenset()
        heads = [(queue.lane, self._head(queue)) for queue in tuple(self._queues) if not queue.lane.chunks_in_flight]
        return frozenset(lane.peer for lane, head in heads if head is not None and head.needs_buffer)

    def check(self) -> None:
        """Check the law of staging: each buffer is free, or has one chunk in flight of a read that has not ended."""
        self._buffers.check()
        assert set(self._buffers.taken.values()) <= self.reads.keys(), "a staging buffer has the chunk of no read"

    def admit(self, read: RankRead, programs: Sequence[Prepared]) -> None:
        """Take a checked read of an open peer, with the program of each of its parts."""
        assert read.read_id not in self.reads, f"read id {read.read_id} is used twice"
        lane = self._lanes[read.peer]
        assert lane.closed is None
        now = self._clock()
        read.since, read.owing = now, lane.owing
        self.reads[read.read_id] = opened = OpenRead(read, programs, lane, read.parts[0].pairs, now)
        if read.check_first:
            lane.checks.append(opened)
            self._due[lane] = None
        else:
            self._queue(opened)

    def cancel(self, read_ids: Iterable[int]) -> None:
        """Drop what is not posted, or not scattered, of these reads; those with nothing left to drop go on."""
        for read_id in read_ids:
            opened = self.reads.get(read_id)
            if opened is None or opened.doom is not None:
                continue
            if opened.waits or opened.read.phase == "queue" or (opened.in_flight and opened.staged):
                self._doom(opened, Reason("cancelled", "cancelled by the caller"))

    def abandon(self, peer: PeerId, reason: Reason) -> None:
        """Close a peer: each of its reads ends as soon as nothing of it is in flight. It drains, and is forgotten."""
        lane = self._lanes[peer]
        if lane.closed is not None:
            return
        lane.closed = reason
        for opened in [opened for opened in self.reads.values() if opened.lane is lane]:
            self._doom(opened, reason)
        for queue in lane.queues.values():
            self._queues.pop(queue, None)
        for each in (lane.queues, lane.checks, lane.fences):
            each.clear()
        self._due.pop(lane, None)
        self._forget_if_drained(lane)

    def take_check(self) -> Check | None:
        """Choose a check that is due, for as many reads as its span of slots holds, and count it as in flight."""
        if not self._due:
            return None
        for lane in tuple(self._due):
            if lane.checks_in_flight >= CHECKS_IN_FLIGHT_MAX:
                continue
            fence = bool(lane.fences)
            reads, left = _one_span(lane.fences if fence else lane.checks)
            if fence:
                lane.fences = left
            else:
                lane.checks = left
            if not lane.fences and not lane.checks:
                del self._due[lane]
            if reads:
                lane.checks_in_flight += 1
                lane.begins_to_owe(self._clock())
                return Check(lane, reads, reads[0].read.lease.slot, reads[-1].read.lease.slot, fence)
        return None

    def take_chunk(self) -> Carried | None:
        """Choose a chunk to post now, and count it as in flight. Reads that cannot be bound end with ``bounds``."""
        while (chosen := self._choose()) is not None:
            started = self._clock()
            program = chosen.programs[chosen.part]
            if chosen.portion is not None:
                return self._take([chosen], program, started, 0.0)
            reads = self._join(chosen, program)
            try:
                chosen.portion = _bind(reads, program)
            except OutOfBounds as error:
                if len(reads) == 1:
                    self._doom(chosen, Reason("bounds", str(error)))
                for opened in reads:
                    opened.alone = True  # so that the next attempt tells which of them it is
            else:
                return self._take(reads, program, started, self._clock() - started)
        return None

    def arrived(
        self,
        carried: Carried,
        unheld: AbstractSet[tuple[int, int]] = frozenset(),
        refused: Mapping[int, Reason] = NOTHING_REFUSED,
    ) -> None:
        """Report that a chunk is there, and scattered if that is wanted.

        Args:
            carried: the chunk.
            unheld: slot and epoch of leases under which the exporter did not serve something.
            refused: ids of the reads that the exporter refused to serve -> why.
        """
        now = self._clock()
        if len(carried.reads) == 1:
            carried.reads[0].read.nbytes += carried.nbytes
        else:
            pair_bytes = carried.program.pair_bytes
            for share, opened in zip(carried.chunk.portion.shares, carried.reads, strict=True):
                opened.read.nbytes += share.pairs * pair_bytes
        for opened in carried.reads:
            opened.arrived_at = now
            if unheld and opened.read.lease[:2] in unheld:
                opened.unserved = True
            if refused and opened.read.read_id in refused:
                self._drop(opened, refused[opened.read.read_id])
            self._leave(carried, opened, now)
        self._chunk_is_over(carried, now)

    def checked(self, check: Check, values: Sequence[int]) -> None:
        """Report what the slots of a check hold, from its first to its last."""
        first = check.first
        for opened in check.reads:
            if opened.doom is not None:  # cancelled or abandoned meanwhile, and answered
                continue
            slot, epoch, _ = opened.read.lease
            observed = values[slot - first]
            verdict = judge(epoch, observed)
            if verdict == "held" and not check.fence:
                self._queue(opened)
            else:
                self._end(opened, verdict, observed)
        self._check_is_over(check)

    def failed(self, work: Work, reason: Reason) -> None:
        """Report that a piece of work failed, and that nothing of it will write after this."""
        if isinstance(work, Check):
            for opened in work.reads:
                if opened.doom is None:
                    self._doom(opened, reason)
            self._check_is_over(work)
            return
        now = self._clock()
        for opened in work.reads:
            self._drop(opened, reason)
            self._leave(work, opened, now)
        self._chunk_is_over(work, now)

    def _queue(self, opened: OpenRead) -> None:
        """Have a read wait for its turn."""
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
        """Choose the read whose chunk is next: by waiting and urgency, but now and then the oldest. So none starves."""
        chosen = oldest = None
        earliest = (math.inf, 0)
        for queue in tuple(self._queues):
            head = self._head(queue)
            if head is None or queue.lane.chunks_in_flight >= CHUNKS_IN_FLIGHT_MAX:
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
        """Return the read of a queue that is next, and forget those before it that do not wait any longer."""
        reads = queue.reads
        while reads:
            if reads[0].waits:
                return reads[0]
            reads.popleft()
        del self._queues[queue]
        if queue.priority:  # the one that most reads have is kept
            del queue.lane.queues[queue.priority]
        return None

    def _join(self, chosen: OpenRead, program: Prepared) -> list[OpenRead]:
        """Choose the reads that share the next chunk: small ones of one program that follow each other in a queue.

        Returns:
            The chosen one and the others. If they are several, the chunk carries the whole part of each that is next.
        """
        joined = [chosen]
        room = program.chunk_pairs - len(chosen.pairs.source)
        if room <= 0 or chosen.alone or chosen.cursor:
            return joined
        for opened in chosen.lane.queues[chosen.read.priority].reads:
            if opened.waits and opened is not chosen:
                room -= len(opened.pairs.source)
                if room < 0 or opened.programs[opened.part] is not program or opened.alone or opened.cursor:
                    break
                joined.append(opened)
        return joined

    def _take(self, reads: list[OpenRead], program: Prepared, started: float, bind_s: float) -> Carried:
        """Count the next chunk of a bound portion as in flight. The first read is the one that has the portion."""
        leader = reads[0]
        portion, lane = leader.portion, leader.lane
        assert portion is not None
        first, stop, nbytes = 0, portion.source_index.size, portion.nbytes
        last = leader.cut + 2 == portion.cuts.size
        if leader.cut or not last:
            n, first, stop = stop, portion.cuts.item(leader.cut), portion.cuts.item(leader.cut + 1)
            # A part of a portion fills what its share of the descriptors does; added up, that is exact.
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
                opened.waits = opened.part < len(opened.programs)
                if opened.waits:
                    opened.pairs = read.parts[opened.part].pairs
        lane.chunks_in_flight += 1
        lane.begins_to_owe(started)
        queue = lane.queues[leader.read.priority]
        queue.taken += 1
        if queue.taken >= lane.weight:
            self._numbers += 1
            queue.taken, queue.turn_at, queue.turn = 0, started, self._numbers
        buffer = NO_BUFFER if program.staged is None else self._buffers.take(leader.read.read_id)
        return Carried(lane, Chunk(portion, first, stop, buffer), program, reads, nbytes, bind_s)

    def _leave(self, carried: Carried, opened: OpenRead, now: float) -> None:
        """Note that a chunk of a read is not in flight any longer. If it was the last, a fence is due, or the end."""
        opened.bind_s += carried.bind_s
        opened.post_s += carried.post_s
        opened.scatter_s += carried.scatter_s
        opened.in_flight -= 1
        if opened.in_flight or opened.waits:
            return
        if opened.doom is not None:
            self._end(opened, "failed")
            return
        read, lane = opened.read, carried.lane
        read.phase, read.since = "fence", now
        lane.fences.append(opened)
        self._due[lane] = None

    def _chunk_is_over(self, carried: Carried, now: float) -> None:
        if carried.chunk.buffer != NO_BUFFER:
            self._buffers.give_back(carried.chunk.buffer)
        carried.lane.chunks_in_flight -= 1
        carried.lane.has_delivered(now)
        self._forget_if_drained(carried.lane)

    def _check_is_over(self, check: Check) -> None:
        check.lane.checks_in_flight -= 1
        check.lane.has_delivered(self._clock())
        self._forget_if_drained(check.lane)

    def _forget_if_drained(self, lane: Lane) -> None:
        if lane.closed is not None and not lane.chunks_in_flight and not lane.checks_in_flight:
            del self._lanes[lane.peer]

    def _drop(self, opened: OpenRead, reason: Reason) -> None:
        """Have a read end ``failed`` when nothing of it is in flight; what is not posted never will be."""
        opened.doom = opened.doom or reason
        opened.waits, opened.portion = False, None

    def _doom(self, opened: OpenRead, reason: Reason) -> None:
        """Drop a read, and end it if nothing of it is in flight."""
        self._drop(opened, reason)
        if not opened.in_flight:
            self._end(opened, "failed")

    def _end(self, opened: OpenRead, verdict: Verdict, observed: int = 0) -> None:
        assert not opened.in_flight
        opened.waits = False
        read, doom = opened.read, opened.doom
        del self.reads[read.read_id]
        unserved = opened.unserved and verdict == "held"
        fenced = read.phase == "fence"
        self._answer(
            ReadEnded(
                read_id=read.read_id,
                verdict="early" if unserved else verdict,
                code="" if doom is None else doom.code,
                detail="" if doom is None else doom.detail,
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


def _bind(reads: list[OpenRead], program: Prepared) -> Portion:
    """Bind what is next of these reads: of one as much as a portion holds, of several their whole parts."""
    leader = reads[0]
    if len(reads) > 1:
        parts = [opened.pairs for opened in reads]
        pairs = joined(parts)
        shares = tuple([Share(opened.read.read_id, opened.read.lease, len(opened.pairs.source)) for opened in reads])
        portion = bind_portion(program, pairs, shares)
        if portion.cuts.size > 2:
            raise OutOfBounds("the pairs of several reads were cut into several chunks")
        for opened, share in zip(reads, shares, strict=True):
            opened.cursor = share.pairs
        return portion
    pairs, first = leader.pairs, leader.cursor
    count = len(pairs.source)
    stop = min(count, first + program.portion_pairs)
    if stop - first < count:
        pairs = UnitPairs(pairs.source[first:stop], pairs.target[first:stop])
    portion = bind_portion(program, pairs, (Share(leader.read.read_id, leader.read.lease, stop - first),))
    leader.cursor = stop
    return portion


def _one_span(due: list[OpenRead]) -> tuple[list[OpenRead], list[OpenRead]]:
    """Divide reads that are due into those that one check serves, in the order of their slots, and the others.

    A check tells one value of each slot, so it serves reads of one epoch of a slot only: an exporter that serves reads
    tells what it compared with.
    """
    if len(due) == 1:
        return (due if due[0].doom is None else []), []
    due.sort(key=_by_slot)
    reads: list[OpenRead] = []
    left: list[OpenRead] = []
    end, before = math.inf, (-1, 0)
    for opened in due:
        if opened.doom is not None:  # answered
            continue
        slot, epoch, _ = opened.read.lease
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
