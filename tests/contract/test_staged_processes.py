"""Staged reads over NIXL between processes: what a peer that hangs or dies does to staging buffers and the target."""

import numpy as np
import pytest

from kvflow.transfer.boxes import AXES_MAX, Scatter
from kvflow.transport.base import Program, Read, ReadCompleted

pytestmark = [pytest.mark.nixl, pytest.mark.processes]

PAGE = 1 << 18
UNITS = 64  # 16 MiB at the source: far more than sockets buffer
SLOTS = 4
BUFFER = SLOTS * PAGE
TCP = {"UCX_TLS": "tcp"}


@pytest.fixture(autouse=True)
def only_in_memory(nixl_world):
    if nixl_world.memory != "DRAM":
        pytest.skip("what lies in VRAM is not staged")


@pytest.fixture
def reader(nixl_world):
    return nixl_world.end(UNITS * PAGE // 2, staging_bytes=8 * BUFFER)


def join(world, reader, peer, number, env):
    """Start another process; return it and a program that takes every second KiB of its pages."""
    exporter = world.elsewhere(UNITS * PAGE, seed=number, env=env)
    world.connect(reader, exporter, peer)
    rows = world.rows(exporter.region, (0, PAGE, PAGE, UNITS))
    axes = [(PAGE // 2048, 2048, 1024), *[(1, 0, 0)] * (AXES_MAX - 1)]
    box = [1024, 0, PAGE, reader.cache.region.address, PAGE // 2, 0, 0, *(n for axis in axes for n in axis)]
    scatter = Scatter(np.array([box], np.int64), SLOTS, (UNITS, 1, 1))
    program = Program(number, peer, rows, np.array([[0, PAGE, 0, PAGE, SLOTS]]), scatter=scatter)
    reader.transport.prepare(program)
    return exporter, program


def post(world, reader, program, read_id, units=range(UNITS)):
    index = np.array(units, np.int32)
    cuts = np.array([*range(0, len(index), SLOTS), len(index)])
    fences = (world.fence(read_id, 3, 0, read_id),)
    nbytes = len(index) * PAGE // 2
    reader.transport.post(Read(read_id, program.peer, program.program_id, index, index, cuts, nbytes, fences=fences))


def read_all(world, reader, exporter, program, read_id):
    post(world, reader, program, read_id)
    read, _ = reader.sink.wait(("read", read_id), ("fence", read_id))
    assert isinstance(read, ReadCompleted), read
    wanted = exporter.content.reshape(UNITS, -1, 2, 1024)[:, :, 0].ravel()
    assert np.array_equal(reader.cache.bytes(), wanted)
    assert reader.transport.staging().in_use == 0


def flush_commands(reader):
    """Return once the owner has served everything that was commanded before."""
    reader.transport.add_peer(reader.nobody())
    reader.sink.wait(("peer", "nobody"))
    reader.sink.forget(("peer", "nobody"))


@pytest.mark.parametrize("env", [{}, TCP], ids=["shared memory", "tcp"])
def test_staged_bytes_cross_processes(nixl_world, reader, env):
    exporter, program = join(nixl_world, reader, "p", 1, env)
    for read_id in (1, 2):
        read_all(nixl_world, reader, exporter, program, read_id)


@pytest.fixture
def hung(nixl_world, reader):
    """A peer over TCP that was stopped with a staged read under way; its target was zeroed before."""
    exporter, program = join(nixl_world, reader, "p", 1, TCP)
    read_all(nixl_world, reader, exporter, program, 1)
    exporter.stop()
    reader.cache._keep[:] = 0
    post(nixl_world, reader, program, 2)
    post(nixl_world, reader, program, 3)
    reader.transport.cancel([3])
    reader.sink.wait(("read", 3))
    for _ in range(4):  # between two commands the owner posts a chunk: after this two are in flight
        flush_commands(reader)
    return exporter, program


def test_a_cancelled_read_of_a_hung_peer_keeps_its_buffers_and_never_scatters(nixl_world, reader, hung):
    exporter, program = hung
    reader.transport.cancel([2])
    flush_commands(reader)
    use = reader.transport.staging()
    assert use.in_use == use.quarantined == 2  # chunks in flight of one peer
    assert use.quarantined_bytes == 2 * BUFFER
    assert ("read", 2) not in reader.sink.order()
    _, second = join(nixl_world, reader, "other", 2, TCP)
    post(nixl_world, reader, second, 4)
    assert isinstance(reader.sink.wait(("read", 4))[0], ReadCompleted)
    reader.cache._keep[:] = 0
    exporter.resume()
    read, fence = reader.sink.wait(("read", 2), ("fence", 2))
    assert (read.code, fence.code) == ("cancelled", "cancelled")
    assert not reader.cache.bytes().any(), "bytes were scattered after the cancellation"
    assert reader.transport.staging().in_use == 0
    read_all(nixl_world, reader, exporter, program, 5)


def test_a_hung_peer_that_is_killed_gives_its_buffers_back(nixl_world, reader, hung):
    exporter, _ = hung
    assert reader.transport.staging().in_use == 2
    exporter.kill()
    read, fence = reader.sink.wait(("read", 2), ("fence", 2))
    assert (read.code, fence.code) == ("peer_lost", "peer_lost")
    assert reader.transport.staging().in_use == 0


def test_renewing_the_reader_frees_the_buffers_of_a_hung_peer(nixl_world, reader, hung):
    other, program = join(nixl_world, reader, "other", 2, {})
    reader.transport.cancel([2])
    reader.transport.remove_peer("p")
    reader.transport.renew_reader()
    assert reader.sink.wait(("read", 2))[0].code in ("cancelled", "peer_lost")
    assert reader.transport.staging().in_use == 0
    read_all(nixl_world, reader, other, program, 4)


def test_closing_ends_staged_reads_of_a_hung_peer(nixl_world, reader, hung):
    reader.transport.close()
    assert reader.sink.wait(("read", 2))[0].code == "cancelled"
    assert reader.transport.staging().in_use == 0
