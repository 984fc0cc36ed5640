"""Between processes, over shared memory and over TCP: peers that end, die, hang, come back."""

import os
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from kvflow.reads.contract import PeerAdded, PeerFailed
from kvflow.reads.nixl.binding import Agent
from tests.contract.conftest import NIXL_KIND, TCP_KINDS
from tests.helpers.waiting import wait_until
from tests.world.measuring import sample

pytestmark = pytest.mark.processes

BLOCK = 1 << 16
COUNT = 256  # 16 MiB in all: far more than sockets buffer

only_nixl = pytest.mark.parametrize("far_world", NIXL_KIND, indirect=True)
only_tcp = pytest.mark.parametrize("far_world", TCP_KINDS, indirect=True)
"""Over shared memory a reader needs nobody who is awake."""


@pytest.fixture
def world(far_world):
    return far_world


@pytest.fixture
def reader(world):
    return world.end(COUNT * BLOCK)


def prepare(world, reader, peer, exporter, number, *, chunk=16):
    """Prepare a list of all blocks of an exporter, in chunks of 1 MiB."""
    regions = exporter.region, reader.cache.region
    return reader.prepare(world.dense(number, peer, *regions, block=BLOCK, count=COUNT, chunk=chunk))


def join(world, reader, peer, number):
    """Start another process and connect to it; return it and a prepared list of all its blocks."""
    exporter = world.elsewhere(COUNT * BLOCK, seed=number)
    world.connect(reader, exporter, peer)
    return exporter, prepare(world, reader, peer, exporter, number)


def read_all(world, reader, exporter, prepared_list, read_id, *, epoch=0):
    """Read everything in chunks and compare it; return what the slot held."""
    answer = reader.answer(world.read(read_id, prepared_list, range(COUNT), range(COUNT), slot=3, epoch=epoch))
    assert answer.verdict == "held", answer
    assert np.array_equal(reader.cache.bytes(), exporter.content)
    return answer.observed


@only_nixl
@pytest.mark.parametrize(
    ("name", "value"), [("UCX_UNIFIED_MODE", "y"), ("UCX_POSIX_FIFO_SIZE", "64"), ("UCX_PROTO_ENABLE", "n")]
)
def test_a_peer_whose_ucx_is_set_up_differently_is_refused_by_name(world, reader, name, value):
    other = world.elsewhere(COUNT * BLOCK, seed=1, env={name: value})
    reader.transport.add_peer(other.address("p"))
    (refused,) = reader.sink.wait(("peer", "p"))
    assert isinstance(refused, PeerFailed)
    assert refused.code == "plane_unfit"
    assert f"{name} is not set here and {value!r} at the peer; set the same value on both sides" in refused.detail


@only_nixl
def test_a_peer_that_hangs_before_it_was_read_from_is_read(world, reader):
    """Within a host nothing is asked of the exporter's process."""
    exporter, prepared_list = join(world, reader, "p", 1)
    exporter.stop()
    index = range(COUNT)
    assert reader.answer(world.read(1, prepared_list, index, index)).verdict == "held"
    assert np.array_equal(reader.cache.bytes(), exporter.content)


def test_bytes_and_epochs_cross_processes(world, reader):
    exporter, prepared_list = join(world, reader, "p", 1)
    for read_id, epoch in ((1, 0), (2, 17), (3, 18)):
        exporter.set_epoch(3, epoch)
        assert read_all(world, reader, exporter, prepared_list, read_id, epoch=epoch) == epoch


