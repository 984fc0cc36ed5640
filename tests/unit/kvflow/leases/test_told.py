"""The ends of kept leases that are told. Who follows them is in tests/properties/test_readers.py."""

from kvflow.leases import told
from kvflow.leases.held import Names
from kvflow.leases.told import END_BYTES, KeptEnds, ends_of
from tests.helpers.loops import looped

from .helpers import mint_of


class Kept:
    """A lease with some ends."""

    def __init__(self, *ends):
        self.names = Names(ends=tuple([end_of(each) for each in ends]))


def end_of(number):
    return number.to_bytes(END_BYTES)


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


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(told, "GONE_MAX", 50)
    ends = KeptEnds()
    for number in range(10_000):
        ends.add(lease := Kept(number))
        ends.remove(lease)
    assert len(ends._changed) <= 2 * 50


def test_who_asks_of_another_incarnation_is_told_all_again():
    ends = KeptEnds()
    ends.add(Kept(1))
    changes = ends.after(1000, 1000)
    assert (changes.new, changes.gone, changes.is_all) == (end_of(1), b"", True)
    assert changes.begun == changes.until == ends.number


def test_a_worker_that_keeps_more_than_it_tells_says_so(monkeypatch):
    monkeypatch.setattr(told, "ENDS_MAX", 3)
    ends, first, second = KeptEnds(), Kept(1, 2), Kept(3, 4)
    ends.add(first)
    assert ends.after(0, 0).is_all
    ends.add(second)
    assert (ends.after(0, 0).new, ends.after(0, 0).is_all) == (end_of(1) + end_of(2), False)
    ends.remove(second)
    assert ends.after(0, 0).is_all
