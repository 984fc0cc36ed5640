"""An engine that sleeps: its memory goes away while others know where it was, and it comes back elsewhere."""

import asyncio
import threading
import time

import pytest
import torch

import kvflow
from kvflow import errors
from kvflow.events import TransferStarted
from tests.ports import free_port
from tests.world.node import Node

from .conftest import OVER_TCP
from .consuming import PATIENCE_S, consuming, until, works
from .producing import configured
from .shapes import Shape, wrong
from .sleeping import sleeper
from .test_late_write import AFTER, BLOCKS, LARGE, TOKENS, Engine

SMALL_BLOCKS = [[0, 1], [2, 3]]
AWAKE = 0x11
"""What lies in the memory of an engine while it is awake, where its content does not matter."""
GONE = {errors.StaleLease.code, errors.PeerLost.code, errors.PeerUnavailable.code}
REFUSED_S = 25.0
"""Less than ``queue_s`` and ``wire_s``: nobody waits for a producer that has said goodbye, or that nobody reaches."""


@pytest.fixture
def sleeping():
    """Start engines that sleep, each in a process of its own."""
    nodes = []

    async def start(shape=Shape(), **settings):  # noqa: B008 - frozen
        nodes.append(Node())
        return await nodes[-1].open_another(sleeper, shape, **settings)

    yield start
    for node in nodes:
        node.go()


async def refused(consumer, params, blocks=SMALL_BLOCKS):
    """Pull what cannot be had, and return the code of the error, which comes soon."""
    begun_s = time.monotonic()
    with pytest.raises(errors.TransferFailed) as caught:
        await consumer.pull(params, blocks)
    assert time.monotonic() - begun_s < REFUSED_S
    return caught.value.code


@pytest.mark.proves("sleep and wake", engine="bytes")
@pytest.mark.parametrize("memory", ["unmapped", "overwritten"])
@pytest.mark.nixl
@pytest.mark.processes
async def test_a_producer_sleeps_and_serves_the_same_consumers_from_other_memory(sleeping, memory):
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    engine = await sleeping(bind=endpoint)
    async with consuming() as consumer, consuming(engine_id="stranger") as stranger:
        await works(engine, consumer, "before")
        old = await engine.offer("old", SMALL_BLOCKS, 8)
        await engine.suspend(memory=memory)
        assert await refused(consumer, old) == "stale_lease"
        assert await refused(stranger, old) in GONE
        assert await engine.resume() == endpoint
        assert await refused(consumer, old) == "stale_lease"
        assert await refused(stranger, old) == "stale_lease"
        for each in (consumer, stranger):
            await works(engine, each, f"for {each.worker.incarnation}")
            each.untouched(but=SMALL_BLOCKS)
            each.at_rest()
        assert await refused(consumer, old) == "stale_lease"


@pytest.mark.parametrize("wire", [{}, OVER_TCP], ids=["shared memory", "tcp"])
@pytest.mark.parametrize("memory", ["unmapped", "overwritten"])
@pytest.mark.nixl
@pytest.mark.processes
async def test_a_producer_falls_asleep_while_it_is_read(sleeping, memory, wire):
    engine = await sleeping(LARGE, **wire)
    async with consuming(LARGE) as consumer:
        for turn in range(2):
            await engine.fill(byte=AWAKE)
            consumer.cache.backing.zero_()
            params = await engine.offer_as_is(request="r", block_ids=BLOCKS, num_tokens=TOKENS)
            pull = asyncio.create_task(ending(consumer, params))
            await until(lambda: consumer.cache.backing[0] != 0)
            await engine.suspend(memory=memory)
            async with asyncio.timeout(PATIENCE_S):
                end = await pull
                await consumer.worker.quiesced("r")
            assert end in GONE | {"right"}, f"turn {turn}"
            consumer.at_rest()
            await engine.resume()
        await works(engine, consumer, "after", AFTER, 32, sources=[[0, 1], []])


async def ending(consumer, params):
    """Pull a cache that holds one byte everywhere, and say how that has ended."""
    try:
        await consumer.pull(params, BLOCKS)
    except errors.TransferFailed as error:
        return error.code
    read = [consumer.cache.component(layer, role) for layer in consumer.cache.groups[0].layers for role in "kv"]
    return "right" if all(bool((part[BLOCKS[0]].view(torch.uint8) == AWAKE).all()) for part in read) else "wrong"


class Held:
    """A hook that holds a worker's loop when it has begun a pull, until somebody lets it go on.

    Attributes:
        reached: set when it holds the loop.
    """

    def __init__(self):
        self.reached = threading.Event()
        self._go_on = threading.Event()

    def __call__(self, event):
        if isinstance(event, TransferStarted):
            self.reached.set()
            assert self._go_on.wait(PATIENCE_S)

    def let_go(self):
        self._go_on.set()


@pytest.mark.nixl
@pytest.mark.processes
async def test_nothing_is_written_into_the_memory_of_a_consumer_that_sleeps(elsewhere, spawn):
    """The producer hangs while it is read over TCP, and goes on when the memory is somebody else's."""
    sleepy, first, second, held = spawn(), LARGE.build(), LARGE.build(), Held()
    with kvflow.run_worker(configured("decode-0"), first, hooks=[held]) as consumer:
        async with sleepy.producing(LARGE, **OVER_TCP) as producer, elsewhere.producing(LARGE) as other:
            ticket = kvflow.Ticket.from_params(await producer.offer_as_is("r", BLOCKS, TOKENS))
            pull = consumer.pull(ticket, BLOCKS)
            assert await asyncio.to_thread(held.reached.wait, PATIENCE_S)
            sleepy.stop()
            try:
                held.let_go()
                await asyncio.to_thread(consumer.suspend)
                assert pull.done(), "it is suspended, and something may still write"
                assert isinstance(pull.exception(), errors.TransferCancelled)
                assert [(end.request_id, end.outcome) for end in consumer.finished()] == [("r", "failed")]
                engine = Engine(first)
                engine.reuse(list(range(LARGE.num_blocks)))
                sleepy.resume()
                await asyncio.to_thread(consumer.resume, second)
                params = await other.offer("after", AFTER, 32)
                await asyncio.wrap_future(consumer.pull(kvflow.Ticket.from_params(params), AFTER))
                assert wrong(second, "after", AFTER, 32) == []
                assert engine.overwritten() == 0
            finally:
                sleepy.resume()
