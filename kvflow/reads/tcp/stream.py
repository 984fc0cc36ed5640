"""A connection of the TCP plane as a stream of bytes, plain or with TLS. No call blocks.

Bytes come from memory and go to memory by address. One system call takes a table of addresses and lengths, so no object
is made for each of them. OpenSSL takes one buffer at a time; there, short rows meet in a buffer of one record.
"""

import ctypes
import errno
import os
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import numpy as np

from kvflow.ids import Int64s

ROWS_AT_ONCE = 1024
"""Most rows of one system call: IOV_MAX of Linux."""

RECORD_BYTES = 16 << 10
"""Most bytes of one TLS record."""

TURN_BYTES = 1 << 20
"""Bytes that OpenSSL moves in one call before others are served: 0.4 ms."""

SHORTAGES = {errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM}  # of room or of memory; epoll reports when it may go on

_Record = ctypes.c_char * RECORD_BYTES
_RESET = struct.pack("ii", 1, 0)
_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.sendmsg, _libc.recvmsg):
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    _call.restype = ctypes.c_ssize_t


class ChannelClosed(Exception):
    """The connection has ended. The text says why."""


class ByteRows:
    """Bytes of this process that are sent or filled in order. ``left``: how many bytes are left.

    Args:
        table: int64, shape (n, 2), C-contiguous: address and length, at least 1. It is changed in place.
        held: what must live as long as the bytes are used.
    """

    def __init__(self, table: Int64s, held: object = None) -> None:
        self._table = table
        self._held = held
        self._ends = table[:, 1].cumsum()
        self._done = self._at = 0
        self.left = int(self._ends[-1])

    def rows(self) -> Int64s:
        """Return the rows that are left, at most as many as one system call takes."""
        return self._table[self._at : self._at + ROWS_AT_ONCE]

    def skip(self, nbytes: int) -> None:
        """Go on behind the next bytes."""
        self.left -= nbytes
        self._done += nbytes
        if self.left:
            at = self._at = int(self._ends.searchsorted(self._done, "right"))
            row, left = self._table[at], int(self._ends[at]) - self._done
            row[0] += row[1] - left
            row[1] = left

    def cut(self, nbytes_max: int, after: Int64s | None = None) -> "ByteRows":
        """Take the next bytes, at most ``nbytes_max``, for one system call; ``after`` them a row if all are taken."""
        if not self._done and self.left <= nbytes_max and len(self._ends) <= ROWS_AT_ONCE - 1:  # as in a small read
            table, whole = self._table, self.left == nbytes_max
            self.left = 0
        else:
            first = self._at
            stop = int(self._ends.searchsorted(self._done + nbytes_max)) + 1
            stop = min(stop, first + ROWS_AT_ONCE - 1, len(self._ends))
            behind = int(self._ends[stop - 1]) - self._done
            whole = behind >= nbytes_max
            table = self._table[first:stop].copy()
            table[-1, 1] -= max(0, behind - nbytes_max)
            self.skip(min(behind, nbytes_max))
        if after is not None and whole:
            table = np.concatenate((table, after))
        return ByteRows(table, self._held)


def rows_of(buffer: bytearray | memoryview) -> ByteRows:
    """Return a writable buffer as rows, which keep it alive."""
    array = np.frombuffer(buffer, np.uint8)
    return ByteRows(np.array([(array.ctypes.data, array.nbytes)], np.int64), array)


class Stream(Protocol):
    """A non-blocking socket that it owns. A call that cannot go on returns 0; epoll says when. Raises: ChannelClosed.

    Attributes:
        pending: whether bytes may wait that epoll does not report: read until a call returns 0.
    """

    pending: bool = False
    _sock: socket.socket

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._sock.fileno()

    def read(self, into: memoryview) -> int:
        """Fill a buffer from the front, and return the number of bytes."""
        try:
            return self._sock.recv_into(into) or _ended()
        except OSError as error:
            return _would_block(error)

    def write(self, content: bytes | bytearray | memoryview) -> int:
        """Take bytes from the front, and return their number. After 0, the next call begins with the same bytes."""
        ...

    def receive(self, spans: ByteRows) -> int:
        """Fill the next bytes, skip them, and return their number."""
        ...

    def send(self, spans: ByteRows) -> int:
        """Take the next bytes, skip them, and return their number."""
        ...

    def await_bytes(self, nbytes: int) -> None:
        """Let epoll report the stream only when this many bytes are there, or at its end. Not all streams can."""
        return

    def close(self, *, reset: bool = False) -> None:
        """Close the socket. ``reset``: tell the other side at once, and drop what was not sent."""
        close_socket(self._sock, reset=reset)


