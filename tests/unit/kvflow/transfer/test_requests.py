"""Batches of several pulls ascend by source, whoever's pairs they are."""

from kvflow.transfer.requests import join_pairs

from .helpers import unit_pairs


def test_one_slice_stays_as_it_is():
    joined = join_pairs([(unit_pairs([1, 2, 3], [7, 8, 9]), 1, 3)])
    assert (joined.source.tolist(), joined.target.tolist()) == ([2, 3], [8, 9])


def test_slices_are_merged_by_source():
    joined = join_pairs([(unit_pairs([1, 5, 6], [7, 8, 9]), 0, 2), (unit_pairs([0, 1, 4], [1, 2, 3]), 1, 3)])
    assert joined.source.tolist() == [1, 1, 4, 5]
    assert joined.target.tolist() == [7, 2, 3, 8]
