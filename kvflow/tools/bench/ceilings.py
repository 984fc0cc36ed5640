"""What the machine could do at best, measured in the same run: memcpy, process_vm_readv, TCP streams, and bare NIXL."""

import ctypes
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec
import numpy as np
from msgspec import Struct

from kvflow.ids import Int32s, Int64s
from kvflow.layout.component import Region
from kvflow.layout.manifest import Manifest
from kvflow.memory.cache import KVCache
from kvflow.planning.bind import Binding, Bound
from kvflow.planning.pairs import UnitPairs
from kvflow.planning.plan import plan_transfer
from kvflow.reads.device import device_order_of
from kvflow.reads.nixl.binding import Agent, error_types, load_binding
from kvflow.reads.reach import HostFacts, host_facts
from kvflow.tools.doctor.probe import shares_pids

UNCHUNKED = 1 << 62

SPIN_S = 500e-6
PAUSE_S = 200e-6
"""How long a bare read polls without a pause, and the pause after that: what made it fastest. Small reads end within
the first; during large ones over TCP, a reader that spins takes the core that the sender needs, and the rate halves."""


class Opened(Struct, frozen=True):
    """A worker that is open, and what bare NIXL and the kernel need in order to read the same memory.

    Attributes:
        manifest: the cache's manifest, msgpack.
        agent: name of a bare NIXL agent over the same memory; ``metadata`` is what a bare reader must load.
        streams: ``host:port`` of plain TCP streams of the same memory; empty if it is not host memory.
    """

    facts: HostFacts
    manifest: bytes
    agent: str
    metadata: bytes
    streams: str


class BareNixl:
    """Read a source's memory with NIXL alone: the same descriptors in one post, no worker, no fence, no thread.

    Used as a context manager, because a NIXL agent must be destroyed before the memory is freed.
    """

    def __init__(self, opened: Opened, cache: KVCache) -> None:
        source = msgspec.msgpack.decode(opened.manifest, type=Manifest)
        target = cache.manifest()
        plan = plan_transfer(source, target)
        assert len(plan.groups) == 1, "benchmarks use one group"
        self.binding = Binding(plan.groups[0], source, target)
        enter_device(target.regions)
        # No progress thread, as in kvflow's own reader: this thread polls.
        self._agent = Agent(load_binding(), f"bare-reader-{secrets.token_hex(8)}", progress=False)
        self._agent.register(target.regions)
        remote = self._agent.add_remote(opened.metadata)
        self._remote = self._agent.prepare_remote(remote, self.binding.source.table, self.binding.source.memory)
        self._local = self._agent.prepare_local(self.binding.target.table, self.binding.target.memory)
        ends = [manifest.regions[0] for manifest in (source, target)]
        eight_bytes = [np.array([[region.address, 8, region.device, 8, 1]], np.int64) for region in ends]
        self._remote_word = self._agent.prepare_remote(remote, eight_bytes[0], ends[0].memory)
        self._local_word = self._agent.prepare_local(eight_bytes[1], ends[1].memory)

    def bind(self, source_ids: Int64s, target_ids: Int64s) -> Bound:
        """Compute the indices that kvflow would post for these blocks."""
        order = np.argsort(source_ids, kind="stable")
        pairs = UnitPairs(source_ids[order], target_ids[order])
        return self.binding.bind(pairs, chunk_bytes=UNCHUNKED, chunk_descriptors=UNCHUNKED)

    def read(self, bound: Bound) -> float:
        """Read once; return the seconds from making the request to its last byte."""
        return self._read(self._local, bound.target_index, self._remote, bound.source_index)

    def read_word(self) -> float:
        """Read eight bytes, as a fence does; return seconds."""
        first = np.zeros(1, np.int32)
        return self._read(self._local_word, first, self._remote_word, first)

    def read_fenced(self, bound: Bound) -> float:
        """Read once, then eight bytes, on the calling thread: the least that a fenced read takes. Return seconds."""
        return self.read(bound) + self.read_word()

    def _read(self, local: int, local_index: Int32s, remote: int, remote_index: Int32s) -> float:
        started = time.perf_counter()
        handle = self._agent.make_read(local, local_index, remote, remote_index)
        done = self._agent.post(handle)
        while not done:
            if time.perf_counter() - started > SPIN_S:
                time.sleep(PAUSE_S)
            done = self._agent.poll(handle)
        elapsed = time.perf_counter() - started
        self._agent.release(handle)
        return elapsed

    def close(self) -> None:
        """Destroy the agent."""
        self._agent.destroy()


