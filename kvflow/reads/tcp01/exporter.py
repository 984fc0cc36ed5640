"""The exporter of the TCP data plane: it serves reads of blocks that a lease holds.

Each sender thread serves several readers with non-blocking sockets, so a hung reader delays no other. A read names
leases. The sender compares their epochs before it copies each portion into a socket, and after the last one. Once a
lease is not held, zeros replace the rest of its bytes, and the epochs at the end of the answer tell the reader. A lease
may end, and its blocks may be written, while the kernel copies a portion of at most 2 MiB. Those bytes are sent, but
the epochs tell the reader not to use them.
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
from operator import attrgetter

from kvflow.addresses import host_and_port
from kvflow.config import TcpSettings
from kvflow.errors import ConfigInvalid, TransportUnavailable
from kvflow.ids import pass_of
from kvflow.layout.component import Region
from kvflow.reads.contract import Serving
from kvflow.reads.staging import memory_at
from kvflow.reads.tcp01 import wire
from kvflow.reads.tcp01.answers import Answer, HostMemory, Words
from kvflow.reads.tcp01.channel import ByteStream, ChannelClosed, PlainChannel, TlsChannel, check_tls
from kvflow.reads.tcp01.connection import prepare_socket
from kvflow.reads.tcp01.requests import Desk, PreparedLists

_logger = logging.getLogger(__name__)

OPENING_S_MAX = 5.0
"""Seconds from the accepted connection to a valid hello."""

STALLED_S_MAX = 120.0
"""How long a reader may take no byte of an answer: four times the budget of its pulls."""

STRANGERS_MAX = 64
"""Most connections of one thread without a valid hello. The oldest is closed for a new one."""

CLIENTS_MAX = 4096
"""Most connections of one thread. The least recently used is closed for a new one."""

CLIENTS_OF_ONE_MAX = 32
"""Most connections of one reader: twice as many as ``tcp_connections`` allows."""

ANSWERS_MAX = 64
"""Most unsent answers of one connection; while there are as many, nothing is read from it."""

BUFFERED_BYTES_MAX = 64 << 20
"""Most bytes of partly received requests, for all connections of one thread."""

STRETCHES_MAX = 1 << 16
"""Most stretches in unsent answers of one connection: 3 MiB. While there are more, nothing is read from it."""

_WORK_MAX = 4096  # leases, rows and descriptors of one reader before other readers are served
_WORK_OF_ONE = 64  # the cost of each request besides them
_TICK_S = 1.0
_RECEIVED_MAX = 256 << 10
_SPOKEN_EVERY_S = 1.0


@dataclass(slots=True, eq=False)
class _Client:
    """One connection of a reader."""

    channel: ByteStream
    since: float  # when it was accepted, or last took a byte of an answer
    nonce: bytes
    encrypted: bool = False
    name: str = ""  # empty before it has proven its identity
    public_key: str = ""  # of its control connection; empty before
    buffer: bytearray = field(default_factory=bytearray)  # received and not parsed yet
    prepared_lists: PreparedLists = field(default_factory=PreparedLists)
    answers: deque[Answer] = field(default_factory=deque)
    request: wire.RequestHeader | None = None
    readable: bool = True
    writable: bool = True
    finished: bool = False  # nothing comes after what is there to receive

    @property
    def room(self) -> bool:
        """Whether another answer may wait."""
        return len(self.answers) < ANSWERS_MAX and sum(each.waiting for each in self.answers) < STRETCHES_MAX


class _Sender:
    """One thread that serves readers."""

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
        """Serve an accepted connection; close the oldest if too many wait. Thread: the accepting one."""
        with suppress(IndexError):  # this thread has taken all of them before
            while len(self._arriving) >= STRANGERS_MAX:
                self._arriving.popleft().close()
        self._arriving.append(sock)
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Close every connection, and end the thread. Then nothing reads the cache. Thread: any."""
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
        """Greet a new connection."""
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        try:
            prepare_socket(sock)
            channel: ByteStream = TlsChannel(sock, server=True) if self._encrypt else PlainChannel(sock)
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
        """Process requests of one reader, and send one portion of answers."""
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
        except Exception:  # one reader's request must not end the service for others
            _logger.exception("kvflow.reads: serving a reader over TCP failed; its connection is closed")
            self._drop(descriptor)
        else:
            if again:
                self._ready.append(descriptor)

    def _advance(self, descriptor: int, client: _Client) -> bool:
        """Advance one reader. Return True if there is more to do at once."""
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
        # Without encryption, if less arrived than there was room for, nothing is left except the end.
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
        if client.channel.wants_write:  # bytes that were taken and are not in the socket yet
            client.channel.send([])
            client.writable = not client.channel.wants_write

    def _has_request(self, client: _Client) -> bool:
        """Return whether the buffer has a complete request."""
        if client.request is not None:
            return len(client.buffer) >= client.request.nbytes
        if client.name:
            return len(client.buffer) >= wire.HEADER.size
        if len(client.buffer) < wire.HELLO_BYTES:
            return False
        hello = wire.decode_hello(bytes(client.buffer[: wire.HELLO_BYTES]))
        return len(client.buffer) >= wire.HELLO_BYTES + hello.engine_bytes

    def _understand(self, descriptor: int, client: _Client) -> None:
        """Process complete requests while there is room for answers. A large one ends the turn: others are served."""
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
        """Check a reader's hello, and send our proof. Raises: BadFrame."""
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
        self._make_room(client)
        self._clients[descriptor] = client

    def _make_room(self, newcomer: _Client) -> None:
        """Close the least recently used connections if this reader, or all readers together, have too many."""
        who = attrgetter("public_key" if self._serving.keys_differ else "name")
        same = [descriptor for descriptor, client in self._clients.items() if who(client) == who(newcomer)]
        for descriptor in same[: max(0, len(same) + 1 - CLIENTS_OF_ONE_MAX)]:
            self._drop(descriptor)
        if len(self._clients) >= CLIENTS_MAX:
            self._drop(next(iter(self._clients)))

    def _answer(self, client: _Client, request: wire.RequestHeader, body: bytes) -> None:
        if not self._serving.admits(client.public_key):
            raise wire.BadFrame(f"the key of {client.name} is not allowed any longer")
        answer = self._desk.answer(client.prepared_lists, request, body)
        if answer is not None:
            client.answers.append(answer)

    def _end_overdue(self, now: float) -> None:
        """Close connections that do not send a hello, or do not read their answers."""
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
        if now - self._spoke_at >= _SPOKEN_EVERY_S:  # many bad readers must not write many log lines
            self._spoke_at = now
            who = name or "a reader that has not proven who it is"
            _logger.warning("kvflow.reads: closed the TCP connection of %s: %s", who, complaint)


