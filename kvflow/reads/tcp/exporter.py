"""The exporter of the TCP data plane: it serves reads of blocks that a lease holds.

Each thread serves several readers that ``Access`` has let in, with non-blocking sockets, so a hung reader delays no
other. A request waits in its buffer until the one before it is answered; meanwhile nothing more is received.

An epoch is compared before each piece and after the last byte was copied, and the answer ends with what that comparison
saw. A lease may end, and its blocks may be written, while the kernel copies a piece: the end of the answer tells the
reader not to use it. What is left of a promised piece is then zeros.
"""

import ctypes
import logging
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from kvflow.config import TcpSettings
from kvflow.errors import quoted
from kvflow.layout.component import Region
from kvflow.reads.bounds import OutOfBounds
from kvflow.reads.contract import DeviceMemory, Serving
from kvflow.reads.device import PORTION_BYTES, portions
from kvflow.reads.serving import LeasedBlocks, OtherTicket, order_memory
from kvflow.reads.staging import memory_at
from kvflow.reads.tcp import wire
from kvflow.reads.tcp.access import Access, Entrant
from kvflow.reads.tcp.certificates import TlsIdentity
from kvflow.reads.tcp.runs import Resolved, ServedGroup
from kvflow.reads.tcp.stream import ByteRows, ChannelClosed, rows_of

_logger = logging.getLogger(__name__)

STALLED_S_MAX = 120.0
"""How long a reader may take no byte of an answer: four times the budget of its pulls."""

HALF_S_MAX = 30.0
"""How long one request may take to arrive."""

COPIED_BYTES_MAX = 128 << 10
"""Answers of up to so many bytes are copied, so that one system call sends them with their epochs: 64 KiB take 6 us.
The buffer of one connection holds twice as many."""

_COPIED_ROWS_MAX = 128
_WORK_MAX = 4096  # runs, or units of 512 bytes in the cache, of one reader before other readers are served
_WORK_OF_ONE = 64  # the cost of each request besides them
_TICK_S = 1.0
_RECEIVED_MAX = 64 << 10
_SPOKEN_EVERY_S = 1.0
_LEASE_BYTES = 320  # memory of a lease that a reader has shown
_ZEROS = np.zeros(wire.PIECE_BYTES_MAX, np.uint8)


@dataclass(slots=True, eq=False)
class _Client:
    """One connection of a reader.

    Attributes:
        since: when it last took a byte of an answer, or began to send the request that is in ``buffer``.
        counted: bytes that its account has.
        macs: the lease that it has shown -> the MAC that it gave.
        said: what is sent next; then ``piece``, which lies in the cache if ``lease`` names a slot and epoch.
        answer: what follows, as it is asked for.
    """

    member: Entrant
    since: float
    counted: int = 0
    buffer: bytearray = field(default_factory=bytearray)
    macs: dict[tuple[int, int], bytes] = field(default_factory=dict)
    said: bytearray = field(default_factory=bytearray)
    piece: ByteRows | None = None
    lease: tuple[int, int] | None = None
    answer: Iterator[ByteRows | bytes] | None = None


