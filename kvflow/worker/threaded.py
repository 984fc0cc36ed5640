"""``run_worker``: a worker for an engine without asyncio, on a separate thread and event loop.

An engine that sleeps suspends its worker. Each ``resume`` starts a new worker thread, which registers the memory again
under a new incarnation (``worker.worker_thread``).
"""

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from functools import partial, update_wrapper
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import msgspec
from msgspec import Struct

from kvflow.config import WorkerConfig
from kvflow.errors import KvflowError, WorkerClosed, WorkerSuspended
from kvflow.events import Event, Hook, LeaseEnded, OnlyEvents
from kvflow.forks import Origin
from kvflow.leases.tickets import RankAddress, Ticket
from kvflow.report import TransferReport
from kvflow.reprs import quoted
from kvflow.worker.consumer import BlockLists, PullItem, open_item
from kvflow.worker.open_pulls import PullHandle
from kvflow.worker.producer import Digests
from kvflow.worker.runtime import Cache, Unopened
from kvflow.worker.worker import Worker
from kvflow.worker.worker_thread import StartWorkerThread, WorkerThread, start_worker_thread

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., object])

FINISHED_MAX = 65536
"""Ends that are kept for an engine that does not call ``finished``. The oldest are dropped first."""


class Finished(Struct, frozen=True):
    """A lease or pull that has ended since the last call of ``finished``. Its blocks may be used again.

    Attributes:
        request_id: the producer's name of the request.
        side: ``producer`` for a lease of this worker, ``consumer`` for a pull.
        outcome: ``released``, ``expired``, ``revoked``; or ``completed``, ``failed``.
        report: the report of a completed pull.
        error: the error of a failed pull. Its blocks are quiescent.
        local_request_id: the caller's own name of the request, if it gave one to ``pull``.
    """

    request_id: str
    side: Literal["producer", "consumer"]
    outcome: str
    report: TransferReport | None = None
    error: KvflowError | None = None
    local_request_id: str = ""


def called(method: Callable[Concatenate[Worker, P], T]) -> Callable[Concatenate["ThreadedWorker", P], T]:
    """Make a method that runs one of ``Worker`` on the calling thread."""

    @_like(method)
    def call(self: "ThreadedWorker", /, *arguments: P.args, **named: P.kwargs) -> T:
        return method(self._awake().worker, *arguments, **named)

    return call


def direct(method: Callable[Concatenate[Worker, P], T]) -> Callable[Concatenate["ThreadedWorker", P], T]:
    """Make a method that runs one of ``Worker`` on the calling thread, also while the worker is suspended."""

    @_like(method)
    def call(self: "ThreadedWorker", /, *arguments: P.args, **named: P.kwargs) -> T:
        return method(self._thread.worker, *arguments, **named)

    return call


