"""The state machine of a connection: one table, one function.

``TRANSITIONS`` decides what may be sent when. The roles differ only in the direction of a message::

    FRESH      nothing was sent
    GREETED    the client's Hello was sent
    WELCOMED   the version is agreed
    PUBLISHED  our publication was sent, the peer's is awaited
    READY      leases, questions and pings
    CLOSING    we said our last word, and wait for the peer's
    CLOSED     the end

A peer's last word is answered with ours before it is taken, so ``CLOSED`` is reached through ``CLOSING``, unless the
transport is lost. ``budget_s`` has each state's deadline, which the connection expires by sending a last word.
"""

from enum import Enum, StrEnum, auto
from typing import get_args

from msgspec import Struct

from handshake.errors import LocalProtocolError
from handshake.limits import Limits
from handshake.messages import (
    Answer,
    AnyMessage,
    Ask,
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
    """Which end of a connection we are."""

    CLIENT = "client"
    SERVER = "server"
    __hash__ = str.__hash__  # as that of its value, and not computed in Python for each message


class Progress(StrEnum):
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

    LOST = auto()  # the transport is gone
    EXPIRED = auto()  # the peer did not answer our last word in time


class Sent(Struct, frozen=True):
    """We send a message of this type."""

    message: type[Message]


class Received(Struct, frozen=True):
    """The peer sends a message of this type."""

    message: type[Message]


Trigger = Sent | Received | Occurrence
Rules = dict[Trigger, Progress]

# Either side may leave or complain at any time, and a transport may be lost at any time.
_ANY_TIME: Rules = {
    Sent(Bye): Progress.CLOSING,
    Sent(Refuse): Progress.CLOSING,
    Occurrence.LOST: Progress.CLOSED,
}

_PINGS: Rules = {
    Sent(Ping): Progress.READY,
    Received(Ping): Progress.READY,
    Sent(Pong): Progress.READY,
    Received(Pong): Progress.READY,
}

# After our last word only the peer's counts; what it sent before it received ours is ignored.
_CLOSING: Rules = {
    **{Received(message): Progress.CLOSING for message in get_args(AnyMessage)},
    Received(Bye): Progress.CLOSED,
    Received(Refuse): Progress.CLOSED,
    Occurrence.LOST: Progress.CLOSED,
    Occurrence.EXPIRED: Progress.CLOSED,
}

_CLIENT: dict[Progress, Rules] = {
    Progress.FRESH: {Sent(Hello): Progress.GREETED, **_ANY_TIME},
    Progress.GREETED: {Received(Welcome): Progress.WELCOMED, **_ANY_TIME},
    Progress.WELCOMED: {Sent(Publish): Progress.PUBLISHED, **_ANY_TIME},
    Progress.PUBLISHED: {Received(Publish): Progress.READY, **_ANY_TIME},
    Progress.READY: {
        Sent(Release): Progress.READY,
        Sent(Renew): Progress.READY,
        Sent(Ask): Progress.READY,
        Received(Released): Progress.READY,
        Received(Renewed): Progress.READY,
        Received(Answer): Progress.READY,
        **_PINGS,
        **_ANY_TIME,
    },
    Progress.CLOSING: _CLOSING,
    Progress.CLOSED: {},
}

_SERVER: dict[Progress, Rules] = {
    Progress.FRESH: {Received(Hello): Progress.GREETED, **_ANY_TIME},
    Progress.GREETED: {Sent(Welcome): Progress.WELCOMED, **_ANY_TIME},
    Progress.WELCOMED: {Sent(Publish): Progress.PUBLISHED, **_ANY_TIME},
    Progress.PUBLISHED: {Received(Publish): Progress.READY, **_ANY_TIME},
    Progress.READY: {
        Received(Release): Progress.READY,
        Received(Renew): Progress.READY,
        Received(Ask): Progress.READY,
        Sent(Released): Progress.READY,
        Sent(Renewed): Progress.READY,
        Sent(Answer): Progress.READY,
        **_PINGS,
        **_ANY_TIME,
    },
    Progress.CLOSING: _CLOSING,
    Progress.CLOSED: {},
}

TRANSITIONS: dict[tuple[Role, Progress], Rules] = {
    (role, state): rules
    for role, table in ((Role.CLIENT, _CLIENT), (Role.SERVER, _SERVER))
    for state, rules in table.items()
}


def advance(role: Role, state: Progress, trigger: Trigger) -> Progress:
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


def budget_s(state: Progress, limits: Limits) -> float | None:
    """Return the seconds that a connection may stay in a state, or None if forever.

    A handshake has one budget, from the start of the connection. ``READY`` counts from the peer's last message,
    ``CLOSING`` from our last word.
    """
    match state:
        case Progress.FRESH | Progress.GREETED | Progress.WELCOMED | Progress.PUBLISHED:
            return limits.handshake_s
        case Progress.READY:
            return limits.silence_s_max
        case Progress.CLOSING:
            return limits.closing_s
        case Progress.CLOSED:
            return None
