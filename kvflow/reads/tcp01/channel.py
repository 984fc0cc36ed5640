"""Byte channels over one connected socket: non-blocking, vectored, plain or encrypted.

Thread: one at a time for each channel. Wait with a level-triggered epoll.

**TLS without certificates.** ``TlsChannel`` speaks TLS 1.2 with anonymous ephemeral Diffie-Hellman over ffdhe3072 (RFC
7919) and AES-256-GCM. Each connection has its own keys, and no file holds them: a secret that leaks later does not
decrypt recorded traffic (forward secrecy). But the handshake does not authenticate the other end. The data plane must
do so: each side sends an HMAC, keyed with a secret that only the two know, over ``binding()`` and its own role.

``binding()`` is a hash of every byte that the client and the server sent until the handshake ended, and of TLS's own
``tls-unique`` (RFC 5929). Each end computes it from what it saw. A man in the middle has two choices. If he forwards
the handshake unchanged, the ends use the server's group and two Diffie-Hellman shares whose secrets he does not have.
If he changes a byte, for example to replace a share by his own, the ends have different bindings, and each refuses the
HMAC of the other. TLS 1.3 and RFC 7627 bind keys to a hash of the handshake for the same reason.
``tls-unique`` alone is too weak: it has 12 bytes, and a man in the middle who chooses the group of one end can search
for equal values on both sides in 2**48 trials. Two exceptions are excluded: a resumed session has no Diffie-Hellman
shares, so it is refused; a renegotiation is not hashed, so it is disabled.

The handshake takes a CPU about 13 ms at the client and 7 ms at the server. TLS 1.3 would need a certificate, which the
standard library cannot make; its exporter (RFC 9266) is not in Python 3.11.
"""

import contextlib
import errno
import hashlib
import itertools
import socket
import ssl
import struct
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar, cast

from kvflow.errors import ConfigInvalid
from kvflow.reads.tcp.stream import ChannelClosed

IOV_MAX = 1024  # most buffers of one system call: Linux, <linux/uio.h> UIO_MAXIOV
RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, no seconds: close() sends RST instead of an orderly end
# The kernel has no memory now; the same call works later.
SHORTAGES = frozenset({errno.ENOBUFS, errno.ENOMEM})

CIPHER = "ADH-AES256-GCM-SHA384:@SECLEVEL=0"  # anonymous, which OpenSSL calls insecure; see ``binding``
# A normal handshake has 1,494 bytes both ways; OpenSSL alone would take 128 KiB for one message.
HANDSHAKE_BYTES_MAX = 16 << 10
RECORD_HEADER_BYTES = 5  # type, version (2 bytes), length (2 bytes): RFC 5246, 6.2.1
RECORD_BYTES_MAX = (1 << 14) + 2048  # RFC 5246, 6.2.3
RECORD_TYPES = frozenset({20, 21, 22})  # change of cipher, alert, handshake: what may come before the handshake ends
# Bytes that are encrypted or received at a time: many per system call, and few enough for a CPU cache.
PART_BYTES = 256 << 10
PARTS_MAX = 8  # per call, so that one busy connection does not keep its thread from the others
Bytes = TypeVar("Bytes", memoryview, memoryview | bytes)


