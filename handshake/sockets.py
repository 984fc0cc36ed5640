"""ZeroMQ as the shells need it: one socket, its reader task, and what the monitor saw, as plain values.

A listener owns a context of its own, because who is let in is asked within it. All diallers of a process share
one, so that hundreds of peers cost two threads and not hundreds. Sending never waits: a message is queued or it
is not. Receiving is one task for the life of the socket, because a time limit around ``recv`` loses messages. A
dialled channel is one TCP connection and never dials again by itself: a restarted server has to be met with a new
handshake.
"""

import asyncio
import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from enum import Enum, auto
from ipaddress import ip_address
from itertools import count
from typing import cast

import zmq
import zmq.asyncio

from handshake.errors import ConfigInvalid, ConnectionLost, FailureCode
from handshake.limits import Limits
from handshake.security import ZAP_DOMAIN, ZAP_ENDPOINT, ClusterSecurity, PublicKey, answer_admissions

MESSAGES_PER_TURN = 32
"""A flood must not starve the loop: receiving what has already arrived never suspends the reader."""

CURVE_BYTES = 64
"""What encryption adds to a frame at most; the exact bound on what we read is the codec's."""


DESCRIPTORS_OF_A_CONTEXT = 32
"""A context takes about ten: two threads with a queue and an epoll each, and the first sockets."""

OPEN_FILES_REMEDY = "Raise this process's limit of open files."


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


_LINK_EVENTS: dict[int, LinkEvent] = {
    zmq.Event.CONNECTED: LinkEvent.ACCEPTED,
    zmq.Event.HANDSHAKE_SUCCEEDED: LinkEvent.SECURED,
    zmq.Event.CLOSED: LinkEvent.UNREACHABLE,
    zmq.Event.HANDSHAKE_FAILED_AUTH: LinkEvent.DENIED,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: LinkEvent.DENIED,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: LinkEvent.CUT,
    zmq.Event.DISCONNECTED: LinkEvent.LOST,
}

_NOT_LET_IN: dict[int, FailureCode] = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: FailureCode.UNAUTHENTICATED,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: FailureCode.UNAUTHENTICATED,
    zmq.Event.HANDSHAKE_FAILED_AUTH: FailureCode.KEY_UNKNOWN,
}
"""What the monitor of a listener is asked for, and what it means. No more: each event takes a turn of the loop."""


_MONITORED = struct.Struct("=Hi")
"""Event and value, in this machine's order of bytes."""


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


class ListeningChannel(Channel):
    """A channel that any number of peers talk to; a message's first frame names the connection.

    Args:
        socket: bound, or about to be.
        endpoint: where.
        monitor: of the socket.
        secured: whether each connection had to prove that it holds a key.

    Attributes:
        strangers: how many connections were not let in, by code.
    """

    def __init__(
        self, socket: zmq.asyncio.Socket, endpoint: str, monitor: zmq.asyncio.Socket, *, secured: bool
    ) -> None:
        super().__init__(socket, endpoint)
        self._monitor = monitor
        # Without encryption a client may name itself as it likes, in any bytes, and has proved nothing.
        self._key_of = _proved_key if secured else _no_key
        self.strangers: Counter[str] = Counter()

    async def read(self, on_frames: Callable[[list[bytes], PublicKey], None]) -> None:
        """Pass on each message that arrives, with the key that its connection has proved to hold, or an empty one.

        Runs until it is cancelled; ``on_frames`` must not raise.
        """
        while True:
            for _ in range(MESSAGES_PER_TURN):
                frames = await self._socket.recv_multipart(copy=False)
                on_frames([frame.bytes for frame in frames], self._key_of(frames[-1]))
            await asyncio.sleep(0)

    async def count_strangers(self) -> None:
        """Count whoever is not let in. Runs until it is cancelled; ZeroMQ may have to wait for it."""
        while True:
            for _ in range(MESSAGES_PER_TURN):
                code = _NOT_LET_IN.get(_event_of(await self._monitor.recv_multipart()))
                if code is not None:
                    self.strangers[code] += 1
            await asyncio.sleep(0)


