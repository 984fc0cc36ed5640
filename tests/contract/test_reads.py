"""Every transport: bytes go where they should, chunk by chunk, and every read has one answer."""

import math
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.conftest import BLOCK, INLINE_KINDS, WITH_APART

VERDICTS = {41: "early", 42: "held", 43: "stale"}

with_apart = pytest.mark.parametrize("world", WITH_APART, indirect=True)
observed_beside_42 = pytest.mark.parametrize("observed", VERDICTS, ids=["below", "equal", "above"])


def blocks_of(world, reader, exporter, **options):
    """A prepared list of all blocks, prepared."""
    prepared_list = world.dense(1, "p", exporter.cache.region, reader.cache.region, block=BLOCK, count=64, **options)
    reader.transport.prepare(prepared_list)
    return prepared_list


@with_apart
@pytest.mark.parametrize("seed", range(4))
def test_rows_indices_and_cuts_copy_exactly_the_named_bytes(world, seed):
    rng = np.random.default_rng(seed)
    reader, exporter = world.end(1 << 20, seed=100 + seed), world.exporter(1 << 20, seed=seed)
    world.connect(reader, exporter, "p")
    # Rows of three lengths with holes; each descriptor of length n may go to any other of length n.
    source = world.rows(exporter.cache.region, (8, 512, 640, 200), (200_000, 4096, 4096, 40), (600_001, 7, 33, 90))
    target = world.rows(reader.cache.region, (0, 7, 8, 90), (5_000, 512, 512, 200), (300_000, 4096, 5000, 40))
    prepared_list = world.prepared_list(1, "p", source, target, chunk=int(rng.integers(1, 80)))
    target_first = {7: 0, 512: 90, 4096: 290}
    source_index, target_index = [], []
    for first, count, nbytes in ((0, 200, 512), (200, 40, 4096), (240, 90, 7)):
        n = int(rng.integers(1, count))
        source_index += list(first + rng.permutation(count)[:n])
        target_index += list(target_first[nbytes] + rng.permutation(count)[:n])
    read = world.read(7, prepared_list, source_index, target_index)
    expected = world.oracle(exporter, reader, prepared_list, read)
    reader.transport.prepare(prepared_list)
    reader.post(read)
    (answer,) = reader.sink.wait(("read", 7))
    assert answer.verdict == "held"
    assert np.array_equal(reader.cache.bytes(), expected)
    assert answer.nbytes == sum({0: 512, 1: 4096, 2: 7}[np.searchsorted([200, 240], i, "right")] for i in source_index)
    assert np.array_equal(exporter.cache.bytes(), world.end(1 << 20, seed=seed, start=False).cache.bytes())


