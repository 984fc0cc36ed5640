"""The exporter of the TCP data plane that is fuzzed, in a process of its own.

Arguments: the encryption. The first line of standard output says what it serves; each line of standard input is
answered with what it has counted; the end of the input ends it. Some of its leases come and go all the time.
"""

import json
import logging
import select
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np

from kvflow.reads.backend import Envelope, encode_envelope
from kvflow.reads.tcp import wire
from kvflow.reads.tcp.certificates import draw_identity
from kvflow.reads.tcp.exporter import TcpExporter

from .tcp_ends import Leases, region_of, settings
from .tcp_frames import Served

LEASED, COMING_AND_GOING, BLOCKS, BLOCK_BYTES = 32, 16, 64, 4096
SECRET_BYTE = 0xEE
"""Of blocks that nobody ever leases; no other byte is above 127."""

EVERY_S = 0.005
COMES_AND_GOES = (2, 3)


class Counted(logging.Handler):
    """What was said to this process, and what it logged as a defect."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.told = {"requests": 0, "invalid": 0}
        self.defects = []
        logging.getLogger("kvflow").addHandler(self)
        logging.getLogger("kvflow").propagate = False
        threading.excepthook = lambda args: self.defects.append(repr(args.exc_value))
        wire.decode_request = self._counted(wire.decode_request)

    def emit(self, record):
        self.defects.append(self.format(record))

    def _counted(self, decode):
        def counting(frame):
            self.told["requests"] += 1
            try:
                return decode(frame)
            except wire.BadFrame:
                self.told["invalid"] += 1
                raise

        return counting

    def now(self):
        """Return all of it, and what the process has of memory, files and threads."""
        status = Path("/proc/self/status").read_text().split()
        rss = int(status[status.index("VmRSS:") + 1]) << 10
        files = len([*Path("/proc/self/fd").iterdir()])
        return {
            **self.told,
            "defects": self.defects[:5],
            "rss": rss,
            "files": files,
            "threads": threading.active_count(),
        }


def main(encryption):
    counted = Counted()
    leases = Leases(BLOCKS, BLOCK_BYTES)
    leases.cache[:, LEASED + COMING_AND_GOING :] = SECRET_BYTE
    held = range(LEASED)
    epochs = tuple(leases.lease(slot, held, held) for slot in (0, 1))
    some = range(LEASED, LEASED + COMING_AND_GOING)
    for slot in COMES_AND_GOES:
        leases.lease(slot, some, some)
    identity = draw_identity() if encryption == "tls" else None
    serving = leases.serving
    exporter = TcpExporter(settings(encryption), region_of(leases.epochs), serving, identity)
    served = Served(
        exporter.endpoint,
        encryption,
        b"" if identity is None else identity.certificate,
        encode_envelope(Envelope("tcp", "producer", wire.encode_layout(serving.tracks))),
        tuple(region_of(each).address for each in leases.cache),
        BLOCK_BYTES,
        BLOCKS,
        LEASED,
        epochs,
    )
    say(msgspec.json.encode(served).decode())
    say(np.ascontiguousarray(leases.cache).tobytes().hex())
    turn = 0
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], EVERY_S)
        if ready:
            if not sys.stdin.readline():
                break
            say(json.dumps(counted.now()))
        slot = COMES_AND_GOES[turn % 2]
        turn += 1
        leases.end(slot)
        time.sleep(0)
        leases.lease(slot, some, some)
    exporter.close()


def say(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
