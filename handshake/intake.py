"""What arrives on a ZeroMQ socket: taken by the event loop, and bounded by what the kernel has counted.

ZeroMQ's high-water mark counts messages, and a message may have any number of frames, which ZeroMQ keeps until the last
has arrived. So the bytes that the kernel has delivered are compared with those of the messages that were taken, and a
connection is cut where they differ by more than the mark allows, ``SWEEP_S`` later at most if the loop does not stall.
"""

import asyncio
import errno
import fcntl
import logging
import os
import socket
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from weakref import WeakKeyDictionary

import zmq

logger = logging.getLogger("handshake")

MESSAGES_PER_TURN = 32  # a flood must not starve the loop
SWEEP_S = 0.25  # one connection takes about 2 us, a thousand two milliseconds
CURVE_BYTES = 33  # added to a frame: a name, a nonce, a checksum and flags. Source: ZeroMQ RFC 26, MESSAGE
# For what is not counted exactly: greetings, and messages taken before the monitor reports their connection.
SLACK_BYTES = 1 << 20
_RECEIVED_AT = 128  # where Linux's ``tcp_info`` has ``tcpi_bytes_received``, 64 bits. Source: linux/tcp.h


def wire_bytes(nbytes: int, *, secured: bool) -> int:
    """Return how many bytes a frame takes on the wire."""
    nbytes += CURVE_BYTES if secured else 0
    return nbytes + (2 if nbytes < 256 else 9)


class Intake:
    """The connections of one socket, by file descriptor. Thread: the loop's only.

    A closed descriptor may soon be another connection's, of this socket or of other code: the inode identifies it, and
    the port is compared too, because ZeroMQ reports a descriptor some iterations of the loop later.

    Args:
        held_max: bytes that ZeroMQ may hold of one connection.
        endpoint: returns where the socket is bound, or what it dials.
        on_cut: called with the peer's address when its connection was cut.
        listens: whether ``endpoint`` is our end of a connection.
    """

    def __init__(
        self,
        held_max: int,
        endpoint: Callable[[], str],
        on_cut: Callable[[str], None] = lambda _: None,
        *,
        listens: bool,
    ) -> None:
        self._held_max = held_max + SLACK_BYTES
        self._endpoint = endpoint
        self._listens = listens
        self._on_cut = on_cut
        self._inodes: dict[int, int] = {}
        self._taken: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._inodes)

    def opened(self, descriptor: int) -> None:
        """Begin to count a connection; does nothing if it is counted already."""
        with suppress(OSError), _borrowed(descriptor) as connection:  # it may be closed again
            inode = os.fstat(descriptor).st_ino
            if self._inodes.get(descriptor) != inode and self._is_ours(connection):
                self._inodes[descriptor], self._taken[descriptor] = inode, 0

    def took(self, descriptor: int, nbytes: int) -> None:
        """Count a message that was taken, by what it was on the wire."""
        if descriptor not in self._inodes:
            self.opened(descriptor)
        if descriptor in self._taken:
            self._taken[descriptor] += nbytes

    def sweep(self) -> None:
        """Cut every connection of which too much is held, and forget those that have ended."""
        for descriptor in list(self._inodes):
            try:
                excess = _received(descriptor) - self._taken[descriptor] > self._held_max
                if excess and not self._cut(descriptor):
                    continue
            except OSError:
                excess = True
            if excess:
                del self._inodes[descriptor], self._taken[descriptor]

    def _is_ours(self, connection: socket.socket) -> bool:
        address = connection.getsockname() if self._listens else connection.getpeername()
        return isinstance(address, tuple) and str(address[1]) == self._endpoint().rpartition(":")[2]

    def _cut(self, descriptor: int) -> bool:
        """Cut a connection unless the excess is the kernel's; return whether it has ended."""
        with _pinned(descriptor) as connection:
            number = connection.fileno()
            if os.fstat(number).st_ino != self._inodes[descriptor] or not self._is_ours(connection):
                return True
            held = _received(number) - _unread(number) - self._taken[descriptor]
            if held <= self._held_max:
                return False
            address = "{}:{}".format(*connection.getpeername()[:2])
            logger.warning("%s sent %d bytes that are not a valid message; connection closed", address, held)
            # ZeroMQ notices, and closes its end: with a reset, which waits for nothing.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("=ii", 1, 0))
            connection.shutdown(socket.SHUT_RDWR)
        self._on_cut(address)
        return True


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()


