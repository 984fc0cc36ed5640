"""What a lease holds."""

import numpy as np
import pytest

from kvflow.reads import serving as module
from kvflow.reads.bounds import OutOfBounds
from kvflow.reads.contract import SERVES_NOTHING, Serving
from kvflow.reads.serving import LeasedBlocks


def held_by(leases, **bounds):
    return LeasedBlocks(Serving((), lambda *lease: leases.get(lease), lambda key: True, b""), **bounds)


def test_a_lease_that_ends_holds_nothing_from_then_on():
    leases = {(1, 7): ((3, -1, 5), ())}
    leased = held_by(leases)
    assert leased.held(1, 7, 0, np.array([5, 4, 3, 0, 6])).tolist() == [True, False, True, False, False]
    assert leased.held(1, 7, 1, np.array([3])).tolist() == [False]
    assert leased.held(1, 7, 2, np.array([3])).tolist() == [False]
    assert leased.held(1, 7, -1, np.array([3])).tolist() == [False]
    assert leased.held(1, 8, 0, np.array([3])) is None
    del leases[1, 7]
    assert leased.held(1, 7, 0, np.array([3])) is None


def test_block_ids_are_sorted_once_and_those_of_few_leases_are_kept(monkeypatch):
    sorts = []
    sort = module._sorted
    monkeypatch.setattr(module, "_sorted", lambda ids: [sorts.append(ids), sort(ids)][1])
    leases = {(slot, 1): ((slot,),) for slot in range(4)}
    leased, one = held_by(leases, leases_max=2), np.array([0])
    for slot in (0, 0, 1, 0, 2, 0):
        leased.held(slot, 1, 0, one)
    assert sorts == [(0,), (1,), (2,)]
    leased.held(1, 1, 0, one)
    assert sorts == [(0,), (1,), (2,), (1,)]
    assert len(leased._kept) == 2
    large = held_by({(slot, 1): (tuple(range(100)),) for slot in range(4)}, ids_max=150)
    assert [large.held(slot, 1, 0, one).tolist() for slot in (0, 1, 2)] == [[True]] * 3
    assert list(large._kept) == [(2, 1)]


def test_leases_that_have_ended_take_no_room_from_others(monkeypatch):
    sorts = []
    sort = module._sorted
    monkeypatch.setattr(module, "_sorted", lambda ids: [sorts.append(len(ids)), sort(ids)][1])
    leases, one = {}, np.array([0])
    leased = held_by(leases, ids_max=150)
    for epoch in range(10):
        leases[0, epoch] = (tuple(range(100)),)
        assert leased.held(0, epoch, 0, one).tolist() == [True]
        del leases[0, epoch]
        assert leased.held(0, epoch, 0, one) is None
    sorts.clear()
    leases.update({(slot, 1): (tuple(range(70)),) for slot in range(2)})
    for slot in (0, 1, 0, 1):
        leased.held(slot, 1, 0, one)
    assert sorts == [70, 70], "both are kept"


def test_who_serves_nothing_holds_nothing():
    assert LeasedBlocks(SERVES_NOTHING).held(0, 1, 0, np.array([0])) is None
    assert not SERVES_NOTHING.admits("00" * 32)


def test_a_lease_is_served_to_those_who_show_its_ticket():
    asked = []

    def vouches(*lease):
        asked.append(lease)
        return lease == (3, 7, b"the right one")

    serving = Serving((), lambda _slot, _epoch: BLOCKS, lambda _key: True, b"", vouches)
    leased = LeasedBlocks(serving)
    for mac in (b"", b"another"):
        with pytest.raises(OutOfBounds, match="the lease in slot 3 is that of another ticket"):
            leased.ids(3, 7, 0, mac=mac)
        with pytest.raises(OutOfBounds, match="the lease in slot 3 is that of another ticket"):
            leased.held(3, 7, 0, np.array([1]), mac=mac)
    assert leased.ids(3, 7, 0, mac=b"the right one") == {1, 2}
    asked.clear()
    assert leased.held(3, 7, 0, np.array([1, 5]), mac=b"the right one").tolist() == [True, False]
    assert asked == [], "a MAC is checked once"
    with pytest.raises(OutOfBounds):
        leased.ids(3, 7, 0, mac=b"another")


def test_a_lease_that_ends_while_its_ticket_is_checked_is_not_held():
    held = [BLOCKS]

    def ends_meanwhile(*_lease):
        held[0] = None
        return False

    leased = LeasedBlocks(Serving((), lambda _slot, _epoch: held[0], lambda _key: True, b"", ends_meanwhile))
    assert leased.ids(3, 7, 0, mac=b"the right one") is None
    held[0] = BLOCKS
    assert leased.held(3, 7, 0, np.array([1]), mac=b"the right one") is None


BLOCKS = ((1, 2),)
