"""The estimate of how long a read would hold the event loop."""

import pytest

from kvflow.reads.contract import INLINE_S_MAX
from kvflow.reads.prepared import BYTE_S, DESCRIPTOR_S, POST_S, READ_S, PostCosts

BLOCK_S = DESCRIPTOR_S + (32 << 10) * BYTE_S
"""A block of 32 KiB, which is one descriptor."""


def learned(*posts_s, blocks=2):
    costs = PostCosts()
    for post_s in posts_s:
        costs.learn(post_s, POST_S + 2 * BLOCK_S)
    return READ_S + costs.ratio * (POST_S + blocks * BLOCK_S)


def test_a_small_read_fits_before_anything_was_learned():
    assert learned() == pytest.approx(32e-6, rel=0.02)
    assert learned() < INLINE_S_MAX < learned(blocks=32)


def test_one_interrupted_post_does_not_stand_for_the_next_ones():
    assert learned(20e-6, 20e-6, 100e-6) < INLINE_S_MAX


def test_a_peer_that_is_slow_after_pauses_still_fits():
    assert learned(*[50e-6, 40e-6, 60e-6, 100e-6] * 5) < INLINE_S_MAX


def test_a_slow_peer_does_not_fit_and_recovers_with_its_posts():
    slow = [1e-3] * 3
    assert learned(*slow) > INLINE_S_MAX
    assert learned(*slow, *[20e-6] * 5) > INLINE_S_MAX
    assert learned(*slow, *[20e-6] * 20) < INLINE_S_MAX
