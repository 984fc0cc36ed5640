"""Conversations of a member that lies: what it says is valid for a while, then not."""

import time
from functools import partial

import msgspec

from handshake.codec import FORMAT
from handshake.connection import Conversation
from handshake.limits import DEFAULT_LIMITS
from handshake.messages import Ask, LeaseRef, Ping, Release, Renew
from handshake.states import Role
from tests.unit.handshake.helpers import CONSUMED, CONSUMER, EXAMPLES, frames_of

from .mutations import Mutator

SEEDS = {name: frames_of(message)[0] for name, message in EXAMPLES.items()}
EVERY = tuple(SEEDS.values())

FRAMES_MAX = 100
"""Of one conversation that break nothing."""


class Script(msgspec.Struct, frozen=True):
    """What one connection sends."""

    messages: list[list[bytes]]  # lists of frames, in order; the last ends the connection
    mutated: int  # how many of the messages are mutated


def conversation(seed):
    """Draw one. Everything before its last message is allowed, so that a listener judges every one of them.

    The last one is either what a listener must refuse, or a goodbye.
    """
    mutator = Mutator(seed)
    # What a listener would say of it, without one: the same class, and another instance.
    judge = Conversation(Role.SERVER, CONSUMER, CONSUMED, limits=DEFAULT_LIMITS, now=time.monotonic())
    messages, mutated = [], 0
    for frame in (SEEDS["hello"], SEEDS["publish"]):
        message, strange = _opening(mutator, frame)
        messages.append(message)
        mutated += strange
        judge.receive(message, time.monotonic())
        if judge.ending is not None:
            return Script(messages, mutated)
    for _ in range(mutator.draw.randrange(FRAMES_MAX)):
        message = [strange_but_valid(mutator)] if mutator.draw.random() < 0.96 else broken(mutator)
        messages.append(message)
        mutated += 1
        judge.receive(message, time.monotonic())
        judge.take_events()
        if judge.ending is not None:
            return Script(messages, mutated)
    messages.append([SEEDS["bye"]])
    return Script(messages, mutated)


def _opening(mutator, frame):
    if mutator.draw.random() < 0.9:
        return [frame], False
    return broken(mutator, frame), True


def broken(mutator, frame=None):
    """Draw a message that is most probably not one."""
    draw = mutator.draw
    frame = draw.choice(EVERY) if frame is None else frame
    made = mutator.of_packed(frame[1:], draw.choice(EVERY)[1:])
    made = (draw.randbytes(1) if draw.random() < 0.03 else FORMAT) + made
    return [made, made] if draw.random() < 0.02 else [made]


def strange_but_valid(mutator):
    """Draw a message in words that no worker uses: any numbers, fields that nobody knows, any order."""
    draw = mutator.draw
    fields = msgspec.to_builtins(draw.choice((_about_nothing(draw), _about_leases(draw))))
    items = list(fields.items())
    if draw.random() < 0.5:
        items.append((draw.choice(("x", "é", "Type", "lease", "a" * 300)), mutator.of_value([1, {"a": b"x"}])))
    if draw.random() < 0.5:
        draw.shuffle(items)
    return FORMAT + msgspec.msgpack.encode(dict(items))


def _about_nothing(draw):
    if draw.random() < 0.5:
        return Ping(nonce=draw.getrandbits(63))
    return Ask(nonce=draw.getrandbits(63), question=draw.randbytes(draw.choice((0, 1, 30, 3000))))


def _about_leases(draw):
    kind = draw.choice((partial(Release, read=draw.random() < 0.5), Renew))
    bits = draw.choice((1, 20, 40, 63))
    slot = draw.choice((0, 1, 2**31, draw.getrandbits(30)))
    leases = [
        LeaseRef(slot=slot, epoch=draw.getrandbits(bits))
        for _ in range(draw.choice((1, 1, 1, 1, 2, 3, 3, 30) if bits > 40 else (1, 1, 2)))
    ]
    return kind(leases=tuple(leases))
