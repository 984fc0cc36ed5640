"""How a simulated engine speaks to its worker: as a program of asyncio, or as one that is not.

Both say the same: a pull has ended when the engine may use its blocks again, whatever became of it.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from kvflow.config import WorkerConfig
from kvflow.errors import TransferFailed
from kvflow.events import Event, Hook, LeaseEnded, Outcome
from kvflow.leases.tickets import Grant, Ticket
from kvflow.worker.runtime import Cache
from kvflow.worker.threaded import Finished, LoopCalls, ThreadedWorker, WorkerThread
from kvflow.worker.worker import DrainReport, Worker
from tests.fakes.memory import SimulatedCache
from tests.fakes.process import Process
from tests.fakes.world import World

BlockIds = Sequence[Sequence[int]]

STEP_S = 1e-3
"""Time from one step of an engine to the next."""


class Face(Protocol):
    """What an engine calls. See ``kvflow.worker.worker.Worker``."""

    def offer(self, request_id: str, block_ids: BlockIds, num_tokens: int) -> Ticket:
        """See ``Worker.offer``."""
        ...

    def keep(self, request_id: str, block_ids: BlockIds, num_tokens: int, digests: list[list[bytes]]) -> Ticket:
        """See ``Worker.keep``."""
        ...

    def offer_progressive(
        self, request_id: str, block_ids: BlockIds, num_tokens: int, digests: list[list[bytes]]
    ) -> Ticket:
        """See ``Worker.offer_progressive``."""
        ...

    def advance(self, request_id: str, num_tokens: int, new_block_ids: BlockIds) -> None:
        """See ``Worker.advance``."""
        ...

    def seal(self, request_id: str, new_block_ids: BlockIds) -> None:
        """See ``Worker.seal``."""
        ...

    def admit(self, grant: Grant, digests: list[list[bytes]] | None) -> None:
        """See ``Worker.admit``."""
        ...

    def revoke(self, request_id: str) -> bool:
        """See ``Worker.revoke``."""
        ...

    async def offer_when_possible(
        self, request_id: str, block_ids: BlockIds, num_tokens: int, timeout_s: float
    ) -> Ticket:
        """See ``Worker.offer_when_possible``."""
        ...

    async def wait_offer(self, request_id: str) -> Outcome:
        """See ``Worker.wait_offer``."""
        ...

    async def hold(self, ticket: Ticket, *, name: str) -> None:
        """See ``Worker.hold``."""
        ...

    async def release(self, ticket: Ticket, *, name: str) -> None:
        """See ``Worker.release``."""
        ...

    async def pull(self, ticket: Ticket, block_ids: BlockIds, *, priority: int, name: str) -> None:
        """See ``Worker.pull``; ends, also when it is cancelled, when nothing writes into the blocks now."""
        ...

    async def find(self, endpoint: str, digests: list[bytes], wait_s: float) -> tuple[Ticket | None, int]:
        """See ``Worker.find``."""
        ...

    async def drain(self, deadline_s: float) -> DrainReport:
        """See ``Worker.drain``."""
        ...


class AsyncFace:
    """A worker whose engine lives on its event loop.

    Args:
        worker: that is open.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.offer = worker.offer
        self.keep = worker.keep
        self.advance = worker.advance
        self.seal = worker.seal
        self.admit = worker.admit
        self.revoke = worker.revoke
        self.wait_offer = worker.wait_offer
        self.find = worker.find
        self.drain = worker.drain

    def offer_progressive(
        self, request_id: str, block_ids: BlockIds, num_tokens: int, digests: list[list[bytes]]
    ) -> Ticket:
        """See ``Face.offer_progressive``."""
        return self._worker.offer_progressive(request_id, block_ids, num_tokens, digests=digests).ticket

    async def offer_when_possible(
        self, request_id: str, block_ids: BlockIds, num_tokens: int, timeout_s: float
    ) -> Ticket:
        """See ``Face.offer_when_possible``."""
        return await self._worker.offer_when_possible(request_id, block_ids, num_tokens, timeout_s=timeout_s)

    async def hold(self, ticket: Ticket, *, name: str) -> None:
        """See ``Face.hold``."""
        self._worker.hold(ticket, local_request_id=name)

    async def release(self, ticket: Ticket, *, name: str) -> None:
        """See ``Face.release``."""
        await self._worker.release(ticket, local_request_id=name)

    async def pull(self, ticket: Ticket, block_ids: BlockIds, *, priority: int, name: str) -> None:
        """See ``Face.pull``."""
        try:
            await self._worker.pull(ticket, block_ids, priority=priority, local_request_id=name)
        except asyncio.CancelledError:
            await _unless_cancelled(lambda: self._worker.quiesced(ticket.request_id))
            raise
        except TransferFailed as error:
            if error.quarantined:
                await _unless_cancelled(lambda: self._worker.quiesced(ticket.request_id))
            raise


