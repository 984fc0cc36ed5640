"""Draining: what has begun is finished, nothing new begins, and what is left at the deadline is named."""

import asyncio
import math

import pytest

import kvflow
from kvflow import errors

from .consuming import until, works
from .producing import SECRET, configured
from .shapes import Shape

BLOCKS = [[0, 1], [2, 3]]
OTHER_BLOCKS = [[4, 5], [6, 7]]


@pytest.mark.both_loops
async def test_readers_of_a_draining_producer_finish(near_world, gate):
    async with near_world.producing() as producer, near_world.consuming() as consumer:
        mint = kvflow.TicketMint("prefill-0", [producer.worker.rank_address], cluster_secret=SECRET)
        _, grant = mint.offer("of another mint", block_ids=OTHER_BLOCKS, num_tokens=8)
        params = await producer.offer("r", BLOCKS, 8)
        later = await producer.offer("later", OTHER_BLOCKS, 8)
        pull = asyncio.create_task(consumer.pull(params, BLOCKS))
        await until(gate.reached.is_set)
        drain = asyncio.create_task(producer.worker.drain(60.0))
        await asyncio.sleep(0)
        for refused in (
            lambda: producer.worker.offer("new", BLOCKS, 8),
            lambda: producer.worker.admit(grant),
        ):
            with pytest.raises(errors.WorkerDraining) as caught:
                refused()
            assert caught.value.code == "worker_draining"
            assert caught.value.remedy
        with pytest.raises(errors.WorkerDraining):
            await producer.worker.offer_when_possible("new", BLOCKS, 8)
        assert not drain.done()
        gate.open()
        await pull
        consumer.has("r", BLOCKS, 8)
        await asyncio.sleep(0)
        assert not drain.done(), "a ticket is out that nobody has read yet"
        await consumer.pull(later, OTHER_BLOCKS)  # its reader comes late, and in time
        consumer.has("later", OTHER_BLOCKS, 8)
        report = await drain
        assert report.complete
        assert (report.leases, report.pulls, report.quarantined) == ((), (), ())


async def test_a_cancelled_pull_is_waited_for_until_nothing_writes(near_world, gate):
    async with near_world.producing() as producer, near_world.consuming() as consumer:
        pull = asyncio.create_task(consumer.pull(await producer.offer("r", BLOCKS, 8), BLOCKS))
        await until(gate.reached.is_set)
        pull.cancel()
        report = await consumer.worker.drain(0)
        assert report.pulls == ("r",)
        assert [entry.num_blocks for entry in report.quarantined] == [4]
        gate.open()
        assert (await consumer.worker.drain(60)).complete


@pytest.mark.parametrize("deadline_s", [-1, math.inf, math.nan, "1", None, True])
async def test_a_deadline_is_a_number_of_seconds(near_world, deadline_s):
    async with near_world.producing() as producer, near_world.consuming() as consumer:
        with pytest.raises(errors.ArgumentInvalid, match="deadline_s"):
            await producer.worker.drain(deadline_s)
        await works(producer, consumer)  # and nothing has begun to drain


def test_an_engine_that_is_not_asyncio_drains_too():
    with kvflow.run_worker(configured("prefill-0", transport="loopback", lease_slots=1), Shape().build()) as producer:
        producer.offer("r", BLOCKS, 8)
        waiting = producer.offer_when_possible("s", BLOCKS, 8)
        assert producer.revoke("r")
        assert waiting.result(60).request_id == "s"
        refused = producer.offer_when_possible("t", BLOCKS, 8)
        drain = producer.drain(60)
        with pytest.raises(errors.WorkerDraining):
            refused.result(60)
        assert not drain.done()
        assert producer.revoke("s")
        assert drain.result(60).complete
