"""Few block ids are checked and paired by Python, many by NumPy: on the same input with the same result, or error."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import force_setattr, replace

from kvflow.errors import BlockIdsInvalid, KvflowError
from kvflow.ids import FEW_IDS
from kvflow.layout.shards import Stripe
from kvflow.leases import blocks
from kvflow.leases.blocks import check_block_ids
from kvflow.planning import pairs
from kvflow.planning.pairs import pair_units
from kvflow.planning.plan import plan_transfer
from kvflow.planning.runs import Units
from tests.unit.kvflow.planning.helpers import full, manifest_of

from .caches import thorough

NUM_BLOCKS = 12
CHECKED_AS_MANY = patch.object(blocks, "FEW_IDS", -1)
BY_SORTING = patch.object(blocks, "BLOCKS_PER_ID", 0)


def outcome(call):
    """What a call returns as lists, or the error that it raises, word by word."""
    try:
        found = call()
    except KvflowError as error:
        return type(error), vars(error)
    return [np.asarray(each, np.int64).tolist() for each in found]


ids = st.integers(-1, NUM_BLOCKS - 1)
odd = st.one_of(
    st.integers(-3, NUM_BLOCKS + 2),
    st.sampled_from([True, False, None, "1", 1.0, 2.5, 2**31, 2**63, 2**64 - 1, 2**70, -(2**70), (1, 2)]),
    st.builds(np.int64, ids),
    st.builds(np.uint8, st.integers(0, NUM_BLOCKS)),
)
lists = st.one_of(
    st.lists(ids, max_size=6, unique=True),
    st.lists(ids, max_size=6),
    st.lists(odd, max_size=3),
    st.lists(ids, max_size=6).map(tuple),
    st.lists(ids, max_size=6).map(lambda few: np.array(few, np.int32)),
    st.sampled_from([None, 7, "12", b"12", {1: 2}, range(3), np.array([[1]]), np.array([1.0]), np.array(["a"])]),
    st.integers(FEW_IDS - 1, FEW_IDS + 1).map(lambda count: [0] + [-1] * count),
)


@thorough
@given(st.lists(lists, min_size=1, max_size=3), st.data(), st.booleans())
@example([[3, 3, -1, -1]], None, True)
@example([[True, 3]], None, True)
def test_few_and_many_ids_are_checked_alike(block_ids, data, unique):
    count = len(block_ids)
    aliases = [data.draw(st.integers(0, group)) for group in range(count)] if data else [0] * count

    def check():
        return check_block_ids(block_ids, num_blocks=NUM_BLOCKS, aliases=aliases, unique=unique)

    few = outcome(check)
    with CHECKED_AS_MANY:
        assert outcome(check) == few
        with BY_SORTING:
            assert outcome(check) == few


@thorough
@given(st.lists(st.lists(ids, max_size=6).map(tuple), min_size=1, max_size=3), st.data())
def test_ids_of_a_decoded_ticket_are_checked_like_any_others(block_ids, data):
    aliases = [data.draw(st.integers(0, group)) for group in range(len(block_ids))]
    num_blocks = data.draw(st.integers(NUM_BLOCKS - 2, NUM_BLOCKS))

    def check(**how):
        return check_block_ids(block_ids, num_blocks=num_blocks, aliases=aliases, unique=False, **how)

    few = outcome(check)
    assert outcome(lambda: check(decoded=True)) == few
    with CHECKED_AS_MANY:
        assert outcome(lambda: check(decoded=True)) == few


@pytest.mark.parametrize("count", [FEW_IDS - 1, FEW_IDS, FEW_IDS + 1])
@pytest.mark.parametrize("form", [list, tuple, np.array])
def test_up_to_64_ids_become_tuples_and_more_arrays(form, count):
    given = list(range(1, 2 * count, 2))
    (checked,) = check_block_ids([form(given)], num_blocks=2 * count, aliases=[0], unique=True)
    pairs = pair_units(PLANS[16, 16], checked, checked, num_tokens=16 * count)
    for found in (checked, pairs.source, pairs.target):
        assert type(found) is (tuple if count <= FEW_IDS else np.ndarray)
        assert list(found) == given
    for wrong, words in (
        ([*given, 1], "block 1 is a target twice"),
        ([*given, 2 * count], f"block {2 * count} is not"),
    ):
        with pytest.raises(BlockIdsInvalid, match=words):
            check_block_ids([form(wrong)], num_blocks=2 * count, aliases=[0], unique=True)


def test_a_checked_list_does_not_follow_the_callers():
    for mine in ([3, 4], list(range(FEW_IDS + 1))):
        (checked,) = check_block_ids([mine], num_blocks=100, aliases=[0], unique=True)
        mine[0] = 7
        assert checked[0] != 7


def plan_of(source, target):
    source, target = manifest_of({"a": full(source)}), manifest_of({"a": full(target)})
    return plan_transfer(source, target).groups[0]


SIZES = [(16, 16), (16, 64), (64, 16), (48, 32), (32, 48), (8, 64)]
PLANS = {sizes: plan_of(*sizes) for sizes in SIZES}
STATE = replace(PLANS[16, 16], source=Units(0, 1, 1), target=Units(0, 1, 1))


@st.composite
def pairings(draw):
    """A plan and two lists of block ids, most of which fit the request's tokens."""
    plan = draw(st.sampled_from([*PLANS.values(), STATE]))
    if plan is not STATE:
        plan = replace(plan, window=draw(st.sampled_from((0, 0, 1, 20, 100))))
        if draw(st.booleans()):
            rank, size, width = draw(st.sampled_from([(0, 2, 1), (1, 2, 16), (2, 4, 8), (3, 4, 16)]))
            stripe = Stripe(rank, size, width)
            plan = replace(plan, source=replace(plan.source, stripe=stripe), target=replace(plan.target, stripe=stripe))
    num_tokens = draw(st.integers(1, 300))
    sides = []
    for units in (plan.source, plan.target):
        held = -(-num_tokens // (units.tokens * units.per_block * units.stripe.size)) if units.tokens else 1
        count = draw(st.one_of(st.just(held), st.integers(0, held), st.integers(0, held + 2)))
        numbers = draw(st.permutations(range(400, 400 + count)) if draw(st.booleans()) else st.just(range(count)))
        absent = draw(st.sampled_from((0, 0, 1, count)))
        numbers = [-1] * min(absent, count) + list(numbers)[absent:]
        if numbers and draw(st.integers(0, 3)) == 0:
            numbers[draw(st.integers(0, count - 1))] = draw(st.sampled_from((-1, numbers[0])))
        sides.append(numbers)
    return plan, *map(tuple, sides), num_tokens


@thorough
@given(pairings())
def test_few_and_many_units_are_paired_alike(pairing):
    plan, source, target, num_tokens = pairing

    def pair(*given):
        found = pair_units(plan, *given, num_tokens=num_tokens)
        assert len(found.source) == len(found.target)
        assert {type(found.source), type(found.target)} == {tuple if len(found.source) <= FEW_IDS else np.ndarray}
        assert (np.diff(found.source) >= 0).all()
        # A source block that is listed twice has no order among its targets.
        order = np.lexsort((found.target, found.source))
        return np.asarray(found.source)[order], np.asarray(found.target)[order]

    few = outcome(lambda: pair(source, target))
    many = outcome(lambda: pair(np.array(source, np.int64), np.array(target, np.int64)))
    mixed = outcome(lambda: pair(source, np.array(target, np.int64)))
    assert few == many == mixed
    plan = replace(plan)
    force_setattr(plan, "whole", False)  # the way of blocks that are cut, or absent, pairs whole ones alike
    assert outcome(lambda: pair(source, target)) == few
    assert outcome(lambda: pair(np.array(source, np.int64), np.array(target, np.int64))) == few


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_units_that_both_sides_have_are_few_without_numpys_way(sizes):
    """Otherwise the property above would compare the way of many with itself."""
    plan = PLANS[sizes]
    num_tokens = 192
    source, target = (tuple(range(num_tokens // size)) for size in sizes)
    with patch.object(pairs, "_pair_many", side_effect=AssertionError("the way of many")):
        assert len(pair_units(plan, source, target, num_tokens=num_tokens).source) == num_tokens // plan.unit_tokens
        assert len(pair_units(plan, source[1:], target[-1:], num_tokens=num_tokens).source) == plan.target_units
        assert len(pair_units(STATE, (3,), (4,), num_tokens=num_tokens).source) == 1
