"""Who gets in: the exporter's side of an opening, on a separate thread; and what each key may use.

A stranger costs a socket and less than 1 KiB until its proof is right; only then keys are made for its encryption.
Nobody who is young is pushed out: while all places are taken, newcomers wait in the kernel's backlog, and a place of a
stranger ends soon.
"""

import hashlib
import hmac
import logging
import os
import resource
import secrets
import select
import signal
import socket
import ssl
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import msgspec

from handshake.rates import Bucket
from kvflow.addresses import host_and_port
from kvflow.config import TcpSettings
from kvflow.errors import TransportUnavailable, quoted
from kvflow.ids import ReaderId, pass_of_digest
from kvflow.reads.contract import Serving
from kvflow.reads.tcp import opening
from kvflow.reads.tcp.certificates import TlsIdentity
from kvflow.reads.tcp.opening import HELLO_BYTES, ReaderHello, fill, proof_of, say, shake
from kvflow.reads.tcp.stream import ChannelClosed, PlainStream, Stream, TlsStream, close_socket, prepare_socket

_logger = logging.getLogger(__name__)

PLACES_MAX = 4096
"""Most connections that are opening. With few descriptors, a quarter of those."""

BACKLOG = 4096

YOUNG_S_MAX = 0.3
"""Seconds in which a stranger keeps its place for certain; a reader needs one round trip for its proof."""

STRANGER_S_MAX = 1.0
"""Seconds from the accepted connection to its proof, while there are places for others."""

OPENING_S_MAX = 5.0
"""Seconds from the accepted connection to our welcome."""

ACCEPTED_PER_S = 2000
"""Connections that are accepted in a second, and at once after a silence; 35 us each."""

OPENED_PER_S = 256
"""Openings of one key in a second, or of one reader where all have one key; ``OPENED_AT_ONCE`` after a silence.
Encryption takes 3 to 6 ms each."""

OPENED_AT_ONCE = 1024

CONNECTIONS_MAX = 8192
"""Connections of readers that are in."""

CONNECTIONS_OF_ONE_MAX = 512
"""Those of one key: twice as many as 16 ranks with ``tcp_connections`` of 16 have."""

BUFFERED_BYTES_MAX = 64 << 20
"""Bytes of requests that have arrived in part."""

BUFFERED_OF_ONE_MAX = 16 << 20
"""Those of one key."""

_ACCEPTED_AT_ONCE = 64  # before others go on
_TICK_S = 0.1
_SPOKEN_EVERY_S = 1.0


class Account:
    """What one connection of a reader uses, as part of what its key uses. Thread: any."""

    def __init__(self, accounts: "Accounts", key: str, sock: socket.socket) -> None:
        self._accounts = accounts
        self.key = key
        self.sock = sock
        self.used_at = time.monotonic()
        self.buffered = 0
        self.ended = False

    def touch(self) -> None:
        """Note a request: the connection that has asked last is closed last."""
        self.used_at = time.monotonic()

    def grow(self, nbytes: int) -> bool:
        """Count more or fewer bytes of requests that have arrived in part. False: end this connection.

        Above a bound the largest such request of the key that has most ends: its connection is shut down.
        """
        return self._accounts.grow(self, nbytes)

    def leave(self) -> None:
        """Give everything back. Call it before the socket is closed. Idempotent."""
        self._accounts.leave(self)


class Accounts:
    """What the connections of each key use: of each reader where all of a cluster have one key. Thread: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_key: dict[str, set[Account]] = {}
        self._buffered: Counter[str] = Counter()
        self.count = 0
        self.buffered = 0

    def enter(self, key: str, sock: socket.socket) -> Account | None:
        """Count a connection. Above a bound the key's own least recently used ends; None if it has none."""
        with self._lock:
            mine = self._of_key.get(key, ())
            if len(mine) >= CONNECTIONS_OF_ONE_MAX or self.count >= CONNECTIONS_MAX:
                if not mine:
                    return None
                self._end(min(mine, key=attrgetter("used_at")))
            account = Account(self, key, sock)
            self._of_key.setdefault(key, set()).add(account)
            self.count += 1
            return account

    def grow(self, account: Account, nbytes: int) -> bool:
        """Count more or fewer bytes; see ``Account.grow``."""
        with self._lock:
            if account.ended:
                return False
            self._add(account, nbytes)
            while self._buffered[account.key] > BUFFERED_OF_ONE_MAX:
                self._end(max(self._of_key[account.key], key=attrgetter("buffered")))
            while self.buffered > BUFFERED_BYTES_MAX:
                most = max(self._buffered, key=self._buffered.__getitem__)
                self._end(max(self._of_key[most], key=attrgetter("buffered")))
            return not account.ended

    def leave(self, account: Account) -> None:
        """Forget a connection."""
        with self._lock:
            if not account.ended:
                self._forget(account)

    def _add(self, account: Account, nbytes: int) -> None:
        account.buffered += nbytes
        self._buffered[account.key] += nbytes
        self.buffered += nbytes

    def _end(self, account: Account) -> None:
        self._forget(account)
        with suppress(OSError):  # the method of SSLSocket would touch what another thread uses
            socket.socket.shutdown(account.sock, socket.SHUT_RDWR)

    def _forget(self, account: Account) -> None:
        account.ended = True
        self._add(account, -account.buffered)
        self.count -= 1
        mine = self._of_key[account.key]
        mine.remove(account)
        if not mine:
            del self._of_key[account.key], self._buffered[account.key]


