"""Which kept lease is found by a digest, when another that has it ends."""

from math import inf
from types import SimpleNamespace

from kvflow.leases.held import Index, Lease


class Unsearched(dict):
    """Leases by slot, which must not be looked at one by one: there may be thousands."""

    def values(self):
        raise AssertionError("all leases were searched")


def kept(slot, *digests):
    return Lease(SimpleNamespace(slot=slot, kind="kept"), slot + 1, 0.0, inf, digests=digests)


def test_the_turn_before_is_found_again_without_a_search():
    index, first, second = Index(), kept(0, b"a", b"b"), kept(1, b"a", b"b", b"c")
    for each in (first, second):
        index.add(each)
    index.remove(second, Unsearched({0: first}))
    assert index.find([b"a", b"b", b"c"]) == (first, 2)


def test_if_the_turn_before_has_ended_another_one_is_found():
    index = Index()
    first, second, third = kept(0, b"a"), kept(1, b"a", b"b"), kept(2, b"a", b"b", b"c")
    for each in (first, second, third):
        index.add(each)
    index.remove(second, {0: first, 2: third})
    index.remove(third, {0: first, 1: kept(1, b"x")})  # its slot has gone to another
    assert index.find([b"a", b"b", b"c"]) == (first, 1)
