"""The lanes in the few orders that matter by name. The machine in tests/properties plays all others."""

import math

import numpy as np
import pytest

from kvflow.planning.bind import Bound
from kvflow.reads.backend import Cause
from kvflow.reads.contract import SPAN_MAX
from kvflow.reads.lanes import (
    CHECKS_IN_FLIGHT_MAX,
    CHUNKS_IN_FLIGHT_MAX,
    Check,
    Lanes,
)

from .lane_reads import EPOCH, ONE_EACH, STAGED, Bench, a_read, chunks, ids, prepared

LOST = Cause("peer_lost", "gone")


def test_what_was_not_served_is_early_though_the_lease_is_held_by_now():
    bench, prepared_list = Bench(), prepared(4, shared=4)
    for read_id, slot in ((1, 3), (2, 4)):
        bench.admit(read_id, prepared_list, slot=slot)
    chunk = bench.take()
    bench.lanes.arrived(chunk, unheld={(3, EPOCH)})
    bench.drain()
    assert [(answer.read_id, answer.verdict, answer.unserved) for answer in bench.answers] == [
        (1, "early", True),
        (2, "held", False),
    ]


def test_small_reads_share_a_chunk_and_a_large_one_has_its_own():
    bench = Bench()
    prepared_list = prepared(8, shared=8)
    for read_id, count in ((1, 2), (2, 6), (3, 1), (4, 30), (5, 3), (6, 3)):
        bench.admit(read_id, prepared_list, chunks=count)
    works = [work for work in bench.drain() if not isinstance(work, Check)]
    assert [ids(work) for work in works] == [[1, 2], [3], [4], [4], [4], [4], [5, 6]]
    assert [[share.pairs for share in work.chunk.portion.shares] for work in works][:2] == [[2, 6], [1]]
    assert [answer.nbytes for answer in bench.answers] == [2, 6, 1, 30, 3, 3]
    assert [answer.chunks for answer in bench.answers] == [1, 1, 1, 4, 1, 1]


def test_reads_of_several_parts_share_a_chunk_part_by_part():
    bench = Bench()
    one, other = (prepared(8, shared=8, list_id=number) for number in (1, 2))
    for read_id in (1, 2):
        bench.lanes.admit(a_read(read_id, chunks=2, parts=2), [one, other])
    works = [work for work in bench.drain() if not isinstance(work, Check)]
    assert [(ids(work), work.chunk.portion.list_id) for work in works] == [([1, 2], 1), ([1, 2], 2)]


def test_a_shared_chunk_is_posted_for_the_reads_that_still_want_it():
    bench, prepared_list = Bench(), prepared(8, shared=8)
    for read_id in (1, 2, 3):
        bench.admit(read_id, prepared_list, chunks=2)
    bench.lanes.cancel([2])
    chunk = bench.take()
    assert ids(chunk) == [1, 3]
    bench.lanes.cancel([1])  # nothing of it is left to drop
    bench.land(chunk)
    bench.drain()
    assert bench.told() == [(2, "cancelled"), (1, "held"), (3, "held")]


def test_a_read_that_cannot_be_bound_fails_alone_though_it_shared_a_chunk():
    bench = Bench()
    prepared_list = prepared(8, shared=8)
    bind = prepared_list.prepared_list.binding.bind

    def refuse_the_second(pairs, **budgets):
        bound = bind(pairs, **budgets)
        return Bound(bound.source_index, bound.target_index, bound.cuts, -1) if 128 in pairs.source else bound

    prepared_list.prepared_list.binding.bind = refuse_the_second
    for read_id in (1, 2, 3):
        bench.admit(read_id, prepared_list)
    bench.drain()
    assert bench.told() == [(1, "held"), (2, "bounds"), (3, "held")]


