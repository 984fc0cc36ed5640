"""One consumer and the ranks of one producer: real workers of this process, over a loopback with faults."""

import asyncio
import threading
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from kvflow.cache.epochs import EPOCH_BITS
from kvflow.cache.tickets import join_tickets
from kvflow.config import WorkerConfig
from kvflow.layout.shards import Shard
from kvflow.rendezvous.mint import TicketMint
from kvflow.transfer.events import TransferCompleted, TransferFailed
from kvflow.transport.base import INLINE_S_MAX
from kvflow.transport.loopback import LoopbackMover
from kvflow.transport.mover import Flight, MoveFailed
from kvflow.transport.staging import StagingMemory
from kvflow.transport.threaded import ThreadedTransport
from kvflow.worker.runtime import open_worker
from kvflow.worker.surroundings import REAL

from .helpers import PATIENCE_S, SECRET, cache_of


def config(engine_id="prefill-0", **settings):
    return WorkerConfig(**{"engine_id": engine_id, "cluster_secret": SECRET, "transport": "loopback"} | settings)


EARLY_SLOT = 100


class Faults:
    """What a data plane does wrong from now on, and what it was asked for.

    Attributes:
        hung: ranks whose chunks do not end.
        failing: rank -> code with which its chunks fail.
        stuck: cleared while calls into the data plane do not return.
        chunks: ids of the reads of each chunk that was posted.
        checks: ids of the reads of each first check.
        calls: what the event loop told the data plane, in order.
        busy: has a token for each chunk that began to hang, and each call that did not return.
    """

    def __init__(self):
        self.hung, self.failing = set(), {}
        self.stuck = threading.Event()
        self.stuck.set()
        self.chunks, self.checks, self.calls = [], [], []
        self.busy = threading.Semaphore(0)

    @property
    def batches(self):
        """The reads that were handed over, one list for each call."""
        return [list(reads) for name, reads in self.calls if name == "post"]

    def heal(self):
        """Let everything end."""
        self.hung.clear()
        self.failing.clear()
        self.stuck.set()

    async def strike(self, count=1):
        """Wait until so many more chunks hang, or calls do not return."""
        for _ in range(count):
            assert await asyncio.to_thread(self.busy.acquire, timeout=PATIENCE_S)


class _Hung(Flight):
    """A chunk that does not end before its peer is healed."""

    def __init__(self, chunk):
        self.chunk = chunk


class FaultyMover(LoopbackMover):
    """The loopback, with faults."""

    def __init__(self, faults, *given):
        super().__init__(*given)
        self._faults = faults

    def ends_at_once(self, peer):
        return not self._faults.hung

    def post(self, chunk):
        faults, rank = self._faults, chunk.portion.peer.rank
        faults.chunks.append([share.read_id for share in chunk.portion.shares])
        if not faults.stuck.is_set():
            faults.busy.release()
            assert faults.stuck.wait(PATIENCE_S)
        if rank in faults.failing:
            raise MoveFailed(faults.failing[rank], "as the test says")
        if rank in faults.hung:
            faults.busy.release()
            return _Hung(chunk)
        return super().post(chunk)

    def post_check(self, peer_id, first, last, reads, *, fence):
        if not fence:
            self._faults.checks.append([read_id for read_id, _ in reads])
        return super().post_check(peer_id, first, last, reads, fence=fence)

    def poll(self, flight):
        faults, rank = self._faults, flight.chunk.portion.peer.rank
        if rank in faults.hung:
            return None
        if rank in faults.failing:
            raise MoveFailed(faults.failing[rank], "as the test says")
        return super().post(flight.chunk)


class FaultyTransport(ThreadedTransport):
    """A transport of the faulty mover that notes what it is told."""

    def __init__(self, faults, agent_name, sink, inline_s_max):
        super().__init__(
            "loopback",
            {"loopback": lambda regions, epochs, *_: FaultyMover(faults, agent_name, regions, epochs)},
            sink,
            StagingMemory(0),
            inline_s_max=inline_s_max,
        )
        self._faults = faults

    def post(self, reads):
        self._faults.calls.append(("post", tuple(reads)))
        return super().post(reads)

    def cancel(self, read_ids):
        self._faults.calls.append(("cancel", tuple(read_ids)))
        super().cancel(read_ids)

    def prepare(self, program):
        self._faults.calls.append(("prepare", program))
        super().prepare(program)


def with_faults(faults, inline_s_max=INLINE_S_MAX):
    """Return the surroundings of a worker with a faulty data plane."""

    def open_transport(_config, agent_name, sink, _staging_bytes=0):
        return FaultyTransport(faults, agent_name, sink, inline_s_max)

    return msgspec.structs.replace(REAL, open_transport=open_transport)


