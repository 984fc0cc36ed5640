"""What is done to victims, and how pulls may end because of it.

A fault is an asynchronous context manager: the harm is done when it is entered, and over when it is left. Pulls have
begun before, and more begin meanwhile.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from msgspec import Struct

from .engine import NOT_HELD, RIGHT

HELD_BACK_S = 0.05
"""Longest wait of a message of a slow control channel. There are some ten of them in a pull from a new peer."""

HARMLESS = frozenset({RIGHT})
STALE = HARMLESS | {"stale_lease", NOT_HELD}
LOST = STALE | {"peer_lost", "peer_unavailable"}
HUNG = LOST | {"deadline_exceeded"}
SHUT = HUNG | {"authentication_failed"}
"""A connection that ends twice in a row within the encryption handshake, without a word: so does a server that cannot
decrypt what we say, and nobody can tell the two apart."""


class Fault(Struct, frozen=True, kw_only=True):
    """One kind of harm.

    Attributes:
        name: of it.
        strike: takes the victim and a source of chance.
        ends: how pulls from the victim, or by it, may end.
        brief: whether it is over within about a second.
    """

    name: str
    strike: Callable[..., AbstractAsyncContextManager[None]]
    ends: frozenset[str]
    brief: bool = True


@asynccontextmanager
async def killed(victim, _rng):
    victim.node.kill()
    yield
    await victim.restart()


@asynccontextmanager
async def stopped(victim, rng):
    victim.node.stop()
    try:
        yield
        await asyncio.sleep(rng.uniform(0.1, 1.5))
    finally:
        victim.node.resume()


@asynccontextmanager
async def stopped_for_long(victim, _rng):
    """Longer than reads may take, and than blocks may be in quarantine: the consumer renews its reader."""
    victim.node.stop()
    try:
        yield
        await asyncio.sleep(9.0)
    finally:
        victim.node.resume()


@asynccontextmanager
async def stopped_and_killed(victim, rng):
    victim.node.stop()
    yield
    await asyncio.sleep(rng.uniform(0.1, 1.0))
    victim.node.kill()
    await victim.restart()


@asynccontextmanager
async def delayed(victim, rng):
    victim.proxy.delay_s = rng.uniform(0.002, HELD_BACK_S)
    yield
    await asyncio.sleep(0.3)
    victim.proxy.calm()


@asynccontextmanager
async def trickling(victim, _rng):
    victim.proxy.trickle = True
    yield
    await asyncio.sleep(0.3)
    victim.proxy.calm()


@asynccontextmanager
async def garbled(victim, rng):
    victim.proxy.garble = rng.choice([0.1, 0.5, 1.0])
    yield
    await asyncio.sleep(0.5)
    victim.proxy.calm()


@asynccontextmanager
async def cut(victim, rng):
    for _ in range(rng.randint(1, 3)):
        victim.proxy.cut()
        await asyncio.sleep(rng.uniform(0, 0.1))
    yield
    victim.proxy.cut()


@asynccontextmanager
async def half_closed(victim, rng):
    victim.proxy.half_close(rng.randrange(2))
    yield
    await asyncio.sleep(0.3)
    victim.proxy.cut()


@asynccontextmanager
async def stalled(victim, rng):
    victim.proxy.stall()
    yield
    await asyncio.sleep(rng.uniform(0.1, 1.0))
    victim.proxy.flow()


@asynccontextmanager
async def stalled_for_long(victim, rng):
    """Longer than leases last, and than anybody waits for an answer."""
    victim.proxy.cut()  # so that somebody dials
    victim.proxy.stall()
    yield
    await asyncio.sleep(rng.uniform(6.0, 9.0))
    victim.proxy.flow()


@asynccontextmanager
async def forgotten(victim, rng):
    """As by a firewall that has forgotten its connections: silence, then a reset, and all that was said is lost."""
    victim.proxy.stall()
    yield
    await asyncio.sleep(rng.uniform(0.1, 1.0))
    victim.proxy.cut()
    victim.proxy.flow()


@asynccontextmanager
async def refused(victim, rng):
    victim.proxy.refuse()
    victim.proxy.cut()
    yield
    await asyncio.sleep(rng.uniform(0.1, 1.0))
    await victim.proxy.listen()


@asynccontextmanager
async def offered_too_much(_victim, _rng):
    """The victim does it to itself."""
    yield


OF_DATA = (
    Fault(name="delayed", strike=delayed, ends=HARMLESS),
    Fault(name="byte by byte", strike=trickling, ends=HARMLESS),
    Fault(name="cut", strike=cut, ends=LOST),
    Fault(name="half closed", strike=half_closed, ends=LOST),
    Fault(name="stalled", strike=stalled, ends=HARMLESS),
    Fault(name="stalled for long", strike=stalled_for_long, ends=HUNG, brief=False),
    Fault(name="forgotten", strike=forgotten, ends=LOST),
    Fault(name="refused", strike=refused, ends=LOST),
    Fault(name="producer killed behind it", strike=killed, ends=LOST),
)
"""Of the connections that carry the bytes of the cache."""

OF_ENCRYPTED_DATA = (Fault(name="garbled", strike=garbled, ends=LOST), *OF_DATA)
"""Without encryption nothing detects a byte that was changed on its way: TCP's own checksum is all there is."""

OF_TABLES = (
    Fault(name="more offers than slots", strike=offered_too_much, ends=STALE | {"capacity_exceeded", "never pulled"}),
)
OF_PROCESSES = (
    Fault(name="killed", strike=killed, ends=LOST),
    Fault(name="stopped for a moment", strike=stopped, ends=HUNG),
    Fault(name="stopped, then killed", strike=stopped_and_killed, ends=HUNG),
    Fault(name="stopped for long", strike=stopped_for_long, ends=HUNG, brief=False),
)
OF_CONTROL = (
    Fault(name="delayed", strike=delayed, ends=HARMLESS),
    Fault(name="byte by byte", strike=trickling, ends=HARMLESS),
    Fault(name="garbled", strike=garbled, ends=SHUT),
    Fault(name="cut", strike=cut, ends=SHUT),
    Fault(name="half closed", strike=half_closed, ends=SHUT),
    Fault(name="stalled", strike=stalled, ends=STALE),
    Fault(name="stalled for long", strike=stalled_for_long, ends=HUNG, brief=False),
    Fault(name="forgotten", strike=forgotten, ends=SHUT),
    Fault(name="refused", strike=refused, ends=LOST),
    Fault(name="producer killed behind it", strike=killed, ends=SHUT),
)
