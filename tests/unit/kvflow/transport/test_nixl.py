"""What only NIXL can get wrong: errors on an endpoint that lives, and a NIXL that is not there."""

import subprocess
import sys

import numpy as np
import pytest

from kvflow.errors import TransportUnavailable
from kvflow.layout.region import Region
from kvflow.transport import nixl, nixl_binding
from kvflow.transport.base import PeerAddress, Program, Read
from kvflow.transport.bounds import check_rows
from kvflow.transport.ledger import Chunk
from kvflow.transport.mover import Flight, MoveFailed, Prepared
from kvflow.transport.nixl import NixlMover


class FlakyAgent:
    """A real agent whose posts or polls raise what the test wants, after they were made."""

    def __init__(self, agent, errors):
        self._agent = agent
        self.posts = list(errors)

    def __getattr__(self, name):
        return getattr(self._agent, name)

    def post(self, handle):
        done = self._agent.post(handle)
        if self.posts and (error := self.posts.pop(0)) is not None:
            raise error
        return done


class Ends:
    """A reader and an exporter, driven without a thread."""

    def __init__(self):
        self.caches = [np.zeros(4096, np.uint8), np.arange(4096, dtype=np.uint8)]
        self.epochs = np.arange(100, 108, dtype=np.uint64)
        self.table = Region(self.epochs.ctypes.data, self.epochs.nbytes)
        self.regions = [Region(cache.ctypes.data, cache.nbytes) for cache in self.caches]
        self.reader, self.exporter = (
            NixlMover(name, [region], self.table)
            for name, region in zip(("reader", "exporter"), self.regions, strict=True)
        )
        self.meet(self.exporter)

    def meet(self, exporter, region=None):
        """Add an exporter as the peer, and prepare to read a region of it; that of ``exporter`` if none is named."""
        self.reader.add(PeerAddress("p", exporter.metadata, self.table))
        target, source = (
            np.array([[each.address, 64, 0, 64, 64]]) for each in (self.regions[0], region or self.regions[1])
        )
        program = Program(1, "p", source, target)
        self.reader.prepare(Prepared(program, check_rows(source), check_rows(target)))

    def chunk(self):
        index = np.arange(64, dtype=np.int32)
        return Chunk(Read(1, "p", 1, index, index, np.array([0, 64]), 4096), 0, 64)

    def finish(self, outcome):
        """Poll to the end. It is bounded by the test's own time limit."""
        while isinstance(outcome, Flight):
            value = self.reader.poll(outcome)
            if value is not None:
                return value
        return outcome

    def flaky(self, *errors):
        self.reader._reader.agent = FlakyAgent(self.reader._reader.agent, errors)


@pytest.fixture
def ends():
    ends = Ends()
    yield ends
    ends.reader.close()
    ends.exporter.close()


@pytest.mark.nixl
def test_an_error_on_a_living_endpoint_is_reported_after_a_flush(ends):
    """Descriptors before the failing one may still fly; a small read behind them proves that they have landed."""
    slots = len(ends.reader._reader.free_slots)
    backend_error = type("nixlBackendError", (RuntimeError,), {})
    ends.flaky(backend_error("NIXL_ERR_BACKEND"))
    with pytest.raises(MoveFailed) as caught:
        ends.finish(ends.reader.post(ends.chunk()))
    assert caught.value.reason.code == "transport_error"
    assert "NIXL_ERR_BACKEND" in caught.value.reason.detail
    assert len(ends.reader._reader.free_slots) == slots
    assert ends.finish(ends.reader.post(ends.chunk())) == 0
    assert np.array_equal(*ends.caches)
    assert ends.finish(ends.reader.post_fence("p", 3)) == 103


@pytest.mark.nixl
def test_without_a_flush_nobody_can_tell_and_the_flight_never_ends(ends):
    backend_error = type("nixlBackendError", (RuntimeError,), {})
    ends.flaky(backend_error("first"), backend_error("the flush too"))
    flight = ends.reader.post(ends.chunk())
    assert isinstance(flight, Flight)
    assert [ends.reader.poll(flight) for _ in range(3)] == [None] * 3


@pytest.mark.nixl
def test_a_lost_endpoint_is_terminal_at_once(ends):
    ends.flaky(type("nixlRemoteDisconnectError", (RuntimeError,), {})("NIXL_ERR_REMOTE_DISCONNECT"))
    with pytest.raises(MoveFailed) as caught:
        ends.reader.post_fence("p", 0)
    assert caught.value.reason.code == "peer_lost"


@pytest.mark.nixl
def test_fences_of_hung_peers_cannot_take_more_than_the_scratch_has(ends):
    ends.reader._reader.free_slots.clear()
    with pytest.raises(MoveFailed, match="too many fences"):
        ends.reader.post_fence("p", 0)


