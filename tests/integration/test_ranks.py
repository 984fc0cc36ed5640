"""Engines of several ranks: one mint for all of them, one ticket for all readers, a lease that ends with the last."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from msgspec.structs import replace

import kvflow
from kvflow import errors
from kvflow.events import TransferRetried

from .producing import minting, write_and_admit
from .shapes import Shape

BLOCKS = [[0, 1], [2, 3]]
TARGETS = [[5, 4], [7, 6]]


@asynccontextmanager
async def engine(open_rank, tp_size, shape=Shape(), **settings):  # noqa: B008 - frozen
    """Open every rank of an engine."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                open_rank(replace(shape, tp_rank=rank, tp_size=tp_size), rank=rank, num_ranks=tp_size, **settings)
            )
            for rank in range(tp_size)
        ]


async def leases(ranks):
    return [await rank.leases() for rank in ranks]


@pytest.mark.both_loops
async def test_every_consumer_rank_reads_its_producer_rank_and_is_counted_once(world):
    async with engine(world.producing, 2) as producers, engine(world.consuming, 2) as consumers:
        mint = await minting(*producers)
        ticket, grant = mint.offer("r", block_ids=BLOCKS, num_tokens=8)
        await write_and_admit(grant, *producers)
        for _ in range(2):  # the second release of the same rank counts for nothing
            report = await consumers[0].pull(ticket.to_params(), TARGETS)
            assert report.nbytes == 2 * 2 * consumers[0].cache.bytes_per_block
            assert await leases(producers) == [1, 1]
        await consumers[1].pull(ticket.to_params(), TARGETS)
        assert [await rank.outcome("r") for rank in producers] == ["released", "released"]
        for consumer in consumers:
            consumer.has("r", TARGETS, 8)
            consumer.at_rest()
        with pytest.raises(errors.StaleLease):
            await consumers[0].pull(ticket.to_params(), TARGETS)
        assert mint.retire("r")


async def test_one_consumer_rank_reads_all_producer_ranks(world):
    async with engine(world.producing, 2) as producers, world.consuming() as consumer:
        offers = [kvflow.Ticket.from_params(await rank.offer("r", BLOCKS, 8)) for rank in producers]
        joined = kvflow.join_tickets(offers)
        await consumer.pull(joined.to_params(), TARGETS)
        consumer.has("r", TARGETS, 8)
        assert [await rank.outcome("r") for rank in producers] == ["released", "released"]
        with pytest.raises(errors.LayoutMismatch) as caught:  # one half is not enough
            await consumer.pull(await producers[0].offer("half", BLOCKS, 8), TARGETS)
        assert caught.value.remedy
        consumer.at_rest()


async def test_one_stale_rank_fails_the_whole_pull(world):
    async with engine(world.producing, 2) as producers, world.consuming() as consumer:
        mint = await minting(*producers)
        ticket, grant = mint.offer("r", block_ids=BLOCKS, num_tokens=8)
        await write_and_admit(grant, *producers)
        await producers[1].recycle("r")
        with pytest.raises(errors.StaleLease):
            await consumer.pull(ticket.to_params(), TARGETS)
        await consumer.worker.quiesced("r")
        consumer.at_rest()
        assert await leases(producers) == [1, 0]


async def test_a_pull_before_the_admission_waits_for_it(world):
    retried = asyncio.Event()

    def notice(event):
        if isinstance(event, TransferRetried):
            retried.set()

    async with engine(world.producing, 1) as producers, world.consuming(hooks=[notice]) as consumer:
        mint = await minting(*producers)
        ticket, grant = mint.offer("r", block_ids=BLOCKS, num_tokens=8)
        pull = asyncio.create_task(consumer.pull(ticket.to_params(), TARGETS))
        await asyncio.wait_for(retried.wait(), 60)
        assert not pull.done()
        await write_and_admit(grant, *producers)
        await pull
        consumer.has("r", TARGETS, 8)
        assert await producers[0].outcome("r") == "released"


async def test_a_ticket_that_is_never_admitted_runs_out_of_time(world):
    async with engine(world.producing, 1) as producers, world.consuming(fence_s=0.2) as consumer:
        mint = await minting(*producers)
        ticket, _ = mint.offer("r", block_ids=BLOCKS, num_tokens=8)
        with pytest.raises(errors.DeadlineExceeded) as caught:
            await consumer.pull(ticket.to_params(), TARGETS)
        assert caught.value.phase == "fence"
        assert caught.value.remedy
        await consumer.worker.quiesced("r")
        consumer.at_rest()
        _, grant = mint.offer("another", block_ids=BLOCKS, num_tokens=8)
        await write_and_admit(grant, *producers)
