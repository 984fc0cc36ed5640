"""Every transport: bytes go where they should, chunk by chunk, and every read and fence ends once."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvflow.transfer.requests import NOT_HELD
from kvflow.transport.base import FenceFailed, FenceJudged, ReadCompleted, ReadFailed

BLOCK = 4096


@pytest.fixture
def pair(world):
    """A reader with an empty cache, and an exporter of random bytes: 64 blocks each."""
    reader, exporter = world.end(64 * BLOCK), world.end(64 * BLOCK, seed=1)
    world.connect(reader, exporter, "p")
    return reader, exporter


@pytest.mark.parametrize("seed", range(4))
def test_strided_rows_scattered_indices_and_cuts_copy_exactly_the_named_bytes(world, seed):
    rng = np.random.default_rng(seed)
    reader, exporter = world.end(1 << 20, seed=100 + seed), world.end(1 << 20, seed=seed)
    world.connect(reader, exporter, "p")
    # Rows of three lengths with holes; each descriptor of length n may go to any other of length n.
    source = world.rows(exporter.cache.region, (8, 512, 640, 200), (200_000, 4096, 4096, 40), (600_001, 7, 33, 90))
    target = world.rows(reader.cache.region, (0, 7, 8, 90), (5_000, 512, 512, 200), (300_000, 4096, 5000, 40))
    program = world.program(1, "p", source, target)
    target_first = {7: 0, 512: 90, 4096: 290}
    source_index, target_index = [], []
    for first, count, nbytes in ((0, 200, 512), (200, 40, 4096), (240, 90, 7)):
        n = int(rng.integers(1, count))
        source_index += list(first + rng.permutation(count)[:n])
        target_index += list(target_first[nbytes] + rng.permutation(count)[:n])
    inner = rng.choice(np.arange(1, len(source_index)), size=5, replace=False)
    read = world.read(7, program, source_index, target_index, cuts=[0, *sorted(inner), len(source_index)])
    expected = world.oracle(exporter, reader, program, read)
    reader.transport.prepare(program)
    reader.transport.post(read)
    (event,) = reader.sink.wait(("read", 7))
    assert isinstance(event, ReadCompleted)
    assert np.array_equal(reader.cache.bytes(), expected)
    assert np.array_equal(exporter.cache.bytes(), world.end(1 << 20, seed=seed, start=False).cache.bytes())


@pytest.mark.parametrize(
    ("source_index", "target_index", "cuts"),
    [
        (range(64), range(64), [0, 64]),
        (range(64), range(64), [0, 10, 64]),
        (range(31, -1, -1), range(31, -1, -1), [0, 32]),
        ([3], [60], [0, 1]),
    ],
)
def test_a_completed_read_says_where_its_time_went(world, pair, *, source_index, target_index, cuts):
    reader, exporter = pair
    program = world.dense(1, "p", exporter.cache.region, reader.cache.region, block=BLOCK, count=64)
    reader.transport.prepare(program)
    reader.transport.post(world.read(1, program, source_index, target_index, cuts=cuts))
    (event,) = reader.sink.wait(("read", 1))
    assert isinstance(event, ReadCompleted)
    assert 0 < event.posted_s < world.patience_s
    assert 0 <= event.wire_s < world.patience_s


@pytest.mark.parametrize("observed", [41, 42, 43], ids=["below", "equal", "above"])
def test_a_fence_reports_what_its_slot_holds(world, pair, observed):
    reader, exporter = pair
    exporter.epochs[:] = 1 << 63
    exporter.epochs[9] = observed
    program = world.dense(1, "p", exporter.cache.region, reader.cache.region, block=BLOCK, count=64)
    reader.transport.prepare(program)
    reader.transport.post(world.read(1, program, [0], [0], fences=(world.fence(5, 9, 42, 1),)))
    assert reader.sink.wait(("fence", 5))[0].observed == observed
    assert reader.sink.order()[-2:] == [("read", 1), ("fence", 5)]
    (read,) = reader.sink.wait(("read", 1))
    refused = world.serves and observed != 42
    assert (type(read), read.unheld) == (ReadCompleted, {(9, 42)} if refused else set())
    wanted = np.zeros(BLOCK, np.uint8) if refused else exporter.cache.bytes()[:BLOCK]
    assert np.array_equal(reader.cache.bytes()[:BLOCK], wanted)


@pytest.mark.parametrize("observed", [41, 42, 43], ids=["below", "equal", "above"])
def test_a_read_follows_its_look_only_if_that_finds_the_lease_held(world, pair, observed):
    reader, exporter = pair
    exporter.epochs[9] = observed
    program = world.dense(1, "p", exporter.cache.region, reader.cache.region, block=BLOCK, count=64)
    reader.transport.prepare(program)
    before = reader.cache.bytes().copy()
    look = world.fence(5, 9, 42)
    fence = world.fence(6, 9, 42, 1)
    reader.transport.post(world.read(1, program, [0], [0], fences=(fence,), looks=(look,)))
    looked, read, fenced = reader.sink.wait(("fence", 5), ("read", 1), ("fence", 6))
    assert looked.observed == observed
    assert reader.sink.order()[-3:] == [("fence", 5), ("read", 1), ("fence", 6)]
    if observed == 42:
        assert (type(read), fenced.observed) == (ReadCompleted, 42)
        assert np.array_equal(reader.cache.bytes()[:BLOCK], exporter.cache.bytes()[:BLOCK])
    else:
        assert (read.code, fenced.code) == (NOT_HELD, NOT_HELD)
        assert np.array_equal(reader.cache.bytes(), before), "no byte is read"


@pytest.mark.parametrize("observed", [41, 42, 43], ids=["below", "equal", "above"])
def test_a_look_alone_reports_what_its_slot_holds(world, pair, observed):
    reader, exporter = pair
    exporter.epochs[9] = observed
    reader.transport.look("p", world.fence(5, 9, 42))
    assert reader.sink.wait(("fence", 5))[0].observed == observed
    reader.transport.look("nobody", world.fence(6, 9, 42))
    assert reader.sink.wait(("fence", 6))[0].code == "peer_lost"


def test_an_epoch_has_all_64_bits(world, pair):
    reader, exporter = pair
    exporter.epochs[63] = 2**64 - 1
    program = world.dense(1, "p", exporter.cache.region, reader.cache.region, block=BLOCK, count=64)
    reader.transport.prepare(program)
    reader.transport.post(world.read(1, program, [0], [0], fences=(world.fence(5, 63, 42, 1),)))
    assert reader.sink.wait(("fence", 5))[0].observed == 2**64 - 1


def test_a_fence_sees_what_ended_between_two_of_its_reads(world, pair):
    reader, exporter = pair
    exporter.epochs[0] = 1
    program = world.dense(1, "p", exporter.cache.region, reader.cache.region, block=BLOCK, count=64)
    reader.transport.prepare(program)
    fence = world.fence(5, 0, 1, 1, 2)
    reader.transport.post(world.read(1, program, [0], [0], leases=world.leases(1, fence)))
    assert not reader.sink.wait(("read", 1))[0].unheld
    # The lease ends when half of the data has arrived: the fence must see it.
    exporter.set_epoch(0, 2)
    reader.transport.post(world.read(2, program, [1], [1], fences=(fence,)))
    assert reader.sink.wait(("fence", 5))[0].observed == 2
    assert np.array_equal(reader.cache.bytes()[:BLOCK], exporter.cache.bytes()[:BLOCK])
    assert reader.cache.bytes()[BLOCK : 2 * BLOCK].any() != world.serves


def test_fences_wait_for_all_their_reads_however_these_are_ordered(world, pair):
    reader, exporter = pair
    program = world.dense(1, "p", exporter.cache.region, reader.cache.region, block=BLOCK, count=64)
    reader.transport.prepare(program)
    reader.transport.post(world.read(1, program, [1], [1]))
    reader.sink.wait(("read", 1))
    with reader.sink.holding(("read", 2)):
        reader.transport.post(world.read(2, program, [2], [2]))
        reader.transport.post(world.read(3, program, [3], [3], priority=9))
        fences = (world.fence(1, 0, 0, 1, 2, 3, 4), world.fence(2, 0, 0, 1, 4))
        reader.transport.post(world.read(4, program, [4], [4], fences=fences))
    reader.sink.wait(("fence", 1), ("fence", 2))
    at = {key: position for position, key in enumerate(reader.sink.order())}
    assert max(at["read", 1], at["read", 4]) < at["fence", 2]
    assert max(at["read", 1], at["read", 2], at["read", 3], at["read", 4]) < at["fence", 1]
    if world.in_order:
        assert at["fence", 2] < at["read", 3]


def test_a_fence_after_a_read_that_nobody_knows_fails(world, pair):
    reader, exporter = pair
    program = world.dense(1, "p", exporter.cache.region, reader.cache.region, block=BLOCK, count=64)
    reader.transport.prepare(program)
    reader.transport.post(world.read(1, program, [1], [1], fences=(world.fence(5, 0, 0, 1, 999),)))
    fence, read = reader.sink.wait(("fence", 5), ("read", 1))
    assert isinstance(fence, FenceFailed)
    assert isinstance(read, ReadCompleted)


def test_a_fence_on_a_slot_that_does_not_exist_fails_alone(world, pair):
    reader, exporter = pair
    program = world.dense(1, "p", exporter.cache.region, reader.cache.region, block=BLOCK, count=64)
    reader.transport.prepare(program)
    for read_id, slot in ((1, 64), (2, -1), (3, 1 << 40), (4, 63)):
        fence = world.fence(read_id, slot, 0, read_id)
        reader.transport.post(world.read(read_id, program, [1], [1], fences=(fence,)))
    *bad, good = reader.sink.wait(("fence", 1), ("fence", 2), ("fence", 3), ("fence", 4))
    assert [event.code for event in bad] == ["bounds"] * 3
    assert isinstance(good, FenceJudged)


def test_small_reads_of_another_peer_run_between_the_chunks_of_a_big_one(world):
    count = 1024
    reader = world.end(count * BLOCK)
    programs = {}
    for number, peer in enumerate(("big", "small")):
        exporter = world.end(count * BLOCK, seed=number)
        world.connect(reader, exporter, peer)
        programs[peer] = world.dense(number, peer, exporter.cache.region, reader.cache.region, block=BLOCK, count=count)
        reader.transport.prepare(programs[peer])
        reader.transport.post(world.read(100 + number, programs[peer], [0], [0]))
        reader.sink.wait(("read", 100 + number))  # the first read of a peer also connects to it
    with reader.sink.holding(("read", 0)):
        reader.transport.post(world.read(0, programs["big"], [0], [0]))
        reader.sink.wait(("read", 0))
        reader.transport.post(world.read(1, programs["big"], range(count), range(count), cuts=list(range(count + 1))))
        reader.transport.post(world.read(2, programs["small"], [5], [5]))
        # Posted while the big one is under way.
        late = world.read(3, programs["small"], [6], [6])
        reader.sink.on(("read", 2), lambda: reader.transport.post(late))
    reader.sink.wait(("read", 1), ("read", 2), ("read", 3))
    assert [key[1] for key in reader.sink.order() if key[0] == "read"] == [100, 101, 0, 2, 3, 1]


def test_equals_of_one_peer_are_served_in_order_and_the_urgent_first(world, pair):
    reader, exporter = pair
    program = world.dense(1, "p", exporter.cache.region, reader.cache.region, block=BLOCK, count=64)
    reader.transport.prepare(program)
    with reader.sink.holding(("read", 0)):
        reader.transport.post(world.read(0, program, [0], [0]))
        reader.sink.wait(("read", 0))
        for read_id, priority in ((1, 5), (2, 0), (3, 5), (4, -5), (5, 0)):
            reader.transport.post(world.read(read_id, program, [read_id], [read_id], priority=priority))
    reader.sink.wait(*(("read", read_id) for read_id in range(1, 6)))
    order = [key[1] for key in reader.sink.order() if key[0] == "read"]
    assert order == [0, 4, 2, 5, 1, 3] if world.in_order else sorted(order) == list(range(6))


def test_cancel_ends_what_waits_and_leaves_what_is_done_or_unknown(world, pair):
    reader, exporter = pair
    program = world.dense(1, "p", exporter.cache.region, reader.cache.region, block=BLOCK, count=64)
    reader.transport.prepare(program)
    with reader.sink.holding(("read", 0)):
        reader.transport.post(world.read(0, program, [0], [0]))
        reader.sink.wait(("read", 0))
        chunks = {"cuts": [0, 1, 2], "fences": (world.fence(1, 0, 0, 0, 1),)}
        reader.transport.post(world.read(1, program, [1, 2], [1, 2], **chunks))
        reader.transport.post(world.read(2, program, [3], [3], fences=(world.fence(2, 0, 0, 2),)))
        reader.transport.cancel([0, 1, 12345])
        reader.transport.cancel([1])
    cancelled, fence, read, judged = reader.sink.wait(("read", 1), ("fence", 1), ("read", 2), ("fence", 2))
    assert (cancelled.code, fence.code) == ("cancelled", "cancelled")
    assert isinstance(read, ReadCompleted)
    assert isinstance(judged, FenceJudged)
    assert not reader.cache.bytes()[BLOCK : 3 * BLOCK].any()
    assert len(set(reader.sink.order())) == len(reader.sink.order())


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(reads=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 6), st.integers(-1, 1), st.booleans()), max_size=25))
def test_every_read_and_every_fence_ends_exactly_once(world, reads):
    reader = world.end(64 * BLOCK)
    programs = []
    for peer in (0, 1):
        exporter = world.end(64 * BLOCK, seed=peer)
        world.connect(reader, exporter, str(peer))
        programs.append(world.dense(peer, str(peer), exporter.cache.region, reader.cache.region, block=BLOCK, count=64))
        reader.transport.prepare(programs[peer])
    expected = []
    for read_id, (peer, chunks, priority, cancel) in enumerate(reads):
        earlier = [other for other in range(read_id) if reads[other][0] == peer][-2:]
        fence = world.fence(read_id, peer, 0, *earlier, read_id)
        cuts = list(range(chunks + 1))
        index = range(chunks)
        options = {"cuts": cuts, "priority": priority, "fences": (fence,)}
        reader.transport.post(world.read(read_id, programs[peer], index, index, **options))
        if cancel:
            reader.transport.cancel([read_id])
        expected += [("read", read_id), ("fence", read_id)]
    reader.sink.wait(*expected)
    world.close_all()
    assert sorted(reader.sink.order()) == sorted([*expected, ("peer", "0"), ("peer", "1")])
    assert all(event.code == "cancelled" for event in reader.sink.events if isinstance(event, ReadFailed))
