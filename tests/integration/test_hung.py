"""A producer that hangs: the pull ends by its budget, and its blocks stay unused while anything may write to them."""

import asyncio
import time

import msgspec
import pytest

from kvflow import errors

from .conftest import OVER_TCP
from .consuming import consuming, works
from .shapes import UNTOUCHED, Shape
from .test_late_write import stop_mid_read

pytestmark = pytest.mark.processes

LARGE = Shape(num_blocks=1024, block_size=16, heads=8, head_size=128)
FEW = msgspec.structs.replace(LARGE, num_blocks=16)
BLOCKS = [list(range(1000)), []]
TOKENS = 1000 * 16
QUIET_S = 10.0
"""Less than ``silence_s_max``, after which a hung peer is dead; a cancel ends a read over TCP in milliseconds."""
OVERLAPPING = ([[998, 999], [1000, 1001]], [[1000, 1001], [998, 999]])


@pytest.mark.usefixtures("late")
async def test_blocks_of_a_hung_read_are_refused_until_it_is_over(elsewhere, spawn):
    sleepy = spawn()
    async with (
        sleepy.producing(LARGE, **OVER_TCP) as producer,
        elsewhere.producing(FEW) as other,
        consuming(LARGE, wire_s=5.0) as consumer,
    ):
        other_params = await other.offer("other", [[0, 1], [2, 3]], 32)
        pull, params = await stop_mid_read(sleepy, producer, consumer, BLOCKS, TOKENS)
        with pytest.raises(errors.DeadlineExceeded) as caught:
            await pull
        assert caught.value.phase == "wire"
        assert caught.value.quarantined is True
        assert caught.value.remedy

        quarantined = consumer.worker.snapshot().quarantined
        assert [(entry.reason, entry.num_blocks) for entry in quarantined] == [("deadline_exceeded", 1000)]
        for targets in OVERLAPPING:
            with pytest.raises(errors.BlockIdsInvalid) as refused:
                await consumer.pull(other_params, targets)
            assert "quiesced" in refused.value.remedy
        await works(other, consumer, blocks=[[1002, 1003], [1004, 1005]], sources=[[4, 5], [6, 7]], num_tokens=32)
        quiet = asyncio.create_task(consumer.worker.quiesced("r"))
        await asyncio.sleep(0)
        assert not quiet.done()

        sleepy.resume()
        await quiet
        consumer.at_rest()
        await consumer.pull(other_params, OVERLAPPING[0])
        consumer.has("other", OVERLAPPING[0], 32)
        # The producer has recovered: its ticket is as good as ever.
        await consumer.pull(params, BLOCKS)


async def test_a_hung_producer_that_was_never_met(spawn):
    sleepy = spawn()
    async with sleepy.producing(Shape()) as producer, consuming(handshake_s=2.0) as consumer:
        params = await producer.offer("r", [[0, 1], [2, 3]], 8)
        sleepy.stop()
        with pytest.raises(errors.DeadlineExceeded) as caught:
            await consumer.pull(params, [[0, 1], [2, 3]])
        assert caught.value.phase == "handshake"
        consumer.at_rest()
        sleepy.resume()
        await works(producer, consumer, at_last=True)


async def test_leaving_with_a_hung_read(spawn):
    sleepy = spawn()
    async with sleepy.producing(LARGE, **OVER_TCP) as producer:
        async with consuming(LARGE) as consumer:
            pull, _ = await stop_mid_read(sleepy, producer, consumer, BLOCKS, TOKENS)
        with pytest.raises(errors.TransferCancelled) as caught:
            await pull
        assert caught.value.quarantined is True
        consumer.at_rest()
        sleepy.resume()
        async with consuming(LARGE) as another:
            await works(producer, another, "after", [[1002, 1003], [1004, 1005]], 32)


@pytest.mark.parametrize("encryption", ["off", "tls"])
async def test_a_cancelled_pull_over_tcp_ends_while_its_producer_hangs(spawn, encryption):
    sleepy, settings = spawn(), OVER_TCP | {"tcp_encryption": encryption}
    patient = {"wire_s": 600.0, "fence_s": 600.0, "quarantine_s_max": 600.0}  # none of these ends it
    async with sleepy.producing(LARGE, **settings) as producer, consuming(LARGE, **settings, **patient) as consumer:
        await consumer.pull(await producer.offer_as_is("before", BLOCKS, TOKENS), BLOCKS)  # all connections are open
        pull, params = await stop_mid_read(sleepy, producer, consumer, BLOCKS, TOKENS)
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
        begun_s = time.monotonic()
        async with asyncio.timeout(QUIET_S):
            await consumer.worker.quiesced("r")
        print(f"quiescent after {(time.monotonic() - begun_s) * 1e3:.1f} ms")  # noqa: T201 - a figure to read
        consumer.at_rest()
        consumer.cache.backing.fill_(UNTOUCHED)
        sleepy.resume()
        await consumer.pull(params, BLOCKS)  # the producer has recovered, and dials are let through
        await works(producer, consumer, "after", [[1002, 1003], [1004, 1005]], 32, sources=[[0, 1], [2, 3]])
