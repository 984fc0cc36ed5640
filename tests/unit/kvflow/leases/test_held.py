"""Which lease is found by a digest that several have, when one of them ends."""

from math import inf
from types import SimpleNamespace

from msgspec.structs import replace

from kvflow.leases.held import Index, Lease, Names
from tests.helpers.loops import looped


class Unsearched(dict):
    """Digests of a lease that must not be looked at: there may be thousands of leases."""

    def __iter__(self):
        raise AssertionError("all leases were searched")


def lease_of(slot, *digests, found_by_all=True, whole=None):
    return Lease(
        grant=SimpleNamespace(slot=slot),
        epoch=slot + 1,
        admitted_at=0.0,
        ends_at=inf,
        blocks=(),
        served=(),
        settled=0,
        sealed=True,
        told=set(),
        names=Names(for_all=digests, whole=whole) if found_by_all else Names(for_one=digests),
    )


def test_the_turn_before_is_found_again_without_a_search():
    index, first, second = Index(), lease_of(0, b"a", b"b"), lease_of(1, b"a", b"b", b"c")
    for each in (first, second):
        index.add(each)
    first.names = replace(first.names, for_all=Unsearched.fromkeys(first.names.for_all))
    index.remove(second)
    assert index.find([b"a", b"b", b"c"]) == (first, 2)


def test_a_digest_that_a_lease_has_twice_is_forgotten_with_it():
    """An engine's digests may not be chained."""
    index, first, second = Index(), lease_of(0, b"a", b"a"), lease_of(1, b"b", b"a", b"b")
    index.add(first)
    index.add(second)
    index.remove(second)
    assert (index.find([b"a"]), index.find([b"b"])) == ((first, 1), None)
    index.remove(first)
    assert index.find([b"a"]) is None


WINDOWED = [
    ("abcdef", "f", "abcdef", 6),
    ("abcdef", "f", "abcde", None),  # each is asked for, so the end is not behind the last
    ("abcdef", "cd", "abcdefgh", 4),
    ("abcdef", "cd", "abc", 3),
    ("abcdef", "cd", "ab", None),
    ("abcdef", "cd", "bd", 2),
    ("abcdef", "c", "bdf", 1),  # between two of the question
    ("abcdef", "e", "bd", 2),  # behind the last one, before the next that is left out
    ("abcdef", "f", "bd", None),
    ("abcdef", "a", "bdf", None),  # before the first one
    ("abcdef", "", "abcdef", None),
    ("abcdef", "cd", "zd", 2),  # no chain: of somebody who searches
    ("abcdef", "cd", "dc", None),
]


@looped("held, whole, asked, count", WINDOWED)
def test_a_lease_is_found_by_where_its_windows_are_whole(held, whole, asked, count):
    index, lease = Index(), lease_of(0, *held, whole=(*whole,))
    index.add(lease)
    assert index.find([*asked]) == (None if count is None else (lease, count))
    index.remove(lease)
    assert index.find([*asked]) is None
    assert not index._whole
