"""How a connection of the TCP data plane opens, and the reader's side of it.

``pass`` is the secret that the producer gave this reader over the control channel; it names the reader's certificate::

    reader                                    exporter
                      <-  GREETING            magic, nonce
    HELLO         ->                          nonce, digest of the reader, proof, length of what follows
    READER        ->                          ``ReaderId`` as MessagePack
    ...           <->                         if both encrypt: the handshake of TLS 1.3, each with its own certificate
                      <-  WELCOME             the exporter's proof; or zeros, before TLS: the reader is not let in

Proofs are HMACs with the pass over both nonces and the exporter's certificate. So they cannot be relayed to another
worker. An exporter looks at nothing else, and makes no keys, before the reader's proof is right. A reader is in when
the welcome has arrived, inside TLS if it encrypts.
"""

import errno
import hashlib
import hmac
import os
import secrets
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec

from handshake.rates import pause_s
from kvflow.ids import Credentials, ReaderId
from kvflow.reads.tcp.certificates import TlsIdentity, is_of
from kvflow.reads.tcp.stream import ChannelClosed, PlainStream, Stream, TlsStream, close_socket, prepare_socket
from kvflow.reads.tcp.wire import BadFrame

MAGIC = b"kvftcp02"
NONCE_BYTES = 32
PROOF_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
REJECTION = bytes(PROOF_BYTES)
READER_BYTES_MAX = 4 << 10
"""A name of 256 characters and a certificate have at most 2.2 KiB."""

_HELLO = struct.Struct(f"<{NONCE_BYTES}s32s{PROOF_BYTES}sH")
HELLO_BYTES = _HELLO.size

EDGES = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
"""What both sides watch: every call goes on until it would block."""

_ANOTHER = "the other side has another certificate than it has stated"
_REFUSED = "it does not accept our pass"
_BUSY = "it answers, but is too busy to let us in, or we have too many connections"
_PAUSE_S = 0.05  # after the first connection that has ended; doubled each time
_PAUSE_S_MAX = 0.5


class Rejected(ChannelClosed):
    """The other side does not accept our pass, or is not who it should be; dialing again would not help."""


class ReaderHello(NamedTuple):
    """What a reader says first: ``digest`` is the SHA-256 of its ``ReaderId``, which follows with ``nbytes`` bytes."""

    nonce: bytes
    digest: bytes
    proof: bytes
    nbytes: int


def decode_hello(frame: bytes | bytearray) -> ReaderHello:
    """Return a hello of ``HELLO_BYTES`` bytes."""
    return ReaderHello(*_HELLO.unpack(frame))


def proof_of(pass_: bytes, role: str, nonces: tuple[bytes, bytes], certificate: bytes) -> bytes:
    """Return the proof of ``reader`` or ``exporter``. The first nonce, and the certificate, are the exporter's."""
    parts = (b"kvftcp02 ", role.encode(), b"\0", *nonces, hashlib.sha256(certificate).digest())
    return hmac.digest(pass_, b"".join(parts), "sha256")


def shake(sock: ssl.SSLSocket, theirs: bytes) -> int:
    """Continue a TLS handshake. Return what to wait for, as epoll names it; 0: it is done.

    Raises:
        ChannelClosed: it has failed.
        Rejected: the other side has another certificate.
    """
    try:
        sock.do_handshake()
    except ssl.SSLWantReadError:
        return select.EPOLLIN
    except ssl.SSLWantWriteError:
        return select.EPOLLOUT
    except ssl.SSLCertVerificationError as error:
        raise Rejected(_ANOTHER) from error
    except OSError as error:
        reason = getattr(error, "reason", None) or str(error)
        raise ChannelClosed(f"TLS failed: {reason.replace('_', ' ').lower()}") from error
    if not is_of(sock, theirs):
        raise Rejected(_ANOTHER)
    return 0


Introduction = Callable[[socket.socket], Generator[bool | None, None, Stream]]
"""What a reader says over a socket that is connected: it yields while it must wait, and returns the open stream.

It yields True once, and then goes on at once, when the other side has said who it is.

If it raises, or is closed before, a socket that it has made of the given one is closed.
"""


def introduction(who: Credentials, identity: TlsIdentity | None) -> Introduction:
    """Return the reader's side of an opening.

    Args:
        who: what this reader presents, with the certificate that the producer has stated if both encrypt.
        identity: ours; None without encryption.

    Raises:
        Rejected: the producer has stated no valid certificate.
    """
    certificate = b"" if identity is None else identity.certificate
    reader = msgspec.msgpack.encode(ReaderId(who.public_key, who.engine_id, who.rank, who.incarnation, certificate))
    try:
        context = None if identity is None else identity.context(who.certificate, server=False)
    except ssl.SSLError as error:
        raise Rejected(f"the producer has stated a certificate that OpenSSL refuses: {error}") from error
    return partial(_introduce, who, reader, context)


