"""Staged reads between processes: what a peer that hangs or dies does to staging buffers and the target."""

import numpy as np
import pytest

from kvflow.transfer.boxes import AXES_MAX, Scatter
from kvflow.transport.base import Program
from tests.contract.conftest import StagedUnits

pytestmark = pytest.mark.processes

PAGE = 1 << 18
UNITS = 64  # 16 MiB at the source: far more than sockets buffer
SLOTS = 4
BUFFER = SLOTS * PAGE

only_tcp = pytest.mark.parametrize("far_world", ["tcp"], indirect=True)
"""Over shared memory a reader needs nobody who is awake."""


@pytest.fixture
def world(far_world):
    if far_world.memory != "DRAM":
        pytest.skip("what lies in VRAM is not staged")
    return far_world


@pytest.fixture
def reader(world):
    return world.end(UNITS * PAGE // 2, staging_bytes=8 * BUFFER)


def join(world, reader, peer, number):
    """Start another process; return it and a program that takes every second KiB of its pages."""
    exporter = world.elsewhere(UNITS * PAGE, seed=number)
    world.connect(reader, exporter, peer)
    rows = world.rows(exporter.region, (0, PAGE, PAGE, UNITS))
    axes = [(PAGE // 2048, 2048, 1024), *[(1, 0, 0)] * (AXES_MAX - 1)]
    box = [1024, 0, PAGE, reader.cache.region.address, PAGE // 2, 0, 0, *(n for axis in axes for n in axis)]
    scatter = Scatter(np.array([box], np.int64), SLOTS, (UNITS, 1, 1))
    binding = StagedUnits(PAGE // 2, PAGE, SLOTS)
    program = Program(number, peer, rows, np.array([[0, PAGE, 0, PAGE, SLOTS]]), scatter=scatter, binding=binding)
    reader.transport.prepare(program)
    return exporter, program


def post(world, reader, program, read_id):
    reader.post(world.read(read_id, program, range(UNITS), range(UNITS), slot=3))


def read_all(world, reader, exporter, program, read_id):
    post(world, reader, program, read_id)
    (answer,) = reader.sink.wait(("read", read_id))
    assert answer.verdict == "held", answer
    wanted = exporter.content.reshape(UNITS, -1, 2, 1024)[:, :, 0].ravel()
    assert np.array_equal(reader.cache.bytes(), wanted)
    assert reader.transport.staging().in_use == 0


def test_staged_bytes_cross_processes(world, reader):
    exporter, program = join(world, reader, "p", 1)
    for read_id in (1, 2):
        read_all(world, reader, exporter, program, read_id)


@pytest.fixture
def hung(world, reader):
    """A peer that was stopped with a staged read under way; its target was zeroed before."""
    exporter, program = join(world, reader, "p", 1)
    read_all(world, reader, exporter, program, 1)
    exporter.stop()
    reader.cache._keep[:] = 0
    post(world, reader, program, 2)
    post(world, reader, program, 3)
    reader.transport.cancel([3])
    reader.sink.wait(("read", 3))
    for _ in range(4):  # between two commands the owner posts a chunk: after this two are in flight
        world.flush_commands(reader)
    return exporter, program


@only_tcp
def test_a_cancelled_read_of_a_hung_peer_keeps_its_buffers_and_never_scatters(world, reader, hung):
    exporter, program = hung
    reader.transport.cancel([2])
    world.flush_commands(reader)
    use = reader.transport.staging()
    assert use.in_use == use.quarantined == 2  # chunks in flight of one peer
    assert use.quarantined_bytes == 2 * BUFFER
    assert ("read", 2) not in reader.sink.order()
    _, second = join(world, reader, "other", 2)
    post(world, reader, second, 4)
    assert reader.sink.wait(("read", 4))[0].verdict == "held"
    reader.cache._keep[:] = 0
    exporter.resume()
    assert reader.sink.wait(("read", 2))[0].code == "cancelled"
    assert not reader.cache.bytes().any(), "bytes were scattered after the cancellation"
    assert reader.transport.staging().in_use == 0
    read_all(world, reader, exporter, program, 5)


def test_a_peer_that_is_killed_fails_staged_reads_and_frees_their_buffers(world, reader):
    exporter, program = join(world, reader, "p", 1)
    read_all(world, reader, exporter, program, 1)
    exporter.kill()
    post(world, reader, program, 2)
    assert reader.sink.wait(("read", 2))[0].code == "peer_lost"
    assert reader.transport.staging().in_use == 0


@only_tcp
def test_a_hung_peer_that_is_killed_gives_its_buffers_back(world, reader, hung):
    exporter, _ = hung
    assert reader.transport.staging().in_use == 2
    exporter.kill()
    assert reader.sink.wait(("read", 2))[0].code == "peer_lost"
    assert reader.transport.staging().in_use == 0


@only_tcp
@pytest.mark.parametrize("means", ["removing it", "resetting the reader"])
def test_what_gives_the_buffers_of_a_hung_peer_back(world, reader, hung, means):
    other, program = join(world, reader, "other", 2)
    reader.transport.cancel([2])
    if means == "removing it":
        reader.transport.remove_peer("p")
    else:
        reader.transport.reset_reader()
    assert reader.sink.wait(("read", 2))[0].code in ("cancelled", "peer_lost")
    assert reader.transport.staging().in_use == 0
    read_all(world, reader, other, program, 4)


@only_tcp
def test_closing_ends_staged_reads_of_a_hung_peer(world, reader, hung):
    reader.transport.close()
    assert reader.sink.wait(("read", 2))[0].code == "cancelled"
    assert reader.transport.staging().in_use == 0
