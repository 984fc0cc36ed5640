"""``run_worker``: a worker for an engine without asyncio, on a separate thread and event loop.

An engine that sleeps suspends its worker. Each ``resume`` starts a new worker thread, which registers the memory again
under a new incarnation.
"""

import asyncio
import atexit
import inspect
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from functools import partial, update_wrapper
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import msgspec
import uvloop
from msgspec import Struct

from kvflow.config import WorkerConfig
from kvflow.errors import KvflowError, WorkerClosed, WorkerSuspended, quoted
from kvflow.events import Event, Hook, LeaseEnded, OnlyEvents
from kvflow.forks import Origin
from kvflow.leases.tickets import RankAddress, Ticket
from kvflow.report import TransferReport
from kvflow.worker.consumer import BlockLists, PullItem, open_item
from kvflow.worker.open_pulls import PullHandle
from kvflow.worker.producer import Digests
from kvflow.worker.runtime import Cache, Unopened, open_worker
from kvflow.worker.worker import Worker

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., object])

PARK_S = 1.0  # longest time that the end of the interpreter waits for the event loop, which may hang
FINISHED_MAX = 65536  # ends that are kept for an engine that does not call ``finished``. The oldest are dropped first.


class Finished(Struct, frozen=True):
    """A lease or pull that has ended since the last call of ``finished``. Its blocks may be used again.

    Attributes:
        request_id: the producer's name of the request.
        side: ``producer`` for a lease of this worker, ``consumer`` for a pull.
        outcome: ``released``, ``expired``, ``unread``, ``revoked``; or ``completed``, ``failed``.
        report, error: of a pull.
        local_request_id: the caller's own name of the request, if it gave one to ``pull``.
    """

    request_id: str
    side: Literal["producer", "consumer"]
    outcome: str
    report: TransferReport | None = None
    error: KvflowError | None = None
    local_request_id: str = ""


