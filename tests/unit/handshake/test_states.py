from typing import get_args

import pytest

from handshake.errors import LocalProtocolError
from handshake.messages import AnyMessage, Bye, Hello, Message, Ping, Publish, Refuse, Release, Renewed, Welcome
from handshake.states import TRANSITIONS, Occurrence, Progress, Received, Role, Sent, advance, budget_s, describe
from tests.helpers.loops import looped

from .helpers import LIMITS

TRIGGERS = [way(kind) for way in (Sent, Received) for kind in get_args(AnyMessage)] + list(Occurrence)


def test_the_table_is_complete():
    assert set(TRANSITIONS) == {(role, state) for role in Role for state in Progress}


@pytest.mark.parametrize(
    ("role", "triggers"),
    [
        (Role.CLIENT, [Sent(Hello), Received(Welcome), Sent(Publish), Received(Publish)]),
        (Role.SERVER, [Received(Hello), Sent(Welcome), Sent(Publish), Received(Publish)]),
    ],
)
def test_both_roles_pass_through_the_same_states(role, triggers):
    state = Progress.FRESH
    passed = [state := advance(role, state, trigger) for trigger in triggers]
    assert passed == [Progress.GREETED, Progress.WELCOMED, Progress.PUBLISHED, Progress.READY]


@looped("role, state", TRANSITIONS)
def test_what_the_table_does_not_list_is_illegal(role, state):
    for trigger in TRIGGERS:
        if trigger in TRANSITIONS[role, state]:
            assert advance(role, state, trigger) is TRANSITIONS[role, state][trigger]
        else:
            with pytest.raises(LocalProtocolError, match=f"a {role} that is {state} allows no {describe(trigger)}"):
                advance(role, state, trigger)


def test_what_one_role_may_say_when_ready_the_other_may_hear():
    def ready(role, way):
        return {trigger.message for trigger in TRANSITIONS[role, Progress.READY] if isinstance(trigger, way)}

    last_words = {Bye, Refuse}  # heard by answering them first, in the state that follows
    assert ready(Role.CLIENT, Sent) - last_words == ready(Role.SERVER, Received)
    assert ready(Role.SERVER, Sent) - last_words == ready(Role.CLIENT, Received)
    assert Sent(Release) not in TRANSITIONS[Role.SERVER, Progress.READY]
    assert Received(Renewed) not in TRANSITIONS[Role.SERVER, Progress.READY]


@looped("role", Role)
@looped("state", [state for state in Progress if state not in (Progress.CLOSING, Progress.CLOSED)])
def test_a_living_connection_may_always_end(role, state):
    assert advance(role, state, Sent(Bye)) is Progress.CLOSING
    assert advance(role, state, Sent(Refuse)) is Progress.CLOSING
    assert advance(role, state, Occurrence.LOST) is Progress.CLOSED


@pytest.mark.parametrize("role", Role)
def test_closing_hears_everything_and_says_nothing(role):
    rules = TRANSITIONS[role, Progress.CLOSING]
    assert {trigger.message for trigger in rules if isinstance(trigger, Received)} == set(Message.__subclasses__())
    assert not any(isinstance(trigger, Sent) for trigger in rules)
    assert advance(role, Progress.CLOSING, Received(Ping)) is Progress.CLOSING
    assert advance(role, Progress.CLOSING, Received(Bye)) is Progress.CLOSED


@pytest.mark.parametrize("role", Role)
def test_closed_is_the_end(role):
    assert TRANSITIONS[role, Progress.CLOSED] == {}


def test_each_state_has_its_deadline():
    budgets = {state: budget_s(state, LIMITS) for state in Progress}
    assert budgets.pop(Progress.CLOSED) is None
    assert budgets.pop(Progress.CLOSING) == LIMITS.closing_s
    assert budgets.pop(Progress.READY) == LIMITS.silence_s_max
    assert set(budgets.values()) == {LIMITS.handshake_s}
