"""Pulls that are given up, at every stage: nothing is leaked, and no block is used while it may be written to."""

import asyncio
import random

import pytest

from kvflow import errors

from .conftest import ELSEWHERE
from .consuming import until, works

BLOCKS = [[0, 1], [2, 3]]
ROUNDS = 100


def tasks_besides(known):
    return {task for task in asyncio.all_tasks() if task not in known and not task.done()}


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        ("loopback", {}),
        pytest.param("nixl", {}, marks=ELSEWHERE),
        *(pytest.param("tcp", {"tcp_encryption": each}, marks=pytest.mark.processes) for each in ("off", "tls")),
    ],
    indirect=["world"],
)
async def test_at_any_turn_of_the_loop(world, settings):
    rng = random.Random(11)
    ends = {"cancelled": 0, "completed": 0}
    async with world.producing(**settings) as producer, world.consuming(**settings) as consumer:
        await works(producer, consumer)
        known = asyncio.all_tasks()
        for number in range(ROUNDS):
            request = f"r{number}"
            pull = asyncio.create_task(consumer.pull(await producer.offer(request, BLOCKS, 8), BLOCKS))
            for _ in range(rng.choice([0, 1, 2, 3, 5, 8, 13, 30, 60, 120, 250])):
                await asyncio.sleep(0)
            pull.cancel()
            await asyncio.wait([pull])
            ends["cancelled" if pull.cancelled() else "completed"] += 1
            await consumer.worker.quiesced(request)
            consumer.at_rest()
            assert tasks_besides(known) == set()
            await producer.revoke(request)
        await works(producer, consumer)
    assert ends["cancelled"] > 0


@pytest.mark.both_loops
async def test_leaving_while_reading(near_world, gate):
    known = asyncio.all_tasks()
    async with near_world.producing() as producer:
        params = await producer.offer("r", BLOCKS, 8)
        async with near_world.consuming() as consumer:
            pull = asyncio.create_task(consumer.pull(params, BLOCKS))
            await until(gate.reached.is_set)
            # It hears of it at once, while its blocks may still be written to: leaving waits for that.
            pull.add_done_callback(lambda _: gate.open())
        with pytest.raises(errors.TransferCancelled) as caught:
            await pull
        assert caught.value.quarantined is True
        consumer.at_rest()
        await consumer.worker.quiesced("r")
        async with near_world.consuming() as another:
            await another.pull(params, BLOCKS)
            another.has("r", BLOCKS, 8)
    assert tasks_besides(known) == set()