def enter_device(regions: Sequence[Region]) -> None:
    """Make the device of a cache current on this thread, if it lies on one: UCX asks for that."""
    if any(region.memory == "VRAM" for region in regions):
        device_order_of(regions).enter()


def open_bare(opened: Opened, cache: KVCache) -> BareNixl | None:
    """Open bare NIXL, and read once; None where NIXL does not reach the source's memory without TCP."""
    try:
        bare = BareNixl(opened, cache)
    except error_types(load_binding()):
        return None
    try:
        bare.read_word()
    except error_types(load_binding()):
        bare.close()
        return None
    return bare


def memcpy(nbytes: int) -> float:
    """Copy ``nbytes`` within this process on one thread; return seconds."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    started = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t


def process_vm_readv(opened: Opened, cache: KVCache, nbytes: int) -> float | None:
    """Have the kernel copy the first ``nbytes`` of the source's cache into ours; return seconds.

    None if the source shares no PID namespace with us: its process id means another process here, or none.

    Raises:
        OSError: the kernel refuses.
    """
    if not shares_pids(opened.facts, host_facts()):
        return None
    source = msgspec.msgpack.decode(opened.manifest, type=Manifest)
    local = _Iovec(cache.backing.data_ptr(), nbytes)
    remote = _Iovec(source.regions[0].address, nbytes)
    started = time.perf_counter()
    copied = 0
    while copied < nbytes:
        count = _libc.process_vm_readv(opened.facts.pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if count <= 0:
            code = ctypes.get_errno()
            raise OSError(code, f"process_vm_readv: {os.strerror(code)}")
        copied += count
        local = _Iovec(cache.backing.data_ptr() + copied, nbytes - copied)
        remote = _Iovec(source.regions[0].address + copied, nbytes - copied)
    return time.perf_counter() - started


CopiedPiece = tuple[int, int, int]
"""First byte in the source's cache, first byte in ours, number of bytes."""

_ASKED = struct.Struct("<QQ")
"""First byte and number of bytes that a connection asks for."""


class StreamSource:
    """Sends bytes of a cache over each connection that asks for some. It believes every process that connects."""

    def __init__(self, host: str, memory: memoryview) -> None:
        self._memory = memory
        self._listener = socket.create_server((host, 0))
        self._connections: list[socket.socket] = []
        self.endpoint = f"{host}:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Close every connection, and return when nothing reads the cache any longer."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the accept
        self._threads[0].join()
        self._listener.close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._connections.append(connection)
                self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            while len(asked := connection.recv(_ASKED.size, socket.MSG_WAITALL)) == _ASKED.size:
                first, nbytes = _ASKED.unpack(asked)
                connection.sendall(self._memory[first : first + nbytes])


class Streams:
    """Reads a source's memory into ours over plain connections: each has a share, and a thread on both sides."""

    def __init__(self, endpoint: str, connections: int, memory: memoryview) -> None:
        host, _, port = endpoint.rpartition(":")
        self._memory = memory
        self._connections = [socket.create_connection((host, int(port))) for _ in range(connections)]
        self._threads = ThreadPoolExecutor(connections)

    def read(self, nbytes: int) -> float:
        """Read the first ``nbytes``; return seconds."""
        share = -(-nbytes // len(self._connections))
        return self.read_pieces([(first, first, min(share, nbytes - first)) for first in range(0, nbytes, share)])

    def read_pieces(self, pieces: Sequence[CopiedPiece]) -> float:
        """Read pieces, one alone on this thread; return seconds."""
        started = time.perf_counter()
        if len(pieces) == 1:
            self._read(self._connections[0], pieces)
        else:
            count = len(self._connections)
            list(self._threads.map(self._read, self._connections, [pieces[at::count] for at in range(count)]))
        return time.perf_counter() - started

    def close(self) -> None:
        """Close them all."""
        self._threads.shutdown()
        for connection in self._connections:
            connection.close()

    def _read(self, connection: socket.socket, pieces: Sequence[CopiedPiece]) -> None:
        for first, _, nbytes in pieces:
            connection.sendall(_ASKED.pack(first, nbytes))
        for _, target, nbytes in pieces:
            left = self._memory[target : target + nbytes]
            while left:
                count = connection.recv_into(left)
                if not count:
                    raise ConnectionError("the source has closed a plain stream")
                left = left[count:]
