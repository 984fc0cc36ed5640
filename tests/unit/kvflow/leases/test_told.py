"""Who follows what a worker keeps knows each end and no other, however far behind it is."""

import random

import pytest

from kvflow.leases import told
from kvflow.leases.held import Names
from kvflow.leases.told import END_BYTES, KeptEnds, ends_of
from tests.helpers.loops import looped

from .helpers import mint_of


class Kept:
    """A lease with some ends."""

    def __init__(self, *ends):
        self.names = Names(ends=tuple([end_of(each) for each in ends]))


class Follower:
    """Keeps what is told."""

    def __init__(self, ends):
        self._ends = ends
        self.since = self.begun = 0
        self.known, self.is_all, self.restarts, self.nbytes = set(), False, 0, 0

    def ask(self):
        changes = self._ends.after(self.since, self.begun)
        if not self.since or changes.begun != self.begun:
            self.known.clear()
            self.restarts += 1
        new, gone = split(changes.new), split(changes.gone)
        self.known = self.known - gone | new
        self.since, self.begun, self.is_all = changes.until, changes.begun, changes.is_all
        self.nbytes += len(changes.new) + len(changes.gone)

    def ask_all(self):
        self.ask()
        while not self.is_all:
            self.ask()
        return self.known


def end_of(number):
    return number.to_bytes(END_BYTES)


def split(ends):
    return {ends[at : at + END_BYTES] for at in range(0, len(ends), END_BYTES)}


def ends_at(num_tokens, block_size, *, listed=None):
    """Return at how many tokens a lease has an end, of which the last so many blocks are listed."""
    count = -(-num_tokens // block_size)
    digests = [end_of(min(num_tokens, (at + 1) * block_size)) for at in range(count)][-(listed or count) :]
    blocks = [list(range(1, 1 + len(digests)))]
    mint = mint_of(block_sizes=[block_size])
    _, grant = mint.issue("r", blocks, num_tokens, [digests], "", kind="kept")
    return sorted(int.from_bytes(each) for each in ends_of(digests, grant))


@looped(
    "num_tokens, block_size, listed, expected",
    [
        (160, 16, None, [160]),
        (2048, 16, None, [1024, 2048]),
        (2064, 16, None, [1024, 2048, 2064]),
        (3100, 300, None, [900, 1800, 3000, 3100]),
        (6000, 1500, None, [1500, 3000, 4500, 6000]),
        (4096, 16, 80, [3072, 4096]),
    ],
    ids=["short", "whole", "a last block", "no divisor", "long blocks", "of a window"],
)
def test_a_lease_has_an_end_at_each_stride_and_at_its_last_block(num_tokens, block_size, listed, expected):
    assert ends_at(num_tokens, block_size, listed=listed) == expected


def test_ends_that_several_leases_have_stay_until_the_last_has_gone():
    ends = KeptEnds()
    follower, first, second = Follower(ends), Kept(1, 2), Kept(1, 3)
    assert follower.ask_all() == set()
    ends.add(first)
    ends.add(second)
    assert follower.ask_all() == {end_of(1), end_of(2), end_of(3)}
    ends.remove(first)
    assert follower.ask_all() == {end_of(1), end_of(3)}
    ends.remove(second)
    assert follower.ask_all() == set()
    assert follower.nbytes == 6 * END_BYTES, "each change was told once"
    assert follower.restarts == 1


@pytest.mark.parametrize("seed", range(5))
def test_who_is_told_in_pieces_knows_what_is_kept(monkeypatch, seed):
    monkeypatch.setattr(told, "PIECE_MAX", 7)
    monkeypatch.setattr(told, "GONE_MAX", 5)
    draw, ends, leases = random.Random(seed), KeptEnds(), []
    followers = [Follower(ends) for _ in range(3)]
    for _ in range(2000):
        if leases and draw.random() < 0.5:
            ends.remove(leases.pop(draw.randrange(len(leases))))
        else:
            leases.append(Kept(*draw.sample(range(60), draw.randrange(1, 6))))
            ends.add(leases[-1])
        for follower, share in zip(followers, (1.0, 0.3, 0.01), strict=True):
            if draw.random() < share:
                follower.ask()
        if draw.random() < 0.05:
            draw.choice(followers).ask_all()
    expected = {end for lease in leases for end in lease.names.ends}
    assert [each.ask_all() for each in followers] == [expected] * 3
    assert followers[0].restarts < followers[2].restarts, "who is too far behind starts again"


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(told, "GONE_MAX", 50)
    ends = KeptEnds()
    for number in range(10_000):
        ends.add(lease := Kept(number))
        ends.remove(lease)
    assert len(ends._changed) <= 2 * 50


def test_who_asks_of_another_incarnation_is_told_all_again():
    ends, follower = KeptEnds(), Follower(KeptEnds())
    follower.since = follower.begun = 1000
    follower._ends = ends
    ends.add(Kept(1))
    assert follower.ask_all() == {end_of(1)}
    assert follower.restarts == 1


def test_a_worker_that_keeps_more_than_it_tells_says_so(monkeypatch):
    monkeypatch.setattr(told, "ENDS_MAX", 3)
    ends = KeptEnds()
    follower, first, second = Follower(ends), Kept(1, 2), Kept(3, 4)
    ends.add(first)
    assert follower.ask_all() == {end_of(1), end_of(2)}
    ends.add(second)
    follower.ask()
    assert (follower.is_all, follower.since) == (False, ends.number)
    ends.remove(second)
    assert follower.ask_all() == {end_of(1), end_of(2)}
