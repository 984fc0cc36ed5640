"""ZeroMQ as clients and servers need it: one socket, its reader task, and what the monitor saw, as plain values.

A listener has a separate context, because access control runs within it. All dialers of a process share one, so that
hundreds of peers cost two threads. Neither sending nor receiving waits. Of a message with too many frames, the first
excess one is kept. A dialed channel never reconnects: a restarted server needs a new handshake.
"""

import asyncio
import errno
import os
import random
import resource
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from enum import Enum, auto
from functools import partial
from ipaddress import ip_address
from itertools import count
from typing import Protocol

import zmq

from handshake.errors import AddressInvalid, CloseCode, SocketsExhausted
from handshake.intake import Arrivals, Intake, watched, wire_bytes
from handshake.limits import Limits
from handshake.security import (
    ZAP_DOMAIN,
    ZAP_ENDPOINT,
    ClusterSecurity,
    PublicKey,
    answer_admission,
    host_and_port,
)

FRAMES_PER_TURN = 1024  # excess frames that are read and dropped, which takes half a millisecond
CURVE_BYTES = 64  # what encryption adds to a frame at most; the exact bound on what we read is the codec's
DESCRIPTORS_OF_A_CONTEXT = 32  # it takes about ten: two threads with a queue and an epoll each, and the first sockets
# It takes four: three ZeroMQ sockets and TCP. ZeroMQ reports nothing if another thread took the one for TCP.
DESCRIPTORS_OF_A_LINK = 8


class Delivery(Enum):
    """What became of a message that was given to a socket."""

    QUEUED = auto()  # ZeroMQ sends it if the connection lives
    FULL = auto()  # the peer does not read
    GONE = auto()  # the peer is gone


class LinkEvent(Enum):
    """What the monitor of a dialed socket saw."""

    ACCEPTED = auto()  # the TCP connection was accepted; ZeroMQ's own handshake begins
    SECURED = auto()  # ZeroMQ's handshake succeeded, CURVE included: messages flow
    UNREACHABLE = auto()  # the TCP connection was refused
    DENIED = auto()  # the server does not accept our key, or our lack of one
    CUT = auto()  # the connection ended within ZeroMQ's handshake, without a reason: the server cannot decrypt
    LOST = auto()  # the connection ended


_LINK_EVENTS: dict[int, LinkEvent] = {
    zmq.Event.CONNECTED: LinkEvent.ACCEPTED,
    zmq.Event.HANDSHAKE_SUCCEEDED: LinkEvent.SECURED,
    zmq.Event.CLOSED: LinkEvent.UNREACHABLE,
    zmq.Event.HANDSHAKE_FAILED_AUTH: LinkEvent.DENIED,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: LinkEvent.DENIED,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: LinkEvent.CUT,
    zmq.Event.DISCONNECTED: LinkEvent.LOST,
}

# The only events that the monitor of a listener reports, because each takes time of the loop.
_NOT_LET_IN: dict[int, CloseCode] = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: CloseCode.UNAUTHENTICATED,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: CloseCode.UNAUTHENTICATED,
    zmq.Event.HANDSHAKE_FAILED_AUTH: CloseCode.KEY_UNKNOWN,
}
_MONITORED = struct.Struct("=Hi")  # event and value, in this machine's order of bytes. Source: zmq_socket_monitor(3)


