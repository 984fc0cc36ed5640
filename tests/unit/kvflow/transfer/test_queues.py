"""Who is served next, how much at once, and what holds it back."""

import msgspec
import numpy as np

from kvflow.transfer.pairs import UnitPairs
from kvflow.transfer.queues import Limits, Piece, ReadyQueues
from kvflow.transfer.requests import Demand

LIMITS = Limits(
    batch_bytes=100, batch_descriptors=10, peer_bytes=200, peer_descriptors=20, total_bytes=300, aging_s=1.0
)


def piece(leg_id, count, *, program_id=1, nbytes=10, descriptors=1, queued_at=0.0):
    pairs = UnitPairs(np.arange(count), np.arange(count))
    return Piece(leg_id, Demand(program_id, pairs, nbytes, descriptors, count * descriptors), queued_at)


def cuts(queues, now=0.0):
    """Cut until nothing more may be cut; return each batch's peer and slices."""
    found = []
    while (batch := queues.cut(now)) is not None:
        found.append((batch.peer, [(leg_id, first, last) for leg_id, _, first, last in batch.slices]))
    return found


def test_a_batch_joins_legs_up_to_its_budget():
    queues = ReadyQueues(LIMITS)
    queues.add("p", 0, piece(1, 4))
    queues.add("p", 0, piece(2, 9))
    assert cuts(queues) == [("p", [(1, 0, 4), (2, 0, 6)]), ("p", [(2, 6, 9)])]
    assert queues.in_flight() == (130, 13)


def test_a_batch_that_is_worth_its_cost_is_not_shared():
    queues = ReadyQueues(msgspec.structs.replace(LIMITS, shared_bytes=50))
    queues.add("p", 0, piece(1, 2))
    queues.add("p", 0, piece(2, 7))
    queues.add("p", 0, piece(3, 1))
    assert [slices for _, slices in cuts(queues)] == [[(1, 0, 2), (2, 0, 7)], [(3, 0, 1)]]


def test_descriptors_are_a_budget_as_well():
    queues = ReadyQueues(LIMITS)
    queues.add("p", 0, piece(1, 4, nbytes=1, descriptors=3))
    assert cuts(queues) == [("p", [(1, 0, 3)]), ("p", [(1, 3, 4)])]


def test_a_pair_larger_than_a_batch_travels_alone():
    queues = ReadyQueues(LIMITS)
    queues.add("p", 0, piece(1, 1))
    queues.add("p", 0, piece(2, 1, nbytes=150))
    queues.add("p", 0, piece(3, 1))
    assert [slices for _, slices in cuts(queues)] == [[(1, 0, 1)], [(2, 0, 1)], [(3, 0, 1)]]


def test_programs_and_priorities_do_not_share_a_batch():
    queues = ReadyQueues(LIMITS)
    queues.add("p", 0, piece(1, 1, program_id=1))
    queues.add("p", 0, piece(2, 1, program_id=2))
    queues.add("p", 1, piece(3, 1, program_id=1))
    assert len(cuts(queues)) == 3


def test_the_window_of_a_peer_opens_as_batches_land():
    queues = ReadyQueues(LIMITS)
    queues.add("p", 0, piece(1, 50))
    first, second = queues.cut(0.0), queues.cut(0.0)
    assert queues.cut(0.0) is None
    queues.landed(first)
    third = queues.cut(0.0)
    assert third.slices[0][2:] == (20, 30)
    for batch in (second, third):
        queues.landed(batch)
    assert queues.in_flight() == (0, 0)


def test_the_window_of_all_peers_holds_back_a_peer_with_room():
    queues = ReadyQueues(LIMITS)
    for peer in ("p", "q", "r"):
        queues.add(peer, 0, piece(1, 50))
    assert [peer for peer, _ in cuts(queues)] == ["p", "q", "r"]
    assert queues.in_flight() == (300, 30)


def test_lower_priorities_go_first_until_others_have_waited():
    queues = ReadyQueues(LIMITS)
    queues.add("p", 2, piece(1, 1, queued_at=0.0))
    queues.add("p", 0, piece(2, 1, queued_at=1.9))
    assert [slices[0][0] for _, slices in cuts(queues, 1.9)] == [2, 1]
    queues.add("p", 2, piece(1, 1, queued_at=0.0))
    queues.add("p", 0, piece(2, 1, queued_at=3.0))
    assert [slices[0][0] for _, slices in cuts(queues, 3.0)] == [1, 2]


def test_equals_take_turns():
    queues = ReadyQueues(LIMITS)
    queues.add("p", 0, piece(1, 30))
    queues.add("q", 0, piece(2, 30))
    assert [peer for peer, _ in cuts(queues)] == ["p", "q", "p"]


def test_a_stream_of_new_queues_does_not_go_before_one_that_waits():
    """Each small pull is a queue of its own, which is gone when it is served and new when the next one comes."""
    queues = ReadyQueues(Limits(batch_bytes=100, batch_descriptors=10, peer_bytes=100, total_bytes=100))
    queues.add("p", 0, piece(1, 50))
    served = []
    for leg_id in range(2, 8):
        queues.add("q", 0, piece(leg_id, 1, nbytes=100))
        batch = queues.cut(0.0)
        served.append(batch.peer)
        queues.landed(batch)
    assert served == ["p", "q"] * 3


def test_waiting_ages_and_being_served_does_not():
    """A long pull that is served all the time is as urgent as on its first day, however long it takes."""
    queues = ReadyQueues(LIMITS)
    queues.add("p", 0, piece(1, 1000))
    now = 0.0
    for _ in range(80):
        now += 1.0
        batch = queues.cut(now)
        queues.landed(batch)
    queues.add("p", -1, piece(2, 1, queued_at=now))
    assert queues.cut(now).slices[0][0] == 2


def test_what_is_more_urgent_finds_a_quarter_of_a_full_window():
    queues = ReadyQueues(LIMITS)
    queues.add("p", 0, piece(1, 50))
    assert len(cuts(queues)) == 2
    queues.add("p", 0, piece(2, 1))
    assert cuts(queues) == []
    for leg_id in range(3, 12):
        queues.add("p", -1, piece(leg_id, 1, program_id=leg_id))
    assert [slices[0][0] for _, slices in cuts(queues)] == [3, 4, 5, 6, 7]  # 10 bytes each, until 50 of 200 are taken


def test_a_full_window_of_all_peers_lets_an_idle_peer_overtake_with_what_is_more_urgent():
    queues = ReadyQueues(LIMITS)
    for peer in ("p", "q", "r"):
        queues.add(peer, 0, piece(1, 50))
    assert len(cuts(queues)) == 3
    queues.add("s", 0, piece(2, 1))
    assert cuts(queues) == []
    queues.add("s", -2, piece(3, 1))
    assert cuts(queues) == [("s", [(3, 0, 1)])]


def test_no_number_of_priorities_fills_more_than_twice_the_window():
    queues = ReadyQueues(LIMITS)
    for priority in range(0, -1000, -1):
        queues.add("p", priority, piece(1 - priority, 10))
        cuts(queues)
    assert queues.in_flight()[0] <= 2 * LIMITS.peer_bytes + LIMITS.batch_bytes


def test_a_leg_can_be_removed_from_all_its_queues():
    queues = ReadyQueues(LIMITS)
    queues.add("p", 0, piece(1, 5))
    queues.add("p", 0, piece(2, 5))
    queues.add("q", 1, piece(1, 5))
    queues.remove_leg(1)
    assert cuts(queues) == [("p", [(2, 0, 5)])]
