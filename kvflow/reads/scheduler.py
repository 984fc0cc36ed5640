"""The scheduler of pulls: it turns requests into rank reads, and decides once per event. It does no I/O.

Every method takes what happened and ``now`` (seconds of the data plane's clock), and returns what the caller must do,
in order. A pull has one rank read per source rank, which the data plane answers once. It is complete when every rank is
delivered, and fails when the first rank fails. A rank whose lease is not admitted yet is *early*: the caller asks its
producer, and has it read again.

Only the data plane (``kvflow.reads.lanes``) decides which read goes first, so reads do not wait here.
"""

import math
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kvflow.config import Tuning
from kvflow.errors import FailureCode
from kvflow.events import PullFailed, TransferQuiesced, TransferRetried
from kvflow.ids import PeerId
from kvflow.reads.contract import CancelReads, RankRead, ReadEnded, ReadPhase
from kvflow.reads.pulls import AWAITED, Pull, SourceRank

DEADLINE_CHECK_S_MAX = 1.0
"""The deadlines of a read are checked at least this often, and at least eight times within its shortest budget."""


class StartReads(Struct, frozen=True):
    """Hand these reads to the data plane."""

    reads: tuple[RankRead, ...]


class Delivered(Struct, frozen=True):
    """Every byte of a pull has arrived, and every fence found its lease held."""

    pull: Pull


class LeaseEarly(Struct, frozen=True):
    """Ask whether the lease of this rank is admitted, and let it be read again, soon or when it is."""

    rank: SourceRank
    again: bool  # whether it was found early before


class _Cause(NamedTuple):
    """Why a pull fails: the fields of ``PullFailed``."""

    code: str
    phase: ReadPhase
    detail: str
    peer: PeerId | None = None


Effect = StartReads | CancelReads | Delivered | LeaseEarly | TransferRetried | PullFailed | TransferQuiesced


