"""``run_worker``: the same worker for an engine that is not asyncio, on a thread and event loop of its own."""

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Literal, TypeVar

import uvloop
from msgspec import Struct

from kvflow.cache.leases import LeaseEnded, Outcome
from kvflow.cache.tickets import Grant, RankAddress, Ticket
from kvflow.config import WorkerConfig
from kvflow.errors import KvflowError, TransferCancelled, TransferFailed
from kvflow.transfer.report import TransferReport
from kvflow.worker.bridge import Bridge
from kvflow.worker.drain import DrainReport
from kvflow.worker.runtime import Cache, Hook, open_worker
from kvflow.worker.worker import Snapshot, Worker

T = TypeVar("T")

FINISHED_MAX = 65536
"""Ends that are kept for an engine which does not ask; the oldest go first."""


class Finished(Struct, frozen=True):
    """Something that has ended since the engine last asked; its blocks may be reused or used.

    Attributes:
        request_id: the producer's name of the request.
        side: ``producer``: a lease of ours has ended. ``consumer``: a pull of ours has.
        outcome: ``released``, ``expired``, ``revoked``; or ``completed``, ``failed``.
        report: of a completed pull.
        error: of a failed pull; its blocks are quiescent by now.
        local_request_id: the caller's own name of the request, if it gave one to ``pull``.
    """

    request_id: str
    side: Literal["producer", "consumer"]
    outcome: str
    report: TransferReport | None = None
    error: KvflowError | None = None
    local_request_id: str = ""


class ThreadedWorker:
    """A worker whose event loop runs on its own thread. Made by ``run_worker``.

    A failure of ``pull`` is reported only after quiescence, because an engine reuses blocks as soon as it
    hears of it.

    Thread: any.
    """

    def __init__(self, worker: Worker, bridge: Bridge, finished: "_FinishedQueue") -> None:
        self._worker = worker
        self._bridge = bridge
        self._finished = finished

    @property
    def endpoint(self) -> str:
        """Control endpoint as peers reach it."""
        return self._worker.endpoint

    @property
    def rank_address(self) -> RankAddress:
        """What a ``TicketMint`` in another process needs to know of this worker."""
        return self._worker.rank_address

    def offer(self, request_id: str, block_ids: Sequence[Sequence[int]], num_tokens: int | Sequence[int]) -> Ticket:
        """Promise to keep blocks for a consumer. See ``Worker.offer``."""
        return self._worker.offer(request_id, block_ids, num_tokens)

    def offer_when_possible(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int | Sequence[int],
        *,
        timeout_s: float | None = None,
    ) -> "Future[Ticket]":
        """Wait until a lease slot is free, then offer. See ``Worker.offer_when_possible``."""
        return self._bridge.submit(
            self._worker.offer_when_possible(request_id, block_ids, num_tokens, timeout_s=timeout_s),
            on_unwanted=lambda _: self._worker.revoke(request_id),
        )

    def admit(self, grant: Grant) -> None:
        """Hold the lease of a grant. See ``Worker.admit``."""
        self._worker.admit(grant)

    def revoke(self, request_id: str) -> bool:
        """End a lease now. See ``Worker.revoke``."""
        return self._worker.revoke(request_id)

    def wait_offer(self, request_id: str) -> "Future[Outcome]":
        """Wait until a lease has ended. See ``Worker.wait_offer``."""
        return self._bridge.submit(self._worker.wait_offer(request_id))

    def pull(
        self, ticket: Ticket, block_ids: Sequence[Sequence[int]], *, priority: int = 0, local_request_id: str = ""
    ) -> "Future[TransferReport]":
        """Read a ticket's blocks into ours. See ``Worker.pull``; cancelling the future cancels the pull."""
        request_id = getattr(ticket, "request_id", "")  # whatever was passed, its refusal is reported
        return self._bridge.submit(
            self._pull(ticket, block_ids, priority, local_request_id),
            on_end=partial(self._finished.on_pull_ended, request_id, local_request_id),
        )

    def release(self, ticket: Ticket) -> "Future[None]":
        """Give a ticket back unread. See ``Worker.release``."""
        return self._bridge.submit(self._worker.release(ticket))

    def drain(self, deadline_s: float) -> "Future[DrainReport]":
        """Begin nothing new, and wait for what has begun. See ``Worker.drain``."""
        return self._bridge.submit(self._worker.drain(deadline_s))

    def allow_keys(self, keys: Iterable[str]) -> None:
        """Replace the list of allowed keys. See ``Worker.allow_keys``."""
        self._bridge.submit(_call(partial(self._worker.allow_keys, tuple(keys)))).result()

    def finished(self) -> list[Finished]:
        """Drain what has ended, and is quiescent, since the last call."""
        return self._finished.drain()

    def snapshot(self) -> Snapshot:
        """Return what is held at this moment."""
        return self._bridge.submit(_call(self._worker.snapshot)).result()

    async def _pull(
        self, ticket: Ticket, block_ids: Sequence[Sequence[int]], priority: int, local_request_id: str
    ) -> TransferReport:
        try:
            return await self._worker.pull(ticket, block_ids, priority=priority, local_request_id=local_request_id)
        except (Exception, asyncio.CancelledError) as error:
            # Where the error is not ours nobody knows how far the pull had come.
            if not isinstance(error, KvflowError) or (isinstance(error, TransferFailed) and error.quarantined):
                await self._wait_quiesced(getattr(ticket, "request_id", ""))
            raise

    async def _wait_quiesced(self, request_id: str) -> None:
        """Wait until nothing writes for a request, also when its pull is cancelled meanwhile.

        An engine that gives up a request whose pull has failed already still may not have its blocks back.
        """
        waiting = asyncio.ensure_future(self._worker.quiesced(request_id))
        while not waiting.done():
            with suppress(asyncio.CancelledError):
                await asyncio.shield(waiting)