class World:
    """The workers, their caches, and what the consumer reported."""

    def __init__(self, producers, consumer, target, faults, events):
        self.producers, self.consumer, self.target = producers, consumer, target
        self.faults, self.events = faults, events
        self._mint = None

    @property
    def producer(self):
        (producer,) = self.producers
        return producer

    def ticket(self, request_id="request-1", blocks=(3, 4), **how):
        """Offer blocks on every rank."""
        tokens = 4 * len(blocks)
        return join_tickets([each.offer(request_id, [list(blocks)], tokens, **how) for each in self.producers])

    def early(self, request_id="request-1", blocks=(3, 4)):
        """Return a ticket whose lease is not held yet, and what admits it."""
        if self._mint is None:
            epoch_base = str(2**EPOCH_BITS)  # which no offer of the worker itself reaches
            ahead = msgspec.structs.replace(self.producer.rank_address, epoch_base=epoch_base)
            self._mint = TicketMint("prefill-0", [ahead], cluster_secret=SECRET)
            for slot in range(EARLY_SLOT):  # the worker's own offers take the first ones
                self._mint.offer(f"nobody's {slot}", block_ids=[[1]], num_tokens=1)
        ticket, grant = self._mint.offer(request_id, block_ids=[list(blocks)], num_tokens=4 * len(blocks))
        return ticket, lambda: self.producer.admit(grant)

    def start(self, ticket=None, blocks=(1, 2), **how):
        return self.consumer.start_pull(ticket or self.ticket(), [list(blocks)], **how)

    async def pull(self, ticket=None, blocks=(1, 2), **how):
        async with asyncio.timeout(PATIENCE_S):
            return await self.start(ticket, blocks, **how)

    async def connect(self):
        """Read something, so that the next pull finds its peers connected."""
        return await self.pull(self.ticket("connect", (0,)), (0,))

    async def idle(self):
        """Wait until the consumer looks at no deadline, as it has nothing open."""
        async with asyncio.timeout(PATIENCE_S):
            while self.consumer._consumer._busy.is_set():  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.001)

    def holds(self, targets, sources):
        """Tell whether our blocks hold what the producer's held."""
        return all(
            bool((view[target] == source + 1).all())
            for view in self.target.views.values()
            for target, source in zip(targets, sources, strict=True)
        )

    def of(self, *kinds):
        """Return the consumer's events of these kinds, without those of ``connect``."""
        found = [event for event in self.events if isinstance(event, kinds)]
        return [event for event in found if getattr(event, "request_id", "") != "connect"]

    async def heard(self, kind, count=1):
        """Wait until the consumer has reported so many events of a kind; return them."""
        async with asyncio.timeout(PATIENCE_S):
            while len(found := self.of(kind)) < count:  # noqa: ASYNC110 - a hook is no task
                await asyncio.sleep(0.001)
        return found

    async def records(self, count=1):
        """Wait until so many pulls have their record; return them by the name of their request."""
        async with asyncio.timeout(PATIENCE_S):
            while len(found := self.of(TransferCompleted, TransferFailed)) < count:  # noqa: ASYNC110 - likewise
                await asyncio.sleep(0.001)
        assert len(found) == count
        return {record.request_id: record for record in found}

    async def record(self):
        """Wait for the record of the only pull."""
        (record,) = (await self.records()).values()
        return record


async def failure(awaitable):
    """Wait for something that fails; return its error."""
    async with asyncio.timeout(PATIENCE_S):
        (error,) = await asyncio.gather(awaitable, return_exceptions=True)
    assert isinstance(error, BaseException), f"it ended with {error}"
    return error


@asynccontextmanager
async def opened(*, ranks=1, num_blocks=8, inline_s_max=INLINE_S_MAX, pulls_max=REAL.pulls_max, theirs=(), **ours):
    """Open a world; leaving it checks the laws, and that nothing is left.

    Args:
        ranks: of the producer, each with an equal share of the heads.
        num_blocks: of each cache.
        inline_s_max: as of ``ThreadedTransport``.
        pulls_max: as of ``Surroundings``.
        theirs: settings of the producer's workers.
        ours: settings of the consumer.
    """
    faults, events = Faults(), []
    surroundings = msgspec.structs.replace(with_faults(faults, inline_s_max), pulls_max=pulls_max)
    sources = [cache_of(num_blocks, shard=Shard(tp_rank=rank, tp_size=ranks)) for rank in range(ranks)]
    for source in sources:
        for view in source.views.values():
            for block in range(num_blocks):
                view[block].fill_(block + 1)
    target = cache_of(num_blocks)
    async with AsyncExitStack() as stack:
        producers = [
            await stack.enter_async_context(open_worker(config(rank=rank, num_ranks=ranks, **dict(theirs)), source))
            for rank, source in enumerate(sources)
        ]
        consumer = await stack.enter_async_context(
            open_worker(config("decode-0", **ours), target, hooks=[events.append], surroundings=surroundings)
        )
        world = World(producers, consumer, target, faults, events)
        try:
            yield world
        finally:
            faults.heal()
        async with asyncio.timeout(PATIENCE_S):
            while consumer.snapshot().pulls:  # noqa: ASYNC110 - a healed data plane ends them all
                await asyncio.sleep(0.001)
        consumer.check()
        assert consumer.snapshot().quarantined == ()
