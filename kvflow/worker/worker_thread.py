"""A worker on a separate thread and event loop, and calls onto that loop from the threads of an engine.

``ThreadedWorker`` has one ``WorkerThread`` at a time: a new one after each ``resume``. Each opens a worker with
another incarnation.
"""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop

from kvflow.config import WorkerConfig
from kvflow.errors import WorkerClosed
from kvflow.events import Hook
from kvflow.worker.runtime import Cache, open_worker
from kvflow.worker.worker import Worker

T = TypeVar("T")


class LoopCalls:
    """Calls onto one event loop from other threads. Every call gets a future, and every future is resolved.

    Made by ``open_calls``.

    Thread: any, except ``close``, which runs on the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, tasks: asyncio.TaskGroup) -> None:
        self._loop = loop
        self._group = tasks
        self._lock = threading.Lock()
        self._closed = False

    def submit(
        self,
        work: Coroutine[Any, Any, T],
        *,
        on_unwanted: Callable[[T], object] = lambda _: None,
    ) -> "Future[T]":
        """Run a coroutine on the loop.

        Args:
            work: the coroutine. Cancelling the future cancels it.
            on_unwanted: called on the loop with a result that arrives after the future was cancelled.

        Raises:
            WorkerClosed: the loop takes no more calls.
        """
        future: Future[T] = Future()

        def start() -> None:
            task = self._group.create_task(_outcome(work))
            task.add_done_callback(settle)
            future.add_done_callback(lambda _: self._cancel(future, task))

        def settle(task: "asyncio.Task[T | _Failed]") -> None:
            work.close()  # a task that is cancelled before its first step has not started it
            _settle(future, task, on_unwanted)

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
        """Call a function on the loop. Calls of ``ask`` and ``call`` run in the order in which they were made.

        Raises:
            WorkerClosed: the loop takes no more calls.
        """
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
        """Take no more calls, and start those that were taken. The task group waits for their end."""
        with self._lock:
            self._closed = True
        await asyncio.sleep(0)

    def _cancel(self, future: "Future[T]", task: "asyncio.Task[Any]") -> None:
        if future.cancelled() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(task.cancel)


@asynccontextmanager
async def open_calls(loop: asyncio.AbstractEventLoop) -> AsyncIterator[LoopCalls]:
    """Take calls onto the running event loop. Leaving waits for the calls that were taken."""
    failure: BaseException | None = None
    async with asyncio.TaskGroup() as tasks:
        calls = LoopCalls(loop, tasks)
        try:
            yield calls
        except BaseException as error:  # noqa: BLE001 - raised below: the group would wrap it and cancel the calls
            failure = error
        await calls.close()
    if failure is not None:
        raise failure


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


async def _outcome(work: Coroutine[Any, Any, T]) -> T | _Failed:
    """Return a coroutine's result or its error: a task that raises would cancel the others of its group."""
    try:
        return await work
    except Exception as error:  # noqa: BLE001 - the caller gets it from the future
        return _Failed(error)


def _settle(future: "Future[T]", task: "asyncio.Task[T | _Failed]", on_unwanted: Callable[[T], object]) -> None:
    """Resolve a future with the outcome of its task."""
    if task.cancelled():
        future.cancel()
        future.set_running_or_notify_cancel()
        return
    outcome = task.result()
    wanted = future.set_running_or_notify_cancel()
    if isinstance(outcome, _Failed):
        if wanted:
            future.set_exception(outcome.error)
    elif wanted:
        future.set_result(outcome)
    else:
        on_unwanted(outcome)


@dataclass(frozen=True, slots=True)
class WorkerThread:
    """An open worker on its thread.

    Attributes:
        worker: the worker. After ``end`` it refuses every call.
        calls: to its event loop.
        end: closes the worker, and returns when nothing accesses its cache; does nothing the second time. It raises
            once what the event loop died of, if it did.

    Thread: any except its own.
    """

    worker: Worker
    calls: LoopCalls
    end: Callable[[], None]


StartWorkerThread = Callable[[WorkerConfig, Cache, Sequence[Hook]], WorkerThread]
"""Opens a worker, and returns when it is open."""


def start_worker_thread(config: WorkerConfig, cache: Cache, hooks: Sequence[Hook]) -> WorkerThread:
    """Open a worker on a new thread.

    Raises:
        ConfigInvalid, SpecInvalid, TransportUnavailable: see ``open_worker``.

    Cancellation: Ctrl-C while it opens closes it as soon as it is open.
    """
    opened: Future[tuple[Worker, LoopCalls]] = Future()
    left: Future[None] = Future()
    failures: list[BaseException] = []  # what the loop died of, until that is raised in the caller's thread

    def run() -> None:
        try:
            uvloop.run(_serve(config, cache, hooks, opened=opened, left=left))
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread, also if there is no loop
            if opened.done():
                failures.append(error)
            else:
                opened.set_exception(error)

    # A daemon: an engine that exits without leaving this block must not wait for a thread that waits for it.
    thread = threading.Thread(target=run, name=f"kvflow-{config.engine_id}", daemon=True)

    def end() -> None:
        # Also if the loop has died, or Ctrl-C has interrupted the start: a thread that is not told never ends.
        if not left.done():
            left.set_result(None)
        if thread.is_alive() and not sys.is_finalizing():  # a finalizing interpreter runs no other thread
            thread.join()
        if failures:
            raise failures.pop()

    try:
        thread.start()
        worker, calls = opened.result()
    except BaseException:
        end()
        raise
    return WorkerThread(worker, calls, end)


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