@pytest.mark.parametrize(
    ("source_index", "target_index", "chunk"),
    [
        (range(64), range(64), 64),
        (range(64), range(64), 10),
        (range(31, -1, -1), range(31, -1, -1), 64),
        ([3], [60], 1),
    ],
)
def test_an_answer_says_where_the_time_of_the_read_went(world, pair, *, source_index, target_index, chunk):
    reader, exporter = pair
    prepared_list = blocks_of(world, reader, exporter, chunk=chunk)
    read = world.read(1, prepared_list, source_index, target_index)
    with world.holding(reader):  # the read thread keeps the times of the read
        reader.post(read)
    (answer,) = reader.sink.wait(("read", 1))
    assert (answer.verdict, answer.phase, answer.nbytes) == ("held", "fence", len(source_index) * BLOCK)
    assert answer.chunks == -(-len(source_index) // chunk)
    assert 0 < answer.started_at < answer.arrived_at < answer.started_at + world.patience_s
    assert 0 < answer.post_s < world.patience_s
    assert 0 < answer.bind_s < world.patience_s
    assert 0 < answer.fence_s < world.patience_s
    assert (read.phase, read.nbytes, read.started_at) == ("fence", answer.nbytes, answer.started_at)
    assert read.outstanding.since == float("inf"), "it owes nothing"


@observed_beside_42
def test_the_verdict_compares_the_lease_with_its_slot_after_the_bytes(world, pair, observed):
    reader, exporter = pair
    exporter.epochs[:] = 1 << 63
    exporter.epochs[9] = observed
    prepared_list = blocks_of(world, reader, exporter)
    answer = reader.answer(world.read(1, prepared_list, [0], [0], slot=9, epoch=42))
    assert (answer.verdict, answer.observed, answer.code) == (VERDICTS[observed], observed, "")
    served = not world.serves or observed == 42
    wanted = exporter.cache.bytes()[:BLOCK] if served else np.zeros(BLOCK, np.uint8)
    assert np.array_equal(reader.cache.bytes()[:BLOCK], wanted)


@observed_beside_42
def test_a_first_check_that_does_not_find_the_lease_held_reads_no_byte(world, pair, observed):
    reader, exporter = pair
    exporter.epochs[9] = observed
    prepared_list = blocks_of(world, reader, exporter)
    before = reader.cache.bytes().copy()
    answer = reader.answer(world.read(1, prepared_list, [0], [0], slot=9, epoch=42, check_first=True))
    assert (answer.verdict, answer.observed) == (VERDICTS[observed], observed)
    if observed == 42:
        assert np.array_equal(reader.cache.bytes()[:BLOCK], exporter.cache.bytes()[:BLOCK])
        assert answer.phase == "fence"
    else:
        assert np.array_equal(reader.cache.bytes(), before)
        assert (answer.nbytes, answer.chunks, answer.started_at, answer.phase) == (0, 0, 0.0, "queue")


def test_an_epoch_has_all_64_bits(world, pair):
    reader, exporter = pair
    exporter.epochs[63] = 2**64 - 1
    prepared_list = blocks_of(world, reader, exporter)
    answer = reader.answer(world.read(1, prepared_list, [0], [0], slot=63, epoch=42))
    assert (answer.verdict, answer.observed) == ("stale", 2**64 - 1)


@with_apart
def test_the_fence_sees_what_ended_while_the_read_was_under_way(world, pair):
    reader, exporter = pair
    exporter.epochs[0] = 1
    prepared_list = blocks_of(world, reader, exporter)
    late = reader.prepare(world.dense(2, "p", exporter.cache.region, reader.cache.region, block=BLOCK, count=64))
    late.binding.on_bind = lambda: exporter.set_epoch(0, 2)  # when half of the bytes were posted
    reader.post(world.read_of(1, [(prepared_list, [0], [0]), (late, [1], [1])], epoch=1))
    (answer,) = reader.sink.wait(("read", 1))
    assert (answer.verdict, answer.observed) == ("stale", 2)
    if not world.serves:
        assert np.array_equal(reader.cache.bytes()[: 2 * BLOCK], exporter.cache.bytes()[: 2 * BLOCK])


@with_apart
def test_all_parts_of_a_read_have_arrived_when_it_is_answered(world, pair):
    reader, exporter = pair
    prepared_list = blocks_of(world, reader, exporter, chunk=5)
    small = world.rows(exporter.cache.region, (0, 512, 512, 512)), world.rows(reader.cache.region, (0, 512, 512, 512))
    other = reader.prepare(world.prepared_list(2, "p", *small, chunk=3))
    parts = [
        (prepared_list, range(30), range(30)),
        (other, range(256, 300), range(256, 300)),
        (prepared_list, [60, 61], [61, 60]),
    ]
    reader.post(world.read_of(1, parts))
    (answer,) = reader.sink.wait(("read", 1))
    assert (answer.verdict, answer.nbytes) == ("held", 32 * BLOCK + 44 * 512)
    by_thread, at_once = 6 + 15 + 1, len(parts)  # a post at once has one chunk for each part
    assert answer.chunks == by_thread or (world.inline and answer.chunks == at_once)
    expected, content = np.zeros_like(reader.cache.bytes()), exporter.cache.bytes()
    expected[: 30 * BLOCK], expected[256 * 512 : 300 * 512] = content[: 30 * BLOCK], content[256 * 512 : 300 * 512]
    expected[61 * BLOCK : 62 * BLOCK] = content[60 * BLOCK : 61 * BLOCK]
    expected[60 * BLOCK : 61 * BLOCK] = content[61 * BLOCK : 62 * BLOCK]
    assert np.array_equal(reader.cache.bytes(), expected)


def test_a_read_under_a_slot_or_an_epoch_that_does_not_exist_fails_alone(world, pair):
    reader, exporter = pair
    prepared_list = blocks_of(world, reader, exporter)
    leases = [(64, 0), (-1, 0), (1 << 40, 0), (3, -1), (3, 1 << 63), (63, 0)]
    reader.post(
        *(world.read(at, prepared_list, [1], [1], slot=slot, epoch=epoch) for at, (slot, epoch) in enumerate(leases))
    )
    *bad, good = reader.sink.wait(*(("read", at) for at in range(len(leases))))
    assert [answer.code for answer in bad] == ["bounds"] * 5
    assert good.verdict == "held"


@with_apart
def test_reads_of_one_post_share_chunks_and_checks_but_fail_alone(world):
    count = 600
    reader = world.end(count * BLOCK)
    exporter = world.exporter(count * BLOCK, seed=1, slots=count)
    world.connect(reader, exporter, "p")
    prepared_list = world.dense(1, "p", exporter.cache.region, reader.cache.region, block=BLOCK, count=count)
    reader.transport.prepare(prepared_list)
    exporter.epochs[:] = np.arange(count) + 10
    # Slots from one end of the table to the other: more than one check has room for.
    reads = [world.read(at, prepared_list, [at], [count - 1 - at], slot=at, epoch=at + 10) for at in range(count)]
    reads[100] = world.read(100, prepared_list, [count], [0])  # fails before it is posted
    exporter.epochs[200] += 1  # fails after that
    exporter.epochs[201] -= 1
    reads[201].check_first = reads[202].check_first = True
    reader.post(*reads)
    answers = reader.sink.wait(*(("read", at) for at in range(count)))
    odd = {100: "failed", 200: "stale", 201: "early"}
    assert {at: answer.verdict for at, answer in enumerate(answers) if answer.verdict != "held"} == odd
    assert answers[100].code == "bounds"
    assert [answer.observed for at, answer in enumerate(answers) if at != 100] == [
        int(value) for at, value in enumerate(exporter.epochs) if at != 100
    ]
    content, got = (end.cache.bytes().reshape(count, BLOCK) for end in (exporter, reader))
    unread = [100, 201, *([200] if world.serves else [])]
    got = got[::-1]
    assert not got[unread].any()
    assert np.array_equal(np.delete(got, unread, axis=0), np.delete(content, unread, axis=0))


def test_reads_under_one_slot_are_each_checked_against_their_own_epoch(world, pair):
    reader, exporter = pair
    exporter.epochs[5] = 42
    prepared_list = blocks_of(world, reader, exporter)
    epochs = [43, 42, 41, 42]
    reader.post(*(world.read(at, prepared_list, [at], [at], slot=5, epoch=epoch) for at, epoch in enumerate(epochs)))
    answers = reader.sink.wait(*(("read", at) for at in range(4)))
    assert [answer.verdict for answer in answers] == ["early", "held", "stale", "held"]


def test_small_reads_of_another_peer_run_between_the_chunks_of_a_big_one(world):
    count = 1024
    reader = world.end(count * BLOCK)
    prepared_lists = {}
    for number, peer in enumerate(("big", "small")):
        exporter = world.exporter(count * BLOCK, seed=number)
        world.connect(reader, exporter, peer)
        regions = exporter.cache.region, reader.cache.region
        prepared_lists[peer] = world.dense(number, peer, *regions, block=BLOCK, count=count, chunk=1)
        reader.transport.prepare(prepared_lists[peer])
        reader.post(world.read(100 + number, prepared_lists[peer], [0], [0]))
        reader.sink.wait(("read", 100 + number))  # the first read of a peer also connects to it
    with world.holding(reader):
        reader.post(world.read(1, prepared_lists["big"], range(count), range(count)))
        reader.post(world.read(2, prepared_lists["small"], [5], [5]))
        # Posted while the big one is under way.
        late = world.read(3, prepared_lists["small"], [6], [6])
        reader.sink.on(("read", 2), lambda: reader.post(late))
    reader.sink.wait(("read", 1), ("read", 2), ("read", 3))
    assert [key[1] for key in reader.sink.order() if key[0] == "read"] == [100, 101, 2, 3, 1]


def test_equals_of_one_peer_are_served_in_order_and_the_urgent_first(world, pair):
    reader, exporter = pair
    prepared_list = blocks_of(world, reader, exporter)
    with world.holding(reader):
        for read_id, priority in ((1, 5), (2, 0), (3, 5), (4, -5), (5, 0)):
            reader.post(world.read(read_id, prepared_list, [read_id], [read_id], priority=priority))
    reader.sink.wait(*(("read", read_id) for read_id in range(1, 6)))
    order = [key[1] for key in reader.sink.order() if key[0] == "read"]
    assert order == [4, 2, 5, 1, 3] if world.in_order else sorted(order) == list(range(1, 6))


def test_cancel_ends_what_waits_and_leaves_what_is_done_or_unknown(world, pair):
    reader, exporter = pair
    prepared_list = blocks_of(world, reader, exporter, chunk=1)
    reader.post(world.read(0, prepared_list, [0], [0]))
    reader.sink.wait(("read", 0))
    with world.holding(reader):
        reader.post(world.read(1, prepared_list, [1, 2], [1, 2]), world.read(2, prepared_list, [3], [3]))
        reader.post(world.read(3, prepared_list, [4], [4], check_first=True))
        reader.transport.cancel([0, 1, 12345])
        reader.transport.cancel([1, 3])
    cancelled, other, unchecked = reader.sink.wait(("read", 1), ("read", 2), ("read", 3))
    for answer in (cancelled, unchecked):
        assert (answer.verdict, answer.code, answer.nbytes, answer.phase) == ("failed", "cancelled", 0, "queue")
    assert other.verdict == "held"
    assert not reader.cache.bytes()[BLOCK : 3 * BLOCK].any()
    assert not reader.cache.bytes()[4 * BLOCK :].any()
    assert len(set(reader.sink.order())) == len(reader.sink.order())


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    reads=st.lists(
        st.tuples(st.integers(0, 1), st.integers(1, 6), st.integers(-1, 1), st.booleans(), st.booleans()), max_size=25
    ),
    at_once=st.integers(1, 5),
)
def test_every_read_is_answered_exactly_once(world, reads, at_once):
    reader = world.end(64 * BLOCK)
    prepared_lists = []
    for peer in (0, 1):
        exporter = world.exporter(64 * BLOCK, seed=peer)
        world.connect(reader, exporter, str(peer))
        regions = exporter.cache.region, reader.cache.region
        prepared_lists.append(world.dense(peer, str(peer), *regions, block=BLOCK, count=64, chunk=1 + peer))
        reader.transport.prepare(prepared_lists[peer])
    made = [
        world.read(
            read_id, prepared_lists[peer], range(count), range(count), priority=priority, check_first=check_first
        )
        for read_id, (peer, count, priority, check_first, _) in enumerate(reads)
    ]
    for first in range(0, len(made), at_once):
        reader.post(*made[first : first + at_once])
        reader.transport.cancel([at for at in range(first, min(first + at_once, len(made))) if reads[at][-1]])
    expected = [("read", read_id) for read_id in range(len(reads))]
    reader.sink.wait(*expected)
    # The first check of a cancelled read may still be in flight: with the exporter gone, it would fail the peer.
    reader.transport.close()
    world.close_all()
    assert sorted(reader.sink.order()) == sorted([*expected, ("peer", "0"), ("peer", "1")])
    answers = [event for event in reader.sink.events if hasattr(event, "verdict")]
    assert all(answer.verdict == "held" or answer.code == "cancelled" for answer in answers)


