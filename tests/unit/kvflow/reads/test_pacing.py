"""Windows and looks of asynchronous peers, in virtual time over a modelled link."""

import numpy as np
import pytest

from kvflow.layout.component import Region
from kvflow.leases.tickets import LeaseName
from kvflow.planning.pairs import UnitPairs
from kvflow.reads.contract import (
    CHUNK_BYTES_MAX,
    CHUNK_DESCRIPTORS_MAX,
    CancelReads,
    Part,
    PeerAdded,
    PeerAddress,
    PreparedList,
    RankRead,
    RateLearned,
    ReadEnded,
)
from kvflow.reads.core import PostReads, ReadCore
from kvflow.reads.pacing import (
    HORIZON_S,
    LARGE_CHUNK_BYTES_MAX,
    MEASURED_BYTES,
    WINDOW_MAX,
    WINDOW_MIN,
    Gauge,
    Pace,
)
from kvflow.reads.planes import PlaneBackends
from kvflow.reads.thread import PAUSE_S_MIN
from tests.contract.conftest import Descriptors
from tests.helpers.async_backend import AsyncBackend, LinkModel

REQUEST = 320 << 20
TURN_S = 5e-3
"""What Python's interpreter gives a thread that computes before another one has its turn."""


class VirtualProcess:
    """A clock, and a main thread that computes for the first part of each ``2 * TURN_S``, and waits for the rest."""

    def __init__(self, computes_s):
        self.now = 0.0
        self._computes_s = computes_s

    def clock(self):
        return self.now

    def spend(self, seconds):
        """Spend time without the interpreter lock, then win it back."""
        self.now += seconds
        left = self._computes_s - self.now % (2 * TURN_S)
        if left > 0:
            self.now += min(TURN_S, left)


class Reading:
    """A core over a modelled link with requests that wait, driven as the read thread drives it."""

    def __init__(self, page, *, progress=True, computes_s=0.0, requests=40, **model):
        self.process = VirtualProcess(computes_s)
        self.events = []
        memory = np.zeros(1 << 12, np.uint8)  # only addresses count: nothing moves
        epochs = np.zeros(8, np.uint64)
        regions, table = [Region(memory.ctypes.data, REQUEST)], Region(epochs.ctypes.data, epochs.nbytes)
        self.keep = memory, epochs
        link = LinkModel(progress=progress, moves=False, **model)
        make = {"clock": self.process.clock, "spend": self.process.spend}
        self.exporter = AsyncBackend("pacing exporter", regions, table, link, **make)
        self.backend = AsyncBackend("pacing reader", regions, table, link, **make)
        backends = PlaneBackends({"async": self.backend}, {})
        self.core = ReadCore(backends, regions, self.events.append, self.process.clock)
        self.core.handle(PeerAddress("p", {"async": self.exporter.metadata}, table))
        assert isinstance(self.events.pop(), PeerAdded)
        count = REQUEST // page
        rows = np.array([[memory.ctypes.data, page, 0, page, count]], np.int64)
        self.core.handle(PreparedList(1, "p", rows, rows, "DRAM", "DRAM", binding=Descriptors(rows)))
        order = np.random.default_rng(1).permutation(count)
        self.core.handle(
            PostReads(
                tuple([RankRead(n, "p", LeaseName(0, 0), (Part(1, UnitPairs(order, order)),)) for n in range(requests)])
            )
        )

    def run_until(self, now):
        """Drive the core until a time, and return the bytes that have arrived."""
        backoff_s = 0.0
        while self.process.now < now:
            if self.core.step():
                backoff_s = 0.0
                continue
            backoff_s = min(max(PAUSE_S_MIN, 2 * backoff_s), 1e-3)
            self.process.spend(self.core.rest_s() or backoff_s)
        return self.backend.bytes_ended

    @property
    def pace(self):
        return self.core._lanes._lanes["p"].pace

    def close(self):
        self.core.begin_close()
        self.core.end_close()
        self.exporter.close()


