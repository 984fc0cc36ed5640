"""The last resort against peers that hang: the reader is destroyed, another is made, and nobody else loses a byte."""

import numpy as np
import pytest

from kvflow.reads import core
from kvflow.reads.contract import PeerAdded, ResetDone
from tests.contract.conftest import TCP_KINDS

BLOCK = 1 << 16
COUNT = 256  # 16 MiB in all: far more than sockets buffer
CHUNK = 16


def processes(test):
    """Mark a test of processes over TCP: over shared memory a reader needs nobody who is awake."""
    return pytest.mark.processes(pytest.mark.parametrize("world", TCP_KINDS, indirect=True)(test))


def reset(reader):
    reader.sink.forget(("reset",))
    reader.transport.reset_reader()
    return reader.sink.wait(("reset",))[0]


def test_a_reader_with_nothing_in_flight_is_kept(world):
    reader, exporter = world.end(COUNT * 64), world.exporter(COUNT * 64, seed=1)
    world.connect(reader, exporter, "p")
    prepared_list = world.dense(1, "p", exporter.cache.region, reader.cache.region, block=64, count=COUNT)
    reader.transport.prepare(prepared_list)
    for read_id in (1, 2):
        assert reset(reader).ended == 0
        assert reader.answer(world.read(read_id, prepared_list, range(COUNT), range(COUNT))).verdict == "held"
    assert np.array_equal(reader.cache.bytes(), exporter.cache.bytes())


def test_the_reader_of_a_closed_transport_is_not_reset(world):
    reader = world.end(64)
    reader.transport.close()
    reader.transport.reset_reader()
    assert reader.sink.order() == []


@pytest.fixture
def reader(world):
    """Its second half is for those who hang."""
    return world.end(2 * COUNT * BLOCK)


def join(world, reader, peer, number, *, half=0, chunk=CHUNK):
    """Start another process and connect to it; return it and a prepared list of all its blocks."""
    exporter = world.elsewhere(COUNT * BLOCK, seed=number)
    world.connect(reader, exporter, peer)
    source = world.rows(exporter.region, (0, BLOCK, BLOCK, COUNT))
    target = world.rows(reader.cache.region, (half * COUNT * BLOCK, BLOCK, BLOCK, COUNT))
    prepared_list = reader.prepare(world.prepared_list(number, peer, source, target, chunk=chunk))
    return exporter, prepared_list


def post(world, reader, prepared_list, read_id):
    reader.post(world.read(read_id, prepared_list, range(COUNT), range(COUNT), slot=3))


def arrives(reader, exporter, read_id):
    """Assert that a read that was posted ends well."""
    (answer,) = reader.sink.wait(("read", read_id))
    assert answer.verdict == "held", answer
    assert np.array_equal(reader.cache.bytes()[: COUNT * BLOCK], exporter.content)


@pytest.fixture
def hung(world, reader):
    """A peer that was stopped while it was read from."""
    exporter, prepared_list = join(world, reader, "hung", 1, half=1)
    post(world, reader, prepared_list, 1)
    assert reader.sink.wait(("read", 1))[0].verdict == "held"
    exporter.stop()
    post(world, reader, prepared_list, 2)
    world.flush_commands(reader)
    return exporter


@pytest.fixture
def no_drain(monkeypatch):
    """Let nobody have time to land, where nobody but the one that hangs owes anything."""
    monkeypatch.setattr(core, "RESET_DRAIN_S", 0.0)


@processes
@pytest.mark.parametrize("given_up", [True, False], ids=["given up", "not given up"])
def test_what_hangs_ends_and_never_writes_again(world, reader, hung, given_up, no_drain):
    if given_up:
        reader.transport.remove_peer("hung")
        reader.sink.wait(("read", 2))  # its sockets are closed, so that nothing is left to end
    told = reset(reader)
    assert isinstance(told, ResetDone)
    assert (told.ended > 0) != given_up
    (answer,) = reader.sink.wait(("read", 2))
    assert (answer.verdict, answer.code) == ("failed", "cancelled" if given_up else "peer_lost")
    if not given_up:
        reader.sink.failed("hung")
    before = reader.cache.bytes()
    hung.go()  # it runs again, and ends
    assert np.array_equal(reader.cache.bytes(), before)


@processes
def test_other_peers_keep_their_lists_and_their_reads_go_on(world, reader, hung, monkeypatch):
    monkeypatch.setattr(core, "RESET_DRAIN_S", world.patience_s)
    well, prepared_list = join(world, reader, "well", 2, chunk=COUNT // 2)  # two chunks may be in flight
    post(world, reader, prepared_list, 3)
    arrives(reader, well, 3)
    well.stop()
    post(world, reader, prepared_list, 4)
    post(world, reader, prepared_list, 5)
    for _ in range(4):  # between two commands the core posts a chunk: after this two are in flight
        world.flush_commands(reader)
    reader.transport.reset_reader()  # waits for what is in flight
    world.flush_commands(reader)
    assert ("reset",) not in reader.sink.order()
    well.resume()
    arrives(reader, well, 4)
    monkeypatch.setattr(core, "RESET_DRAIN_S", 0.0)
    assert reader.sink.wait(("reset",))[0].ended > 0
    arrives(reader, well, 5)
    assert isinstance(reader.sink.wait(("peer", "well"))[0], PeerAdded)
    assert reader.sink.wait(("read", 2))[0].code == "peer_lost"


@processes
def test_peers_that_read_from_us_notice_nothing(world, reader, hung, no_drain):
    downstream = world.end(2 * COUNT * BLOCK)
    world.connect(downstream, reader, "reader")
    prepared_list = world.dense(
        7, "reader", reader.cache.region, downstream.cache.region, block=BLOCK, count=2 * COUNT, chunk=CHUNK
    )
    downstream.transport.prepare(prepared_list)
    for read_id in (1, 2):
        read = world.read(read_id, prepared_list, range(2 * COUNT), range(2 * COUNT))
        assert downstream.answer(read).verdict == "held"
        if read_id == 1:
            assert reset(reader).ended > 0
    assert np.array_equal(downstream.cache.bytes(), reader.cache.bytes())
    assert isinstance(downstream.sink.wait(("peer", "reader"))[0], PeerAdded)


@processes
def test_one_reader_after_the_other(world, reader, no_drain):
    """Each is made, used, and destroyed in the middle of a read."""
    well, prepared_list = join(world, reader, "well", 1)
    for number in (2, 3):
        hung, hung_list = join(world, reader, f"hung-{number}", number, half=1)
        hung.stop()
        post(world, reader, hung_list, number)
        world.flush_commands(reader)
        assert reset(reader).ended > 0
        hung.kill()
        post(world, reader, prepared_list, 10 + number)
        arrives(reader, well, 10 + number)
