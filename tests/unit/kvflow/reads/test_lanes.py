"""The lanes under random orders of commands and completions, and the few orders that matter by name."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.planning.bind import Bound
from kvflow.reads.backend import Cause
from kvflow.reads.contract import SPAN_MAX
from kvflow.reads.lanes import (
    AGING_S,
    CHECKS_IN_FLIGHT_MAX,
    CHUNKS_IN_FLIGHT_MAX,
    OVERTAKEN_MAX,
    Check,
    Lanes,
)

from .lane_reads import EPOCH, ONE_EACH, STAGED, Bench, a_read, chunks, ids, prepared

LOST = Cause("peer_lost", "gone")
PROGRAMS = {
    "a chunk of each unit": ONE_EACH,
    "chunks of two units, shared by small reads": prepared(2, shared=3),
    "portions of three units": prepared(2, portion=3),
}


class World:
    """Drives lanes and keeps the truth in books of its own."""

    def __init__(self, prepared_list):
        self.bench = Bench("a", "b")
        self.lanes = self.bench.lanes
        self.prepared_list = prepared_list
        self.flying = []
        self.read = {}
        self.posted = Counter()
        self.arrived = Counter()
        self.checked = {}
        self.seen = 0
        self.open = {"a", "b"}

    def look(self):
        """Check each answer that came since the last look."""
        for answer in self.bench.answers[self.seen :]:
            carried = [work for work in self.flying if not isinstance(work, Check)]
            assert not any(answer.read_id in ids(work) for work in carried), "an answer while a chunk is in flight"
            if answer.verdict == "held":
                assert self.arrived[answer.read_id] == self.size(answer.read_id) == answer.nbytes
        self.seen = len(self.bench.answers)

    def size(self, read_id):
        return sum(len(part.pairs.source) for part in self.read[read_id].parts)

    def post(self, peer, count, parts, priority, *held):
        if peer in self.open:
            check_first, slot = held
            how = {"chunks": count, "parts": parts, "priority": priority, "check_first": check_first, "slot": slot}
            number = len(self.read) + 1
            self.read[number] = self.bench.admit(number, self.prepared_list, peer=peer, **how)

    def take(self, check):
        work = self.lanes.take_check() if check else self.lanes.take_chunk()
        if work is None:
            return
        for opened in work.reads:
            number = opened.read.read_id
            if not isinstance(work, Check):
                assert not opened.read.check_first or self.checked[number] == EPOCH, "a chunk of a lease not held"
            elif work.fence:
                assert self.arrived[number] == self.size(number), "a fence before all bytes have arrived"
            else:
                assert opened.read.check_first
                assert number not in self.checked
                assert not self.posted[number], "a first check that is not the first"
        if isinstance(work, Check):
            slots = [opened.read.lease.slot for opened in work.reads]
            assert (min(slots), max(slots)) == (work.first, work.last)
            assert work.last - work.first < SPAN_MAX
        else:
            self.count(self.posted, work)
        self.flying.append(work)
        for peer in ("a", "b"):
            mine = [work for work in self.flying if work.lane.peer == peer]
            checks = sum(isinstance(work, Check) for work in mine)
            assert checks <= CHECKS_IN_FLIGHT_MAX
            assert len(mine) - checks <= CHUNKS_IN_FLIGHT_MAX

    def count(self, book, carried):
        """Add the units of a chunk to the account of their reads."""
        index = carried.chunk.portion.source_index[carried.chunk.first : carried.chunk.stop]
        book.update((index // 64).tolist())

    def land(self, at, fail, observed):
        if not self.flying:
            return
        work = self.flying.pop(at % len(self.flying))
        if fail:
            self.lanes.failed(work, LOST)
        elif isinstance(work, Check):
            if not work.fence:
                self.checked.update(dict.fromkeys(ids(work), observed))
            self.bench.land(work, observed)
        else:
            self.count(self.arrived, work)
            self.bench.land(work)

    def cancel(self, numbers):
        self.lanes.cancel(numbers)

    def abandon(self, peer):
        if peer in self.open:
            self.open.remove(peer)
            self.lanes.abandon(peer, LOST)
        elif self.lanes.drained(peer):
            assert not [work for work in self.flying if work.lane.peer == peer]
            self.lanes.open(peer)
            self.open.add(peer)

    def settle(self):
        for _ in range(100_000):
            self.take(check=True)
            self.take(check=False)
            if not self.flying:
                break
            self.land(0, fail=False, observed=EPOCH)
            self.look()
        else:
            raise AssertionError("it never ends")


peers = st.sampled_from("ab")
steps = st.one_of(
    st.tuples(
        st.just("post"),
        peers,
        st.integers(1, 5),
        st.integers(1, 2),
        st.integers(-1, 1),
        st.booleans(),
        st.sampled_from([0, 3, 511, 512, 9000]),
    ),
    st.tuples(st.just("take"), st.booleans()),
    st.tuples(
        st.just("land"), st.integers(0, 99), st.sampled_from([False] * 5 + [True]), st.sampled_from([6, 7, 7, 7, 8])
    ),
    st.tuples(st.just("cancel"), st.lists(st.integers(0, 30), max_size=4)),
    st.tuples(st.just("abandon"), peers),
)


@pytest.mark.parametrize("kind", PROGRAMS)
@given(script=st.lists(steps, max_size=80))
def test_whatever_the_order_each_read_has_one_answer_and_fences_come_last(kind, script):
    world = World(PROGRAMS[kind])
    for name, *given_now in script:
        getattr(world, name)(*given_now)
        world.look()
    world.settle()
    assert sorted(answer.read_id for answer in world.bench.answers) == list(world.read)
    assert not world.lanes.reads
    assert all(peer in world.open or world.lanes.drained(peer) for peer in "ab")
    assert all(read.outstanding.since == math.inf for read in world.read.values())


def test_a_read_is_checked_first_then_posted_then_fenced():
    bench = Bench()
    read = bench.admit(1, chunks=2, check_first=True)
    assert bench.lanes.take_chunk() is None
    first = bench.lanes.take_check()
    assert (first.fence, first.first, first.last, ids(first)) == (False, 0, 0, [1])
    assert read.phase == "queue"
    bench.land(first)
    works = bench.drain()
    assert [isinstance(work, Check) for work in works] == [False, False, True]
    assert works[-1].fence
    assert read.phase == "fence"
    assert bench.told() == [(1, "held")]


@pytest.mark.parametrize(("observed", "verdict"), [(6, "early"), (8, "stale")])
def test_no_chunk_is_posted_unless_the_first_check_finds_the_lease_held(observed, verdict):
    bench = Bench()
    bench.admit(1, chunks=2, check_first=True)
    bench.land(bench.take(), observed)
    (answer,) = bench.answers
    assert (answer.verdict, answer.observed, answer.phase, answer.chunks) == (verdict, observed, "queue", 0)
    assert bench.take() is None


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


def test_a_read_that_the_exporter_refuses_fails_alone():
    bench, prepared_list = Bench(), prepared(4, shared=4)
    for read_id in (1, 2):
        bench.admit(read_id, prepared_list)
    bench.lanes.arrived(bench.take(), refused={2: Cause("bounds", "not leased")})
    assert bench.told() == [(2, "bounds")]
    bench.drain()
    assert bench.told() == [(1, "held")]


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


def test_a_check_serves_one_epoch_of_a_slot():
    bench = Bench()
    for read_id, epoch in enumerate((8, 7, 8, 6)):
        bench.admit(read_id, slot=3, epoch=epoch, check_first=True)
    checks = [bench.lanes.take_check() for _ in range(3)]
    assert [ids(check) for check in checks] == [[3], [1], [0, 2]]


def test_the_urgent_goes_first_and_equal_peers_take_turns():
    bench = Bench("a", "b")
    for read_id, peer, count, priority in ((1, "a", 3, 0), (2, "b", 3, 0), (3, "a", 1, -1), (4, "b", 1, 1)):
        bench.admit(read_id, peer=peer, chunks=count, priority=priority)
    assert chunks(bench.drain()) == [3, 1, 2, 1, 2, 1, 2, 4]


def test_a_peer_has_as_many_chunks_of_a_turn_as_it_weighs():
    bench = Bench("a", "b", weights={"b": 3})
    for read_id, peer in ((1, "a"), (2, "b")):
        bench.admit(read_id, peer=peer, chunks=20)
    assert chunks(bench.drain())[:12] == [1, 2, 2, 2, 1, 2, 2, 2, 1, 2, 2, 2]


def test_what_waits_becomes_urgent_and_what_is_served_does_not():
    bench = Bench("a", "b")
    bench.admit(1, peer="a", chunks=100, priority=-1)
    bench.admit(2, peer="b", chunks=100, priority=0)
    served = []
    for _ in range(20):
        bench.now += AGING_S / 4
        work = bench.lanes.take_chunk()
        served += ids(work)
        bench.land(work)
    # What is served every quarter of a second makes room for what has waited one step of priority longer.
    assert 3 <= served.count(2) <= 5, served


def test_urgent_reads_go_first_but_the_oldest_read_gets_on():
    bench = Bench("p", "q")
    bench.admit(1, peer="p", chunks=2, priority=5)
    bench.admit(2, peer="p", chunks=100)
    bench.admit(3, peer="q", chunks=100)
    read_ids = []
    for _ in range(2 * OVERTAKEN_MAX + 2):
        work = bench.lanes.take_chunk()
        read_ids += ids(work)
        bench.land(work)
    assert [place for place, read_id in enumerate(read_ids) if read_id == 1] == [OVERTAKEN_MAX, 2 * OVERTAKEN_MAX + 1]
    assert abs(read_ids.count(2) - read_ids.count(3)) <= 1


def test_a_hung_peer_stops_at_its_chunks_in_flight_and_stops_nobody_else():
    bench = Bench("hung", "well")
    bench.admit(1, peer="hung", chunks=100)
    for _ in range(CHUNKS_IN_FLIGHT_MAX):
        assert bench.take() is not None
    assert bench.take() is None
    bench.admit(2, peer="well", chunks=5, priority=9)
    assert chunks(bench.drain()) == [2] * 5


def test_a_read_cancelled_in_flight_ends_when_its_last_chunk_does():
    bench = Bench()
    bench.admit(1, chunks=3)
    first, second = bench.take(), bench.take()
    bench.lanes.cancel([1])
    assert bench.take() is None
    bench.land(first)
    assert bench.told() == []
    bench.land(second)
    (answer,) = bench.answers
    assert (answer.code, answer.nbytes, answer.chunks, answer.phase) == ("cancelled", 2, 2, "wire")


def test_canceling_a_read_of_which_nothing_is_left_to_drop_changes_nothing():
    bench = Bench()
    bench.admit(1)
    chunk = bench.take()
    bench.lanes.cancel([1])
    bench.land(chunk)
    fence = bench.take()
    bench.lanes.cancel([1])
    bench.land(fence)
    assert bench.told() == [(1, "held")]


def test_a_read_that_is_cancelled_while_it_is_checked_ends_at_once():
    bench = Bench()
    bench.admit(1, check_first=True)
    check = bench.take()
    bench.lanes.cancel([1])
    assert bench.told() == [(1, "cancelled")]
    bench.land(check)
    assert bench.take() is None
    assert bench.told() == []


def test_an_abandoned_peer_is_drained_only_when_nothing_is_in_flight():
    bench = Bench()
    for read_id in (1, 2, 3, 4):
        bench.admit(read_id, check_first=read_id == 4)
    bench.lanes.take_check()
    chunk, other = bench.lanes.take_chunk(), bench.lanes.take_chunk()
    bench.land(chunk)
    fence = bench.lanes.take_check()
    bench.lanes.abandon("p", LOST)
    assert bench.told() == [(1, "peer_lost"), (3, "peer_lost"), (4, "peer_lost")], "of which no chunk is in flight"
    bench.land(fence)
    assert not bench.lanes.drained("p")
    bench.land(other)
    assert bench.told() == [(2, "peer_lost")]
    assert not bench.lanes.drained("p"), "its first check is in flight"


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


def test_what_is_posted_meanwhile_gives_a_hung_peer_no_more_time():
    bench = Bench()
    reads = [bench.admit(read_id) for read_id in (1, 2)]
    assert bench.take() is not None
    bench.now = 129.0
    assert bench.take() is not None
    assert [read.outstanding.since for read in reads] == [100.0, 100.0]
    for at in range(CHECKS_IN_FLIGHT_MAX + 1):
        bench.admit(10 + at, slot=2 * SPAN_MAX * at, check_first=True)
    assert len([*iter(bench.lanes.take_check, None)]) == CHECKS_IN_FLIGHT_MAX
    assert reads[0].outstanding.since == 100.0


def test_a_check_that_is_in_flight_is_owed_when_a_chunk_has_landed():
    bench = Bench()
    read = bench.admit(1)
    chunk = bench.take()
    bench.admit(2, slot=1, check_first=True)
    check = bench.take()
    assert isinstance(check, Check)
    bench.now = 105.0
    bench.land(chunk)
    assert read.outstanding.since == 105.0
    bench.land(check)
    assert read.outstanding.since == math.inf


def test_the_times_of_its_chunks_are_added_up():
    bench = Bench()
    bench.admit(1, chunks=4)
    for post_s in (1.0, 2.0, 0.0, 1.0):
        work = bench.take()
        work.post_s, work.scatter_s = post_s, post_s / 4
        bench.land(work)
    bench.drain()
    assert (bench.answers[0].post_s, bench.answers[0].scatter_s) == (4.0, 1.0)


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


def test_two_peers_that_hang_hold_every_buffer_until_they_are_given_up():
    bench = Bench("p", "q", "r", buffers=4)
    for number, peer in enumerate("pq"):
        bench.admit(number, STAGED, peer=peer, chunks=9)
    hung = [bench.take() for _ in range(4)]
    assert Counter(work.lane.peer for work in hung) == {"p": 2, "q": 2}
    bench.admit(9, STAGED, peer="r", chunks=9)
    assert bench.take() is None
    for peer in "pq":
        bench.lanes.abandon(peer, LOST)
    assert bench.lanes.staging() == (4, 4)
    bench.lanes.check()
    for work in hung:
        bench.lanes.failed(work, LOST)
        bench.lanes.check()
    assert chunks(bench.drain()) == [9] * 9
    assert bench.lanes.staging() == (0, 0)


def test_a_staged_read_that_is_all_posted_can_still_be_cancelled():
    """Its bytes have not been scattered: there is something left to drop."""
    bench = Bench(buffers=1)
    bench.admit(1, STAGED)
    chunk = bench.take()
    assert chunk.wanted
    bench.lanes.cancel([1])
    assert not chunk.wanted
    assert bench.lanes.staging() == (1, 1)
    bench.land(chunk)
    assert bench.told() == [(1, "cancelled")]
    assert bench.lanes.staging() == (0, 0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["post", "take", "land", "fail", "cancel", "abandon"]), st.integers(0, 7)),
        max_size=60,
    ),
    st.integers(1, 3),
)
def test_no_order_of_events_loses_a_buffer(script, buffers):
    bench, flying, open_peers, count = Bench("p", "q", buffers=buffers), [], {"p", "q"}, 0
    for what, number in script:
        peer = "pq"[number % 2]
        if what == "post" and peer in open_peers:
            count += 1
            bench.admit(count, STAGED if number < 6 else ONE_EACH, peer=peer, chunks=1 + number % 3)
        elif what == "take" and (work := bench.take()) is not None:
            flying.append(work)
        elif what in ("land", "fail") and flying:
            work = flying.pop(number % len(flying))
            bench.land(work) if what == "land" else bench.lanes.failed(work, LOST)
        elif what == "cancel":
            bench.lanes.cancel([number])
        elif what == "abandon" and peer in open_peers and number == 7:
            open_peers.remove(peer)
            bench.lanes.abandon(peer, LOST)
        bench.lanes.check()
        in_use = [work.chunk.buffer for work in flying if not isinstance(work, Check) and work.chunk.buffer >= 0]
        assert len(set(in_use)) == len(in_use) == bench.lanes.staging()[0]
    for work in flying:
        bench.land(work)
    bench.drain()
    bench.lanes.check()
    assert bench.lanes.staging() == (0, 0)


def test_an_id_is_used_once():
    lanes = Lanes(lambda _: None, lambda: 0.0)
    lanes.open("p")
    lanes.admit(a_read(1), [ONE_EACH])
    with pytest.raises(AssertionError, match="used twice"):
        lanes.admit(a_read(1), [ONE_EACH])
