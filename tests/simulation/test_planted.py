"""Every planted bug is found within a thousand seeds, and named for what it is."""

import re

import pytest

from tests.simulation.scenario import simulate

from . import planted

SEEDS_MAX = 1000
"""Within which a bug must be found."""

BUGS = {
    # Safety: a byte, a block or a reference.
    planted.epoch_raised_after_the_free: (17, r"was delivered wrong: block \d+"),
    planted.epoch_of_a_kept_lease_raised_late: (25, r"was delivered wrong: block \d+"),
    planted.release_ends_a_kept_lease: (0, "kind='kept'.*nobody has revoked it"),
    planted.newest_that_is_kept_leaves_its_slot: (2, "kind='kept'.*nobody has revoked it"),
    planted.what_is_told_counts_as_settled: (0, r"was delivered wrong: block \d+"),
    planted.quarantine_skipped: (3, r"into block \d+, which is"),
    planted.release_counted_twice: (0, "no reader has given it back on every rank"),
    planted.lease_renewed_after_its_end: (0, "would not grow|TaskGroup|is not free|that is not held|leases are held"),
    planted.completion_of_a_dead_incarnation_accepted: (52, r"no chunk of read \d+ reported|was delivered wrong"),
    planted.another_incarnation_taken_for_the_one_that_died: (
        0,
        "was delivered wrong|(StaleLease|says of its open offer).*nothing explains",
    ),
    planted.first_check_left_out: (0, r"was delivered wrong: block \d+"),
    planted.fence_posted_with_the_last_chunk: (18, r"was delivered wrong: block \d+"),
    planted.read_ends_before_its_chunk: (12, "its transfer goes on|is over, and writes"),
    planted.bytes_of_a_shared_chunk_are_swapped: (0, r"writes into block \d+, which is|was delivered wrong"),
    planted.unserved_bytes_are_delivered: (1, r"was delivered wrong: block \d+"),
    planted.peer_lost_while_others_are_met_is_used: (35, "KeyError"),
    planted.slot_freed_twice: (1, "leases are held, and request.* ended with no room for more|nobody has revoked it"),
    planted.loan_of_a_repeated_block_ended_once: (1, "references were lost or given back twice"),
    planted.offered_block_taken_as_a_target: (
        1,
        "is lent and receives|writes into block|scattered into block|is on offer",
    ),
    planted.failure_told_before_quiescence: (4, r"into block \d+, which is|still the target of|twice"),
    planted.staging_buffer_given_back_when_posted: (6, r"was delivered wrong: block \d+|buffer"),
    # Liveness: something that should have happened, or should not have failed.
    planted.only_the_first_renewal_is_sent: (1, "StaleLease.*nothing explains"),
    planted.renewal_lasts_half: (0, "before the time that its readers were told"),
    planted.nobody_hears_of_the_seal: (0, "kind='open'.*after its time"),
    planted.sealed_offers_are_open: (0, "falsehood 4 was not refused"),
    planted.open_offers_are_computed_for_ever: (0, "were kept for|does not hold that"),
    planted.kept_tickets_are_not_renewed: (1, "StaleLease.*nothing explains"),
    planted.failed_chunk_stays_in_flight: (15, "nothing goes wrong any more, and"),
    planted.shared_chunk_cancelled_with_one_pull: (115, "TransferCancelled.*nothing explains"),
    planted.cancelled_offer_stays: (20, "was cancelled, and is held"),
    planted.last_resort_never_comes: (9, "does not hold that all is done|were kept for"),
    planted.budgets_never_run_out: (26, "were kept for|does not hold that"),
    planted.release_is_forgotten: (1, "has given it back"),
    planted.release_before_its_lease_is_lost: (239, "has given it back"),
    planted.first_of_two_ranks_is_released_alone: (1, "has given it back"),
    planted.lease_runs_out_late: (0, "after its time"),
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


def test_what_an_exporter_has_not_served_is_read_again(monkeypatch):
    """Of these seeds 12 finds ``unserved_bytes_are_delivered``: without the first check, only the exporter tells."""
    planted.first_check_of_a_served_read_left_out(monkeypatch)
    assert [simulate(seed).violation for seed in range(10, 15)] == [""] * 5
