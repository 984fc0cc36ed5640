"""What is known about producers and their addresses: connections, failures, and the choice of data planes.

A connection has one of these states:

==============  ====================================================================  ==============================
state           meaning                                                               what it has
==============  ====================================================================  ==============================
``dialing``     the control connection is being made                                  nothing
``linked``      its leases can be released; our transport is connected to read it     ``link``
``attached``    our transport is connected                                            ``link``, ``carrier``
``connected``   the peer can be read from                                             ``link``, ``carrier``, ``peer``
``unreadable``  the peer cannot be read from, but its leases can be released          ``link``, ``error``
``dropped``     it must end; the same peer may be connected again afterwards          ``drop``, and what it had
``closed``      it has ended                                                          ``peer`` or ``error``
==============  ====================================================================  ==============================

An address that has failed ``FAILURES_MAX`` times in a row is left alone until ``retry_at``; then one attempt, the
probe, decides. A peer that was not tried at the address may always be dialed: its ticket is younger than the failures,
so another process may listen there now. Therefore failures never delay the first pull after a restart.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeVar

from msgspec import Struct

from handshake.rates import pause_s
from kvflow import events
from kvflow.addresses import host_and_port
from kvflow.config import is_loopback
from kvflow.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    FailureCode,
    KvflowError,
    LayoutMismatch,
    PeerLost,
    PeerRefused,
    PeerUnavailable,
    ProtocolViolation,
    ReleaseMismatch,
    StaleLease,
    TransferCancelled,
    TransferFailed,
)
from kvflow.events import BreakerClosed, BreakerOpened, Hook
from kvflow.ids import Clock, Newest, PeerId, advance
from kvflow.leases.tickets import Member
from kvflow.reads.contract import REQUIRED, Carrier, PeerAddress, Published
from kvflow.rendezvous.dialer import Link, Restarted
from kvflow.rendezvous.endpoint import Advertisement, Distrusted, Network, NotDialed, Replaced
from kvflow.validation import Name, Number
from kvflow.worker.prepared import Source

T = TypeVar("T")

SAME_PLANE = "Set transport to 'auto', or to the same data plane, on both sides."
NO_PLANE = (
    "Correct what the message names, or set transport to 'auto' on both sides to read over TCP. Two containers of one "
    "host need one PID namespace (docs/howto/deploy.md), and UCX_TLS must not leave out cma."
)
ENCRYPT = "Set tcp_encryption to 'tls' on both sides, and transport to 'auto' or 'tcp'."
SAME_ENCRYPTION = "Set tcp_encryption to the same value on all workers of a cluster."


class PeerState(Struct, frozen=True, kw_only=True):
    """One worker that another one is connected with.

    Attributes:
        name: ``engine/rank/incarnation``.
        state: of a producer ``dialing``, ``linked``, ``attached``, ``connected``, ``unreadable`` or ``dropped``; of a
            reader ``connected``.
        software: release that it runs, as it says; empty if it is not known.
        transport: what carries the bytes of a producer; empty for a reader, and before it is known.
        rtt_s: seconds of the last round trip of a reader's control channel; None if it is not known.
    """

    name: Name
    state: Name
    software: Name = ""
    transport: Name = ""
    rtt_s: Number | None = None


ConnectionState = Literal["dialing", "linked", "attached", "connected", "unreadable", "dropped", "closed"]
ConnectionEvent = Literal["linked", "attached", "connected", "unreadable", "dropped", "closed"]

TRANSITIONS: dict[tuple[ConnectionState, ConnectionEvent], ConnectionState] = {
    ("dialing", "linked"): "linked",
    ("dialing", "dropped"): "dropped",
    ("dialing", "closed"): "closed",
    ("linked", "attached"): "attached",
    ("linked", "unreadable"): "unreadable",
    ("linked", "dropped"): "dropped",
    ("linked", "closed"): "closed",
    ("attached", "connected"): "connected",
    ("attached", "dropped"): "dropped",
    ("attached", "closed"): "closed",
    ("connected", "dropped"): "dropped",
    ("connected", "closed"): "closed",
    ("unreadable", "dropped"): "dropped",
    ("unreadable", "closed"): "closed",
    # The task of a dropped connection ends its current step first: what waits for that step gets its result.
    ("dropped", "linked"): "dropped",
    ("dropped", "connected"): "dropped",
    ("dropped", "unreadable"): "dropped",
    ("dropped", "closed"): "closed",
}


@dataclass(slots=True, eq=False)
class Connection:
    """The connection to one peer."""

    member: Member
    begun_at: float  # when dialing began
    state: ConnectionState = "dialing"
    link: Link | None = None
    linked_at: float | None = None  # when the control connection was ready
    carrier: Carrier | None = None
    data_endpoint: str = ""  # of the peer's TCP plane, with the address that our transport dials
    readable: bool = False  # whether its cache can fill ours
    wanted: bool = False  # whether it is to be read, so that our transport must be connected
    peer: Source | None = None
    error: KvflowError | None = None  # why the peer cannot be read from
    unusable: str = ""  # why our transport cannot read from it over any data plane of both sides; empty if it can
    drop: tuple[str, str] | None = None  # code and detail of why it must end
    task: asyncio.Task[None] | None = None
    num_asking: int = 0  # questions about early leases that are open
    _changed: asyncio.Future[None] | None = None

    def advance(self, event: ConnectionEvent) -> None:
        """Enter the next state, and wake every task that waits for a change."""
        self.state = advance(TRANSITIONS, self.state, event, "a connection")
        self.wake()

    def wake(self) -> None:
        """Wake every task that waits for a change."""
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None

    def located(self, code: str, detail: str) -> str:
        """Return why the transport lost the peer, with the address of the data plane if that is TCP."""
        over_tcp = self.carrier is None or self.carrier.plane == "tcp"
        if code != PeerLost.code or not (self.data_endpoint and over_tcp) or self.data_endpoint in detail:
            return detail
        return f"{detail} (its data port is {self.data_endpoint}, by tcp_advertise)"

    async def change(self) -> None:
        """Wait for the next change. Cancellation: safe."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def fail(self, error: KvflowError) -> None:
        """Fail the tasks that wait for the peer, unless it is connected or has failed already."""
        if self.peer is None and self.error is None:
            self.error = error
            self.wake()

    @property
    def is_connecting(self) -> bool:
        """Whether something is under way whose failure the peer's callers get: not while it is linked and unread."""
        return self.peer is None and self.error is None and (self.wanted or not self.readable)

    async def require_link(self) -> Link:
        """Wait for the control connection, and return it; raise what has ended the connection before."""
        return await self._found(lambda: self.link)

    async def require_readable(self) -> Link:
        """Wait until the peer's cache is known to fill ours, and return the control connection; raise why not."""
        return await self._found(lambda: self.link if self.readable else None)

    async def require_peer(self) -> Source:
        """Have our transport connected, wait until the peer can be read from, and return it; raise why it cannot."""
        self.wanted = True
        self.wake()
        return await self._found(lambda: self.peer)

    async def _found(self, look: Callable[[], T | None]) -> T:
        """Wait until there is what ``look`` returns, and return it; raise what has ended the connection before."""
        while (found := look()) is None:
            if self.error is not None:
                raise self.error
            await self.change()
        return found

    async def require_carrier(self) -> Carrier:
        """Wait until our transport is connected, and return what carries the bytes; raise why it cannot be."""
        while self.carrier is None:
            if self.unusable:
                raise PlaneUnusable(self.unusable)
            if self.drop is not None:
                raise connection_error(str(self.member.peer), *self.drop)
            await self.change()
        return self.carrier

    async def settle(self) -> bool:
        """Wait until the peer is to be read, or the connection must end; return whether it is to be read."""
        while not self.wanted and self.drop is None:
            await self.change()
        return self.wanted

    async def dropped(self) -> tuple[str, str]:
        """Wait until the connection must end; return code and detail."""
        while self.drop is None:
            await self.change()
        return self.drop


