"""Every transport: leases that end at the last instant of a read, and connections that last."""

import threading

import numpy as np
import pytest

from kvflow.reads import thread as threaded
from tests.contract.conftest import NAMES, TCP_KINDS, kinds
from tests.contract.instants import Clock, LastBytes, sockets

COUNT = 16
SMALL, LARGE = 4096, 256 << 10
"""Bytes of a block. Of large ones, a read needs several sends, or several portions of device memory."""

ONE_PROCESS = kinds(*(name for name in NAMES if "apart" not in name))
here = pytest.mark.parametrize("world", ONE_PROCESS, indirect=True)


def ends_of(world, block, *, slots=COUNT):
    """A reader with an empty cache, and an exporter of random bytes that has not been started."""
    reader, exporter = world.end(COUNT * block), world.end(COUNT * block, seed=1, start=False, slots=slots)
    exporter.epochs[:] = 1
    return reader, exporter


def joined(world, reader, exporter, block):
    """Start the exporter, connect, and prepare a list of all blocks."""
    exporter.start()
    world.connect(reader, exporter, "p")
    return reader.prepare(world.dense(1, "p", exporter.region, reader.region, block=block, count=COUNT))


def blocks_of(end, block):
    return end.cache.bytes().reshape(COUNT, block)


READS = {
    "one block": (SMALL, [3]),
    "blocks apart": (SMALL, [9, 1, 15, 4]),
    "several sends": (LARGE, range(COUNT)),
    "several sends, apart": (LARGE, range(COUNT - 1, -1, -1)),
}


@here
@pytest.mark.parametrize("kind", READS)
def test_a_lease_that_ends_as_its_last_bytes_are_copied_is_not_held(world, monkeypatch, kind):
    block, numbers = READS[kind]
    reader, exporter = ends_of(world, block)

    def end():
        exporter.epochs[5] = 2
        exporter.cache.write(0, np.full(COUNT * block, 7, np.uint8))  # the engine has the blocks again

    last = LastBytes(world, exporter, block, numbers, end)
    prepared_list = joined(world, reader, exporter, block)
    last.watch(monkeypatch, prepared_list)
    answer = reader.answer(world.read(1, prepared_list, numbers, numbers, slot=5, epoch=1))
    assert last.happened
    assert (answer.verdict, answer.observed) == ("stale", 2)


@here
@pytest.mark.parametrize("ends", [0, 2], ids=["first", "last"])
def test_of_leases_read_together_the_one_that_ends_is_not_held(world, monkeypatch, ends):
    reader, exporter = ends_of(world, SMALL)
    before = blocks_of(exporter, SMALL).copy()
    numbers = [[1, 8], [2, 9], [3, 10]]

    def end():
        exporter.epochs[ends] = 2
        for at in numbers[ends]:
            exporter.cache.write(at * SMALL, np.full(SMALL, 7, np.uint8))

    last = LastBytes(world, exporter, SMALL, numbers[ends], end, answer=ends)
    prepared_list = joined(world, reader, exporter, SMALL)
    last.watch(monkeypatch, prepared_list)
    reader.post(*(world.read(at, prepared_list, numbers[at], numbers[at], slot=at, epoch=1) for at in range(3)))
    answers = reader.sink.wait(*(("read", at) for at in range(3)))
    assert last.happened
    assert [answer.verdict for answer in answers] == ["stale" if at == ends else "held" for at in range(3)]
    for at in {0, 1, 2} - {ends}:
        assert np.array_equal(blocks_of(reader, SMALL)[numbers[at]], before[numbers[at]])


