"""A process that calls a worker from where it does not live, and says in one line of JSON what it was told."""

import asyncio
import json
import sys
import threading
from contextlib import AsyncExitStack

import kvflow
from kvflow.events import PullFailed

from .calls import BLOCKS, calls_of, refusals
from .consuming import consuming
from .producing import SECRET, producing
from .shapes import Shape

ANYWHERE = {
    "rank_address",
    "offer",
    "keep",
    "offer_progressive",
    "advance",
    "seal",
    "admit",
    "revoke",
    "read_ticket",
    "record_refusal",
}


async def called(call):
    made = call()
    if asyncio.iscoroutine(made):
        await made


async def opened(life, events):
    """Open a producer with a ticket, and a consumer that has not met it."""
    producer = await life.enter_async_context(producing(Shape(), transport="loopback"))
    consumer = await life.enter_async_context(consuming(transport="loopback", hooks=(events.append,)))
    ticket = kvflow.Ticket.from_params(await producer.offer("r", BLOCKS, 8))
    mint = kvflow.TicketMint("prefill-0", [producer.worker.rank_address], cluster_secret=SECRET)
    _, grant = mint.offer("minted", block_ids=BLOCKS, num_tokens=8)
    calls = calls_of(consumer.worker, ticket, grant, consumer.cache)
    return consumer, ticket, {name: call for name, call in calls.items() if name not in ANYWHERE}


def main():
    with asyncio.Runner() as home, asyncio.Runner() as other:
        life, events = AsyncExitStack(), []
        consumer, ticket, calls = home.run(opened(life, events))
        told = {"another loop": refusals(calls, lambda call: other.run(called(call)))}
        told["no loop"] = refusals(calls, lambda call: called(call).send(None))

        async def beside():
            """Call from other threads while the loop runs."""
            there = lambda call: asyncio.run(called(call))  # noqa: E731
            told["another thread"] = await asyncio.to_thread(refusals, calls, there)
            await consumer.worker.pull(ticket, BLOCKS)
            consumer.has("r", BLOCKS, 8)
            await life.aclose()

        home.run(beside())
    told["records"] = [event.code for event in events if isinstance(event, PullFailed)]
    told["threads left"] = [
        each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()
    ]
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
