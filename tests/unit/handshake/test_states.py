from typing import get_args

import pytest

from handshake.errors import LocalProtocolError
from handshake.messages import AnyMessage, Bye, Hello, Message, Ping, Publish, Refuse, Release, Renewed, Welcome
from handshake.states import TRANSITIONS, Occurrence, Received, Role, Sent, State, advance, budget_s, describe

from .helpers import LIMITS

TRIGGERS = [way(kind) for way in (Sent, Received) for kind in get_args(AnyMessage)] + list(Occurrence)


def test_the_table_is_complete():
    assert set(TRANSITIONS) == {(role, state) for role in Role for state in State}


@pytest.mark.parametrize(
    ("role", "triggers"),
    [
        (Role.CLIENT, [Sent(Hello), Received(Welcome), Sent(Publish), Received(Publish)]),
        (Role.SERVER, [Received(Hello), Sent(Welcome), Sent(Publish), Received(Publish)]),
    ],
)
def test_both_roles_pass_through_the_same_states(role, triggers):
    state = State.FRESH
    passed = [state := advance(role, state, trigger) for trigger in triggers]
    assert passed == [State.GREETED, State.WELCOMED, State.PUBLISHED, State.READY]


@pytest.mark.parametrize(("role", "state"), TRANSITIONS)
def test_what_the_table_does_not_list_is_illegal(role, state):
    for trigger in TRIGGERS:
        if trigger in TRANSITIONS[role, state]:
            assert advance(role, state, trigger) is TRANSITIONS[role, state][trigger]
        else:
            with pytest.raises(LocalProtocolError, match=f"a {role} that is {state} allows no {describe(trigger)}"):
                advance(role, state, trigger)


def test_what_one_role_may_say_when_ready_the_other_may_hear():
    def ready(role, way):
        return {trigger.message for trigger in TRANSITIONS[role, State.READY] if isinstance(trigger, way)}

    last_words = {Bye, Refuse}  # heard by answering them first, in the state that follows
    assert ready(Role.CLIENT, Sent) - last_words == ready(Role.SERVER, Received)
    assert ready(Role.SERVER, Sent) - last_words == ready(Role.CLIENT, Received)
    assert Sent(Release) not in TRANSITIONS[Role.SERVER, State.READY]
    assert Received(Renewed) not in TRANSITIONS[Role.SERVER, State.READY]


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("state", [state for state in State if state not in (State.CLOSING, State.CLOSED)])
def test_a_living_connection_may_always_end(role, state):
    assert advance(role, state, Sent(Bye)) is State.CLOSING
    assert advance(role, state, Sent(Refuse)) is State.CLOSING
    assert advance(role, state, Occurrence.LOST) is State.CLOSED


@pytest.mark.parametrize("role", Role)
def test_closing_hears_everything_and_says_nothing(role):
    rules = TRANSITIONS[role, State.CLOSING]
    assert {trigger.message for trigger in rules if isinstance(trigger, Received)} == set(Message.__subclasses__())
    assert not any(isinstance(trigger, Sent) for trigger in rules)
    assert advance(role, State.CLOSING, Received(Ping)) is State.CLOSING
    assert advance(role, State.CLOSING, Received(Bye)) is State.CLOSED


@pytest.mark.parametrize("role", Role)
def test_closed_is_the_end(role):
    assert TRANSITIONS[role, State.CLOSED] == {}


def test_each_state_has_its_deadline():
    budgets = {state: budget_s(state, LIMITS) for state in State}
    assert budgets.pop(State.CLOSED) is None
    assert budgets.pop(State.CLOSING) == LIMITS.closing_s
    assert budgets.pop(State.READY) == LIMITS.silence_s_max
    assert set(budgets.values()) == {LIMITS.handshake_s}
