"""How leases end, as the producer sees it, over each data plane and on both loops."""

import pytest

import kvflow
from kvflow import errors

BLOCKS = [[0, 1], [2, 3]]


@pytest.mark.both_loops
async def test_every_outcome(world):
    async with world.producing() as producer, world.consuming() as consumer:
        assert await producer.outcome("never offered") == "request_unknown"

        await consumer.pull(await producer.offer("pulled", BLOCKS, 8), BLOCKS)
        assert await producer.outcome("pulled") == "released"

        unread = kvflow.Ticket.from_params(await producer.offer("given back", BLOCKS, 8))
        await consumer.worker.release(unread)
        assert await producer.outcome("given back") == "released"

        await producer.offer("revoked", BLOCKS, 8)
        assert await producer.revoke("revoked") is True
        assert await producer.revoke("revoked") is False
        assert await producer.outcome("revoked") == "revoked"
        assert await producer.leases() == 0


@pytest.mark.both_loops
async def test_a_lease_that_ran_out(world):
    async with world.producing(lease_s=0.2) as producer, world.consuming() as consumer:
        expired = await producer.offer("expired", BLOCKS, 8)
        assert await producer.outcome("expired") == "expired"
        with pytest.raises(errors.StaleLease):
            await consumer.pull(expired, BLOCKS)
        consumer.at_rest()
        assert await producer.leases() == 0
