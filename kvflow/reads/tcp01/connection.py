"""One connection of a reader to an exporter: it opens, sends requests, and receives each answer into the target.

It never blocks and has no thread. Its owner calls it when its socket is ready, and closes it when it raises.
"""

import errno
import hmac
import secrets
import select
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvflow.errors import ConfigInvalid, FailureCode
from kvflow.ids import Credentials
from kvflow.reads.backend import BackendError
from kvflow.reads.contract import LeaseName
from kvflow.reads.tcp.stream import ChannelClosed
from kvflow.reads.tcp.wire import BadFrame
from kvflow.reads.tcp01 import wire
from kvflow.reads.tcp01.channel import ByteStream, PlainChannel, TlsChannel

_AT_ONCE_BYTES = 1 << 20
"""Bytes that one call receives, and that are worth a wake-up while more will come: 0.3 ms of copying."""

_PORTION_BYTES = 8 << 20
"""Bytes that are received from one connection before other connections are served."""

_AWAITED_BYTES_MIN = 256 << 10
_FRAMES_MAX = 64


@dataclass(slots=True, eq=False)
class Known:
    """A prepared list, and the frame that announces it on a connection before its first read."""

    number: int
    frame: bytes


@dataclass(slots=True, eq=False)
class OldQuestion:
    """One request, and the place of its answer.

    Attributes:
        answered: called once, with the values of its slots, or with the reason for no answer.
        prepared_list: the list that its connection must know.
        leases: the leases that it names; empty if it asks for the value of a slot.
        landing: buffers to fill one after the other, instead of ``target``.
        nbytes: bytes of the answer.
        repeated: whether it was sent before, over a connection that has ended.
    """

    frame: bytes
    answered: Callable[[Sequence[int], BackendError | None], None]
    prepared_list: Known | None = None
    leases: Sequence[LeaseName] = ()
    target: list[memoryview] = field(default_factory=list)
    landing: Iterator[memoryview] | None = None
    nbytes: int = wire.EPOCH_VALUE.size
    repeated: bool = False


