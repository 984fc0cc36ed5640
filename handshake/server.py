"""The listening end: any number of peers on one ROUTER socket.

Nothing that a peer sends ends the listener. A peer that breaks the protocol is refused once and forgotten. What it
sends afterwards is dropped, until it is too much and the connection is cut.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import NewType

from msgspec import Struct

from handshake.connection import Conversation, Giving, check_introduction
from handshake.driver import Driver
from handshake.errors import CloseCode, Closed
from handshake.limits import DEFAULT_LIMITS, Limits
from handshake.messages import (
    PASS_BYTES_MAX,
    REPORT_BYTES_MAX,
    Answer,
    ConnectionFailed,
    HandshakeEvent,
    Identity,
    PeerReady,
    Publication,
    Released,
    Renewed,
)
from handshake.rates import Allowance, ClockOffset
from handshake.security import ClusterSecurity, PublicKey, check_bind
from handshake.sockets import ZEROMQ, ListeningChannel, Network, running
from handshake.states import Progress, Role

logger = logging.getLogger("handshake")

PeerKey = NewType("PeerKey", str)
"""Names one connection: a peer that connects again gets another key."""

Objection = tuple[str, str, str]
"""Code, reason and remedy of a refusal."""

_REMOVED = CloseCode.KEY_REMOVED, "this key is no longer allowed", "Ask the server's operator to allow this key."
_DIAL_AGAIN = "Dial again in a moment."

WAITING_MAX = 1024
"""Newcomers that wait for a place; they hold 4 MiB at most."""
HELLO_BYTES_MAX = 4 << 10
"""Of a first message that may wait for a place: more than the largest Hello, which may grow."""
WAITING_SHARE = 0.5
"""Share of ``Limits.handshake_s`` that a newcomer waits for a place: it must hear why before its own deadline."""

MakePass = Callable[[PublicKey, Identity], bytes]
"""Makes the pass of a client, at most 64 bytes, from the key that it has proved to hold and from who it says it is."""

MakeReport = Callable[[], bytes]
"""Makes what the program above reports about itself, at most 64 KiB."""

OnPeerEvent = Callable[[PeerKey, HandshakeEvent], None]


class Peer(Struct, frozen=True, kw_only=True):
    """One peer that is ready.

    Attributes:
        version: of the wire protocol.
        rtt_s: seconds of the last measured round trip.
        clock_offset: how far its wall clock is ahead of ours; None if it is unknown.
        public_key: the one that it has proved to hold; empty without encryption.
    """

    key: PeerKey
    identity: Identity
    version: int
    rtt_s: float | None
    clock_offset: ClockOffset | None
    public_key: PublicKey


class _Waiting(Struct, frozen=True):
    """A newcomer without a place, and the timer that ends its wait."""

    routing_id: bytes
    frames: list[bytes]
    timer: asyncio.TimerHandle


class HandshakeServer:
    """The peers of one listener. Made by ``open_server``. Thread: the event loop."""

    def __init__(
        self,
        channel: ListeningChannel,
        identity: Identity,
        publication: Publication,
        on_event: OnPeerEvent,
        limits: Limits,
        *,
        security: ClusterSecurity | None = None,
        network: Network = ZEROMQ,
        make_pass: MakePass | None = None,
        make_report: MakeReport | None = None,
    ) -> None:
        self._channel = channel
        self._security = security
        self._network = network
        self._identity = identity
        self._publication = publication
        self._on_event = on_event
        self._make_pass = make_pass
        self._make_report = make_report
        self._limits = limits
        self._drivers: dict[PeerKey, Driver] = {}
        self._ready: dict[PeerKey, PeerReady] = {}
        self._public_keys: dict[PeerKey, PublicKey] = {}
        # Of every allowed key that ever connected: a peer that connects again has no fresh limit.
        self._allowances: dict[PublicKey, Allowance] = {}
        self._failures: Counter[str] = Counter()
        # Connections that were dismissed and may still send, until they are cut. The oldest is forgotten first: if it
        # still sends, it is refused again.
        self._dismissed: dict[PeerKey, None] = {}
        # In the order in which they came; there are none while a place is free.
        self._waiting: dict[PeerKey, _Waiting] = {}
        self._leaving = False
        self._emptied = asyncio.Event()

    @property
    def endpoint(self) -> str:
        """The address we listen at, with its real port."""
        return self._channel.endpoint

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The peers that are ready now, in the order in which they became so."""
        return tuple(
            Peer(
                key=key,
                identity=ready.identity,
                version=ready.version,
                rtt_s=self._drivers[key].connection.rtt_s,
                clock_offset=self._drivers[key].connection.clock_offset,
                public_key=self._public_keys[key],
            )
            for key, ready in self._ready.items()
        )

    def public_key(self, key: PeerKey) -> PublicKey:
        """Return the key that a connected peer has proved to hold; empty without encryption."""
        return self._public_keys[key]

    @property
    def failures(self) -> dict[str, int]:
        """How many connections have failed since the start, by code, including those never let in."""
        return {**self._failures, **self._channel.strangers}

    def send(self, peer_key: PeerKey, message: Released | Renewed | Answer) -> None:
        """Answer a peer; what it ``Asked``, now or later. Never waits, and never calls ``on_event`` before it returns.

        Raises:
            Closed: the connection has ended, and every question with it.
            LocalProtocolError: the peer is not ready, a field is out of its bounds, or the question is not open.
        """
        driver = self._drivers.get(peer_key)
        if driver is None:
            raise Closed(f"there is no connection {peer_key}")
        driver.send(message)

    def disconnect(self, peer_key: PeerKey, code: str, reason: str, remedy: str = "") -> None:
        """Refuse a peer in any state. Does nothing if its connection has ended.

        ``on_event`` receives it later, as ``ConnectionFailed`` with this code.

        Raises:
            LocalProtocolError: ``code`` is not lower-case letters, digits and underscores, at most 64 characters.
        """
        driver = self._drivers.get(peer_key)
        if driver is not None:
            driver.refuse(code, reason, remedy)
        elif peer_key in self._waiting:
            self._end_wait(peer_key, (code, reason, remedy))

    def recheck_keys(self) -> None:
        """Refuse every peer whose key is no longer allowed, after the list of allowed keys was replaced."""
        self._allowances = {key: each for key, each in self._allowances.items() if self._trusts(key)}
        for key, public_key in tuple(self._public_keys.items()):
            if not self._trusts(public_key):
                self.disconnect(key, *_REMOVED)

    def receive(self, frames: list[bytes], public_key: PublicKey = "") -> bool:
        """Process one message; its first frame names the connection. Return False for a peer that was dismissed."""
        routing_id, *body = frames
        key = PeerKey(routing_id.hex())
        driver = self._drivers.get(key)
        if driver is not None:
            driver.receive(body)
        elif key in self._dismissed:
            return False
        elif key in self._waiting:  # before an answer, an honest client sends only that it leaves
            self._end_wait(key, self._crowded)
        else:
            self._meet(key, routing_id, public_key, body)
        return True

    async def leave(self) -> None:
        """Say goodbye to every peer; wait ``Limits.closing_s`` at most. Cancellation: safe; the peers are dropped."""
        self._leaving = True
        self._emptied.clear()
        try:
            for key in tuple(self._waiting):
                self._end_wait(key)
            for driver in tuple(self._drivers.values()):
                driver.close("the server is leaving")
            if self._drivers:
                async with asyncio.timeout(self._limits.closing_s):
                    await self._emptied.wait()
        except TimeoutError:
            logger.debug("%d peers did not answer our goodbye", len(self._drivers))
        finally:
            for driver in tuple(self._drivers.values()):
                driver.lost("the server has left")

    def _meet(self, key: PeerKey, routing_id: bytes, public_key: PublicKey, frames: list[bytes]) -> None:
        """Process the first message of a connection, which gets a place, waits for one, or is refused."""
        objection = self._objection(public_key)
        if objection is None and (self._waiting or not self._has_place):
            if self._may_wait(frames):
                wait_s = self._limits.handshake_s * WAITING_SHARE
                timer = asyncio.get_running_loop().call_later(wait_s, self._end_wait, key)
                self._waiting[key] = _Waiting(routing_id, frames, timer)
                self._public_keys[key] = public_key
                return
            objection = self._crowded
        if objection is None and self._security is None:
            objection = self._make_room()
        self._admit(key, routing_id, public_key, objection).receive(frames)

    def _may_wait(self, frames: list[bytes]) -> bool:
        """Return whether a newcomer may wait: it has proved to hold a key, and the waiting ones cost little."""
        may = self._security is not None and len(self._waiting) < WAITING_MAX
        return may and sum(map(len, frames)) <= HELLO_BYTES_MAX

    def _seat_next(self) -> None:
        if self._waiting and self._has_place:
            self._end_wait(next(iter(self._waiting)))

    def _end_wait(self, key: PeerKey, objection: Objection | None = None) -> None:
        """Admit a newcomer that waits, or refuse it."""
        waiting, public_key = self._waiting.pop(key), self._public_keys.pop(key)
        waiting.timer.cancel()
        objection = self._objection(public_key) or objection or (None if self._has_place else self._crowded)
        self._admit(key, waiting.routing_id, public_key, objection).receive(waiting.frames)

    def _admit(self, key: PeerKey, routing_id: bytes, public_key: PublicKey, objection: Objection | None) -> Driver:
        """Make a connection for a newcomer, and refuse it if there is an objection."""
        connection = Conversation(
            Role.SERVER,
            self._identity,
            self._publication,
            limits=self._limits,
            now=self._network.now(),
            allowance=self._allowance(public_key),
            wall_ahead_s=self._network.wall() - self._network.now(),
            giving=Giving(
                self._make_pass and partial(_made, "pass", PASS_BYTES_MAX, self._make_pass, public_key),
                self._make_report and partial(_made, "report", REPORT_BYTES_MAX, self._make_report),
            ),
        )
        driver = Driver(
            connection,
            lambda frames: self._channel.send([routing_id, *frames]),
            partial(self._report, key),
            partial(self._settled, key),
            self._network.now,
        )
        self._drivers[key] = driver
        self._public_keys[key] = public_key
        if objection is not None:
            driver.refuse(*objection)
        return driver

    def _objection(self, public_key: PublicKey) -> Objection | None:
        """Return why one more connection of this key is refused, if so."""
        limits = self._limits
        if self._leaving:
            return CloseCode.CLOSING, "the server is leaving", "Dial its successor."
        if not self._trusts(public_key):  # removed since ZAP accepted it
            return _REMOVED
        connections = sum(each == public_key for each in self._public_keys.values())
        if self._tells_apart and connections >= limits.connections_per_key_max:
            reason = f"there are {limits.connections_per_key_max} connections of this key already"
            return CloseCode.TOO_MANY_CONNECTIONS, reason, "Give every worker a key of its own."
        return None

    @property
    def _has_place(self) -> bool:
        return len(self._drivers) < self._limits.peers_max

    @property
    def _crowded(self) -> Objection:
        reason = f"there are {self._limits.peers_max} connections already"
        return CloseCode.TOO_MANY_PEERS, reason, "Raise peers_max, or use fewer peers."

    def _make_room(self) -> Objection | None:
        """Refuse the oldest handshake if too many are in progress; object to the newcomer if the oldest is young.

        Without encryption only: an honest handshake takes milliseconds, so the newest may be the only honest one.
        """
        pending = [
            driver
            for key, driver in self._drivers.items()
            if key not in self._ready and driver.connection.ending is None
        ]
        if len(pending) < self._limits.pending_handshakes_max:
            return None
        oldest, under_way = pending[0], f"{len(pending)} handshakes are under way"
        if oldest.connection.handshake_age(self._network.now()) < self._limits.handshake_grace_s:
            return CloseCode.BUSY, under_way, _DIAL_AGAIN
        oldest.refuse(CloseCode.BUSY, f"{under_way}, and this is the oldest", _DIAL_AGAIN)
        return None

    @property
    def _tells_apart(self) -> bool:
        """Whether a key identifies one worker: not if all have the secret's keys."""
        return self._security is not None and self._security.allowed is not None

    def _trusts(self, public_key: PublicKey) -> bool:
        return self._security is None or self._security.admits(public_key)

    def _allowance(self, public_key: PublicKey) -> Allowance:
        allowance = self._allowances.get(public_key) or Allowance(self._limits, self._network.now())
        if self._tells_apart:
            self._allowances[public_key] = allowance
        return allowance

    def _report(self, key: PeerKey, event: HandshakeEvent) -> None:
        if isinstance(event, PeerReady):
            self._ready[key] = event
        if isinstance(event, ConnectionFailed):
            # A peer chooses the code of its refusal: it must not create a counter.
            self._failures["refused" if event.refused else event.code] += 1
        self._on_event(key, event)

    def _settled(self, key: PeerKey) -> None:
        """Drop a connection that has ended; do not wait for the last word of a peer that we refused."""
        driver = self._drivers.get(key)
        if driver is None or driver.connection.ending is None:
            return
        self._ready.pop(key, None)
        if driver.connection.state is Progress.CLOSING and self._leaving:
            return
        driver.connection.lost("dropped")
        del self._drivers[key], self._public_keys[key]
        self._dismissed[key] = None
        if len(self._dismissed) > self._limits.peers_max:
            del self._dismissed[next(iter(self._dismissed))]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._seat_next)
        if not self._drivers:
            self._emptied.set()


