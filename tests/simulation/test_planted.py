"""Every planted bug is found within a thousand seeds, and named for what it is."""

import re

import pytest

from kvflow.testing.scenario import simulate

from . import planted

SEEDS_MAX = 1000
"""Within which a bug must be found."""

BUGS = {
    planted.epoch_raised_after_the_free: (0, r"was delivered wrong: block \d+"),
    planted.quarantine_skipped: (1, r"writes into block \d+, which is"),
    planted.release_counted_twice: (1, "no reader has given it back on every rank"),
    planted.lease_renewed_after_its_end: (0, "would not grow|TaskGroup|is not free|that is not held|left Snapshot"),
    planted.completion_of_a_dead_incarnation_accepted: (7, r"was delivered wrong: block \d+"),
    planted.another_incarnation_taken_for_the_one_that_died: (1, "was delivered wrong|was called stale"),
    planted.window_not_given_back_on_failure: (2, "room in a window was lost"),
    planted.look_before_the_read_left_out: (1, r"was delivered wrong: block \d+"),
    planted.peer_lost_while_others_are_met_is_used: (10, "KeyError"),
}
"""Bug -> the first seed that is known to find it, and what is found. A change of the library may move the seed."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant, monkeypatch):
    first, words = BUGS[plant]
    plant(monkeypatch)
    violations = (simulate(seed).violation for seed in range(first, SEEDS_MAX))
    found = next(filter(None, violations), "")
    assert re.search(words, found), found