class _Sender:
    """One thread that serves readers."""

    def __init__(self, serving: Serving, epochs: memoryview, number: int) -> None:
        self._serving = serving
        self._epochs = epochs
        self._groups = [ServedGroup(tracks) for tracks in serving.tracks]
        self._leased = LeasedBlocks(serving)
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._bell, select.EPOLLIN)
        self.clients: dict[int, _Client] = {}
        self._arriving: deque[Entrant] = deque()
        self._ready: deque[int] = deque()
        self._scratch = memoryview(bytearray(_RECEIVED_MAX))
        self._closing = False
        self._spoke_at = -_SPOKEN_EVERY_S
        self._thread = threading.Thread(target=self._run, name=f"kvflow-tcp-{number}", daemon=True)
        self._thread.start()

    @property
    def load(self) -> int:
        """How many readers it serves. Thread: any."""
        return len(self.clients) + len(self._arriving)

    def take(self, member: Entrant) -> None:
        """Serve a reader. Thread: any."""
        self._arriving.append(member)
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Close every connection, and end the thread. Then nothing reads the cache. Thread: any."""
        self._closing = True
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        self._epoll.close()
        os.close(self._bell)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})  # OpenSSL writes without MSG_NOSIGNAL
        looked_at = time.monotonic()
        while not self._closing:
            for descriptor, _ in self._epoll.poll(0 if self._ready else _TICK_S):
                if descriptor == self._bell:
                    self._welcome()
                elif descriptor not in self._ready:
                    self._ready.append(descriptor)
            for _ in range(len(self._ready)):
                self._serve(self._ready.popleft())
            now = time.monotonic()
            if now - looked_at >= _TICK_S:
                looked_at = now
                self._end_overdue(now)
        for descriptor in [*self.clients]:
            self._drop(descriptor)
        while self._arriving:
            _end(self._arriving.popleft())

    def _welcome(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while self._arriving:
            member = self._arriving.popleft()
            descriptor = member.stream.fileno()
            self.clients[descriptor] = _Client(member, time.monotonic())
            events = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
            try:
                self._epoll.register(descriptor, events)
            except OSError:  # its account was closed meanwhile
                self._drop(descriptor)
            else:
                self._ready.append(descriptor)

    def _serve(self, descriptor: int) -> None:
        """Process requests of one reader, and send a part of the answers."""
        client = self.clients.get(descriptor)
        if client is None:
            return
        try:
            again = self._advance(client)
            self._count(client)
        except ChannelClosed:
            self._drop(descriptor)
        except wire.BadFrame as error:
            self._complain(client, error)
            self._drop(descriptor)
        except Exception:  # one reader's request must not end the service for others
            _logger.exception("kvflow.reads: serving a reader over TCP failed; its connection is closed")
            self._drop(descriptor)
        else:
            if again:
                self._ready.append(descriptor)

    def _advance(self, client: _Client) -> bool:
        """Advance one reader. Return whether there is more to do at once; otherwise its socket must be ready first."""
        work = 0
        while work < _WORK_MAX:
            if (client.piece is not None or len(client.said) >= COPIED_BYTES_MAX) and not self._flush(client):
                return False
            if client.answer is not None:
                part = next(client.answer, None)
                if part is None:
                    client.answer = client.lease = None
                elif isinstance(part, ByteRows):
                    client.piece = part
                    work += part.left >> 9
                else:
                    client.said += part
            elif (request := self._request(client)) is not None:
                work += _WORK_OF_ONE + request[0].runs
                self._answer(client, *request)
            elif not self._flush(client) or not self._receive(client):
                return False
        return True

    def _flush(self, client: _Client) -> bool:
        """Send what is made. Return False if there is no room for it now."""
        stream = client.member.stream
        while client.said:
            count = stream.write(client.said)
            if not count:
                return False
            del client.said[:count]
            client.since = time.monotonic()
        while client.piece is not None:
            if client.lease is not None and self._epochs[client.lease[0]] != client.lease[1]:
                client.piece = ByteRows(np.array([(_ZEROS.ctypes.data, client.piece.left)], np.int64))
                client.lease = None
            if not stream.send(client.piece):
                return False
            client.since = time.monotonic()
            if not client.piece.left:
                client.piece = None
        return True

    def _receive(self, client: _Client) -> bool:
        """Receive more of the next request. Return False if there is nothing now."""
        room = wire.FRAME_BYTES_MAX - len(client.buffer)
        count = client.member.stream.read(self._scratch[:room])
        if not client.buffer:
            client.since = time.monotonic()
        client.buffer += self._scratch[:count]
        return count > 0

    def _request(self, client: _Client) -> tuple[wire.ReadRequest, bytes] | None:
        """Take the next request and its body, if it is complete."""
        if len(client.buffer) < wire.REQUEST.size:
            return None
        request = wire.decode_request(client.buffer)
        stop = wire.REQUEST.size + request.nbytes
        if len(client.buffer) < stop:
            return None
        body = bytes(memoryview(client.buffer)[wire.REQUEST.size : stop])
        del client.buffer[:stop]
        return request, body

    def _count(self, client: _Client) -> None:
        """Count what this connection keeps in memory. Raises: ChannelClosed."""
        kept = len(client.buffer) + len(client.said) + _LEASE_BYTES * len(client.macs)
        if kept != client.counted:
            if not client.member.account.grow(kept - client.counted):
                raise ChannelClosed("its reader keeps too much in memory")
            client.counted = kept

    def _answer(self, client: _Client, request: wire.ReadRequest, body: bytes) -> None:
        """Process one request. Raises: BadFrame."""
        client.member.account.touch()
        if not self._serving.admits(client.member.who.public_key):
            raise wire.BadFrame("its key is not allowed any longer")
        lease = request.slot, request.epoch
        try:
            if request.kind == wire.LEASE:
                if len(client.macs) >= wire.LEASES_MAX:
                    client.macs.clear()
                client.macs[lease] = body
            elif request.slot >= len(self._epochs):
                raise OutOfBounds(f"there is no epoch slot {request.slot}")
            elif request.kind == wire.EPOCH:
                client.said += wire.ANSWER.pack(wire.DONE, 0, 0, 0, self._epochs[request.slot])
            else:
                self._read(client, request, body)
        except OtherTicket as error:
            raise wire.BadFrame(str(error)) from error
        except OutOfBounds as error:
            detail = str(error).encode()[: wire.DETAIL_BYTES_MAX]
            client.said += wire.ANSWER.pack(wire.REFUSED, 0, 0, 0, len(detail)) + detail

    def _read(self, client: _Client, request: wire.ReadRequest, body: bytes) -> None:
        """Answer a read, or begin to. Raises: OutOfBounds, BadFrame."""
        slot, epoch, group = request.slot, request.epoch, request.group
        mac = client.macs.get((slot, epoch))
        if mac is None:
            raise wire.BadFrame(f"the lease in slot {slot} was not shown")
        if group >= len(self._groups):
            raise OutOfBounds(f"there is no group {group}")
        found = self._groups[group].resolve(body)
        absent: int | None = None
        if isinstance(found.blocks, list):
            ids = self._leased.ids(slot, epoch, group, mac=mac)
            held = ids is not None
            absent = None if ids is None or ids.issuperset(found.blocks) else min({*found.blocks} - ids)
        else:
            flags = self._leased.held(slot, epoch, group, found.blocks, mac=mac)
            held = flags is not None
            absent = None if flags is None or flags.all() else int(found.blocks[np.argmin(flags)])
        if not held or self._epochs[slot] != epoch:
            client.said += self._ended(slot, epoch)
            return
        if absent is not None:
            raise OutOfBounds(f"block {absent} of group {group} is not one of the lease in slot {slot}")
        if found.devices != {-1}:
            if self._serving.device_memory is None or len(found.devices) > 1:
                raise OutOfBounds("the TCP data plane does not reach the memory of these devices")
            client.answer = self._fetched(self._serving.device_memory, slot, epoch, found)
        elif found.nbytes <= COPIED_BYTES_MAX and len(found.starts) <= _COPIED_ROWS_MAX:
            self._copy(client, slot, epoch, found)
        else:
            client.lease = slot, epoch
            client.answer = self._pieces(slot, epoch, found)

    def _copy(self, client: _Client, slot: int, epoch: int, found: Resolved) -> None:
        """Copy a small answer, and compare the epoch after that: what was not leased is not sent."""
        said, before = client.said, len(client.said)
        said += wire.ANSWER.pack(wire.PIECE, 0, 0, 0, found.nbytes)
        for start, nbytes in zip(_listed(found.starts), _listed(found.lengths), strict=True):
            said += (ctypes.c_char * nbytes).from_address(start)
        end = self._end_of(slot, epoch)
        if end[0] == wire.ENDED:
            del said[before:]
        said += end

    def _pieces(self, slot: int, epoch: int, found: Resolved) -> Iterator[ByteRows | bytes]:
        """Yield what to send of the cache, piece by piece; each is copied out of it when the next is asked for."""
        spans = ByteRows(np.stack([np.array(found.starts, np.int64), np.array(found.lengths, np.int64)], axis=1))
        while spans.left and self._epochs[slot] == epoch:
            piece = spans.cut(wire.PIECE_BYTES_MAX)
            yield wire.ANSWER.pack(wire.PIECE, 0, 0, 0, piece.left)
            yield piece
        yield self._end_of(slot, epoch)

    def _fetched(self, memory: DeviceMemory, slot: int, epoch: int, found: Resolved) -> Iterator[ByteRows | bytes]:
        """Yield what to send of a device, portion by portion in one buffer.

        A lease that is held after a portion was fetched was held during it, and the bytes do not change in our buffer.
        """
        device = min(found.devices)
        buffer = memoryview(bytearray(min(PORTION_BYTES, found.nbytes)))
        end = self._end_of(slot, epoch)
        for parts in portions(zip(_listed(found.starts), _listed(found.lengths), strict=True)):
            content = buffer[: sum(nbytes for _, nbytes in parts)]
            if end[0] == wire.DONE:
                memory.fetch(device, parts, content)
                end = self._end_of(slot, epoch)
            if end[0] == wire.ENDED:
                break
            yield wire.ANSWER.pack(wire.PIECE, 0, 0, 0, len(content))
            yield rows_of(content)
        yield end

    def _end_of(self, slot: int, epoch: int) -> bytes:
        """Compare the epoch after everything that was copied before, and return the end of the answer."""
        order_memory()
        if self._epochs[slot] != epoch:
            return self._ended(slot, epoch)
        return wire.ANSWER.pack(wire.DONE, 0, 0, 0, epoch)

    def _ended(self, slot: int, epoch: int) -> bytes:
        # The table gets a lease before its slot does. So if only the slot matches, the lease was not admitted yet.
        value = self._epochs[slot]
        other = value if value != epoch else epoch - 1 if epoch else 1
        return wire.ANSWER.pack(wire.ENDED, 0, 0, 0, other)

    def _end_overdue(self, now: float) -> None:
        """Close connections that do not read their answers, or do not end a request."""
        for descriptor, client in [*self.clients.items()]:
            owes = client.said or client.piece is not None
            if (owes or client.buffer) and now - client.since > (STALLED_S_MAX if owes else HALF_S_MAX):
                self._complain(client, "it takes no answer" if owes else "its request does not end")
                self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        client = self.clients.pop(descriptor, None)
        if client is not None:
            with suppress(OSError):
                self._epoll.unregister(descriptor)
            _end(client.member)

    def _complain(self, client: _Client, complaint: object) -> None:
        now = time.monotonic()
        if now - self._spoke_at >= _SPOKEN_EVERY_S:  # many bad readers must not write many log lines
            self._spoke_at = now
            who = quoted(str(client.member.who))
            _logger.warning("kvflow.reads: closed the TCP connection of %s: %s", who, complaint)


class TcpExporter:
    """Serve the cache to readers. ``endpoint``: its address for readers, ``tcp://host:port``.

    Args:
        settings: where to listen, and whether to encrypt.
        epochs: our epoch table.
        serving: what may be served, and to which readers.
        identity: our certificate; None without encryption.

    Raises:
        TransportUnavailable: the address cannot be bound.
    """

    def __init__(self, settings: TcpSettings, epochs: Region, serving: Serving, identity: TlsIdentity | None) -> None:
        self._access = Access(settings, serving, identity, self._admit)
        self.endpoint = self._access.endpoint
        slots = memory_at(epochs.address, epochs.nbytes).data.cast("Q")
        self._senders = [_Sender(serving, slots, number) for number in range(senders_for(os.cpu_count()))]
        self._access.start()

    def close(self) -> None:
        """Stop listening, close every connection, and return when nothing reads the cache. Idempotent."""
        self._access.close()
        senders, self._senders = self._senders, []
        for sender in senders:
            sender.close()

    def _admit(self, member: Entrant) -> None:
        min(self._senders, key=lambda sender: sender.load).take(member)


def senders_for(cores: int | None) -> int:
    """Return the number of threads. One copies about 3 GB/s, and the engine needs the other cores."""
    return max(1, min(4, (cores or 1) // 4))


def _end(member: Entrant) -> None:
    member.account.leave()
    member.stream.close(reset=True)


def _listed(numbers: "list[int] | np.ndarray[tuple[int], np.dtype[np.int64]]") -> list[int]:
    return numbers if isinstance(numbers, list) else numbers.tolist()
