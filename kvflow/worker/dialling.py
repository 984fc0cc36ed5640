"""What dialling has taught: which addresses do not answer, and which peers are gone for ever."""

from collections.abc import Callable

from msgspec import Struct

from kvflow.cache.tickets import Member
from kvflow.clock import Clock
from kvflow.errors import DeadlineExceeded, KvflowError, PeerLost, PeerUnavailable, StaleLease, TransferFailed
from kvflow.ids import PeerId
from kvflow.observability.events import BreakerClosed, BreakerOpened
from kvflow.rendezvous.dialer import Replaced, Restarted
from kvflow.worker.breaker import Breaker

BREAKERS_MAX = 1024
"""Addresses that are remembered to have failed: as many as one worker has peers."""

GONE_MAX = 4096
"""Peers that are remembered to be gone. A ticket of one that was forgotten costs an attempt, and is refused then."""


class DiallingRecord:
    """What one worker knows of the addresses and peers that it has dialled.

    Thread: the event loop.
    """

    def __init__(self, *, clock: Clock, draw: Callable[[], float], report: Callable[[Struct], None]) -> None:
        self._clock = clock
        self._draw = draw
        self._report = report
        self._breakers: dict[str, Breaker] = {}
        self._gone: dict[tuple[PeerId, str], str] = {}

    def require(self, member: Member) -> None:
        """Refuse to dial where nothing can come of it; otherwise the caller must dial, and say how that ended.

        Raises:
            StaleLease: the peer is gone for ever, and its leases with it.
            PeerUnavailable: its address does not answer; says when it is tried again.
        """
        peer, endpoint = member.peer, member.address.endpoint
        why = self._gone.get((peer, endpoint))
        if why is not None:
            raise StaleLease(f"{peer} is gone for ever: {why}", peer=peer)
        breaker, now = self._breakers.get(endpoint), self._clock()
        if breaker is not None and not breaker.ask(peer, now):
            retry_after_s = max(0.0, breaker.retry_at - now)
            when = "is being tried right now" if breaker.state == "probing" else f"is tried in {retry_after_s:.1f} s"
            raise PeerUnavailable(
                f"{endpoint} has failed {breaker.failures} times in a row, and {when}",
                peer=peer,
                retry_after_s=retry_after_s,
            )

    def on_answered(self, endpoint: str) -> None:
        """Note that somebody answers there, whatever is said."""
        breaker = self._breakers.pop(endpoint, None)
        if breaker is not None and breaker.state != "closed":
            breaker.answered()
            self._report(BreakerClosed(endpoint))

    def on_failed(self, member: Member, error: Exception) -> None:
        """Note how a meeting has failed: only silence and hanging up count against the address."""
        endpoint = member.address.endpoint
        match error:
            case Restarted() | Replaced():
                self.on_gone(member, error.message)
                self.on_answered(endpoint)
            case PeerLost() | DeadlineExceeded():
                self._count(member.peer, endpoint)
            case KvflowError() if type(error) is not TransferFailed:
                self.on_answered(endpoint)
            case _:  # the data plane cannot connect, or a defect of ours; in either case it costs what silence costs
                self._count(member.peer, endpoint)

    def on_gone(self, member: Member, why: str) -> None:
        """Note that a peer is gone from its address for ever: an incarnation never comes back."""
        self._gone[member.peer, member.address.endpoint] = why
        if len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]

    def _count(self, peer: PeerId, endpoint: str) -> None:
        breaker = self._breakers.pop(endpoint, None) or Breaker()
        self._breakers[endpoint] = breaker  # the latest last, so that the oldest is forgotten first
        if len(self._breakers) > BREAKERS_MAX:
            del self._breakers[next(iter(self._breakers))]
        before, now = breaker.state, self._clock()
        breaker.failed(peer, now, self._draw())
        if (before, breaker.state) == ("closed", "open"):
            self._report(BreakerOpened(endpoint, breaker.failures, breaker.retry_at - now))
