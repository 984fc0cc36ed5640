"""The last resort against peers that hang: the reader is destroyed and made anew, and nobody else loses a byte."""

import numpy as np
import pytest

from kvflow.transport import owner
from kvflow.transport.base import PeerAdded, PeerFailed, ReadCompleted, ReadFailed, RenewalEnded

BLOCK = 1 << 16
COUNT = 256  # 16 MiB in all: far more than sockets buffer
CUTS = list(range(0, COUNT + 1, 16))
TCP = {"UCX_TLS": "tcp"}


def processes(test):
    """Mark a test of NIXL between processes."""
    return pytest.mark.nixl(pytest.mark.processes(test))


def renew(reader):
    reader.sink.forget(("renewal",))
    reader.transport.renew_reader()
    return reader.sink.wait(("renewal",))[0]


def test_a_reader_with_nothing_in_flight_is_kept(world):
    reader, exporter = world.end(COUNT * 64), world.end(COUNT * 64, seed=1)
    world.connect(reader, exporter, "p")
    program = world.dense(1, "p", exporter.cache.region, reader.cache.region, block=64, count=COUNT)
    reader.transport.prepare(program)
    for read_id in (1, 2):
        assert renew(reader).ended == 0
        reader.transport.post(world.read(read_id, program, range(COUNT), range(COUNT)))
        assert isinstance(reader.sink.wait(("read", read_id))[0], ReadCompleted)
    assert np.array_equal(reader.cache.bytes(), exporter.cache.bytes())


def test_a_closed_transport_is_not_renewed(world):
    reader = world.end(64)
    reader.transport.close()
    reader.transport.renew_reader()
    assert reader.sink.order() == []


@pytest.fixture
def reader(nixl_world):
    """Its second half is for those who hang."""
    return nixl_world.end(2 * COUNT * BLOCK)


def join(world, reader, peer, number, *, half=0, env=None):
    """Start another process and connect to it; return it and a program of all its blocks."""
    exporter = world.elsewhere(COUNT * BLOCK, seed=number, env=env or TCP)
    world.connect(reader, exporter, peer)
    source = world.rows(exporter.region, (0, BLOCK, BLOCK, COUNT))
    target = world.rows(reader.cache.region, (half * COUNT * BLOCK, BLOCK, BLOCK, COUNT))
    program = world.program(number, peer, source, target)
    reader.transport.prepare(program)
    return exporter, program


def post(world, reader, program, read_id):
    fence = world.fence(read_id, 3, 0, read_id)
    reader.transport.post(world.read(read_id, program, range(COUNT), range(COUNT), cuts=CUTS, fences=(fence,)))


def arrives(reader, exporter, read_id):
    """Assert that a read that was posted, and its fence, end well."""
    read, judged = reader.sink.wait(("read", read_id), ("fence", read_id))
    assert (type(read), judged.observed) == (ReadCompleted, 0), (read, judged)
    assert np.array_equal(reader.cache.bytes()[: COUNT * BLOCK], exporter.content)


@pytest.fixture
def hung(nixl_world, reader):
    """A peer over TCP that was stopped while it was read from."""
    exporter, program = join(nixl_world, reader, "hung", 1, half=1)
    post(nixl_world, reader, program, 1)
    assert isinstance(reader.sink.wait(("read", 1))[0], ReadCompleted)
    exporter.stop()
    post(nixl_world, reader, program, 2)
    flush_commands(reader)
    return exporter


def flush_commands(reader):
    """Return once the owner has served everything that was commanded before."""
    reader.transport.add_peer(reader.nobody())
    reader.sink.wait(("peer", "nobody"))
    reader.sink.forget(("peer", "nobody"))


@processes
@pytest.mark.parametrize("given_up", [True, False], ids=["given up", "not given up"])
def test_what_hangs_ends_and_never_writes_again(nixl_world, reader, hung, given_up):
    if given_up:
        reader.transport.remove_peer("hung")
    else:
        reader.sink.forget(("peer", "hung"))
    renewal = renew(reader)
    assert isinstance(renewal, RenewalEnded)
    assert renewal.ended > 0
    read, fence = reader.sink.wait(("read", 2), ("fence", 2))
    assert (type(read), read.code) == (ReadFailed, "cancelled" if given_up else "peer_lost")
    assert fence.code == read.code
    assert given_up or isinstance(reader.sink.wait(("peer", "hung"))[0], PeerFailed)
    before = reader.cache.bytes()
    # It runs again until it ends, in peace or not: UCX 1.23 may abort a process that wakes up to find a reader gone.
    hung.go()
    assert np.array_equal(reader.cache.bytes(), before)


@processes
@pytest.mark.parametrize("env", [TCP, {}], ids=["tcp", "shared memory"])
def test_other_peers_keep_their_programs_and_their_reads_go_on(nixl_world, reader, hung, env, monkeypatch):
    monkeypatch.setattr(owner, "RENEWAL_DRAIN_S", nixl_world.patience_s)  # the machine may be slow
    well, program = join(nixl_world, reader, "well", 2, env=env)
    post(nixl_world, reader, program, 3)
    arrives(reader, well, 3)
    reader.transport.remove_peer("hung")
    well.stop()
    post(nixl_world, reader, program, 4)
    post(nixl_world, reader, program, 5)
    reader.transport.renew_reader()  # waits for what is in flight
    well.resume()
    assert reader.sink.wait(("renewal",))[0].ended > 0
    arrives(reader, well, 4)
    arrives(reader, well, 5)
    assert isinstance(reader.sink.wait(("peer", "well"))[0], PeerAdded)


@processes
def test_whoever_reads_from_us_notices_nothing(nixl_world, reader, hung):
    downstream = nixl_world.end(2 * COUNT * BLOCK)
    nixl_world.connect(downstream, reader, "reader")
    program = nixl_world.dense(7, "reader", reader.cache.region, downstream.cache.region, block=BLOCK, count=2 * COUNT)
    downstream.transport.prepare(program)
    for read_id in (1, 2):
        read = nixl_world.read(
            read_id, program, range(2 * COUNT), range(2 * COUNT), cuts=[*CUTS, *(COUNT + c for c in CUTS[1:])]
        )
        downstream.transport.post(read)
        assert isinstance(downstream.sink.wait(("read", read_id))[0], ReadCompleted)
        if read_id == 1:
            reader.transport.remove_peer("hung")
            assert renew(reader).ended > 0
    assert np.array_equal(downstream.cache.bytes(), reader.cache.bytes())
    assert isinstance(downstream.sink.wait(("peer", "reader"))[0], PeerAdded)


@processes
def test_one_reader_after_the_other(nixl_world, reader):
    """Each is made, used, and destroyed in the middle of a read."""
    well, program = join(nixl_world, reader, "well", 1)
    for number in (2, 3):
        hung, hung_program = join(nixl_world, reader, f"hung-{number}", number, half=1)
        hung.stop()
        post(nixl_world, reader, hung_program, number)
        flush_commands(reader)
        reader.transport.remove_peer(f"hung-{number}")
        assert renew(reader).ended > 0
        hung.kill()
        post(nixl_world, reader, program, 10 + number)
        arrives(reader, well, 10 + number)