class Channel:
    """One ZeroMQ socket. ``endpoint``: the real address of a listener, the dialed one of a dialer."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, intake: Intake, *, secured: bool) -> None:
        self.endpoint = endpoint
        self.intake = intake
        self._socket = socket
        self._secured = secured
        self._arrivals = Arrivals(socket)
        self._dropping: list[zmq.Frame] = []

    def send(self, frames: list[bytes]) -> Delivery:
        """Queue one message, or return why not. A listener's first frame names the peer."""
        try:
            for frame in frames[:-1]:
                self._socket.send(frame, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(frames[-1], zmq.NOBLOCK)
        except zmq.Again:
            return Delivery.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Delivery.GONE
        finally:
            self._arrivals.read_again()
        return Delivery.QUEUED

    def _message(self, num_frames: int) -> list[zmq.Frame]:
        """Return the frames of the next message, at most one excess frame; none while the rest is being dropped."""
        receive = self._socket.recv
        frames, self._dropping = self._dropping, []
        if not frames:
            frames.append(receive(zmq.NOBLOCK, copy=False))
            while frames[-1].more and len(frames) <= num_frames:
                frames.append(receive(zmq.NOBLOCK, copy=False))  # all frames of a message arrive together
            if not frames[-1].more:
                return frames
        for _ in range(FRAMES_PER_TURN):
            if not receive(zmq.NOBLOCK, copy=False).more:
                return frames
        self._dropping = frames
        return []

    async def _read(self, num_frames: int, tell: Callable[[list[zmq.Frame]], bool]) -> None:
        """Pass on each message that arrives, until cancelled, and count those that were taken."""

        def take() -> bool:
            frames = self._message(num_frames)
            if frames and tell(frames) and len(frames) == num_frames:
                last = frames[-1]
                self.intake.took(last.get(zmq.SRCFD), wire_bytes(len(last), secured=self._secured))
            return not frames

        await self._arrivals.run(take)


class ListeningChannel(Channel):
    """A channel for any number of peers. ``strangers``: connections that were not let in, or cut off, by code."""

    def __init__(
        self, socket: zmq.Socket[bytes], endpoint: str, monitor: zmq.Socket[bytes], held_max: int, *, secured: bool
    ) -> None:
        intake = Intake(held_max, lambda: self.endpoint, self._on_cut, listens=True)
        super().__init__(socket, endpoint, intake, secured=secured)
        self._monitor = monitor
        self.strangers: Counter[str] = Counter()

    async def read(self, on_frames: Callable[[list[bytes], PublicKey], bool]) -> None:
        """Pass on each message that arrives, with the key that its connection has proved to hold, or an empty one.

        Runs until it is cancelled. ``on_frames`` must not raise, and returns whether it took the message. A connection
        whose messages it does not take, or which have several frames, is cut when it has sent too much.
        """
        await self._read(2, lambda frames: on_frames([frame.bytes for frame in frames], self._key_of(frames[-1])))

    def _key_of(self, frame: zmq.Frame) -> PublicKey:
        # Without encryption a client may name itself in any bytes, and has proved nothing.
        return PublicKey(frame.get("User-Id")) if self._secured else ""  # as our ZAP handler has named the connection

    def _on_cut(self, _address: str) -> None:
        self.strangers[CloseCode.OVERFLOWED] += 1

    async def count_strangers(self) -> None:
        """Count the peers that are refused, until cancelled. ZeroMQ may have to wait for it."""

        def take() -> None:
            event, value = _event_of(self._monitor)
            if event == zmq.Event.ACCEPTED:
                self.intake.opened(value)
            elif event in _NOT_LET_IN:
                self.strangers[_NOT_LET_IN[event]] += 1

        await Arrivals(self._monitor).run(take)


def _event_of(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    # pyzmq's parser makes a flag of the value, too, and Python keeps each flag forever: one for each file descriptor.
    event, value = _MONITORED.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0])
    return event, value


class DialedChannel(Channel):
    """A channel with a monitor. Nothing happens on it before ``dial``."""

    def __init__(
        self, socket: zmq.Socket[bytes], endpoint: str, monitor: zmq.Socket[bytes], held_max: int, *, secured: bool
    ) -> None:
        super().__init__(socket, endpoint, Intake(held_max, lambda: self.endpoint, listens=False), secured=secured)
        self._monitor = monitor

    def dial(self) -> None:
        """Start the one attempt to connect.

        Raises:
            AddressInvalid: the address is malformed.
        """
        try:
            self._socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            raise AddressInvalid(f"cannot dial {self.endpoint!r}: {error}") from error

    async def read(self, on_frames: Callable[[list[bytes]], None]) -> None:
        """Pass on each message that arrives, until cancelled. ``on_frames`` must not raise."""

        def tell(frames: list[zmq.Frame]) -> bool:
            on_frames([frame.bytes for frame in frames])
            return True

        await self._read(1, tell)

    async def watch(self, on_link: Callable[[LinkEvent], None]) -> None:
        """Pass on what happens to the connection, until cancelled. ``on_link`` must not raise."""

        def take() -> None:
            number, value = _event_of(self._monitor)
            event = _LINK_EVENTS.get(number)
            if event is LinkEvent.ACCEPTED:
                self.intake.opened(value)
            if event is not None:
                on_link(event)

        await Arrivals(self._monitor).run(take)


