"""A consumer in the test's own process."""

import asyncio
from contextlib import asynccontextmanager

import msgspec

import kvflow
from handshake.sockets import ZeroMqNetwork
from kvflow import errors
from kvflow.worker.environment import PRODUCTION
from tests.helpers.waiting import until

from .producing import configured
from .shapes import Shape, touched, wrong

PATIENCE_S = 60.0
AT_REST = {"pulls": 0, "quarantined": ()}


class Heard(list):
    """A hook that remembers what a worker reports."""

    def __call__(self, event):
        self.append(event)

    def of(self, kind):
        return [event for event in self if isinstance(event, kind)]


class Consumer:
    """One worker that pulls, and its cache."""

    def __init__(self, worker, cache):
        self.worker = worker
        self.cache = cache

    async def pull(self, params, block_ids, **options):
        """Pull what a router brought."""
        return await self.worker.pull(kvflow.Ticket.from_params(params), block_ids, **options)

    async def pull_at_last(self, params, block_ids):
        """Pull, and again after a deadline: the budgets of a test may be shorter than a machine stalls."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    return await self.pull(params, block_ids)
                except (errors.DeadlineExceeded, errors.PeerLost):
                    await self.worker.quiesced(kvflow.Ticket.from_params(params).request_id)
                    await asyncio.sleep(0.01)  # nobody is dialed meanwhile, if that has failed too often

    def has(self, request, block_ids, num_tokens):
        """Assert that these blocks hold this request and that it ended where it should."""
        assert wrong(self.cache, request, block_ids, num_tokens) == []

    def untouched(self, *, but=()):
        """Assert that nothing was written outside of these lists of blocks."""
        assert touched(self.cache, but=but) == []

    def at_rest(self):
        """Assert that no pull has left anything behind."""
        snapshot = self.worker.snapshot()
        assert {"pulls": snapshot.pulls, "quarantined": snapshot.quarantined} == AT_REST


async def works(
    producer, consumer, request="good", blocks=((0, 1), (2, 3)), num_tokens=8, *, sources=None, at_last=False
):
    """Assert that a pull from one to the other succeeds, into these blocks; by default the first of both sides.

    ``at_last``: it may fail before, because the consumer has little time.
    """
    params = await producer.offer(request, sources or blocks, num_tokens)
    await (consumer.pull_at_last if at_last else consumer.pull)(params, blocks)
    consumer.has(request, blocks, num_tokens)
    assert await producer.outcome(request) == "released"


async def reading(producer, consumer, blocks, num_tokens):
    """Start a read of many blocks, and return its pull and ticket while a good part of them has not arrived."""
    (*_, layer), middle = consumer.cache.groups[0].layers, blocks[0][len(blocks[0]) // 2]
    async with asyncio.timeout(PATIENCE_S):
        while True:
            consumer.cache.backing.zero_()
            params = await producer.offer_as_is("r", blocks, num_tokens)
            pull = asyncio.create_task(consumer.pull(params, blocks))
            await until(lambda: consumer.cache.backing[0] != 0)
            if not consumer.cache.component(layer, "v")[middle].any():
                return pull, params
            await pull  # too late: the test had to wait for its turn
            assert await producer.outcome("r") == "released"


@asynccontextmanager
async def consuming(shape=Shape(), *, engine_id="decode-0", hooks=(), environment=PRODUCTION, **settings):  # noqa: B008 - frozen
    """Open a consumer."""
    cache = shape.build()
    config = configured(engine_id, **settings)
    async with kvflow.open_worker(config, cache, hooks=hooks, environment=environment) as worker:
        yield Consumer(worker, cache)


@asynccontextmanager
async def dialing_once(**settings):
    """Open a consumer of which each pull dials once: who is dead is found at once, who lives has the usual time."""
    network = ZeroMqNetwork()
    async with consuming(environment=msgspec.structs.replace(PRODUCTION, network=network), **settings) as consumer:
        network.draw = lambda: 1e6  # of the pause before the next dial, which is too long for a pull
        yield consumer
