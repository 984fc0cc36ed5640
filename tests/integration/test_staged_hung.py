"""Peers that hang with every staging buffer: whoever is healthy waits, and then is read through buffers made anew."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from kvflow.events import ReaderReset
from kvflow.worker import destinations

from .conftest import OVER_TCP
from .consuming import consuming, until, works
from .shapes import Shape
from .staging import STAGING, TOKEN_MAJOR, no_buffer_is_taken

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

WHOLE = Shape(**TOKEN_MAJOR, num_blocks=64)
HALF = Shape(**TOKEN_MAJOR, num_blocks=64, tp_rank=1, tp_size=2)
PEERS = 4
"""They hold two buffers each, which is all there are."""
TOKENS = 6 * 16


def blocks(number):
    """Blocks of which nobody else reads."""
    return [list(range(12 * number, 12 * number + 6)), list(range(12 * number + 6, 12 * number + 12))]


@pytest.mark.usefixtures("late")
async def test_four_hung_peers_with_all_staging_buffers_do_not_stop_a_fifth(elsewhere, spawn, heard, monkeypatch):
    monkeypatch.setattr(destinations, "STARVED_S_MAX", 0.2)
    settings = OVER_TCP | STAGING
    async with AsyncExitStack() as stack:
        healthy = await stack.enter_async_context(elsewhere.producing(WHOLE, **OVER_TCP))
        sleepy = spawn()
        hung = [
            await stack.enter_async_context(sleepy.producing(WHOLE, engine_id=f"sleepy-{number}", **OVER_TCP))
            for number in range(PEERS)
        ]
        consumer = await stack.enter_async_context(consuming(HALF, hooks=[heard], **settings))
        stack.callback(sleepy.resume)
        for producer in (healthy, *hung):
            await works(producer, consumer, "met", blocks(0), TOKENS)
        offers = [await producer.offer("hangs", blocks(0), TOKENS) for producer in hung]
        sleepy.stop()
        pulls = [asyncio.create_task(consumer.pull(offer, blocks(n))) for n, offer in enumerate(offers)]
        await until(lambda: consumer.worker.snapshot().staging.in_use == 8)
        for pull in pulls:
            pull.cancel()
        await asyncio.wait(pulls)
        await until(lambda: consumer.worker.snapshot().staging.quarantined == 8)
        assert not heard.of(ReaderReset)

        await works(healthy, consumer, "after", blocks(PEERS), TOKENS, sources=blocks(0))
        (renewed,) = heard.of(ReaderReset)
        assert (renewed.setting, renewed.ended > 0) == ("staging_bytes", True)
        await consumer.worker.quiesced("hangs")
        consumer.at_rest()
        no_buffer_is_taken(consumer)
