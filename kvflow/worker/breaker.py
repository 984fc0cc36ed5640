"""The circuit breaker of one address: a producer that is dead costs its consumers a few attempts, and then nothing.

===========  ===========================================================  =================================
state        what holds                                                   who may dial
===========  ===========================================================  =================================
``closed``   the address answers, or has not failed often enough          everybody
``open``     it has failed ``FAILURES_MAX`` times in a row                nobody, until ``retry_at``
``probing``  an attempt is under way that decides                         nobody else
===========  ===========================================================  =================================

A peer that was not tried at the address may always be dialled: its ticket is younger than the failures, and so a sign
that somebody lives there again. That is why a breaker never delays the first pull after a restart.

Pure: time and chance are arguments.
"""

from dataclasses import dataclass, field
from typing import Literal

from kvflow.ids import PeerId

FAILURES_MAX = 3
"""Attempts in a row that must fail: one may be a hiccup, two a slow restart."""

BACKOFF_S = 0.5
BACKOFF_S_MAX = 15.0
"""Pause before the next attempt, doubled with each that fails: a restart takes seconds, loading a model a minute."""

TRIED_MAX = 16
"""Peers that are remembered to have failed at an address; an engine that restarts more often is not worth a probe."""

State = Literal["closed", "open", "probing"]
Event = Literal["answered", "failed", "failed_too_often", "probed", "abandoned"]

TRANSITIONS: dict[tuple[State, Event], State] = {
    ("closed", "answered"): "closed",
    ("closed", "failed"): "closed",
    ("closed", "failed_too_often"): "open",
    ("closed", "abandoned"): "closed",
    ("open", "probed"): "probing",
    # An attempt that was begun before the others had failed may end now.
    ("open", "answered"): "closed",
    ("open", "failed"): "open",
    ("open", "failed_too_often"): "open",
    ("open", "abandoned"): "open",
    ("probing", "answered"): "closed",
    ("probing", "failed"): "open",
    ("probing", "failed_too_often"): "open",
    # Nothing was dialled, so nothing was decided: whoever asks next is the probe, if its time has come.
    ("probing", "abandoned"): "open",
}


class IllegalTransition(Exception):
    """An event that this state does not know: a defect of the caller. Nothing was changed."""


def advance(state: State, event: Event) -> State:
    """Return the next state.

    Raises:
        IllegalTransition: the table has no such entry.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"a breaker that is {state} cannot be {event}") from None


@dataclass(slots=True)
class Breaker:
    """One address.

    Attributes:
        state: see above.
        failures: attempts that have failed in a row.
        retry_at: when the next attempt may be made; means something while ``open``.
        tried: peers that have failed here, the latest last.
    """

    state: State = "closed"
    failures: int = 0
    retry_at: float = 0.0
    tried: dict[PeerId, None] = field(default_factory=dict)

    def ask(self, peer: PeerId, now: float) -> bool:
        """Say whether ``peer`` may be dialled at this address now; if that is the probe, it has begun."""
        untried = peer not in self.tried
        if self.state == "open" and (now >= self.retry_at or untried):
            self.state = advance(self.state, "probed")
            return True
        return self.state == "closed" or untried

    def answered(self) -> None:
        """Note that the address answers."""
        self.state = advance(self.state, "answered")
        self.failures = 0
        self.tried.clear()

    def abandoned(self) -> None:
        """Note that an attempt has ended before it has decided anything."""
        self.state = advance(self.state, "abandoned")

    def failed(self, peer: PeerId, now: float, chance: float) -> None:
        """Note that an attempt has failed.

        Args:
            peer: that was dialled.
            now: seconds of a monotonic clock.
            chance: random, in [0, 1): half of the pause, so that a herd of consumers does not come back as one.
        """
        self.failures += 1
        self.tried.pop(peer, None)
        self.tried[peer] = None
        if len(self.tried) > TRIED_MAX:
            del self.tried[next(iter(self.tried))]
        self.state = advance(self.state, "failed_too_often" if self.failures >= FAILURES_MAX else "failed")
        if self.state == "open":
            self.retry_at = now + pause_s(self.failures - FAILURES_MAX, BACKOFF_S, BACKOFF_S_MAX, chance)


def pause_s(attempt: int, first_s: float, longest_s: float, chance: float) -> float:
    """Return how long to wait after the failure of ``attempt`` (from 0): doubled each time, the half of it random."""
    doublings = min(max(attempt, 0), 32)
    return float(min(longest_s, first_s * 2**doublings) * (0.5 + chance / 2))