@contextmanager
def run_worker(config: WorkerConfig, cache: Cache, *, hooks: Sequence[Hook] = ()) -> Iterator[ThreadedWorker]:
    """Open a worker on a thread of its own. See ``open_worker``.

    Raises:
        ConfigInvalid, SpecInvalid, TransportUnavailable: see ``open_worker``.

    Cancellation: Ctrl-C while it opens closes it as soon as it is open.
    """
    opened: Future[ThreadedWorker] = Future()
    left: Future[None] = Future()
    ended: Future[None] = Future()
    finished = _FinishedQueue()

    def live() -> None:
        try:
            uvloop.run(_live(config, cache, (*hooks, finished.on_event), finished, opened=opened, left=left))
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread, also if there is no loop at all
            (ended if opened.done() else opened).set_exception(error)

    # A daemon: an engine that ends without leaving this block must not wait for a thread that waits for it.
    thread = threading.Thread(target=live, name=f"kvflow-{config.engine_id}", daemon=True)
    try:
        thread.start()
        yield opened.result()
    finally:
        # Whatever interrupted us, in whatever state the loop is: a thread that is not told lives for ever.
        left.set_result(None)
        if thread.is_alive() and not sys.is_finalizing():  # by then the thread does not run any more
            thread.join()
        if ended.done():
            ended.result()


async def _live(
    config: WorkerConfig,
    cache: Cache,
    hooks: Sequence[Hook],
    finished: "_FinishedQueue",
    *,
    opened: "Future[ThreadedWorker]",
    left: "Future[None]",
) -> None:
    loop, leaving = asyncio.get_running_loop(), asyncio.Event()
    bridge = Bridge(loop)

    def leave(_: "Future[None]") -> None:
        with suppress(RuntimeError):  # the loop has died, of an error that ``ended`` tells
            loop.call_soon_threadsafe(leaving.set)

    try:
        async with open_worker(config, cache, hooks=hooks) as worker:
            opened.set_result(ThreadedWorker(worker, bridge, finished))
            left.add_done_callback(leave)
            await leaving.wait()
    finally:
        await bridge.close()


class _FinishedQueue:
    """What has ended and was not asked for yet. Thread: any."""

    def __init__(self) -> None:
        self._ends: deque[Finished] = deque(maxlen=FINISHED_MAX)

    def put(self, end: Finished) -> None:
        self._ends.append(end)

    def on_event(self, event: Struct) -> None:
        if isinstance(event, LeaseEnded):
            self.put(Finished(event.request_id, "producer", event.outcome))

    def on_pull_ended(self, request_id: str, local_request_id: str, task: "asyncio.Task[TransferReport]") -> None:
        """Take the end of a pull; a task that was cancelled before its first step ends like any other."""
        if task.cancelled():
            error: BaseException | None = TransferCancelled("the caller cancelled the pull", request_id=request_id)
        else:
            error = task.exception()
        if error is None:
            end = Finished(request_id, "consumer", "completed", task.result(), local_request_id=local_request_id)
        else:
            ours = _as_ours(error, request_id)
            end = Finished(request_id, "consumer", "failed", error=ours, local_request_id=local_request_id)
        self.put(end)

    def drain(self) -> list[Finished]:
        return [self._ends.popleft() for _ in range(len(self._ends))]


def _as_ours(error: BaseException, request_id: str) -> KvflowError:
    """Return the error of a pull as one of ours: its blocks are the engine's again, whatever ended it."""
    if isinstance(error, KvflowError):
        return error
    failed = TransferFailed(f"the pull ended with {type(error).__name__}: {error}", request_id=request_id)
    failed.__cause__ = error  # as ``raise ... from`` does it
    return failed


async def _call(function: Callable[[], T]) -> T:
    return function()