@pytest.mark.nixl
def test_a_connection_that_has_failed_is_not_shared_and_made_anew_when_nobody_has_it(ends):
    ends.reader.add(PeerAddress("q", ends.exporter.metadata, ends.table))
    ends.flaky(type("nixlRemoteDisconnectError", (RuntimeError,), {})("NIXL_ERR_REMOTE_DISCONNECT"))
    with pytest.raises(MoveFailed):
        ends.reader.post_fence("p", 0)
    ends.reader.remove("p", gone=False)
    with pytest.raises(MoveFailed, match="peer_lost"):
        ends.reader.add(PeerAddress("p", ends.exporter.metadata, ends.table))
    ends.reader.remove("q", gone=False)
    ends.meet(ends.exporter)
    assert ends.finish(ends.reader.post_fence("p", 3)) == 103


@pytest.mark.nixl
def test_two_workers_cannot_share_an_agent(ends):
    impostor = NixlMover("exporter", [ends.regions[0]], ends.table)
    try:
        with pytest.raises(MoveFailed, match="metadata_invalid"):
            ends.reader.add(PeerAddress("q", impostor.metadata, ends.table))
        assert ends.finish(ends.reader.post_fence("p", 3)) == 103
    finally:
        impostor.close()


def test_a_missing_nixl_says_what_to_install(monkeypatch):
    def refuse(name):
        raise ImportError(f"no module {name}")

    for name in [name for name in sys.modules if name.endswith("._bindings")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(nixl_binding.importlib, "import_module", refuse)
    with pytest.raises(TransportUnavailable, match="Install nixl"):
        nixl_binding.load_binding()


def test_importing_the_transport_imports_neither_nixl_nor_torch():
    script = "import sys, kvflow.transport.nixl; print([m for m in ('nixl', 'nixl_cu13', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


class ForgettingAgent:
    """A real agent that says whom it was told to forget."""

    def __init__(self, agent):
        self._agent = agent
        self.forgotten = []

    def __getattr__(self, name):
        return getattr(self._agent, name)

    def remove_remote(self, name):
        self.forgotten.append(name)
        self._agent.remove_remote(name)


@pytest.fixture
def forgotten(ends):
    """Names of the agents whose connections were closed, as the test goes on."""
    ends.reader._reader.agent = agent = ForgettingAgent(ends.reader._reader.agent)
    return agent.forgotten


@pytest.mark.nixl
def test_of_the_connections_that_are_kept_the_oldest_is_closed_when_there_are_too_many(ends, forgotten, monkeypatch):
    monkeypatch.setattr(nixl, "_KEPT_MAX", 1)
    ends.reader.remove("p", gone=False)
    assert forgotten == []
    ends.reader.add(PeerAddress("itself", ends.reader.metadata, ends.table))
    ends.reader.remove("itself", gone=False)
    assert forgotten == ["exporter/exporter"]
    ends.meet(ends.exporter)
    assert ends.finish(ends.reader.post(ends.chunk())) == 0
    assert np.array_equal(*ends.caches)


@pytest.mark.nixl
def test_a_connection_over_which_something_failed_is_not_kept(ends, forgotten):
    ends.flaky(type("nixlRemoteDisconnectError", (RuntimeError,), {})())
    with pytest.raises(MoveFailed, match="peer_lost"):
        ends.finish(ends.reader.post(ends.chunk()))
    ends.reader.remove("p", gone=False)
    assert forgotten == ["exporter/exporter"]


@pytest.mark.nixl
def test_a_connection_to_a_peer_that_is_gone_is_not_kept(ends, forgotten):
    ends.reader.remove("p", gone=True)
    assert forgotten == ["exporter/exporter"]


@pytest.mark.nixl
def test_another_one_of_the_same_name_is_not_read_from_over_the_connection_that_was_kept(ends, forgotten):
    ends.reader.remove("p", gone=False)
    other = np.full(4096, 7, np.uint8)
    region = Region(other.ctypes.data, other.nbytes)
    successor = NixlMover("exporter", [region], ends.table)
    try:
        ends.meet(successor, region)
        assert forgotten == ["exporter/exporter"]
        assert ends.finish(ends.reader.post(ends.chunk())) == 0
        assert np.array_equal(ends.caches[0], other)
    finally:
        successor.close()


@pytest.mark.nixl
@pytest.mark.parametrize("first", ["p", "q"])
def test_two_peers_of_one_worker_share_its_connection_until_the_last_has_gone(ends, forgotten, first):
    ends.reader.add(PeerAddress("q", ends.exporter.metadata, ends.table))
    assert [ends.finish(ends.reader.post_fence(peer, 3)) for peer in "pq"] == [103, 103]
    ends.reader.remove(first, gone=True)
    last = "q" if first == "p" else "p"
    assert ends.finish(ends.reader.post_fence(last, 4)) == 104
    assert forgotten == []
    ends.reader.remove(last, gone=False)
    assert forgotten == ["exporter/exporter"], "one of them has said that it is gone"
