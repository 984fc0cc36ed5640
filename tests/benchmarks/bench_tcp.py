# ruff: noqa: T201 - a benchmark prints its table
"""What does the TCP plane cost beside plain sockets?

A producer's process has a whole worker, and plain streams beside it; so has this one. Rounds are paired: the plane and
its floor take turns, and a ratio is the median of the rounds' own ratios. A read is timed from ``post`` to the judged
fence on the calling thread, and carries the lease and the lists of a real pull. CPU is that of each process, from its
own clock. With ``tls`` the floors are plain ``ssl`` streams.

    python tests/benchmarks/bench_tcp.py [--rounds 15] [--connections 2] [--encryption off] [--namespaces]
"""

import argparse
import asyncio
import multiprocessing
import multiprocessing.connection
import os
import platform
import queue
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
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
from kvflow.reads.thread import create_transport
from kvflow.worker.environment import PRODUCTION
from kvflow.worker.worker import Worker
from tests.benchmarks.loop import lag_during
from tests.integration.flooding import OF_DATA, flooding
from tests.ports import free_port
from tests.world.node import Node
from tests.world.wire import address, enter, ip

MIB = 1 << 20
BLOCK = 16 << 10
BLOCKS = 32768
"""So many are there for random blocks that half of them are none of a read of 256 MiB."""
TOKENS = 64
"""Of a block."""
SMALL = 4
"""Blocks of a small read."""
SMALL_ROUNDS = 2000
FLOODED = 200
"""Connections of a flood that are open at a time."""
FLOODS = 5
"""Of each kind, with a quiet time before each."""
LEASE_S = 900.0
SECRET = "the secret of a benchmark"

Numbers = npt.NDArray[np.int64]
Asks = Callable[[int | str], Any]
"""What asks the producer's process something, and returns the answer."""
Sample = tuple[float, float, float]
"""Seconds, and CPU seconds of the producer's process and of this one."""


class Options(msgspec.Struct, frozen=True):
    """What both processes are told.

    Attributes:
        host: on which the producer listens.
        namespace: that the producer lives in; empty for that of its parent.
        port: of its TCP plane.
        certificate: file of the plain streams' key and certificate; empty if they are not encrypted.
    """

    connections: int
    encryption: str
    host: str
    namespace: str
    port: int
    certificate: str


def cache_of() -> KVCache:
    """Return a cache whose blocks are one row of 16 KiB each."""
    spec = kvflow.FullAttention(block_size=TOKENS, num_kv_heads=1, head_size=64, dtype="bfloat16")
    return kvflow.allocate({"layers.0": spec}, num_blocks=BLOCKS, layout="BLHNC")


def config_of(options: Options, name: str, **more: Any) -> kvflow.WorkerConfig:
    tuning = {"tcp_connections": options.connections, "tcp_encryption": options.encryption, **more.pop("tuning", {})}
    words = {"engine_id": name, "cluster_secret": SECRET, "transport": "tcp", "tuning": tuning, **more}
    return msgspec.convert(words, kvflow.WorkerConfig)


def produce(pipe: multiprocessing.connection.Connection, options: Options) -> None:
    """Serve until told to stop: offer so many blocks, or tell the CPU seconds of this process."""
    if options.namespace:
        enter(options.namespace)
    cache = cache_of()
    cache.backing.random_(0, 256)
    listener = socket.create_server((options.host, 0))
    memory = cache.backing.numpy().data
    threading.Thread(target=serve_plainly, args=(listener, memory, options.certificate), daemon=True).start()
    uvloop.run(serve(pipe, options, cache, listener.getsockname()[1]))


async def serve(pipe: multiprocessing.connection.Connection, options: Options, cache: KVCache, port: int) -> None:
    tuning = {"tcp_bind": f"tcp://{options.host}:{options.port}"}
    config = config_of(options, "producer", bind=f"tcp://{options.host}:0", lease_s=LEASE_S, tuning=tuning)
    async with kvflow.open_worker(config, cache) as worker:
        pipe.send(port)
        number = count()
        while asked := await asyncio.to_thread(pipe.recv):
            if isinstance(asked, int):
                ticket = worker.offer(f"r{next(number)}", [list(range(asked))], asked * TOKENS)
                pipe.send(ticket.to_params())
            else:
                pipe.send(time.process_time())


