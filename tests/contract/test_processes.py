"""NIXL between processes, over shared memory and over TCP: peers that end, die, hang, come back."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvflow.transport.base import FenceJudged, PeerFailed, ReadCompleted, ReadFailed
from kvflow.transport.nixl_binding import Agent

pytestmark = [pytest.mark.nixl, pytest.mark.processes]

BLOCK = 1 << 16
COUNT = 256  # 16 MiB in all: far more than sockets buffer
WIRES = {"shared memory": {}, "tcp": {"UCX_TLS": "tcp,cuda_copy" if os.environ.get("KVFLOW_TEST_MEMORY") else "tcp"}}


@pytest.fixture(params=WIRES)
def wire(request):
    return WIRES[request.param]


@pytest.fixture
def reader(nixl_world):
    return nixl_world.end(COUNT * BLOCK)


def join(world, reader, peer, number, env):
    """Start another process and connect to it; return it and a program of all its blocks."""
    exporter = world.elsewhere(COUNT * BLOCK, seed=number, env=env)
    world.connect(reader, exporter, peer)
    program = world.dense(number, peer, exporter.region, reader.cache.region, block=BLOCK, count=COUNT)
    reader.transport.prepare(program)
    return exporter, program


def read_all(world, reader, exporter, program, read_id):
    """Read everything in chunks of 1 MiB and compare it."""
    cuts = list(range(0, COUNT + 1, 16))
    fence = world.fence(read_id, 3, 1, read_id)
    reader.transport.post(world.read(read_id, program, range(COUNT), range(COUNT), cuts=cuts, fences=(fence,)))
    read, judged = reader.sink.wait(("read", read_id), ("fence", read_id))
    assert isinstance(read, ReadCompleted), read
    assert isinstance(judged, FenceJudged), judged
    assert np.array_equal(reader.cache.bytes(), exporter.content)
    return judged.observed


def test_bytes_and_epochs_cross_processes(nixl_world, reader, wire):
    exporter, program = join(nixl_world, reader, "p", 1, wire)
    for read_id, epoch in ((1, 0), (2, 17), (3, 18)):
        exporter.set_epoch(3, epoch)
        assert read_all(nixl_world, reader, exporter, program, read_id) == epoch


@pytest.mark.parametrize("end", ["kill", "go"])
@pytest.mark.parametrize("connected", [False, True], ids=["before the first read", "after a read"])
def test_a_peer_that_is_gone_fails_its_reads_and_nobody_elses(nixl_world, reader, wire, end, connected):
    lost, program = join(nixl_world, reader, "lost", 1, wire)
    alive, alive_program = join(nixl_world, reader, "alive", 2, wire)
    if connected:
        read_all(nixl_world, reader, lost, program, 1)
    getattr(lost, end)()
    fences = (nixl_world.fence(10, 0, 0, 10), nixl_world.fence(11, 0, 0, 10, 11))
    reader.transport.post(nixl_world.read(10, program, [0, 1], [0, 1], cuts=[0, 1, 2], fences=fences[:1]))
    reader.transport.post(nixl_world.read(11, program, [2], [2], fences=fences[1:]))
    events = reader.sink.wait(("read", 10), ("fence", 10), ("read", 11), ("fence", 11))
    assert [event.code for event in events] == ["peer_lost"] * 4
    assert isinstance(reader.sink.wait(("peer", "lost"))[0], PeerFailed)
    read_all(nixl_world, reader, alive, alive_program, 12)
    assert len(set(reader.sink.order())) == len(reader.sink.order()) - 1  # added, and failed


def test_a_peer_killed_between_two_reads_fails_the_rest_of_them(nixl_world, reader, wire):
    lost, program = join(nixl_world, reader, "lost", 1, wire)
    alive, alive_program = join(nixl_world, reader, "alive", 2, wire)
    read_all(nixl_world, reader, alive, alive_program, 1)
    reader.sink.on(("read", 10), lost.kill)
    count = 40  # only a few chunks can be under way when the first read is reported
    for read_id in range(10, 10 + count):
        fences = (nixl_world.fence(read_id, 0, 0, read_id),)
        reader.transport.post(nixl_world.read(read_id, program, range(64), range(64), fences=fences))
    keys = [(kind, read_id) for read_id in range(10, 10 + count) for kind in ("read", "fence")]
    first, *_, last, last_fence = reader.sink.wait(*keys)
    assert isinstance(first, ReadCompleted)
    assert (last.code, last_fence.code) == ("peer_lost", "peer_lost")
    reader.sink.wait(("peer", "lost"))
    read_all(nixl_world, reader, alive, alive_program, 2)
    assert len(set(reader.sink.order())) == len(reader.sink.order()) - 1


def test_a_peer_that_died_before_it_was_added_fails(nixl_world, reader, wire):
    exporter = nixl_world.elsewhere(BLOCK, seed=1, env=wire)
    exporter.kill()
    reader.transport.add_peer(exporter.address("p"))
    (event,) = reader.sink.wait(("peer", "p"))
    if not isinstance(event, PeerFailed):  # found out only by the first read
        program = nixl_world.dense(1, "p", exporter.region, reader.cache.region, block=BLOCK, count=1)
        reader.transport.prepare(program)
        reader.transport.post(nixl_world.read(1, program, [0], [0]))
        assert reader.sink.wait(("read", 1))[0].code == "peer_lost"
        (event,) = reader.sink.wait(("peer", "p"))
    assert event.code == "peer_lost"


def test_a_restarted_peer_is_another_peer(nixl_world, reader, wire):
    first, program = join(nixl_world, reader, "engine/0/1", 1, wire)
    read_all(nixl_world, reader, first, program, 1)
    first.kill()
    second, second_program = join(nixl_world, reader, "engine/0/2", 2, wire)
    reader.transport.post(nixl_world.read(2, program, [0], [0]))
    read_all(nixl_world, reader, second, second_program, 3)
    assert reader.sink.wait(("read", 2))[0].code == "peer_lost"


def test_a_peer_that_lives_can_be_removed_and_added_again(nixl_world, reader, wire):
    exporter, program = join(nixl_world, reader, "p", 1, wire)
    for number in (1, 2, 3):
        read_all(nixl_world, reader, exporter, program, number)
        reader.transport.remove_peer("p")
        nixl_world.connect_again(reader, exporter, "p")
        reader.transport.prepare(program)
    read_all(nixl_world, reader, exporter, program, 4)


def descriptors(pid):
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def test_a_peer_that_comes_and_goes_leaves_no_descriptor_on_either_side(nixl_world, reader, wire):
    exporter, program = join(nixl_world, reader, "p", 1, wire)
    pids = (os.getpid(), exporter.process.pid)
    counts = []
    for number in range(1, 6):
        read_all(nixl_world, reader, exporter, program, number)
        counts.append([descriptors(pid) for pid in pids])
        reader.transport.remove_peer("p")
        nixl_world.connect_again(reader, exporter, "p")
        reader.transport.prepare(program)
    assert counts == counts[:1] * 5


@pytest.mark.parametrize(
    ("words", "forgets"),
    [((False,), False), ((True,), True), ((False, True), True)],
    ids=["may come again", "gone", "gone, as is learned later"],
)
def test_the_connection_to_a_peer_that_is_gone_is_not_kept(nixl_world, reader, monkeypatch, words, forgets):
    forgotten = []
    forget = Agent.remove_remote
    monkeypatch.setattr(Agent, "remove_remote", lambda agent, name: (forgotten.append(name), forget(agent, name)))
    exporter, program = join(nixl_world, reader, "p", 1, WIRES["shared memory"])
    read_all(nixl_world, reader, exporter, program, 1)
    for gone in words:
        reader.transport.remove_peer("p", gone=gone)
    flush_commands(reader)
    assert len(forgotten) == int(forgets)
    nixl_world.connect_again(reader, exporter, "p")
    reader.transport.prepare(program)
    read_all(nixl_world, reader, exporter, program, 2)  # should it come after all


def test_a_peer_that_died_after_it_was_removed_fails_when_it_is_added_again(nixl_world, reader, wire):
    lost, program = join(nixl_world, reader, "lost", 1, wire)
    alive, alive_program = join(nixl_world, reader, "alive", 2, wire)
    read_all(nixl_world, reader, lost, program, 1)
    reader.transport.remove_peer("lost")
    lost.kill()
    read_all(nixl_world, reader, alive, alive_program, 2)
    for read_id in (10, 11):
        reader.sink.forget(("peer", "lost"))
        reader.transport.add_peer(lost.address("lost"))
        reader.transport.prepare(program)
        reader.transport.post(nixl_world.read(read_id, program, [0], [0]))
        assert reader.sink.wait(("read", read_id))[0].code == "peer_lost"
        flush_commands(reader)
    read_all(nixl_world, reader, alive, alive_program, 12)


@pytest.fixture
def hung(nixl_world, reader):
    """A peer over TCP that was stopped, with a read of eight chunks under way and one behind it."""
    exporter, program = join(nixl_world, reader, "p", 1, WIRES["tcp"])
    read_all(nixl_world, reader, exporter, program, 1)
    exporter.stop()
    cuts = list(range(0, COUNT + 1, COUNT // 8))
    fences = (nixl_world.fence(2, 0, 0, 2),)
    reader.transport.post(nixl_world.read(2, program, range(COUNT), range(COUNT), cuts=cuts, fences=fences))
    reader.transport.post(nixl_world.read(3, program, [0], [0]))
    reader.transport.cancel([3])
    assert reader.sink.wait(("read", 3))[0].code == "cancelled"
    return exporter


def flush_commands(reader):
    """Return once the owner has served everything that was commanded before."""
    reader.transport.add_peer(reader.nobody())
    reader.sink.wait(("peer", "nobody"))
    reader.sink.forget(("peer", "nobody"))


def test_a_cancelled_read_of_a_hung_peer_ends_when_the_peer_wakes(nixl_world, reader, hung):
    reader.transport.cancel([2])
    flush_commands(reader)
    assert ("read", 2) not in reader.sink.order()
    hung.resume()
    read, fence = reader.sink.wait(("read", 2), ("fence", 2))
    assert (read.code, fence.code) == ("cancelled", "cancelled")
    program = nixl_world.dense(9, "p", hung.region, reader.cache.region, block=BLOCK, count=COUNT)
    reader.transport.prepare(program)
    read_all(nixl_world, reader, hung, program, 4)


def test_a_hung_peer_that_is_removed_and_added_comes_back_when_it_wakes(nixl_world, reader, hung):
    reader.sink.forget(("peer", "p"))
    reader.transport.remove_peer("p")
    reader.transport.add_peer(hung.address("p"))
    flush_commands(reader)
    assert not {("read", 2), ("peer", "p")} & set(reader.sink.order())
    hung.resume()
    reader.sink.wait(("read", 2), ("peer", "p"))
    program = nixl_world.dense(9, "p", hung.region, reader.cache.region, block=BLOCK, count=COUNT)
    reader.transport.prepare(program)
    read_all(nixl_world, reader, hung, program, 4)


def test_a_hung_peer_that_is_killed_ends_its_reads(nixl_world, reader, hung):
    reader.sink.forget(("peer", "p"))
    hung.kill()
    read, fence, peer = reader.sink.wait(("read", 2), ("fence", 2), ("peer", "p"))
    assert (read.code, fence.code, peer.code) == ("peer_lost",) * 3


def test_others_are_served_while_a_peer_hangs(nixl_world, reader, hung):
    other, program = join(nixl_world, reader, "other", 2, WIRES["tcp"])
    read_all(nixl_world, reader, other, program, 5)
    assert ("read", 2) not in reader.sink.order()


def test_close_ends_the_reads_of_a_hung_peer_and_nothing_is_written_after_it(nixl_world, reader, hung):
    reader.transport.close()
    read, fence = reader.sink.wait(("read", 2), ("fence", 2))
    assert (read.code, fence.code) == ("cancelled", "cancelled")
    before = reader.cache.bytes()
    # It runs again until it ends, in peace or not: UCX 1.23 may abort a process that wakes up to find a reader gone.
    hung.go()
    assert np.array_equal(reader.cache.bytes(), before)
    assert len(set(reader.sink.order())) == len(reader.sink.order())


def test_whoever_reads_from_us_is_not_disturbed_when_our_reader_fails(nixl_world, reader):
    """Reading and being read use two agents."""
    middle = nixl_world.end(COUNT * BLOCK, seed=5)
    lost, lost_program = join(nixl_world, middle, "lost", 1, {})
    nixl_world.connect(reader, middle, "middle")
    program = nixl_world.dense(7, "middle", middle.cache.region, reader.cache.region, block=BLOCK, count=COUNT)
    reader.transport.prepare(program)
    lost.kill()
    middle.transport.post(nixl_world.read(1, lost_program, [0], [0]))
    assert isinstance(middle.sink.wait(("read", 1))[0], ReadFailed)
    reader.transport.post(nixl_world.read(2, program, range(COUNT), range(COUNT)))
    assert isinstance(reader.sink.wait(("read", 2))[0], ReadCompleted)
    assert np.array_equal(reader.cache.bytes(), middle.cache.bytes())


def test_an_idle_transport_uses_less_than_two_percent_of_a_core(nixl_world, reader):
    exporter, program = join(nixl_world, reader, "p", 1, {})
    read_all(nixl_world, reader, exporter, program, 1)
    idle = threading.Event()
    # The least of several windows: other threads of this process may wake up in one of them.
    shares = []
    for _ in range(5):
        started, used = time.monotonic(), time.process_time()
        idle.wait(0.5)
        shares.append((time.process_time() - used) / (time.monotonic() - started))
    assert min(shares) < 0.02, shares


def test_nothing_is_printed_to_standard_output_whatever_fails():
    script = """
        import sys
        import numpy as np
        from kvflow.layout.region import Region
        from kvflow.transport.base import PeerAddress, Program, Read
        from kvflow.transport.nixl import NixlTransport
        import threading
        assert not {"torch", "nixl", "nixl_cu13", "nixl_cu12"} & set(sys.modules)
        data, epochs = np.zeros(4096, np.uint8), np.zeros(8, np.uint64)
        regions = [Region(a.ctypes.data, a.nbytes) for a in (data, epochs)]
        events, over = [], threading.Event()
        def sink(event):
            events.append(event)
            if type(event).__name__ in ("ReadFailed", "ReadCompleted"):
                over.set()
        dead, reader = NixlTransport("dead", print), NixlTransport("reader", sink)
        for transport in (dead, reader):
            transport.start(regions[:1], regions[1])
        assert "torch" not in sys.modules
        address = PeerAddress("dead", dead.metadata(), regions[1])
        dead.close()
        rows = np.array([[regions[0].address, 64, 0, 64, 64]])
        index, cuts = np.array([0], np.int32), np.array([0, 1])
        reader.add_peer(PeerAddress("bad", b"bad", regions[1]))
        reader.add_peer(address)
        reader.prepare(Program(1, "dead", rows, rows))
        reader.post(Read(1, "dead", 1, index, index, cuts, 64))
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
            "UCX_TLS": "tcp",
        },
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