def _event_of(frames: list[bytes]) -> int:
    """Return the number of the event that a monitor tells of. Source: zmq_socket_monitor(3).

    pyzmq's own parser makes a flag of the value beside it, too, and Python remembers each flag for ever: one for each
    number that a file descriptor ever had.
    """
    event, _ = _MONITORED.unpack(frames[0])
    return int(event)


def _proved_key(frame: zmq.Frame) -> PublicKey:
    return PublicKey(frame.get("User-Id"))  # as our own doorkeeper has named the connection


def _no_key(_frame: zmq.Frame) -> PublicKey:
    return ""


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

    async def read(self, on_frames: Callable[[list[bytes]], None]) -> None:
        """Pass on each message that arrives. Runs until it is cancelled; ``on_frames`` must not raise."""
        while True:
            for _ in range(MESSAGES_PER_TURN):
                on_frames(await self._socket.recv_multipart())
            await asyncio.sleep(0)

    async def watch(self, on_link: Callable[[LinkEvent], None]) -> None:
        """Pass on what happens to the connection. Runs until it is cancelled; ``on_link`` must not raise."""
        while True:
            event = _LINK_EVENTS.get(_event_of(await self._monitor.recv_multipart()))
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
async def open_listener(bind: str, security: ClusterSecurity | None, limits: Limits) -> AsyncIterator[ListeningChannel]:
    """Listen on a ROUTER socket, with the doorkeeper that CURVE asks, if there is ``security``.

    Raises:
        ConfigInvalid: the address cannot be bound.
        ConnectionLost: this process has no file descriptors left.
    """
    _require_descriptors()
    context = zmq.asyncio.Context()
    # Who listens will dial, too, perhaps when a flood of connections has taken every descriptor.
    with _diallers.borrowed(), _destroying(context):
        router = _configured(context.socket(zmq.ROUTER), bind, limits)
        router.set(zmq.ROUTER_MANDATORY, 1)  # sending to a peer that is gone is an error, not silence
        router.set(zmq.ROUTER_HANDOVER, 0)  # nobody takes over another's connection by claiming its name
        router.set(zmq.BACKLOG, limits.peers_max)
        tasks = []
        if security is not None:
            router.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            router.set(zmq.CURVE_SERVER, 1)
            router.set(zmq.CURVE_SECRETKEY, security.server.private)
            replier = context.socket(zmq.REP)
            replier.bind(ZAP_ENDPOINT)
            tasks.append(answer_admissions(replier, security.admits))
        monitor = router.get_monitor_socket(sum(_NOT_LET_IN))
        channel = ListeningChannel(router, bind, monitor, secured=security is not None)
        async with running(*tasks, channel.count_strangers()):
            try:
                router.bind(bind)
            except zmq.ZMQError as error:
                raise ConfigInvalid(f"cannot bind {bind!r}: {error}") from error
            channel.endpoint = router.get_string(zmq.LAST_ENDPOINT)
            yield channel


@contextmanager
def _destroying(context: zmq.asyncio.Context) -> Iterator[None]:
    """Close a context with all its sockets, in whatever way the block is left."""
    try:
        yield
    finally:
        context.destroy(linger=0)