@asynccontextmanager
async def running(*coroutines: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Run tasks until the block is left, then cancel and await them.

    An error of the block passes unchanged. An error of a task cancels the block and is raised as an exception group.
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
    """Listen on a ROUTER socket, with the ZAP handler that CURVE asks, if there is ``security``.

    Raises:
        AddressInvalid: the address cannot be bound.
        SocketsExhausted: this process has no file descriptors left.
    """
    _require_descriptors(DESCRIPTORS_OF_A_CONTEXT)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # A listener dials, too, perhaps when a flood of connections has taken every descriptor.
    with _dialers.borrowed(), _destroying(context):
        router, held_max = _configured(context.socket(zmq.ROUTER), bind, limits, limits.client_frame_bytes_max)
        router.set(zmq.ROUTER_MANDATORY, 1)  # sending to a peer that is gone is an error, not silence
        router.set(zmq.ROUTER_HANDOVER, 0)  # no peer takes over another's connection by claiming its name
        router.set(zmq.BACKLOG, limits.peers_max)
        tasks = []
        if security is not None:
            router.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            router.set(zmq.CURVE_SERVER, 1)
            router.set(zmq.CURVE_SECRETKEY, security.server.private)
            replier = context.socket(zmq.REP)
            replier.bind(ZAP_ENDPOINT)
            tasks.append(Arrivals(replier).run(partial(answer_admission, replier, security.admits)))
        monitor = router.get_monitor_socket(zmq.Event.ACCEPTED | sum(_NOT_LET_IN))
        channel = ListeningChannel(router, bind, monitor, held_max, secured=security is not None)
        async with running(*tasks, channel.count_strangers()):
            try:
                router.bind(bind)
            except zmq.ZMQError as error:
                raise _cannot_listen(bind, error) from error
            channel.endpoint = router.get_string(zmq.LAST_ENDPOINT)
            with watched(channel.intake):
                yield channel


def _cannot_listen(bind: str, error: zmq.ZMQError) -> AddressInvalid:
    reason, remedy = error.strerror, "Give an address of this host, or a wildcard."
    if error.errno == errno.EADDRINUSE:
        reason, remedy = "the address is already in use", "Choose another port, or port 0, which takes a free one."
    elif error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL):
        reason = f"{host_and_port(bind)[0]} is not an address of this host"
    return AddressInvalid(f"cannot listen on {bind}: {reason}", remedy=remedy)