@pytest.fixture
def reading():
    made = []

    def make(*args, **options):
        made.append(Reading(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def rate_of(world, start=0.1, stop=0.2):
    """The share of 50 GB/s that arrives once the window has its size."""
    before = world.run_until(start)
    begun = world.process.now
    return (world.run_until(stop) - before) / (world.process.now - begun) / 50e9


@pytest.mark.parametrize("page", [8 << 10, 32 << 10, 256 << 10])
def test_a_waiting_process_uses_nine_tenths_of_the_link(reading, page):
    assert rate_of(reading(page)) > 0.9


@pytest.mark.parametrize("page", [8 << 10, 32 << 10, 256 << 10])
def test_a_process_that_computes_half_of_the_time_uses_half_of_the_link(reading, page):
    assert rate_of(reading(page, computes_s=TURN_S)) > 0.5


def test_without_a_progress_thread_chunks_stay_few_and_small(reading):
    world = reading(8 << 10, progress=False)
    world.run_until(0.05)
    assert world.pace is None
    assert sum(entry.pace is None for entry in world.core._in_flight) <= 2


@pytest.mark.parametrize("rate", [5e9, 50e9])
def test_a_window_lasts_ten_milliseconds_on_a_link_of_any_rate(reading, rate):
    world = reading(256 << 10, bytes_per_s=rate)
    world.run_until(0.3)
    assert world.pace.bytes_per_s == pytest.approx(rate, rel=0.2)
    assert world.pace.window == pytest.approx(rate * HORIZON_S, rel=0.5)


def test_most_looks_find_a_chunk_that_has_ended(reading):
    world = reading(256 << 10)
    asked = []
    poll = world.backend.poll

    def ask(posted):
        found = poll(posted)
        if posted.slots is None:  # of a chunk
            asked.append(found)
        return found

    world.backend.poll = ask
    world.run_until(0.1)
    asked.clear()
    world.run_until(0.2)
    assert sum(found is not None for found in asked) > len(asked) / 3


def test_cancelled_reads_end_when_their_window_has_landed(reading):
    world = reading(256 << 10)
    world.run_until(0.1)
    world.core.handle(CancelReads(tuple(range(40))))
    world.run_until(0.1 + 4 * HORIZON_S)
    assert not world.core.in_flight
    assert sum(isinstance(event, ReadEnded) for event in world.events) == 40


def ended(pace, nbytes, now, *, posted_at, post_s, waits=True):
    pace.end(nbytes, now, posted_at=posted_at, post_s=post_s, waits=waits)


def test_posts_that_take_as_long_as_their_bytes_are_never_asynchronous():
    pace = Pace(8192)
    for n in range(50):
        pace.post(CHUNK_BYTES_MAX, n)
        ended(pace, CHUNK_BYTES_MAX, n + 1e-3, posted_at=n, post_s=0.9e-3)
    assert not pace.asynchronous
    assert not pace.has_room(2)
    assert (pace.window, pace.chunk_bytes, pace.chunk_descriptors) == (
        WINDOW_MIN,
        CHUNK_BYTES_MAX,
        CHUNK_DESCRIPTORS_MAX,
    )


def asynchronous_pace():
    pace = Pace(8192)
    for n in range(3):
        pace.post(CHUNK_BYTES_MAX, n)
        ended(pace, CHUNK_BYTES_MAX, n + 1e-3, posted_at=n, post_s=1e-5)
    assert pace.asynchronous
    return pace


def test_a_window_that_runs_dry_doubles_up_to_a_bound():
    pace = asynchronous_pace()
    for n in range(20):
        pace.post(pace.window, n)
        ended(pace, pace.window, n + 1e-3, posted_at=n, post_s=0)
    assert (pace.window, pace.chunk_bytes, pace.chunk_descriptors) == (WINDOW_MAX, LARGE_CHUNK_BYTES_MAX, 8192)


def test_a_window_stays_when_nothing_waits():
    pace = asynchronous_pace()
    for n in range(20):
        pace.post(1 << 20, n)
        ended(pace, 1 << 20, n + 1e-3, posted_at=n, post_s=0, waits=False)
    assert pace.window == WINDOW_MIN


def test_a_chunk_that_failed_leaves_the_window():
    pace = asynchronous_pace()
    pace.post(WINDOW_MIN, 9.0)
    assert not pace.has_room(2)
    pace.drop(WINDOW_MIN)
    assert pace.has_room(2)
    assert pace.bytes_in_flight == 0


@pytest.mark.parametrize("rate", [1e9, 50e9])
@pytest.mark.parametrize("progress", [True, False])
def test_the_rate_of_a_peer_is_told_once(reading, rate, progress):
    world = reading(256 << 10, bytes_per_s=rate, progress=progress)
    world.run_until(0.5)
    (told,) = [event for event in world.events if isinstance(event, RateLearned)]
    assert (told.peer, told.source_memory, told.target_memory) == ("p", "DRAM", "DRAM")
    assert told.nbytes >= MEASURED_BYTES
    assert 0.5 * rate < told.nbytes / told.busy_s < 1.05 * rate, "the window still grows"


HALF = MEASURED_BYTES // 2


def test_chunks_that_may_wait_for_a_connection_do_not_count():
    gauge = Gauge()
    for now in (9.0, 9.5):  # both were posted before the first of them ended
        assert not gauge.add(2 * MEASURED_BYTES, 1.0, now, ("VRAM", "VRAM"))
    assert not gauge.add(HALF, 10.0, 11.0, ("VRAM", "VRAM"))
    assert gauge.add(HALF, 20.0, 21.0, ("VRAM", "VRAM"))
    assert (gauge.nbytes, gauge.busy_s) == (MEASURED_BYTES, 2.0)


def test_time_that_chunks_share_counts_once():
    gauge = Gauge()
    gauge.add(1, 0.0, 1.0, ("DRAM", "DRAM"))
    for posted_at, now in ((10.0, 12.0), (11.0, 13.0), (9.0, 14.0), (20.0, 21.0)):
        gauge.add(1, posted_at, now, ("DRAM", "DRAM"))
    assert gauge.busy_s == (14.0 - 9.0) + 1.0


def test_chunks_between_other_memories_do_not_count():
    gauge = Gauge()
    gauge.add(1, 0.0, 1.0, ("VRAM", "VRAM"))
    assert not gauge.add(MEASURED_BYTES, 2.0, 3.0, ("DRAM", "VRAM"))
    assert gauge.add(MEASURED_BYTES, 4.0, 5.0, ("VRAM", "VRAM"))
    assert gauge.memories == ("VRAM", "VRAM")