DATA_ADDRESSES_MAX = 16  # of a name that are tried for a TCP plane


class PlaneUnusable(Exception):
    """Our transport cannot read from a peer over any data plane that both sides have."""


class PlaneNegotiation(Struct, frozen=True):
    """Our side of the choice of data planes over which a peer is read: those that both sides have, and settings allow.

    ``within_s`` bounds the resolution of a name.
    """

    published: Published
    tcp_encryption: str
    require_encryption: bool
    network: Network
    within_s: float
    weights: Mapping[str, int]

    async def address(self, link: Link) -> PeerAddress:
        """Return what our transport needs to read from a peer: the data planes of both sides, and their addresses.

        Raises:
            LayoutMismatch: both sides have no data plane in common, or the settings of the only one differ.
            PeerLost: the only common data plane has a name that cannot be resolved.
        """
        theirs = link.advertisement
        planes = {name: theirs.planes[name] for name in self.published.planes if name in theirs.planes}
        if not planes:
            raise LayoutMismatch("transport", _names(theirs), self.published.names, remedy=SAME_PLANE)
        endpoint = ""
        if "tcp" in planes:
            endpoint = await self._tcp_endpoint(link, theirs, required=len(planes) == 1)
        if not endpoint:
            planes.pop("tcp", None)
        return PeerAddress(
            link.peer,
            planes,
            theirs.epochs,
            agent=link.agent,
            data_endpoint=endpoint,
            credentials=link.credentials,
            weight=self.weights.get(link.peer.engine_id, 1),
            encrypted=self._requires(theirs),
        )

    def _requires(self, theirs: Advertisement) -> bool:
        return self.require_encryption or theirs.require_encryption

    async def _tcp_endpoint(self, link: Link, theirs: Advertisement, *, required: bool) -> str:
        """Return the numeric endpoint of a peer's TCP plane; empty if it cannot be used but another plane may.

        A name may lead to several workers. The peer is where its control connection has met it.
        """
        if theirs.tcp_encryption != self.tcp_encryption:
            if required:
                self._refuse_encryption(theirs)
            return ""
        try:
            async with asyncio.timeout(self.within_s):
                found = await self.network.resolve(theirs.data_endpoint)
                host, port = host_and_port(theirs.data_endpoint)
                beside = f"tcp://{host_and_port(link.address)[0]}:{port}"
                if host == host_and_port(link.peer.endpoint)[0]:  # the name may have lost this address meanwhile
                    found = tuple(dict.fromkeys((beside, *found)))
                # A wildcard listens at IPv4 addresses, and a name may have addresses of both kinds.
                ordered = sorted(found, key=lambda each: (each != beside, "[" in each))[:DATA_ADDRESSES_MAX]
                several = len(ordered) > 1
                endpoint = await self.network.first_open(ordered, self.within_s / 2) if several else ordered[0]
        except (TimeoutError, OSError, ValueError) as error:  # a name that cannot be written is a ValueError
            if required:
                reason = f"its TCP plane is at {theirs.data_endpoint}, which cannot be resolved: {error!r}"
                raise PeerLost(f"{link.peer} cannot be read from: {reason}", peer=str(link.peer)) from error
            return ""
        if self._requires(theirs) and self.tcp_encryption == "off" and not is_loopback(host_and_port(endpoint)[0]):
            if required:
                self._refuse_plain(f"{REQUIRED}, and tcp_encryption is 'off'")
            return ""
        return endpoint

    def refuse(self, theirs: Advertisement, detail: str) -> NoReturn:
        """Refuse a peer that our transport cannot read from: raise ``LayoutMismatch``."""
        both_tcp = "tcp" in theirs.planes and "tcp" in self.published.planes
        if both_tcp and theirs.tcp_encryption != self.tcp_encryption:
            self._refuse_encryption(theirs)
        if REQUIRED in detail:
            self._refuse_plain(detail)
        ours = f"{self.published.names} ({detail.removeprefix(f'{self.published.names}: ')})"
        raise LayoutMismatch("transport", _names(theirs), ours, remedy=NO_PLANE)

    def _refuse_plain(self, detail: str) -> NoReturn:
        raise LayoutMismatch("require_encryption", detail, "only what encrypts between hosts", remedy=ENCRYPT) from None

    def _refuse_encryption(self, theirs: Advertisement) -> NoReturn:
        raise LayoutMismatch(
            "tcp_encryption", theirs.tcp_encryption, self.tcp_encryption, remedy=SAME_ENCRYPTION
        ) from None


