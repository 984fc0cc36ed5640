"""Every transport: staged lists. Chunks go through buffers, and no buffer is lost, whatever happens to them."""

import math

import numpy as np
import pytest

from kvflow.planning.bind import Bound
from kvflow.planning.staging import AXES_MAX, Scatter
from kvflow.reads.contract import PreparedList, StagingUse
from kvflow.reads.staging import StagingMemory
from tests.contract.conftest import STAGING_NAMES, StagedUnits, kinds, world_of

PIECE = 64
TOKENS = 4
LAYERS = 2
UNITS = 48
PAGE = 2 * PIECE * TOKENS  # of the source: pieces of two ranks, token by token
BUFFER = 4096
SLOTS = BUFFER // (LAYERS * PAGE)
SOURCE = LAYERS * UNITS * PAGE
TARGET = SOURCE // 2
STAGING = 8 * BUFFER


@pytest.fixture(params=kinds(*STAGING_NAMES))
def world(request):
    yield from world_of(request.param)


def staged_list(world, list_id, peer, source, target):
    """Take the second half of each token of a source page: two layers, one behind the other, blocks in each."""
    rows = world.rows(source, *((layer * UNITS * PAGE, PAGE, PAGE, UNITS) for layer in range(LAYERS)))
    buffer = [(layer * SLOTS * PAGE, PAGE, 0, PAGE, SLOTS) for layer in range(LAYERS)]
    axes = [(LAYERS, SLOTS * PAGE, UNITS * PAGE // 2), (TOKENS, 2 * PIECE, PIECE), *[(1, 0, 0)] * (AXES_MAX - 2)]
    box = [PIECE, PIECE, PAGE, target.address, PAGE // 2, 0, 0, *(number for axis in axes for number in axis)]
    scatter = Scatter(np.array([box], np.int64), SLOTS, (UNITS, 1, 1))
    # A row is address, nbytes, device, stride, count.
    binding = StagedUnits(LAYERS * PAGE // 2, LAYERS * PAGE, SLOTS)
    memories = world.memory, world.memory
    return PreparedList(list_id, peer, rows, np.array(buffer, np.int64), *memories, scatter=scatter, binding=binding)


def expected(content, before, source, target):
    """What the target holds afterwards: half of each token's bytes of these pages."""
    pages = content.reshape(LAYERS, UNITS, TOKENS, 2, PIECE)
    after = before.copy().reshape(LAYERS, UNITS, TOKENS, PIECE)
    for here, there in zip(source, target, strict=True):
        after[:, there] = pages[:, here, :, 1]
    return after.ravel()


def pair(world):
    """A reader with staging buffers and an exporter of random bytes, a prepared list between them."""
    reader, exporter = world.end(TARGET, seed=9, staging_bytes=STAGING), world.exporter(SOURCE, seed=1)
    world.connect(reader, exporter, "p")
    prepared_list = reader.prepare(staged_list(world, 1, "p", exporter.cache.region, reader.cache.region))
    return reader, exporter, prepared_list


def at_rest(reader):
    """No buffer is taken once every read has ended. A buffer is free before its read's end is told."""
    use = reader.transport.staging()
    return (use.buffers, use.buffer_bytes, use.in_use, use.quarantined) == (8, BUFFER, 0, 0)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (range(UNITS), range(UNITS)),
        (range(UNITS), range(UNITS - 1, -1, -1)),
        ([5], [40]),
        (range(0, 40, 3), [7, 8, 9, 1, 0, 47, 46, 20, 22, 24, 30, 31, 33, 36]),
        ([3, 3, 4], [1, 2, 0]),
    ],
    ids=["in order", "backwards", "one", "apart", "a source unit twice"],
)
def test_units_arrive_and_nothing_else_changes(world, source, target):
    reader, exporter, prepared_list = pair(world)
    before = reader.cache.bytes()
    answer = reader.answer(world.read(1, prepared_list, source, target, slot=3))
    assert (answer.verdict, answer.nbytes) == ("held", len(source) * LAYERS * PAGE // 2)
    assert answer.scatter_s > 0
    assert np.array_equal(reader.cache.bytes(), expected(exporter.cache.bytes(), before, source, target))
    assert at_rest(reader)


def test_staged_and_direct_reads_of_two_peers_go_on_beside_each_other(world):
    reader, exporter, prepared_list = pair(world)
    other = world.exporter(SOURCE, seed=2)
    world.connect(reader, other, "q")
    second = staged_list(world, 2, "q", other.cache.region, reader.cache.region)
    direct = world.dense(3, "p", exporter.cache.region, reader.cache.region, block=PIECE, count=8)
    for each in (second, direct):
        reader.transport.prepare(each)
    before = reader.cache.bytes()
    low, high = list(range(0, UNITS, 2)), list(range(1, UNITS, 2))
    for turn in range(3):
        reader.post(world.read(10 + turn, prepared_list, low, low))
        reader.post(world.read(20 + turn, second, high, high))
    keys = [("read", number + turn) for number in (10, 20) for turn in range(3)]
    assert all(answer.verdict == "held" for answer in reader.sink.wait(*keys))
    after = expected(exporter.cache.bytes(), before, low, low)
    after = expected(other.cache.bytes(), after, high, high)
    assert np.array_equal(reader.cache.bytes(), after)
    assert reader.answer(world.read(30, direct, range(8), range(8))).verdict == "held"
    assert at_rest(reader)


def test_a_cancelled_read_scatters_nothing_more(world):
    reader, exporter, prepared_list = pair(world)
    before = reader.cache.bytes()
    reader.post(world.read(0, prepared_list, [0], [0]))
    reader.sink.wait(("read", 0))
    with world.holding(reader):
        reader.post(world.read(1, prepared_list, range(1, 40), range(1, 40)))
        reader.transport.cancel([1])
    assert reader.sink.wait(("read", 1))[0].code == "cancelled"
    assert np.array_equal(reader.cache.bytes(), expected(exporter.cache.bytes(), before, [0], [0]))
    assert at_rest(reader)
    assert reader.answer(world.read(2, prepared_list, [1], [1])).verdict == "held"


def changed(prepared_list, **fields):
    values = {name: getattr(prepared_list, name) for name in prepared_list.__struct_fields__}
    return PreparedList(**values | fields)


def with_box(prepared_list, **columns):
    table = prepared_list.scatter.table.copy()
    for column, value in columns.items():
        table[0, int(column[1:])] = value
    return changed(prepared_list, scatter=Scatter(table, prepared_list.scatter.places, prepared_list.scatter.units))


REFUSED = {
    "beyond the buffer": lambda it: with_box(it, c1=BUFFER),
    "an axis beyond the buffer": lambda it: with_box(it, c8=BUFFER),
    "an overflowing axis of the buffer": lambda it: with_box(it, c7=1 << 62, c8=1 << 62),
    "slots beyond the buffer": lambda it: with_box(it, c2=PAGE + 1),
    "before the region": lambda it: with_box(it, c3=int(it.scatter.table[0, 3]) - 1),
    "units beyond the region": lambda it: with_box(it, c4=PAGE // 2 + 1),
    "an overflowing stride of units": lambda it: with_box(it, c4=1 << 62),
    "an overflowing axis of the target": lambda it: with_box(it, c9=(1 << 63) - 1),
    "no bytes": lambda it: with_box(it, c0=0),
    "an axis of nothing": lambda it: with_box(it, c7=0),
    "a negative number": lambda it: with_box(it, c5=-1),
    "a table of another shape": lambda it: changed(
        it, scatter=Scatter(np.ones((1, 7), np.int64), SLOTS, (UNITS, 1, 1))
    ),
    "a table of another type": lambda it: changed(
        it, scatter=Scatter(it.scatter.table.astype(np.int32), SLOTS, (UNITS, 1, 1))
    ),
    "more units than int32 can number": lambda it: changed(
        it, scatter=Scatter(it.scatter.table, SLOTS, (UNITS, 1 << 20, 1 << 20))
    ),
    "more slots than rows have": lambda it: changed(it, scatter=Scatter(it.scatter.table, SLOTS + 1, (UNITS, 1, 1))),
    "rows beyond the buffer": lambda it: changed(it, target_rows=it.target_rows + np.array([BUFFER, 0, 0, 0, 0])),
    "source rows of another length": lambda it: changed(it, source_rows=it.source_rows - [0, 1, 0, 0, 0]),
    "source rows that do not divide": lambda it: changed(it, source_rows=it.source_rows[:1] - [0, 0, 0, 0, 1]),
    "a target in other memory": lambda it: changed(it, target_memory="VRAM"),
}


def test_copies_out_of_bounds_are_refused_before_anything_is_read(world):
    reader, _, prepared_list = pair(world)
    before = reader.cache.bytes()
    for number, (kind, make) in enumerate(REFUSED.items(), start=2):
        bad = changed(make(prepared_list), list_id=number)
        reader.transport.prepare(bad)
        answer = reader.answer(world.read(number, bad, [0], [0]))
        assert (answer.verdict, answer.code) == ("failed", "bounds"), (kind, answer.detail)
        assert np.array_equal(reader.cache.bytes(), before), kind
        assert at_rest(reader), kind


@pytest.mark.parametrize(
    ("source", "target"), [([UNITS], [0]), ([0], [UNITS]), ([-1], [0])], ids=["source", "target", "negative"]
)
def test_units_that_are_not_there_are_refused(world, source, target):
    reader, _, prepared_list = pair(world)
    assert reader.answer(world.read(1, prepared_list, source, target)).code == "bounds"
    assert at_rest(reader)


@pytest.mark.parametrize(
    ("count", "cuts", "nbytes"),
    [(1, [0, 1], 1), (SLOTS + 1, [0, SLOTS + 1], (SLOTS + 1) * LAYERS * PAGE // 2), (2, [0, 2], LAYERS * PAGE)],
    ids=["bytes", "more than slots", "more units than pairs"],
)
def test_what_a_binding_makes_of_units_must_fit_the_buffers(world, count, cuts, nbytes):
    reader, _, prepared_list = pair(world)
    index = np.arange(count, dtype=np.int32)
    prepared_list.binding.bind = lambda *_, **__: Bound(index, index, np.array(cuts), nbytes)
    assert (
        reader.answer(
            world.read(1, prepared_list, range(count if count != 2 else 1), range(count if count != 2 else 1))
        ).code
        == "bounds"
    )
    assert at_rest(reader)


def test_a_transport_without_staging_refuses_staged_lists(world):
    reader, exporter = world.end(TARGET), world.exporter(SOURCE, seed=1)
    world.connect(reader, exporter, "p")
    prepared_list = reader.prepare(staged_list(world, 1, "p", exporter.cache.region, reader.cache.region))
    assert reader.answer(world.read(1, prepared_list, [0], [0])).code == "bounds"
    assert reader.transport.staging() == StagingUse()


def test_a_peer_that_ends_fails_staged_reads_and_frees_their_buffers(world):
    reader = world.end(TARGET, seed=9, staging_bytes=STAGING)
    # Over shared memory the memory of a process is readable as long as that process lives.
    exporter = world.elsewhere(SOURCE, seed=1) if world.kind == "nixl" else world.end(SOURCE, seed=1)
    world.connect(reader, exporter, "p")
    prepared_list = reader.prepare(staged_list(world, 1, "p", exporter.region, reader.cache.region))
    assert reader.answer(world.read(1, prepared_list, [0], [0])).verdict == "held"
    exporter.go()
    assert reader.answer(world.read(2, prepared_list, range(40), range(40))).code == "peer_lost"
    reader.sink.failed("p")
    assert at_rest(reader)


def test_staging_memory_is_divided_into_whole_pages():
    memory = StagingMemory(8 * BUFFER + 100)
    assert [region.nbytes for region in memory.buffers] == [BUFFER] * 8
    assert memory.regions[0].nbytes == 8 * BUFFER
    assert StagingMemory(8 * 4096 - 1).buffers == StagingMemory(0).regions == ()
    assert math.prod(memory.content(7).shape) == BUFFER