def asked(method: Callable[Concatenate[Worker, P], T]) -> Callable[Concatenate["ThreadedWorker", P], Future[T]]:
    """Make a method that runs one of ``Worker`` on the event loop, and returns its future."""

    @_like(method, returns=Future)
    def ask(self: "ThreadedWorker", /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        thread = self._awake()
        return thread.calls.ask(partial(method, thread.worker, *arguments, **named))

    return ask


def answered(method: Callable[Concatenate[Worker, P], T]) -> Callable[Concatenate["ThreadedWorker", P], T]:
    """Make a method that runs one of ``Worker`` on the event loop, and waits for its end."""

    @_like(method)
    def answer(self: "ThreadedWorker", /, *arguments: P.args, **named: P.kwargs) -> T:
        thread = self._awake()
        return thread.calls.ask(partial(method, thread.worker, *arguments, **named)).result()

    return answer


def submitted(
    method: Callable[Concatenate[Worker, P], Coroutine[Any, Any, T]],
    *,
    on_unwanted: Callable[[Worker, T], object] = lambda _worker, _result: None,
) -> Callable[Concatenate["ThreadedWorker", P], Future[T]]:
    """Make a method that runs a coroutine of ``Worker`` on the event loop. Cancelling its future cancels it.

    Args:
        method: the method of ``Worker``.
        on_unwanted: called on the loop with the worker and a result that arrives after the future was cancelled.
    """

    @_like(method, returns=Future)
    def submit(self: "ThreadedWorker", /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        thread = self._awake()
        work = method(thread.worker, *arguments, **named)
        return thread.calls.submit(work, on_unwanted=partial(on_unwanted, thread.worker))

    return submit


def _like(method: Callable[..., object], returns: Any = None) -> Callable[[M], M]:
    """Give a method the name, docstring and signature of one of ``Worker``, with another type of result."""

    def dress(function: M) -> M:
        signature = inspect.signature(method)
        if returns is not None:
            signature = signature.replace(return_annotation=returns[signature.return_annotation])
        update_wrapper(function, method)
        function.__module__, function.__qualname__ = __name__, f"ThreadedWorker.{method.__name__}"
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return dress


class ThreadedWorker:
    """A worker whose event loop runs on its own thread. Made by ``run_worker``.

    Most methods are those of ``Worker``. A method that is a coroutine there returns a ``Future`` here, and so does
    ``hold``; cancelling the future cancels the call.

    A failed ``pull`` is reported only when nothing can write into its blocks, because an engine reuses blocks as soon
    as it learns of the failure.

    A suspended worker raises ``WorkerSuspended`` from every method except ``revoke``, ``finished`` and
    ``wait_finished``, which report what happened before.

    Args:
        config: the settings.
        hooks: plain functions that get every event.
        cache: the cache.
        start: starts each worker thread; a simulator's uses a loop that runs already.

    Raises:
        ForkedProcess: by every method except ``close`` that a forked child of the worker's process calls. The child has
            nothing to close.

    Thread: any, but do not call it from a hook, which runs on the worker's own thread.
    """

    def __init__(
        self,
        config: WorkerConfig,
        hooks: Sequence[Hook],
        cache: Cache,
        *,
        start: StartWorkerThread = start_worker_thread,
    ) -> None:
        self._origin = Origin("the worker")
        self._config = config
        self._start_thread = start
        self._finished = _FinishedQueue()
        self._hooks: tuple[Hook, ...] = (*hooks, OnlyEvents(LeaseEnded, self._finished.on_event))
        self._changing = threading.Lock()
        self._stage: Literal["open", "suspended", "closed"] = "open"
        self._thread = start(config, cache, self._hooks)

    def __repr__(self) -> str:
        """Return the engine, the rank, the endpoint and the stage."""
        name = f"{quoted(self._config.engine_id)} rank {self._config.rank}"
        return f"<ThreadedWorker {name} at {self.endpoint}: {self._stage}>"

    @property
    def endpoint(self) -> str:
        """Control endpoint as peers reach it. A suspended worker returns the last one."""
        return self._thread.worker.endpoint

    @property
    def rank_address(self) -> RankAddress:
        """What a ``TicketMint`` in another process needs from this worker. Read it again after ``resume``.

        Raises:
            WorkerSuspended: the worker has no address now.
        """
        return self._awake().worker.rank_address

    def suspend(self) -> None:
        """Withdraw the cache. On return nothing accesses its memory, and the engine may unmap it.

        This takes the same steps, and the same time, as leaving ``run_worker``. Every lease ends first, so that a
        consumer that still reads learns of it and delivers nothing. Every pull is cancelled, and its last write is
        awaited. Then the worker says goodbye to its peers and destroys the transport. Earlier tickets stay void.
        ``finished`` reports what has ended. Data that was pulled before is lost with the engine's memory. A second call
        does nothing.

        Raises:
            WorkerClosed: the block of ``run_worker`` was left.
            BaseException: the error that ended the event loop. Nothing accesses the memory in this case, either.
        """
        self._origin.require()  # before the lock, which a thread of the parent process may have held
        with self._changing:
            self._withdraw()

    def resume(self, cache: Cache) -> None:
        """Register a cache at its present addresses, and serve it. A worker that is not suspended is suspended first.

        The worker gets another incarnation under the same settings. It listens where ``bind`` says; peers connect and
        plan again. A mint in another process must be created again with the new ``rank_address``.

        Args:
            cache: the same one if its memory is back where it was, or another.

        Raises:
            ConfigInvalid, SpecInvalid, TransportUnavailable: see ``open_worker``. The worker stays suspended.
            WorkerClosed: the block of ``run_worker`` was left.
        """
        self._origin.require()
        with self._changing:
            self._withdraw()
            self._thread = self._start_thread(self._config, cache, self._hooks)
            self._stage = "open"

    offer = called(Worker.offer)
    offer_when_possible = submitted(
        Worker.offer_when_possible, on_unwanted=lambda worker, ticket: worker.revoke(ticket.request_id)
    )
    admit = called(Worker.admit)
    revoke = direct(Worker.revoke)
    wait_offer = submitted(Worker.wait_offer)

    def pull(
        self,
        ticket: Ticket,
        block_ids: Sequence[Sequence[int]],
        *,
        priority: int = 0,
        local_request_id: str = "",
        expected_digests: Digests = None,
    ) -> "Future[TransferReport]":
        """Read a ticket's blocks into ours. Cancelling the future cancels the pull. See ``Worker.pull``."""
        item = (ticket, block_ids, local_request_id)
        (future,) = self._start([item], partial(_start_one, item, priority, expected_digests))
        return future

    def pull_many(self, items: Iterable[PullItem], *, priority: int = 0) -> "list[Future[TransferReport]]":
        """Read many tickets' blocks into ours as one batch. See ``Worker.pull_many``.

        The batch crosses to the worker's thread once. Cancelling a future cancels its pull.
        """
        batch = [open_item(item) for item in items]
        return self._start(batch, lambda worker: worker.pull_many(batch, priority=priority))

    def _start(
        self, batch: Sequence[tuple[Ticket, BlockLists, str]], start: Callable[[Worker], list[PullHandle]]
    ) -> "list[Future[TransferReport]]":
        futures: list[Future[TransferReport]] = [Future() for _ in batch]
        try:
            thread = self._awake()
            thread.calls.call(partial(_run, thread.worker, start, batch, futures, self._finished))
        except KvflowError as error:  # the loop did not take them, so nothing else writes their records
            for ticket, _, name in batch:
                self.record_refusal(
                    error.code, error.message, remedy=error.remedy, ticket=ticket, local_request_id=name
                )
            raise
        return futures

    record_refusal = direct(Worker.record_refusal)
    hold = asked(Worker.hold)
    release = submitted(Worker.release)
    drain = submitted(Worker.drain)

    def allow_keys(self, keys: Iterable[str]) -> None:
        """Replace the list of allowed keys, also for later calls of ``resume``. See ``Worker.allow_keys``."""
        self._origin.require()
        config = msgspec.structs.replace(self._config, allowed_keys=tuple(keys))
        with self._changing:
            if self._stage == "suspended":
                config.check()
            else:
                self._thread.calls.ask(partial(self._thread.worker.allow_keys, config.allowed_keys or ())).result()
            self._config = config

    def finished(self) -> list[Finished]:
        """Return what has ended since the last call. Nothing can write into its blocks."""
        self._origin.require()
        return self._finished.drain()

    def wait_finished(self, timeout_s: float, *, at_least: int = 1) -> bool:
        """Wait until ``finished`` has something to return. Return whether it has.

        Args:
            timeout_s: longest time to wait.
            at_least: number of ends to wait for. The caller wakes once for all of them.

        Thread: any. If several threads wait, an end may wake only one of them.
        """
        self._origin.require()
        return self._finished.wait(timeout_s, at_least)

    snapshot = answered(Worker.snapshot)

    def close(self) -> None:
        """Close the worker, as leaving ``run_worker`` does. A second call does nothing.

        Raises:
            BaseException: the error that ended the event loop.
        """
        if self._origin.is_elsewhere:
            return
        with self._changing:
            self._stage = "closed"
            self._thread.end()

    def _awake(self) -> WorkerThread:
        """Return the worker thread. After ``close`` it is the last one, whose worker refuses every call.

        Raises:
            WorkerSuspended: there is none now.
        """
        self._origin.require()
        if self._stage == "suspended":
            raise WorkerSuspended("the worker is suspended: its cache is withdrawn")
        return self._thread

    def _withdraw(self) -> None:
        if self._stage == "closed":
            raise WorkerClosed("the worker is closed")
        self._stage = "suspended"
        self._thread.end()


class _UnopenedThread(Unopened, AbstractContextManager[ThreadedWorker]):
    call, statement = "run_worker", "with kvflow.run_worker"

    def __init__(self, start: Callable[[], ThreadedWorker]) -> None:
        self._start = start

    def __enter__(self) -> ThreadedWorker:
        self._worker = self._start()
        return self._worker

    def __exit__(self, *failure: object) -> None:
        self._worker.close()


def run_worker(
    config: WorkerConfig, cache: Cache, *, hooks: Sequence[Hook] = ()
) -> AbstractContextManager[ThreadedWorker]:
    """Open a worker on a new thread: ``with kvflow.run_worker(config, cache) as worker:``. See ``open_worker``.

    Raises:
        ConfigInvalid, SpecInvalid, TransportUnavailable: see ``open_worker``.
        AttributeError: the returned object is used as a worker, without ``with``.

    Cancellation: Ctrl-C while it opens closes it as soon as it is open.
    """
    return _UnopenedThread(partial(ThreadedWorker, config, hooks, cache))


def _start_one(
    item: tuple[Ticket, BlockLists, str], priority: int, expected_digests: Digests, worker: Worker
) -> list[PullHandle]:
    ticket, block_ids, name = item
    handle = worker.start_pull(
        ticket, block_ids, priority=priority, local_request_id=name, expected_digests=expected_digests
    )
    return [handle]


def _run(
    worker: Worker,
    start: Callable[[Worker], list[PullHandle]],
    batch: Sequence[tuple[Ticket, BlockLists, str]],
    futures: "Sequence[Future[TransferReport]]",
    finished: "_FinishedQueue",
) -> None:
    """Start pulls. Report each end when nothing can write into the pull's blocks.

    All pulls have ended when the worker is closed.
    """
    loop = asyncio.get_running_loop()
    for (ticket, _, name), handle, future in zip(batch, start(worker), futures, strict=True):
        request_id = getattr(ticket, "request_id", "")  # an argument of any type was passed; its end is reported
        handle.on_settled(partial(finished.settle, request_id, name, future))
        if not handle.done():
            future.add_done_callback(partial(_cancel, loop, handle))


def _cancel(loop: asyncio.AbstractEventLoop, handle: PullHandle, future: "Future[TransferReport]") -> None:
    if future.cancelled() and not loop.is_closed():
        loop.call_soon_threadsafe(handle.cancel)


class _FinishedQueue:
    """Ends that ``finished`` has not returned yet. Thread: any."""

    def __init__(self) -> None:
        self._ends: deque[Finished] = deque(maxlen=FINISHED_MAX)
        self._awaited = 1  # ends that the last caller of wait needs
        self._arrived = threading.Lock()  # held until that many have arrived
        self._arrived.acquire()

    def put(self, end: Finished) -> None:
        self._ends.append(end)
        if len(self._ends) >= self._awaited and self._arrived.locked():
            with suppress(RuntimeError):  # another thread has released it
                self._arrived.release()

    def wait(self, timeout_s: float, at_least: int) -> bool:
        deadline = time.monotonic() + timeout_s
        self._awaited = at_least  # before the ends are counted: put counts them after it has added one
        while len(self._ends) < at_least:
            # The ends that released the lock may have been drained before, so loop. An Event would take longer to wake.
            if not self._arrived.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return len(self._ends) >= at_least
        return True

    def on_event(self, event: Event) -> None:
        if isinstance(event, LeaseEnded):
            self.put(Finished(event.request_id, "producer", event.outcome))

    def settle(
        self, request_id: str, local_request_id: str, future: "Future[TransferReport]", handle: PullHandle
    ) -> None:
        """Add the end of a pull, then resolve its future."""
        error = handle.exception()
        if error is None:
            report = handle.result()
            self.put(Finished(request_id, "consumer", "completed", report, local_request_id=local_request_id))
        else:
            self.put(Finished(request_id, "consumer", "failed", error=error, local_request_id=local_request_id))
        if not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(report)
        else:
            future.set_exception(error)

    def drain(self) -> list[Finished]:
        return [self._ends.popleft() for _ in range(len(self._ends))]
