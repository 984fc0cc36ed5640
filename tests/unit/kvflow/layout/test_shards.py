"""Which heads each rank holds: all of them together, evenly, and replicated where ranks outnumber heads."""

import pytest

from kvflow.errors import SpecInvalid
from kvflow.layout.shards import Held, Shard


def held(total, tp_size):
    return [
        (part.first, part.count)
        for part in (Shard(tp_rank=rank, tp_size=tp_size).heads(total) for rank in range(tp_size))
    ]


@pytest.mark.parametrize(
    ("total", "tp_size", "expected"),
    [
        (8, 1, [(0, 8)]),
        (8, 2, [(0, 4), (4, 4)]),
        (8, 3, [(0, 3), (3, 3), (6, 2)]),
        (7, 4, [(0, 2), (2, 2), (4, 2), (6, 1)]),
        (5, 5, [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)]),
        (2, 4, [(0, 1), (0, 1), (1, 1), (1, 1)]),
        (2, 3, [(0, 1), (0, 1), (1, 1)]),
        (3, 4, [(0, 1), (0, 1), (1, 1), (2, 1)]),
        (1, 3, [(0, 1), (0, 1), (0, 1)]),
    ],
)
def test_heads_by_rank(total, tp_size, expected):
    assert held(total, tp_size) == expected


def test_ranks_cover_every_head_and_overlap_only_where_heads_are_replicated():
    for total in range(1, 17):
        for tp_size in range(1, 17):
            parts = held(total, tp_size)
            heads = [head for first, count in parts for head in range(first, first + count)]
            assert sorted(set(heads)) == list(range(total))
            assert (len(heads) == total) == (total >= tp_size)
            assert heads == sorted(heads)


def test_what_is_held_says_of_how_much():
    assert Shard(tp_rank=1, tp_size=2).heads(8) == Held(4, 4, 8)


@pytest.mark.parametrize(("tp_rank", "tp_size"), [(1, 1), (-1, 1), (2, 2), (0, 0)])
def test_a_rank_outside_its_group_is_refused(tp_rank, tp_size):
    with pytest.raises(SpecInvalid, match="tp_rank"):
        Shard(tp_rank=tp_rank, tp_size=tp_size)


@pytest.mark.parametrize("fields", [{"tp_size": 2.0}, {"tp_rank": "0"}, {"tp_rank": None}])
def test_a_number_that_is_not_whole_is_refused_by_name(fields):
    (name,) = fields
    with pytest.raises(SpecInvalid, match=f"shard.{name} is .*: expected an integer"):
        Shard(**fields)
