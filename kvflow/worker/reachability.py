"""Reachability: which addresses do not answer, and which peers are closed.

Each address that has failed has a circuit breaker:

===========  ===========================================================  =================================
state        meaning                                                      who may dial
===========  ===========================================================  =================================
``closed``   the address answers, or has not failed often enough          every pull
``open``     it has failed ``FAILURES_MAX`` times in a row                nobody, until ``retry_at``
``probing``  an attempt is under way that decides                         nobody else
===========  ===========================================================  =================================

A peer that was not tried at the address may always be dialed: its ticket is younger than the failures, so another
process may listen there now. Therefore a breaker never delays the first pull after a restart.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvflow.clock import Clock
from kvflow.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    KvflowError,
    LayoutMismatch,
    PeerLost,
    PeerRefused,
    PeerUnavailable,
    ProtocolViolation,
    ReleaseMismatch,
    StaleLease,
    TransferFailed,
)
from kvflow.events import BreakerClosed, BreakerOpened, Hook
from kvflow.ids import PeerId
from kvflow.leases.tickets import Member
from kvflow.reads.pulls import advance
from kvflow.rendezvous.dialer import Replaced, Restarted
from kvflow.rendezvous.failures import Distrusted, NotDialed

BREAKERS_MAX = 1024
"""Addresses that are remembered to have failed: as many as one worker has peers."""

CLOSED_MAX = 4096
"""Peers that are remembered as closed. A ticket of a forgotten one costs one attempt, which is refused."""

SUPERSEDED_S = 30.0
"""How long a peer counts as closed because another one answers at its address. The address may be a name, and a name
server may give an outdated answer for some seconds: it must not exclude a live peer for longer."""


class _Closed(NamedTuple):
    """Why a peer counts as closed, and until when (infinity: permanently)."""

    why: str
    until: float


class Reachability:
    """What one worker has learned about the addresses and peers that it dialed.

    Thread: the event loop.
    """

    def __init__(self, *, clock: Clock, draw: Callable[[], float], report: Hook) -> None:
        self._clock = clock
        self._draw = draw
        self._report = report
        self._breakers: dict[str, Breaker] = {}
        self._closed: dict[PeerId, _Closed] = {}

    def require(self, member: Member) -> None:
        """Refuse to dial a peer if dialing is useless; otherwise the caller must dial, and report the result.

        Raises:
            StaleLease: the peer is closed, so its leases have ended.
            PeerUnavailable: its address does not answer; the error says when it is tried again.
        """
        peer, endpoint = member.peer, member.address.endpoint
        breaker, now = self._breakers.get(endpoint), self._clock()
        closed = self._closed.get(peer)
        if closed is not None:
            if now < closed.until:
                raise StaleLease(f"{peer} is closed: {closed.why}", ended_by="gone", peer=str(peer))
            del self._closed[peer]
        if breaker is not None and not breaker.ask(peer, now):
            retry_after_s = max(0.0, breaker.retry_at - now)
            when = "is being tried right now" if breaker.state == "probing" else f"is tried in {retry_after_s:.1f} s"
            raise PeerUnavailable(
                f"{endpoint} has failed {breaker.failures} times in a row, and {when}",
                peer=str(peer),
                retry_after_s=retry_after_s,
            )

    def is_closed(self, member: Member) -> bool:
        """Return whether a peer has closed, or another one answers at its address."""
        closed = self._closed.get(member.peer)
        return closed is not None and self._clock() < closed.until

    def on_answered(self, endpoint: str) -> None:
        """Record that a process answers at an address, with any answer."""
        breaker = self._breakers.pop(endpoint, None)
        if breaker is not None and breaker.state != "closed":
            breaker.answered()
            self._report(BreakerClosed(endpoint))

    def on_failed(self, member: Member, error: Exception) -> None:
        """Record why a peer could not be connected. Only silence and a lost connection count against its address.

        An attempt that never left this process, for example because the key is not allowed, does not count at all.
        """
        endpoint = member.address.endpoint
        match error:
            case Restarted() | Replaced():
                self.on_superseded(member, error.message)
                self.on_answered(endpoint)
            case Distrusted() | NotDialed():
                self._abandon(endpoint)
            case PeerLost() | DeadlineExceeded():
                self._count(member.peer, endpoint)
            case AuthenticationFailed() | PeerRefused() | ProtocolViolation() | ReleaseMismatch() | LayoutMismatch():
                self.on_answered(endpoint)
            case KvflowError() if type(error) is not TransferFailed:
                self._abandon(endpoint)
            case _:  # the data plane cannot connect, or kvflow has a defect: both count like silence
                self._count(member.peer, endpoint)

    def on_goodbye(self, member: Member) -> None:
        """Record that a peer has closed. An incarnation closes once and does not come back."""
        self._remember(member, _Closed("it said goodbye", math.inf))

    def on_superseded(self, member: Member, why: str) -> None:
        """Record that another peer answers at a peer's address; forget it after ``SUPERSEDED_S``."""
        self._remember(member, _Closed(why, self._clock() + SUPERSEDED_S))

    def _remember(self, member: Member, closed: _Closed) -> None:
        before = self._closed.pop(member.peer, closed)  # the latest last: the oldest is forgotten first
        self._closed[member.peer] = max(before, closed, key=lambda each: each.until)
        if len(self._closed) > CLOSED_MAX:
            del self._closed[next(iter(self._closed))]

    def _abandon(self, endpoint: str) -> None:
        """End an attempt without a result. If it was the probe, another one may be made."""
        breaker = self._breakers.get(endpoint)
        if breaker is not None:
            breaker.abandoned()

    def _count(self, peer: PeerId, endpoint: str) -> None:
        breaker = self._breakers.pop(endpoint, None) or Breaker()
        self._breakers[endpoint] = breaker  # the latest last: the oldest is forgotten first
        if len(self._breakers) > BREAKERS_MAX:
            del self._breakers[next(iter(self._breakers))]
        before, now = breaker.state, self._clock()
        breaker.failed(peer, now, self._draw())
        if (before, breaker.state) == ("closed", "open"):
            self._report(BreakerOpened(endpoint, breaker.failures, breaker.retry_at - now))