@pytest.mark.parametrize("end", ["kill", "go"])
@pytest.mark.parametrize("connected", [False, True], ids=["before the first read", "after a read"])
def test_a_peer_that_is_gone_fails_its_reads_and_nobody_elses(world, reader, end, connected):
    lost, prepared_list = join(world, reader, "lost", 1)
    alive, alive_list = join(world, reader, "alive", 2)
    if connected:
        read_all(world, reader, lost, prepared_list, 1)
    getattr(lost, end)()
    reader.post(
        world.read(10, prepared_list, range(40), range(40)), world.read(11, prepared_list, [41], [41], check_first=True)
    )
    answers = reader.sink.wait(("read", 10), ("read", 11))
    assert [answer.code for answer in answers] == ["peer_lost"] * 2
    reader.sink.failed("lost")
    read_all(world, reader, alive, alive_list, 12)
    assert len(set(reader.sink.order())) == len(reader.sink.order()) - 1  # added, and failed


def test_a_peer_killed_between_two_reads_fails_the_rest_of_them(world, reader):
    lost, prepared_list = join(world, reader, "lost", 1)
    alive, alive_list = join(world, reader, "alive", 2)
    read_all(world, reader, alive, alive_list, 1)
    reader.sink.on(("read", 10), lost.kill)
    count = 40  # only a few chunks can be under way when the first read is reported
    for read_id in range(10, 10 + count):
        reader.post(world.read(read_id, prepared_list, range(64), range(64)))
    keys = [("read", read_id) for read_id in range(10, 10 + count)]
    first, *_, last = reader.sink.wait(*keys)
    assert first.verdict == "held"
    assert last.code == "peer_lost"
    reader.sink.failed("lost")
    read_all(world, reader, alive, alive_list, 2)
    assert len(set(reader.sink.order())) == len(reader.sink.order()) - 1


def test_a_peer_that_died_before_it_was_added_fails(world, reader):
    exporter = world.elsewhere(BLOCK, seed=1)
    exporter.kill()
    reader.transport.add_peer(exporter.address("p"))
    (event,) = reader.sink.wait(("peer", "p"))
    if not isinstance(event, PeerFailed):  # found out only by the first read
        prepared_list = reader.prepare(world.dense(1, "p", exporter.region, reader.cache.region, block=BLOCK, count=1))
        assert reader.answer(world.read(1, prepared_list, [0], [0])).code == "peer_lost"
        event = reader.sink.failed("p")
    assert event.code == "peer_lost"


def test_a_restarted_peer_is_another_peer(world, reader):
    first, prepared_list = join(world, reader, "engine/0/1", 1)
    read_all(world, reader, first, prepared_list, 1)
    first.kill()
    second, second_list = join(world, reader, "engine/0/2", 2)
    reader.post(world.read(2, prepared_list, [0], [0]))
    read_all(world, reader, second, second_list, 3)
    assert reader.sink.wait(("read", 2))[0].code == "peer_lost"


def test_a_peer_that_lives_can_be_removed_and_added_again(world, reader):
    exporter, prepared_list = join(world, reader, "p", 1)
    for number in (1, 2, 3):
        read_all(world, reader, exporter, prepared_list, number)
        reader.transport.remove_peer("p")
        world.connect_again(reader, exporter, "p")
        reader.transport.prepare(prepared_list)
    read_all(world, reader, exporter, prepared_list, 4)


def test_a_peer_that_comes_and_goes_leaves_no_descriptor_on_either_side(world, reader):
    exporter, prepared_list = join(world, reader, "p", 1)
    most: dict[int, int] = {}
    for number in range(1, 6):
        read_all(world, reader, exporter, prepared_list, number)
        most = most or {pid: sample(pid).descriptors.total() for pid in (os.getpid(), exporter.process.pid)}
        reader.transport.remove_peer("p")
        world.connect_again(reader, exporter, "p")
        reader.transport.prepare(prepared_list)
    # An exporter sees later that a connection has ended, and a reader opens as many connections as its load needs.
    wait_until(lambda: all(sample(pid).descriptors.total() <= count for pid, count in most.items()))


