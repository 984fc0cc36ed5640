"""Which reads the event loop makes itself, on hosts of three kinds, on a virtual clock."""

import random

import pytest

from kvflow.reads.contract import TURN_S_MAX
from kvflow.reads.core import PostReads
from kvflow.reads.pacing import HandOver

from .test_core import Bench, a_read

US = 1e-6
HOSTS = {"fast": (8, 20, 40, 110), "slow": (20, 45, 170, 450), "busy": (30, 60, 300, 2000)}
"""Microseconds of a small post, in a row and after a pause; and of a hand-over, the same."""

COLD = 4  # times as long a post takes on the read thread, whose caches lack what it needs

READS = 1000
PAUSED = pytest.mark.parametrize("paused", [False, True], ids=["in a row", "after pauses"])
EACH = pytest.mark.parametrize("host", HOSTS)


class Host(Bench):
    """A reader whose posts and hand-overs take time, now and then five times as much."""

    def __init__(self, host, *, paused):
        super().__init__(at_once=True)
        self.draw = random.Random(f"{host} {paused}")
        self.post_us, self.hand_over_us = HOSTS[host][paused], HOSTS[host][2 + paused]
        self.handing_over, self.longest_s = HandOver(), 0.0
        posted = self.backend.post

        def post(chunk):
            self.spend(self.post_us)
            return posted(chunk)

        self.backend.post = post
        self.read(0)  # connects
        assert not self.read(1), "what is not measured is tried on the loop"

    def spend(self, microseconds):
        self.now += microseconds * US * self.draw.uniform(0.7, 1.3) * self.draw.choice([1] * 9 + [5])

    def read(self, read_id):
        """Read a small block; return whether the read thread did it."""
        read, began = a_read(read_id), self.now
        allowed = self.handing_over.seconds
        if self.core.post_inline([read], allowed) is not None:
            self.longest_s = max(self.longest_s, self.now - began)
            return False
        self.handing_over.begin(read_id, self.now)
        self.spend(self.hand_over_us)
        self.core.handle(PostReads((read,), allowed))
        self.post_us *= COLD
        while self.core.step():
            pass
        self.post_us /= COLD
        self.handing_over.end(self.events.pop(), self.now)
        self.events.clear()
        return True


@EACH
@PAUSED
def test_small_reads_are_made_on_the_loop(host, paused):
    reader = Host(host, paused=paused)
    assert sum(reader.read(number) for number in range(2, READS)) <= READS / 100


@EACH
@PAUSED
def test_a_time_of_slow_posts_is_soon_forgotten(host, paused):
    reader = Host(host, paused=paused)
    reader.post_us *= 100
    for number in range(2, 12):
        reader.read(number)
    reader.post_us /= 100
    away = [reader.read(number) for number in range(12, 60)]
    assert not any(away[len(away) // 2 :])


@EACH
def test_what_takes_longer_than_a_hand_over_leaves_the_loop(host):
    reader = Host(host, paused=False)
    reader.post_us = 5 * max(reader.hand_over_us, TURN_S_MAX / US)
    away = [reader.read(number) for number in range(2, 100)]
    assert sum(away) >= 0.95 * len(away)


def test_a_host_with_cheap_hand_overs_uses_them():
    reader = Host("fast", paused=False)
    reader.post_us = 4 * reader.hand_over_us
    away = [reader.read(number) for number in range(2, 200)]
    assert sum(away[100:]) >= 90


def test_a_hand_over_counts_as_half_a_turn_at_most():
    reader = Host("busy", paused=True)
    reader.post_us = 1e5
    for number in range(2, 50):
        reader.read(number)
    assert 0 < reader.handing_over.seconds <= TURN_S_MAX / 2