class OldSourceConnection:
    """A connection that is being opened, or is open.

    Args:
        address: numeric host, and port.
        who: what this worker presents.
        encrypted: whether to encrypt.

    Attributes:
        owed: unanswered requests, in order.
        open: whether both sides have proven their identity.

    Raises:
        ChannelClosed: the address cannot be dialed.
    """

    def __init__(self, address: tuple[str, int], who: Credentials, *, encrypted: bool) -> None:
        self.owed: deque[OldQuestion] = deque()
        self.owed_bytes = 0
        self.open = False
        self._who = who
        self._encrypted = encrypted
        self._unsent: deque[OldQuestion] = deque()
        self._sending: deque[memoryview] = deque()
        self._known: set[int] = set()
        self._nonce = secrets.token_bytes(wire.NONCE_BYTES)
        self._expected = b""  # the exporter's proof
        self._head = bytearray(wire.GREETING_BYTES)
        self._views: list[memoryview] = [memoryview(self._head)]
        self._filled = 0  # bytes of the views that have arrived
        self._missing = wire.GREETING_BYTES  # bytes of the views
        self._begun = False  # whether a byte of the answer has arrived
        self._then: Callable[[], None] = self._on_greeting
        self._channel: ByteStream | None = None
        self._secured = False
        self._sock = _dial(address)
        self.descriptor = self._sock.fileno()

    @property
    def interest(self) -> int:
        """The events that epoll must report."""
        writes = self._channel is None or self._sending or self._channel.wants_write
        return select.EPOLLIN | (select.EPOLLOUT if writes else 0)

    def ask(self, questions: Sequence[OldQuestion]) -> None:
        """Send requests, at once if the socket has room.

        Raises:
            ChannelClosed: the connection has ended; it does not owe these requests.
        """
        self._unsent.extend(questions)
        if self.open:
            self._send()
        self.owed.extend(questions)
        self.owed_bytes += sum(question.nbytes for question in questions)

    def on_ready(self) -> None:
        """Advance: the socket may be readable or writable.

        Raises:
            ChannelClosed: the connection has ended, or cannot be opened.
            BadFrame: the exporter broke the protocol.
        """
        if self._channel is None:
            self._channel = self._connected()
            if self._channel is None:
                return
        if not self._secured:
            self._secured = self._channel.handshake()
            if not self._secured:
                return
        self._send()
        self._receive(self._channel)

    def close(self) -> list[OldQuestion]:
        """Close it; then nothing is written to memory.

        Returns:
            The requests that may be repeated over another connection, because no byte of their answer has arrived.
        """
        if self._channel is None:
            self._sock.close()
        else:
            self._channel.close(reset=True)
        again = [question for question in self.owed if not question.repeated]
        if self._begun and again and again[0] is self.owed[0]:
            del again[0]
        return again

    def _connected(self) -> ByteStream | None:
        """Return the channel once the socket is connected."""
        failed = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            raise ChannelClosed(f"connecting failed: {errno.errorcode.get(failed, failed)}")
        try:
            self._sock.getpeername()
        except OSError:
            return None  # not yet
        try:
            return TlsChannel(self._sock) if self._encrypted else PlainChannel(self._sock)
        except ConfigInvalid as error:
            raise ChannelClosed(str(error)) from error

    def _send(self) -> None:
        assert self._channel is not None
        self._take_unsent()
        while self._sending or self._channel.wants_write:
            count = self._channel.send(list(self._sending))
            if not count:
                return
            while self._sending and count >= len(self._sending[0]):
                count -= len(self._sending.popleft())
            if count:
                self._sending[0] = self._sending[0][count:]
            self._take_unsent()

    def _take_unsent(self) -> None:
        """Send the next requests, as many as one system call takes."""
        while self.open and self._unsent and len(self._sending) < _FRAMES_MAX:
            question = self._unsent.popleft()
            prepared_list = question.prepared_list
            if prepared_list is not None and prepared_list.number not in self._known:
                self._known.add(prepared_list.number)
                self._sending.append(memoryview(prepared_list.frame))
            self._sending.append(memoryview(question.frame))

    def _receive(self, channel: ByteStream) -> None:
        """Receive available bytes, at most one portion."""
        room = _PORTION_BYTES
        while room > 0 or channel.pending:
            left = len(self._views) - self._filled
            at_once = max(16, min(1024, _AT_ONCE_BYTES * left // (self._missing or 1)))
            count = channel.receive(self._views[self._filled : self._filled + at_once])
            if not count:
                return
            room -= count
            self._skip(count)
            if self._filled < len(self._views):
                channel.await_bytes(min(self._missing, _AT_ONCE_BYTES) if self._missing > _AWAITED_BYTES_MIN else 1)
                continue
            channel.await_bytes(1)
            self._then()
            if not self._encrypted and not self.owed and self.open:
                return

    def _skip(self, count: int) -> None:
        self._begun = self.open
        self._missing -= count
        views, at = self._views, self._filled
        while at < len(views) and count >= len(views[at]):
            count -= len(views[at])
            at += 1
        if count:
            views[at] = views[at][count:]
        self._filled = at

    def _expect(self, views: list[memoryview], then: Callable[[], None]) -> None:
        self._views, self._filled, self._then = views, 0, then
        self._missing = sum(map(len, views))

    def _expect_head(self, nbytes: int, then: Callable[[], None]) -> None:
        self._head = bytearray(nbytes)
        self._expect([memoryview(self._head)], then)

    def _on_greeting(self) -> None:
        """Send the hello."""
        assert self._channel is not None
        theirs = wire.nonce_of(bytes(self._head))
        nonces = (theirs, self._nonce, self._channel.binding())
        self._expected = wire.proof_of_exporter(self._who.pass_, *nonces)
        self._sending.append(memoryview(wire.encode_hello(self._who, *nonces)))
        self._expect_head(wire.WELCOME_BYTES, self._on_welcome)
        self._send()

    def _on_welcome(self) -> None:
        if not hmac.compare_digest(self._expected, bytes(self._head)):
            raise BadFrame(
                "it does not accept our pass" if not any(self._head) else "it has not proven that it is the producer"
            )
        self.open = True
        self._expect_head(wire.ANSWER.size, self._on_header)
        self._send()

    def _on_header(self) -> None:
        """Receive the rest of an answer into its target."""
        status, zero, leases, rest, nbytes = wire.ANSWER.unpack(self._head)
        if not self.owed or zero or rest:
            raise BadFrame("an answer to no question")
        question = self.owed[0]
        if status == wire.REFUSED and 0 < nbytes <= wire.DETAIL_BYTES_MAX:
            self._expect_head(nbytes, self._on_refusal)
            return
        held = status == wire.DONE and nbytes == question.nbytes
        if leases != len(question.leases) or not (held or (status == wire.NOT_HELD and leases and not nbytes)):
            raise BadFrame(f"an answer of kind {status} with {nbytes} bytes to a request for {question.nbytes}")
        epochs = bytearray((leases or 1) * wire.EPOCH_VALUE.size)
        self._head = epochs
        if held and question.landing is not None:
            self._land(question.landing)
            return
        target = question.target if held else []
        self._expect([*target, memoryview(epochs)], self._on_epochs if held else self._on_nothing)

    def _land(self, buffers: Iterator[memoryview]) -> None:
        """Receive into the next of these buffers; after the last one the epochs."""
        buffer = next(buffers, None)
        if buffer is None:
            self._expect([memoryview(self._head)], self._on_epochs)
        else:
            self._expect([buffer], partial(self._land, buffers))

    def _on_epochs(self) -> None:
        self._answered(memoryview(self._head).cast("Q").tolist(), None)

    def _on_nothing(self) -> None:
        """Process an answer without bytes: no lease is held."""
        epochs = memoryview(self._head).cast("Q").tolist()
        for lease, value in zip(self.owed[0].leases, epochs, strict=True):
            if value == lease.epoch:  # otherwise the bytes would count as the lease's
                raise BadFrame(f"it sends nothing although the lease in slot {lease.slot} is held")
        self._answered(epochs, None)

    def _on_refusal(self) -> None:
        self._answered((), BackendError(FailureCode.BOUNDS, self._head.decode(errors="replace")))

    def _answered(self, epochs: Sequence[int], failure: BackendError | None) -> None:
        question = self.owed.popleft()
        self.owed_bytes -= question.nbytes
        self._begun = False
        self._expect_head(wire.ANSWER.size, self._on_header)
        question.answered(epochs, failure)


def prepare_socket(sock: socket.socket) -> None:
    """Set the socket options of both sides: non-blocking, no delay, and an error when the other host is gone."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _dial(address: tuple[str, int]) -> socket.socket:
    host, port = address
    try:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:  # too many open files
        raise ChannelClosed(f"connecting failed: {error}") from error
    try:
        prepare_socket(sock)
        failed = sock.connect_ex((host, port))
    except OSError as error:
        sock.close()
        raise ChannelClosed(f"connecting failed: {error}") from error
    if failed not in (0, errno.EINPROGRESS):
        sock.close()
        raise ChannelClosed(f"connecting failed: {errno.errorcode.get(failed, failed)}")
    return sock
