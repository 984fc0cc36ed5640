# ruff: noqa: T201 - a script prints what it finds
"""Does an exporter survive readers that are killed in the middle of their reads?

Over shared memory it does. Over TCP, UCX 1.23 may abort it: "Known limits" in docs/explanation/architecture.md has the
figures. This script counts, for whichever settings of UCX are in the environment:

    UCX_TLS=tcp python tests/chaos/readers_killed.py --rounds 50 --how killed
    UCX_TLS=tcp UCX_TCP_SNDBUF=8k UCX_TCP_TX_SEG_SIZE=64k python tests/chaos/readers_killed.py --how stopped

``killed``: the reader is killed while it is served. ``hung``: it is stopped first, so that the exporter's socket is
full, and killed 0.3 s later. ``stopped``: the exporter is stopped when the reader dies, and goes on 50 ms later, as one
does that was starved of the processor, or a reader that was renewed because of it.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np

from kvflow.ids import PeerId
from kvflow.layout.region import Region
from kvflow.transport.base import PeerAddress, Program, Read, ReadCompleted, TransportEvent
from kvflow.transport.nixl import NixlTransport

EXPORTER = Path(__file__).parents[1] / "contract" / "exporter_process.py"
CACHE_BYTES = 64 << 20
BLOCK = 1 << 20
COUNT = CACHE_BYTES // BLOCK
CHUNK = 8
"""Blocks: 8 MiB, as a worker reads them; two chunks are in flight."""
PEER = PeerId("exporter", 0, "0" * 32, "tcp://127.0.0.1:1", "")


class Exporter:
    """The process that is to survive."""

    def __init__(self, log: Path) -> None:
        options = {"name": uuid.uuid4().hex, "nbytes": CACHE_BYTES, "slots": 64, "seed": 1}
        self._log = log
        with log.open("w") as words:
            self.process = subprocess.Popen(
                [sys.executable, str(EXPORTER), *(f"--{key}={value}" for key, value in options.items())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                text=True,
            )
        assert self.process.stdout is not None
        self.about = self.process.stdout.readline()

    def last_words(self) -> str:
        """Return why it ended: its signal, and what UCX said."""
        lines = [line for line in self._log.read_text().splitlines() if "Fatal" in line or "Assert" in line]
        return f"{-(self.process.returncode or 0)}: {lines[-1].partition(']')[2].strip() if lines else 'no word'}"


def read_for_ever() -> None:
    """Read all of an exporter, again and again; say so when the first read has ended."""
    about = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()))
    cache, epochs = (msgspec.convert(about[name], Region) for name in ("cache", "epochs"))
    target, table = np.zeros(CACHE_BYTES, np.uint8), np.zeros(64, np.uint64)
    index, cuts = np.arange(COUNT, dtype=np.int32), np.arange(0, COUNT + 1, CHUNK, dtype=np.int64)

    def post(read_id: int) -> None:
        transport.post(Read(read_id, PEER, 1, index, index, cuts, CACHE_BYTES))

    def sink(event: TransportEvent) -> None:
        if isinstance(event, ReadCompleted):
            if event.read_id == 1:
                print("reading", flush=True)
            post(event.read_id + 2)

    transport = NixlTransport(uuid.uuid4().hex, sink)
    transport.start([region_of(target)], region_of(table))
    transport.add_peer(PeerAddress(PEER, about["metadata"], epochs))
    rows = [np.array([[region.address, BLOCK, 0, BLOCK, COUNT]]) for region in (cache, region_of(target))]
    transport.prepare(Program(1, PEER, *rows))
    post(1)
    post(2)
    threading.Event().wait()


def region_of(array: np.ndarray) -> Region:
    """Return where an array lies."""
    return Region(array.ctypes.data, array.nbytes)


def kill_a_reader(exporter: Exporter, how: str, pause_s: float) -> None:
    """Start a reader, and kill it in the middle of a read."""
    reader = subprocess.Popen(
        [sys.executable, __file__, "--reader"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    with reader.stdin, reader.stdout:
        reader.stdin.write(exporter.about)
        reader.stdin.flush()
        assert reader.stdout.readline() == "reading\n", "it could not read"
        time.sleep(pause_s)
        if how == "hung":
            reader.send_signal(signal.SIGSTOP)
            time.sleep(0.3)
        if how == "stopped":
            exporter.process.send_signal(signal.SIGSTOP)
            time.sleep(0.05)
        reader.kill()
        reader.wait()
        if how == "stopped":
            time.sleep(0.05)
            exporter.process.send_signal(signal.SIGCONT)
    time.sleep(0.2)  # an exporter that dies of it does so when it next sends


def main() -> None:
    """Kill readers, and count what became of their exporters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--how", choices=["killed", "hung", "stopped"], default="killed")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="where the exporter's last words go")
    parser.add_argument("--reader", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reader:
        read_for_ever()
    ends: Counter[str] = Counter()
    rng = random.Random(1)
    exporter = Exporter(args.log)
    try:
        for _ in range(args.rounds):
            kill_a_reader(exporter, args.how, pause_s=rng.random() * 0.05)
            if exporter.process.poll() is not None:
                ends[exporter.last_words()] += 1
                exporter = Exporter(args.log)
    finally:
        exporter.process.kill()
        exporter.process.wait()
    print(f"{args.how}: {ends.total()} of {args.rounds} killed readers took the exporter with them", dict(ends))


if __name__ == "__main__":
    main()
