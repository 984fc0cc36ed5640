"""A producer that is killed: an error within two seconds, and everybody else is served as if nothing had happened."""

import asyncio
import time

import msgspec
import pytest

from kvflow import errors
from kvflow.events import TransferCompleted
from tests.ports import free_port

from .conftest import ELSEWHERE, OVER_TCP
from .consuming import PATIENCE_S, consuming, dialing_once, reading, until, works
from .shapes import Shape

pytestmark = ELSEWHERE

BLOCKS = [[0, 1], [2, 3]]
OTHER_TARGETS = [[4090, 4091], [4092, 4093]]
LARGE = Shape(num_blocks=4096, block_size=16, heads=8, head_size=128)
FEW = msgspec.structs.replace(LARGE, num_blocks=16)
MOST_BLOCKS = [list(range(4080)), []]
"""510 MiB: a read of it takes a tenth of a second over shared memory."""
MOST_TOKENS = 4080 * 16
SOON_S = 25.0
"""A pull is lost within 2 s on an idle machine, and after a deadline of 30 s if nobody notices."""
WIRES = {"shared memory": {}, "tcp": OVER_TCP}


async def lost_soon(pull):
    """Await the end of a pull from a process that was killed just now: long before its deadline."""
    begun_s = time.monotonic()
    with pytest.raises(errors.PeerLost) as caught:
        await pull
    assert time.monotonic() - begun_s < SOON_S
    assert caught.value.code == "peer_lost"
    assert caught.value.remedy


@pytest.mark.parametrize("wire", WIRES)
async def test_while_it_is_read_from(elsewhere, spawn, wire):
    doomed = spawn()
    async with (
        doomed.producing(LARGE, **WIRES[wire]) as victim,
        elsewhere.producing(FEW) as other,
        consuming(LARGE) as consumer,
    ):
        await works(other, consumer, num_tokens=32)
        beside = await other.offer("beside", BLOCKS, 32)
        pull, _ = await reading(victim, consumer, MOST_BLOCKS, MOST_TOKENS)
        doomed.kill()
        small = asyncio.create_task(consumer.pull(beside, OTHER_TARGETS))
        await lost_soon(pull)
        await small
        consumer.has("beside", OTHER_TARGETS, 32)
        await consumer.worker.quiesced("r")
        consumer.at_rest()
        await works(other, consumer, num_tokens=32)


async def test_after_the_last_byte_but_before_it_heard_of_it(elsewhere, spawn):
    doomed = spawn()

    def kill_when_completed(event):
        if isinstance(event, TransferCompleted) and event.request_id == "r":
            doomed.kill()

    async with (
        doomed.producing(Shape()) as victim,
        elsewhere.producing(Shape()) as other,
        consuming(hooks=[kill_when_completed]) as consumer,
    ):
        params = await victim.offer("r", BLOCKS, 8)
        await consumer.pull(params, BLOCKS)
        consumer.has("r", BLOCKS, 8)  # the fence was held, so these bytes are right
        await until(lambda: doomed.process.poll() is not None)  # the record comes after the caller's turn
        consumer.at_rest()
        await works(other, consumer)


async def verdict_on(consumer, params):
    """Pull, and pull again whenever the consumer says that it will know more; return the error that this ends with."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with pytest.raises(errors.TransferFailed) as caught:
                await consumer.pull(params, BLOCKS)
            if not isinstance(caught.value, errors.PeerLost):
                return caught.value
            # Its breaker is open, or an attempt had begun before the successor listened.
            await asyncio.sleep(max(0.01, getattr(caught.value, "retry_after_s", 0.0)))


@pytest.mark.parametrize("late", [False, True], ids=["successor at once", "successor when its breaker is open"])
async def test_a_restarted_producer_knows_its_old_tickets_no_more(spawn, late):
    doomed, heir = spawn(), spawn()
    bind = f"tcp://127.0.0.1:{free_port()}"
    async with doomed.producing(Shape(), bind=bind) as victim, dialing_once() as consumer:
        await works(victim, consumer)
        old = await victim.offer("r", BLOCKS, 8)
        doomed.kill()
        while late:
            with pytest.raises(errors.PeerLost) as caught:
                await consumer.pull(old, BLOCKS)
            late = not isinstance(caught.value, errors.PeerUnavailable)
        async with heir.producing(Shape(), bind=bind) as successor:
            assert successor.endpoint == victim.endpoint
            assert isinstance(await verdict_on(consumer, old), errors.StaleLease)
            await works(successor, consumer)
            with pytest.raises(errors.StaleLease):
                await consumer.pull(old, BLOCKS)
