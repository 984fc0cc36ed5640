"""Which lease is found by a digest that several have, when one of them ends."""

from math import inf
from types import SimpleNamespace

from kvflow.leases.held import Index, Lease


class Unsearched(dict):
    """Digests of a lease that must not be looked at: there may be thousands of leases."""

    def __iter__(self):
        raise AssertionError("all leases were searched")


def lease_of(slot, *digests, found_by_all=True):
    return Lease(
        grant=SimpleNamespace(slot=slot),
        epoch=slot + 1,
        admitted_at=0.0,
        ends_at=inf,
        ends_by_readers=not found_by_all,
        blocks=(),
        served=(),
        settled=0,
        sealed=True,
        told=set(),
        digests=digests,
        found_by_all=found_by_all,
    )


def test_the_turn_before_is_found_again_without_a_search():
    index, first, second = Index(), lease_of(0, b"a", b"b"), lease_of(1, b"a", b"b", b"c")
    for each in (first, second):
        index.add(each)
    first.digests = Unsearched.fromkeys(first.digests)
    index.remove(second)
    assert index.find([b"a", b"b", b"c"]) == (first, 2)


def test_if_the_turn_before_has_ended_another_one_is_found():
    index = Index()
    first, second, third = lease_of(0, b"a"), lease_of(1, b"a", b"b"), lease_of(2, b"a", b"b", b"c")
    for each in (first, second, third):
        index.add(each)
    index.remove(second)
    index.remove(third)
    index.add(lease_of(1, b"x"))  # its slot has gone to another
    assert index.find([b"a", b"b", b"c"]) == (first, 1)


def test_a_digest_that_a_lease_has_twice_is_forgotten_with_it():
    """An engine's digests may not be chained."""
    index, first, second = Index(), lease_of(0, b"a", b"a"), lease_of(1, b"b", b"a", b"b")
    index.add(first)
    index.add(second)
    index.remove(second)
    assert (index.find([b"a"]), index.find([b"b"])) == ((first, 1), None)
    index.remove(first)
    assert index.find([b"a"]) is None


def test_of_equal_ones_a_question_is_given_the_oldest():
    index = Index()
    kept = [lease_of(slot, b"a") for slot in range(2)]
    offers = [lease_of(slot, b"a", found_by_all=False) for slot in range(2, 4)]
    for each in kept + offers:
        index.add(each)
    found = [index.find([b"a"], question) for question in (None, "first", "second", "third")]
    assert found == [(each, 1) for each in (kept[1], *offers, kept[1])]
