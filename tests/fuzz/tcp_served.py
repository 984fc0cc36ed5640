"""The exporter of the TCP data plane that is fuzzed, in a process of its own: some of its leases come and go."""

import threading
from contextlib import contextmanager

from kvflow.reads.tcp import wire
from kvflow.reads.tcp.certificates import draw_identity
from kvflow.reads.tcp.exporter import TcpExporter
from tests.unit.kvflow.reads.tcp.peers import certificate_of, region_of, settings
from tests.world.measuring import sample
from tests.world.process import logged_errors

from .tcp_ends import Leases
from .tcp_frames import Served

LEASED, COMING_AND_GOING, BLOCKS, BLOCK_BYTES = 32, 16, 64, 4096
SECRET_BYTE = 0xEE
"""Of blocks that nobody ever leases; no other byte is above 127."""

EVERY_S = 0.005
COMES_AND_GOES = (2, 3)
SOME = range(LEASED, LEASED + COMING_AND_GOING)


class Counted:
    """What was said to this process, and what its threads have raised."""

    def __init__(self):
        self.told = {"requests": 0, "invalid": 0}
        self.raised = []
        threading.excepthook = lambda args: self.raised.append(repr(args.exc_value))
        wire.decode_request = self._counted(wire.decode_request)

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
        found = sample("self")
        return {
            **self.told,
            "defects": [*self.raised, *logged_errors()][:5],
            "rss": found.rss,
            "files": found.descriptors.total(),
            "threads": threading.active_count(),
        }


class Exported:
    """The exporter, and what it serves."""

    def __init__(self, exporter, leases, epochs, certificate, encryption):
        self._counted = Counted()
        self._leases = leases
        addresses = tuple(region_of(each).address for each in leases.cache)
        layout = wire.encode_layout(leases.serving.tracks)
        served = (certificate, layout, addresses, BLOCK_BYTES, BLOCKS, LEASED, epochs)
        self._served = Served(exporter.endpoint, encryption, *served)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._come_and_go)
        self._thread.start()

    def served(self):
        return self._served

    def content(self):
        """Return all bytes of the cache."""
        return self._leases.cache.tobytes()

    def counts(self):
        return self._counted.now()

    def end(self):
        self._over.set()
        self._thread.join()

    def _come_and_go(self):
        while not self._over.wait(EVERY_S):
            for slot in COMES_AND_GOES:
                self._leases.end(slot)
                self._leases.lease(slot, SOME, SOME)


@contextmanager
def tcp_exporting(encryption):
    """Open one."""
    leases = Leases(BLOCKS, BLOCK_BYTES)
    leases.cache[:, LEASED + COMING_AND_GOING :] = SECRET_BYTE
    held = range(LEASED)
    epochs = tuple(leases.lease(slot, held, held) for slot in (0, 1))
    for slot in COMES_AND_GOES:
        leases.lease(slot, SOME, SOME)
    identity = draw_identity() if encryption == "tls" else None
    exporter = TcpExporter(settings(encryption=encryption), region_of(leases.epochs), leases.serving, identity)
    exported = Exported(exporter, leases, epochs, certificate_of(identity), encryption)
    try:
        yield exported
    finally:
        exported.end()
        exporter.close()
