"""Which tokens a rank holds: against a list of them, token by token."""

import math
from fractions import Fraction
from itertools import product

import numpy as np

from kvflow.layout.shards import ALL_TOKENS, Stripe
from tests.helpers.loops import looped

STRIPES = [Stripe(rank, size, width) for size in range(1, 5) for width in (1, 2, 3, 6) for rank in range(size)]


def tokens_of(stripe, end):
    return [token for token in range(end) if token // stripe.width % stripe.size == stripe.rank]


@looped("stripe", STRIPES)
def test_tokens_lie_one_after_the_other(stripe):
    tokens = tokens_of(stripe, 100)
    positions = range(len(tokens))
    assert [stripe.token(position) for position in positions] == tokens
    assert [stripe.position(token) for token in tokens] == [*positions]
    assert stripe.token(np.arange(len(tokens))).tolist() == tokens
    assert np.flatnonzero(stripe.holds(np.arange(100))).tolist() == tokens
    assert all(stripe.count(end) == len(tokens_of(stripe, end)) for end in range(60))


@looped("stripe", STRIPES)
def test_what_two_ranks_have_in_common_is_counted(stripe):
    for other in STRIPES:
        theirs = tokens_of(other, math.lcm(stripe.size * stripe.width, other.size * other.width))
        both = [token for token in theirs if token // stripe.width % stripe.size == stripe.rank]
        assert stripe.share_of(other) == Fraction(len(both), len(theirs))


def test_stripes_are_aligned_if_they_hold_the_same_tokens():
    for one, other in product(STRIPES, STRIPES):
        assert one.aligned(other) == (tokens_of(one, 72) == tokens_of(other, 72))


def test_a_width_means_nothing_where_every_rank_has_all():
    assert Stripe(0, 1, 7).aligned(ALL_TOKENS)
    assert str(Stripe(0, 1, 7)) == "all"
    assert str(Stripe(1, 4, 16)) == "rank 1 of 4, 16 at a time"


def test_what_recurs_after_many_tokens_is_counted_at_once():
    assert Stripe(0, 1024, 1 << 24).share_of(Stripe(0, 1023, (1 << 24) - 1)) > 0
