"""Scattering a buffer: as few copies as the target's units allow, and a defect in between loses nothing."""

import logging

import numpy as np
import pytest

from kvflow.errors import ConfigInvalid
from kvflow.layout.component import Region
from kvflow.leases.tickets import LeaseName
from kvflow.planning.pairs import UnitPairs
from kvflow.planning.staging import AXES_MAX, Scatter
from kvflow.reads.backend import BackendError
from kvflow.reads.contract import CancelReads, Part, PeerAddress, PreparedList, RankRead
from kvflow.reads.core import PostReads, ReadCore, RemovePeer, ResetReader
from kvflow.reads.staging import Scatterer, StagingMemory, evenly_spaced
from tests.helpers.loops import looped

from .lane_reads import Units
from .test_core import EPOCHS, Bench, ScriptedBackend

PIECE, SLOTS, UNITS = 16, 8, 32
BUFFER = 4096


@looped(
    "places, stretches",
    [
        ([], []),
        ([5], [(0, 1, 5, 0)]),
        ([0, 8, 16], [(0, 3, 0, 8)]),
        ([16, 8, 0], [(0, 3, 16, -8)]),
        ([0, 8, 24, 32, 40], [(0, 2, 0, 8), (2, 3, 24, 8)]),
        ([7, 7], [(0, 2, 7, 0)]),
        ([0, 1, 3, 4], [(0, 2, 0, 1), (2, 2, 3, 1)]),
    ],
)
def test_places_are_divided_into_stretches_of_equal_steps(places, stretches):
    assert list(evenly_spaced(places)) == stretches


@pytest.fixture
def target():
    return np.zeros(UNITS * 2 * PIECE, np.uint8)


def staged_list(target, list_id=0, peer="p"):
    """A unit has two pieces in a row; in the buffer they lie the other way around: all first ones, then all second."""
    address = target.ctypes.data
    axes = [2, SLOTS * PIECE, PIECE, *[1, 0, 0] * (AXES_MAX - 1)]
    box = [PIECE, 0, PIECE, address, 2 * PIECE, 0, 0, *axes]
    scatter = Scatter(np.array([box], np.int64), SLOTS, (UNITS, 1, 1))
    source = np.array([[1 << 20, PIECE, 0, PIECE, UNITS], [1 << 21, PIECE, 0, PIECE, UNITS]])
    buffer = np.array([[0, PIECE, 0, PIECE, SLOTS], [SLOTS * PIECE, PIECE, 0, PIECE, SLOTS]])
    return PreparedList(list_id, peer, source, buffer, scatter=scatter, binding=Units(SLOTS, 2 * PIECE))


def test_more_staging_memory_than_there_is_names_its_setting():
    with pytest.raises(ConfigInvalid, match="staging_bytes is 1,152,921,504,606,846,976"):
        StagingMemory(1 << 60)


class StagedBench(Bench):
    """An owner with staging buffers over a backend that does what the test says."""

    def __init__(self, target):
        self.backend, self.events = ScriptedBackend(), []
        self.memory = StagingMemory(8 * BUFFER)
        region = Region(target.ctypes.data, target.nbytes)
        self.core = ReadCore(self.backend, [region], self.events.append, lambda: 0.0, self.memory)
        self.core.handle(PeerAddress("p", {}, EPOCHS))
        self.core.handle(staged_list(target))
        for buffer in range(8):
            self.memory.content(buffer)[:] = 7
        self.events.clear()

    def post(self, read_id, units, peer="p"):
        pairs = UnitPairs(np.array(units), np.array(units))
        self.core.handle(PostReads((RankRead(read_id, peer, LeaseName(3, 0), (Part(0, pairs),)),)))

    def take_all_buffers(self, target):
        """Have four peers read more than lands; return them. Their reads are numbered from 0."""
        peers = [f"hung{number}" for number in range(4)]
        for number, peer in enumerate(peers):
            self.core.handle(PeerAddress(peer, {}, EPOCHS))
            self.core.handle(staged_list(target, peer=peer))
            self.post(number, range(3 * SLOTS), peer)
        for _ in range(2 * len(peers)):
            self.step()
        assert self.memory.use.in_use == self.memory.use.buffers
        return peers

    def land(self, outcome=0):
        super().land(outcome)
        self.check()

    def fence(self):
        """Post a fence, and let it arrive."""
        self.step()
        self.land()

    def step(self):
        self.core.step()
        self.check()

    def check(self):
        """The law of staging, and what the transport says of it."""
        self.core._lanes.check()
        assert self.memory.use.in_use == self.core._lanes.staging()[0]


