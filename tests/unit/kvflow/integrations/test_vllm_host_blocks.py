"""Blocks of the host buffer belong to one request at a time, and all come back."""

import pytest

from kvflow.errors import CapacityExceeded, DefectFound
from kvflow.integrations.vllm.host_blocks import HostBlocks

A, B, C = (("load", name) for name in "abc")


@pytest.fixture
def host():
    blocks = HostBlocks()
    blocks.meet([9, 8])
    return blocks


def test_each_block_of_the_device_gets_one(host):
    assert host.num_blocks == 8, "the rank with the fewest counts"
    taken = host.take(A, ((7, -1, 30), (5,)))
    assert taken == ((0, -1, 1), (2,))
    other = host.take(B, ((8, 9, 10, 11, 12),))
    assert {*other[0]}.isdisjoint({0, 1, 2})
    assert not host.has_room(C, 1)
    host.give(A)
    assert host.has_room(C, 3)
    assert host.take(C, ((1, 2, 3),)) == ((0, 1, 2),)


def test_an_offer_and_a_load_of_one_name_are_two(host):
    loaded, offered = host.take(("load", "a"), ((1,),)), host.take(("offer", "a"), ((2,),))
    assert loaded != offered
    host.give(("load", "a"))
    assert host.take(B, ((3,),)) == loaded


def test_what_does_not_fit_takes_nothing(host):
    host.take(A, (tuple(range(6)),))
    with pytest.raises(CapacityExceeded):
        host.take(B, ((1, 2, 3),))
    assert host.take(C, ((1, 2),)) == ((6, 7),)


def test_a_request_takes_blocks_once(host):
    host.take(A, ((1,),))
    with pytest.raises(DefectFound):
        host.take(A, ((2,),))
    host.give(A)
    host.give(A)
    assert host.has_room(B, 8)


def test_later_requests_wait_for_the_first_that_has_no_room(host):
    host.take(A, (tuple(range(6)),))
    assert not host.has_room(B, 4)
    assert not host.has_room(C, 1), "otherwise small requests would keep out large ones"
    host.give(A)
    assert not host.has_room(C, 1)
    assert host.has_room(B, 4)
    host.take(B, (tuple(range(4)),))
    assert host.has_room(C, 4)


def test_no_request_waits_for_one_that_has_ended(host):
    host.take(A, (tuple(range(6)),))
    assert not host.has_room(B, 4)
    host.give(B)
    assert host.has_room(C, 2)


def test_a_request_that_never_fits_is_refused_and_keeps_no_other_waiting(host):
    with pytest.raises(CapacityExceeded, match="limit is 8") as refused:
        host.has_room(A, 9)
    assert "host_buffer_bytes" in refused.value.remedy
    assert host.has_room(B, 8)


def test_before_the_ranks_have_reported_nothing_fits():
    host = HostBlocks()
    with pytest.raises(CapacityExceeded) as refused:
        host.has_room(A, 1)
    assert "KVFlowConnector first" in refused.value.remedy
    host.meet([4])
    host.take(A, ((1, 2),))
    host.meet([4])  # the engine has slept
    assert not host.has_room(B, 3)
