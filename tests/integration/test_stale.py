"""Blocks that are recycled while they are read: an error, and never a report about another request's bytes."""

import asyncio
import random

import pytest

from kvflow import errors
from kvflow.events import TransferCompleted
from kvflow.reads.thread import ThreadedTransport

from .consuming import works
from .shapes import Shape, wrong
from .staging import STAGING, TOKEN_MAJOR, no_buffer_is_taken

BLOCKS = [[3, 4, 5, 6, 7, 8, 9, 10], [20, 21, 22, 23, 24, 25, 26, 27]]
BIG = Shape(block_size=64, head_size=64)
HALF = {"tp_rank": 1, "tp_size": 2}
HOW = {
    "direct": (BIG, BIG, {}, [0, 1, 2, 3, 5, 8, 13, 30, 60], 200),
    "staged": (Shape(**TOKEN_MAJOR), Shape(**TOKEN_MAJOR, **HALF), STAGING, [0, 1, 3, 8, 30, 60], 40),
}
"""Shapes of both, settings of the consumer, turns of the loop after which blocks are recycled, and rounds."""


def at_rest(consumer, how):
    consumer.at_rest()
    if how == "staged":
        no_buffer_is_taken(consumer)


async def attempt(consumer, params):
    """Pull, and say how it ended."""
    try:
        await consumer.pull(params, BLOCKS)
    except errors.StaleLease as error:
        return error.code
    return "completed"


async def recycle_after(turns, producer, request):
    """Recycle a request after some turns of the loop."""
    for _ in range(turns):
        await asyncio.sleep(0)
    await producer.recycle(request)


@pytest.mark.parametrize("how", HOW)
async def test_no_report_about_recycled_bytes(world, how):
    """Recycle at a random moment: before the pull, while it is queued, reading or fencing, and after it."""
    source, target, settings, turns, rounds = HOW[how]
    rng, tokens = random.Random(7), 8 * source.block_size
    outcomes = {"completed": 0, "stale_lease": 0}
    async with world.producing(source) as producer, world.consuming(target, **settings) as consumer:
        for number in range(rounds):
            request = f"r{number % 3}"
            params = await producer.offer(request, BLOCKS, tokens)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(recycle_after(rng.choice(turns), producer, request))
                pull = tasks.create_task(attempt(consumer, params))
            outcomes[pull.result()] += 1
            if pull.result() == "completed":
                assert wrong(consumer.cache, request, BLOCKS, tokens) == [], f"round {number}"
            await consumer.worker.quiesced(request)
            at_rest(consumer, how)
        await works(producer, consumer, blocks=BLOCKS, num_tokens=tokens)
    assert outcomes["stale_lease"] > 0, "every moment was too late"
    assert outcomes["completed"] > 0 or how == "staged", "every moment was too early"


@pytest.mark.parametrize("how", HOW)
async def test_recycled_when_its_reads_are_handed_over(world, heard, monkeypatch, how):
    """No producer is asked by then, so that only the fence can find it."""
    source, target, settings, _, _ = HOW[how]
    post, tokens = ThreadedTransport.post, 8 * source.block_size

    def recycle_and_post(transport, reads, within_s):
        producer.recycle_now("r")
        return post(transport, reads, within_s)

    async with world.producing(source) as producer, world.consuming(target, hooks=[heard], **settings) as consumer:
        with monkeypatch.context() as patch:
            patch.setattr(ThreadedTransport, "post", recycle_and_post)
            for _ in range(5):
                params = await producer.offer("r", BLOCKS, tokens)
                with pytest.raises(errors.StaleLease) as caught:
                    await consumer.pull(params, BLOCKS)
                assert (caught.value.request_id, caught.value.quarantined) == ("r", False)
                at_rest(consumer, how)
        assert not heard.of(TransferCompleted)
        await works(producer, consumer, blocks=BLOCKS, num_tokens=tokens)
