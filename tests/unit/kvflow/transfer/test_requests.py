"""What a batch reads of several pulls, and in which order."""

from kvflow.transfer.requests import LeaseShare, join_pairs, join_shares

from .helpers import unit_pairs


def test_one_slice_stays_as_it_is():
    joined = join_pairs([(unit_pairs([1, 2, 3], [7, 8, 9]), 1, 3)])
    assert (joined.source.tolist(), joined.target.tolist()) == ([2, 3], [8, 9])


def test_slices_stay_together_so_that_two_readers_of_the_same_blocks_each_read_runs():
    joined = join_pairs([(unit_pairs([1, 5, 6], [7, 8, 9]), 1, 3), (unit_pairs([4, 5, 6], [1, 2, 3]), 0, 3)])
    assert joined.source.tolist() == [5, 6, 4, 5, 6]
    assert joined.target.tolist() == [8, 9, 1, 2, 3]


def test_neighbours_of_one_lease_become_one_share():
    slices = [(3, 70, 2), (3, 70, 4), (5, 70, 1), (3, 70, 1), (3, 71, 8), (3, 71, 1)]
    shares = [LeaseShare(3, 70, 6), LeaseShare(5, 70, 1), LeaseShare(3, 70, 1), LeaseShare(3, 71, 9)]
    assert join_shares(LeaseShare(*each) for each in slices) == tuple(shares)
    of_two_tickets = [LeaseShare(3, 70, 2, b"a"), LeaseShare(3, 70, 4, b"b")]
    assert join_shares(of_two_tickets) == tuple(of_two_tickets)
