"""Bytes that arrive late: a producer is stopped in the middle of a read, and the engine reuses what it may.

Every test here ends with the same question: of the blocks that the engine took back, how many bytes did the old read
write? With quarantine it is none. The same story with a data plane that takes a cancel for the end of a read, which is
what an engine without quarantine believes, must find some: otherwise these tests could not fail.
"""

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec
import pytest
import torch

from kvflow.events import ReaderReset
from kvflow.reads.contract import ReadEnded
from kvflow.reads.thread import create_transport
from kvflow.worker.environment import PRODUCTION
from tests.world.node import Node, Opened

from .conftest import ELSEWHERE, OVER_TCP
from .consuming import PATIENCE_S, Consumer, consuming, until, works
from .shapes import Shape

pytestmark = [*ELSEWHERE, pytest.mark.usefixtures("late")]

LARGE = Shape(num_blocks=520, block_size=16, heads=8, head_size=128)
FEW = msgspec.structs.replace(LARGE, num_blocks=16)
BLOCKS = [list(range(500)), []]
"""62 MiB, of which 16 are in flight: more than sockets buffer."""
SPARE = list(range(500, 518))
AFTER = [[518, 519], []]
TOKENS = 500 * 16
THE_ENGINES = 0xA5
"""What the engine writes into blocks that it reuses. The producer's cache never holds it everywhere."""


class Hasty:
    """A data plane that takes a cancel for the end of a read, and does not tell what its reads do after that.

    Attributes:
        over: set once all reads that were called over have really ended.
    """

    def __init__(self, config, agent_name, sink, staging_bytes):
        self._inner = create_transport(config, agent_name, self._hear, staging_bytes)
        self._sink = sink
        self._lock = threading.Lock()
        self._ended = set()
        self._owed = set()
        self.over = threading.Event()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def post(self, reads, *turn):
        answers = self._inner.post(reads, *turn)
        with self._lock:
            self._ended |= {ended.read_id for ended in answers}
        return answers

    def cancel(self, read_ids):
        with self._lock:
            called_over = set(read_ids) - self._ended - self._owed
            self._owed |= called_over
        for read_id in called_over:
            self._sink(ReadEnded(read_id, "failed", "cancelled", "or so it believes"))
        self._inner.cancel(read_ids)

    def _hear(self, event):
        with self._lock:
            if isinstance(event, ReadEnded):
                self._ended.add(event.read_id)
                if event.read_id in self._owed:
                    if self._owed <= self._ended:
                        self.over.set()
                    return
        self._sink(event)


class Engine:
    """Reuses blocks, and counts what others write into them."""

    def __init__(self, cache):
        self._content = [
            cache.component(layer, role).view(torch.uint8) for layer in cache.groups[0].layers for role in "kv"
        ]
        self._taken = []

    def reuse(self, blocks):
        self._taken += blocks
        for content in self._content:
            content[blocks] = THE_ENGINES

    def overwritten(self):
        """Return how many bytes of the blocks that it has reused are not its own any more."""
        return sum(int((content[self._taken] != THE_ENGINES).sum()) for content in self._content)


class Scene(NamedTuple):
    """Who is on it: a process that does not run, its producer, and who has read from it."""

    sleepy: Node
    producer: Opened
    consumer: Consumer
    engine: Engine


async def stop_mid_read(sleepy, producer, consumer, blocks, num_tokens):
    """Stop a producer in the first half of a read of many blocks, and return the pull and its ticket.

    What sockets hold by then arrives nevertheless, and is much less than the other half.
    """
    contents = [consumer.cache.component(layer, role) for layer in consumer.cache.groups[0].layers for role in "kv"]
    async with asyncio.timeout(PATIENCE_S):
        while True:
            consumer.cache.backing.zero_()
            params = await producer.offer_as_is("r", blocks, num_tokens)
            pull = asyncio.create_task(consumer.pull(params, blocks))
            await until(lambda: consumer.cache.backing[0] != 0)
            sleepy.stop()
            arrived = sum(int(content[blocks[0]].flatten(1).any(1).sum()) for content in contents)
            if arrived < len(contents) * len(blocks[0]) // 2:
                return pull, params
            sleepy.resume()  # too late: the test had to wait for its turn
            await pull
            assert await producer.outcome("r") == "released"


@asynccontextmanager
async def stopped_mid_read(spawn, **options):
    """A consumer, its engine, and a producer over TCP that stopped while all its blocks were read; the pull is over."""
    sleepy = spawn()
    async with sleepy.producing(LARGE, **OVER_TCP) as producer, consuming(LARGE, **options) as consumer:
        pull, _ = await stop_mid_read(sleepy, producer, consumer, BLOCKS, TOKENS)
        engine = Engine(consumer.cache)
        engine.reuse(SPARE)
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
        try:
            yield Scene(sleepy, producer, consumer, engine)
        finally:
            sleepy.resume()


async def test_with_quarantine_nothing_is_written_into_blocks_that_were_reused(spawn):
    async with stopped_mid_read(spawn) as (sleepy, producer, consumer, engine):
        (entry,) = consumer.worker.snapshot().quarantined
        assert (entry.reason, entry.num_blocks) == ("transfer_cancelled", 500)
        quiet = asyncio.create_task(consumer.worker.quiesced("r"))
        await asyncio.sleep(0)
        assert not quiet.done()  # so the engine leaves these blocks alone
        sleepy.resume()
        await quiet
        engine.reuse(BLOCKS[0])
        consumer.at_rest()
        # A read over the same connection comes after all that the old one had sent.
        await works(producer, consumer, "after", AFTER, 32, sources=[[0, 1], []])
        assert engine.overwritten() == 0


async def test_without_quarantine_the_same_read_overwrites_them(spawn):
    made = []

    def make(config, agent_name, sink, staging_bytes):
        made.append(Hasty(config, agent_name, sink, staging_bytes))
        return made[0]

    environment = msgspec.structs.replace(PRODUCTION, open_transport=make)
    async with stopped_mid_read(spawn, environment=environment) as (sleepy, _, consumer, engine):
        await consumer.worker.quiesced("r")  # or so it believes
        consumer.at_rest()
        engine.reuse(BLOCKS[0])
        sleepy.resume()
        assert await asyncio.to_thread(made[0].over.wait, PATIENCE_S)
        assert engine.overwritten() > 0


@pytest.mark.parametrize(
    "limit", [{"quarantine_s_max": 0.2}, {"quarantine_bytes_max": 0}], ids=["too long", "too much"]
)
async def test_blocks_of_a_read_that_never_ends_are_freed_by_renewing_the_reader(elsewhere, spawn, heard, limit):
    async with (
        elsewhere.producing(FEW) as other,
        stopped_mid_read(spawn, hooks=[heard], **limit) as (sleepy, producer, consumer, engine),
    ):
        beside = asyncio.create_task(works(other, consumer, "beside", AFTER, 32, sources=[[0, 1], []]))
        await consumer.worker.quiesced("r")
        await beside
        consumer.at_rest()
        await until(lambda: heard.of(ReaderReset))
        (event,) = heard.of(ReaderReset)
        assert event.setting == next(iter(limit))
        assert (event.num_blocks, event.ended > 0) == (500, True)
        engine.reuse(BLOCKS[0])
        sleepy.resume()
        await works(producer, consumer, "again", AFTER, 32, sources=[[0, 1], []])
        await works(other, consumer, "after", AFTER, 32, sources=[[0, 1], []])
        assert engine.overwritten() == 0
