# ruff: noqa: T201 - standard output is its answer
"""Reads over a modelled network card, idle and beside a main thread that computes.

    python -m tests.benchmarks.pacing [--rounds 3] [--seconds 2]

The link is that of ``tests.helpers.async_backend``: 50 GB/s, 10 us, a send queue of 256 descriptors; a post takes 20 us
and 0.1 us for each descriptor, and every call releases the interpreter lock. No bytes move: this memory is slower
than the link. Many requests of 320 MiB wait, as 8,192 tokens of a model with 70 billion parameters are for one of eight
ranks. The main thread waits (``idle``), computes half of the time (``half``: 5 ms of 10) or all of it (``python``).

A row is good if it keeps 0.8 of the rate idle and 0.5 beside ``half``, both with a progress thread.
"""

import argparse
import statistics
import threading
import time
from unittest import mock

import numpy as np

from kvflow.layout.component import Region
from kvflow.leases.tickets import LeaseName
from kvflow.planning.pairs import UnitPairs
from kvflow.reads.contract import Part, PeerAdded, PeerAddress, PreparedList, RankRead, ReadEnded
from kvflow.reads.pacing import Pace
from tests.contract.conftest import Descriptors
from tests.helpers.async_backend import AsyncTransport, LinkModel

REQUEST = 320 << 20
REQUESTS = 2000
WARM_S = 0.5
"""Before the measured time: the window finds its size."""

CASES = {
    "8 KiB pages, progress thread": (8 << 10, True),
    "32 KiB pages, progress thread": (32 << 10, True),
    "256 KiB pages, progress thread": (256 << 10, True),
    "8 KiB pages, no progress thread": (8 << 10, False),
    "32 KiB pages, no progress thread": (32 << 10, False),
}


class Inbox:
    """A sink that counts answers."""

    def __init__(self):
        self.changed, self.ended, self.added, self.bad = threading.Condition(), 0, 0, []

    def __call__(self, event):
        with self.changed:
            self.added += isinstance(event, PeerAdded)
            if isinstance(event, ReadEnded):
                self.ended += 1
                if event.verdict != "held" and event.code != "cancelled":
                    self.bad.append(event)
            self.changed.notify_all()


def compute(seconds):
    """Compute Python for so long."""
    end, value = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        value += 1


def beside(kind, until):
    """Be the main thread until a time."""
    while time.perf_counter() < until:
        if kind != "idle":
            compute(5e-3)
        if kind != "python":
            time.sleep(5e-3)


def measure(page, progress, kind, seconds, *, paced=True):
    """Return GB/s, and the MiB of a chunk and of the window at the end."""
    memory = np.zeros(1 << 20, np.uint8)  # never touched: only addresses count
    regions = [Region(memory.ctypes.data, REQUEST)]
    epochs = np.zeros(8, np.uint64)
    table = Region(epochs.ctypes.data, epochs.nbytes)
    model = LinkModel(progress=progress, moves=False)
    inbox = Inbox()
    exporter = AsyncTransport("exporter", lambda _: None, model=model)
    reader = AsyncTransport("reader", inbox, model=model, inline_s_max=0.0)
    count = REQUEST // page
    rows = np.array([[memory.ctypes.data, page, 0, page, count]], np.int64)
    order = np.random.default_rng(1).permutation(count).astype(np.int64)
    has_room = mock.patch.object(Pace, "has_room", Pace.has_room if paced else lambda *_: False)
    resize = mock.patch.object(Pace, "_resize", Pace._resize if paced else lambda *_: None)
    with has_room, resize:
        for end in (exporter, reader):
            end.start(regions, table)
        reader.add_peer(PeerAddress("p", exporter.published().planes, table))
        reader.prepare(PreparedList(1, "p", rows, rows, "DRAM", "DRAM", binding=Descriptors(rows)))

        reader.post(
            [RankRead(number, "p", LeaseName(0, 0), (Part(1, UnitPairs(order, order)),)) for number in range(REQUESTS)]
        )
        link = reader.backend
        beside(kind, time.perf_counter() + WARM_S)
        before, started = (link.bytes_ended, link.chunks_ended), time.perf_counter()
        beside(kind, started + seconds)
        took = time.perf_counter() - started
        nbytes, chunks = link.bytes_ended - before[0], link.chunks_ended - before[1]
        assert inbox.ended < REQUESTS, "there is nothing left to read"
        pace = reader._core._lanes._lanes["p"].pace
        window = 0 if pace is None else pace.window
        reader.close()
        exporter.close()
    assert inbox.bad == []
    return nbytes / took / 1e9, nbytes / max(1, chunks) / (1 << 20), window / (1 << 20)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    args = parser.parse_args()
    rate = LinkModel().bytes_per_s / 1e9
    print(f"{f'GB/s of {rate:.0f}':44}{'idle':>8}{'half':>8}{'python':>8}   MiB of a chunk and the window (half)")
    for name, (page, progress) in CASES.items():
        for pacing in (False, True):
            found = {
                kind: [measure(page, progress, kind, args.seconds, paced=pacing) for _ in range(args.rounds)]
                for kind in ("idle", "half", "python")
            }
            rates = {kind: statistics.median(each[0] for each in rounds) for kind, rounds in found.items()}
            chunk, window = (statistics.median(each[at] for each in found["half"]) for at in (1, 2))
            print(
                f"{name:34}{'paced' if pacing else 'fixed':>10}"
                + "".join(f"{rates[kind]:8.1f}" for kind in rates)
                + f"   {chunk:.1f}, {window:.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
