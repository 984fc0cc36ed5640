"""The exporter of the TCP data plane: it serves reads, and only what leases allow.

Each sender thread serves some readers with sockets that never block, so that a reader that hangs keeps nobody waiting.
A read names leases. Before each portion of its bytes is copied into a socket, and again when all are, the sender
compares the epochs of the leases. From where a lease is not held, zeros take the place of its bytes, and the epochs at
the end of the answer tell the reader. A lease may end, and its blocks be written, while the kernel copies a portion of
2 MiB at most: those bytes are sent, and the epochs tell the reader not to use them.
"""

import errno
import hmac
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvflow.config import TcpSettings
from kvflow.errors import ConfigInvalid, TransportUnavailable
from kvflow.ids import pass_of
from kvflow.layout.region import Region
from kvflow.transport import tcp_wire as wire
from kvflow.transport.serving import Serving
from kvflow.transport.staging import memory_at
from kvflow.transport.tcp_answers import Answer, HostMemory, Words
from kvflow.transport.tcp_channel import Channel, ChannelClosed, PlainChannel, TlsChannel, check_tls
from kvflow.transport.tcp_connection import prepare_socket
from kvflow.transport.tcp_requests import Desk, Programs

_logger = logging.getLogger(__name__)

OPENING_S_MAX = 5.0
"""From the accepted connection to the hello of a reader that has the pass."""

STALLED_S_MAX = 120.0
"""How long a reader may take nothing of an answer: four times the budget that it gives a pull."""

STRANGERS_MAX = 64
"""Connections of one thread that have not said a valid hello. The oldest is closed for a new one."""

CLIENTS_MAX = 4096
"""Connections of one thread. The one that was used least recently is closed for a new one."""

CLIENTS_OF_ONE_MAX = 32
"""Of one reader: twice as many as it can be told to use."""

ANSWERS_MAX = 64
"""Of one connection. Nothing is read from it while as many wait to be sent; a reader has some ten in flight, and
at times hundreds that ask for an epoch slot."""

BUFFERED_BYTES_MAX = 64 << 20
"""Of requests that are half received, of all connections of one thread."""

STRETCHES_MAX = 1 << 16
"""Of the answers of one connection that wait to be sent. Nothing is read from it while there are more: 3 MiB."""

_WORK_MAX = 4096  # leases, rows and descriptors of one reader before others have their turn
_WORK_OF_ONE = 64  # what each request costs beside them
_TICK_S = 1.0
_RECEIVED_MAX = 256 << 10
_SPOKEN_EVERY_S = 1.0


@dataclass(slots=True, eq=False)
class _Client:
    """One connection of a reader.

    Attributes:
        channel: to it.
        since: when it was accepted; then when it last took something of an answer.
        nonce: that it must answer.
        name: who it is; empty until it has proven it.
        public_key: of its control connection; empty before.
        buffer: bytes that were received, and not understood yet.
        programs: that it has told of.
        answers: to send, in order.
        readable: whether there may be more to receive.
        writable: whether there may be room to send.
        finished: whether nothing comes after what is there to receive.
    """

    channel: Channel
    since: float
    nonce: bytes
    encrypted: bool = False
    name: str = ""
    public_key: str = ""
    buffer: bytearray = field(default_factory=bytearray)
    programs: Programs = field(default_factory=Programs)
    answers: deque[Answer] = field(default_factory=deque)
    request: wire.Request | None = None
    readable: bool = True
    writable: bool = True
    finished: bool = False

    @property
    def room(self) -> bool:
        """Whether another answer may wait."""
        return len(self.answers) < ANSWERS_MAX and sum(each.waiting for each in self.answers) < STRETCHES_MAX