def _made(what: str, nbytes_max: int, make: Callable[..., bytes], *about: object) -> bytes:
    """Return what the program above makes for a client; empty if it fails: a defect does not end the listener."""
    try:
        made = make(*about)
        assert len(made) <= nbytes_max, f"a {what} has {len(made)} bytes, more than {nbytes_max}"
    except Exception:
        logger.exception("making a %s failed; the client gets none", what)
        return b""
    return made


@asynccontextmanager
async def open_server(
    *,
    bind: str,
    identity: Identity,
    publication: Publication,
    security: ClusterSecurity | None,
    on_event: OnPeerEvent,
    limits: Limits = DEFAULT_LIMITS,
    insecure_allowed: bool = False,
    network: Network = ZEROMQ,
    make_pass: MakePass | None = None,
    make_report: MakeReport | None = None,
) -> AsyncIterator[HandshakeServer]:
    """Listen for peers until the block is left; then say goodbye to them.

    Args:
        bind: ``tcp://host:port``; port 0 takes a free one, see ``HandshakeServer.endpoint``.
        identity: who we are.
        publication: what every peer gets.
        security: of the cluster; None admits everyone, without encryption.
        on_event: takes each event of each connection on the loop, also if it never became ready. It must be quick. If
            it raises, the error is logged and that peer is dropped.
        limits: what peers may cost us.
        insecure_allowed: allow ``security=None`` on an address that is not a loopback address.
        network: where we listen.
        make_pass: called on the loop once for each client that says who it is; None gives no passes. It must be quick.
            If it raises, the error is logged and that client gets none.
        make_report: likewise, when a client asks for a report.

    Raises:
        AddressInvalid: the address cannot be bound, or would be unsafe.
        LocalProtocolError: the identity or the publication is out of bounds.
    """
    check_bind(bind, security, insecure_allowed=insecure_allowed)
    check_introduction(Role.SERVER, identity, publication, limits)
    async with network.open_listener(bind, security, limits) as channel:
        server = HandshakeServer(
            channel,
            identity,
            publication,
            on_event,
            limits,
            security=security,
            network=network,
            make_pass=make_pass,
            make_report=make_report,
        )
        async with running(channel.read(server.receive)):
            try:
                yield server
            finally:
                await server.leave()
