"""Chunks that a helper of the read thread reads pieces of: every byte, every end, and nothing that outlives it."""

import logging
import os
import threading
from contextlib import closing

import numpy as np
import pytest

from kvflow.layout.component import Region
from kvflow.reads.backend import BackendError, PostedWork
from kvflow.reads.contract import PeerAddress
from kvflow.reads.nixl import copying
from kvflow.reads.nixl.backend import NixlBackend
from kvflow.reads.nixl.binding import Agent
from tests.helpers.copying import PATIENCE_S, copied_in_small_pieces

from .test_nixl_backend import Ends, WatchedAgent

pytestmark = pytest.mark.nixl

LOST = type("nixlRemoteDisconnectError", (RuntimeError,), {})
FAILED = type("nixlBackendError", (RuntimeError,), {})


class Shared(Ends):
    """A reader with one helper, which has read from its peer."""

    def __init__(self):
        super().__init__(copy_threads=2)
        assert self.finish(self.reader.post(self.chunk())) == 0
        (self.helper,) = self.reader._helpers._helpers
        self.clear()

    def clear(self):
        self.caches[0][:] = 0

    def watch(self, *, read_first=None, reader=(), helper=()):
        """Have each of both read a piece at least; ``read_first`` sees the helper's. Then raise errors."""
        both = threading.Barrier(2)
        met = set()

        def meet():
            if (name := threading.current_thread().name) not in met:
                met.add(name)
                both.wait(PATIENCE_S)
                if name == "kvflow-copy" and read_first is not None:
                    read_first()

        for reading, errors in ((self.reader._reader, reader), (self.helper.readers[0], helper)):
            reading.agent = WatchedAgent(reading.agent, errors, meet)
        return self.reader._reader.agent, self.helper.readers[0].agent

    def read(self):
        return self.finish(self.reader.post(self.chunk()))


@pytest.fixture
def ends():
    with copied_in_small_pieces(), closing(Shared()) as ends:
        yield ends


def test_each_thread_reads_some_pieces_and_together_they_read_all(ends):
    ours, theirs = ends.watch()
    assert ends.read() == 0
    assert np.array_equal(*ends.caches)
    assert ours.posts + theirs.posts == 8
    assert ours.posts
    assert theirs.posts


def test_a_chunk_is_not_over_before_the_helpers_last_piece(ends):
    """The helper waits within a piece until the read thread has taken all others."""
    goes_on = threading.Event()
    ends.watch(read_first=lambda: goes_on.wait(PATIENCE_S))

    take = copying.Pieces._take

    def taken(pieces):
        piece = take(pieces)
        if piece is None:
            threading.Timer(0.05, goes_on.set).start()  # the read thread would return meanwhile
        return piece

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying.Pieces, "_take", taken)
        assert ends.read() == 0
        assert np.array_equal(*ends.caches)
    cores = os.sched_getaffinity(ends.helper._thread.native_id)
    assert cores == os.sched_getaffinity(0), "it was late, so it may have the core of the read thread"


@pytest.mark.parametrize("where", ["reader", "helper"])
@pytest.mark.parametrize(("error", "code"), [(LOST("lost"), "peer_lost"), (FAILED("failed"), "transport_error")])
def test_a_piece_that_fails_fails_the_chunk_when_all_have_ended(ends, where, error, code):
    ends.watch(**{where: [error]})
    with pytest.raises(BackendError) as caught:
        ends.read()
    assert caught.value.reason.code == code
    assert len(ends.helper.readers[0].free_spans) == 64
    ends.reader.remove("p", gone=False)
    assert ends.helper.connected == set(), "a connection over which something failed is not kept"
    ends.clear()
    ends.meet(ends.exporter)
    assert ends.read() == 0
    assert np.array_equal(*ends.caches)


@pytest.mark.parametrize("where", ["reader", "helper"])
def test_a_piece_whose_end_is_unknown_keeps_the_chunk_until_a_reset(ends, where, monkeypatch):
    ends.watch(**{where: [FAILED("first"), FAILED("the flush too")]})
    posted = ends.reader.post(ends.chunk())
    assert isinstance(posted, PostedWork)
    assert [ends.reader.poll(posted) for _ in range(3)] == [None] * 3
    destroyed = []
    destroy = Agent.destroy
    monkeypatch.setattr(Agent, "destroy", lambda agent: (destroyed.append(agent._name), destroy(agent)))
    ends.reader.reset()
    assert destroyed == ["reader/reader/1", "reader/reader/0"], "both, before the reset returns"
    assert not ends.helper._thread.is_alive()
    ends.meet(ends.exporter)
    ends.clear()
    assert ends.read() == 0
    assert np.array_equal(*ends.caches)


def test_a_piece_that_fails_waits_for_one_whose_end_is_unknown(ends):
    ends.watch(reader=[LOST("lost")], helper=[FAILED("first"), FAILED("the flush too")])
    posted = ends.reader.post(ends.chunk())
    assert isinstance(posted, PostedWork)
    assert [ends.reader.poll(posted) for _ in range(3)] == [None] * 3


