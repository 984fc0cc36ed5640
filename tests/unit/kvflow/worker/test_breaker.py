"""A dead address costs a few attempts and then nothing; when it may live again, one finds out for all."""

import pytest

from kvflow.worker.breaker import (
    BACKOFF_S,
    BACKOFF_S_MAX,
    FAILURES_MAX,
    TRANSITIONS,
    TRIED_MAX,
    Breaker,
    IllegalTransition,
    advance,
    pause_s,
)

STATES = {"closed", "open", "probing"}
EVENTS = {"answered", "failed", "failed_too_often", "probed", "abandoned"}


@pytest.fixture
def opened():
    """A breaker that has just opened, at time 0."""
    breaker = Breaker()
    for _ in range(FAILURES_MAX):
        breaker.failed("p", 0.0, 0.0)
    return breaker


def test_the_table_is_complete_but_for_what_cannot_be():
    assert {(state, event) for state in STATES for event in EVENTS} - TRANSITIONS.keys() == {
        ("closed", "probed"),  # who may dial anyway is no probe
        ("probing", "probed"),  # there is one at a time
    }
    assert set(TRANSITIONS.values()) == STATES


def test_an_illegal_event_changes_nothing():
    with pytest.raises(IllegalTransition, match="a breaker that is closed cannot be probed"):
        advance("closed", "probed")


def test_it_opens_with_the_last_of_some_failures_in_a_row():
    breaker = Breaker()
    for _ in range(3):
        for _ in range(FAILURES_MAX - 1):
            breaker.failed("p", 0.0, 0.0)
            assert breaker.ask("p", 0.0)
        breaker.answered()  # in a row, or they do not count
    for _ in range(FAILURES_MAX):
        assert breaker.state == "closed"
        breaker.failed("p", 0.0, 0.0)
    assert breaker.state == "open"
    assert not breaker.ask("p", 0.0)


def test_one_probe_at_a_time_when_it_is_due(opened):
    due = BACKOFF_S / 2
    assert not opened.ask("p", due - 0.001)
    assert opened.ask("p", due)
    assert opened.state == "probing"
    assert not opened.ask("p", due)
    opened.answered()
    assert opened.state == "closed"
    assert opened.ask("p", due)
    assert opened.failures == 0


def test_a_probe_that_fails_waits_longer(opened):
    pauses, now = [], 0.0
    for _ in range(8):
        pauses.append(opened.retry_at - now)
        now = opened.retry_at
        assert opened.ask("p", now)
        opened.failed("p", now, 0.0)
        assert opened.state == "open"
    assert pauses[:3] == [BACKOFF_S / 2, BACKOFF_S, 2 * BACKOFF_S]
    assert pauses[-1] == BACKOFF_S_MAX / 2


def test_a_peer_that_was_not_tried_here_is_a_reason_to_look(opened):
    assert not opened.ask("p", 0.0)
    assert opened.ask("its successor", 0.0)
    assert opened.state == "probing"
    assert opened.ask("the successor's successor", 0.0), "an old peer's probe must not hold up a new one"
    assert not opened.ask("p", 0.0)
    opened.failed("its successor", 0.0, 0.0)
    assert not opened.ask("its successor", 0.0)
    assert not opened.ask("p", 0.0)


def test_what_was_tried_is_bounded(opened):
    for index in range(3 * TRIED_MAX):
        opened.failed(f"peer {index}", 0.0, 0.0)
    assert len(opened.tried) == TRIED_MAX
    assert not opened.ask(f"peer {3 * TRIED_MAX - 1}", 0.0)


@pytest.mark.parametrize("event", ["answered", "failed"])
def test_an_attempt_from_before_it_opened_may_still_end(opened, event):
    if event == "answered":
        opened.answered()
        assert opened.state == "closed"
    else:
        opened.failed("p", 1.0, 0.0)
        assert opened.state == "open"
        assert opened.retry_at > 1.0


def test_pauses_double_up_to_a_bound_and_half_of_each_is_chance():
    assert [pause_s(attempt, 1.0, 5.0, 0.0) for attempt in (-1, 0, 1, 2, 3, 10**6)] == [0.5, 0.5, 1.0, 2.0, 2.5, 2.5]
    assert [pause_s(0, 1.0, 5.0, chance) for chance in (0.0, 0.5, 1.0)] == [0.5, 0.75, 1.0]
