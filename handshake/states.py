"""The state machine of a connection: one table, one function.

Everything that decides what may be said when is in ``TRANSITIONS``. The two roles differ only in the way that a
message travels, so both pass through the same states::

    FRESH      nothing was said
    GREETED    the client's Hello was said
    WELCOMED   the version is agreed
    PUBLISHED  our publication was sent, the peer's is awaited
    READY      leases and pings
    CLOSING    we said our last word, and wait for the peer's
    CLOSED     the end

A peer's last word is answered with ours before it is taken, so ``CLOSED`` is reached through ``CLOSING``, unless
the transport is lost. Time is no part of the table: ``budget_s`` names each state's deadline, and the connection
expires it by saying a last word.
"""

from enum import Enum, StrEnum, auto
from typing import get_args

from msgspec import Struct

from handshake.errors import LocalProtocolError
from handshake.limits import Limits
from handshake.messages import (
    AnyMessage,
    Bye,
    Hello,
    Message,
    Ping,
    Pong,
    Publish,
    Refuse,
    Release,
    Released,
    Renew,
    Renewed,
    Welcome,
)


class Role(StrEnum):
    """Which end of the connection we are."""

    CLIENT = "client"
    SERVER = "server"
    __hash__ = str.__hash__  # as that of its value, and not computed in Python for each message


class State(StrEnum):
    """How far the conversation has come."""

    FRESH = "fresh"
    GREETED = "greeted"
    WELCOMED = "welcomed"
    PUBLISHED = "published"
    READY = "ready"
    CLOSING = "closing"
    CLOSED = "closed"
    __hash__ = str.__hash__  # likewise


class Occurrence(Enum):
    """What can happen to a connection besides messages."""

    LOST = auto()
    """The transport is gone."""
    EXPIRED = auto()
    """The peer did not answer our last word in time."""


class Sent(Struct, frozen=True):
    """Our side says a message of this type."""

    message: type[Message]


class Received(Struct, frozen=True):
    """The peer says a message of this type."""

    message: type[Message]


Trigger = Sent | Received | Occurrence
Rules = dict[Trigger, State]

# Either side may leave or complain at any time, and a transport may be lost at any time.
_ANY_TIME: Rules = {
    Sent(Bye): State.CLOSING,
    Sent(Refuse): State.CLOSING,
    Occurrence.LOST: State.CLOSED,
}

_PINGS: Rules = {
    Sent(Ping): State.READY,
    Received(Ping): State.READY,
    Sent(Pong): State.READY,
    Received(Pong): State.READY,
}

# After our last word only the peer's counts; what it said before it heard ours is let pass.
_CLOSING: Rules = {
    **{Received(message): State.CLOSING for message in get_args(AnyMessage)},
    Received(Bye): State.CLOSED,
    Received(Refuse): State.CLOSED,
    Occurrence.LOST: State.CLOSED,
    Occurrence.EXPIRED: State.CLOSED,
}

_CLIENT: dict[State, Rules] = {
    State.FRESH: {Sent(Hello): State.GREETED, **_ANY_TIME},
    State.GREETED: {Received(Welcome): State.WELCOMED, **_ANY_TIME},
    State.WELCOMED: {Sent(Publish): State.PUBLISHED, **_ANY_TIME},
    State.PUBLISHED: {Received(Publish): State.READY, **_ANY_TIME},
    State.READY: {
        Sent(Release): State.READY,
        Sent(Renew): State.READY,
        Received(Released): State.READY,
        Received(Renewed): State.READY,
        **_PINGS,
        **_ANY_TIME,
    },
    State.CLOSING: _CLOSING,
    State.CLOSED: {},
}

_SERVER: dict[State, Rules] = {
    State.FRESH: {Received(Hello): State.GREETED, **_ANY_TIME},
    State.GREETED: {Sent(Welcome): State.WELCOMED, **_ANY_TIME},
    State.WELCOMED: {Sent(Publish): State.PUBLISHED, **_ANY_TIME},
    State.PUBLISHED: {Received(Publish): State.READY, **_ANY_TIME},
    State.READY: {
        Received(Release): State.READY,
        Received(Renew): State.READY,
        Sent(Released): State.READY,
        Sent(Renewed): State.READY,
        **_PINGS,
        **_ANY_TIME,
    },
    State.CLOSING: _CLOSING,
    State.CLOSED: {},
}

TRANSITIONS: dict[tuple[Role, State], Rules] = {
    (role, state): rules
    for role, table in ((Role.CLIENT, _CLIENT), (Role.SERVER, _SERVER))
    for state, rules in table.items()
}


def advance(role: Role, state: State, trigger: Trigger) -> State:
    """Return the state after ``trigger``.

    Raises:
        LocalProtocolError: the trigger is illegal in this state.
    """
    try:
        return TRANSITIONS[role, state][trigger]
    except KeyError:
        raise LocalProtocolError(f"a {role} that is {state} allows no {describe(trigger)}") from None


def describe(trigger: Trigger) -> str:
    """Name a trigger in an error text or a diagram: ``received Hello``, ``lost``."""
    if isinstance(trigger, Occurrence):
        return trigger.name.lower()
    return f"{type(trigger).__name__.lower()} {trigger.message.__name__}"


def budget_s(state: State, limits: Limits) -> float | None:
    """Return how long a connection may stay as it is, in seconds, or None if forever.

    A handshake has one budget, counted from the start of the connection. ``READY`` counts from the last sign of
    life, and ``CLOSING`` from our last word.
    """
    match state:
        case State.FRESH | State.GREETED | State.WELCOMED | State.PUBLISHED:
            return limits.handshake_s
        case State.READY:
            return limits.silence_s_max
        case State.CLOSING:
            return limits.closing_s
        case State.CLOSED:
            return None