@contextmanager
def _pinned(descriptor: int) -> Iterator[socket.socket]:
    """Have a copy of a descriptor, which ZeroMQ does not close meanwhile; the descriptor itself if none is free."""
    try:
        number = os.dup(descriptor)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        with _borrowed(descriptor) as connection:  # a flood must not be spared because it took every descriptor
            yield connection
    else:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=number) as connection:
            yield connection


def _received(descriptor: int) -> int:
    """Return how many bytes have arrived on a TCP connection; raise OSError if it has ended."""
    with _borrowed(descriptor) as connection:
        counters = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
    received: int = struct.unpack_from("=Q", counters, _RECEIVED_AT)[0] if len(counters) >= _RECEIVED_AT + 8 else 0
    return received


def _unread(descriptor: int) -> int:
    """Return how many of these bytes the kernel still has."""
    (unread,) = struct.unpack("=i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    return int(unread)


class _Sweeper:
    """Sweeps the intakes of one event loop while there are any."""

    def __init__(self) -> None:
        self._intakes: set[Intake] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, intake: Intake) -> None:
        self._intakes.add(intake)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def remove(self, intake: Intake) -> None:
        self._intakes.discard(intake)
        if not self._intakes and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        for intake in tuple(self._intakes):
            intake.sweep()


_sweepers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Sweeper] = WeakKeyDictionary()


@contextmanager
def watched(intake: Intake) -> Iterator[None]:
    """Sweep an intake every ``SWEEP_S`` until the block is left, on Linux only."""
    sweeper = _sweepers.setdefault(asyncio.get_running_loop(), _Sweeper())
    if sys.platform == "linux":
        sweeper.add(intake)
    try:
        yield
    finally:
        sweeper.remove(intake)


class Arrivals:
    """What arrives on one socket. Thread: the event loop.

    ZeroMQ makes a socket's descriptor readable once when something has arrived, and any other call on the socket may
    clear this signal. So messages are taken until there is none, and ``read_again`` is called after each send. There is
    no task or future for a message.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._taking = True  # so that nothing is taken before ``run``
        self._turn: asyncio.Handle | None = None

    async def run(self, take: Callable[[], bool | None]) -> None:
        """Take messages until cancelled.

        Args:
            take: takes one message, or raises ``zmq.Again``; returns whether it has used up its time in this iteration.

        Cancellation: safe; what was not taken stays in the socket.
        """
        self._take = take
        self._failed: asyncio.Future[None] = self._loop.create_future()
        descriptor = int(self._socket.get(zmq.FD))
        self._loop.add_reader(descriptor, self._on_readable)
        self._take_later()  # messages that arrived earlier cause no new event
        try:
            await self._failed
        finally:
            self._loop.remove_reader(descriptor)
            self._taking = True
            if self._turn is not None:
                self._turn.cancel()

    def read_again(self) -> None:
        """Take what arrived during another call on the socket."""
        if not self._taking and self._any():
            self._take_later()

    def _any(self) -> bool:
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def _take_later(self) -> None:
        self._taking = True
        self._turn = self._loop.call_soon(self._take_some)

    def _on_readable(self) -> None:
        if not self._taking:
            self._take_some()

    def _take_some(self) -> None:
        self._taking = True
        try:
            for _ in range(MESSAGES_PER_TURN):
                used_up = self._take()
                if not self._any():  # costs half of what it costs to try
                    self._taking = False
                    return
                if used_up:
                    break
            self._take_later()
        except zmq.Again:
            self._taking = False
        except Exception as error:  # noqa: BLE001 - raised by ``run``
            self._failed.set_exception(error)
