# ruff: noqa: T201 - a benchmark prints its table
"""What does the TCP plane cost beside plain sockets?

A producer's process has a whole worker, and plain streams beside it; so has this one. Rounds are paired: the plane and
its floor take turns, and a ratio is the median of the rounds' own ratios. A read is timed from ``post`` to the judged
fence on the calling thread, and carries the lease and the lists of a real pull. With ``tls`` the floors are plain
``ssl`` streams.

    python tests/benchmarks/bench_tcp.py [--rounds 15] [--connections 2] [--encryption off]
"""

import argparse
import asyncio
import os
import platform
import queue
import socket
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import uvloop

import kvflow
from kvflow.ids import FEW_IDS
from kvflow.memory.cache import KVCache
from kvflow.planning.pairs import UnitPairs
from kvflow.reads.contract import RankRead, ReadEnded, Transport, TransportEvent
from kvflow.reads.tcp.certificates import TlsIdentity, draw_identity
from kvflow.reads.thread import create_transport
from kvflow.worker.environment import PRODUCTION
from kvflow.worker.worker import Worker
from tests.benchmarks.hot_path_children import Child
from tests.ports import free_port

MIB = 1 << 20
BLOCK = 16 << 10
BLOCKS = 32768
"""So many are there for random blocks that half of them are none of a read of 256 MiB."""
TOKENS = 64
"""Of a block."""
SMALL = 4
"""Blocks of a small read."""
SMALL_ROUNDS = 2000
LEASE_S = 900.0
HOST = "127.0.0.1"
SECRET = "the secret of a benchmark"

Numbers = npt.NDArray[np.int64]


class Options(msgspec.Struct, frozen=True):
    """What both processes are told."""

    connections: int
    encryption: str
    port: int  # of the producer's TCP plane
    identity: TlsIdentity | None  # of the plain streams; None if they are not encrypted


def cache_of() -> KVCache:
    """Return a cache whose blocks are one row of 16 KiB each."""
    spec = kvflow.FullAttention(block_size=TOKENS, num_kv_heads=1, head_size=64, dtype="bfloat16")
    return kvflow.allocate({"layers.0": spec}, num_blocks=BLOCKS, layout="BLHNC")


def config_of(options: Options, name: str, **more: Any) -> kvflow.WorkerConfig:
    tuning = {"tcp_connections": options.connections, "tcp_encryption": options.encryption, **more.pop("tuning", {})}
    words = {"engine_id": name, "cluster_secret": SECRET, "transport": "tcp", "tuning": tuning, **more}
    return msgspec.convert(words, kvflow.WorkerConfig)


class Producer:
    """A worker whose cache is offered as a whole, and plain streams of the same memory."""

    def __init__(self, worker: Worker, port: int) -> None:
        self._worker, self._port = worker, port

    async def offer(self) -> tuple[int, dict[str, Any]]:
        """Return the port of the plain streams, and what a router carries."""
        return self._port, self._worker.offer("all", [list(range(BLOCKS))], BLOCKS * TOKENS).to_params()


@asynccontextmanager
async def open_producer(options: Options) -> AsyncIterator[Producer]:
    cache = cache_of()
    cache.backing.random_(0, 256)
    listener = socket.create_server((HOST, 0))
    memory = cache.backing.numpy().data
    threading.Thread(target=serve_plainly, args=(listener, memory, options.identity), daemon=True).start()
    tuning = {"tcp_bind": f"tcp://{HOST}:{options.port}"}
    config = config_of(options, "producer", bind=f"tcp://{HOST}:0", lease_s=LEASE_S, tuning=tuning)
    async with kvflow.open_worker(config, cache) as worker:
        yield Producer(worker, listener.getsockname()[1])