@only_nixl
@pytest.mark.parametrize(
    ("words", "forgets"),
    [((False,), False), ((True,), True), ((False, True), True)],
    ids=["may come again", "gone", "gone, as is learned later"],
)
def test_the_connection_to_a_peer_that_is_gone_is_not_kept(world, reader, monkeypatch, words, forgets):
    forgotten = []
    forget = Agent.remove_remote
    monkeypatch.setattr(Agent, "remove_remote", lambda agent, name: (forgotten.append(name), forget(agent, name)))
    exporter, prepared_list = join(world, reader, "p", 1)
    read_all(world, reader, exporter, prepared_list, 1)
    for gone in words:
        reader.transport.remove_peer("p", gone=gone)
    world.flush_commands(reader)
    assert len(forgotten) == int(forgets)
    world.connect_again(reader, exporter, "p")
    reader.transport.prepare(prepared_list)
    read_all(world, reader, exporter, prepared_list, 2)  # should it come after all


def test_a_removed_peer_that_died_fails_when_it_is_added_again(world, reader):
    lost, prepared_list = join(world, reader, "lost", 1)
    alive, alive_list = join(world, reader, "alive", 2)
    read_all(world, reader, lost, prepared_list, 1)
    reader.transport.remove_peer("lost")
    lost.kill()
    read_all(world, reader, alive, alive_list, 2)
    for read_id in (10, 11):
        reader.sink.forget(("peer", "lost"))
        reader.transport.add_peer(lost.address("lost"))
        reader.transport.prepare(prepared_list)
        assert reader.answer(world.read(read_id, prepared_list, [0], [0])).code == "peer_lost"
        world.flush_commands(reader)
    read_all(world, reader, alive, alive_list, 12)