def _introduce(
    who: Credentials, reader: bytes, context: ssl.SSLContext | None, sock: socket.socket
) -> Generator[bool | None, None, Stream]:
    greeting = yield from filled(sock, GREETING_BYTES)
    magic, theirs = greeting[: len(MAGIC)], greeting[len(MAGIC) :]
    if magic != MAGIC:
        raise BadFrame(f"its greeting is {magic!r}, and that of this release is {MAGIC!r}")
    yield True
    ours = secrets.token_bytes(NONCE_BYTES)
    proof, expected = (proof_of(who.pass_, role, (theirs, ours), who.certificate) for role in ("reader", "exporter"))
    say(sock, _HELLO.pack(ours, hashlib.sha256(reader).digest(), proof, len(reader)) + reader)
    if context is None:
        yield from _be_welcome(sock, expected)
        return PlainStream(sock)
    encrypted = context.wrap_socket(sock, do_handshake_on_connect=False)
    try:
        yield from _encrypt(encrypted, who.certificate)
        yield from _be_welcome(encrypted, expected)
    except BaseException:
        close_socket(encrypted, reset=True)
        raise
    return TlsStream(encrypted)


def _encrypt(sock: ssl.SSLSocket, theirs: bytes) -> Generator[None, None, None]:
    while True:
        with suppress(BlockingIOError):  # nothing yet; then our first flight goes out
            if socket.socket.recv(sock, 1, socket.MSG_PEEK) == REJECTION[:1]:  # no record of TLS begins with it
                raise Rejected(_REFUSED)
        if not shake(sock, theirs):
            return
        yield


def _be_welcome(sock: socket.socket, expected: bytes) -> Generator[None, None, None]:
    welcome = yield from filled(sock, PROOF_BYTES)
    if not hmac.compare_digest(welcome, expected):
        raise Rejected(_REFUSED if welcome == REJECTION else "it has not proven that it is the producer")


class Opening:
    """A connection that a reader opens. If it ends before the welcome, it is dialed again after a random pause.

    It has no thread and never blocks. Call ``advance`` when ``fileno`` is readable, and at ``due``.

    Args:
        place: numeric host, and port.
        introduce: what this reader says there.
        until: when to give up, on the monotonic clock.

    Attributes:
        due: when to call ``advance`` next, whatever happens.
        late: whether ``until`` has passed although the other side answers.
    """

    def __init__(self, place: tuple[str, int], introduce: Introduction, until: float) -> None:
        self._place = place
        self._introduce = introduce
        self._until = until
        self._epoll = select.epoll()
        self._failures = 0
        self._why = "the other side does not answer"
        self._attempt: Generator[bool | None, None, Stream] | None = None
        self._answers = False
        self.due = 0.0
        self.late = False

    def fileno(self) -> int:
        """The descriptor to watch, which stays the same."""
        return self._epoll.fileno()

    def advance(self) -> Stream | None:
        """Continue. Return the open stream, or None if it takes longer. Then, or after an error, close this object.

        Raises:
            Rejected: dialing again would not help.
            BadFrame: its greeting is that of another release, or of another program.
            ChannelClosed: nobody listens there, or ``until`` has passed.
        """
        self._epoll.poll(0)  # otherwise it would stay readable
        now = time.monotonic()
        if now >= self._until:
            self.late = self._answers
            raise ChannelClosed(f"it did not open in time: {_BUSY if self.late else self._why}")
        if self._attempt is None:
            if now < self.due:
                return None
            self._attempt, self.due = self._dial(), self._until
        try:
            if next(self._attempt):
                self._answers = True
                next(self._attempt)
        except StopIteration as opened:
            stream: Stream = opened.value
            return stream
        except Rejected:
            raise
        except ConnectionRefusedError as error:
            raise ChannelClosed("connecting failed: nobody listens there") from error
        except (OSError, ChannelClosed) as error:
            self._why = str(error)
            self._attempt = None
            rest_s = pause_s(self._failures, _PAUSE_S, _PAUSE_S_MAX, secrets.randbelow(1000) / 1000)
            self.due = min(self._until, now + rest_s)
            self._failures += 1
        return None

    def close(self) -> None:
        """Close what is not open yet. Idempotent."""
        if self._attempt is not None:
            self._attempt.close()
        self._epoll.close()

    def _dial(self) -> Generator[bool | None, None, Stream]:
        host, port = self._place
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            prepare_socket(sock)
            _require(sock.connect_ex((host, port)), but=errno.EINPROGRESS)
            self._epoll.register(sock, EDGES)
            while not _is_connected(sock):
                yield None
            return (yield from self._introduce(sock))
        except BaseException:
            close_socket(sock, reset=True)
            raise


def filled(sock: socket.socket, nbytes: int) -> Generator[None, None, bytes]:
    """Return the next bytes when they are there, and take no more; raises as ``fill``."""
    received = bytearray()
    while not fill(sock, received, nbytes):
        yield
    return bytes(received)


def fill(sock: socket.socket, received: bytearray, nbytes: int) -> bool:
    """Receive until there are this many bytes in all, and no more. False: they have not arrived yet.

    Raises:
        ChannelClosed, OSError: the connection has ended.
    """
    while len(received) < nbytes:
        try:
            part = sock.recv(nbytes - len(received))
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        if not part:
            raise ChannelClosed("the other side has closed the connection")
        received += part
    return True


def say(sock: socket.socket, message: bytes) -> None:
    """Send the few bytes of one side's turn, for which a new connection has room; raises as ``fill``."""
    sent = sock.send(message) if isinstance(sock, ssl.SSLSocket) else sock.send(message, socket.MSG_NOSIGNAL)
    if sent != len(message):
        raise ChannelClosed("the connection has no room for the first messages")


def _is_connected(sock: socket.socket) -> bool:
    _require(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def _require(failed: int, *, but: int = 0) -> None:
    if failed not in (0, but):
        raise OSError(failed, f"connecting failed: {os.strerror(failed)}")