FAILURES_MAX = 3
"""Attempts in a row that must fail: one may be a short outage, two a slow restart."""

BACKOFF_S = 0.5
BACKOFF_S_MAX = 15.0
"""Pause before the next attempt, doubled with each that fails: a restart takes seconds, loading a model a minute."""

TRIED_MAX = 16
"""Peers that are remembered to have failed at one address."""

State = Literal["closed", "open", "probing"]
Event = Literal["answered", "failed", "failed_too_often", "probed", "abandoned"]

TRANSITIONS: dict[tuple[State, Event], State] = {
    ("closed", "answered"): "closed",
    ("closed", "failed"): "closed",
    ("closed", "failed_too_often"): "open",
    ("closed", "abandoned"): "closed",
    ("open", "probed"): "probing",
    # An attempt that began before the others failed may end now.
    ("open", "answered"): "closed",
    ("open", "failed"): "open",
    ("open", "failed_too_often"): "open",
    ("open", "abandoned"): "open",
    ("probing", "answered"): "closed",
    ("probing", "failed"): "open",
    ("probing", "failed_too_often"): "open",
    # Nothing was dialed, so nothing was decided: the next caller is the probe, once ``retry_at`` has passed.
    ("probing", "abandoned"): "open",
}


@dataclass(slots=True)
class Breaker:
    """The circuit breaker of one address. Time and randomness are arguments.

    Attributes:
        state: see the table of this module.
        failures: number of attempts that failed in a row.
        retry_at: when the next attempt may be made, while the breaker is ``open``.
        tried: peers that failed at this address, the latest last.
    """

    state: State = "closed"
    failures: int = 0
    retry_at: float = 0.0
    tried: dict[PeerId, None] = field(default_factory=dict)

    def ask(self, peer: PeerId, now: float) -> bool:
        """Return whether ``peer`` may be dialed at this address now. If it may probe, the probe begins."""
        untried = peer not in self.tried
        if self.state == "open" and (now >= self.retry_at or untried):
            self._advance("probed")
            return True
        return self.state == "closed" or untried

    def _advance(self, event: Event) -> None:
        self.state = advance(TRANSITIONS, self.state, event, "a breaker")

    def answered(self) -> None:
        """Note that the address answers."""
        self._advance("answered")
        self.failures = 0
        self.tried.clear()

    def abandoned(self) -> None:
        """Note that an attempt ended without a result."""
        self._advance("abandoned")

    def failed(self, peer: PeerId, now: float, chance: float) -> None:
        """Note that an attempt has failed.

        Args:
            peer: the peer that was dialed.
            now: seconds of a monotonic clock.
            chance: a random number in [0, 1), which decides half of the pause, so that many consumers do not return
                together.
        """
        self.failures += 1
        self.tried.pop(peer, None)
        self.tried[peer] = None
        if len(self.tried) > TRIED_MAX:
            del self.tried[next(iter(self.tried))]
        self._advance("failed_too_often" if self.failures >= FAILURES_MAX else "failed")
        if self.state == "open":
            self.retry_at = now + pause_s(self.failures - FAILURES_MAX, BACKOFF_S, BACKOFF_S_MAX, chance)


def pause_s(attempt: int, first_s: float, longest_s: float, chance: float) -> float:
    """Return the seconds to wait after the failure of ``attempt`` (from 0): doubled each time, half of it random."""
    doublings = min(max(attempt, 0), 32)
    return float(min(longest_s, first_s * 2**doublings) * (0.5 + chance / 2))