class Entrant(NamedTuple):
    """A reader that is in: it has proven its pass, and speaks TLS if it must."""

    stream: Stream
    who: ReaderId
    account: Account


@dataclass(slots=True, eq=False)
class _Place:
    """A connection that is opening."""

    sock: socket.socket
    descriptor: int
    since: float
    step: "Callable[[_Place], bool]"
    nonce: bytes
    received: bytearray = field(default_factory=bytearray)
    hello: ReaderHello | None = None  # whose proof is right
    who: ReaderId | None = None
    account: Account | None = None
    welcome: bytes = b""


class Access:
    """Accept readers on one listener, and pass on those that are in.

    Args:
        settings: where to listen, and whether to encrypt.
        serving: which readers may get in.
        identity: our certificate; None without encryption.
        admit: takes a reader that is in, with nothing of its requests received. Called on the thread of this object.

    Attributes:
        endpoint: our address for readers, ``tcp://HOST:PORT``.
        accounts: what the readers that are in use.

    Raises:
        TransportUnavailable: the address cannot be bound.
    """

    def __init__(
        self,
        settings: TcpSettings,
        serving: Serving,
        identity: TlsIdentity | None,
        admit: Callable[[Entrant], None],
    ) -> None:
        self._serving = serving
        self._identity = identity
        self._admit = admit
        self._listener = _listen(settings.bind)
        host, port = host_and_port(settings.advertise or settings.bind)
        self.endpoint = f"tcp://{host}:{port or self._listener.getsockname()[1]}"
        self.accounts = Accounts()
        self._places: dict[int, _Place] = {}  # those that were accepted first come first
        self._places_max = max(1, min(PLACES_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._accepted = Bucket(ACCEPTED_PER_S, 0.0, ACCEPTED_PER_S)
        self._opened: defaultdict[str, Bucket] = defaultdict(lambda: Bucket(OPENED_PER_S, 0.0, OPENED_AT_ONCE))
        self._accepts_from = 0.0  # while the listener is not watched
        self._spoke_at = -_SPOKEN_EVERY_S
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._epoll.register(self._listener, select.EPOLLIN)
        self._listens, self._closing = True, False
        self._thread = threading.Thread(target=self._run, name="kvflow-tcp-access", daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and close what is opening; who is in stays. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if self._thread.ident is not None:
            os.eventfd_write(self._bell, 1)
            self._thread.join()
        for place in [*self._places.values()]:
            self._drop(place)
        self._listener.close()
        self._epoll.close()
        os.close(self._bell)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})  # OpenSSL writes without MSG_NOSIGNAL
        tidied_at = 0.0
        while not self._closing:
            idle = self._listens and not self._places
            for descriptor, _ in self._epoll.poll(None if idle else _TICK_S):
                if descriptor == self._listener.fileno():
                    self._accept(time.monotonic())
                elif place := self._places.get(descriptor):
                    self._go_on(place)
            now = time.monotonic()
            if now - tidied_at >= _TICK_S:
                tidied_at = now
                self._end_overdue(now)
            if not self._listens and now >= self._accepts_from:
                self._epoll.register(self._listener, select.EPOLLIN)
                self._listens = True

    def _end_overdue(self, now: float) -> None:
        for place in [*self._places.values()]:
            if now - place.since > (STRANGER_S_MAX if place.hello is None else OPENING_S_MAX):
                self._drop(place)

    def _accept(self, now: float) -> None:
        """Accept while there are places; then newcomers wait in the backlog."""
        try:
            for _ in range(_ACCEPTED_AT_ONCE):
                if not self._has_place(now) or not self._accepted.take(1, now):
                    self._accepts_from = now + _TICK_S
                    break
                sock, _ = self._listener.accept()
                self._greet(sock, now)
            else:
                return
        except BlockingIOError:
            return
        except OSError as error:  # usually too many open files; to accept again at once would only spin
            self._complain(f"cannot accept a TCP connection: {error}")
            self._accepts_from = now + _SPOKEN_EVERY_S
        self._epoll.unregister(self._listener)
        self._listens = False

    def _has_place(self, now: float) -> bool:
        """Return whether a newcomer has a place; end the oldest stranger for it if that is not young."""
        if len(self._places) < self._places_max:
            return True
        oldest = next((each for each in self._places.values() if each.hello is None), None)
        if oldest is None or now - oldest.since < YOUNG_S_MAX:
            return False
        self._drop(oldest)
        return True

    def _greet(self, sock: socket.socket, now: float) -> None:
        place = _Place(sock, sock.fileno(), now, self._prove, secrets.token_bytes(opening.NONCE_BYTES))
        try:
            prepare_socket(sock)
            say(sock, opening.MAGIC + place.nonce)
            self._epoll.register(sock, opening.EDGES)
        except (OSError, ChannelClosed):  # it has ended already
            close_socket(sock, reset=True)
            return
        self._places[place.descriptor] = place

    def _go_on(self, place: _Place) -> None:
        try:
            while place.step(place):
                pass
        except (OSError, ChannelClosed, msgspec.MsgspecError, UnicodeDecodeError):
            self._drop(place)
        except _Unproven as error:
            self._complain(f"refused a reader over TCP: {error}")
            with suppress(OSError):
                say(place.sock, opening.REJECTION)
                place.sock.recv(opening.READER_BYTES_MAX)  # otherwise the close would be a reset, which may overtake it
            self._drop(place, reset=False)
        except Exception:  # one stranger must not keep others out
            _logger.exception("kvflow.reads: opening a TCP connection failed; it is closed")
            self._drop(place)

    # Each step returns whether the next one can begin.

    def _prove(self, place: _Place) -> bool:
        """Check that it has a pass; nothing else of what it says has been looked at."""
        if not fill(place.sock, place.received, HELLO_BYTES):
            return False
        hello = opening.decode_hello(place.received)
        place.received.clear()
        pass_ = pass_of_digest(self._serving.pass_key, hello.digest)
        certificate = b"" if self._identity is None else self._identity.certificate
        nonces = (place.nonce, hello.nonce)
        if not hmac.compare_digest(hello.proof, proof_of(pass_, "reader", nonces, certificate)):
            raise _Unproven("it has no valid pass")
        if hello.nbytes > opening.READER_BYTES_MAX:
            raise ChannelClosed(f"its identity has {hello.nbytes} bytes")
        place.hello = hello
        place.welcome = proof_of(pass_, "exporter", nonces, certificate)
        place.step = self._identify
        return True

    def _identify(self, place: _Place) -> bool:
        """Look at who it is, and count it. Begin to encrypt."""
        assert place.hello is not None
        if not fill(place.sock, place.received, place.hello.nbytes):
            return False
        if hashlib.sha256(place.received).digest() != place.hello.digest:
            raise _Unproven("its identity is not that of its pass")
        who = place.who = _decoder.decode(place.received)
        if not self._serving.admits(who.public_key) or bool(who.certificate) != (self._identity is not None):
            raise _Unproven(f"the key of {quoted(str(who))} is not allowed, or it has no certificate")
        key = who.public_key if self._serving.keys_differ else f"{who.public_key} {who}"
        if self._opened[key].take(1, time.monotonic()):
            place.account = self.accounts.enter(key, place.sock)
        if len(self._opened) > CONNECTIONS_MAX:  # readers that restart have new keys
            del self._opened[next(iter(self._opened))]
        if place.account is None:
            raise ChannelClosed("its key has too many connections, or opens too many in a second")
        place.step = self._finish
        if self._identity is not None:
            context = self._identity.context(who.certificate, server=True)
            place.sock = context.wrap_socket(place.sock, server_side=True, do_handshake_on_connect=False)
            place.account.sock = place.sock
            place.step = self._encrypt
        return True

    def _encrypt(self, place: _Place) -> bool:
        assert place.who is not None
        assert isinstance(place.sock, ssl.SSLSocket)
        if shake(place.sock, place.who.certificate):
            return False
        place.step = self._finish
        return True

    def _finish(self, place: _Place) -> bool:
        """Let it in."""
        assert place.who is not None
        assert place.account is not None
        if place.account.ended:
            raise ChannelClosed("its key has too many connections")
        say(place.sock, place.welcome)
        self._leave(place)
        stream = TlsStream(place.sock) if isinstance(place.sock, ssl.SSLSocket) else PlainStream(place.sock)
        self._admit(Entrant(stream, place.who, place.account))
        return False

    def _leave(self, place: _Place) -> None:
        """Give a connection away."""
        del self._places[place.descriptor]
        self._epoll.unregister(place.descriptor)

    def _drop(self, place: _Place, *, reset: bool = True) -> None:
        self._places.pop(place.descriptor, None)
        if place.account is not None:
            place.account.leave()
        close_socket(place.sock, reset=reset)

    def _complain(self, complaint: str) -> None:
        now = time.monotonic()
        if now - self._spoke_at >= _SPOKEN_EVERY_S:  # many strangers must not write many log lines
            self._spoke_at = now
            _logger.warning("kvflow.reads: %s", complaint)


class _Unproven(Exception):
    """Who dials has not proven that it may."""


_decoder = msgspec.msgpack.Decoder(ReaderId)


def _listen(endpoint: str) -> socket.socket:
    host, port = host_and_port(endpoint)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            "" if host == "*" else host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise TransportUnavailable(
            f"the TCP data plane cannot listen on {endpoint}: {error.strerror or error}",
            remedy="Set tcp_bind to an address of this host and a free port.",
        ) from error
    return listener