def test_checks_of_many_leases_are_one_unless_they_are_too_far_apart():
    bench = Bench()
    slots = [5, 0, SPAN_MAX - 1, SPAN_MAX, 7, 10 * SPAN_MAX]
    for read_id, slot in enumerate(slots):
        bench.admit(read_id, slot=slot, check_first=True)
    checks = [bench.lanes.take_check() for _ in range(4)]
    assert checks.pop() is None
    spans = [(check.first, check.last) for check in checks]
    assert spans == [(0, SPAN_MAX - 1), (SPAN_MAX, SPAN_MAX), (10 * SPAN_MAX, 10 * SPAN_MAX)]
    assert [ids(check) for check in checks] == [[1, 0, 4, 2], [3], [5]]
    values = np.arange(SPAN_MAX).tolist()
    values[5] = EPOCH
    bench.lanes.checked(checks[0], values)  # slot 7 holds 7 as well
    assert bench.told() == [(1, "early"), (2, "stale")]


def test_the_urgent_goes_first_and_equal_peers_take_turns():
    bench = Bench("a", "b")
    for read_id, peer, count, priority in ((1, "a", 3, 0), (2, "b", 3, 0), (3, "a", 1, -1), (4, "b", 1, 1)):
        bench.admit(read_id, peer=peer, chunks=count, priority=priority)
    assert chunks(bench.drain()) == [3, 1, 2, 1, 2, 1, 2, 4]


def test_a_read_that_is_cancelled_while_it_is_checked_ends_at_once():
    bench = Bench()
    bench.admit(1, check_first=True)
    check = bench.take()
    bench.lanes.cancel([1])
    assert bench.told() == [(1, "cancelled")]
    bench.land(check)
    assert bench.take() is None
    assert bench.told() == []


def test_a_peer_has_so_many_checks_and_chunks_in_flight():
    bench = Bench()
    for at in range(CHECKS_IN_FLIGHT_MAX + 1):
        bench.admit(10 + at, slot=2 * SPAN_MAX * at, check_first=True)
    assert len([*iter(bench.lanes.take_check, None)]) == CHECKS_IN_FLIGHT_MAX
    bench.admit(1, prepared(2, portion=3), chunks=100)
    assert len([*iter(bench.lanes.take_chunk, None)]) == CHUNKS_IN_FLIGHT_MAX


def test_a_peer_owes_us_something_while_anything_is_in_flight():
    bench = Bench()
    read = bench.admit(1, chunks=2)
    assert read.outstanding.since == math.inf
    first, second = bench.take(), bench.take()
    assert (read.outstanding.since, read.since, read.started_at, read.phase) == (100.0, 100.0, 100.0, "wire")
    bench.now = 105.0
    bench.land(first)
    assert (read.outstanding.since, read.nbytes) == (105.0, 1)
    bench.now = 106.0
    bench.land(second)
    assert (read.outstanding.since, read.since, read.phase) == (math.inf, 106.0, "fence")
    fence = bench.take()
    bench.now = 107.5
    bench.land(fence)
    (answer,) = bench.answers
    assert (answer.started_at, answer.arrived_at, answer.fence_s) == (100.0, 106.0, 1.5)


def test_a_peer_that_holds_every_buffer_delays_staged_reads_and_no_others():
    bench = Bench("p", "q", "r", buffers=2)
    bench.admit(1, STAGED, peer="p", chunks=3)
    hung = [bench.take(), bench.take()]
    assert sorted(work.chunk.buffer for work in hung) == [0, 1]
    bench.admit(2, STAGED, peer="q")
    bench.admit(3, peer="q")  # behind it
    bench.admit(4, peer="r")
    assert chunks(bench.drain()) == [4]
    assert bench.lanes.staging() == (2, 0)
    assert bench.lanes.waiting_for_buffer() == {"q"}
    bench.lanes.check()
    bench.lanes.failed(hung[0], LOST)
    assert bench.told() == [(4, "held")], "the second chunk of the first is still in flight"
    assert chunks(bench.drain()) == [2, 3]
    assert bench.lanes.staging() == (1, 1)
    bench.lanes.failed(hung[1], LOST)
    assert (1, "peer_lost") in bench.told()
    assert bench.lanes.staging() == (0, 0)
    bench.lanes.check()


def test_an_id_is_used_once():
    lanes = Lanes(lambda _: None, lambda: 0.0)
    lanes.open("p")
    lanes.admit(a_read(1), [ONE_EACH])
    with pytest.raises(AssertionError, match="used twice"):
        lanes.admit(a_read(1), [ONE_EACH])