def test_a_post_that_returns_early_is_not_shared_again(ends, monkeypatch):
    real = ends.helper.readers[0].agent
    late = WatchedAgent(real)
    late.post = lambda handle: real.post(handle) and False
    ends.watch()
    ends.helper.readers[0].agent._agent = late
    assert ends.read() == 0
    assert np.array_equal(*ends.caches)
    assert ends.reader._peers["p"].alone


def test_a_helper_that_dies_within_a_piece_leaves_its_end_unknown(ends, caplog):
    ends.watch(helper=[MemoryError()])
    with pytest.raises(RuntimeError, match="ended while it read"):
        ends.read()
    ends.helper._thread.join(PATIENCE_S)
    ends.clear()
    for _ in range(3):
        assert ends.read() == 0
        assert np.array_equal(*ends.caches)
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == [
        "kvflow.reads: a thread that helps with large reads has ended; the others go on"
    ]


def test_a_helper_without_an_agent_is_told_once_and_the_reader_reads(monkeypatch, caplog):
    monkeypatch.setattr("kvflow.reads.nixl.backend.SHARED_BYTES_MIN", 1)
    monkeypatch.setattr(copying, "SHARED_BYTES_MIN", 1)
    with closing(Ends(copy_threads=3)) as ends:
        monkeypatch.setattr(ends.reader._helpers, "_make_reader", lambda: 1 / 0)
        for _ in range(2):
            ends.caches[0][:] = 0
            assert ends.finish(ends.reader.post(ends.chunk())) == 0
            assert np.array_equal(*ends.caches)
        for helper in ends.reader._helpers._helpers:
            helper._thread.join(PATIENCE_S)
        assert [record.levelname for record in caplog.records if "helps" in record.message] == ["ERROR"] * 2


def test_without_a_further_thread_the_reader_reads(monkeypatch, caplog):
    monkeypatch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no thread")))
    helper = copying.Helper(lambda: None)
    assert not helper.is_ready()
    helper.start(lambda: None)
    helper.finish()
    helper.close()
    assert "a thread less" in caplog.text


@pytest.mark.parametrize("others", [set(), {4096}])
def test_a_helper_without_a_core_of_its_own_is_not_ready(ends, others, monkeypatch):
    """There is no other core, or it was taken away."""
    ready = type(ends.helper).__base__.is_ready
    here = copying._libc.sched_getcpu()
    monkeypatch.setattr(copying._libc, "sched_getcpu", lambda: here, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {here} | others)
    ends.helper._avoided = -1
    assert not ready(ends.helper)
    monkeypatch.setattr(type(ends.helper), "is_ready", ready)
    assert ends.read() == 0
    assert np.array_equal(*ends.caches)


def test_a_helper_keeps_off_the_core_of_the_reader_also_when_it_moves(ends, monkeypatch):
    set_to = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: set_to.append((thread, cores)))
    for core in (1, 1, 2, 1):
        monkeypatch.setattr(copying._libc, "sched_getcpu", lambda core=core: core, raising=False)
        ends.helper._avoided = -1 if not set_to else ends.helper._avoided
        assert ends.helper.is_ready()
    thread = ends.helper._thread.native_id
    assert set_to == [(thread, {0, 2}), (thread, {0, 1}), (thread, {0, 2})]


def test_a_peer_with_small_reads_only_is_not_added_to_the_helper(ends):
    ends.reader.add(PeerAddress("itself", {"nixl": ends.reader.metadata}, ends.table))
    assert ends.finish(ends.check(peer="itself")) == [103]
    assert ends.helper.connected == {"exporter/exporter"}


@pytest.mark.parametrize("gone", [False, True])
def test_the_helper_keeps_and_closes_connections_as_the_reader_does(ends, gone):
    reading = ends.helper.readers[0]
    reading.agent = agent = WatchedAgent(reading.agent)
    released = []
    agent.release_list = released.append
    ends.reader.remove("p", gone=gone)
    assert len(released) == 3, "its epochs, and a list of each side"
    assert agent.forgotten == (["exporter/exporter"] if gone else [])
    del agent.release_list
    ends.meet(ends.exporter)
    assert ends.read() == 0
    assert np.array_equal(*ends.caches)


def test_a_peer_that_the_helper_cannot_add_is_read_by_the_reader_alone(ends, caplog):
    ends.reader.remove("p", gone=True)
    ends.meet(ends.exporter)
    reading = ends.helper.readers[0]
    reading.agent = WatchedAgent(reading.agent)
    reading.agent.add_remote = lambda _: (_ for _ in ()).throw(FAILED("no more files"))
    for _ in range(2):
        ends.clear()
        assert ends.read() == 0
        assert np.array_equal(*ends.caches)
    assert caplog.text.count("no more files") == 1


def test_a_child_that_is_forked_within_a_chunk_disturbs_nothing(ends):
    ends.watch(read_first=lambda: os.waitpid(os.fork() or os._exit(0), 0))
    assert ends.read() == 0
    assert np.array_equal(*ends.caches)


@pytest.mark.parametrize("options", [{}, {"copy_threads": 0}, {"copy_threads": 2, "reader_progress": True}])
def test_without_copy_threads_or_with_a_progress_thread_nothing_is_shared(options):
    memory = np.zeros(4096, np.uint8)
    region = Region(memory.ctypes.data, memory.nbytes)
    backend = NixlBackend("alone", [region], region, **options)
    assert backend._helpers._count == 0
    backend.close()
