"""Blocks that are recycled while they are read: an error, and never a report about another request's bytes."""

import asyncio
import random

import pytest

from kvflow import errors
from kvflow.events import TransferCompleted
from kvflow.reads.thread import ThreadedTransport

from .consuming import works
from .recycled import attempt, recycle_after
from .shapes import Shape, wrong

ROUNDS = 200
BLOCKS = [[3, 4, 5, 6, 7, 8, 9, 10], [20, 21, 22, 23, 24, 25, 26, 27]]
BIG = Shape(block_size=64, head_size=64)
TOKENS = 8 * 64


async def test_no_report_about_recycled_bytes(world):
    """Recycle at a random moment: before the pull, while it is queued, reading or fencing, and after it."""
    rng = random.Random(7)
    outcomes = {"completed": 0, "stale_lease": 0}
    async with world.producing(BIG) as producer, world.consuming(BIG) as consumer:
        for number in range(ROUNDS):
            request = f"r{number % 3}"
            params = await producer.offer(request, BLOCKS, TOKENS)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(recycle_after(rng.choice([0, 1, 2, 3, 5, 8, 13, 30, 60]), producer, request))
                pull = tasks.create_task(attempt(consumer, params, BLOCKS))
            outcomes[pull.result()] += 1
            if pull.result() == "completed":
                assert wrong(consumer.cache, request, BLOCKS, TOKENS) == [], f"round {number}"
            await consumer.worker.quiesced(request)
            consumer.at_rest()
        await works(producer, consumer, blocks=BLOCKS, num_tokens=TOKENS)
    assert min(outcomes.values()) > 0, "every moment was too early, or too late"


async def test_recycled_when_its_reads_are_handed_over(world, monkeypatch):
    """No producer is asked by then, so that only the fence can find it."""
    heard, post = [], ThreadedTransport.post

    def recycle_and_post(transport, reads, within_s):
        producer.recycle_now("r")
        return post(transport, reads, within_s)

    async with world.producing(BIG) as producer, world.consuming(BIG, hooks=[heard.append]) as consumer:
        with monkeypatch.context() as patch:
            patch.setattr(ThreadedTransport, "post", recycle_and_post)
            for _ in range(5):
                params = await producer.offer("r", BLOCKS, TOKENS)
                with pytest.raises(errors.StaleLease) as caught:
                    await consumer.pull(params, BLOCKS)
                assert (caught.value.request_id, caught.value.quarantined) == ("r", False)
                consumer.at_rest()
        assert not [event for event in heard if isinstance(event, TransferCompleted)]
        await works(producer, consumer, blocks=BLOCKS, num_tokens=TOKENS)
