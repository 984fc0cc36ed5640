"""How leases end, as the producer sees it, and what keeps them alive."""

import asyncio

import pytest

import kvflow
from kvflow import errors
from kvflow.worker import renewals

from .consuming import until

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


async def test_whoever_waits_for_an_offer_is_told_of_its_end(near_world):
    async with near_world.producing() as producer, near_world.consuming() as consumer:
        params = await producer.offer("r", BLOCKS, 8)
        waiting = [asyncio.create_task(producer.outcome("r")) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await consumer.pull(params, BLOCKS)
        assert await asyncio.gather(*waiting[1:]) == ["released", "released"]
        # The name is free again, and an older end is not taken for that of the new offer.
        await producer.offer("r", BLOCKS, 8)
        again = asyncio.create_task(producer.outcome("r"))
        await asyncio.sleep(0)
        assert not again.done()
        producer.worker.revoke("r")
        assert await again == "revoked"


async def test_closing_revokes_what_is_on_offer(near_world):
    async with near_world.consuming(connect_s=2.0) as consumer:
        async with near_world.producing() as producer:
            await consumer.pull(await producer.offer("met", BLOCKS, 8), BLOCKS)
            params = await producer.offer("r", BLOCKS, 8)
            waiting = asyncio.create_task(producer.outcome("r"))
            await asyncio.sleep(0)
        assert await waiting == "revoked"
        with pytest.raises((errors.PeerLost, errors.StaleLease)):
            await consumer.pull(params, BLOCKS)
        consumer.at_rest()


async def test_a_pull_renews_its_lease_until_it_ends(near_world, gate, monkeypatch):
    """How often is proved on virtual time; here it is a third of a second."""
    monkeypatch.setattr(renewals, "RENEWALS_PER_LEASE", 90)
    async with near_world.producing() as producer, near_world.consuming() as consumer:
        params = await producer.offer("r", BLOCKS, 8)
        on_renew, renewed = producer.worker._leases.on_renew, []

        def note(*given):
            renewed.append(given)
            return on_renew(*given)

        monkeypatch.setattr(producer.worker._leases, "on_renew", note)
        pull = asyncio.create_task(consumer.pull(params, BLOCKS))
        await until(lambda: len(renewed) >= 3)
        gate.open()
        await pull
        consumer.has("r", BLOCKS, 8)
        assert await producer.outcome("r") == "released"


async def test_the_slots_are_bounded_and_come_back(near_world):
    async with near_world.producing(lease_slots=2) as producer, near_world.consuming() as consumer:
        params = [await producer.offer(f"r{number}", BLOCKS, 8) for number in range(2)]
        with pytest.raises(errors.CapacityExceeded) as caught:
            await producer.offer("one too many", BLOCKS, 8)
        assert caught.value.remedy
        await consumer.pull(params[0], BLOCKS)
        assert await producer.outcome("r0") == "released"
        third = await producer.offer("r2", BLOCKS, 8)
        with pytest.raises(errors.StaleLease):
            await consumer.pull(params[0], BLOCKS)  # its slot is another's now
        await consumer.pull(third, BLOCKS)
        consumer.has("r2", BLOCKS, 8)
