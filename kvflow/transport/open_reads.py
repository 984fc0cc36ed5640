"""What is known of a read that has not ended, of a peer's lane, and of what is in flight. ``lanes`` keeps it."""

import math
from collections import deque
from collections.abc import Sequence

from msgspec import Struct, field

from kvflow.ids import PeerId
from kvflow.transfer.pairs import UnitPairs
from kvflow.transfer.requests import Owing, RankRead
from kvflow.transport.mover import Chunk, Portion, Prepared, Reason


class OpenRead(Struct, eq=False):
    """A read that has not ended.

    Attributes:
        programs: prepared, one for each part of the read.
        pairs: all pairs of the part that is posted next.
        taken_at: when it was taken, in seconds.
        age: number by which reads that wait for a turn are ordered.
        overtaken: chunks that went before it since its last one, because they were more urgent.
        waits: whether a chunk of it is still to be posted, and wanted.
        part: the part that is posted next.
        cursor: pairs of this part that were bound.
        portion: of this part, what was bound and not yet posted as a whole.
        cut: number of the portion's cut at which the next chunk begins.
        alone: whether it shares no chunk with other reads.
        in_flight: chunks.
        doom: why it ends ``failed`` as soon as nothing of it is in flight.
        unserved: whether the exporter did not serve something, as the lease was not held.
    """

    read: RankRead
    programs: Sequence[Prepared]
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
    doom: Reason | None = None
    unserved: bool = False
    chunks: int = 0
    arrived_at: float = 0.0
    bind_s: float = 0.0
    post_s: float = 0.0
    scatter_s: float = 0.0

    @property
    def needs_buffer(self) -> bool:
        """Whether its next chunk is staged."""
        return self.programs[self.part].staged is not None

    @property
    def staged(self) -> bool:
        """Whether some of its chunks are."""
        return any(program.staged is not None for program in self.programs)


class Lane(Struct, eq=False):
    """What one peer has to do. Closed when ``closed`` gives the reason; then it only drains.

    Attributes:
        weight: chunks of one turn.
        owing: whether the peer owes us something that was posted.
        queues: priority -> reads that wait.
        checks: reads whose first check is due.
        fences: reads whose fence is due.
    """

    peer: PeerId
    weight: int = 1
    owing: Owing = field(default_factory=Owing)
    queues: "dict[int, Queue]" = {}
    checks: list[OpenRead] = []
    fences: list[OpenRead] = []
    chunks_in_flight: int = 0
    checks_in_flight: int = 0
    closed: Reason | None = None

    def begins_to_owe(self, now: float) -> None:
        """Note that something is posted."""
        if self.owing.since == math.inf:
            self.owing.since = now

    def has_delivered(self, now: float) -> None:
        """Note that something that was posted is over."""
        self.owing.since = now if self.chunks_in_flight or self.checks_in_flight else math.inf


class Queue(Struct, eq=False):
    """Reads of one lane and one priority that wait, the oldest first; some of them may not wait any longer.

    Attributes:
        turn_at: when its last turn ended, in seconds.
        turn: number of its last turn, which orders queues of one time.
        taken: chunks of its present turn.
    """

    lane: Lane
    priority: int
    reads: deque[OpenRead] = field(default_factory=deque)
    turn_at: float = -math.inf
    turn: int = 0
    taken: int = 0


class Carried(Struct, eq=False):
    """A chunk that was taken.

    Attributes:
        reads: whose bytes it carries, in the order of its portion's shares.
        nbytes: that it fills.
        bind_s: seconds that binding its portion took; 0 if an earlier chunk says so.
        post_s: seconds that posting it took.
        scatter_s: seconds that the copies out of its buffer took.
    """

    lane: Lane
    chunk: Chunk
    program: Prepared
    reads: list[OpenRead]
    nbytes: int
    bind_s: float
    post_s: float = 0.0
    scatter_s: float = 0.0

    @property
    def wanted(self) -> bool:
        """Whether it carries bytes of a read that was neither cancelled nor failed."""
        return any(opened.doom is None for opened in self.reads)


class Check(Struct, eq=False):
    """One look at the epoch slots ``first`` to ``last``, for all these reads. A slot is there for one epoch only.

    Attributes:
        fence: whether all bytes of the reads have arrived; otherwise it is their first check.
    """

    lane: Lane
    reads: list[OpenRead]
    first: int
    last: int
    fence: bool


Work = Carried | Check
