# ruff: noqa: T201 - a benchmark prints its table
"""What does the TCP plane cost beside plain sockets?

One producer process serves blocks of 16 KiB, and plain streams beside it. Rounds are interleaved: a read over the
plane, the same bytes over as many plain streams with a thread for each, and as many blocks in random order over the
plane. The table shows medians, and medians of the rounds' own ratios. CPU is that of each process, from its own clock.
The last line is 64 KiB from ``post`` to the judged fence on the calling thread, beside a bare request and answer over
one socket.

    python tests/benchmarks/bench_tcp.py [--rounds 15] [--connections 2] [--encryption off]
"""

import argparse
import itertools
import multiprocessing
import multiprocessing.connection
import os
import platform
import queue
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from kvflow.config import TcpSettings
from kvflow.ids import Credentials, PeerId, pass_of
from kvflow.layout.component import Region
from kvflow.layout.tracks import Track
from kvflow.planning.pairs import UnitPairs
from kvflow.reads.contract import (
    SERVES_NOTHING,
    LeaseName,
    Part,
    PeerAdded,
    PeerAddress,
    PeerFailed,
    PreparedList,
    RankRead,
    ReadEnded,
    Serving,
    TransportEvent,
)
from kvflow.reads.staging import StagingMemory
from kvflow.reads.tcp01.backend import TcpBackend
from kvflow.reads.thread import ThreadedTransport
from tests.benchmarks.blocks import Blocks

MIB = 1 << 20
BLOCK = 16 << 10
BLOCKS = 16384
SLOT, EPOCH = 3, 7
PASS_KEY = bytes(32)
PRODUCER = PeerId("producer", 0, "0" * 32, "tcp://127.0.0.1:1", "")
WHO = ("ab" * 32, "reader", 0, "1" * 32)
SMALL_ROUNDS = 2000

Numbers = npt.NDArray[np.int64]


class Served(msgspec.Struct, frozen=True):
    """What the producer tells."""

    metadata: bytes
    data_endpoint: str
    cache: Region
    epochs: Region
    port: int


def region_of(array: npt.NDArray[np.generic]) -> Region:
    return Region(array.ctypes.data, array.nbytes)


def settings_of(connections: int, encryption: str) -> TcpSettings:
    anywhere = "tcp://127.0.0.1:0"
    return msgspec.convert(
        {"bind": anywhere, "advertise": anywhere, "connections": connections, "encryption": encryption}, TcpSettings
    )


def produce(pipe: multiprocessing.connection.Connection, settings: TcpSettings) -> None:
    """Serve until told to stop; answer each question with the CPU seconds of this process."""
    cache = np.random.default_rng(1).integers(0, 256, BLOCKS * BLOCK, dtype=np.uint8)
    epochs = np.full(64, EPOCH, np.uint64)
    blocks = (range(BLOCKS),)
    serving = Serving(
        tracks=((Track(cache.ctypes.data, BLOCK, BLOCK, BLOCKS),),),
        blocks_of=lambda slot, epoch: blocks if int(epochs[slot]) == epoch else None,
        admits=lambda _key: True,
        pass_key=PASS_KEY,
    )
    backend = TcpBackend("producer", settings, [region_of(cache)], region_of(epochs), serving)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve_plainly, args=(listener, cache.data), daemon=True).start()
    port = listener.getsockname()[1]
    pipe.send(Served(backend.metadata, backend.data_endpoint, region_of(cache), region_of(epochs), port))
    while pipe.recv():
        pipe.send(time.process_time())
    backend.close()