def serve_plainly(listener: socket.socket, cache: memoryview, identity: TlsIdentity | None) -> None:
    context = identity and identity.context(identity.certificate, server=True)

    def serve(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            sock = context.wrap_socket(sock, server_side=True)
        while asked := sock.recv(8):
            nbytes = int.from_bytes(asked, "little")
            for first in range(0, nbytes, 2 * MIB):  # ssl takes no more than 2 GiB, and sends no more than 16 KiB
                sock.sendall(cache[first : min(first + 2 * MIB, nbytes)])

    while True:
        sock, _ = listener.accept()
        threading.Thread(target=serve, args=(sock,), daemon=True).start()


class Tapped:
    """A worker's transport that notes the reads of pulls, and keeps the ends of reads that were posted beside them."""

    def __init__(self, *given: Any) -> None:
        config, agent_name, self._sink, staging_bytes = given
        self._inner: Transport = create_transport(config, agent_name, self._hear, staging_bytes)
        self.posted: list[RankRead] = []
        self.ended: queue.SimpleQueue[ReadEnded] = queue.SimpleQueue()
        self._ids = count(1 << 40)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def post(self, reads: Sequence[RankRead], within_s: float) -> list[ReadEnded]:
        self.posted += reads
        return self._inner.post(reads, within_s)

    def read(self, pattern: RankRead, source: Numbers, target: Numbers) -> None:
        """Read blocks as a pull has read them, to the judged fence. Thread: any but the event loop."""
        (part,) = pattern.parts
        few = len(source) <= FEW_IDS
        pairs = UnitPairs(*(tuple(ids.tolist()) if few else ids for ids in (source, target)))
        parts = (msgspec.structs.replace(part, pairs=pairs),)
        answers = self._inner.post([RankRead(next(self._ids), pattern.peer, pattern.lease, parts)])
        event = answers[0] if answers else self.ended.get()
        if event.verdict != "held":
            sys.exit(f"a read has failed: {event}")

    def _hear(self, event: TransportEvent) -> None:
        if isinstance(event, ReadEnded) and event.read_id >= 1 << 40:
            self.ended.put(event)
        else:
            self._sink(event)


class Reader:
    """Reads over the plane and over plain streams, into the same memory."""

    def __init__(self, worker: Worker, cache: KVCache, tapped: Tapped, options: Options, port: int) -> None:
        self._worker = worker
        self._memory = cache.backing.numpy().data
        self._tapped = tapped
        self._streams: list[socket.socket] = []
        for _ in range(options.connections):
            sock = socket.create_connection((HOST, port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if options.identity is not None:
                sock = options.identity.context(options.identity.certificate, server=False).wrap_socket(sock)
            self._streams.append(sock)

    async def begin(self, params: dict[str, Any]) -> None:
        """Pull once, as one of two ranks: the lease goes on, and reads can be repeated."""
        await self._worker.pull(kvflow.Ticket.from_params(params), [list(range(SMALL))])
        (self._pattern,) = self._tapped.posted

    def read(self, source: Numbers, target: Numbers) -> None:
        self._tapped.read(self._pattern, source, target)

    def stream(self, nbytes: int) -> None:
        """Read as many bytes over the plain streams, a thread for each."""
        share = nbytes // len(self._streams)

        def take(sock: socket.socket, first: int) -> None:
            sock.sendall(share.to_bytes(8, "little"))
            left = self._memory[first : first + share]
            while len(left):
                left = left[sock.recv_into(left, min(len(left), MIB)) :]

        threads = [threading.Thread(target=take, args=(sock, at * share)) for at, sock in enumerate(self._streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def ask(self, nbytes: int) -> None:
        """Ask one plain socket, and take its answer."""
        sock, left = self._streams[0], self._memory[:nbytes]
        sock.sendall(nbytes.to_bytes(8, "little"))
        while len(left):
            left = left[sock.recv_into(left) :]


def small(reader: Reader, rounds: int) -> str:
    few = np.arange(SMALL)
    works = (partial(reader.read, few, few), partial(reader.ask, SMALL * BLOCK))
    pairs = [in_turn(number, works) for number in range(rounds)]
    plane, bare = np.array(pairs).T * 1e6
    return (
        f"64 KiB, us: plane p50 {np.median(plane):.0f} p99 {np.quantile(plane, 0.99):.0f}, bare request and answer "
        f"p50 {np.median(bare):.0f} p99 {np.quantile(bare, 0.99):.0f}, ratio {np.median(plane / bare):.2f}"
    )


def large(reader: Reader, mib: int, rounds: int) -> str:
    """Return a line of the table."""
    rng = np.random.default_rng(2)
    number = mib * MIB // BLOCK
    blocks = np.arange(number)
    samples: dict[str, list[float]] = {"plane": [], "streams": [], "random": []}
    for turn in range(rounds + 1):
        source, target = np.sort(rng.permutation(BLOCKS)[:number]), rng.permutation(BLOCKS)[:number]
        works = {
            "plane": partial(reader.read, blocks, blocks),
            "streams": partial(reader.stream, mib * MIB),
            "random": partial(reader.read, source, target),
        }
        names = list(works)
        for name in (*names[turn % 3 :], *names[: turn % 3]):
            samples[name].append(timed(works[name]))
    for found in samples.values():
        del found[0]  # which touches memory and opens connections
    rate = {name: mib / 1024 / statistics.median(found) for name, found in samples.items()}

    def ratio(above: str, below: str) -> float:
        return statistics.median(over / under for over, under in zip(samples[above], samples[below], strict=True))

    return (
        f"{mib:5}   {rate['plane']:11.2f}  {rate['streams']:7.2f}  {ratio('streams', 'plane'):10.2f}   "
        f"{rate['random']:6.2f}  {ratio('plane', 'random'):8.2f}"
    )


async def measure(args: argparse.Namespace, options: Options, producer: Child) -> None:
    cache, tapped = cache_of(), []

    def open_transport(*given: Any) -> Any:
        tapped.append(Tapped(*given))
        return tapped[0]

    environment = msgspec.structs.replace(PRODUCTION, open_transport=open_transport)
    # Of two ranks that read each lease, one never does.
    config = config_of(options, "reader", bind=f"tcp://{HOST}:0", rank=0, num_ranks=2)
    port, params = await asyncio.to_thread(producer.ask, "offer")
    async with kvflow.open_worker(config, cache, environment=environment) as worker:
        reader = Reader(worker, cache, tapped[0], options, port)
        await reader.begin(params)
        load = os.getloadavg()[0]
        print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, {vars(args)}")
        print("  MiB   plane GiB/s  streams  of streams   random  of plane")
        for mib in (64, 256):
            print(await asyncio.to_thread(large, reader, mib, args.rounds), flush=True)
        print(await asyncio.to_thread(small, reader, SMALL_ROUNDS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--connections", type=int, default=2)
    parser.add_argument("--encryption", choices=["off", "tls"], default="off")
    args = parser.parse_args()
    identity = draw_identity() if args.encryption == "tls" else None
    options = Options(args.connections, args.encryption, free_port(), identity)
    with Child(open_producer, options) as producer:
        uvloop.run(measure(args, options, producer))


def in_turn(number: int, works: Sequence[Callable[[], None]]) -> list[float]:
    """Return the seconds of each work; every second time they are done the other way round."""
    ordered = works if number % 2 else works[::-1]
    seconds = [timed(work) for work in ordered]
    return seconds if number % 2 else seconds[::-1]


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