@pytest.fixture
def bench(target):
    return StagedBench(target)


def test_a_chunk_has_a_buffer_from_its_post_until_it_is_scattered(bench, target):
    bench.post(1, range(2 * SLOTS))
    bench.step()
    bench.step()
    assert bench.memory.use.in_use == 2
    assert not target.any()
    bench.land()
    assert target.reshape(UNITS, -1).any(axis=1).tolist() == [unit < SLOTS for unit in range(UNITS)]
    bench.land()
    assert bench.seen() == []
    bench.fence()
    assert bench.seen() == ["1 held"]
    assert target[: 2 * SLOTS * 2 * PIECE].all()
    assert bench.memory.use.in_use == 0


def test_nothing_is_scattered_once_a_read_is_cancelled_or_has_failed(bench, target):
    bench.post(1, range(2 * SLOTS))
    bench.step()
    bench.step()
    bench.core.handle(CancelReads((1,)))
    assert bench.memory.use.quarantined == 2
    assert bench.memory.use.quarantined_bytes == 2 * BUFFER
    bench.land()
    bench.land()
    assert bench.seen() == ["1 cancelled"]
    bench.post(2, range(2 * SLOTS))
    bench.step()
    bench.step()
    bench.land(BackendError("peer_lost", "reset"))
    bench.land()
    assert bench.seen() == ["PeerFailed peer_lost", "2 peer_lost"]
    assert not target.any()
    assert bench.memory.use.in_use == 0


def test_a_peer_waiting_for_buffers_of_hung_peers_continues_after_a_reset(bench, target):
    hung = bench.take_all_buffers(target)
    assert bench.memory.use.waiting == frozenset()  # what they are to be read next waits behind what they owe
    bench.post(9, range(2 * SLOTS))
    assert bench.memory.use.waiting == {"p"}
    assert not bench.memory.use.starved
    bench.core.handle(CancelReads(tuple(range(len(hung)))))
    for peer in hung:
        bench.core.handle(RemovePeer(peer))
    bench.step()
    assert bench.memory.use.waiting == {"p"}
    assert bench.memory.use.starved
    bench.core.handle(ResetReader())
    assert not bench.memory.use.starved
    assert bench.memory.use.waiting == frozenset()
    bench.events.clear()
    for _ in range(2):
        bench.step()
        bench.land()
    bench.fence()
    assert bench.seen() == ["9 held"]
    assert bench.memory.use.in_use == 0


def test_a_peer_that_is_read_directly_waits_for_no_buffer(bench, target):
    bench.take_all_buffers(target)
    bench.core.handle(PeerAddress("q", {}, EPOCHS))
    rows = np.array([[target.ctypes.data, PIECE, 0, PIECE, 1]])
    bench.core.handle(PreparedList(0, "q", rows, rows, binding=Units(1, PIECE)))
    bench.post(9, [0], "q")
    assert bench.memory.use.waiting == frozenset()
    bench.step()
    assert bench.backend.calls[-1] == ("post", 9)


def test_a_defect_while_scattering_ends_the_read_and_frees_its_buffer(bench, monkeypatch, caplog):
    def defect(*_):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Scatterer, "start", defect)
    with caplog.at_level(logging.CRITICAL, "kvflow.reads.core"):
        bench.post(1, range(SLOTS))
        bench.step()
        bench.land()
    assert bench.seen() == ["1 transport_error", "PeerFailed transport_error"]
    assert bench.memory.use.in_use == 0
    assert not bench.core.in_flight


def test_closing_gives_every_buffer_back(bench, target):
    bench.post(1, range(2 * SLOTS))
    bench.step()
    bench.core.begin_close()
    assert bench.memory.use.quarantined == 1
    bench.core.end_close()
    bench.check()
    assert bench.seen()[-1] == "1 cancelled"
    assert bench.memory.use.in_use == 0
    assert not target.any()
