"""How a connection to a producer of the release before opens, from the reader's side.

``pass`` is the secret that the producer gave this reader over the control channel::

    reader                                    exporter
                      <-  GREETING            magic, nonce
    HELLO         ->                          magic, nonce, public key, identity, proof
                      <-  WELCOME             a proof of its own, or zeros: the reader is not let in

Both proofs are HMACs with the pass over both nonces and, if the connection is encrypted, over its unique binding. So a
proof cannot be relayed to another worker or by an attacker in the middle.

**TLS without certificates.** ``OldTlsStream`` speaks TLS 1.2 with anonymous ephemeral Diffie-Hellman over ffdhe3072
(RFC 7919) and AES-256-GCM. Each connection has its own keys, and no file holds them: a secret that leaks later does not
decrypt recorded traffic (forward secrecy). But the handshake does not authenticate the other end. The proofs do so:
they cover the *binding*, a hash of every byte that the client and the server sent until the handshake ended, and of
TLS's own ``tls-unique`` (RFC 5929). Each end computes it from what it saw. A man in the middle has two choices. If he
forwards the handshake unchanged, the ends use the server's group and two Diffie-Hellman shares whose secrets he does
not have. If he changes a byte, for example to replace a share by his own, the ends have different bindings, and each
refuses the proof of the other. TLS 1.3 and RFC 7627 bind keys to a hash of the handshake for the same reason.
``tls-unique`` alone is too weak: it has 12 bytes, and a man in the middle who chooses the group of one end can search
for equal values on both sides in 2**48 trials. Two exceptions are excluded: a resumed session has no Diffie-Hellman
shares, so it is refused; a renegotiation is not hashed, so it is disabled.
"""

import ctypes
import hashlib
import hmac
import secrets
import socket
import ssl
import struct
from collections.abc import Generator
from contextlib import suppress
from functools import partial
from typing import cast

from kvflow.ids import Credentials
from kvflow.reads.tcp.opening import Introduction, Rejected, filled, say
from kvflow.reads.tcp.stream import ByteRows, ChannelClosed, PlainStream, Stream

MAGIC = b"kvftcp01"
NONCE_BYTES = 32
PROOF_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES

_HELLO = struct.Struct(f"<{len(MAGIC)}s{NONCE_BYTES}s32s16sIH{PROOF_BYTES}s")
HELLO_BYTES = _HELLO.size
"""The fixed part of a hello; the engine's name follows."""

CIPHER = "ADH-AES256-GCM-SHA384:@SECLEVEL=0"  # anonymous, which OpenSSL calls insecure; see above
# A normal handshake has 1,494 bytes both ways; OpenSSL alone would take 128 KiB for one message.
HANDSHAKE_BYTES_MAX = 16 << 10
RECORD_HEADER_BYTES = 5  # type, version (2 bytes), length (2 bytes): RFC 5246, 6.2.1
RECORD_BYTES_MAX = (1 << 14) + 2048  # RFC 5246, 6.2.3
RECORD_TYPES = frozenset({20, 21, 22})  # change of cipher, alert, handshake: what may come before the handshake ends
PART_BYTES = 256 << 10  # encrypted or received at a time: many per system call, and few enough for a CPU cache
_ROWS_MAX = 64  # that one call fills


def introduction(who: Credentials, *, encrypted: bool) -> Introduction:
    """Return the reader's side of an opening. ``who``: what this reader presents."""
    return partial(_introduce, who, encrypted)


def proof_of(who: Credentials, role: str, nonces: tuple[bytes, bytes], binding: bytes) -> bytes:
    """Return the proof of ``reader`` or ``exporter`` for one connection. The first nonce is the exporter's."""
    parts = (f"kvflow tcp {role}\0".encode(), *nonces, hashlib.sha256(binding).digest())
    return hmac.digest(who.pass_, b"".join(parts), "sha256")


def encode_hello(who: Credentials, nonces: tuple[bytes, bytes], binding: bytes) -> bytes:
    """Return a reader's hello."""
    engine, key, incarnation = who.engine_id.encode(), bytes.fromhex(who.public_key), bytes.fromhex(who.incarnation)
    proof = proof_of(who, "reader", nonces, binding)
    return _HELLO.pack(MAGIC, nonces[1], key, incarnation, who.rank, len(engine), proof) + engine


