"""Staged reads between workers: the right bytes, the fence, and no staging buffer left behind."""

import asyncio
import random
from contextlib import AsyncExitStack

import pytest

import kvflow
from kvflow import errors
from kvflow.events import TransferCompleted
from kvflow.reads.thread import ThreadedTransport

from .consuming import works
from .recycled import attempt, recycle_after
from .shapes import Shape, wrong
from .staging import STAGING, TOKEN_MAJOR, no_buffer_is_taken

SOURCES = [[3, 4, 6, 9, 10, 20], [21, 24, 23, 30, 0, 1]]
TARGETS = [[7, 8, 1, 30, 31, 2], [20, 11, 12, 13, 25, 26]]
TOKENS = 6 * 16 - 5
ROUNDS = 40


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 2), (2, 1), (3, 2)])
async def test_token_major_pages_are_staged_between_unlike_engines(world, source_tp, target_tp):
    async with AsyncExitStack() as stack:
        producers = [
            await stack.enter_async_context(
                world.producing(Shape(**TOKEN_MAJOR, tp_rank=rank, tp_size=source_tp), rank=rank, num_ranks=source_tp)
            )
            for rank in range(source_tp)
        ]
        for rank in range(target_tp):
            reports = []
            for settings in ({"staging_bytes": 0}, STAGING):
                # Each rank reads by itself, as an engine of its own.
                offers = [kvflow.Ticket.from_params(await each.offer("r", SOURCES, TOKENS)) for each in producers]
                ticket = kvflow.join_tickets(offers)
                shape = Shape(**TOKEN_MAJOR, tp_rank=rank, tp_size=target_tp)
                async with world.consuming(shape, **settings) as consumer:
                    reports.append(await consumer.pull(ticket.to_params(), TARGETS))
                    consumer.has("r", TARGETS, TOKENS)
                    consumer.untouched(but=TARGETS)
                    consumer.at_rest()
                    if settings is STAGING:
                        no_buffer_is_taken(consumer)
                    else:
                        assert consumer.worker.snapshot().staging.buffers == 0
                    assert [await each.outcome("r") for each in producers] == ["released"] * source_tp
            direct, staged = reports
            assert staged.nbytes == direct.nbytes == direct.read_bytes
            assert (staged.read_bytes > staged.nbytes) == (source_tp % target_tp > 0 or source_tp < target_tp)
            assert staged.descriptors * 8 <= direct.descriptors
            assert staged.timings_s["scatter"] > 0.0 == direct.timings_s["scatter"]


async def test_blocks_recycled_during_a_staged_read_are_never_delivered(world):
    rng, outcomes = random.Random(7), {"completed": 0, "stale_lease": 0}
    half = Shape(**TOKEN_MAJOR, tp_rank=1, tp_size=2)
    async with (
        world.producing(Shape(**TOKEN_MAJOR)) as producer,
        world.consuming(half, rank=0, num_ranks=1, **STAGING) as consumer,
    ):
        for number in range(ROUNDS):
            params = await producer.offer(f"r{number % 3}", SOURCES, TOKENS)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(recycle_after(rng.choice([0, 1, 3, 8, 30, 60]), producer, f"r{number % 3}"))
                pull = tasks.create_task(attempt(consumer, params, TARGETS))
            outcomes[pull.result()] += 1
            if pull.result() == "completed":
                assert wrong(consumer.cache, f"r{number % 3}", TARGETS, TOKENS) == [], f"round {number}"
            await consumer.worker.quiesced(f"r{number % 3}")
            consumer.at_rest()
            no_buffer_is_taken(consumer)
        await works(producer, consumer, sources=SOURCES, blocks=TARGETS, num_tokens=TOKENS)
    assert outcomes["stale_lease"] > 0


async def test_a_lease_that_ends_when_a_staged_read_is_handed_over_is_stale(world, monkeypatch):
    heard, post = [], ThreadedTransport.post

    def recycle_and_post(transport, reads, within_s):
        producer.recycle_now("r")
        return post(transport, reads, within_s)

    monkeypatch.setattr(ThreadedTransport, "post", recycle_and_post)
    half = Shape(**TOKEN_MAJOR, tp_rank=1, tp_size=2)
    async with (
        world.producing(Shape(**TOKEN_MAJOR)) as producer,
        world.consuming(half, hooks=[heard.append], **STAGING) as consumer,
    ):
        params = await producer.offer("r", SOURCES, TOKENS)
        with pytest.raises(errors.StaleLease) as caught:
            await consumer.pull(params, TARGETS)
        assert not caught.value.quarantined
        assert not [event for event in heard if isinstance(event, TransferCompleted)]
        consumer.at_rest()
        no_buffer_is_taken(consumer)