@pytest.fixture
def hung(world, reader):
    """A peer that was stopped, with a read of eight chunks under way and one behind it."""
    exporter, prepared_list = join(world, reader, "p", 1)
    read_all(world, reader, exporter, prepared_list, 1)
    exporter.stop()
    prepared_list = prepare(world, reader, "p", exporter, 8, chunk=COUNT // 8)
    reader.post(world.read(2, prepared_list, range(COUNT), range(COUNT)))
    reader.post(world.read(3, prepared_list, [0], [0]))
    reader.transport.cancel([3])
    assert reader.sink.wait(("read", 3))[0].code == "cancelled"
    return exporter


@only_tcp
def test_a_cancelled_read_of_a_hung_peer_ends_while_the_peer_hangs(world, reader, hung):
    reader.transport.cancel([2])
    assert reader.sink.wait(("read", 2))[0].code == "cancelled"
    before = reader.cache.bytes()
    hung.resume()
    assert ("peer", "p") not in reader.sink.order()[1:], "the peer is not lost"
    prepared_list = prepare(world, reader, "p", hung, 9)
    world.flush_commands(reader)
    assert np.array_equal(reader.cache.bytes(), before)
    read_all(world, reader, hung, prepared_list, 4)


@only_tcp
def test_the_reads_of_a_hung_peer_end_at_once_when_it_is_removed(world, reader, hung):
    reader.sink.forget(("peer", "p"))
    reader.transport.remove_peer("p")
    assert reader.sink.wait(("read", 2))[0].code == "cancelled"
    before = reader.cache.bytes()
    reader.transport.add_peer(hung.address("p"))
    assert isinstance(reader.sink.wait(("peer", "p"))[0], PeerAdded)
    prepared_list = prepare(world, reader, "p", hung, 9)
    world.flush_commands(reader)
    assert np.array_equal(reader.cache.bytes(), before)
    hung.resume()
    read_all(world, reader, hung, prepared_list, 4)


@only_tcp
def test_a_hung_peer_that_is_killed_ends_its_reads(world, reader, hung):
    hung.kill()
    assert reader.sink.wait(("read", 2))[0].code == "peer_lost"
    assert reader.sink.failed("p").code == "peer_lost"


@only_tcp
def test_others_are_served_while_a_peer_hangs(world, reader, hung):
    other, prepared_list = join(world, reader, "other", 2)
    read_all(world, reader, other, prepared_list, 5)
    assert ("read", 2) not in reader.sink.order()


@only_tcp
def test_close_ends_the_reads_of_a_hung_peer_and_every_write(world, reader, hung):
    reader.transport.close()
    assert reader.sink.wait(("read", 2))[0].code == "cancelled"
    before = reader.cache.bytes()
    hung.go()  # it runs again, and ends
    assert np.array_equal(reader.cache.bytes(), before)
    assert len(set(reader.sink.order())) == len(reader.sink.order())


def test_peers_that_read_from_us_are_not_disturbed_when_our_reader_fails(world, reader):
    """Reading and being read use two agents."""
    middle = world.end(COUNT * BLOCK, seed=5)
    lost, lost_list = join(world, middle, "lost", 1)
    world.connect(reader, middle, "middle")
    prepared_list = world.dense(7, "middle", middle.cache.region, reader.cache.region, block=BLOCK, count=COUNT)
    reader.transport.prepare(prepared_list)
    lost.kill()
    assert middle.answer(world.read(1, lost_list, [0], [0])).verdict == "failed"
    assert reader.answer(world.read(2, prepared_list, range(COUNT), range(COUNT))).verdict == "held"
    assert np.array_equal(reader.cache.bytes(), middle.cache.bytes())


def test_an_idle_transport_does_not_spin(world, reader):
    exporter, prepared_list = join(world, reader, "p", 1)
    read_all(world, reader, exporter, prepared_list, 1)
    idle = threading.Event()
    # A thread that polls without a pause takes a whole core. An idle transport takes a hundredth of one, and a few
    # times as much while coverage is measured; `kvflow bench idle` measures it. Other threads of this process may
    # wake up in one of the windows.
    shares = []
    for _ in range(5):
        started, used = time.monotonic(), time.process_time()
        idle.wait(0.5)
        shares.append((time.process_time() - used) / (time.monotonic() - started))
    assert min(shares) < 0.25, shares


def test_nothing_is_printed_to_standard_output_whatever_fails():
    script = """
        import sys
        import numpy as np
        from kvflow.layout.component import Region
        from kvflow.planning.bind import Bound
        from kvflow.planning.pairs import UnitPairs
        from kvflow.leases.tickets import LeaseName
        from kvflow.reads.contract import Part, RankRead
        from kvflow.reads.contract import PeerAddress, PreparedList
        from tests.helpers.transports import nixl_transport
        import threading
        assert not {"torch", "nixl", "nixl_cu13", "nixl_cu12"} & set(sys.modules)
        data, epochs = np.zeros(4096, np.uint8), np.zeros(8, np.uint64)
        regions = [Region(a.ctypes.data, a.nbytes) for a in (data, epochs)]
        events, over = [], threading.Event()
        def sink(event):
            events.append(event)
            if type(event).__name__ == "ReadEnded":
                over.set()
        dead, reader = nixl_transport("dead", print), nixl_transport("reader", sink)
        for transport in (dead, reader):
            transport.start(regions[:1], regions[1])
        assert "torch" not in sys.modules
        address = PeerAddress("dead", dead.published().planes, regions[1])
        dead.close()
        rows = np.array([[regions[0].address, 64, 0, 64, 64]])
        class Binding:
            unit_bytes, read_bytes, unit_descriptors, number = 64, 64, 1, None
            def bind(self, pairs, *, chunk_bytes, chunk_descriptors):
                return Bound(np.array([0], np.int32), np.array([0], np.int32), np.array([0, 1]), 64)
        reader.add_peer(PeerAddress("bad", {"nixl": b"bad"}, regions[1]))
        reader.add_peer(address)
        reader.prepare(PreparedList(1, "dead", rows, rows, binding=Binding()))
        pairs = UnitPairs((0,), (0,))
        reader.post([RankRead(1, "dead", LeaseName(0, 0), (Part(1, pairs),))])
        assert over.wait(60)
        assert len(events) >= 3, events
        reader.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith(("UCX_", "NIXL_"))},
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