class ThreadedFace:
    """The production ``ThreadedWorker``, with the process's loop in place of a thread of its own.

    Its engine asks what has ended as soon as something has, and uses the blocks again in that very moment.

    Args:
        world: whose promises are checked.
        process: whose loop it is.
        calls: onto that loop.
    """

    def __init__(self, world: World, process: Process, calls: LoopCalls) -> None:
        self._world = world
        self._process = process
        self._calls = calls
        self._hooks: list[Hook] = []
        self._threaded: list[ThreadedWorker] = []  # one when the worker is open
        self._pulls: dict[str, asyncio.Future[Finished]] = {}
        self._leases: deque[tuple[str, Outcome]] = deque()

    def on_event(self, event: Event) -> None:
        """Take what the worker reports."""
        for hook in self._hooks:
            hook(event)
        if isinstance(event, LeaseEnded) and event.kind != "kept":
            self._leases.append((event.request_id, event.outcome))
            self._process.call_soon(self._step)

    def open(self, worker: Worker, config: WorkerConfig, cache: SimulatedCache) -> None:
        """Face a worker that is open."""

        def start(_config: WorkerConfig, _cache: Cache, hooks: Sequence[Hook]) -> WorkerThread:
            self._hooks.extend(hooks)
            return WorkerThread(worker, self._calls, lambda: None)

        threaded = ThreadedWorker(config, (), cache, start=start)
        self._threaded.append(threaded)

    def offer(self, request_id: str, block_ids: BlockIds, num_tokens: int) -> Ticket:
        """See ``Face.offer``."""
        (threaded,) = self._threaded
        return threaded.offer(request_id, block_ids, num_tokens)

    def keep(self, request_id: str, block_ids: BlockIds, num_tokens: int, digests: list[list[bytes]]) -> Ticket:
        """See ``Face.keep``."""
        (threaded,) = self._threaded
        return threaded.keep(request_id, block_ids, num_tokens, digests)

    def offer_progressive(
        self, request_id: str, block_ids: BlockIds, num_tokens: int, digests: list[list[bytes]]
    ) -> Ticket:
        """See ``Face.offer_progressive``."""
        (threaded,) = self._threaded
        return threaded.offer_progressive(request_id, block_ids, num_tokens, digests=digests).ticket

    def advance(self, request_id: str, num_tokens: int, new_block_ids: BlockIds) -> None:
        """See ``Face.advance``."""
        (threaded,) = self._threaded
        threaded.advance(request_id, num_tokens, new_block_ids)

    def seal(self, request_id: str, new_block_ids: BlockIds) -> None:
        """See ``Face.seal``."""
        (threaded,) = self._threaded
        threaded.seal(request_id, new_block_ids)

    def admit(self, grant: Grant, digests: list[list[bytes]] | None) -> None:
        """See ``Face.admit``."""
        (threaded,) = self._threaded
        threaded.admit(grant, digests)

    def revoke(self, request_id: str) -> bool:
        """See ``Face.revoke``."""
        (threaded,) = self._threaded
        return threaded.revoke(request_id)

    def close(self) -> None:
        """Check that the engine was told of every end, when the worker is closed and all calls have ended."""
        self._step()
        if self._leases or self._pulls:
            self._world.fail(f"{self._process.name}: nobody was told the end of {[*self._leases, *self._pulls]}")

    async def offer_when_possible(
        self, request_id: str, block_ids: BlockIds, num_tokens: int, timeout_s: float
    ) -> Ticket:
        """See ``Face.offer_when_possible``."""
        (threaded,) = self._threaded
        waiting = threaded.offer_when_possible(request_id, block_ids, num_tokens, timeout_s=timeout_s)
        try:
            return await asyncio.wrap_future(waiting, loop=self._process)
        except asyncio.CancelledError:
            if not waiting.cancel() and waiting.exception() is None:
                threaded.revoke(request_id)  # it had its ticket, and we were about to be told
            raise

    async def wait_offer(self, request_id: str) -> Outcome:
        """See ``Face.wait_offer``."""
        (threaded,) = self._threaded
        return await asyncio.wrap_future(threaded.wait_offer(request_id), loop=self._process)

    async def hold(self, ticket: Ticket, *, name: str) -> None:
        """See ``Face.hold``."""
        (threaded,) = self._threaded
        await asyncio.wrap_future(threaded.hold(ticket, local_request_id=name), loop=self._process)

    async def release(self, ticket: Ticket, *, name: str) -> None:
        """See ``Face.release``."""
        (threaded,) = self._threaded
        await asyncio.wrap_future(threaded.release(ticket, local_request_id=name), loop=self._process)

    async def find(self, endpoint: str, digests: list[bytes], wait_s: float) -> tuple[Ticket | None, int]:
        """See ``Face.find``."""
        (threaded,) = self._threaded
        return await asyncio.wrap_future(threaded.find(endpoint, digests, wait_s), loop=self._process)

    async def drain(self, deadline_s: float) -> DrainReport:
        """See ``Face.drain``."""
        (threaded,) = self._threaded
        return await asyncio.wrap_future(threaded.drain(deadline_s), loop=self._process)

    async def pull(self, ticket: Ticket, block_ids: BlockIds, *, priority: int, name: str) -> None:
        """See ``Face.pull``."""
        (threaded,) = self._threaded
        future = threaded.pull(ticket, block_ids, priority=priority, local_request_id=name)
        ended: asyncio.Future[Finished] = self._process.create_future()
        self._pulls[name] = ended
        future.add_done_callback(lambda _: self._process.call_soon(self._step))
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            future.cancel()
            self._ask_until(ended)  # the future says so at once, and nothing more when the pull has ended
            await _unless_cancelled(lambda: asyncio.shield(ended))
            raise
        if error := ended.result().error:
            raise error

    def _ask_until(self, ended: "asyncio.Future[Finished]") -> None:
        self._step()
        if not ended.done():
            self._process.call_later(STEP_S, self._ask_until, ended)

    def _step(self) -> None:
        """Ask what has ended, as an engine does between two steps of its model."""
        for threaded in self._threaded:
            for end in threaded.finished():
                self._take(end)

    def _take(self, end: Finished) -> None:
        if end.side == "consumer":
            if end.local_request_id not in self._pulls:
                self._world.fail(f"{self._process.name}: the end of {end.local_request_id} was told twice")
                return
            self._pulls.pop(end.local_request_id).set_result(end)
        elif not self._leases or self._leases.popleft() != (end.request_id, end.outcome):
            self._world.fail(f"{self._process.name}: the engine was told {end}, which is not what has ended next")


async def _unless_cancelled(wait: Callable[[], Awaitable[object]]) -> None:
    """Wait for something through every cancellation, as an engine must that wants its blocks back."""
    while True:
        try:
            await wait()
        except asyncio.CancelledError:
            continue
        return