class _Sender:
    """One thread that serves readers.

    Args:
        serving: what may be served, and which readers may have it.
        memory: where it is.
        epochs: our epoch table.
        encrypt: whether connections are encrypted.
        number: of the thread.
    """

    def __init__(self, serving: Serving, memory: HostMemory, epochs: memoryview, *, encrypt: bool, number: int) -> None:
        self._serving = serving
        self._memory = memory
        self._epochs = epochs
        self._encrypt = encrypt
        self._desk = Desk(serving, memory, epochs)
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._clients: OrderedDict[int, _Client] = OrderedDict()  # least recently used first
        self._strangers: OrderedDict[int, _Client] = OrderedDict()
        self._arriving: deque[socket.socket] = deque()
        self._ready: deque[int] = deque()
        self._scratch = memoryview(bytearray(_RECEIVED_MAX))
        self._closing = False
        self._spoke_at = -_SPOKEN_EVERY_S
        self._thread = threading.Thread(target=self._run, name=f"kvflow-tcp-{number}", daemon=True)

    def start(self) -> None:
        """Start to serve."""
        self._thread.start()

    def take(self, sock: socket.socket) -> None:
        """Serve a connection that was accepted, in place of the oldest if too many wait. Thread: the accepting one."""
        with suppress(IndexError):  # this thread has taken them all meanwhile
            while len(self._arriving) >= STRANGERS_MAX:
                self._arriving.popleft().close()
        self._arriving.append(sock)
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Close every connection, and end the thread: then nothing reads the cache. Thread: any."""
        self._closing = True
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        self._epoll.close()
        os.close(self._bell)

    def _run(self) -> None:
        looked_at = time.monotonic()
        while not self._closing:
            for descriptor, events in self._epoll.poll(0 if self._ready else _TICK_S):
                self._note(descriptor, events)
            for _ in range(len(self._ready)):
                self._serve(self._ready.popleft())
            now = time.monotonic()
            if now - looked_at >= _TICK_S:
                looked_at = now
                self._end_overdue(now)
        for client in [*self._clients.values(), *self._strangers.values()]:
            client.channel.close(reset=True)
        while self._arriving:
            self._arriving.popleft().close()

    def _note(self, descriptor: int, events: int) -> None:
        if descriptor == self._bell:
            with suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            with suppress(IndexError):  # the accepting thread may take one, too
                while self._arriving:
                    self._welcome(self._arriving.popleft())
            return
        client = self._client(descriptor)
        if client is None:
            return
        client.readable = client.readable or bool(events & ~select.EPOLLOUT)
        client.finished = client.finished or bool(events & ~(select.EPOLLOUT | select.EPOLLIN))
        client.writable = client.writable or bool(events & ~select.EPOLLIN)
        if descriptor not in self._ready:
            self._ready.append(descriptor)

    def _client(self, descriptor: int) -> _Client | None:
        return self._clients.get(descriptor) or self._strangers.get(descriptor)

    def _welcome(self, sock: socket.socket) -> None:
        """Begin to talk to a connection of which nothing is known."""
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        try:
            prepare_socket(sock)
            channel: Channel = TlsChannel(sock, server=True) if self._encrypt else PlainChannel(sock)
            self._epoll.register(sock, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
        except (OSError, ConfigInvalid) as error:  # too many open files, or a connection that has ended already
            self._complain("", error)
            sock.close()
            return
        client = _Client(channel, time.monotonic(), nonce, encrypted=not self._encrypt)
        client.answers.append(Words(wire.greeting(nonce)))
        while len(self._strangers) >= STRANGERS_MAX:
            self._drop(next(iter(self._strangers)))
        self._strangers[channel.fileno()] = client
        self._ready.append(channel.fileno())

    def _serve(self, descriptor: int) -> None:
        """Take requests of one reader, and send it one portion of answers."""
        client = self._client(descriptor)
        if client is None:
            return
        try:
            again = self._advance(descriptor, client)
        except ChannelClosed:
            self._drop(descriptor)
        except wire.BadFrame as error:
            self._complain(client.name, error)
            self._drop(descriptor)
        except Exception:  # one reader's request must not end the service of the others
            _logger.exception("kvflow.transport: serving a reader over TCP failed; its connection is closed")
            self._drop(descriptor)
        else:
            if again:
                self._ready.append(descriptor)

    def _advance(self, descriptor: int, client: _Client) -> bool:
        """Go on with one reader; True: there is more to do at once."""
        if not client.encrypted:
            client.encrypted = client.channel.handshake()
            if not client.encrypted:
                client.readable = client.writable = False  # until the next event
                return False
            client.readable = client.writable = True
        if client.readable and client.room and not self._has_request(client):
            self._receive(descriptor, client)
        self._understand(descriptor, client)
        if client.writable and (client.answers or client.channel.wants_write):
            self._send(client)
        more = client.room and (client.readable or self._has_request(client))
        return more or bool(client.answers and client.writable)

    def _receive(self, descriptor: int, client: _Client) -> None:
        count = client.channel.receive([self._scratch])
        # Without encryption, less than there was room for is all that there was, but for the end.
        if not count or (count < len(self._scratch) and not self._encrypt and not client.finished):
            client.readable = False  # until the next event
        if count:
            if client.name:
                self._clients.move_to_end(descriptor)
            client.buffer += self._scratch[:count]
        if len(client.buffer) > len(self._scratch):
            waiting = sum(len(each.buffer) for each in self._clients.values())
            if waiting > BUFFERED_BYTES_MAX:
                raise wire.BadFrame(f"requests of {waiting} bytes are half received, more than {BUFFERED_BYTES_MAX}")

    def _send(self, client: _Client) -> None:
        while client.answers:
            sent = client.answers[0].send(client.channel)
            if sent is None:
                client.writable = False  # until the next event
                return
            client.since = time.monotonic()
            if not sent:
                return  # others first
            client.answers.popleft()
        if client.channel.wants_write:  # bytes that were taken, and are not in the socket yet
            client.channel.send([])
            client.writable = not client.channel.wants_write

    def _has_request(self, client: _Client) -> bool:
        """Tell whether the buffer has all that is needed to go on."""
        if client.request is not None:
            return len(client.buffer) >= client.request.nbytes
        if client.name:
            return len(client.buffer) >= wire.HEADER.size
        if len(client.buffer) < wire.HELLO_BYTES:
            return False
        hello = wire.decode_hello(bytes(client.buffer[: wire.HELLO_BYTES]))
        return len(client.buffer) >= wire.HELLO_BYTES + hello.engine_bytes

    def _understand(self, descriptor: int, client: _Client) -> None:
        """Take what is whole of the bytes that were received, as long as there is room for answers.

        A large request ends the turn: others first.
        """
        work = 0
        while work < _WORK_MAX and client.room and self._has_request(client):
            if not client.name:
                self._let_in(descriptor, client)
            elif client.request is None:
                client.request = wire.decode_request(_taken(client.buffer, wire.HEADER.size))
            else:
                request, client.request = client.request, None
                self._answer(client, request, _taken(client.buffer, request.nbytes))
                work += _WORK_OF_ONE + request.few + request.units

    def _let_in(self, descriptor: int, client: _Client) -> None:
        """Take a reader's hello, and prove who we are.

        Raises:
            BadFrame: it is malformed, or its proof is wrong.
        """
        hello = wire.decode_hello(bytes(client.buffer[: wire.HELLO_BYTES]))
        name = _taken(client.buffer, wire.HELLO_BYTES + hello.engine_bytes)[wire.HELLO_BYTES :]
        try:
            engine_id = name.decode()
        except UnicodeDecodeError as error:
            raise wire.BadFrame(f"the reader's name is no text: {error}") from error
        key = self._serving.pass_key
        secret = pass_of(key, hello.public_key, engine_id, hello.rank, hello.incarnation)
        nonces = (client.nonce, hello.nonce, client.channel.binding())
        known = hmac.compare_digest(hello.proof, wire.proof_of_reader(secret, *nonces))
        if not known or not self._serving.admits(hello.public_key):
            client.answers.append(Words(bytes(wire.WELCOME_BYTES)))
            self._send(client)
            raise wire.BadFrame(f"a reader that calls itself {engine_id!r} has no valid pass")
        client.name, client.public_key = f"{engine_id}/{hello.rank}/{hello.incarnation}", hello.public_key
        client.answers.append(Words(wire.proof_of_exporter(secret, *nonces)))
        del self._strangers[descriptor]
        self._make_room(client.name)
        self._clients[descriptor] = client

    def _make_room(self, name: str) -> None:
        """Close the connections that were used least recently, if this reader, or all, have too many."""
        same = [descriptor for descriptor, client in self._clients.items() if client.name == name]
        for descriptor in same[: max(0, len(same) + 1 - CLIENTS_OF_ONE_MAX)]:
            self._drop(descriptor)
        if len(self._clients) >= CLIENTS_MAX:
            self._drop(next(iter(self._clients)))

    def _answer(self, client: _Client, request: wire.Request, body: bytes) -> None:
        if not self._serving.admits(client.public_key):
            raise wire.BadFrame(f"the key of {client.name} is not allowed any longer")
        answer = self._desk.answer(client.programs, request, body)
        if answer is not None:
            client.answers.append(answer)

    def _end_overdue(self, now: float) -> None:
        """Close connections that do not say who they are, or take nothing of what they asked for."""
        for descriptor, client in [*self._strangers.items()]:
            if now - client.since > OPENING_S_MAX:
                self._drop(descriptor)
        for descriptor, client in [*self._clients.items()]:
            if client.answers and now - client.since > STALLED_S_MAX:
                self._complain(client.name, f"it has taken nothing of an answer for {STALLED_S_MAX:g} s")
                self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        client = self._clients.pop(descriptor, None) or self._strangers.pop(descriptor, None)
        if client is not None:
            with suppress(OSError):
                self._epoll.unregister(descriptor)
            client.channel.close(reset=True)

    def _complain(self, name: str, complaint: object) -> None:
        now = time.monotonic()
        if now - self._spoke_at >= _SPOKEN_EVERY_S:  # a flood of bad readers must not become a flood of lines
            self._spoke_at = now
            who = name or "a reader that has not proven who it is"
            _logger.warning("kvflow.transport: closed the TCP connection of %s: %s", who, complaint)


class TcpExporter:
    """Serve the cache to readers.

    Args:
        settings: where to listen, and whether to encrypt.
        regions: the cache.
        epochs: our epoch table.
        serving: what may be served, and which readers may have it.

    Attributes:
        endpoint: where readers find it: ``tcp://host:port``.

    Raises:
        TransportUnavailable: the address cannot be bound.
        ConfigInvalid: this machine's OpenSSL cannot encrypt as we need it.
    """

    def __init__(self, settings: TcpSettings, regions: Sequence[Region], epochs: Region, serving: Serving) -> None:
        encrypt = settings.encryption == "tls"
        if encrypt:
            check_tls()
        self._listener = _listen(settings.bind)
        host, port = _host_and_port(settings.advertise or settings.bind)
        self.endpoint = f"tcp://{host}:{port or self._listener.getsockname()[1]}"
        memory = HostMemory(regions)
        slots = memory_at(epochs.address, epochs.nbytes).data.cast("Q")
        self._senders = [
            _Sender(serving, memory, slots, encrypt=encrypt, number=number)
            for number in range(senders_for(os.cpu_count()))
        ]
        self._closing = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="kvflow-tcp-accept", daemon=True)
        for sender in self._senders:
            sender.start()
        self._accepting.start()

    def close(self) -> None:
        """Stop to listen, close every connection, and return when nothing reads the cache any longer. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the accept
        self._accepting.join()
        self._listener.close()
        for sender in self._senders:
            sender.close()

    def _accept(self) -> None:
        """Give each connection to the next sender."""
        turn = 0
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closing.is_set() or error.errno in (errno.EBADF, errno.EINVAL):
                    return
                # Too many open files, mostly: it passes, and accepting again at once would only spin.
                _logger.warning("kvflow.transport: cannot accept a TCP connection: %s", error)
                self._closing.wait(_TICK_S)
                continue
            self._senders[turn % len(self._senders)].take(sock)
            turn += 1


def senders_for(cores: int | None) -> int:
    """Return how many threads send: one copies some 3 GB/s, and the engine needs the other cores."""
    return max(1, min(4, (cores or 1) // 4))


def _taken(buffer: bytearray, count: int) -> bytes:
    """Remove so many bytes from the front of a buffer, and return them."""
    taken = bytes(buffer[:count])
    del buffer[:count]
    return taken


def _listen(endpoint: str) -> socket.socket:
    host, port = _host_and_port(endpoint)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            "" if host == "*" else host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(256)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise TransportUnavailable(
            f"the TCP data plane cannot listen at {endpoint}: {error}",
            remedy="Set tcp_bind to an address of this host and a free port.",
        ) from error
    return listener


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)
