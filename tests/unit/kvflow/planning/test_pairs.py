"""Block ids that cannot be used are refused by group; lists of any length pair the tokens they stand for."""

import msgspec
import numpy as np
import pytest

from kvflow.errors import BlockIdsInvalid, BlockRangeMismatch, CapacityExceeded
from kvflow.ids import FEW_IDS
from kvflow.leases.blocks import check_block_ids
from kvflow.planning.pairs import UNITS_MAX, UnitPairs, located, merged_pairs, pair_units
from tests.helpers.loops import looped

from .helpers import group_plan, ids


def check(*lists, aliases=None, unique=True, num_blocks=10):
    return check_block_ids(lists, num_blocks=num_blocks, aliases=aliases or range(len(lists)), unique=unique)


@looped(
    "wrong",
    [
        [10],
        [-2],
        [3, 11, 4],
        [2**31],
        [2**63 - 1],
        [2**63],
        [2**64 - 1],  # as uint64 it wraps around to -1, an absent block
        [2**64],
        [2**70],
        [-(2**70)],
        [1.0],
        [1.5],
        ["1"],
        [None],
        [True],
        [[1, 2]],
        [[1], [2, 3]],
        [1, [2]],
        "12",
        7,
        None,
        {1: 2},
        np.array([[1]]),
        np.array([1.0]),
        np.array([2**64 - 1], np.uint64),
    ],
)
def test_what_is_not_a_flat_list_of_known_blocks_is_refused(wrong):
    with pytest.raises(BlockIdsInvalid) as caught:
        check([1], wrong)
    assert caught.value.group == 1


@looped(
    "right",
    [
        [3, 4, -1],
        (3, 4, -1),
        range(2, 5),
        [np.int64(3), np.int32(4), np.int8(-1)],
        np.array([3, 4, -1]),
        np.array([3, 4], np.uint8),
        [],
    ],
)
def test_any_sequence_of_integers_will_do(right):
    (checked,) = check(right)
    assert checked == tuple(int(block) for block in right)
    assert {type(block) for block in checked} <= {int}
    assert checked is not right or isinstance(right, tuple), "what the caller does to his list later is not our concern"


def test_the_offending_block_is_named():
    with pytest.raises(BlockIdsInvalid, match=r"group 0: block 18446744073709551615 is not in \[0, 10\)"):
        check([2**64 - 1])


@pytest.mark.parametrize(
    ("lists", "said"),
    [([], r"block_ids must be one list per group, not \[\]"), ([[1], [2], [3]], "block_ids has 3 lists for 2 groups")],
)
def test_one_list_per_group(lists, said):
    with pytest.raises(BlockIdsInvalid, match=said) as caught:
        check_block_ids(lists, num_blocks=10, aliases=[0, 1], unique=True)
    assert caught.value.group is None


@pytest.mark.parametrize("wrong", [None, 5, iter([[1], [2]])], ids=lambda wrong: type(wrong).__name__)
def test_what_has_no_number_of_lists_is_refused(wrong):
    with pytest.raises(BlockIdsInvalid, match="one list per group, not"):
        check_block_ids(wrong, num_blocks=10, aliases=[0, 1], unique=True)


@pytest.mark.parametrize(("lists", "aliases", "group"), [([[3, 4, 3]], [0], 0), ([[1], [5], [2, 2]], [0, 1, 1], 2)])
def test_a_block_is_a_target_once_and_a_source_as_often_as_it_is_listed(lists, aliases, group):
    with pytest.raises(BlockIdsInvalid, match="is a target twice") as caught:
        check(*lists, aliases=aliases)
    assert caught.value.group == group
    assert len(check(*lists, aliases=aliases, unique=False)) == len(lists)


@looped("unique", [True, False], ids=["targets", "sources"])
@looped(
    "lists, aliases, named",
    [
        ([[3], [4, 3]], [0, 0], "block 3 is in groups 0 and 1"),
        ([[1], [2], [5, 2]], [0, 1, 1], "block 2 is in groups 1 and 2"),
        ([[-1, 7], [8], [-1, 7]], [0, 0, 0], "block 7 is in groups 0 and 2"),
    ],
)
def test_a_block_holds_pages_of_one_group_of_those_that_share_bytes(lists, aliases, named, unique):
    with pytest.raises(BlockIdsInvalid, match=named) as caught:
        check(*lists, aliases=aliases, unique=unique)
    assert caught.value.remedy
    assert len(check(*lists, aliases=range(len(lists)), unique=unique)) == len(lists), "these share no bytes"


def test_absent_blocks_and_duplicates_of_one_group_are_right_among_sources():
    assert len(check([-1, 3, 3], [-1, 4], aliases=[0, 0], unique=False)) == 2


