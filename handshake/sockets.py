"""ZeroMQ as the shells need it: one socket, its reader task, and what the monitor saw, as plain values.

A channel owns a context of its own, so that closing it depends on nobody else. Sending never waits: a message
is queued or it is not. Receiving is one task for the life of the socket, because a time limit around ``recv``
loses messages. A dialled channel is one TCP connection and never dials again by itself: a restarted server has
to be met with a new handshake.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from enum import Enum, auto
from ipaddress import ip_address
from typing import cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from handshake.errors import ConfigInvalid
from handshake.limits import Limits
from handshake.security import ZAP_DOMAIN, ZAP_ENDPOINT, ClusterSecurity, answer_admissions

MESSAGES_PER_TURN = 32
"""A flood must not starve the loop: receiving what has already arrived never suspends the reader."""

CURVE_BYTES = 64
"""What encryption adds to a frame at most; the exact bound on what we read is the codec's."""


class Delivery(Enum):
    """What became of a message that was given to a socket."""

    QUEUED = auto()
    """ZeroMQ has it and sends it if the connection lives."""
    FULL = auto()
    """The peer does not read, and its queue is full."""
    GONE = auto()
    """There is no such peer any more."""


class LinkEvent(Enum):
    """What the monitor of a dialled socket saw."""

    ACCEPTED = auto()
    """The TCP connection was accepted; ZeroMQ's own handshake begins."""
    SECURED = auto()
    """ZeroMQ's handshake succeeded, CURVE included: messages flow."""
    UNREACHABLE = auto()
    """The TCP connection was refused."""
    DENIED = auto()
    """The server said that our key, or our lack of one, will not do."""
    CUT = auto()
    """The connection ended within ZeroMQ's handshake, without a word: what a server does that cannot decrypt."""
    LOST = auto()
    """The connection ended."""


_LINK_EVENTS = {
    zmq.Event.CONNECTED: LinkEvent.ACCEPTED,
    zmq.Event.HANDSHAKE_SUCCEEDED: LinkEvent.SECURED,
    zmq.Event.CLOSED: LinkEvent.UNREACHABLE,
    zmq.Event.HANDSHAKE_FAILED_AUTH: LinkEvent.DENIED,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: LinkEvent.DENIED,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: LinkEvent.CUT,
    zmq.Event.DISCONNECTED: LinkEvent.LOST,
}


class Channel:
    """One ZeroMQ socket.

    Attributes:
        endpoint: its address: the real one of a listener, the dialled one of a dialler.
    """

    def __init__(self, socket: zmq.asyncio.Socket, endpoint: str) -> None:
        self.endpoint = endpoint
        self._socket = socket

    def send(self, frames: list[bytes]) -> Delivery:
        """Queue one message, or say why not, at once. A listener's first frame names the peer."""
        try:
            sent = self._socket.send_multipart(frames, zmq.NOBLOCK)
            cast("asyncio.Future[object]", sent).result()  # without blocking, it is done already
        except zmq.Again:
            return Delivery.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Delivery.GONE
        return Delivery.QUEUED

    async def read(self, on_frames: Callable[[list[bytes]], None]) -> None:
        """Pass on each message that arrives. Runs until it is cancelled; ``on_frames`` must not raise."""
        while True:
            for _ in range(MESSAGES_PER_TURN):
                on_frames(await self._socket.recv_multipart())
            await asyncio.sleep(0)


class DialledChannel(Channel):
    """A channel with a monitor. Nothing happens on it before ``dial``."""

    def __init__(self, socket: zmq.asyncio.Socket, endpoint: str, monitor: zmq.asyncio.Socket) -> None:
        super().__init__(socket, endpoint)
        self._monitor = monitor

    def dial(self) -> None:
        """Start the one attempt to connect.

        Raises:
            ConfigInvalid: the address is malformed.
        """
        try:
            self._socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            raise ConfigInvalid(f"cannot dial {self.endpoint!r}: {error}") from error

    async def watch(self, on_link: Callable[[LinkEvent], None]) -> None:
        """Pass on what happens to the connection. Runs until it is cancelled; ``on_link`` must not raise."""
        while True:
            seen = parse_monitor_message(await self._monitor.recv_multipart())
            event = _LINK_EVENTS.get(zmq.Event(seen["event"]))
            if event is not None:
                on_link(event)