class TcpExporter:
    """Serve the cache to readers. ``endpoint``: its address for readers, ``tcp://host:port``.

    Args:
        settings: where to listen, and whether to encrypt.
        regions: the cache.
        epochs: our epoch table.
        serving: what may be served, and to which readers.

    Raises:
        TransportUnavailable: the address cannot be bound.
        ConfigInvalid: OpenSSL of this machine lacks the required cipher.
    """

    def __init__(self, settings: TcpSettings, regions: Sequence[Region], epochs: Region, serving: Serving) -> None:
        encrypt = settings.encryption == "tls"
        if encrypt:
            check_tls()
        self._listener = _listen(settings.bind)
        host, port = host_and_port(settings.advertise or settings.bind)
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
        """Stop listening, close every connection, and return when nothing reads the cache. Idempotent."""
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
        accepted = 0
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closing.is_set() or error.errno in (errno.EBADF, errno.EINVAL):
                    return
                # Usually too many open files. This passes; accepting again at once would only spin.
                _logger.warning("kvflow.reads: cannot accept a TCP connection: %s", error)
                self._closing.wait(_TICK_S)
                continue
            self._senders[accepted % len(self._senders)].take(sock)
            accepted += 1


def senders_for(cores: int | None) -> int:
    """Return the number of sender threads. One copies about 3 GB/s, and the engine needs the other cores."""
    return max(1, min(4, (cores or 1) // 4))


def _taken(buffer: bytearray, count: int) -> bytes:
    """Remove bytes from the front of a buffer, and return them."""
    taken = bytes(buffer[:count])
    del buffer[:count]
    return taken


def _listen(endpoint: str) -> socket.socket:
    host, port = host_and_port(endpoint)
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
            f"the TCP data plane cannot listen on {endpoint}: {error.strerror or error}",
            remedy="Set tcp_bind to an address of this host and a free port.",
        ) from error
    return listener
