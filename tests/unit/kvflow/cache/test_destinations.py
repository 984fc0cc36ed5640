"""Destination blocks, step by step. The state machine in tests/properties checks the law after every step."""

import numpy as np
import pytest

from kvflow.cache.blocks import BlockAccount
from kvflow.cache.destinations import DestinationLedger, Quarantined, Standing
from kvflow.errors import BlockIdsInvalid
from tests.counting import calls_of


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


def test_what_is_in_quarantine_is_summed_up_by_age():
    ledger = DestinationLedger(BlockAccount([0], 20))
    assert ledger.standing(0.0, 5.0) == Standing()
    for pull_id, since in enumerate((1.0, 2.0, 2.0, 9.0)):
        ledger.take(pull_id, ids([3 * pull_id, 3 * pull_id + 1]))
        ledger.quarantine(pull_id, "why", since)
    assert ledger.standing(6.0, 5.0) == Standing(num_blocks=8, lasting_blocks=0, since=1.0)
    assert ledger.standing(7.5, 5.0) == Standing(num_blocks=8, lasting_blocks=6, since=1.0)
    assert [entry.pull_id for entry in ledger.quarantined()] == [0, 1, 2, 3]
    for pull_id, left in ((1, (6, 4, 1.0)), (0, (4, 2, 2.0)), (3, (2, 2, 2.0)), (2, (0, 0, None))):
        ledger.give_back(pull_id)
        assert ledger.standing(8.0, 5.0) == Standing(*left)
    ledger.check()


def test_summing_up_does_not_go_through_all_that_is_in_quarantine():
    def cost(count):
        ledger = DestinationLedger(BlockAccount([0], count))
        for pull_id in range(count):
            ledger.take(pull_id, ids([pull_id]))
            ledger.quarantine(pull_id, "why", 0.0)
        ledger.standing(6.0, 5.0)
        return calls_of(lambda: ledger.standing(6.1, 5.0))

    assert cost(100) == cost(10)