async def resolve(endpoint: str) -> tuple[str, ...]:
    """Return ``endpoint`` with an address in place of its name, once for each address that the name has.

    ZeroMQ would look the name up itself, within ``connect``, and the event loop would stand still meanwhile: for
    seconds, if it is that of a container that is gone.

    Raises:
        OSError: there is no such name, or nobody to ask.
        UnicodeError: no name can be written so: a part of it is empty or too long.

    Cancellation: safe; the look-up ends by itself, in a thread.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with suppress(ValueError):
        ip_address(host.strip("[]"))
        return (endpoint,)
    found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(str(each[4][0]) for each in found)
    return tuple(f"tcp://[{each}]:{port}" if ":" in each else f"tcp://{each}:{port}" for each in addresses)


def _require_descriptors() -> None:
    """Make sure that a context can start: libzmq ends the whole process where it finds no descriptor for its threads.

    Raises:
        ConnectionLost: this process has no file descriptors left.
    """
    opened: list[int] = []
    try:
        for _ in range(DESCRIPTORS_OF_A_CONTEXT):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401 - closed one by one below
    except OSError as error:
        raise ConnectionLost(f"no ZeroMQ context can be made: {error}", remedy=OPEN_FILES_REMEDY, local=True) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


class _SharedContext:
    """The one context of all diallers of this process: there while anyone needs it.

    Thread: any; the sockets belong to the loop that makes them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def forget(self) -> None:
        """Start anew in a forked child, which has the numbers of the sockets and none of their threads."""
        self._lock = threading.Lock()
        self._users = 0
        self._context = None

    @contextmanager
    def borrowed(self) -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
        """Borrow the context; whoever leaves last, with every socket closed, ends it."""
        with self._lock:
            if self._context is None:
                _require_descriptors()
                self._context = zmq.Context()
                self._context.socket(zmq.PAIR).close()  # its threads start with the first socket
            self._users += 1
            context = self._context
        try:
            yield context
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    context.term()
                    self._context = None


_diallers = _SharedContext()
os.register_at_fork(after_in_child=_diallers.forget)
_links = count()


@contextmanager
def _closing() -> Iterator[list[zmq.asyncio.Socket]]:
    """Close the sockets in a list, in whatever way the block is left."""
    sockets: list[zmq.asyncio.Socket] = []
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close(linger=0)


@asynccontextmanager
async def open_dialler(
    endpoint: str, security: ClusterSecurity | None, limits: Limits
) -> AsyncIterator[DialledChannel]:
    """Make a DEALER socket for one connection to one server, whose key is that of ``security``'s server.

    Raises:
        ConnectionLost: this process has no file descriptors left.
    """
    with _diallers.borrowed() as context, _closing() as sockets:
        try:
            dealer = zmq.asyncio.Socket(context, zmq.DEALER)
            sockets.append(dealer)
            _configured(dealer, endpoint, limits)
            dealer.set(zmq.RECONNECT_IVL, -1)
            if security is not None:
                dealer.set(zmq.CURVE_SERVERKEY, security.server.public)
                dealer.set(zmq.CURVE_PUBLICKEY, security.client.public)
                dealer.set(zmq.CURVE_SECRETKEY, security.client.private)
            monitor = zmq.asyncio.Socket(context, zmq.PAIR)
            sockets.append(monitor)
            # pyzmq would name it after a file descriptor, which another dialler may have had before.
            links = f"inproc://links/{next(_links)}"
            dealer.monitor(links, zmq.EVENT_ALL)
            monitor.connect(links)
        except zmq.ZMQError as error:
            reason = f"no socket can be made for {endpoint}: {error}"
            raise ConnectionLost(reason, remedy=OPEN_FILES_REMEDY, local=True) from error
        try:
            yield DialledChannel(dealer, endpoint, monitor)
        finally:
            dealer.disable_monitor()


def _configured(made: zmq.asyncio.Socket, endpoint: str, limits: Limits) -> zmq.asyncio.Socket:
    made.set(zmq.LINGER, 0)  # last words are acknowledged; nothing else is worth waiting for
    made.set(zmq.SNDHWM, limits.outgoing_max)
    made.set(zmq.RCVHWM, limits.incoming_max)
    made.set(zmq.MAXMSGSIZE, limits.frame_bytes_max + CURVE_BYTES)
    # A little longer than the connection's own deadline, which comes first and says what happened.
    made.set(zmq.HANDSHAKE_IVL, round((limits.handshake_s + 0.5) * 1000))
    made.set(zmq.IPV6, int("[" in endpoint))
    return made