def _names(theirs: Advertisement) -> str:
    return "+".join(sorted(theirs.planes))


# --- which addresses do not answer, and which peers are closed ---

ADDRESSES_MAX = 1024  # addresses that are remembered to have failed: as many as one worker has peers

CLOSED_MAX = 4096  # peers that are remembered as closed, and of which it is known where they answered last

SUPERSEDED_S = 30.0
"""How long a peer counts as closed because another incarnation answers at its only address. A name server may give an
outdated answer for some seconds, which must not exclude a live peer for longer. A ticket that the peer has signed
meanwhile ends this at once."""

FAILURES_MAX = 3  # attempts in a row that must fail: one may be a short outage, two a slow restart

BACKOFF_S = 0.5
BACKOFF_S_MAX = 15.0
"""Pause before the next attempt, doubled with each that fails: a restart takes seconds, loading a model a minute."""

SPREAD_S = 0.05
"""Peers that lose one server dial it again at random moments within so long. It is short, because a firewall that cuts
one connection must not cost a pull more. Those that a restarted server has no place for draw longer pauses."""

TRIED_MAX = 16  # peers that are remembered to have failed at one address


@dataclass(slots=True)
class AddressRecord:
    """The failures of one address, and the loss of a peer there."""

    failures: int = 0  # number of attempts that failed in a row
    retry_at: float = 0.0  # when the next attempt may be made, once there are ``FAILURES_MAX``
    redial_at: float = 0.0  # when it may be dialed after a peer there was lost
    probing: bool = False  # whether an attempt is under way that decides
    tried: dict[PeerId, None] = field(default_factory=lambda: Newest(TRIED_MAX))  # peers that failed at this address

    @property
    def broken(self) -> bool:
        """Whether the address is left alone."""
        return self.failures >= FAILURES_MAX

    def ask(self, peer: PeerId, now: float) -> bool:
        """Return whether ``peer`` may be dialed at this address now. If it may probe, the probe begins."""
        untried = peer not in self.tried
        if self.broken and not self.probing and (now >= self.retry_at or untried):
            self.probing = True
            return True
        return not self.broken or untried

    def failed(self, peer: PeerId, now: float, chance: float) -> None:
        """Note that an attempt to dial ``peer`` has failed; ``chance``, in [0, 1), decides half of the pause."""
        self.failures += 1
        self.probing = False
        self.tried[peer] = None
        if self.broken:
            self.retry_at = now + pause_s(self.failures - FAILURES_MAX, BACKOFF_S, BACKOFF_S_MAX, chance)