@contextmanager
def _destroying(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[None]:
    try:
        yield
    finally:
        context.destroy(linger=0)


async def resolve(endpoint: str) -> tuple[str, ...]:
    """Return ``endpoint`` with each address of its name in turn. ZeroMQ would look it up and block the event loop.

    Raises:
        OSError: there is no such name, or no name server.
        UnicodeError: the name is malformed: a part of it is empty or too long.

    Cancellation: safe; the look-up ends later, in a thread.
    """
    host, port = host_and_port(endpoint)
    with suppress(ValueError):
        ip_address(host)
        return (endpoint,)
    found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(str(each[4][0]) for each in found)
    if not addresses:
        raise OSError("it has no address")
    return tuple(f"tcp://[{each}]:{port}" if ":" in each else f"tcp://{each}:{port}" for each in addresses)


async def first_open(endpoints: Sequence[str], within_s: float) -> str:
    """Return the first of these addresses that accepts a TCP connection; the first of all if none does.

    Cancellation: safe.
    """
    for endpoint in endpoints:
        host, port = host_and_port(endpoint)
        with suppress(OSError):  # a timeout is one
            async with asyncio.timeout(within_s / len(endpoints)):
                _, trial = await asyncio.open_connection(host.strip("[]"), int(port))
            trial.close()
            return endpoint
    return endpoints[0]


def _require_descriptors(count: int) -> None:
    """Raise ``SocketsExhausted`` if too few descriptors are left: ZeroMQ ends a process that has none for threads."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401 - closed one by one below
    except OSError as error:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        remedy = "Raise this process's limit of open files: ulimit -n, LimitNOFILE=, or RLIMIT_NOFILE."
        raise SocketsExhausted("open files (RLIMIT_NOFILE)", soft, remedy=remedy) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


class _SharedContext:
    """The one context of all dialers of this process, while there are any. Thread: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def forget(self) -> None:
        """Start again in a forked child, which has no threads."""
        self._lock = threading.Lock()
        self._users = 0
        self._context = None

    @contextmanager
    def borrowed(self) -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
        """Borrow the context; the last user, with every socket closed, ends it."""
        with self._lock:
            if self._context is None:
                _require_descriptors(DESCRIPTORS_OF_A_CONTEXT)
                self._context = zmq.Context()
                self._context.set(zmq.MAX_SOCKETS, _sockets_max(self._context))
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


def _sockets_max(context: zmq.Context[zmq.Socket[bytes]]) -> int:
    """Return how many sockets ZeroMQ can number, or may ever be open: the soft limit of files may be raised later."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = int(context.get(zmq.SOCKET_LIMIT))
    return most if hard == resource.RLIM_INFINITY else min(most, hard)


_dialers = _SharedContext()
os.register_at_fork(after_in_child=_dialers.forget)
_links = count()


@contextmanager
def _closing() -> Iterator[list[zmq.Socket[bytes]]]:
    sockets: list[zmq.Socket[bytes]] = []
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close(linger=0)


@asynccontextmanager
async def open_dialer(endpoint: str, security: ClusterSecurity | None, limits: Limits) -> AsyncIterator[DialedChannel]:
    """Make a DEALER socket for one connection to one server, whose key is that of ``security``'s server.

    Raises:
        SocketsExhausted: this process can open no more sockets or files.
    """
    with _dialers.borrowed() as context, _closing() as sockets:
        _require_descriptors(DESCRIPTORS_OF_A_LINK)
        try:
            dealer = context.socket(zmq.DEALER)
            sockets.append(dealer)
            _, held_max = _configured(dealer, endpoint, limits, limits.frame_bytes_max)
            dealer.set(zmq.RECONNECT_IVL, -1)
            if security is not None:
                dealer.set(zmq.CURVE_SERVERKEY, security.server.public)
                dealer.set(zmq.CURVE_PUBLICKEY, security.client.public)
                dealer.set(zmq.CURVE_SECRETKEY, security.client.private)
            monitor = context.socket(zmq.PAIR)
            sockets.append(monitor)
            # pyzmq would name it after a file descriptor, which another dialer may have had before.
            links = f"inproc://links/{next(_links)}"
            dealer.monitor(links, zmq.EVENT_ALL)
            monitor.connect(links)
        except zmq.ZMQError as error:
            remedy = "Divide the work among more processes: ZeroMQ numbers no more sockets in one."
            raise SocketsExhausted("ZeroMQ sockets", context.get(zmq.MAX_SOCKETS), remedy=remedy) from error
        channel = DialedChannel(dealer, endpoint, monitor, held_max, secured=security is not None)
        try:
            with watched(channel.intake):
                yield channel
        finally:
            dealer.disable_monitor()


def _configured(
    made: zmq.Socket[bytes], endpoint: str, limits: Limits, heard_bytes_max: int
) -> tuple[zmq.Socket[bytes], int]:
    """Set the common options of a socket; return it, and how many bytes ZeroMQ may hold of one of its connections."""
    waiting_max = min(limits.incoming_max, max(1, limits.incoming_bytes_max // heard_bytes_max))
    made.set(zmq.LINGER, 0)  # the last messages are acknowledged; nothing else is worth waiting for
    made.set(zmq.SNDHWM, limits.outgoing_max)
    made.set(zmq.TCP_MAXRT, round(limits.silence_s_max * 1000))  # a connection that takes no byte ends with its queue
    made.set(zmq.RCVHWM, waiting_max)
    made.set(zmq.MAXMSGSIZE, heard_bytes_max + CURVE_BYTES)
    # A little longer than the connection's own deadline, which comes first and says what happened.
    made.set(zmq.HANDSHAKE_IVL, round((limits.handshake_s + 0.5) * 1000))
    made.set(zmq.IPV6, int("[" in endpoint))
    return made, (waiting_max + 2) * (heard_bytes_max + CURVE_BYTES)  # one more is decoded, and one is being read


class Network(Protocol):
    """Sockets, names, a clock and chance: the simulator replaces them, and drives the same clients and servers."""

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""

    def wall(self) -> float:
        """Return the seconds since 1970 on the wall clock, which may jump."""

    def draw(self) -> float:
        """Return a random number in [0, 1), which spreads load and protects nothing."""

    def open_listener(
        self, bind: str, security: ClusterSecurity | None, limits: Limits
    ) -> AbstractAsyncContextManager[ListeningChannel]:
        """Listen."""

    def open_dialer(
        self, endpoint: str, security: ClusterSecurity | None, limits: Limits
    ) -> AbstractAsyncContextManager[DialedChannel]:
        """Get ready to dial."""

    async def resolve(self, endpoint: str) -> tuple[str, ...]:
        """Look a name up, which may have several addresses."""

    async def first_open(self, endpoints: Sequence[str], within_s: float) -> str:
        """Return the first address that accepts a connection."""


class ZeroMqNetwork:
    """ZeroMQ over TCP, and this machine's clock."""

    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)
    draw = staticmethod(random.random)
    open_listener = staticmethod(open_listener)
    open_dialer = staticmethod(open_dialer)
    resolve = staticmethod(resolve)
    first_open = staticmethod(first_open)


ZEROMQ: Network = ZeroMqNetwork()
