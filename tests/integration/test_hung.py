"""A producer that hangs: the pull ends by its budget, and its blocks stay unused while anything may write to them."""

import asyncio

import msgspec
import pytest

from kvflow import errors

from .conftest import OVER_TCP
from .consuming import consuming, works
from .shapes import Shape
from .test_late_write import stop_mid_read

pytestmark = pytest.mark.processes

LARGE = Shape(num_blocks=1024, block_size=16, heads=8, head_size=128)
FEW = msgspec.structs.replace(LARGE, num_blocks=16)
BLOCKS = [list(range(1000)), []]
TOKENS = 1000 * 16
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