class LoopCalls:
    """Calls onto one event loop from other threads. Every call gets a future, and every future is resolved.

    Thread: any, except ``close``, which runs on the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lock = threading.Lock()
        self._closed = False

    def submit(
        self, work: Coroutine[Any, Any, T], *, on_unwanted: Callable[[T], object] = lambda _: None
    ) -> "Future[T]":
        """Run a coroutine on the loop. Cancelling its future cancels it. Raises ``WorkerClosed`` as ``call`` does.

        ``on_unwanted`` is called on the loop with a result that arrives after the future was cancelled.
        """
        future: Future[T] = Future()

        def start() -> None:
            task = self._loop.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(settle)
            future.add_done_callback(partial(_cancel, self._loop, task.cancel))

        def settle(task: "asyncio.Task[T]") -> None:
            self._tasks.discard(task)
            work.close()  # a task that is cancelled before its first step has not started it
            if task.cancelled():
                future.cancel()
                future.set_running_or_notify_cancel()
            elif not future.set_running_or_notify_cancel():
                if task.exception() is None:
                    on_unwanted(task.result())
            elif (error := task.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())

        try:
            self.call(start)
        except WorkerClosed:
            work.close()
            raise
        return future

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the loop, without a future.

        Raises:
            WorkerClosed: the loop takes no more calls.
        """
        # Under the lock: ``close`` waits for what was submitted before it, and nothing is submitted after it.
        with self._lock:
            if self._closed:
                raise WorkerClosed("the worker is closed")
            self._loop.call_soon_threadsafe(function)

    def ask(self, function: Callable[[], T]) -> "Future[T]":
        """Call a function on the loop. Calls of ``ask`` and ``call`` run in the order in which they were made."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - the caller gets it from the future
                future.set_exception(error)

        self.call(run)
        return future

    async def close(self) -> None:
        """Take no more calls, and wait for the end of those that were taken. Cancellation cancels them."""
        with self._lock:
            self._closed = True
        await asyncio.sleep(0)  # start those that were taken
        cancelled: asyncio.CancelledError | None = None
        while self._tasks:
            try:
                await asyncio.wait(self._tasks)
            except asyncio.CancelledError as error:
                cancelled = error
                for task in self._tasks:
                    task.cancel()
        if cancelled is not None:
            raise cancelled


@asynccontextmanager
async def open_calls(loop: asyncio.AbstractEventLoop) -> AsyncIterator[LoopCalls]:
    """Take calls onto the running event loop. Leaving waits for the calls that were taken."""
    calls = LoopCalls(loop)
    try:
        yield calls
    finally:
        await calls.close()


def _cancel(loop: asyncio.AbstractEventLoop, cancel: Callable[[], object], future: "Future[Any]") -> None:
    if future.cancelled() and not loop.is_closed():
        loop.call_soon_threadsafe(cancel)


class WorkerThread(NamedTuple):
    """An open worker on its thread. Thread: any except its own."""

    worker: Worker  # the worker. After ``end`` it refuses every call.
    calls: LoopCalls  # to its event loop
    # closes the worker, and returns when nothing accesses its cache. It raises once what the event loop died of.
    # The second call does nothing.
    end: Callable[[], None]


StartWorkerThread = Callable[[WorkerConfig, Cache, Sequence[Hook]], WorkerThread]
"""Opens a worker, and returns when it is open."""


def start_worker_thread(config: WorkerConfig, cache: Cache, hooks: Sequence[Hook]) -> WorkerThread:
    """Open a worker on a new thread. Ctrl-C while it opens closes it as soon as it is open."""
    opened: Future[tuple[Worker, LoopCalls]] = Future()
    left: Future[None] = Future()
    failures: list[BaseException] = []  # what the loop died of, until that is raised in the caller's thread

    run = partial(_run_loop, partial(_serve, config, cache, hooks, opened=opened, left=left), opened, failures)
    # A daemon: an engine that exits without leaving this block must not wait for a thread that waits for it.
    thread = threading.Thread(target=run, name=f"kvflow-{config.engine_id}", daemon=True)
    parked = threading.Event()

    def park() -> None:
        parked.set()
        threading.Event().wait()

    def stop_at_exit() -> None:
        # A timer of uvloop that fires when the interpreter has ended would crash the process.
        if thread.is_alive():
            with suppress(WorkerClosed):
                calls.call(park)
                parked.wait(PARK_S)

    def end() -> None:
        atexit.unregister(stop_at_exit)
        # Also if the loop has died, or Ctrl-C has interrupted the start: otherwise the thread never ends.
        if not left.done():
            left.set_result(None)
        if thread.is_alive() and not sys.is_finalizing():  # a finalizing interpreter runs no other thread
            thread.join()
        if failures:
            raise failures.pop()

    try:
        thread.start()
        worker, calls = opened.result()
        atexit.register(stop_at_exit)
    except BaseException:
        end()
        raise
    return WorkerThread(worker, calls, end)


def _run_loop(
    serve: Callable[[], Coroutine[Any, Any, None]], opened: "Future[Any]", failures: list[BaseException]
) -> None:
    """Serve on this thread. What the loop dies of is for the caller's thread, also if there never was a loop."""
    try:
        uvloop.run(serve())
    except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
        if opened.done():
            failures.append(error)
        else:
            opened.set_exception(error)


async def _serve(
    config: WorkerConfig,
    cache: Cache,
    hooks: Sequence[Hook],
    *,
    opened: "Future[tuple[Worker, LoopCalls]]",
    left: "Future[None]",
) -> None:
    """Open a worker, and close it when ``left`` is resolved."""
    loop, leaving = asyncio.get_running_loop(), asyncio.Event()

    def leave(_: "Future[None]") -> None:
        with suppress(RuntimeError):  # the loop has died
            loop.call_soon_threadsafe(leaving.set)

    async with open_calls(loop) as calls, open_worker(config, cache, hooks=hooks) as worker:
        opened.set_result((worker, calls))
        left.add_done_callback(leave)
        await leaving.wait()


