"""One pair of caches to measure: a worker there, a worker here, and bare NIXL over the same memory."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import msgspec
import numpy as np

from kvflow.config import WorkerConfig
from kvflow.leases.tickets import Ticket
from kvflow.memory.cache import KVCache
from kvflow.planning.pairs import Int64s
from kvflow.report import TransferReport
from kvflow.tools.bench.ceilings import BareNixl, open_bare
from kvflow.tools.bench.geometry import BLOCK_SIZE, Geometry
from kvflow.tools.bench.messages import Opened
from kvflow.tools.bench.sourcing import SourceProcess
from kvflow.tools.bench.streams import Streams
from kvflow.worker.runtime import open_worker
from kvflow.worker.worker import Worker


class Session:
    """Pull through kvflow, or read as much in another way.

    Attributes:
        opened: the source.
        cache: ours.
        bare: bare NIXL; None where it does not reach the source.
        streams: plain TCP, as many connections as the worker's TCP plane has; None unless both caches lie in host
            memory.
    """

    def __init__(
        self,
        offer: Callable[..., Awaitable[list[Ticket]]],
        opened: Opened,
        cache: KVCache,
        worker: Worker,
        *,
        bare: BareNixl | None,
        streams: Streams | None,
    ) -> None:
        self._offer = offer
        self._worker = worker
        self._bare_first = False
        self.opened = opened
        self.cache = cache
        self.bare = bare
        self.streams = streams

    async def offer(self, source_ids: Int64s, *, count: int = 1) -> list[Ticket]:
        """Have blocks offered; what this costs is not measured."""
        ids = source_ids.tolist()
        return await self._offer([ids], num_tokens=len(ids) * BLOCK_SIZE, count=count)

    async def pull(self, ticket: Ticket, target_ids: Int64s) -> tuple[float, TransferReport]:
        """Pull once; return the seconds that the caller waited, and the report."""
        ids = [target_ids.tolist()]
        started = time.perf_counter()
        report = await self._worker.pull(ticket, ids)
        return time.perf_counter() - started, report

    async def paired(self, source_ids: Int64s, target_ids: Int64s) -> tuple[float, float | None, TransferReport]:
        """Measure kvflow and bare NIXL, if there is one, on the same blocks, in turns one or the other first."""
        (ticket,) = await self.offer(source_ids)
        if self.bare is None:
            ours_s, report = await self.pull(ticket, target_ids)
            return ours_s, None, report
        bound = self.bare.bind(source_ids, target_ids)
        self._bare_first = not self._bare_first
        bare_s = self.bare.read(bound) if self._bare_first else 0.0
        ours_s, report = await self.pull(ticket, target_ids)
        return ours_s, bare_s or self.bare.read(bound), report


@asynccontextmanager
async def open_session(name: str, source: SourceProcess, geometry: Geometry) -> AsyncIterator[Session]:
    """Open both ends and read once, so that connections and page tables are warm."""
    opened = await source.open(name, geometry)
    cache = msgspec.structs.replace(geometry, device=source.devices.here).build()
    config = WorkerConfig(engine_id=f"target-{name}")
    async with AsyncExitStack() as stack:
        bare = open_bare(opened, cache)
        if bare is not None:
            stack.callback(bare.close)
        streams = None
        if source.devices.in_host_memory:
            streams = Streams(opened.streams, config.tuning.tcp_connections, cache.backing.numpy().data.cast("B"))
            stack.callback(streams.close)
        worker = await stack.enter_async_context(open_worker(config, cache))
        session = Session(partial(source.offer, name), opened, cache, worker, bare=bare, streams=streams)
        await session.paired(np.arange(1), np.arange(1))
        yield session
