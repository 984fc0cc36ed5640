"""What the scheduler remembers of one pull and of each of its legs."""

from dataclasses import dataclass, field

from kvflow.transfer.events import TransferCompleted, TransferFailed
from kvflow.transfer.report import TransferReport
from kvflow.transfer.requests import LegRequest, PullRequest
from kvflow.transfer.states import LegEvent, LegState, advance

EARLY_RETRY_S = 0.005
EARLY_RETRY_S_MAX = 0.5
"""Pause before a lease that is not admitted yet is looked at again: an admission is one message away. Doubled each
time, because an engine that still computes what it has promised may take seconds."""


@dataclass(slots=True)
class Leg:
    """What one source rank gives to a pull.

    Attributes:
        pull: what it belongs to.
        request: what it must give, under which lease.
        renew_at: when its lease is to be renewed next.
        queued_at: since when it waits for room, in this attempt.
        admitted: whether its lease is known to be held before what is read now.
        again: whether it is read once more, because the producer had not served something of a lease that is held.
        unheld: whether, in this attempt, the producer has not served something because its lease was not held.
        waiting: pairs that are queued.
        nbytes: bytes that have arrived, in this attempt.
        state: see ``states``.
        reads: ids of the batches in flight that have a part of it.
        look_id: of the look at its lease that all batches share until it is judged; -1 before the first.
        fence_id: of the last fence; -1 before the first.
        bytes_at: when every byte had arrived, or its lease was first found not to be admitted; None before.
        retry_at: when its lease is looked at again; None if it is not waited for.
        pause_s: before it is looked at once more.
    """

    pull: "Pull"
    request: LegRequest
    renew_at: float
    queued_at: float
    admitted: bool
    again: bool = False
    unheld: bool = False
    waiting: int = 0
    nbytes: int = 0
    state: LegState = "queued"
    reads: set[int] = field(default_factory=set)
    look_id: int = -1
    fence_id: int = -1
    bytes_at: float | None = None
    retry_at: float | None = None
    pause_s: float = EARLY_RETRY_S

    @property
    def awaits_admission(self) -> bool:
        """Whether its lease was found not to be admitted yet: nothing of it is queued until it is."""
        return self.state == "queued" and not self.waiting

    def count_early(self) -> None:
        """Note that its lease is not admitted yet, and that what was read before that does not count."""
        self.pull.early += 1
        self.pull.early_bytes += 0 if self.unheld else self.nbytes
        self.nbytes = 0

    def move(self, event: LegEvent) -> None:
        """Go on to the next state."""
        self.state = advance(self.state, event)

    def wait_for_admission(self, now: float) -> float:
        """Look again in a while, and longer each time; return when."""
        self.admitted, self.waiting = False, 0
        if self.bytes_at is None:
            self.bytes_at = now  # one budget covers all waiting for an admission
        self.retry_at = now + self.pause_s
        self.pause_s = min(EARLY_RETRY_S_MAX, 2 * self.pause_s)
        return self.retry_at


@dataclass(slots=True)
class Pull:
    """One request.

    Attributes:
        request: what was submitted.
        submitted_at: when.
        legs: ids of its legs.
        started_at: when the first batch was dispatched; None before.
        arrived_at: when the last batch so far had arrived.
        failed: whether it has failed; then it only drains.
        reads: batches that had a part of it.
        early: how often the lease of a leg was found not to be admitted yet.
        early_bytes: bytes that were read before that, and are read again.
        posted_s: seconds spent in posting calls.
        scattered_s: seconds spent in copying out of staging buffers.
        fence_s: of the slowest fence.
        held_back: the failure that is told once nothing of it is in flight.
        held_since: since when that is held back.
    """

    request: PullRequest
    submitted_at: float
    legs: list[int] = field(default_factory=list)
    started_at: float | None = None
    arrived_at: float = 0.0
    failed: bool = False
    reads: int = 0
    early: int = 0
    early_bytes: int = 0
    posted_s: float = 0.0
    scattered_s: float = 0.0
    fence_s: float = 0.0
    held_back: TransferFailed | None = None
    held_since: float = 0.0

    def completed(self) -> TransferCompleted:
        """Report what was delivered. The shell adds what it alone knows: transport, handshake, bind and total."""
        request = self.request
        demands = [part for leg in request.legs for part in leg.demands]
        descriptors = sum(part.descriptors for part in demands)
        report = TransferReport(
            request_id=request.request_id,
            nbytes=request.nbytes,
            read_bytes=sum(len(part.pairs.source) * part.read_bytes for part in demands),
            descriptors=descriptors,
            merged=1 - descriptors / sum(len(part.pairs.source) * part.unit_descriptors for part in demands),
            reads=self.reads,
            early=self.early,
            early_bytes=self.early_bytes,
            timings_s=self.timings_s(self.arrived_at),
        )
        return TransferCompleted(request.pull_id, request.request_id, report)

    def timings_s(self, until: float) -> dict[str, float]:
        """Return the seconds of each phase that has begun.

        Args:
            until: when the last byte arrived; of a pull that has failed before that, when it failed.
        """
        if self.started_at is None:
            return {"queue": until - self.submitted_at}
        moved_s = until - self.started_at
        return {
            "queue": self.started_at - self.submitted_at,
            "post": self.posted_s,
            "wire": max(0.0, moved_s - self.posted_s - self.scattered_s),
            "scatter": self.scattered_s,
            "fence": self.fence_s,
        }