def without_times(answer):
    """What an answer says beside how long everything took."""
    times = {name for name in answer.__struct_fields__ if name.endswith(("_s", "_at"))}
    return {name: getattr(answer, name) for name in answer.__struct_fields__ if name not in times}


@pytest.mark.parametrize("world", INLINE_KINDS, indirect=True)
def test_answers_and_bytes_are_the_same_inline_and_by_the_thread(world):
    exporter = world.exporter(64 * BLOCK, seed=1)
    exporter.epochs[:] = np.arange(64)
    told, caches = [], []
    for inline_s_max in (world.patience_s, 0.0):
        reader = world.end(64 * BLOCK, inline_s_max=inline_s_max)
        world.connect(reader, exporter, "p")
        prepared_list = blocks_of(world, reader, exporter, chunk=3)
        world.flush_commands(reader)
        if inline_s_max:
            world.until_inline(reader, prepared_list)
        rng = np.random.default_rng(7)
        at_once, answers = 0, {}
        for first in range(0, 200, 5):
            reads = []
            for read_id in range(first, first + 5):
                slot, count = int(rng.integers(64)), int(rng.integers(1, 9))
                units = rng.permutation(65 if read_id % 17 == 0 else 64)[:count]
                epoch, check_first = slot + int(rng.choice([0, 0, 0, 1, -1])), bool(rng.integers(2))
                how = {"slot": slot, "epoch": epoch, "check_first": check_first, "priority": int(rng.integers(3))}
                reads.append(world.read(read_id, prepared_list, units, rng.permutation(64)[:count], **how))
            at_once += len(reader.post(*reads))
            keys = [("read", read.read_id) for read in reads]
            answers |= {answer.read_id: without_times(answer) for answer in reader.sink.wait(*keys)}
        assert at_once == (200 if inline_s_max else 0)
        told.append(answers)
        caches.append(reader.cache.bytes())
    assert {answer["code"] or answer["verdict"] for answer in told[0].values()} == {"held", "early", "stale", "bounds"}
    # Which reads of a batch share a chunk is the same as well, and so is the order in which they write.
    assert told[0] == told[1]
    assert np.array_equal(*caches)


