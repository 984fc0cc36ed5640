"""A process with two workers over NIXL that forks, and says in one line of JSON what became of both halves.

Its arguments: ``threads`` or ``asyncio``, and how the child ends: ``_exit``, or ``exit``, out of all its blocks.
"""

import asyncio
import json
import os
import select
import sys
from contextlib import AsyncExitStack, nullcontext

import kvflow

from .calls import BLOCKS, calls_of, refusals
from .producing import SECRET, configured
from .shapes import Shape, write, wrong

PATIENCE_S = 60.0
OTHER_BLOCKS = [[4, 5], [6, 7]]


class Fork:
    """A child, and what it tells. It goes on when it is told to."""

    def __init__(self):
        (self._hears, self._tells), (self._waits, self._goes) = os.pipe(), os.pipe()
        self.pid = os.fork()
        for descriptor in (self._tells, self._waits) if self.pid else (self._hears, self._goes):
            os.close(descriptor)

    def tell(self, words):
        """Say something to the parent, and wait until it says go."""
        os.write(self._tells, json.dumps(words).encode() + b"\n")
        os.read(self._waits, 1)

    def hear(self):
        """Return what the child says."""
        heard = b""
        while not heard.endswith(b"\n"):
            assert select.select([self._hears], [], [], PATIENCE_S)[0], "the child says nothing"
            part = os.read(self._hears, 1 << 16)
            assert part, "the child has ended"
            heard += part
        return json.loads(heard)

    def end(self):
        """Let the child end; return its status."""
        os.write(self._goes, b"!")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def leave(how):
    """End the child."""
    if how == "_exit":
        os._exit(0)
    sys.exit(0)


def begun(call):
    """Make a call as far as it goes at once."""
    made = call()
    if asyncio.iscoroutine(made):
        made.send(None)


def tried(worker, mint, ticket, grant, cache):
    calls = calls_of(worker, ticket, grant, cache)
    calls["mint.offer"] = lambda: mint.offer("another", block_ids=BLOCKS, num_tokens=8)
    return refusals(calls, begun)


async def told(shell, how):
    """Read, fork, and read on; return what became of both halves. With threads it never waits for a loop."""
    in_threads = shell == "threads"

    async def opened(stack, name, cache):
        config = configured(name, transport="nixl")
        if in_threads:
            return stack.enter_context(kvflow.run_worker(config, cache))
        return await stack.enter_async_context(kvflow.open_worker(config, cache))

    async def wait(what):
        """Wait for what a worker has returned, or for a function that takes a while."""
        if in_threads:
            return what() if callable(what) else what.result(PATIENCE_S)
        return await (asyncio.to_thread(what) if callable(what) else what)

    async def pulled(request):
        write(source, request, OTHER_BLOCKS, 8)
        await wait(consumer.pull(producer.offer(request, OTHER_BLOCKS, 8), OTHER_BLOCKS))
        assert wrong(target, request, OTHER_BLOCKS, 8) == []
        return await wait(producer.wait_offer(request))

    source, target = Shape().build(), Shape(layout="LBNHC", kv="split").build()
    async with AsyncExitStack() as stack:
        producer, consumer = await opened(stack, "prefill-0", source), await opened(stack, "decode-0", target)
        await stack.enter_async_context(nullcontext() if in_threads else asyncio.timeout(PATIENCE_S))
        await pulled("before")
        ticket = producer.offer("r", BLOCKS, 8)
        mint = kvflow.TicketMint("prefill-0", [producer.rank_address], cluster_secret=SECRET)
        _, grant = mint.offer("minted", block_ids=BLOCKS, num_tokens=8)
        fork = Fork()
        if not fork.pid:
            fork.tell([tried(each, mint, ticket, grant, source) for each in (producer, consumer)])
            leave(how)
        refused = await wait(fork.hear)
        outcomes = [await pulled("beside it")]
        status = await wait(fork.end)
        outcomes.append(await pulled("after it"))
        async with AsyncExitStack() as later:
            late = await opened(later, "decode-1", Shape().build())
            await wait(late.pull(producer.offer("late", OTHER_BLOCKS, 8), OTHER_BLOCKS))
        held = producer.snapshot().leases
        producer.revoke("r")
    return {"refused": refused, "status": status, "outcomes": outcomes, "held": held}


def at_once(coroutine):
    """Return what a coroutine comes to that waits for no loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


if __name__ == "__main__":
    run = at_once if sys.argv[1] == "threads" else asyncio.run
    sys.stdout.write(json.dumps(run(told(*sys.argv[1:]))) + "\n")
