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
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from kvflow.ids import Credentials, ReaderId
from kvflow.reads.tcp.certificates import TlsIdentity, is_of
from kvflow.reads.tcp.stream import ChannelClosed, PlainStream, Stream, TlsStream, close_socket, prepare_socket

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


class Opening:
    """A connection that a reader opens. If it ends before the welcome, it is dialed again after a random pause.

    It has no thread and never blocks. Call ``advance`` when ``fileno`` is readable, and at ``due``.

    Args:
        place: numeric host, and port.
        who: what this reader presents, with the certificate that the producer has stated if both encrypt.
        identity: ours; None without encryption.
        until: when to give up, on the monotonic clock.

    Attributes:
        due: when to call ``advance`` next, whatever happens.

    Raises:
        Rejected: the producer has stated no valid certificate.
    """

    def __init__(self, place: tuple[str, int], who: Credentials, identity: TlsIdentity | None, until: float) -> None:
        certificate = b"" if identity is None else identity.certificate
        reader = ReaderId(who.public_key, who.engine_id, who.rank, who.incarnation, certificate)
        self._reader = msgspec.msgpack.encode(reader)
        try:
            self._context = None if identity is None else identity.context(who.certificate, server=False)
        except ssl.SSLError as error:
            raise Rejected(f"the producer has stated a certificate that OpenSSL refuses: {error}") from error
        self._place = place
        self._who = who
        self._until = until
        self._epoll = select.epoll()
        self._pause_s = _PAUSE_S
        self._why = "the other side does not answer"
        self._expected = b""  # the exporter's proof
        self._received = bytearray()
        self._sock: socket.socket | None = None
        self._stream: Stream | None = None
        self._step: Callable[[], bool] = self._dial
        self.due = 0.0

    def fileno(self) -> int:
        """The descriptor to watch, which stays the same."""
        return self._epoll.fileno()

    def advance(self) -> Stream | None:
        """Continue. Return the open stream, or None if it takes longer. Then, or after an error, close this object.

        Raises:
            Rejected: dialing again would not help.
            ChannelClosed: nobody listens there, or ``until`` has passed.
        """
        self._epoll.poll(0)  # otherwise it would stay readable
        now = time.monotonic()
        if now >= self._until:
            raise ChannelClosed(f"it did not open in time: {self._why}")
        if self._sock is None and now < self.due:
            return None
        try:
            while self._step():
                if self._stream is not None:
                    return self._stream
        except Rejected:
            raise
        except ConnectionRefusedError as error:
            raise ChannelClosed("connecting failed: nobody listens there") from error
        except (OSError, ChannelClosed) as error:
            self._why = str(error)
            self._drop()
            self.due = min(self._until, now + self._pause_s * (0.5 + secrets.randbelow(1000) / 1000))
            self._pause_s = min(2 * self._pause_s, _PAUSE_S_MAX)
        return None

    def close(self) -> None:
        """Close what is not open yet. Idempotent."""
        self._drop()
        self._epoll.close()

    # Each step returns whether the next one can begin.

    def _dial(self) -> bool:
        host, port = self._place
        self.due = self._until
        self._sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        prepare_socket(self._sock)
        _require(self._sock.connect_ex((host, port)), but=errno.EINPROGRESS)
        self._epoll.register(self._sock, EDGES)
        self._step = self._connect
        return True

    def _connect(self) -> bool:
        sock = self._connection
        _require(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        try:
            sock.getpeername()
        except OSError:
            return False
        self._step = self._greet
        return True

    def _greet(self) -> bool:
        sock, who = self._connection, self._who
        if not fill(sock, self._received, GREETING_BYTES):
            return False
        greeting = bytes(self._received)
        self._received.clear()
        magic, theirs = greeting[: len(MAGIC)], greeting[len(MAGIC) :]
        if magic != MAGIC:
            raise Rejected(f"its greeting is {magic!r}, not that of kvflow's TCP data plane")
        ours = secrets.token_bytes(NONCE_BYTES)
        proof, self._expected = (
            proof_of(who.pass_, role, (theirs, ours), who.certificate) for role in ("reader", "exporter")
        )
        digest = hashlib.sha256(self._reader).digest()
        say(sock, _HELLO.pack(ours, digest, proof, len(self._reader)) + self._reader)
        self._step = self._finish
        if self._context is not None:
            self._sock = self._context.wrap_socket(sock, do_handshake_on_connect=False)
            self._step = self._encrypt
        return True

    def _encrypt(self) -> bool:
        sock = self._connection
        assert isinstance(sock, ssl.SSLSocket)
        with suppress(BlockingIOError):  # nothing yet; then our first flight goes out
            if socket.socket.recv(sock, 1, socket.MSG_PEEK) == REJECTION[:1]:  # no record of TLS begins with it
                raise Rejected(_REFUSED)
        if shake(sock, self._who.certificate):
            return False
        self._step = self._finish
        return True

    def _finish(self) -> bool:
        sock = self._connection
        if not fill(sock, self._received, PROOF_BYTES):
            return False
        welcome = bytes(self._received)
        if not hmac.compare_digest(welcome, self._expected):
            raise Rejected(_REFUSED if welcome == REJECTION else "it has not proven that it is the producer")
        self._epoll.unregister(sock)
        self._stream = TlsStream(sock) if isinstance(sock, ssl.SSLSocket) else PlainStream(sock)
        self._sock = None
        return True

    @property
    def _connection(self) -> socket.socket:
        assert self._sock is not None, "only after _dial"
        return self._sock

    def _drop(self) -> None:
        if self._sock is not None:
            close_socket(self._sock, reset=True)
        self._sock = None
        self._received.clear()
        self._step = self._dial


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


def _require(failed: int, *, but: int = 0) -> None:
    if failed not in (0, but):
        raise OSError(failed, f"connecting failed: {os.strerror(failed)}")
