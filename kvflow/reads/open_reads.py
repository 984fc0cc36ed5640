"""The records of ``lanes``: reads that have not ended, peers' lanes, work in flight, and staging buffers."""

import math
from collections import deque
from collections.abc import Sequence

from msgspec import Struct, field

from kvflow.ids import PeerId
from kvflow.planning.pairs import UnitPairs
from kvflow.reads.backend import Cause, CheckedList, Chunk, Portion
from kvflow.reads.contract import Outstanding, RankRead
from kvflow.reads.pacing import Pace


class OpenRead(Struct, eq=False, gc=False):
    """A read that has not ended. The garbage collector does not visit it; ``Lanes.abandon`` cuts it from its lane.

    Attributes:
        prepared_lists: the checked lists, one for each part of the read.
        pairs: all pairs of the part that is posted next.
        age: number that orders the reads that wait for a turn.
        overtaken: more urgent chunks that were posted before it since its last one.
        waits: whether a chunk of it must still be posted.
        part: the part that is posted next.
        cursor: pairs of this part that were bound.
        portion: the portion of this part that was bound and is not posted completely.
        cut: number of the portion's cut at which the next chunk begins.
        alone: whether it shares no chunk with other reads.
        failure: why it ends ``failed`` as soon as nothing of it is in flight.
        unserved: whether the exporter refused bytes because the lease was not held.
    """

    read: RankRead
    prepared_lists: Sequence[CheckedList]
    lane: "Lane"
    pairs: UnitPairs
    taken_at: float
    age: int = 0
    overtaken: int = 0
    waits: bool = False
    part: int = 0
    cursor: int = 0
    portion: Portion | None = None
    cut: int = 0
    alone: bool = False
    in_flight: int = 0
    failure: Cause | None = None
    unserved: bool = False
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
    """The reads and the work in flight of one peer. If ``closed`` has a reason, the lane is closed and only drains.

    Attributes:
        weight: chunks in one turn.
        queues: priority -> reads that wait.
        checks: reads whose first check is due.
        fences: reads whose fence is due.
        pace: the pace of its chunks; None unless its posts may be asynchronous.
    """

    peer: PeerId
    weight: int = 1
    outstanding: Outstanding = field(default_factory=Outstanding)
    queues: "dict[int, Queue]" = {}
    checks: list[OpenRead] = []
    fences: list[OpenRead] = []
    chunks_in_flight: int = 0
    checks_in_flight: int = 0
    closed: Cause | None = None
    pace: Pace | None = None

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
    """Waiting reads of one lane and one priority, the oldest first. Some may no longer wait.

    Attributes:
        turn: number of its last turn, which orders queues with equal times.
        taken: chunks of its present turn.
    """

    lane: Lane
    priority: int
    reads: deque[OpenRead] = field(default_factory=deque)
    turn_at: float = -math.inf
    turn: int = 0
    taken: int = 0


class TakenChunk(Struct, eq=False):
    """A chunk that was taken. ``reads`` are in the order of its portion's shares.

    Attributes:
        bind_s: seconds that binding its portion took; 0 if an earlier chunk has them.
        posted_at: when its post began, in seconds.
        scatter_s: seconds that the copies out of its buffer took.
    """

    lane: Lane
    chunk: Chunk
    prepared_list: CheckedList
    reads: list[OpenRead]
    nbytes: int
    bind_s: float
    posted_at: float = 0.0
    post_s: float = 0.0
    scatter_s: float = 0.0

    @property
    def wanted(self) -> bool:
        """Whether it has bytes of a read that was not cancelled and has not failed."""
        return any(opened.failure is None for opened in self.reads)


class Check(Struct, eq=False):
    """One read of the epoch slots ``first`` to ``last``, for all these reads. Each slot is compared with one epoch.

    Attributes:
        fence: whether all bytes of the reads have arrived; otherwise it is their first check.
    """

    lane: Lane
    reads: list[OpenRead]
    first: int
    last: int
    fence: bool


Work = TakenChunk | Check


class Buffers:
    """The staging buffers of one transport, by number. Thread: one only.

    A chunk takes a buffer when it is posted. The buffer is free again once the chunk was scattered, has failed or was
    dropped. A chunk of a hung peer never ends, so its buffer stays taken (in quarantine).
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count))
        self._taken: dict[int, int] = {}

    @property
    def has_free(self) -> bool:
        """Whether a buffer is free."""
        return bool(self._free)

    @property
    def taken(self) -> dict[int, int]:
        """Buffer -> the read whose chunk has it."""
        return dict(self._taken)

    def take(self, read_id: int) -> int:
        """Give a free buffer to a chunk of this read: the last one that came back, because a CPU cache may hold it."""
        buffer = self._free.pop()
        self._taken[buffer] = read_id
        return buffer

    def give_back(self, buffer: int) -> None:
        """Record that nothing reads or writes the buffer."""
        del self._taken[buffer]
        self._free.append(buffer)

    def check(self) -> None:
        """Check that each buffer is either free or taken, and only once."""
        assert sorted([*self._free, *self._taken]) == list(range(self._count)), (
            "a staging buffer is lost, or there twice"
        )
