"""What the scheduler remembers of one pull, and the life of each of its rank reads as a table.

=============  ==========================================================  ================================
state          what holds                                                  deadline
=============  ==========================================================  ================================
``reading``    the data plane has the read                                 ``Budgets``, by the read's phase
``waiting``    its lease is not admitted yet; it is read again later       ``Budgets.fence_s``
``delivered``  all bytes are there, and the fence found the lease held     none
``draining``   the pull has failed; the data plane still has the read      none: only its end ends it
``dead``       the pull has failed and nothing of this rank will write     none
=============  ==========================================================  ================================
"""

import math
from typing import Literal

from msgspec import Struct

from kvflow.transfer.events import TransferFailed
from kvflow.transfer.report import phases_s
from kvflow.transfer.requests import RankRead, ReadEnded

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

EARLY_RETRY_S = 0.005
EARLY_RETRY_S_MAX = 0.5
"""Pause before a lease that is not admitted yet is checked again: an admission is one message away. Doubled each time,
because an engine that still computes what it has promised may take seconds."""


class IllegalTransition(Exception):
    """An event that this state does not know: a defect of the scheduler. Nothing was changed."""


def advance(state: RankState, event: RankEvent) -> RankState:
    """Return the next state.

    Raises:
        IllegalTransition: the table has no such entry.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"a rank read that is {state} cannot be {event}") from None


class Budgets(Struct, frozen=True, kw_only=True):
    """Seconds that each phase of a pull may take, each from its own start.

    Attributes:
        queue_s: submission to the first chunk.
        wire_s: without any completion from a peer that owes us one. A hung peer is found only by this.
        fence_s: from the last byte to the verdict; and all waiting for a late admission.
    """

    queue_s: float = 30.0
    wire_s: float = 30.0
    fence_s: float = 10.0


class SourceRank(Struct, eq=False):
    """What one source rank gives to a pull.

    Attributes:
        pull: what it belongs to.
        read: the read that the data plane has, or had last.
        asked_at: when the data plane was asked for it.
        look_at: when its deadlines are looked at next.
        state: see the table.
        early_at: when its lease was first found not to be admitted; infinite before.
        pause_s: before its lease is checked once more.
        unserved: whether the producer once did not serve blocks of a lease that it holds.
    """

    pull: "Pull"
    read: RankRead
    asked_at: float
    look_at: float
    state: RankState = "reading"
    early_at: float = math.inf
    pause_s: float = EARLY_RETRY_S
    unserved: bool = False

    def move(self, event: RankEvent) -> None:
        """Go on to the next state."""
        self.state = advance(self.state, event)


class Pull(Struct, eq=False):
    """One request that is being read.

    Attributes:
        pull_id: chosen by the caller, unique.
        request_id: the producer's name of the request, for the record.
        budgets: of its phases.
        nbytes: bytes that it fills.
        submitted_at: when.
        ranks: one for each source rank that gives something.
        missing: ranks that are not delivered.
        failed: whether it has failed; then it only drains.
        held_back: a failure that is told once nothing of the pull is in flight.
        held_since: since when that is held back.
        early: how often the lease of a rank was found not to be admitted yet.
        early_bytes: bytes that were read before that, and are read again.
        ended: the answers that count, one for each delivered rank.
    """

    pull_id: int
    request_id: str
    budgets: Budgets
    nbytes: int
    submitted_at: float
    ranks: list[SourceRank] = []
    missing: int = 0
    failed: bool = False
    held_back: TransferFailed | None = None
    held_since: float = 0.0
    early: int = 0
    early_bytes: int = 0
    ended: list[ReadEnded] = []

    def timings_s(self, now: float) -> dict[str, float]:
        """Return the seconds of each phase that has begun, of a pull that fails now."""
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
