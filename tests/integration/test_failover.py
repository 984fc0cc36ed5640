"""Workers of one name: a restart, a stand-in elsewhere, and two lives at once; nobody is taken for another one."""

import asyncio

import pytest

from kvflow import errors
from kvflow.events import BreakerClosed, BreakerOpened
from kvflow.worker.connections import FAILURES_MAX
from tests.ports import free_port

from .consuming import dialing_once, works
from .shapes import Shape

BLOCKS = [[0, 1], [2, 3]]
OTHER_BLOCKS = [[4, 5], [6, 7]]


@pytest.mark.both_loops
async def test_two_lives_of_one_name_work_beside_each_other(world):
    """The same engine_id and rank at another address: a stand-in, while the first one still lives."""
    async with world.consuming() as consumer, world.producing() as first, world.producing() as second:
        assert first.endpoint != second.endpoint
        for _ in range(3):
            offers = [await producer.offer("r", BLOCKS, 8) for producer in (first, second)]
            others = [await producer.offer("s", OTHER_BLOCKS, 8) for producer in (first, second)]
            await asyncio.gather(consumer.pull(offers[0], BLOCKS), consumer.pull(others[1], OTHER_BLOCKS))
            consumer.has("r", BLOCKS, 8)
            consumer.has("s", OTHER_BLOCKS, 8)
            assert await first.outcome("r") == await second.outcome("s") == "released"
            assert [await producer.leases() for producer in (first, second)] == [1, 1]
            assert await first.revoke("s")
            assert await second.revoke("r")


async def test_two_readers_of_one_name_work_beside_each_other(world):
    async with world.producing() as producer, world.consuming() as one, world.consuming() as other:
        for consumer in (one, other, one, other):
            await works(producer, consumer)


@pytest.mark.nixl
@pytest.mark.processes
async def test_a_dead_producer_costs_three_attempts_and_its_successor_none(elsewhere, spawn, heard):
    doomed = spawn()
    bind = f"tcp://127.0.0.1:{free_port()}"
    async with (
        doomed.producing(Shape(), bind=bind) as victim,
        elsewhere.producing(Shape(), engine_id="steady") as steady,
        dialing_once(hooks=[heard]) as consumer,
    ):
        tickets = [await victim.offer(f"r{number}", BLOCKS, 8) for number in range(50)]
        doomed.kill()
        failures = []
        for params in tickets:
            with pytest.raises(errors.PeerLost) as caught:
                await consumer.pull(params, BLOCKS)
            failures.append(caught.value)
        codes = [failure.code for failure in failures]
        assert codes[:FAILURES_MAX] == ["peer_lost"] * FAILURES_MAX
        assert codes.count("peer_lost") < 10, "the breaker never opened"
        assert codes.count("peer_unavailable") + codes.count("peer_lost") == len(tickets)
        assert all(0 <= failure.retry_after_s <= 15 for failure in failures if failure.code == "peer_unavailable")
        assert len(heard.of(BreakerOpened)) == 1
        await works(steady, consumer)
        async with elsewhere.producing(Shape(), bind=bind) as successor:
            await works(successor, consumer)  # at once: its ticket shows that somebody lives there again
            assert len(heard.of(BreakerClosed)) == 1
            with pytest.raises(errors.StaleLease):
                await consumer.pull(tickets[0], BLOCKS)
