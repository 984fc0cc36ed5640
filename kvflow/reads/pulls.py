"""The scheduler's record of one pull, and the state table of its rank reads.

=============  ==========================================================  ================================
state          what holds                                                  deadline
=============  ==========================================================  ================================
``reading``    the data plane has the read                                 ``Tuning``, by the read's phase
``waiting``    its lease is not admitted yet; it is read again later       ``Tuning.fence_s``
``delivered``  all bytes are there, and the fence found the lease held     none
``draining``   the pull has failed; the data plane still has the read      none: only its end ends it
``dead``       the pull has failed and nothing of this rank will write     none
=============  ==========================================================  ================================
"""

import math
from collections.abc import Mapping
from typing import Literal, TypeVar

from msgspec import Struct

from kvflow.events import PullFailed
from kvflow.reads.contract import RankRead, ReadEnded
from kvflow.reads.report import phases_s

RankState = Literal["reading", "waiting", "delivered", "draining", "dead"]
RankEvent = Literal["held", "early", "read_again", "failed", "ended"]

TRANSITIONS: dict[tuple[RankState, RankEvent], RankState] = {
    ("reading", "held"): "delivered",
    ("reading", "early"): "waiting",
    ("waiting", "read_again"): "reading",
    ("reading", "failed"): "draining",
    ("waiting", "failed"): "dead",
    ("delivered", "failed"): "dead",  # another rank of the same pull failed
    ("draining", "ended"): "dead",
}

AWAITED = ("reading", "waiting", "draining")
"""States in which something of a rank is still to come."""

PullPhase = Literal["queue", "wire", "fence", "admission", "draining"]

EARLY_RETRY_S = 0.005
EARLY_RETRY_S_MAX = 0.5
"""Pause before a lease that is not admitted yet is checked again. The admission usually needs one message. The pause
doubles each time, because an engine that is still computing may take seconds."""


S = TypeVar("S", bound=str)
E = TypeVar("E", bound=str)


class IllegalTransition(Exception):
    """An event that a state does not have: a defect of kvflow. Nothing has changed."""


def advance(table: Mapping[tuple[S, E], S], state: S, event: E, what: str) -> S:
    """Return the next state of ``what``.

    Raises:
        IllegalTransition: the table has no such entry.
    """
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransition(f"{what} that is {state} cannot be {event}") from None


class SourceRank(Struct, eq=False, gc=False):
    """What one source rank gives to a pull.

    Attributes:
        pull_id: the pull that it belongs to. Not the pull itself: without cycles, the garbage collector need not visit
            pulls in flight.
        read: the current or last read of this rank.
        asked_at: when the data plane got the read.
        deadline_check_at: when its deadlines are checked next.
        state: see the table.
        early_at: when its lease was first found not admitted; infinite before.
        pause_s: the pause before its lease is checked again.
        unserved: whether the producer has refused blocks of a lease that it holds.
    """

    pull_id: int
    read: RankRead
    asked_at: float
    deadline_check_at: float
    state: RankState = "reading"
    early_at: float = math.inf
    pause_s: float = EARLY_RETRY_S
    unserved: bool = False

    def move(self, event: RankEvent) -> None:
        """Enter the next state."""
        self.state = advance(TRANSITIONS, self.state, event, "a rank read")


class Pull(Struct, eq=False, gc=False):
    """One request that is being read.

    Attributes:
        pull_id: chosen by the caller, unique.
        request_id: the producer's name of the request, for the record.
        nbytes: bytes that it fills.
        submitted_at: when it was submitted.
        ranks: one for each source rank that gives something.
        missing: ranks that are not delivered.
        failed: whether it has failed; then it only drains.
        held_back: a failure that is reported once nothing of the pull is in flight.
        held_since: since when the failure is held back.
        early: how often a rank's lease was found not admitted yet.
        early_bytes: bytes of these reads, which are read again.
        ended: the answers that count, one for each delivered rank.
    """

    pull_id: int
    request_id: str
    nbytes: int
    submitted_at: float
    ranks: tuple[SourceRank, ...] = ()
    missing: int = 0
    failed: bool = False
    held_back: PullFailed | None = None
    held_since: float = 0.0
    early: int = 0
    early_bytes: int = 0
    ended: tuple[ReadEnded, ...] = ()

    @property
    def phase(self) -> PullPhase:
        """The phase of the ranks that are not delivered; of several phases that in which bytes move."""
        if self.failed:
            return "draining"
        phases = {rank.read.phase for rank in self.ranks if rank.state == "reading"}
        return next((phase for phase in ("wire", "queue", "fence") if phase in phases), "admission")

    @property
    def awaited(self) -> SourceRank:
        """The rank that the pull waits for; of several the first."""
        return next((rank for rank in self.ranks if rank.state in AWAITED), self.ranks[-1])

    def timings_s(self, now: float) -> dict[str, float]:
        """Return the seconds of each phase that has begun, for a pull that fails now."""
        started_at = min([rank.read.started_at for rank in self.ranks if rank.read.started_at], default=0.0)
        if not started_at:
            return {"queue": now - self.submitted_at}
        arrived_at = self._arrived_at()
        if arrived_at is None:
            return phases_s(self.ended, self.submitted_at, started_at, now, 0.0)
        return phases_s(self.ended, self.submitted_at, started_at, arrived_at, now - arrived_at)

    def _arrived_at(self) -> float | None:
        """Return when the last byte of all ranks had arrived; None if some have not."""
        arrived = [each.arrived_at for each in self.ended]
        arrived += [rank.read.since for rank in self.ranks if rank.state != "delivered" and rank.read.phase == "fence"]
        return max(arrived) if len(arrived) == len(self.ranks) else None
