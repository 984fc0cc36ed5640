"""The table of a rank's life, and what a pull knows of its time."""

from typing import get_args

from kvflow.leases.tickets import LeaseName
from kvflow.reads.contract import RankRead
from kvflow.reads.pulls import (
    TRANSITIONS,
    Pull,
    RankState,
    SourceRank,
)


def test_every_state_can_be_reached_and_only_death_is_final():
    reached, before = {"reading"}, set()
    while reached != before:
        before = set(reached)
        reached |= {after for (state, _), after in TRANSITIONS.items() if state in before}
    assert reached == set(get_args(RankState))
    assert reached - {state for state, _ in TRANSITIONS} == {"dead"}


def test_a_failed_rank_is_never_delivered():
    assert [after for (state, _), after in TRANSITIONS.items() if state == "draining"] == ["dead"]


def pull_of(*started_at):
    """A pull that was submitted at 1.0, with one rank for each start of a read; 0.0: it has not begun."""
    pull = Pull(1, "r", 1.0, (), 100)
    pull.ranks = tuple(
        SourceRank(1, RankRead(read_id, "p", LeaseName(0, 7), (), started_at=start), 1.0, 2.0)
        for read_id, start in enumerate(started_at)
    )
    return pull


def test_a_pull_that_has_not_begun_has_only_waited():
    assert pull_of(0.0, 0.0).reading_s(3.0) == {"queue": 2.0}


def test_a_pull_that_is_on_the_wire_has_no_fence_yet():
    timings_s = pull_of(0.0, 2.5).reading_s(4.0)
    assert timings_s == {"queue": 1.5, "bind": 0.0, "post": 0.0, "wire": 1.5, "scatter": 0.0, "fence": 0.0}
