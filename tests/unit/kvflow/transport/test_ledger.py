"""The ledger under random orders of commands and completions, and the few orders that matter by name."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.transfer.requests import NOT_HELD
from kvflow.transport.base import Fence, FenceFailed, FenceJudged, Read, ReadCompleted, ReadFailed
from kvflow.transport.ledger import (
    CHUNKS_IN_FLIGHT_MAX,
    ENDED_MAX,
    FENCES_IN_FLIGHT_MAX,
    OVERTAKEN_MAX,
    Chunk,
    DueFence,
    Ledger,
    Reason,
)

LOST = Reason("peer_lost", "gone")


def a_read(read_id, *, peer="p", chunks=1, priority=0, fences=(), looks=()):
    index = np.arange(chunks, dtype=np.int32)
    cuts = np.arange(chunks + 1)
    return Read(read_id, peer, 1, index, index, cuts, chunks, priority=priority, fences=fences, looks=looks)


def an_open_ledger(*peers):
    ledger = Ledger()
    for peer in peers or ("p",):
        ledger.open(peer)
    return ledger


def names(works):
    return [(work.read.read_id, work.first) if isinstance(work, Chunk) else work.fence.fence_id for work in works]


def drain(ledger):
    """Let everything arrive as soon as it is posted; return the pieces of work in order, and all events."""
    works, events = [], []
    while (work := ledger.take()) is not None:
        works.append(work)
        events += ledger.arrived(work, 0.0) if isinstance(work, Chunk) else ledger.judged(work, 7, 0.0)
    return works, events


class World:
    """Drives a ledger and keeps the truth in sets of its own."""

    def __init__(self):
        self.ledger = an_open_ledger("a", "b")
        self.flying = []
        self.events = []
        self.posted = {}
        self.next_id = 0
        self.open = {"a", "b"}

    def take_in(self, events):
        for event in events:
            match event:
                case ReadCompleted() | ReadFailed():
                    flying = [work for work in self.flying if isinstance(work, Chunk)]
                    assert event.read_id not in {work.read.read_id for work in flying}, "terminal while it flies"
            self.events.append(event)

    def looked(self, observed=(6, 7)):
        judged = [event for event in self.events if isinstance(event, FenceJudged) and event.fence_id < 0]
        return {event.fence_id for event in judged if event.observed in observed}

    def completed(self):
        return {event.read_id for event in self.events if isinstance(event, ReadCompleted)}

    def post(self, peer, chunks, priority, after, look):
        self.next_id += 1
        earlier = [read_id for read_id, read in self.posted.items() if read.peer == peer]
        named = {earlier[at % len(earlier)] for at in after if earlier}
        fences = tuple(Fence(self.next_id * 10 + k, 0, 0, tuple(named)) for k in range(len(after) % 3))
        # Three reads in a row have the same look, where they have one and read the same peer.
        looks = (Fence(-10 * (self.next_id // 3) - "ab".index(peer) - 1, 0, 7, ()),) if look else ()
        read = a_read(self.next_id, peer=peer, chunks=chunks, priority=priority, fences=fences, looks=looks)
        self.posted[read.read_id] = read
        if peer in self.open:
            self.take_in(self.ledger.admit(read))
        else:
            self.take_in(self.ledger.refuse(read, LOST))

    def take(self):
        work = self.ledger.take()
        if work is None:
            return
        if isinstance(work, DueFence) and work.fence.fence_id < 0:
            assert work.fence.fence_id not in self.looked(), "a look twice"
            assert work.after == frozenset(), "a look judges no read"
        elif isinstance(work, DueFence):
            waited = next(read for read in self.posted.values() if work.fence in read.fences)
            assert work.after == {*work.fence.after, waited.read_id}
            assert work.after <= self.completed(), "a fence before its reads"
        else:
            found_held = self.looked(observed=(7,))
            assert {look.fence_id for look in work.read.looks} <= found_held, "a chunk of a lease not found held"
            self.ledger.posted(work, 1.0, 2.0)
        self.flying.append(work)
        for peer in ("a", "b"):
            mine = [work for work in self.flying if work.peer == peer]
            chunks = sum(isinstance(work, Chunk) for work in mine)
            assert chunks <= CHUNKS_IN_FLIGHT_MAX
            assert len(mine) - chunks <= FENCES_IN_FLIGHT_MAX

    def land(self, at, fail, observed=7):
        if not self.flying:
            return
        work = self.flying.pop(at % len(self.flying))
        if fail:
            self.take_in(self.ledger.failed(work, LOST))
        elif isinstance(work, Chunk):
            self.take_in(self.ledger.arrived(work, 3.0))
        else:
            self.take_in(self.ledger.judged(work, observed, 0.5))

    def abandon(self, peer):
        if peer in self.open:
            self.open.remove(peer)
            self.take_in(self.ledger.abandon(peer, LOST))
        elif self.ledger.drained(peer):
            assert not [work for work in self.flying if work.peer == peer]
            self.ledger.open(peer)
            self.open.add(peer)

    def settle(self):
        for _ in range(100_000):
            self.take()
            if not self.flying:
                break
            self.land(0, fail=False)
        else:
            raise AssertionError("it never ends")


steps = st.one_of(
    st.tuples(
        st.just("post"),
        st.sampled_from("ab"),
        st.integers(1, 5),
        st.integers(-1, 1),
        st.lists(st.integers(0, 99)),
        st.booleans(),
    ),
    st.tuples(st.just("take")),
    st.tuples(
        st.just("land"), st.integers(0, 99), st.sampled_from([False, False, False, True]), st.sampled_from([6, 7, 7])
    ),
    st.tuples(st.just("cancel"), st.lists(st.integers(0, 30), max_size=4)),
    st.tuples(st.just("abandon"), st.sampled_from("ab")),
)


@given(st.lists(steps, max_size=80))
def test_whatever_the_order_each_read_and_fence_ends_once_and_fences_come_last(script):
    world = World()
    for name, *args in script:
        if name == "cancel":
            world.take_in(world.ledger.cancel(args[0]))
        else:
            getattr(world, name)(*args)
    world.settle()
    reads = [event.read_id for event in world.events if isinstance(event, ReadCompleted | ReadFailed)]
    fences = [event.fence_id for event in world.events if isinstance(event, FenceJudged | FenceFailed)]
    assert Counter(reads) == Counter(list(world.posted))
    looks = {look.fence_id for read in world.posted.values() for look in read.looks}
    assert Counter(fences) == Counter(
        [fence.fence_id for read in world.posted.values() for fence in read.fences] + [*looks]
    )
    assert not world.ledger.reads
    assert all(peer in world.open or world.ledger.drained(peer) for peer in "ab")


def test_a_look_is_judged_before_the_first_chunk_of_all_reads_that_have_it():
    ledger = an_open_ledger()
    look = Fence(9, 3, 7, ())
    for read_id in (1, 2):
        ledger.admit(a_read(read_id, chunks=2, looks=(look,)))
    looking = ledger.take()
    assert looking.fence == look
    assert ledger.take() is None
    assert ledger.judged(looking, 7, 0.0) == [FenceJudged(9, 7, 0.0)]
    ledger.admit(a_read(3, looks=(look,)))
    assert names(drain(ledger)[0]) == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]


@pytest.mark.parametrize("observed", [6, 8], ids=["not admitted yet", "ended"])
def test_no_read_is_posted_whose_look_does_not_find_the_lease_held(observed):
    ledger = an_open_ledger()
    look = Fence(9, 3, 7, ())
    ledger.admit(a_read(1, chunks=2, looks=(look,), fences=(Fence(5, 3, 7, ()),)))
    judged, read, fence = ledger.judged(ledger.take(), observed, 0.0)
    assert judged == FenceJudged(9, observed, 0.0)
    assert (read.read_id, read.code, fence.fence_id, fence.code) == (1, NOT_HELD, 5, NOT_HELD)
    (late,) = ledger.admit(a_read(2, looks=(look,)))
    assert (late.read_id, late.code) == (2, NOT_HELD)
    assert ledger.take() is None


def test_a_look_alone_is_judged_and_drops_nothing():
    ledger = an_open_ledger()
    ledger.look("p", Fence(9, 3, 7, ()))
    assert ledger.judged(ledger.take(), 6, 0.5) == [FenceJudged(9, 6, 0.5)]
    ledger.look("p", Fence(10, 3, 7, ()))
    assert ledger.abandon("p", LOST) == [FenceFailed(10, *words_of(LOST))]


def test_a_read_fails_with_its_look_also_when_it_comes_later():
    ledger = an_open_ledger()
    look = Fence(9, 99, 7, ())
    ledger.admit(a_read(1, looks=(look,), fences=(Fence(5, 99, 7, ()),)))
    bounds = Reason("bounds", "no such slot")
    ended = ledger.failed(ledger.take(), bounds)
    assert ended == [
        FenceFailed(9, *words_of(bounds)),
        ReadFailed(1, *words_of(bounds)),
        FenceFailed(5, *words_of(bounds)),
    ]
    assert ledger.admit(a_read(2, looks=(look,))) == [ReadFailed(2, *words_of(bounds))]
    assert ledger.take() is None


def words_of(reason):
    return reason.code, reason.detail


def test_the_urgent_goes_first_and_equal_peers_take_turns():
    ledger = an_open_ledger("a", "b")
    for read_id, peer, chunks, priority in ((1, "a", 3, 0), (2, "b", 3, 0), (3, "a", 1, -1), (4, "b", 1, 1)):
        ledger.admit(a_read(read_id, peer=peer, chunks=chunks, priority=priority))
    works, _ = drain(ledger)
    assert names(works) == [(3, 0), (2, 0), (1, 0), (2, 1), (1, 1), (2, 2), (1, 2), (4, 0)]


def test_a_hung_peer_stops_at_its_window_and_stops_nobody_else():
    ledger = an_open_ledger("hung", "well")
    ledger.admit(a_read(1, peer="hung", chunks=100))
    for _ in range(CHUNKS_IN_FLIGHT_MAX):
        assert ledger.take() is not None
    assert ledger.take() is None
    ledger.admit(a_read(2, peer="well", chunks=5, priority=9))
    assert len(drain(ledger)[0]) == 5


def test_a_due_fence_is_posted_before_any_chunk():
    ledger = an_open_ledger()
    ledger.admit(a_read(1, fences=(Fence(5, 0, 0, (1,)),)))
    ledger.admit(a_read(2, chunks=2, priority=-5))
    works, _ = drain(ledger)
    assert names(works) == [(2, 0), (2, 1), (1, 0), 5]
    ledger.admit(a_read(3, fences=(Fence(6, 0, 0, (3,)),)))
    ledger.admit(a_read(4, chunks=3))
    works, _ = drain(ledger)
    assert names(works) == [(3, 0), 6, (4, 0), (4, 1), (4, 2)]


def test_a_read_cancelled_in_flight_ends_when_its_last_chunk_does():
    ledger = an_open_ledger()
    ledger.admit(a_read(1, chunks=3))
    first, second = ledger.take(), ledger.take()
    assert ledger.cancel([1]) == []
    assert ledger.take() is None
    assert ledger.arrived(first, 0.0) == []
    (event,) = ledger.arrived(second, 0.0)
    assert (type(event), event.code) == (ReadFailed, "cancelled")


def test_cancelling_a_read_that_is_all_posted_changes_nothing():
    ledger = an_open_ledger()
    ledger.admit(a_read(1))
    chunk = ledger.take()
    assert ledger.cancel([1]) == []
    assert isinstance(ledger.arrived(chunk, 0.0)[0], ReadCompleted)


def test_a_fence_on_a_read_that_failed_long_ago_tells_its_reason():
    ledger = an_open_ledger()
    ledger.refuse(a_read(1), Reason("bounds", "far out"))
    assert ledger.admit(a_read(2, fences=(Fence(5, 0, 0, (1,)),))) == [FenceFailed(5, "bounds", "far out")]


def test_what_was_forgotten_counts_as_failed_never_as_complete():
    ledger = an_open_ledger()
    ledger.admit(a_read(0))
    drain(ledger)
    for read_id in range(1, ENDED_MAX + 1):
        ledger.refuse(a_read(read_id), LOST)
    (event,) = ledger.admit(a_read(ENDED_MAX + 1, fences=(Fence(5, 0, 0, (0,)),)))
    assert (type(event), event.code) == (FenceFailed, "transport_error")


def test_an_abandoned_peer_is_drained_only_when_nothing_flies():
    ledger = an_open_ledger()
    ledger.admit(a_read(1, fences=(Fence(5, 0, 0, (1,)),)))
    chunk = ledger.take()
    assert ledger.abandon("p", LOST) == [FenceFailed(5, "peer_lost", "gone")]
    assert not ledger.drained("p")
    assert isinstance(ledger.arrived(chunk, 0.0)[0], ReadCompleted)
    assert ledger.drained("p")


def test_posting_time_and_wire_time_do_not_overlap():
    ledger = an_open_ledger()
    ledger.admit(a_read(1, chunks=2))
    first, second = ledger.take(), ledger.take()
    ledger.posted(first, 10.0, 11.0)
    ledger.posted(second, 11.0, 13.0)
    ledger.arrived(first, 14.0)
    assert ledger.arrived(second, 18.0) == [ReadCompleted(1, posted_s=3.0, wire_s=5.0)]


def staged_ledger(*peers, buffers):
    ledger = Ledger(buffers)
    for peer in peers:
        ledger.open(peer)
    return ledger


def test_a_peer_that_holds_every_buffer_delays_staged_reads_and_no_others():
    ledger = staged_ledger("p", "q", "r", buffers=2)
    ledger.admit(a_read(1, peer="p", chunks=3), staged=True)
    hung = [ledger.take(), ledger.take()]
    assert sorted(chunk.buffer for chunk in hung) == [0, 1]
    ledger.admit(a_read(2, peer="q"), staged=True)
    ledger.admit(a_read(3, peer="q"))  # behind it
    ledger.admit(a_read(4, peer="r"))
    works, _ = drain(ledger)
    assert names(works) == [(4, 0)]
    assert ledger.staging() == (2, 0)
    ledger.check()
    assert [event.code for event in ledger.failed(hung[0], LOST)] == []  # its second chunk is still in flight
    works, _ = drain(ledger)
    assert names(works) == [(2, 0), (3, 0)]
    assert ledger.staging() == (1, 1)
    assert [event.code for event in ledger.failed(hung[1], LOST)] == ["peer_lost"]
    assert ledger.staging() == (0, 0)
    ledger.check()


def test_two_peers_that_hang_hold_every_buffer_until_they_are_given_up():
    ledger = staged_ledger("p", "q", "r", buffers=4)
    for number, peer in enumerate("pq"):
        ledger.admit(a_read(number, peer=peer, chunks=9), staged=True)
    hung = [ledger.take() for _ in range(4)]
    assert Counter(chunk.peer for chunk in hung) == {"p": 2, "q": 2}
    ledger.admit(a_read(9, peer="r", chunks=9), staged=True)
    assert ledger.take() is None
    for peer in "pq":
        ledger.abandon(peer, LOST)
    assert ledger.staging() == (4, 4)
    ledger.check()
    for chunk in hung:
        ledger.failed(chunk, LOST)
        ledger.check()
    works, events = drain(ledger)
    assert names(works) == [(9, first) for first in range(9)]
    assert all(isinstance(event, ReadCompleted) for event in events)
    assert ledger.staging() == (0, 0)


def test_a_staged_read_that_is_all_posted_can_still_be_cancelled():
    """Its bytes have not been scattered: there is something left to drop."""
    ledger = staged_ledger("p", buffers=1)
    ledger.admit(a_read(1, fences=(Fence(5, 0, 0, (1,)),)), staged=True)
    chunk = ledger.take()
    assert ledger.wanted(chunk)
    assert ledger.cancel([1]) == []
    assert not ledger.wanted(chunk)
    assert ledger.staging() == (1, 1)
    read, fence = ledger.arrived(chunk, 0.0)
    assert (read.code, fence.code) == ("cancelled", "cancelled")
    assert ledger.staging() == (0, 0)


def test_scattering_is_counted_by_itself():
    ledger = staged_ledger("p", buffers=1)
    ledger.admit(a_read(1), staged=True)
    chunk = ledger.take()
    ledger.posted(chunk, 10.0, 11.0)
    ledger.scattered(chunk, 2.0)
    assert ledger.arrived(chunk, 18.0) == [ReadCompleted(1, posted_s=1.0, wire_s=5.0, scattered_s=2.0)]


@given(
    st.lists(
        st.tuples(st.sampled_from(["post", "take", "land", "fail", "cancel", "abandon"]), st.integers(0, 7)),
        max_size=60,
    ),
    st.integers(1, 3),
)
def test_no_order_of_events_loses_a_buffer(steps, buffers):
    ledger, flying, open_peers, count = staged_ledger("p", "q", buffers=buffers), [], {"p", "q"}, 0
    for what, number in steps:
        peer = "pq"[number % 2]
        if what == "post" and peer in open_peers:
            count += 1
            ledger.admit(a_read(count, peer=peer, chunks=1 + number % 3), staged=number < 6)
        elif what == "take" and (work := ledger.take()) is not None:
            flying.append(work)
        elif what in ("land", "fail") and flying:
            work = flying.pop(number % len(flying))
            ledger.arrived(work, 0.0) if what == "land" else ledger.failed(work, LOST)
        elif what == "cancel":
            ledger.cancel([number])
        elif what == "abandon" and peer in open_peers and number == 7:
            open_peers.remove(peer)
            ledger.abandon(peer, LOST)
        ledger.check()
        in_use = [work.buffer for work in flying if work.buffer >= 0]
        assert len(set(in_use)) == len(in_use) == ledger.staging()[0]
    for work in flying:
        ledger.arrived(work, 0.0)
    drain(ledger)
    ledger.check()
    assert ledger.staging() == (0, 0)


def test_urgent_reads_go_first_but_the_oldest_read_gets_on():
    ledger = an_open_ledger("p", "q")
    ledger.admit(a_read(1, peer="p", chunks=2, priority=5))
    ledger.admit(a_read(2, peer="p", chunks=100, priority=0))
    ledger.admit(a_read(3, peer="q", chunks=100, priority=0))
    read_ids = []
    for _ in range(2 * OVERTAKEN_MAX + 2):
        work = ledger.take()
        read_ids.append(work.read.read_id)
        ledger.arrived(work, 0.0)
    assert [place for place, read_id in enumerate(read_ids) if read_id == 1] == [OVERTAKEN_MAX, 2 * OVERTAKEN_MAX + 1]
    assert abs(read_ids.count(2) - read_ids.count(3)) <= 1


def test_the_oldest_read_is_not_posted_before_its_look_is_judged():
    ledger = an_open_ledger()
    ledger.admit(a_read(1, chunks=1, priority=5, looks=(Fence(-1, 0, 0, ()),)))
    ledger.admit(a_read(2, chunks=100, priority=0))
    look = ledger.take()
    assert isinstance(look, DueFence)
    for _ in range(3 * OVERTAKEN_MAX):
        work = ledger.take()
        assert work.read.read_id == 2
        ledger.arrived(work, 0.0)


def test_refusing_a_read_copies_nothing_of_what_is_remembered():
    ledger = an_open_ledger()
    for number in range(1, 5001):
        ledger.admit(a_read(number, looks=(Fence(-number, 0, 0, ()),)))
        drain(ledger)
    refused = a_read(9999, looks=(Fence(-9999, 0, 0, ()),))
    tracemalloc.start()
    ledger.refuse(refused, LOST)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50_000
