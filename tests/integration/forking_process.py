"""A process with two workers over NIXL that forks, and says in one line of JSON what became of both halves.

Its arguments: ``threads`` or ``asyncio``, and how the child ends: ``_exit``, or ``exit``, out of all its blocks.
"""

import asyncio
import json
import os
import select
import sys

import kvflow
from kvflow import errors

from .calls import BLOCKS, calls_of
from .consuming import consuming
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


def refusals(calls):
    """Make every call; return the codes of what they raise at once."""
    codes = {}
    for name, call in calls.items():
        try:
            made = call()
            if asyncio.iscoroutine(made):
                made.send(None)
        except errors.KvflowError as error:
            codes[name] = error.code
        else:
            codes[name] = "nothing"
    return codes


def tried(worker, mint, ticket, grant, cache):
    calls = calls_of(worker, ticket, grant, cache)
    calls["mint.offer"] = lambda: mint.offer("another", block_ids=BLOCKS, num_tokens=8)
    return refusals(calls)


def mint_of(worker):
    return kvflow.TicketMint("prefill-0", [worker.rank_address], cluster_secret=SECRET)


def in_threads(how):
    source, target = Shape().build(), Shape(layout="LBNHC", kv="split").build()
    with (
        kvflow.run_worker(configured("prefill-0", transport="nixl"), source) as producer,
        kvflow.run_worker(configured("decode-0", transport="nixl"), target) as consumer,
    ):

        def pulled(request):
            write(source, request, OTHER_BLOCKS, 8)
            consumer.pull(producer.offer(request, OTHER_BLOCKS, 8), OTHER_BLOCKS).result(PATIENCE_S)
            assert wrong(target, request, OTHER_BLOCKS, 8) == []
            return producer.wait_offer(request).result(PATIENCE_S)

        pulled("before")
        ticket = producer.offer("r", BLOCKS, 8)
        mint = mint_of(producer)
        _, grant = mint.offer("minted", block_ids=BLOCKS, num_tokens=8)
        fork = Fork()
        if not fork.pid:
            fork.tell([tried(each, mint, ticket, grant, source) for each in (producer, consumer)])
            leave(how)
        refused = fork.hear()
        outcomes = [pulled("beside it")]
        status = fork.end()
        outcomes.append(pulled("after it"))
        with kvflow.run_worker(configured("decode-1", transport="nixl"), Shape().build()) as late:
            late.pull(producer.offer("late", OTHER_BLOCKS, 8), OTHER_BLOCKS).result(PATIENCE_S)
        held = producer.snapshot().leases
        producer.revoke("r")
    return {"refused": refused, "status": status, "outcomes": outcomes, "held": held}


async def on_a_loop(how):
    source, target = Shape().build(), Shape(layout="LBNHC", kv="split").build()
    async with (
        kvflow.open_worker(configured("prefill-0", transport="nixl"), source) as producer,
        kvflow.open_worker(configured("decode-0", transport="nixl"), target) as consumer,
        asyncio.timeout(PATIENCE_S),
    ):

        async def pulled(request):
            write(source, request, OTHER_BLOCKS, 8)
            await consumer.pull(producer.offer(request, OTHER_BLOCKS, 8), OTHER_BLOCKS)
            assert wrong(target, request, OTHER_BLOCKS, 8) == []
            return await producer.wait_offer(request)

        await pulled("before")
        ticket = producer.offer("r", BLOCKS, 8)
        mint = mint_of(producer)
        _, grant = mint.offer("minted", block_ids=BLOCKS, num_tokens=8)
        fork = Fork()
        if not fork.pid:
            fork.tell([tried(each, mint, ticket, grant, source) for each in (producer, consumer)])
            leave(how)
        refused = await asyncio.to_thread(fork.hear)
        outcomes = [await pulled("beside it")]
        status = await asyncio.to_thread(fork.end)
        outcomes.append(await pulled("after it"))
        async with consuming(engine_id="decode-1", transport="nixl") as late:
            await late.worker.pull(producer.offer("late", OTHER_BLOCKS, 8), OTHER_BLOCKS)
        held = producer.snapshot().leases
    return {"refused": refused, "status": status, "outcomes": outcomes, "held": held}


if __name__ == "__main__":
    shell, how = sys.argv[1:]
    sys.stdout.write(json.dumps(in_threads(how) if shell == "threads" else asyncio.run(on_a_loop(how))) + "\n")
