"""What dialling has taught: which addresses do not answer, and which peers are gone."""

import math
from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct

from kvflow.cache.tickets import Member
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
from kvflow.ids import PeerId
from kvflow.observability.events import BreakerClosed, BreakerOpened
from kvflow.rendezvous.dialer import Replaced, Restarted
from kvflow.rendezvous.failures import Distrusted, NotDialled
from kvflow.worker.breaker import Breaker

BREAKERS_MAX = 1024
"""Addresses that are remembered to have failed: as many as one worker has peers."""

GONE_MAX = 4096
"""Peers that are remembered to be gone. A ticket of one that was forgotten costs an attempt, and is refused then."""

ELSEWHERE_S = 30.0
"""How long a peer counts as gone because another one answers at its address. The address may be a name, and what a name
server says is old for some seconds: one stale answer must not condemn a peer that lives."""


class _Gone(NamedTuple):
    """Why a peer is gone, and until when that holds; infinity if it is gone for ever."""

    why: str
    until: float


class DiallingRecord:
    """What one worker knows of the addresses and peers that it has dialled.

    Thread: the event loop.
    """

    def __init__(self, *, clock: Clock, draw: Callable[[], float], report: Callable[[Struct], None]) -> None:
        self._clock = clock
        self._draw = draw
        self._report = report
        self._breakers: dict[str, Breaker] = {}
        self._gone: dict[PeerId, _Gone] = {}

    def require(self, member: Member) -> None:
        """Refuse to dial where nothing can come of it; otherwise the caller must dial, and say how that ended.

        Raises:
            StaleLease: the peer is gone, and its leases with it.
            PeerUnavailable: its address does not answer; says when it is tried again.
        """
        peer, endpoint = member.peer, member.address.endpoint
        breaker, now = self._breakers.get(endpoint), self._clock()
        gone = self._gone.get(peer)
        if gone is not None:
            if now < gone.until:
                raise StaleLease(f"{peer} is gone: {gone.why}", ended_by="gone", peer=str(peer))
            del self._gone[peer]
        if breaker is not None and not breaker.ask(peer, now):
            retry_after_s = max(0.0, breaker.retry_at - now)
            when = "is being tried right now" if breaker.state == "probing" else f"is tried in {retry_after_s:.1f} s"
            raise PeerUnavailable(
                f"{endpoint} has failed {breaker.failures} times in a row, and {when}",
                peer=str(peer),
                retry_after_s=retry_after_s,
            )

    def is_gone(self, member: Member) -> bool:
        """Tell whether a peer has left, or another one answers at its address."""
        gone = self._gone.get(member.peer)
        return gone is not None and self._clock() < gone.until

    def on_answered(self, endpoint: str) -> None:
        """Note that somebody answers there, whatever is said."""
        breaker = self._breakers.pop(endpoint, None)
        if breaker is not None and breaker.state != "closed":
            breaker.answered()
            self._report(BreakerClosed(endpoint))

    def on_failed(self, member: Member, error: Exception) -> None:
        """Note how a meeting has failed: only silence and hanging up count against the address.

        What never left this process, such as our own distrust of a key, teaches nothing of the address either way.
        """
        endpoint = member.address.endpoint
        match error:
            case Restarted() | Replaced():
                self.on_elsewhere(member, error.message)
                self.on_answered(endpoint)
            case Distrusted() | NotDialled():
                self._abandon(endpoint)
            case PeerLost() | DeadlineExceeded():
                self._count(member.peer, endpoint)
            case AuthenticationFailed() | PeerRefused() | ProtocolViolation() | ReleaseMismatch() | LayoutMismatch():
                self.on_answered(endpoint)
            case KvflowError() if type(error) is not TransferFailed:
                self._abandon(endpoint)
            case _:  # the data plane cannot connect, or a defect of ours; in either case it costs what silence costs
                self._count(member.peer, endpoint)

    def on_goodbye(self, member: Member) -> None:
        """Note that a peer has left: an incarnation says goodbye once, and never comes back."""
        self._remember(member, _Gone("it said goodbye", math.inf))

    def on_elsewhere(self, member: Member, why: str) -> None:
        """Note that another peer answers at a peer's address, which holds for a while."""
        self._remember(member, _Gone(why, self._clock() + ELSEWHERE_S))

    def _remember(self, member: Member, gone: _Gone) -> None:
        before = self._gone.pop(member.peer, gone)  # the latest last, so that the oldest is forgotten first
        self._gone[member.peer] = max(before, gone, key=lambda each: each.until)
        if len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]

    def _abandon(self, endpoint: str) -> None:
        """End an attempt that has taught nothing: if it was the probe, another one may be made."""
        breaker = self._breakers.get(endpoint)
        if breaker is not None:
            breaker.abandoned()

    def _count(self, peer: PeerId, endpoint: str) -> None:
        breaker = self._breakers.pop(endpoint, None) or Breaker()
        self._breakers[endpoint] = breaker  # the latest last, so that the oldest is forgotten first
        if len(self._breakers) > BREAKERS_MAX:
            del self._breakers[next(iter(self._breakers))]
        before, now = breaker.state, self._clock()
        breaker.failed(peer, now, self._draw())
        if (before, breaker.state) == ("closed", "open"):
            self._report(BreakerOpened(endpoint, breaker.failures, breaker.retry_at - now))
