"""Staged reads between processes: what a peer that hangs or dies does to staging buffers and the target."""

import numpy as np
import pytest

from kvflow.planning.staging import AXES_MAX, Scatter
from kvflow.reads.contract import PreparedList
from tests.contract.conftest import FAR_KINDS, STAGING_NAMES, StagedUnits, world_of

pytestmark = pytest.mark.processes

PAGE = 1 << 18
UNITS = 64  # 16 MiB at the source: far more than sockets buffer
SLOTS = 4
BUFFER = SLOTS * PAGE

OVER_TCP = [name for name in STAGING_NAMES if name.startswith("tcp")]
only_tcp = pytest.mark.parametrize("world", OVER_TCP, indirect=True)
"""Over shared memory a reader needs nobody who is awake."""


@pytest.fixture(params=[kind for kind in FAR_KINDS if "device" not in kind.id])
def world(request):
    yield from world_of(request.param)


@pytest.fixture
def reader(world):
    return world.end(UNITS * PAGE // 2, staging_bytes=8 * BUFFER)


def join(world, reader, peer, number):
    """Start another process; return it and a prepared list that takes every second KiB of its pages."""
    exporter = world.elsewhere(UNITS * PAGE, seed=number)
    world.connect(reader, exporter, peer)
    rows = world.rows(exporter.region, (0, PAGE, PAGE, UNITS))
    axes = [(PAGE // 2048, 2048, 1024), *[(1, 0, 0)] * (AXES_MAX - 1)]
    box = [1024, 0, PAGE, reader.cache.region.address, PAGE // 2, 0, 0, *(n for axis in axes for n in axis)]
    scatter = Scatter(np.array([box], np.int64), SLOTS, (UNITS, 1, 1))
    binding = StagedUnits(PAGE // 2, PAGE, SLOTS)
    prepared_list = PreparedList(
        number,
        peer,
        rows,
        np.array([[0, PAGE, 0, PAGE, SLOTS]]),
        world.memory,
        world.memory,
        scatter=scatter,
        binding=binding,
    )
    reader.transport.prepare(prepared_list)
    return exporter, prepared_list


def post(world, reader, prepared_list, read_id):
    reader.post(world.read(read_id, prepared_list, range(UNITS), range(UNITS), slot=3))


def read_all(world, reader, exporter, prepared_list, read_id):
    post(world, reader, prepared_list, read_id)
    (answer,) = reader.sink.wait(("read", read_id))
    assert answer.verdict == "held", answer
    wanted = exporter.content.reshape(UNITS, -1, 2, 1024)[:, :, 0].ravel()
    assert np.array_equal(reader.cache.bytes(), wanted)
    assert reader.transport.staging().in_use == 0


def test_staged_bytes_cross_processes(world, reader):
    exporter, prepared_list = join(world, reader, "p", 1)
    for read_id in (1, 2):
        read_all(world, reader, exporter, prepared_list, read_id)


@pytest.fixture
def hung(world, reader):
    """A peer that was stopped with a staged read under way; its target was zeroed before."""
    exporter, prepared_list = join(world, reader, "p", 1)
    read_all(world, reader, exporter, prepared_list, 1)
    exporter.stop()
    reader.cache.write(0, np.zeros(UNITS * PAGE // 2, np.uint8))
    post(world, reader, prepared_list, 2)
    post(world, reader, prepared_list, 3)
    reader.transport.cancel([3])
    reader.sink.wait(("read", 3))
    for _ in range(4):  # between two commands the core posts a chunk: after this two are in flight
        world.flush_commands(reader)
    return exporter, prepared_list


@only_tcp
def test_a_canceled_read_of_a_hung_peer_gives_its_buffers_back_unscattered(world, reader, hung):
    exporter, prepared_list = hung
    assert reader.transport.staging().in_use == 2  # chunks in flight of one peer
    reader.transport.cancel([2])
    assert reader.sink.wait(("read", 2))[0].code == "cancelled"
    assert reader.transport.staging().in_use == 0
    _, second = join(world, reader, "other", 2)
    post(world, reader, second, 4)
    assert reader.sink.wait(("read", 4))[0].verdict == "held"
    reader.cache.write(0, np.zeros(UNITS * PAGE // 2, np.uint8))
    exporter.resume()
    assert not reader.cache.bytes().any(), "bytes were scattered after the cancellation"
    read_all(world, reader, exporter, prepared_list, 5)


def test_a_peer_that_is_killed_fails_staged_reads_and_frees_their_buffers(world, reader):
    exporter, prepared_list = join(world, reader, "p", 1)
    read_all(world, reader, exporter, prepared_list, 1)
    exporter.kill()
    post(world, reader, prepared_list, 2)
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
    other, prepared_list = join(world, reader, "other", 2)
    reader.transport.cancel([2])
    if means == "removing it":
        reader.transport.remove_peer("p")
    else:
        reader.transport.reset_reader()
    assert reader.sink.wait(("read", 2))[0].code in ("cancelled", "peer_lost")
    assert reader.transport.staging().in_use == 0
    read_all(world, reader, other, prepared_list, 4)


@only_tcp
def test_closing_ends_staged_reads_of_a_hung_peer(world, reader, hung):
    reader.transport.close()
    assert reader.sink.wait(("read", 2))[0].code == "cancelled"
    assert reader.transport.staging().in_use == 0