def _introduce(who: Credentials, encrypted: bool, sock: socket.socket) -> Generator[None, None, Stream]:
    stream: Stream = PlainStream(sock)
    binding = b""
    if encrypted:
        stream = tls = OldTlsStream(sock)
        binding = yield from tls.shake()
    greeting = yield from _heard(stream, GREETING_BYTES)
    if not greeting.startswith(MAGIC):
        raise Rejected(f"its greeting is {greeting[: len(MAGIC)]!r}, not {MAGIC!r}")
    nonces = greeting[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
    hello = encode_hello(who, nonces, binding)
    if stream.write(hello) != len(hello):
        raise ChannelClosed("the connection has no room for the first messages")
    welcome = yield from _heard(stream, PROOF_BYTES)
    if not hmac.compare_digest(welcome, proof_of(who, "exporter", nonces, binding)):
        raise Rejected("it has not proven that it is the producer" if any(welcome) else "it does not accept our pass")
    return stream


def _heard(stream: Stream, nbytes: int) -> Generator[None, None, bytes]:
    heard = bytearray(nbytes)
    done = 0
    while done < nbytes:
        count = stream.read(memoryview(heard)[done:])
        done += count
        if not count:
            yield
    return bytes(heard)


class OldTlsStream(Stream):
    """A stream with TLS, which works on memory: so this class can hash each byte of the handshake.

    Raises:
        Rejected: the local OpenSSL does not support it.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._plain = PlainStream(sock)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()  # encrypted bytes
        self._tls = _context().wrap_bio(self._incoming, self._outgoing)
        self._unsent = memoryview(b"")  # encrypted
        self._taken = 0  # bytes that these are
        self._scratch = memoryview(bytearray(PART_BYTES))

    def shake(self) -> Generator[None, None, bytes]:
        """Shake hands, and return the binding, 32 bytes. Yields while it must wait.

        Raises:
            Rejected: the other side does not speak this TLS.
            ChannelClosed: it has failed.
        """
        sent, received = hashlib.sha256(), hashlib.sha256()
        room = HANDSHAKE_BYTES_MAX
        done = False
        while not done:
            try:
                self._tls.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                with suppress(OSError, ChannelClosed):
                    say(self._sock, self._outgoing.read())  # the alert, which tells the other side why
                raise _failed(error) from error
            said = self._outgoing.read()
            say(self._sock, said)
            sent.update(said)
            if not done:
                record = yield from self._record()
                room -= len(record)
                if room < 0:
                    raise Rejected(f"the other side's TLS handshake has more than {HANDSHAKE_BYTES_MAX} bytes")
                received.update(record)
                self._incoming.write(record)
        unique = self._tls.get_channel_binding("tls-unique")
        if self._tls.session_reused or not unique:
            raise Rejected("the other side resumed a TLS session; kvflow requires a full handshake")
        return hashlib.sha256(unique + sent.digest() + received.digest()).digest()

    def _record(self) -> Generator[None, None, bytes]:
        """Receive exactly one record, so that both ends hash the same bytes."""
        header = yield from filled(self._sock, RECORD_HEADER_BYTES)
        nbytes = int.from_bytes(header[3:], "big")
        if header[0] not in RECORD_TYPES or header[1] != 3 or nbytes > RECORD_BYTES_MAX:
            raise Rejected("the other side does not speak TLS: is tcp_encryption the same on both sides?")
        return header + (yield from filled(self._sock, nbytes))

    def read(self, into: memoryview) -> int:
        if not self.pending:
            count = self._plain.read(self._scratch)
            if not count:
                return 0
            self._incoming.write(self._scratch[:count])
        self.pending = True
        try:
            count = cast("int", self._tls.read(len(into), into))  # typeshed knows the call without a buffer only
        except ssl.SSLWantReadError:
            self.pending = False
            return 0
        except ssl.SSLError as error:
            raise _failed(error) from error
        if not count:
            raise ChannelClosed("the other side has closed the connection")
        return count

    def receive(self, spans: ByteRows) -> int:
        done = 0
        for address, nbytes in spans.rows()[:_ROWS_MAX].tolist():
            row = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
            while row and (count := self.read(row)):
                row = row[count:]
                done += count
            if row:
                break
        spans.skip(done)
        return done

    def write(self, content: bytes | bytearray | memoryview) -> int:
        if not self._taken:
            try:
                self._taken = self._tls.write(memoryview(content)[:PART_BYTES])
            except ssl.SSLError as error:
                raise _failed(error) from error
            self._unsent = memoryview(self._outgoing.read())
        while self._unsent:
            count = self._plain.write(self._unsent)
            if not count:
                return 0
            self._unsent = self._unsent[count:]
        taken, self._taken = self._taken, 0
        return taken

    def send(self, spans: ByteRows) -> int:
        """A reader sends no memory."""
        raise NotImplementedError


def _failed(error: ssl.SSLError) -> ChannelClosed:
    return ChannelClosed(f"TLS failed: {(error.reason or str(error)).replace('_', ' ').lower()}")


def _context() -> ssl.SSLContext:
    """Return a new context per connection, so that no session outlives it. It takes 0.2 ms. Raises: Rejected."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # there is none
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
        context.set_ciphers(CIPHER)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        cipher = CIPHER.partition(":")[0]
        raise Rejected(f"{ssl.OPENSSL_VERSION} cannot do {cipher} with TLS 1.2: {error}") from error
    return context