class Scheduler:
    """Decide what is read and when, and when a pull has ended.

    If all reads of a pull are answered when they are posted, the pull is never opened here.

    Attributes:
        read_ids: yields an id for every read of its data plane.
    """

    def __init__(self, budgets: Tuning) -> None:
        self._pulls: dict[int, Pull] = {}  # that are open or draining
        self._budgets = budgets
        self._deadline_check_s = min(DEADLINE_CHECK_S_MAX, budgets.queue_s / 8, budgets.wire_s / 8, budgets.fence_s / 8)
        # Ranks that wait for the data plane, or for an admission, by their read: in the order in which their deadlines
        # are checked.
        self._reads: dict[int, SourceRank] = {}
        self.read_ids = count(1)

    @property
    def busy(self) -> bool:
        """Whether any pull is open or draining, so that ``tick`` must be called."""
        return bool(self._pulls)

    def submit(self, pull: Pull) -> None:
        """Open a pull whose reads, at least one, the data plane has. No other pull of its number is open."""
        self._pulls[pull.pull_id] = pull
        pull.missing = len(pull.reads)
        due = pull.submitted_at + self._deadline_check_s
        pull.ranks = tuple([SourceRank(pull.pull_id, read, pull.submitted_at, due) for read in pull.reads])
        for rank in pull.ranks:
            self._reads[rank.read.read_id] = rank

    def on_read_ended(self, ended: ReadEnded, now: float) -> list[Effect]:
        """Take the data plane's answer to a rank read."""
        rank = self._reads.pop(ended.read_id)
        pull = self._pulls[rank.pull_id]
        if pull.failed:
            rank.move("ended")
            return self._drained(pull)
        if ended.verdict == "held":
            rank.move("held")
            pull.ended = (*pull.ended, ended)
            pull.missing -= 1
            if pull.missing:
                return []
            del self._pulls[pull.pull_id]
            return [Delivered(pull)]
        if ended.verdict == "early" and not (ended.unserved and rank.unserved):
            return self._read_later(rank, ended, now)
        rank.read.nbytes = ended.nbytes
        rank.move("failed")
        rank.move("ended")
        return self._fail(pull, _cause(rank.read, ended), now)

    def on_peer_failed(self, peer: PeerId, *, code: str, detail: str, now: float) -> list[Effect]:
        """End every pull that needs this peer."""
        concerned: dict[int, tuple[Pull, ReadPhase]] = {
            pull.pull_id: (pull, "fence" if rank.state == "waiting" else rank.read.phase)
            for pull in self._pulls.values()
            if not pull.failed
            for rank in pull.ranks
            if rank.state in ("reading", "waiting") and rank.read.peer == peer
        }
        effects: list[Effect] = []
        for pull, phase in concerned.values():
            effects += self._fail(pull, _Cause(code, phase, detail, peer), now)
        return effects

    def cancel(self, pull_id: int, *, code: str, detail: str, now: float, peer: PeerId | None = None) -> list[Effect]:
        """Cancel a pull, because of a peer if one is named; do nothing if it has ended, or was not submitted."""
        pull = self._pulls.get(pull_id)
        if pull is None or pull.failed:
            return []
        phase: ReadPhase = pull.phase if pull.phase in ("queue", "wire") else "fence"  # type: ignore[assignment]
        return self._fail(pull, _Cause(code, phase, detail, peer), now)

    def tick(self, now: float) -> list[Effect]:
        """Apply deadlines. Call it every few tens of milliseconds while ``busy``."""
        effects: list[Effect] = []
        overdue = []
        for rank in self._reads.values():
            if rank.deadline_check_at > now:
                break
            overdue.append(rank)
        for rank in overdue:
            if rank.read.read_id in self._reads:  # it may have failed just now, with another rank of its pull
                effects += self._check_deadlines(rank, now)
        return effects

    def _check_deadlines(self, rank: SourceRank, now: float) -> list[Effect]:
        """Apply the deadlines of a rank that waits, and check it again later."""
        del self._reads[rank.read.read_id]  # move it to the end of the queue
        self._reads[rank.read.read_id] = rank
        pull = self._pulls[rank.pull_id]
        rank.deadline_check_at = now + self._deadline_check_s
        if pull.failed:
            return self._stop_holding_back(rank, now)
        read = rank.read
        phase, since, budgets = read.phase, read.since, self._budgets
        if rank.state == "waiting":  # one budget covers all waits
            phase, since, budget_s = "fence", rank.early_at, budgets.fence_s
        elif phase == "queue":
            since, budget_s = rank.asked_at, budgets.queue_s  # the data plane may not have taken it
        else:
            budget_s = budgets.wire_s if phase == "wire" else budgets.fence_s
            if read.outstanding is not None:
                since = max(since, read.outstanding.since)
        return self._fail_late(rank, phase, now) if now - since > budget_s else []

    def _fail_late(self, rank: SourceRank, phase: ReadPhase, now: float) -> list[Effect]:
        detail = f"{phase} took longer than its budget"
        cause = _Cause(FailureCode.DEADLINE_EXCEEDED, phase, detail, rank.read.peer)
        return self._fail(self._pulls[rank.pull_id], cause, now)

    def _read_later(self, rank: SourceRank, ended: ReadEnded, now: float) -> list[Effect]:
        """Read a rank again: once its lease is admitted, or at once if the exporter refused bytes."""
        pull = self._pulls[rank.pull_id]
        rank.move("early")
        pull.early += 1
        self._reads[rank.read.read_id] = rank
        rank.deadline_check_at = now + self._deadline_check_s
        if ended.unserved:
            rank.unserved = True
            return self.read_again((rank,), now)
        pull.early_bytes += ended.nbytes
        if now - rank.early_at > self._budgets.fence_s:
            return self._fail_late(rank, "fence", now)
        if rank.early_at < math.inf:
            return [LeaseEarly(rank, again=True)]
        rank.early_at = now
        retried = TransferRetried(pull.pull_id, pull.request_id, str(rank.read.peer))
        return [retried, LeaseEarly(rank, again=False)]

    def read_again(self, ranks: Iterable[SourceRank], now: float) -> list[Effect]:
        """Read all that these early ranks must give, unless their pulls have failed meanwhile."""
        waiting = [rank for rank in ranks if rank.state == "waiting"]
        for rank in waiting:
            rank.move("read_again")
            last = rank.read
            del self._reads[last.read_id]
            check_first = not rank.unserved
            rank.read = RankRead(next(self.read_ids), last.peer, last.lease, last.parts, check_first, last.priority)
            rank.read.arrived = last.arrived
            rank.asked_at, rank.deadline_check_at = now, now + self._deadline_check_s
            self._reads[rank.read.read_id] = rank
        return [StartReads(tuple([rank.read for rank in waiting]))] if waiting else []

    def _fail(self, pull: Pull, cause: _Cause, now: float) -> list[Effect]:
        """Fail a pull. Cancel its reads, and wait until they end."""
        pull.failed = True
        timings_s = pull.reading_s(now)
        reading: list[int] = []
        for rank in pull.ranks:
            if rank.state == "reading":
                reading.append(rank.read.read_id)
            if rank.state != "dead":
                if rank.state == "waiting":
                    del self._reads[rank.read.read_id]
                rank.move("failed")
        failure = PullFailed(
            pull.pull_id,
            pull.request_id,
            cause.code,
            cause.phase,
            "" if cause.peer is None else str(cause.peer),
            cause.detail,
            quarantined=bool(reading),
            timings_s=timings_s,
        )
        if not reading:
            return [failure, *self._drained(pull)]
        cancel = CancelReads(tuple(reading))
        if cause.code == FailureCode.STALE_LEASE:
            # A stale lease is reported only when the other ranks' reads have ended as well, so it implies quiescence.
            pull.held_back, pull.held_since = replace(failure, quarantined=False), now
            return [cancel]
        return [failure, cancel]

    def _stop_holding_back(self, rank: SourceRank, now: float) -> list[Effect]:
        """Report a failure that was held back, if the reads do not end in time: the peer took too long."""
        pull = self._pulls[rank.pull_id]
        failure = pull.held_back
        if failure is None or now - pull.held_since <= self._budgets.wire_s:
            return []
        pull.held_back = None
        peer, detail = str(rank.read.peer), "wire took longer than its budget"
        return [
            replace(
                failure, code=FailureCode.DEADLINE_EXCEEDED, phase="wire", peer=peer, detail=detail, quarantined=True
            )
        ]

    def _drained(self, pull: Pull) -> list[Effect]:
        """Report that a failed pull is quiescent once the data plane has none of its reads."""
        if any(rank.state != "dead" for rank in pull.ranks):
            return []
        del self._pulls[pull.pull_id]
        quiesced = TransferQuiesced(pull.pull_id, pull.request_id)
        return [quiesced] if pull.held_back is None else [pull.held_back, quiesced]

    def check(self) -> None:
        """Check that every open pull has ranks that wait, and that exactly these have deadlines."""
        held = [{rank.read.read_id for rank in pull.ranks if rank.state in AWAITED} for pull in self._pulls.values()]
        assert set().union(*held) == self._reads.keys(), "a rank read was lost, or is there twice"
        assert all(held), "a pull that has ended is open"


def _cause(read: RankRead, ended: ReadEnded) -> _Cause:
    """Return why a pull fails after this answer to a rank read."""
    if ended.verdict == "stale":
        detail = "the lease ended before the read was complete"
        return _Cause(FailureCode.STALE_LEASE, "fence", detail, read.peer)
    if ended.verdict == "early":
        detail = "the producer holds the lease, and does not serve its blocks"
        return _Cause(FailureCode.TRANSPORT_ERROR, "fence", detail, read.peer)
    return _Cause(ended.code, ended.phase, ended.detail, read.peer)
