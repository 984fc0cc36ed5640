"""One lease and several readers, one block and several leases: the law of blocks holds, and nobody is counted twice."""

import asyncio

import pytest

from kvflow import errors

from .test_ranks import engine

BLOCKS = [[0, 1], [2, 3]]
TARGETS = [[5, 4], [7, 6]]


async def ended(consumer, params):
    try:
        await consumer.pull(params, TARGETS)
    except errors.StaleLease as error:
        return "quarantined" if error.quarantined else error.code
    consumer.has("r", TARGETS, 8)
    return "right"


@pytest.mark.both_loops
async def test_two_engines_read_one_ticket_at_once(world):
    """The first that has it all ends the lease: the other one has the right bytes or an error, and nothing between."""
    async with (
        world.producing() as producer,
        world.consuming() as one,
        world.consuming(engine_id="decode-1") as other,
    ):
        ends = []
        for _ in range(10):
            params = await producer.offer("r", BLOCKS, 8)
            ends += await asyncio.gather(ended(one, params), ended(other, params))
            assert await producer.outcome("r") == "released"
            assert await producer.leases() == 0
            await producer.check()
        assert ends.count("right") >= 10
        assert set(ends) <= {"right", "stale_lease"}
        one.at_rest()
        other.at_rest()


async def test_ranks_of_different_engines_are_not_added_up(world):
    async with (
        world.producing() as producer,
        engine(world.consuming_whole, 2) as pair,
        engine(world.consuming_whole, 2, engine_id="decode-1") as others,
    ):
        params = await producer.offer("r", BLOCKS, 8)
        for consumer in (pair[0], others[0], pair[0]):
            assert await ended(consumer, params) == "right"
            assert await producer.leases() == 1
        assert await ended(others[1], params) == "right"
        assert await producer.outcome("r") == "released"
        assert await ended(pair[1], params) == "stale_lease"
        await producer.check()


async def test_one_of_two_ranks_is_not_enough(world):
    """The other one never comes: the lease runs out, and the blocks are the producer's again."""
    async with world.producing(lease_s=1.0) as producer, engine(world.consuming_whole, 2) as (consumer, _):
        params = await producer.offer("r", BLOCKS, 8)
        for _ in range(3):
            assert await ended(consumer, params) in ("right", "stale_lease")  # the machine may be slow
        assert await producer.outcome("r") == "expired"
        assert await producer.leases() == 0
        await producer.check()
        assert await ended(consumer, params) == "stale_lease"