@pytest.mark.parametrize("world", TCP_KINDS, indirect=True)
def test_a_read_may_go_on_for_longer_than_connecting_may_take(world, monkeypatch):
    clock, held, go_on = Clock(monkeypatch), threading.Event(), threading.Event()
    reader, exporter = ends_of(world, LARGE)

    def hold():
        held.set()
        assert go_on.wait(world.patience_s)

    last = LastBytes(world, exporter, LARGE, range(COUNT), hold)
    prepared_list = joined(world, reader, exporter, LARGE)
    last.watch(monkeypatch, prepared_list)
    reader.post(world.read(1, prepared_list, range(COUNT), range(COUNT), epoch=1))
    assert held.wait(world.patience_s)
    try:
        while not reader.cache.bytes()[0]:  # the answer has begun, so it cannot be asked for again
            world.flush_commands(reader)
        clock.move(60.0)
        for _ in range(2):  # the reader looks at its deadlines after a command
            world.flush_commands(reader)
    finally:
        go_on.set()
    (answer,) = reader.sink.wait(("read", 1))
    assert (answer.verdict, answer.detail) == ("held", "")
    assert np.array_equal(reader.cache.bytes(), exporter.cache.bytes())


@pytest.mark.parametrize("world", TCP_KINDS, indirect=True)
def test_the_read_thread_waits_for_sockets_and_never_naps(world, monkeypatch):
    reader, exporter = ends_of(world, LARGE)
    prepared_list = joined(world, reader, exporter, LARGE)
    bell, pauses = reader.transport._bell, []
    wait = bell.wait

    def note(pause_s):
        pauses.append(pause_s)
        wait(pause_s)

    monkeypatch.setattr(bell, "wait", note)
    for read_id, numbers in enumerate(([3], range(COUNT), [1, 5])):
        read = world.read(read_id, prepared_list, numbers, numbers, epoch=1, check_first=True)
        assert reader.answer(read).verdict == "held"
    assert pauses
    assert not [pause_s for pause_s in pauses if 0 < pause_s < threaded.IDLE_PROGRESS_S]


@here
def test_an_hour_without_a_read_ends_no_connection(world, monkeypatch):
    clock, of_others = Clock(monkeypatch), sockets()  # some of which may be closed meanwhile
    reader, exporter = ends_of(world, SMALL)
    prepared_list = joined(world, reader, exporter, SMALL)
    other = world.end(COUNT * SMALL)

    def read(read_id):
        answer = reader.answer(world.read(read_id, prepared_list, [read_id], [read_id], epoch=1))
        assert (answer.verdict, answer.detail) == ("held", "")

    read(0)
    before = sockets() - of_others
    # Others come, so that each thread of the exporter has noted what it did, and then looks at its deadlines.
    for number in range(16):
        if number == 8:
            clock.move(3600.0)
        peer = f"visit {number}"
        world.connect(other, exporter, peer)
        visited = other.prepare(world.dense(number, peer, exporter.region, other.region, block=SMALL, count=COUNT))
        assert other.answer(world.read(number, visited, [0], [0], epoch=1)).verdict == "held"
        other.transport.remove_peer(peer)
    for _ in range(2):
        world.flush_commands(reader)
    assert before <= sockets()
    read(1)
    assert before <= sockets()


@pytest.mark.parametrize("world", [*TCP_KINDS, *kinds(*(name for name in NAMES if "loopback" in name))], indirect=True)
def test_an_exporter_is_closed_only_when_nothing_copies_its_memory(world, monkeypatch):
    reader, exporter = ends_of(world, SMALL)
    closing, waits = threading.Thread(target=exporter.transport.close), []

    def close():
        closing.start()
        closing.join(0.2)  # time enough for a close that does not wait
        waits.append(closing.is_alive())

    last = LastBytes(world, exporter, SMALL, range(COUNT), close)
    prepared_list = joined(world, reader, exporter, SMALL)
    last.watch(monkeypatch, prepared_list)
    answer = reader.answer(world.read(1, prepared_list, range(COUNT), range(COUNT), epoch=1))
    world.join([closing])
    assert waits == [True]
    assert answer.verdict == "failed" or np.array_equal(reader.cache.bytes(), exporter.cache.bytes())
