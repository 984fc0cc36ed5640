# ruff: noqa: T201 - a benchmark prints its table
"""What does kvflow's transport cost beside bare NIXL?

Both read the same descriptors from the same exporter process, in interleaved rounds; the table shows medians. Bare
NIXL makes, posts and polls one handle per chunk on the calling thread without pause, and reads no fence. kvflow's
time runs from ``post`` on the calling thread to the answer, its fence included: of small reads ``post`` returns the
answer; of others it arrives after two hops between threads. The ratio is the median of the rounds' own ratios, because
the machine's speed drifts.

    python tests/benchmarks/bench_transport.py [--rounds 200] [--tls tcp]
"""

import argparse
import os
import platform
import statistics
import time
from functools import partial
from itertools import pairwise
from queue import SimpleQueue

import msgspec
import numpy as np
import numpy.typing as npt

from kvflow.ids import PeerId
from kvflow.layout.component import Region
from kvflow.leases.tickets import LeaseName
from kvflow.planning.pairs import UnitPairs
from kvflow.reads.backend import decode_envelope
from kvflow.reads.contract import (
    Part,
    PeerAddress,
    PreparedList,
    Published,
    RankRead,
    ReadEnded,
    TransportEvent,
)
from kvflow.reads.nixl.binding import Agent, load_binding
from tests.benchmarks.blocks import Blocks
from tests.contract.exporting import exporting
from tests.helpers.transports import nixl_transport
from tests.world.node import Node

CACHE_BYTES = 192 << 20
PEER = PeerId("p", 0, "0" * 32, "tcp://127.0.0.1:1", "")


class Case(msgspec.Struct, frozen=True):
    """Blocks of equal size, read in chunks."""

    title: str
    block: int
    count: int
    chunk: int
    inline: bool = False
    scattered: bool = False

    @property
    def cuts(self) -> list[int]:
        """Where chunks begin, and the end."""
        return [*range(0, self.count, self.chunk), self.count]


CASES = [
    Case("64 KiB, inline", 64 << 10, 1, 1, inline=True),
    Case("64 KiB, by the thread", 64 << 10, 1, 1),
    Case("64 MiB in 8 MiB chunks", 1 << 20, 64, 8),
    Case("56 descriptors of 32 KiB", 32 << 10, 56, 56, scattered=True),
]


class Reader:
    """A transport, and what it has told."""

    def __init__(self, inline_s_max: float) -> None:
        self.events: SimpleQueue[TransportEvent] = SimpleQueue()
        name = f"reader-{os.getpid()}-{inline_s_max}"
        self.transport = nixl_transport(name, self.events.put, inline_s_max=inline_s_max)

    def read(self, prepared_list: int, index: npt.NDArray[np.int32], *, read_id: int) -> float:
        """Post one read and wait for its answer; return seconds."""
        parts = (Part(prepared_list, UnitPairs(index.astype(np.int64), index.astype(np.int64))),)
        started = time.perf_counter()
        answers = self.transport.post([RankRead(read_id, PEER, LeaseName(0, 0), parts)])
        ended = answers[0] if answers else self.events.get(timeout=60)
        elapsed_s = time.perf_counter() - started
        assert isinstance(ended, ReadEnded), ended
        assert ended.verdict == "held", ended
        return elapsed_s


def main() -> None:
    """Measure every case and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--tls", default="", help="UCX_TLS of both processes, for example tcp")
    args = parser.parse_args()
    if args.tls:
        os.environ["UCX_TLS"] = args.tls
    child = Node()
    try:
        child.open_now(exporting, "nixl", f"bench-{os.getpid()}", nbytes=CACHE_BYTES, slots=8, seed=1)
        print(f"{platform.platform()}, {os.cpu_count()} cores, {args.tls or 'default transports'}")
        print(f"{'':26}{'bare us':>10}{'kvflow us':>11}{'kvflow GB/s':>13}{'bare/kvflow':>13}")
        measure(child.about_now(), args.rounds)
    finally:
        child.go()


def measure(about: dict[str, object], rounds: int) -> None:
    """Open both readers on one buffer and run all cases."""
    buffer, epochs = np.zeros(CACHE_BYTES, np.uint8), np.zeros(8, np.uint64)
    region = Region(buffer.ctypes.data, buffer.nbytes)
    source_region, epochs_region = (msgspec.convert(about[name], Region) for name in ("cache", "epochs"))
    planes = msgspec.convert(about["published"], Published).planes
    readers = {inline: Reader(inline_s_max) for inline, inline_s_max in ((True, None), (False, 0.0))}
    for reader in readers.values():
        reader.transport.start([region], Region(epochs.ctypes.data, epochs.nbytes))
        reader.transport.add_peer(PeerAddress(PEER, planes, epochs_region))
        reader.events.get(timeout=30)
    bare = Agent(load_binding(), f"bare-{os.getpid()}", progress=False)
    bare.register([region])
    remote_name = bare.add_remote(decode_envelope(planes["nixl"], transport="nixl").blob)
    for number, case in enumerate(CASES):
        theirs, ours = (
            np.array([[at.address, case.block, 0, case.block, case.count]]) for at in (source_region, region)
        )
        reader = readers[case.inline]
        reader.transport.prepare(PreparedList(number, PEER, theirs, ours, binding=Blocks(case.block, case.chunk)))
        remote = bare.prepare_remote(remote_name, theirs, "DRAM")
        local = bare.prepare_local(ours, "DRAM")
        index = np.arange(case.count, dtype=np.int32)
        if case.scattered:
            index = np.random.default_rng(0).permutation(index).astype(np.int32)
        read_bare = partial(bare_read, bare, (local, remote), index, case)
        read_ours = partial(reader.read, number, index)
        bare_s, ours_s = [], []
        for turn in range(max(10, rounds * (1 << 20) // max(1 << 20, case.block * case.count))):
            if turn % 2:
                bare_s.append(read_bare())
            ours_s.append(read_ours(read_id=number << 32 | turn))
            if not turn % 2:
                bare_s.append(read_bare())
        report(case, bare_s[2:], ours_s[2:])
    for reader in readers.values():
        reader.transport.close()
    bare.destroy()


def bare_read(agent: Agent, lists: tuple[int, int], index: npt.NDArray[np.int32], case: Case) -> float:
    """Post and poll chunk after chunk; return seconds."""
    local, remote = lists
    started = time.perf_counter()
    for first, stop in pairwise(case.cuts):
        handle = agent.make_read(local, index[first:stop], remote, index[first:stop])
        done = agent.post(handle)
        while not done:
            done = agent.poll(handle)
        agent.release(handle)
    return time.perf_counter() - started


def report(case: Case, bare_s: list[float], ours_s: list[float]) -> None:
    """Print the medians of one case."""
    bare, ours = statistics.median(bare_s), statistics.median(ours_s)
    ratio = statistics.median(b / o for b, o in zip(bare_s, ours_s, strict=True))
    rate = case.block * case.count / ours / 1e9
    print(f"{case.title:26}{bare * 1e6:10.1f}{ours * 1e6:11.1f}{rate:13.2f}{ratio:13.2f}")


if __name__ == "__main__":
    main()