def test_groups_in_separate_memory_share_ids_and_absent_blocks_repeat():
    assert len(check([3, -1, -1], [3, -1], aliases=[0, 1])) == 2


def paired(plan, source, target, num_tokens):
    """Pair them as few and as many, which must be the same; ``tests/properties/test_few_ids.py`` has more of it."""
    many = pair_units(plan, ids(*source), ids(*target), num_tokens=num_tokens)
    few = pair_units(plan, tuple(source), tuple(target), num_tokens=num_tokens)
    for pairs in (many, few):
        assert list(pairs.source) == sorted(pairs.source)
    found, other = (sorted(zip(each.target, each.source, strict=True)) for each in (many, few))
    assert found == other
    return found


def test_a_ticket_with_a_block_too_many_is_refused_and_not_shifted():
    with pytest.raises(
        BlockRangeMismatch, match=r"source group 0: \d+ blocks? exceed 48 tokens: the list starts before token 0"
    ):
        paired(group_plan(), [5, 6, 7, 9], [1, 2, 3], 48)


@looped(
    "sizes, source, target, num_tokens, token",
    [
        ((16, 16), [6, 7], [1, 2, 3], 48, 0),
        ((16, 16), [5, -1, 7], [1, 2, 3], 48, 16),
        ((16, 16), [], [3], 48, 32),
        ((16, 64), [6, 5], [0, 1], 80, 0),
        ((16, 64), [9, 8, -1, 6, 5], [0, 1], 80, 32),
        ((64, 16), [3], [10, 11], 80, 48),
        ((48, 32), [2], [3, 4], 64, 0),
        ((48, 32), [2], [4], 64, 32),
    ],
)
def test_a_token_that_the_ticket_lacks_is_named(sizes, source, target, num_tokens, token):
    with pytest.raises(BlockRangeMismatch) as caught:
        paired(group_plan(*sizes), source, target, num_tokens)
    assert caught.value.message.endswith(f"do not cover token {token}")
    assert caught.value.group == 0


def test_pairs_are_merged_where_both_sides_go_on():
    pairs = UnitPairs((1, 2, 3, 7, 8), (4, 5, 9, 10, 11))
    assert merged_pairs(pairs) == [(1, 4, 2), (3, 9, 1), (7, 10, 2)]


def test_oversized_blocks_are_refused_before_memory_is_allocated():
    with pytest.raises(CapacityExceeded, match="units of one request"):
        paired(group_plan(1 << 20, 1), [0] * (UNITS_MAX // (1 << 20) + 1), [1], 1 << 23)


@pytest.mark.parametrize(("target", "num_tokens"), [([1, 2, 3], 32), ([1, -1, 3], 32), ([1, 2], 1)])
def test_targets_before_token_0_are_refused(target, num_tokens):
    with pytest.raises(BlockRangeMismatch, match="the list starts before token 0") as caught:
        paired(group_plan(), [4, 5, 6, 7], target, num_tokens)
    assert caught.value.group == 0


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_window_is_that_of_the_token_behind_the_last_target(absent):
    """Of 80 tokens the first 64 are read, so that the window begins at token 35; at 80 it would begin at 51."""
    plan = msgspec.structs.replace(group_plan(16, 64), window=30)
    source = [*[-1] * absent, *[9, 8, 7, 6, 5][absent:]]
    assert paired(plan, source, [0, -1], 80) == [(unit, source[unit]) for unit in range(absent, 4)]


def test_what_a_window_before_the_end_needs_must_be_there():
    plan = msgspec.structs.replace(group_plan(16, 64), window=30)
    with pytest.raises(BlockRangeMismatch, match="do not cover token 32 "):
        paired(plan, [-1, -1, -1, 6, 5], [0, -1], 80)


@pytest.mark.parametrize("count", [2, FEW_IDS])
def test_pairs_of_blocks_that_are_told_later_are_those_of_the_blocks(count):
    group = group_plan(64, 16) if count == 2 else group_plan()
    blocks = [*range(count, 1, -1), 70][:count]
    per_block = group.source.per_block
    targets = ids(*range(count * group.source.per_block // group.target.per_block))
    num_tokens = count * group.source.tokens * per_block
    unknown = pair_units(group, np.arange(count), targets, num_tokens=num_tokens)
    wanted = pair_units(group, ids(*blocks), targets, num_tokens=num_tokens)
    found = located(unknown, blocks, per_block)
    assert list(found.source) == list(wanted.source)
    assert list(found.target) == list(wanted.target)
    with pytest.raises(BlockRangeMismatch):
        located(unknown, [*blocks[:-1], -1], per_block)
