"""The table of a leg's life: what it knows, and what it refuses."""

from typing import get_args

import pytest

from kvflow.transfer.states import TRANSITIONS, IllegalTransition, LegEvent, LegState, advance


def test_every_transition_is_made():
    for (state, event), after in TRANSITIONS.items():
        assert advance(state, event) == after


def test_everything_else_is_refused_with_state_and_event():
    for state in get_args(LegState):
        for event in get_args(LegEvent):
            if (state, event) not in TRANSITIONS:
                with pytest.raises(IllegalTransition, match=f"{state} cannot be {event}"):
                    advance(state, event)


def test_every_state_can_be_reached_and_only_death_is_final():
    reached, before = {"queued"}, set()
    while reached != before:
        before = set(reached)
        reached |= {after for (state, _), after in TRANSITIONS.items() if state in before}
    assert reached == set(get_args(LegState))
    assert reached - {state for state, _ in TRANSITIONS} == {"dead"}


def test_a_failed_leg_is_never_delivered():
    assert [after for (state, _), after in TRANSITIONS.items() if state == "draining"] == ["dead"]
