"""How a simulated engine speaks to its worker: as a program of asyncio, or as one that is not.

Both say the same: a pull has ended when the engine may use its blocks again, whatever became of it.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from inspect import isawaitable
from typing import Any

from kvflow.config import WorkerConfig
from kvflow.errors import TransferFailed
from kvflow.events import Event, Hook, LeaseEnded, Outcome
from kvflow.leases.tickets import Ticket
from kvflow.worker.runtime import Cache
from kvflow.worker.threaded import Finished, LoopCalls, ThreadedWorker, WorkerThread
from kvflow.worker.worker import DrainReport, Worker
from tests.fakes.memory import SimulatedCache
from tests.fakes.process import Process
from tests.fakes.world import World

BlockIds = Sequence[Sequence[int]]

STEP_S = 1e-3
"""Time from one step of an engine to the next."""


class Face:
    """What an engine calls, which is the worker's own; a pull ends when nothing writes into its blocks now."""

    def speak_to(self, worker: Worker | ThreadedWorker) -> None:
        """Be the face of a worker that is open."""
        self._worker = worker
        self.offer, self.keep, self.admit = worker.offer, worker.keep, worker.admit
        self.advance, self.seal, self.revoke = worker.advance, worker.seal, worker.revoke

    def offer_progressive(
        self, request_id: str, block_ids: BlockIds, num_tokens: int, digests: list[list[bytes]]
    ) -> Ticket:
        return self._worker.offer_progressive(request_id, block_ids, num_tokens, digests=digests).ticket

    async def offer_when_possible(
        self, request_id: str, block_ids: BlockIds, num_tokens: int, timeout_s: float
    ) -> Ticket:
        return await self._answer(
            self._worker.offer_when_possible(request_id, block_ids, num_tokens, timeout_s=timeout_s)
        )

    async def wait_offer(self, request_id: str) -> Outcome:
        return await self._answer(self._worker.wait_offer(request_id))

    async def hold(self, ticket: Ticket, *, name: str) -> None:
        await self._answer(self._worker.hold(ticket, local_request_id=name))

    async def release(self, ticket: Ticket, *, name: str) -> None:
        await self._answer(self._worker.release(ticket, local_request_id=name))

    async def find(self, endpoint: str, digests: list[bytes], wait_s: float) -> tuple[Ticket | None, int]:
        return await self._answer(self._worker.find(endpoint, digests, wait_s))

    async def drain(self, deadline_s: float) -> DrainReport:
        return await self._answer(self._worker.drain(deadline_s))

    async def pull(self, ticket: Ticket, block_ids: BlockIds, *, priority: int, name: str) -> None:
        raise NotImplementedError

    async def _answer(self, asked: Any) -> Any:
        """Return what a call of the worker comes to."""
        raise NotImplementedError


class AsyncFace(Face):
    """A worker whose engine lives on its event loop.

    Args:
        worker: that is open.
    """

    def __init__(self, worker: Worker) -> None:
        self.speak_to(worker)

    async def _answer(self, asked: Any) -> Any:
        return await asked if isawaitable(asked) else asked

    async def pull(self, ticket: Ticket, block_ids: BlockIds, *, priority: int, name: str) -> None:
        try:
            await self._worker.pull(ticket, block_ids, priority=priority, local_request_id=name)
        except asyncio.CancelledError:
            await _unless_cancelled(lambda: self._worker.quiesced(ticket.request_id))
            raise
        except TransferFailed as error:
            if error.quarantined:
                await _unless_cancelled(lambda: self._worker.quiesced(ticket.request_id))
            raise


class ThreadedFace(Face):
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
        self._worker: ThreadedWorker | None = None  # until it is open
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

        self.speak_to(ThreadedWorker(config, (), cache, start=start))

    def close(self) -> None:
        """Check that the engine was told of every end, when the worker is closed and all calls have ended."""
        self._step()
        if self._leases or self._pulls:
            self._world.fail(f"{self._process.name}: nobody was told the end of {[*self._leases, *self._pulls]}")

    async def offer_when_possible(
        self, request_id: str, block_ids: BlockIds, num_tokens: int, timeout_s: float
    ) -> Ticket:
        waiting = self._worker.offer_when_possible(request_id, block_ids, num_tokens, timeout_s=timeout_s)
        try:
            return await self._answer(waiting)
        except asyncio.CancelledError:
            if not waiting.cancel() and waiting.exception() is None:
                self.revoke(request_id)  # it had its ticket, and we were about to be told
            raise

    async def pull(self, ticket: Ticket, block_ids: BlockIds, *, priority: int, name: str) -> None:
        future = self._worker.pull(ticket, block_ids, priority=priority, local_request_id=name)
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

    async def _answer(self, asked: Any) -> Any:
        return await asyncio.wrap_future(asked, loop=self._process)

    def _ask_until(self, ended: "asyncio.Future[Finished]") -> None:
        self._step()
        if not ended.done():
            self._process.call_later(STEP_S, self._ask_until, ended)

    def _step(self) -> None:
        """Ask what has ended, as an engine does between two steps of its model."""
        for end in self._worker.finished() if self._worker else ():
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