def serve_plainly(listener: socket.socket, cache: memoryview) -> None:
    def serve(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while asked := sock.recv(8):
            sock.sendall(cache[: int.from_bytes(asked, "little")])

    while True:
        sock, _ = listener.accept()
        threading.Thread(target=serve, args=(sock,), daemon=True).start()


class Reader:
    """Reads over the plane and over plain streams, into the same memory."""

    def __init__(self, served: Served, settings: TcpSettings) -> None:
        self._memory = np.zeros(BLOCKS * BLOCK, np.uint8)
        self._epochs = np.zeros(8, np.uint64)
        self._events: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
        self._ids = itertools.count(1)
        factory = {"tcp": lambda *given: TcpBackend("reader", settings, *given)}
        self._transport = ThreadedTransport("tcp", factory, self._events.put, StagingMemory(0))
        self._transport.start([region_of(self._memory)], region_of(self._epochs), SERVES_NOTHING)
        credentials = Credentials(*WHO, pass_of(PASS_KEY, *WHO))
        planes = {"tcp": served.metadata}
        self._transport.add_peer(PeerAddress(PRODUCER, planes, served.epochs, None, served.data_endpoint, credentials))
        assert isinstance(self._events.get(), PeerAdded)
        theirs, ours = (
            np.array([[at.address, BLOCK, 0, BLOCK, BLOCKS]]) for at in (served.cache, region_of(self._memory))
        )
        self._transport.prepare(PreparedList(1, PRODUCER, theirs, ours, binding=Blocks(BLOCK)))
        self._streams = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(settings.connections)]
        for sock in self._streams:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self, source: Numbers, target: Numbers) -> None:
        """Read blocks over the plane, to the judged fence."""
        parts = (Part(1, UnitPairs(source, target)),)
        self._transport.post([RankRead(next(self._ids), PRODUCER, LeaseName(SLOT, EPOCH), parts)])
        while not isinstance(event := self._events.get(), ReadEnded):
            if isinstance(event, PeerFailed):
                sys.exit(f"the producer has failed: {event}")
        if event.verdict != "held":
            sys.exit(f"a read has failed: {event}")

    def stream(self, nbytes: int) -> None:
        """Read as many bytes over the plain streams, a thread for each."""
        share = nbytes // len(self._streams)

        def take(sock: socket.socket, first: int) -> None:
            sock.sendall(share.to_bytes(8, "little"))
            left = self._memory.data[first : first + share]
            while len(left):
                left = left[sock.recv_into(left, min(len(left), MIB)) :]

        threads = [threading.Thread(target=take, args=(sock, at * share)) for at, sock in enumerate(self._streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def ask(self, nbytes: int) -> None:
        """Ask one plain socket, and take its answer."""
        sock, left = self._streams[0], self._memory.data[:nbytes]
        sock.sendall(nbytes.to_bytes(8, "little"))
        while len(left):
            left = left[sock.recv_into(left) :]

    def close(self) -> None:
        for sock in self._streams:
            sock.close()
        self._transport.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--connections", type=int, default=2)
    parser.add_argument("--encryption", choices=["off", "tls"], default="off")
    args = parser.parse_args()
    settings = settings_of(args.connections, args.encryption)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=produce, args=(theirs, settings), daemon=True)
    process.start()
    reader = Reader(ours.recv(), settings)
    rng = np.random.default_rng(2)
    load = os.getloadavg()[0]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, {args}")
    print(
        "  MiB   plane GiB/s  streams  of streams   random  of plane   CPU s/GiB: producer  streams'  reader  streams'"
    )
    for mib in (64, 256):
        print(compare(reader, ours, mib, args.rounds, rng))
    few = np.arange(4)
    pairs = [(timed(lambda: reader.read(few, few)), timed(lambda: reader.ask(4 * BLOCK))) for _ in range(SMALL_ROUNDS)]
    plane, bare = np.array(pairs).T * 1e6
    print(
        f"64 KiB, us: plane p50 {np.median(plane):.0f} p99 {np.quantile(plane, 0.99):.0f}, bare request and answer "
        f"p50 {np.median(bare):.0f} p99 {np.quantile(bare, 0.99):.0f}, ratio {np.median(plane / bare):.2f}"
    )
    ours.send(None)
    process.join()
    reader.close()


def compare(
    reader: Reader, producer: multiprocessing.connection.Connection, mib: int, rounds: int, rng: np.random.Generator
) -> str:
    """Return a line of the table."""
    count = mib * MIB // BLOCK
    blocks = np.arange(count)
    samples: dict[str, list[tuple[float, float, float]]] = {"plane": [], "streams": [], "random": []}

    def measure(name: str, work: Callable[[], None]) -> None:
        producer.send(name)
        theirs, mine = producer.recv(), time.process_time()
        seconds = timed(work)
        mine = time.process_time() - mine
        producer.send(name)
        samples[name].append((seconds, producer.recv() - theirs, mine))

    reader.read(np.arange(BLOCKS), np.arange(BLOCKS))
    for _ in range(rounds):
        source, target = rng.permutation(BLOCKS)[:count], rng.permutation(BLOCKS)[:count]
        measure("plane", lambda: reader.read(blocks, blocks))
        measure("streams", lambda: reader.stream(mib * MIB))
        measure("random", lambda source=source, target=target: reader.read(source, target))  # type: ignore[misc]
    gib = mib / 1024
    rate = {name: gib / statistics.median(seconds for seconds, _, _ in found) for name, found in samples.items()}
    cpu = {
        name: [statistics.median(sample[side] for sample in found) / gib for side in (1, 2)]
        for name, found in samples.items()
    }
    paired = zip(samples["plane"], samples["streams"], samples["random"], strict=True)
    ratios = [(streams[0] / plane[0], plane[0] / scattered[0]) for plane, streams, scattered in paired]
    of_streams, of_plane = (statistics.median(ratio[at] for ratio in ratios) for at in (0, 1))
    return (
        f"{mib:5}   {rate['plane']:11.2f}  {rate['streams']:7.2f}  {of_streams:10.2f}   {rate['random']:6.2f}  "
        f"{of_plane:8.2f}   {cpu['plane'][0]:19.2f}  {cpu['streams'][0]:8.2f}  {cpu['plane'][1]:6.2f}  "
        f"{cpu['streams'][1]:8.2f}"
    )


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
