"""Destination blocks, step by step. The state machine in tests/properties checks the law after every step."""

import numpy as np
import pytest

from kvflow.cache.blocks import BlockAccount
from kvflow.cache.destinations import DestinationLedger, Quarantined
from kvflow.errors import BlockIdsInvalid


def ids(*lists):
    return tuple(np.array(numbers, np.int64) for numbers in lists)


@pytest.fixture
def ledger():
    """Groups 0 and 1 overlay the same bytes, group 2 has its own."""
    return DestinationLedger(BlockAccount([0, 0, 2], 10))


def test_a_block_of_an_overlaid_group_is_the_same_block(ledger):
    ledger.take(1, ids([3], [4], [3]))
    for taken, group in ((ids([4], [], []), 0), (ids([], [3], []), 1), (ids([], [], [3]), 2)):
        with pytest.raises(BlockIdsInvalid, match="still the target of another pull") as caught:
            ledger.take(2, taken)
        assert caught.value.group == group
    ledger.take(2, ids([], [], [4]))
    ledger.check()


def test_a_pull_takes_all_or_none(ledger):
    ledger.take(1, ids([3], [], []))
    with pytest.raises(BlockIdsInvalid):
        ledger.take(2, ids([], [5, 3], [7]))
    ledger.take(3, ids([5], [], [7]))
    assert len(ledger) == 2
    ledger.check()


def test_absent_blocks_are_not_taken(ledger):
    ledger.take(1, ids([-1, 9], [], [-1]))
    ledger.take(2, ids([-1], [-1], [9]))
    ledger.check()


def test_quarantine_keeps_blocks_and_says_why(ledger):
    ledger.take(1, ids([3, -1], [4], []))
    assert ledger.quarantined() == []
    ledger.quarantine(1, "peer_lost", 12.0)
    assert ledger.quarantined() == [Quarantined(1, "peer_lost", 12.0, 2)]
    with pytest.raises(BlockIdsInvalid):
        ledger.take(2, ids([3], [], []))
    ledger.give_back(1)
    assert ledger.quarantined() == []
    ledger.take(2, ids([3], [4], []))