class Reachability:
    """What one worker has learned about the addresses and peers that it dialed. Thread: the event loop."""

    def __init__(self, *, clock: Clock, draw: Callable[[], float], report: Hook) -> None:
        self._clock = clock
        self._draw = draw
        self._report = report
        self._failed = Newest[str, AddressRecord](ADDRESSES_MAX)  # an address that answers loses its record
        self._closed = Newest[PeerId, tuple[str, float]](CLOSED_MAX)  # why, and until when
        # When the newest ticket of a peer was signed that was seen, and the last address where it answered.
        self._known = Newest[PeerId, tuple[int, str]](CLOSED_MAX)

    def require(self, member: Member) -> None:
        """Refuse to dial a peer if dialing is useless; otherwise the caller must dial, and report the result.

        Raises:
            StaleLease: the peer is closed, so its leases have ended.
            PeerUnavailable: its address does not answer; the error says when it is tried again.
        """
        peer, endpoint = member.peer, member.address.endpoint
        record, now = self._failed.get(endpoint), self._clock()
        is_alive = self.saw(peer, member.grant.issued_ms)
        if peer in self._closed:
            why, until = self._closed[peer]
            if now < until and (until == math.inf or not is_alive):
                raise StaleLease(f"{peer} is closed: {why}", ended_by="gone", peer=str(peer))
            del self._closed[peer]
        if record is not None and not record.ask(peer, now):
            retry_after_s = max(0.0, record.retry_at - now)
            when = "is being tried right now" if record.probing else f"is tried in {retry_after_s:.1f} s"
            raise PeerUnavailable(
                f"{endpoint} has failed {record.failures} times in a row, and {when}",
                peer=str(peer),
                retry_after_s=retry_after_s,
            )

    def saw(self, peer: PeerId, issued_ms: int | None, address: str = "") -> bool:
        """Note a ticket of a peer, and where it answers; return whether the ticket is newer than all before."""
        newest, before = self._known.get(peer, (0, ""))
        self._known[peer] = max(newest, issued_ms or 0), address or before
        return (issued_ms or 0) > newest

    def last_address(self, peer: PeerId) -> str:
        """Return the address at which a peer has answered last; empty if it is not known."""
        return self._known.get(peer, (0, ""))[1]

    def is_closed(self, member: Member) -> bool:
        """Return whether a peer has closed, or another incarnation answers at its only address."""
        return member.peer in self._closed and self._clock() < self._closed[member.peer][1]

    def on_lost(self, endpoint: str) -> None:
        """Record that a peer at an address was lost, and draw when the address may be dialed again."""
        self._record(endpoint).redial_at = self._clock() + self._draw() * SPREAD_S

    def redial_in_s(self, endpoint: str) -> float:
        """Return the seconds until an address may be dialed."""
        record = self._failed.get(endpoint)
        return 0.0 if record is None else max(0.0, record.redial_at - self._clock())

    def on_answered(self, endpoint: str) -> None:
        """Record that a process answers at an address, with any answer."""
        record = self._failed.pop(endpoint, None)
        if record is not None and record.broken:
            self._report(BreakerClosed(endpoint))

    def on_failed(self, member: Member, error: Exception) -> None:
        """Record why a peer could not be connected. Only silence and a lost connection count against its address."""
        endpoint = member.address.endpoint
        match error:
            case Restarted():
                self.on_superseded(member, error.message)
                self.on_answered(endpoint)
            case Distrusted() | NotDialed():
                self.abandon(endpoint)
            case Replaced() | AuthenticationFailed() | PeerRefused() | ProtocolViolation():
                self.on_answered(endpoint)
            case ReleaseMismatch() | LayoutMismatch():
                self.on_answered(endpoint)
            case PeerLost() | DeadlineExceeded():
                self._count(member.peer, endpoint)
            case KvflowError() if type(error) is not TransferFailed:
                self.abandon(endpoint)
            case _:  # the data plane cannot connect, or kvflow has a defect: both count like silence
                self._count(member.peer, endpoint)

    def on_goodbye(self, member: Member) -> None:
        """Record that a peer has closed. An incarnation closes once and does not come back."""
        self._close(member.peer, "it said goodbye", math.inf)

    def on_superseded(self, member: Member, why: str) -> None:
        """Record that another incarnation answers at a peer's only address; forget it after ``SUPERSEDED_S``."""
        self._close(member.peer, why, self._clock() + SUPERSEDED_S)

    def _close(self, peer: PeerId, why: str, until: float) -> None:
        before = self._closed.get(peer, (why, until))
        self._closed[peer] = before if before[1] >= until else (why, until)

    def abandon(self, endpoint: str) -> None:
        """End an attempt without a result, or before it is known. If it was the probe, another one may be made."""
        if endpoint in self._failed:
            self._failed[endpoint].probing = False

    def _count(self, peer: PeerId, endpoint: str) -> None:
        record, now = self._record(endpoint), self._clock()
        record.failed(peer, now, self._draw())
        if record.failures == FAILURES_MAX:
            self._report(BreakerOpened(endpoint, record.failures, record.retry_at - now))

    def _record(self, endpoint: str) -> AddressRecord:
        record = self._failed[endpoint] = self._failed.get(endpoint) or AddressRecord()
        return record