class PlainStream(Stream):
    """A stream without encryption."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._message = np.zeros(7, np.int64)  # struct msghdr; fields 2 and 3 are the table and its rows
        self._at = self._message.ctypes.data
        self._awaited = 1

    def write(self, content: bytes | bytearray | memoryview) -> int:
        """Give bytes from the front to the socket."""
        try:
            # Python ignores SIGPIPE, but the process that embeds us may have it again.
            return self._sock.send(content, socket.MSG_NOSIGNAL)
        except OSError as error:
            return _would_block(error)

    def receive(self, spans: ByteRows) -> int:
        """Fill the rows with one system call, without a copy."""
        return self._move(_libc.recvmsg, spans)

    def send(self, spans: ByteRows) -> int:
        """Send the rows with one system call, without a copy."""
        return self._move(_libc.sendmsg, spans)

    def await_bytes(self, nbytes: int) -> None:
        """Set the socket's low-water mark, if it is another one."""
        if nbytes != self._awaited:
            self._awaited = nbytes
            with suppress(OSError):  # it has ended; epoll reports that in any case
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def _move(self, call: Callable[[int, int, int], int], spans: ByteRows) -> int:
        table = spans.rows()
        self._message[2], self._message[3] = table.ctypes.data, len(table)
        nbytes = call(self._sock.fileno(), self._at, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        if nbytes < 0:
            number = ctypes.get_errno()
            return _would_block(OSError(number, os.strerror(number)))
        spans.skip(nbytes or _ended())
        return nbytes


class TlsStream(Stream):
    """A stream over a TLS socket whose handshake is done. The other side chooses the length of records.

    OpenSSL reads and writes the socket, and keeps at most a record. It must be given the same bytes again after 0.
    """

    _sock: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)
        self._scratch = ctypes.create_string_buffer(RECORD_BYTES)

    @property
    def pending(self) -> bool:  # type: ignore[override]  # a property costs a call, which plain streams save
        """Whether OpenSSL keeps bytes of a record that were not read."""
        return self._sock.pending() > 0

    def write(self, content: bytes | bytearray | memoryview) -> int:
        """Encrypt at most one record from the front, and give it to the socket."""
        try:
            return self._sock.send(memoryview(content)[:RECORD_BYTES])
        except OSError as error:
            return _would_block(error)

    def receive(self, spans: ByteRows) -> int:
        """Decrypt into the rows, record by record, up to ``TURN_BYTES``."""
        done = 0
        try:
            for address, nbytes in spans.rows()[:64].tolist():
                taken = 0
                while taken < nbytes and done < TURN_BYTES:
                    filled = self._sock.recv_into(
                        _Record.from_address(address + taken), min(nbytes - taken, RECORD_BYTES)
                    )
                    if not filled:
                        _ended()
                    taken += filled
                    done += filled
        except (OSError, ChannelClosed) as error:
            if not done:  # otherwise the next call finds it again
                if isinstance(error, ChannelClosed):
                    raise
                return _would_block(error)
        spans.skip(done)
        return done

    def send(self, spans: ByteRows) -> int:
        """Encrypt the rows, up to ``TURN_BYTES``. Short rows are copied together, so that they share a record."""
        done = 0
        while spans.left and done < TURN_BYTES:
            address, nbytes = spans.rows()[0].tolist()
            taken = 0
            if nbytes < RECORD_BYTES:
                taken = self.write(self._gathered(spans))
            while nbytes - taken >= RECORD_BYTES:
                count = self.write(memoryview(_Record.from_address(address + taken)))
                taken += count
                if not count:
                    break
            spans.skip(taken)
            done += taken
            if not taken:
                break
        return done

    def _gathered(self, spans: ByteRows) -> memoryview:
        """Copy the next bytes, so that one record has many rows."""
        filled = 0
        for address, nbytes in spans.rows().tolist():
            count = min(nbytes, RECORD_BYTES - filled)
            ctypes.memmove(ctypes.addressof(self._scratch) + filled, address, count)
            filled += count
            if filled == RECORD_BYTES:
                break
        return memoryview(self._scratch)[:filled]


def prepare_socket(sock: socket.socket) -> None:
    """Set the socket options of both sides: non-blocking, no delay, and an error when the other host is gone."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def close_socket(sock: socket.socket, *, reset: bool) -> None:
    """Close a socket in any state."""
    with suppress(OSError):
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    with suppress(OSError):  # close() reports ECONNRESET, and closes all the same
        sock.close()


def _ended() -> int:
    raise ChannelClosed("the other side has closed the connection")


def _would_block(error: OSError) -> int:
    """Return 0 if the call may go on later. Raises: ChannelClosed."""
    if error.errno in SHORTAGES or isinstance(error, ssl.SSLWantReadError | ssl.SSLWantWriteError):
        return 0
    if isinstance(error, ssl.SSLError):
        if isinstance(error, ssl.SSLZeroReturnError | ssl.SSLEOFError):
            _ended()
        raise ChannelClosed(f"TLS failed: {(error.reason or str(error)).replace('_', ' ').lower()}") from error
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
