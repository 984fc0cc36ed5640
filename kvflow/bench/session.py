"""One pair of caches to measure: a worker there, a worker here, and bare NIXL over the same memory."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import numpy as np

from kvflow.bench.ceilings import BareNixl
from kvflow.bench.geometry import BLOCK_SIZE, Geometry
from kvflow.bench.messages import Opened
from kvflow.bench.sourcing import SourceProcess
from kvflow.cache.tickets import Ticket
from kvflow.config import WorkerConfig
from kvflow.memory.cache import KVCache
from kvflow.transfer.pairs import Int64s
from kvflow.transfer.report import TransferReport
from kvflow.worker.runtime import open_worker
from kvflow.worker.worker import Worker


class Session:
    """Pull through kvflow, or read the same blocks with bare NIXL.

    Attributes:
        opened: the source.
        cache: ours.
        bare: bare NIXL.
    """

    def __init__(
        self,
        offer: Callable[..., Awaitable[list[Ticket]]],
        opened: Opened,
        cache: KVCache,
        worker: Worker,
        bare: BareNixl,
    ) -> None:
        self._offer = offer
        self._worker = worker
        self._bare_first = False
        self.opened = opened
        self.cache = cache
        self.bare = bare

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

    async def paired(self, source_ids: Int64s, target_ids: Int64s) -> tuple[float, float, TransferReport]:
        """Measure kvflow and bare NIXL on the same blocks, in turns one or the other first."""
        (ticket,) = await self.offer(source_ids)
        bound = self.bare.bind(source_ids, target_ids)
        self._bare_first = not self._bare_first
        bare_s = self.bare.read(bound) if self._bare_first else 0.0
        ours_s, report = await self.pull(ticket, target_ids)
        return ours_s, bare_s or self.bare.read(bound), report


@asynccontextmanager
async def open_session(name: str, source: SourceProcess, geometry: Geometry) -> AsyncIterator[Session]:
    """Open both ends and read once, so that connections and page tables are warm."""
    opened = await source.open(name, geometry)
    cache = geometry.build()
    bare = BareNixl(opened, cache)
    try:
        async with open_worker(WorkerConfig(engine_id=f"target-{name}", role="decode"), cache) as worker:
            session = Session(partial(source.offer, name), opened, cache, worker, bare)
            await session.paired(np.arange(1), np.arange(1))
            yield session
    finally:
        bare.close()
