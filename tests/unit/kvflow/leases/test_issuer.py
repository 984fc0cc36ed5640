"""The mint allots slots and epochs that every rank can admit, and an offer that fails costs nothing."""

from uuid import UUID

import numpy as np
import pytest

from kvflow.errors import ArgumentInvalid, BlockIdsInvalid, CapacityExceeded, ConfigInvalid
from kvflow.leases.issuer import Issuer
from tests.helpers.loops import looped

from .helpers import BASE, SLOTS, address, mint_of, sign, verify


def offer(mint, request_id="r", block_ids=([1],), num_tokens=1):
    return mint.offer(request_id, block_ids=block_ids, num_tokens=num_tokens)[1]


def test_a_grant_says_everything_and_is_signed():
    mint = mint_of(lease_s=12.5, wall_clock=lambda: 1000.0)
    ticket, grant = mint.offer("r", block_ids=[[3, -1], [4]], num_tokens=[32, 7])
    assert ticket.grants == (grant,)
    assert (grant.engine_id, grant.request_id) == ("prefill-0", "r")
    assert (grant.issued_at, grant.lease_s) == (1000.0, 12.5)
    assert (grant.block_ids, grant.num_tokens) == (((3, -1), (4,)), (32, 7))
    ticket.verify(verify)


def test_one_number_of_tokens_is_every_groups():
    assert offer(mint_of(), block_ids=[[1], [2]], num_tokens=48).num_tokens == (48, 48)


def test_epochs_start_above_every_rank_and_leave_room_for_an_end():
    mint = mint_of(address(0, base=10), address(1, base=500))
    epochs = [offer(mint, f"r{index}").epoch for index in range(3)]
    assert epochs == [501, 503, 505]


def test_a_head_start_keeps_a_new_mint_from_the_epochs_of_the_old_one():
    assert offer(mint_of(head_start=10**6)).epoch == BASE + 1 + 10**6


def test_slots_are_those_that_every_rank_has():
    mint = mint_of(address(0, slots=3), address(1, slots=2))
    assert {offer(mint, "a").slot, offer(mint, "b").slot} == {0, 1}
    with pytest.raises(CapacityExceeded) as caught:
        offer(mint, "c")
    assert caught.value.limit == 2


@pytest.mark.parametrize("number", [np.int64(48), np.int32(48), 48])
def test_numpy_integers_are_integers(number):
    grant = offer(mint_of(), block_ids=[np.array([3, 4])], num_tokens=number)
    assert (grant.block_ids, grant.num_tokens) == (((3, 4),), (48,))
    assert type(grant.num_tokens[0]) is type(grant.block_ids[0][0]) is int
    assert offer(mint_of(), num_tokens=np.array([7])).num_tokens == (7,)


def test_text_of_numpy_is_text():
    mint = mint_of(address(slots=1))
    assert type(offer(mint, np.str_("r")).request_id) is str
    assert mint.retire("r")


@looped("name", [UUID(int=1), b"r", 7, None, ["unhashable"]])
def test_a_name_that_is_no_text_is_refused_and_costs_no_slot(name):
    """A UUID would fit the ticket, as text, and its slot would not be found under that text when the lease ends."""
    mint = mint_of(address(slots=1))
    with pytest.raises(ArgumentInvalid, match="request_id must be text") as caught:
        offer(mint, name)
    assert caught.value.name == "request_id"
    offer(mint)


@looped(
    "wrong",
    [
        {"num_tokens": 0},
        {"num_tokens": -5},
        {"num_tokens": 1.5},
        {"num_tokens": None},
        {"num_tokens": "48"},
        {"num_tokens": [1, 2]},
        {"num_tokens": []},
        {"num_tokens": [1.5]},
        {"num_tokens": 2**60},
        {"block_ids": []},
        {"block_ids": None},
        {"block_ids": [1]},
        {"block_ids": [[1.7]]},
        {"block_ids": ["12"]},
        {"block_ids": [[None]]},
        {"block_ids": [[[1]]]},
        {"block_ids": [[-2]]},
        {"block_ids": [[2**31]]},
        {"block_ids": [[2**70]]},
        {"request_id": ""},
        {"request_id": "x" * 257},
        {"request_id": "\ud800"},
    ],
)
def test_an_offer_that_no_ticket_can_carry_is_refused_and_costs_nothing(wrong):
    mint = mint_of()
    with pytest.raises(BlockIdsInvalid):
        offer(mint, **wrong)
    grants = [offer(mint, f"request-{index}") for index in range(SLOTS)]
    assert {grant.slot for grant in grants} == set(range(SLOTS))
    assert grants[0].epoch == BASE + 1
    assert not mint.retire("r")


def test_a_slot_can_be_free_before_its_name_is():
    mint = mint_of()
    grants = [offer(mint, f"request-{index}") for index in range(SLOTS)]
    mint.vacate(["request-0", "request-0"])
    mint.vacate(["request-0", "unknown"])
    with pytest.raises(BlockIdsInvalid, match="on offer already"):
        offer(mint, "request-0")
    assert offer(mint, "another").slot == grants[0].slot
    with pytest.raises(CapacityExceeded):
        offer(mint, "one too many")
    assert mint.retire("request-0")
    assert not mint.retire("request-0")
    with pytest.raises(CapacityExceeded):
        offer(mint, "request-0")


def test_a_mint_needs_a_rank():
    with pytest.raises(ConfigInvalid, match="at least one rank"):
        Issuer("prefill-0", [], sign=sign, lease_s=1.0)