def serve_plainly(listener: socket.socket, cache: memoryview, certificate: str) -> None:
    context = None
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)

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


@contextmanager
def self_signed() -> Iterator[str]:
    """Yield a file of a key and a certificate, for the plain streams."""
    from cryptography import x509  # only with ``tls``
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    with tempfile.NamedTemporaryFile(suffix=".pem") as file:
        file.write(key.private_bytes(serialization.Encoding.PEM, *form))
        file.write(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        file.flush()
        yield file.name


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
            sock = socket.create_connection((options.host, port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if options.certificate:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                sock = context.wrap_socket(sock)
            self._streams.append(sock)

    async def begin(self, ask: Asks) -> None:
        """Pull once, as one of two ranks: the leases go on, and reads can be repeated."""
        self._few = kvflow.Ticket.from_params(await asyncio.to_thread(ask, SMALL))
        every = kvflow.Ticket.from_params(await asyncio.to_thread(ask, BLOCKS))
        await self._worker.pull(every, [list(range(SMALL))])
        (self._pattern,) = self._tapped.posted

    async def pull(self) -> None:
        """Pull a few blocks with a ticket of just these."""
        await self._worker.pull(self._few, [list(range(SMALL))])

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


def large(reader: Reader, ask: Asks, mib: int, rounds: int) -> str:
    """Return a line of the table."""
    rng = np.random.default_rng(2)
    number = mib * MIB // BLOCK
    blocks = np.arange(number)
    samples: dict[str, list[Sample]] = {"plane": [], "streams": [], "random": []}

    def measure(name: str, work: Callable[[], None]) -> None:
        theirs, mine = ask("cpu"), time.process_time()
        seconds = timed(work)
        mine = time.process_time() - mine
        samples[name].append((seconds, ask("cpu") - theirs, mine))

    for turn in range(rounds + 1):
        source, target = np.sort(rng.permutation(BLOCKS)[:number]), rng.permutation(BLOCKS)[:number]
        works = {
            "plane": partial(reader.read, blocks, blocks),
            "streams": partial(reader.stream, mib * MIB),
            "random": partial(reader.read, source, target),
        }
        names = list(works)
        for name in (*names[turn % 3 :], *names[: turn % 3]):
            measure(name, works[name])
    for found in samples.values():
        del found[0]  # which touches memory and opens connections
    gib = mib / 1024
    rate = {name: gib / statistics.median(seconds for seconds, _, _ in found) for name, found in samples.items()}

    def ratio(above: str, below: str, at: int = 0) -> float:
        paired = zip(samples[above], samples[below], strict=True)
        return statistics.median(over[at] / max(under[at], 1e-9) for over, under in paired)

    cpu = [statistics.median(sample[at] for sample in samples["plane"]) / gib for at in (1, 2)]
    return (
        f"{mib:5}   {rate['plane']:11.2f}  {rate['streams']:7.2f}  {ratio('streams', 'plane'):10.2f}   "
        f"{rate['random']:6.2f}  {ratio('plane', 'random'):8.2f}   {cpu[0]:19.2f}  {ratio('plane', 'streams', 1):10.2f}"
        f"  {cpu[1]:6.2f}  {ratio('plane', 'streams', 2):10.2f}"
    )


async def pulls(reader: Reader, rounds: int) -> str:
    """Pull 64 KiB over and over, and note how late the event loop is meanwhile, and how late it is idle."""
    seconds: list[float] = []
    busy: list[float] = []
    idle: list[float] = []

    async def one_by_one() -> None:
        for _ in range(rounds):
            begun = time.perf_counter()
            await reader.pull()
            seconds.append(time.perf_counter() - begun)

    await lag_during(one_by_one(), busy)
    await lag_during(asyncio.sleep(sum(seconds)), idle)
    p50, p99 = (np.quantile(seconds, each) * 1e6 for each in (0.5, 0.99))
    late, calm = (np.quantile(each, 0.99) * 1e3 for each in (busy, idle))
    whole = f"64 KiB, whole pulls, us: p50 {p50:.0f} p99 {p99:.0f}"
    return f"{whole}; the event loop is late p99 {late:.2f} ms, idle {calm:.2f} ms"


def floods(reader: Reader, options: Options, rounds: int) -> Iterator[str]:
    """Read 64 KiB quietly and beside each flood of the data port, in turns."""
    few = np.arange(SMALL)

    def p99() -> float:
        return float(np.quantile([timed(partial(reader.read, few, few)) for _ in range(rounds)], 0.99))

    def flooded_p99(kind: str) -> float:
        flood = Node(forked=False)
        try:
            flood.open_now(flooding, kind, f"tcp://{options.host}:{options.port}", FLOODED, "")
            return p99()
        finally:
            flood.end()

    for kind in OF_DATA:
        pairs = [(p99(), flooded_p99(kind)) for _ in range(FLOODS)]
        quiet, flooded = (statistics.median(each) * 1e6 for each in zip(*pairs, strict=True))
        ratio = statistics.median(beside / alone for alone, beside in pairs)
        yield f"  {kind}: p99 {flooded:.0f} us, quiet {quiet:.0f} us, {ratio:.2f} times"


async def measure(args: argparse.Namespace, options: Options, pipe: multiprocessing.connection.Connection) -> None:
    cache, tapped = cache_of(), []

    def open_transport(*given: Any) -> Any:
        tapped.append(Tapped(*given))
        return tapped[0]

    def ask(what: int | str) -> Any:
        pipe.send(what)
        return pipe.recv()

    def show(text: str) -> None:
        print(text, flush=True)

    environment = msgspec.structs.replace(PRODUCTION, open_transport=open_transport)
    # Of two ranks that read each lease, one never does.
    host = address(1) if args.namespaces else options.host
    config = config_of(options, "reader", bind=f"tcp://{host}:0", rank=0, num_ranks=2)
    port = await asyncio.to_thread(pipe.recv)
    async with kvflow.open_worker(config, cache, environment=environment) as worker:
        reader = Reader(worker, cache, tapped[0], options, port)
        await reader.begin(ask)
        load = os.getloadavg()[0]
        show(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, {vars(args)}")
        if "large" in args.only:
            show(
                "  MiB   plane GiB/s  streams  of streams   random  of plane   CPU s/GiB: producer  of streams  reader"
                "  of streams"
            )
            for mib in (64, 256):
                show(await asyncio.to_thread(large, reader, ask, mib, args.rounds))
        if "small" in args.only:
            show(await asyncio.to_thread(small, reader, SMALL_ROUNDS))
            show(await pulls(reader, SMALL_ROUNDS))
        if "floods" in args.only:
            show("64 KiB beside a flood of the data port:")
            lines = floods(reader, options, SMALL_ROUNDS)
            while line := await asyncio.to_thread(next, lines, ""):
                show(line)


@contextmanager
def namespaces() -> Iterator[list[str]]:
    """Yield two network namespaces with a pair of Ethernet devices between them."""
    names = [f"kvflow-bench-{os.getpid()}-{side}" for side in "ab"]
    devices = [f"kvb{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for side, (name, device) in enumerate(zip(names, devices, strict=True)):
            ip("link", "set", device, "netns", name)
            ip("-n", name, "addr", "add", f"{address(side)}/30", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--connections", type=int, default=2)
    parser.add_argument("--encryption", choices=["off", "tls"], default="off")
    parser.add_argument("--namespaces", action="store_true", help="between two network namespaces; needs root")
    parts = ["large", "small", "floods"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    args = parser.parse_args()
    with ExitStack() as stack:
        sides = stack.enter_context(namespaces()) if args.namespaces else ["", ""]
        options = Options(
            args.connections,
            args.encryption,
            host=address(0) if args.namespaces else "127.0.0.1",
            namespace=sides[0],
            port=free_port(),
            certificate=stack.enter_context(self_signed()) if args.encryption == "tls" else "",
        )
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=produce, args=(theirs, options), daemon=True)
        process.start()
        if args.namespaces:
            enter(sides[1])
        try:
            uvloop.run(measure(args, options, ours))
            ours.send(None)
            process.join()
        finally:
            process.kill()


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