# --- which error a caller gets ---

ERRORS: dict[str, type[TransferFailed]] = {
    StaleLease.code: StaleLease,
    PeerLost.code: PeerLost,
    FailureCode.PEER_CLOSED: PeerLost,
    TransferCancelled.code: TransferCancelled,
    FailureCode.CANCELLED: TransferCancelled,
    FailureCode.CLOSING: TransferCancelled,
    FailureCode.KEY_REMOVED: PeerLost,
    ProtocolViolation.code: ProtocolViolation,
    FailureCode.METADATA_INVALID: ProtocolViolation,
    # Our own descriptors are checked when they are bound, so it is the peer's memory that is not there.
    FailureCode.BOUNDS: ProtocolViolation,
}
"""Code of the scheduler or the transport -> error. Any other code is a plain ``TransferFailed``."""

CANCELLED = "the caller cancelled the pull"


def transfer_error(event: events.PullFailed) -> TransferFailed:
    """Return the error that this event stands for."""
    about = {"request_id": event.request_id, "peer": event.peer, "quarantined": event.quarantined}
    return _error(event.code, f"request {event.request_id!r}: {event.detail}", event.phase, **about)


def connection_error(peer: str, code: str, detail: str) -> TransferFailed:
    """Return the error of a caller whose peer was dropped before it could be read from.

    It may have been dropped for a read through the connection before this one.
    """
    return _error(code, f"{peer} cannot be read from: {detail}", "handshake", peer=peer)


def _error(code: str, message: str, phase: str, **about: Any) -> TransferFailed:
    if code == DeadlineExceeded.code:
        return DeadlineExceeded(message, phase=phase, **about)
    return ERRORS.get(code, TransferFailed)(message, **about)


def as_ours(error: BaseException, request_id: str) -> KvflowError:
    """Return the exception that ended a pull as an error of kvflow."""
    if isinstance(error, KvflowError):
        return error
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return TransferCancelled(CANCELLED, request_id=request_id)
    failed = TransferFailed(f"the pull ended with {type(error).__name__}: {error}", request_id=request_id)
    failed.__cause__ = error  # as ``raise ... from`` does it
    return failed
