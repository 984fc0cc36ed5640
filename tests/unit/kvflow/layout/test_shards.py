"""What a rank may say of its place; ``tests/properties/test_models.py`` says which heads it holds."""

import numpy as np
import pytest

from kvflow.errors import SpecInvalid
from kvflow.layout.shards import ALL_TOKENS, Held, Shard, Stripe
from tests.helpers.loops import looped


@pytest.mark.parametrize(("tp_rank", "tp_size"), [(1, 1), (-1, 1), (2, 2)])
def test_a_rank_outside_its_group_is_refused(tp_rank, tp_size):
    with pytest.raises(SpecInvalid, match="tp_rank"):
        Shard(tp_rank=tp_rank, tp_size=tp_size)


def test_a_group_of_no_ranks_is_refused():
    with pytest.raises(SpecInvalid, match=r"shard.tp_size is 0: expected at least 1"):
        Shard(tp_size=0)


@pytest.mark.parametrize("fields", [{"tp_size": 2.0}, {"tp_rank": "0"}, {"tp_rank": None}])
def test_a_number_that_is_not_whole_is_refused_by_name(fields):
    (name,) = fields
    with pytest.raises(SpecInvalid, match=f"shard.{name} is .*: expected an integer"):
        Shard(**fields)


@looped(
    "fields, words",
    [
        ({"dcp_rank": 1}, "dcp_rank is 1, but dcp_size is 1"),
        ({"dcp_rank": 2, "dcp_size": 2}, "dcp_rank is 2, but dcp_size is 2"),
        ({"dcp_rank": -1, "dcp_size": 2}, "dcp_rank is -1"),
        ({"dcp_size": 0}, "dcp_size is 0"),
        ({"dcp_size": 2**62}, "dcp_size is 4611686018427387904: expected 1 to 1024"),
        ({"dcp_size": 2, "dcp_interleave": 0}, "dcp_interleave is 0: expected 1 to"),
        ({"dcp_size": 2, "dcp_interleave": 2**62}, "dcp_interleave is 4611686018427387904"),
        ({"dcp_size": 1.5}, "dcp_size is 1.5: expected an integer"),
    ],
)
def test_a_stripe_that_cannot_be_is_refused(fields, words):
    with pytest.raises(SpecInvalid, match=words):
        Shard(**fields)


def test_heads_and_tokens_are_divided_independently():
    shard = Shard(tp_rank=3, tp_size=4, dcp_rank=1, dcp_size=2, dcp_interleave=16)
    assert shard.heads(2) == Held(1, 1, 2)
    assert shard.stripe == Stripe(1, 2, 16)
    assert Shard().stripe == ALL_TOKENS


def test_whole_numbers_of_numpy_become_pythons():
    """Arithmetic with a rank of numpy's gives numbers that no manifest can be encoded with."""
    fields = {"tp_rank": 1, "tp_size": 2, "dcp_rank": 3, "dcp_size": 4, "dcp_interleave": 8}
    shard = Shard(**{name: np.int64(value) for name, value in fields.items()})
    assert shard == Shard(**fields)
    assert {type(getattr(shard, name)) for name in fields} == {int}