@asynccontextmanager
async def running(*coroutines: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Run tasks until the block is left, then cancel and await them.

    An error of the block passes unchanged, as it would without us. An error of a task cancels the block and is
    raised as an exception group.
    """
    body_error: Exception | None = None
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again below, outside of the group
            body_error = error
        finally:
            for task in tasks:
                task.cancel()
    if body_error is not None:
        raise body_error


@asynccontextmanager
async def open_listener(bind: str, security: ClusterSecurity | None, limits: Limits) -> AsyncIterator[Channel]:
    """Bind a ROUTER socket that admits the cluster's clients, or everyone if there is no security.

    Raises:
        ConfigInvalid: the address cannot be bound.
    """
    context = zmq.asyncio.Context()
    try:
        router = _socket(context, zmq.ROUTER, bind, limits)
        router.set(zmq.ROUTER_MANDATORY, 1)  # so that a vanished peer is noticed when it is sent something
        router.set(zmq.ROUTER_HANDOVER, 0)  # nobody takes over another's connection by claiming its name
        router.set(zmq.BACKLOG, limits.peers_max)
        admissions = []
        if security is not None:
            router.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            router.set(zmq.CURVE_SERVER, 1)
            router.set(zmq.CURVE_SECRETKEY, security.server.private)
            replier = context.socket(zmq.REP)
            replier.bind(ZAP_ENDPOINT)
            admissions.append(answer_admissions(replier, security.client.public))
        async with running(*admissions):
            try:
                router.bind(bind)
            except zmq.ZMQError as error:
                raise ConfigInvalid(f"cannot bind {bind!r}: {error}") from error
            yield Channel(router, router.get_string(zmq.LAST_ENDPOINT))
    finally:
        context.destroy(linger=0)


async def resolve(endpoint: str) -> str:
    """Return ``endpoint`` with an address in place of its name.

    ZeroMQ would look the name up itself, within ``connect``, and the event loop would stand still meanwhile: for
    seconds, if it is that of a container that is gone.

    Raises:
        OSError: there is no such name, or nobody to ask.

    Cancellation: safe; the look-up ends by itself, in a thread.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with suppress(ValueError):
        ip_address(host.strip("[]"))
        return endpoint
    found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    address = str(found[0][4][0])
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


@asynccontextmanager
async def open_dialler(
    endpoint: str, security: ClusterSecurity | None, limits: Limits
) -> AsyncIterator[DialledChannel]:
    """Make a DEALER socket for one connection to one server."""
    context = zmq.asyncio.Context()
    try:
        dealer = _socket(context, zmq.DEALER, endpoint, limits)
        dealer.set(zmq.RECONNECT_IVL, -1)
        if security is not None:
            dealer.set(zmq.CURVE_SERVERKEY, security.server.public)
            dealer.set(zmq.CURVE_PUBLICKEY, security.client.public)
            dealer.set(zmq.CURVE_SECRETKEY, security.client.private)
        monitor = dealer.get_monitor_socket()
        try:
            yield DialledChannel(dealer, endpoint, monitor)
        finally:
            dealer.disable_monitor()
    finally:
        context.destroy(linger=0)


def _socket(context: zmq.asyncio.Context, kind: int, endpoint: str, limits: Limits) -> zmq.asyncio.Socket:
    made = context.socket(kind)
    made.set(zmq.LINGER, 0)  # last words are acknowledged; nothing else is worth waiting for
    made.set(zmq.SNDHWM, limits.outgoing_max)
    made.set(zmq.RCVHWM, limits.incoming_max)
    made.set(zmq.MAXMSGSIZE, limits.frame_bytes_max + CURVE_BYTES)
    # A little longer than the connection's own deadline, which comes first and says what happened.
    made.set(zmq.HANDSHAKE_IVL, round((limits.handshake_s + 0.5) * 1000))
    made.set(zmq.IPV6, int("[" in endpoint))
    return made