@pytest.mark.parametrize("world", INLINE_KINDS, indirect=True)
def test_a_read_is_inline_only_if_its_peer_is_known_and_the_plane_is_idle(world, pair):
    reader, exporter = pair
    prepared_list = blocks_of(world, reader, exporter)
    world.until_inline(reader, prepared_list)
    read = world.read(1, prepared_list, [0], [0])
    assert [answer.read_id for answer in reader.post(read)] == [1]
    assert (read.phase, read.nbytes) == ("fence", BLOCK)
    assert read.started_at <= read.since < math.inf, "a pull that fails now tells how long each phase took"
    stranger = world.exporter(64 * BLOCK, seed=2)
    reader.transport.add_peer(stranger.address("q"))
    reader.sink.wait(("peer", "q"))
    other = reader.prepare(world.dense(2, "q", stranger.cache.region, reader.cache.region, block=BLOCK, count=64))
    assert reader.post(world.read(2, other, [1], [1])) == [], "the first read of a connection"
    reader.sink.wait(("read", 2))
    with world.holding(reader):
        assert reader.post(world.read(3, prepared_list, [2], [2])) == [], "the read thread has something to do"
        reader.transport.cancel([12345])
    reader.sink.wait(("read", 3))
    world.until_inline(reader, other)
    assert len(reader.post(world.read(4, prepared_list, [3], [3]), world.read(5, other, [4], [4]))) == 2
    reader.transport.close()
    assert reader.post(world.read(6, prepared_list, [5], [5])) == []
    assert ("read", 6) not in reader.sink.order()


@pytest.mark.parametrize("world", INLINE_KINDS, indirect=True)
def test_commands_of_other_threads_run_beside_inline_reads(world, pair):
    reader, exporter = pair
    prepared_list = blocks_of(world, reader, exporter)
    turns = threading.Semaphore(0)

    def disturb():
        for number in range(200):
            assert turns.acquire(timeout=world.patience_s)
            reader.transport.add_peer(exporter.address(f"other {number % 3}"))
            reader.transport.remove_peer(f"other {number % 3}")
            reader.transport.cancel([10_000_000])

    threads = world.threads(2, disturb)
    for read_id in range(400):
        turns.release()
        unit = read_id % 64
        assert reader.answer(world.read(read_id, prepared_list, [unit], [unit])).verdict == "held"
    world.join(threads)
    assert np.array_equal(reader.cache.bytes(), exporter.cache.bytes())
    reads = [key for key in reader.sink.order() if key[0] == "read"]
    assert len(set(reads)) == len(reads) == 400