def called(
    method: Callable[Concatenate[Worker, P], T], *, suspended: bool = False
) -> Callable[Concatenate["ThreadedWorker", P], T]:
    """Make a method that runs one of ``Worker`` on the calling thread, if ``suspended`` also after ``suspend``."""

    @_like(method)
    def call(self: "ThreadedWorker", /, *arguments: P.args, **named: P.kwargs) -> T:
        thread = self._thread if suspended else self._awake()
        return method(thread.worker, *arguments, **named)

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
    ask = asked(method)

    @_like(method)
    def answer(self: "ThreadedWorker", /, *arguments: P.args, **named: P.kwargs) -> T:
        return ask(self, *arguments, **named).result()

    return answer


def submitted(
    method: Callable[Concatenate[Worker, P], Coroutine[Any, Any, T]],
    *,
    on_unwanted: Callable[[Worker, T], object] = lambda _worker, _result: None,
) -> Callable[Concatenate["ThreadedWorker", P], Future[T]]:
    """Make a method that submits a coroutine of ``Worker``: see ``LoopCalls.submit``."""

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
    as it learns of the failure. An engine that waits for something else adds a callback to the future, which wakes it:
    ``finished`` has the end before the future is resolved.

    A suspended worker raises ``WorkerSuspended`` from every method except ``revoke``, ``finished`` and
    ``wait_finished``, which report what happened before.

    ``start`` starts each worker thread; a simulator's uses a loop that runs already.

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

        This takes the same steps, and the same time, as leaving ``run_worker``: every lease ends, every pull is
        cancelled and its last write awaited, and the transport is destroyed. Earlier tickets stay void. ``finished``
        reports what has ended. A second call does nothing.

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
    offer_progressive = called(Worker.offer_progressive)
    advance = called(Worker.advance)
    seal = called(Worker.seal)
    keep = called(Worker.keep)
    admit = called(Worker.admit)
    revoke = called(Worker.revoke, suspended=True)
    wait_offer = submitted(Worker.wait_offer)
    find = submitted(Worker.find)
    read_manifest = submitted(Worker.read_manifest)
    read_ticket = called(Worker.read_ticket)

    def pull(
        self,
        ticket: Ticket,
        block_ids: Sequence[Sequence[int]],
        *,
        priority: int = 0,
        local_request_id: str = "",
        expected_digests: Digests = None,
    ) -> "Future[TransferReport]":
        """Read a ticket's blocks into ours: see ``Worker.pull``. Cancelling the future cancels the pull."""

        def start(worker: Worker) -> list[PullHandle]:
            return [
                worker.start_pull(
                    ticket,
                    block_ids,
                    priority=priority,
                    local_request_id=local_request_id,
                    expected_digests=expected_digests,
                )
            ]

        (future,) = self._start([(ticket, block_ids, local_request_id)], start)
        return future

    def pull_many(self, items: Iterable[PullItem], *, priority: int = 0) -> "list[Future[TransferReport]]":
        """Read many tickets' blocks into ours as one batch. Cancelling a future cancels its pull."""
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

    record_refusal = called(Worker.record_refusal, suspended=True)
    hold = asked(Worker.hold)
    release = submitted(Worker.release)
    drain = submitted(Worker.drain)

    def allow_keys(self, keys: Iterable[str]) -> None:
        """Replace the list of allowed keys, also for later calls of ``resume``: see ``Worker.allow_keys``."""
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
        """Return the worker thread. After ``close`` it is the last one, whose worker refuses every call."""
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


def _run(
    worker: Worker,
    start: Callable[[Worker], list[PullHandle]],
    batch: Sequence[tuple[Ticket, BlockLists, str]],
    futures: "Sequence[Future[TransferReport]]",
    finished: "_FinishedQueue",
) -> None:
    """Start pulls. Report each end when nothing can write into the pull's blocks."""
    loop = asyncio.get_running_loop()
    for (ticket, _, name), handle, future in zip(batch, start(worker), futures, strict=True):
        request_id = getattr(ticket, "request_id", "")  # an argument of any type was passed; its end is reported
        handle.on_quiesced(partial(finished.settle, request_id, name, future))
        if not handle.done():
            future.add_done_callback(partial(_cancel, loop, handle.cancel))


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
        # The blocks of a kept lease belong to the engine all along.
        if isinstance(event, LeaseEnded) and event.kind != "kept":
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