class ByteStream(Protocol):
    """A stream of bytes in both directions. No call blocks."""

    def fileno(self) -> int:
        """The socket's descriptor, for epoll; -1 after ``close``."""

    def handshake(self) -> bool:
        """Continue the handshake. Return True when it is done. Raises: ChannelClosed."""

    def receive(self, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers in order with available bytes, and return their number. 0: nothing yet, or no room.

        Buffers after the first 1,024 may stay unchanged.

        Raises:
            ChannelClosed: also at the end of the stream, after its last byte was returned.
        """

    def send(self, buffers: Sequence[memoryview | bytes]) -> int:
        """Take bytes from the buffers in order, and return their number; 0: no room now.

        They are copied before the return.

        Raises:
            ChannelClosed: the other side takes no bytes. What it sent before may still be received.
        """

    @property
    def wants_write(self) -> bool:
        """Whether bytes that were taken wait for room in the socket: call ``send`` or ``handshake`` once there is."""

    @property
    def pending(self) -> bool:
        """Whether ``receive`` may have bytes, or the end, that epoll does not report. Call it before you wait."""

    def await_bytes(self, nbytes: int) -> None:
        """Set how many bytes are worth a wake-up. It is a hint; 1 wakes for any."""

    def binding(self) -> bytes:
        """A value that only the two ends of this connection share; empty for a plain one."""

    def close(self, *, reset: bool = False) -> None:
        """Close the socket; with ``reset``, by RST. Unsent bytes (``wants_write``) are lost.

        Idempotent, never raises.
        """


class PlainChannel:
    """A channel without encryption: one system call per call, and no copy except the kernel's. It owns the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._awaited = 1

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    def handshake(self) -> bool:
        """There is no handshake."""
        return True

    def receive(self, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers in order, by one system call."""
        nbytes = receive_some(self._sock, buffers[:IOV_MAX])
        if nbytes == 0 and (filled := _with_bytes(buffers)):  # empty buffers read like the end of the stream
            nbytes = receive_some(self._sock, filled)
            if nbytes == 0:
                raise ChannelClosed("the other side has closed the connection")
        return max(nbytes, 0)

    def send(self, buffers: Sequence[memoryview | bytes]) -> int:
        """Take bytes of the buffers in order, by one system call."""
        nbytes = send_some(self._sock, buffers[:IOV_MAX])
        if nbytes == 0 and (filled := _with_bytes(buffers)):
            nbytes = send_some(self._sock, filled)
        return max(nbytes, 0)

    @property
    def wants_write(self) -> bool:
        """Nothing waits here: the kernel has all bytes that were taken."""
        return False

    @property
    def pending(self) -> bool:
        """Nothing waits here: epoll reports everything."""
        return False

    def await_bytes(self, nbytes: int) -> None:
        """Make epoll report the socket when it has this many bytes, or at its end."""
        if nbytes != self._awaited:
            self._awaited = nbytes
            with contextlib.suppress(OSError):  # it has ended; epoll reports that in any case
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def binding(self) -> bytes:
        """Empty: an attacker in the middle can act as either end."""
        return b""

    def close(self, *, reset: bool = False) -> None:
        """Close the socket."""
        close_socket(self._sock, reset=reset)


class TlsChannel:
    """A channel with TLS, which owns the socket. The module says what ``binding`` proves, and what the caller must do.

    This class reads and writes the socket, and TLS works on memory. So no call blocks or raises SIGPIPE, one system
    call moves many records, and bytes that ``send`` took are not passed again.

    Raises:
        ConfigInvalid: the local OpenSSL does not support it.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()  # encrypted bytes
        self._tls = _context().wrap_bio(self._incoming, self._outgoing)
        self._unsent = memoryview(b"")  # encrypted
        self._scratch = memoryview(bytearray(PART_BYTES))
        self._record = bytearray()  # of the handshake: the one that is being received
        self._handshake_bytes = 0
        self._sent, self._received = hashlib.sha256(), hashlib.sha256()  # of the handshake
        self._binding = b""  # set: the handshake is done
        self._drained = True  # TLS has said that it has no more bytes for us

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    def handshake(self) -> bool:
        """Continue TLS's handshake."""
        if self._binding:
            return True
        while not self._advance():
            if not self._receive_record():
                return False
        return True

    def receive(self, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers in order with decrypted bytes. Receive and decrypt more while there is room."""
        if not self.handshake():
            return 0
        nbytes = parts = 0
        try:
            for buffer in buffers:
                view = buffer
                while len(view):
                    if decrypted := self._decrypt(view):
                        view = view[decrypted:]
                        nbytes += decrypted
                    elif parts == PARTS_MAX or not self._receive_part():
                        return nbytes
                    else:
                        parts += 1
        except ChannelClosed:
            if nbytes == 0:  # otherwise the next call finds the end again
                raise
        return nbytes

    def send(self, buffers: Sequence[memoryview | bytes]) -> int:
        """Encrypt bytes of the buffers in order, as long as the socket takes them."""
        if not self.handshake():
            return 0
        nbytes = 0
        parts = itertools.islice(_parts(buffers), PARTS_MAX)
        while self._flush() and (part := next(parts, None)) is not None:
            try:
                nbytes += self._tls.write(part)
            except ssl.SSLError as error:
                raise _failed(error) from error
            self._unsent = memoryview(self._outgoing.read())
        return nbytes

    @property
    def wants_write(self) -> bool:
        """Whether encrypted bytes wait for room."""
        return len(self._unsent) > 0

    @property
    def pending(self) -> bool:
        """Whether encrypted or decrypted bytes, or the end, wait here."""
        return not self._drained

    def await_bytes(self, nbytes: int) -> None:
        """No effect: a record is decrypted as a whole, and the other side chooses its length."""

    def binding(self) -> bytes:
        """Return the hash that both ends compute, 32 bytes. Call it only after the handshake."""
        assert self._binding, "there is no binding before the handshake is done"
        return self._binding

    def close(self, *, reset: bool = False) -> None:
        """Close the socket. Without ``reset``, send TLS's alert first if there is room."""
        if self._binding and not reset and self._sock.fileno() >= 0:
            with contextlib.suppress(ssl.SSLError, ChannelClosed):
                if self._flush():
                    with contextlib.suppress(ssl.SSLWantReadError):  # we do not need the other side's answer
                        self._tls.unwrap()
                    self._unsent = memoryview(self._outgoing.read())
                    self._flush()
        close_socket(self._sock, reset=reset)

    def _advance(self) -> bool:
        """Let TLS process what it got, and send its output. Return True when the handshake is done."""
        done = True
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            done = False
        except ssl.SSLError as error:
            self._unsent = memoryview(self._outgoing.read())  # the alert, which tells the other side why
            with contextlib.suppress(ChannelClosed):
                self._flush()
            raise _failed(error) from error
        said = self._outgoing.read()
        self._sent.update(said)
        self._unsent = memoryview(bytes(self._unsent) + said)
        self._flush()
        if done:
            unique = self._tls.get_channel_binding("tls-unique")
            if self._tls.session_reused or not unique:
                raise ChannelClosed("the other side resumed a TLS session; kvflow requires a full handshake")
            ends = (self._sent, self._received)
            self._binding = hashlib.sha256(b"".join([unique, *(end.digest() for end in ends)])).digest()
        return done

    def _receive_record(self) -> bool:
        """Pass exactly one handshake record to TLS: both ends hash the same bytes. False: it has not arrived yet."""
        record = self._record
        while (missing := _missing(record)) > 0:
            nbytes = receive_some(self._sock, [self._scratch[:missing]])
            if nbytes < 0:
                return False
            if nbytes == 0:
                raise ChannelClosed("the other side has closed the connection during the TLS handshake")
            record += self._scratch[:nbytes]
        self._handshake_bytes += len(record)
        if self._handshake_bytes > HANDSHAKE_BYTES_MAX:
            raise ChannelClosed(f"the other side's TLS handshake has more than {HANDSHAKE_BYTES_MAX} bytes")
        self._received.update(record)
        self._incoming.write(record)
        record.clear()
        return True

    def _receive_part(self) -> bool:
        """Pass available bytes of the socket to TLS, at most one part. Return False if there are none."""
        nbytes = receive_some(self._sock, [self._scratch])
        if nbytes == 0:
            raise ChannelClosed("the connection has ended without close_notify: the other side died, or it was cut")
        if nbytes > 0:
            self._incoming.write(self._scratch[:nbytes])
        return nbytes > 0

    def _decrypt(self, view: memoryview) -> int:
        """Decrypt into ``view``, at most one record; 0: TLS needs more bytes."""
        self._drained = False
        try:
            nbytes = cast("int", self._tls.read(len(view), view))  # typeshed knows the call without a buffer only
        except ssl.SSLWantReadError:
            self._drained = True
            return 0
        except ssl.SSLError as error:
            raise _failed(error) from error
        if nbytes == 0:
            raise ChannelClosed("the other side has closed the connection")
        return nbytes

    def _flush(self) -> bool:
        """Send waiting encrypted bytes. Return True if none is left."""
        while len(self._unsent):
            nbytes = send_some(self._sock, [self._unsent])
            if nbytes < 0:
                return False
            self._unsent = self._unsent[nbytes:]
        return True


def receive_some(sock: socket.socket, buffers: Sequence[memoryview]) -> int:
    """Receive into at most ``IOV_MAX`` buffers. Return the number of bytes, 0 at the end, -1 if there are none yet."""
    try:
        return sock.recvmsg_into(buffers)[0]
    except OSError as error:
        return _would_block(error)


def send_some(sock: socket.socket, buffers: Sequence[memoryview | bytes]) -> int:
    """Send from at most ``IOV_MAX`` buffers. Return the number of bytes, or -1 if there is no room now."""
    try:
        # Python ignores SIGPIPE, but the process that embeds us may have it again.
        return sock.sendmsg(buffers, (), socket.MSG_NOSIGNAL)
    except OSError as error:
        return _would_block(error)


def close_socket(sock: socket.socket, *, reset: bool) -> None:
    """Close a socket in any state."""
    with contextlib.suppress(OSError):
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    with contextlib.suppress(OSError):  # close() reports ECONNRESET, and closes all the same
        sock.close()


def _would_block(error: OSError) -> int:
    if isinstance(error, BlockingIOError) or error.errno in SHORTAGES:
        return -1
    match error.errno:
        case errno.EBADF:
            text = "this side has closed the connection"
        case errno.ECONNRESET:
            text = "the other side has reset the connection"
        case errno.EPIPE:
            text = "the other side has closed the connection"
        case errno.ETIMEDOUT:
            text = "the other side does not answer"
        case _:
            text = f"the connection is broken: {error.strerror or error}"
    raise ChannelClosed(text) from error


def _with_bytes(buffers: Sequence[Bytes]) -> list[Bytes]:
    """Return the first ``IOV_MAX`` buffers that are not empty."""
    return list(itertools.islice((buffer for buffer in buffers if len(buffer)), IOV_MAX))


def _parts(buffers: Sequence[memoryview | bytes]) -> Iterator[memoryview | bytes]:
    """Cut large buffers into parts, and join small ones, because each part takes a call of OpenSSL and a record."""
    joined: list[memoryview] = []
    room = PART_BYTES
    for buffer in buffers:
        view = memoryview(buffer)
        while view:
            joined.append(view[:room])
            view = view[room:]
            room -= len(joined[-1])
            if room == 0:
                yield joined[0] if len(joined) == 1 else b"".join(joined)
                joined, room = [], PART_BYTES
    if joined:
        yield joined[0] if len(joined) == 1 else b"".join(joined)


def _missing(record: bytearray) -> int:
    """Return how many bytes the record's header lacks, or then the record. Raises: ChannelClosed."""
    if len(record) < RECORD_HEADER_BYTES:
        return RECORD_HEADER_BYTES - len(record)
    nbytes = int.from_bytes(record[3:RECORD_HEADER_BYTES], "big")
    if record[0] not in RECORD_TYPES or record[1] != 3 or nbytes > RECORD_BYTES_MAX:
        raise ChannelClosed("the other side does not speak TLS: is tcp_encryption the same on both sides?")
    return RECORD_HEADER_BYTES + nbytes - len(record)


def _failed(error: ssl.SSLError) -> ChannelClosed:
    return ChannelClosed(f"TLS failed: {(error.reason or str(error)).replace('_', ' ').lower()}")


def _context() -> ssl.SSLContext:
    """Return a new context per connection, so that no session outlives it. It takes 0.2 ms. Raises: ConfigInvalid."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # there is none
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
        context.set_ciphers(CIPHER)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise _unable(str(error)) from error
    return context


def _unable(reason: str) -> ConfigInvalid:
    return ConfigInvalid(
        f'tcp_encryption = "tls": {ssl.OPENSSL_VERSION} cannot do {CIPHER.partition(":")[0]} with TLS 1.2: {reason}',
        remedy='Use a Python whose ssl module is built with OpenSSL 3, or set tcp_encryption to "off".',
    )
