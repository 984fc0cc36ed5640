"""The processes that fuzz and are fuzzed."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

from tests.world.node import NodeDied, NodeFailed, hosted

SECRET = "the secret of the fuzzed cluster"
PATIENCE_S = 60.0
ATTACKERS = 2
WARM = 0.2
"""Share of what is said after which memory is compared: before that, allocators and caches fill."""
LOOK_S = 0.2


class Died(Exception):
    """The process that was fuzzed is gone, or has raised what it should not."""


async def asked(answer, within_s=PATIENCE_S):
    """Return the answer of a process.

    Raises:
        Died: it has ended, or has raised anything, or does not answer.
    """
    try:
        async with asyncio.timeout(within_s):
            return await answer
    except (NodeDied, NodeFailed, TimeoutError) as error:
        raise Died(repr(error)) from error


@asynccontextmanager
async def apart(kind, *arguments):
    """Open something in a process that has loaded nothing else, so that its memory is its own."""
    try:
        async with hosted(kind, *arguments, forked=False) as node:
            yield node
    except (NodeDied, NodeFailed, AssertionError) as error:
        raise Died(repr(error)) from error


async def attacked(victim, attacking, goal, drawn, *, warm, tell):
    """Have attackers say so much to a victim; return the sums of what they have told.

    Args:
        victim: the process.
        attacking: what opens an attacker, and its arguments before the numbers of its conversations.
        goal: what they are to say, in all.
        drawn: the first number.
        warm: called after a fifth.
        tell: told how far it is.

    Raises:
        Died: the victim has, or an attacker has heard what it should not; says which conversations were under way.
    """
    async with AsyncExitStack() as stack:
        opening = (apart(*attacking, drawn + each, ATTACKERS) for each in range(ATTACKERS))
        nodes = [await stack.enter_async_context(each) for each in opening]
        running = [asyncio.wrap_future(node.begin("run", -(-goal // ATTACKERS))) for node in nodes]
        is_warm = is_over = False
        while not is_over:
            _, left = await asyncio.wait(running, timeout=LOOK_S)
            is_over = not left
            told = [await asked(node.tell()) for node in nodes]
            failed = [each.exception() for each in running if each.done() and each.exception()]
            if failed or not victim.lives:
                raise Died(
                    f"{failed}; conversations {[each['under_way'] for each in told]} were under way, or later ones"
                )
            done = sum(each["said"] for each in told)
            if not is_warm and done >= goal * WARM:
                is_warm = True
                await warm()
            tell(done, goal)
    return {name: sum(each[name] for each in told) for name in told[0] if name != "under_way"}
