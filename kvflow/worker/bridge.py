"""From an engine's threads to a worker's event loop: a future for every call, and none that is never resolved."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from kvflow.errors import WorkerClosed

T = TypeVar("T")


class Bridge:
    """Calls onto one event loop.

    Thread: ``submit`` from any thread; ``close`` on the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def submit(
        self,
        work: Coroutine[Any, Any, T],
        *,
        on_unwanted: Callable[[T], object] = lambda _: None,
    ) -> "Future[T]":
        """Run a coroutine on the loop.

        Args:
            work: what to run; cancelling the future cancels it.
            on_unwanted: called on the loop with a result that came together with the future's cancellation.

        Raises:
            WorkerClosed: the loop is at its end.
        """
        future: Future[T] = Future()

        def start() -> None:
            task = self._loop.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(lambda ended: self._settle(future, ended, on_unwanted))
            future.add_done_callback(lambda _: self._cancel(future, task))

        # Under the lock: what is submitted before ``close`` is waited for there, and nothing comes after it.
        with self._lock:
            if self._closed:
                work.close()
                raise WorkerClosed("the worker is closed")
            self._loop.call_soon_threadsafe(start)
        return future

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the loop, and wait for nothing.

        Raises:
            WorkerClosed: the loop is at its end.
        """
        with self._lock:
            if self._closed:
                raise WorkerClosed("the worker is closed")
            self._loop.call_soon_threadsafe(function)

    def ask(self, function: Callable[[], T]) -> "Future[T]":
        """Call a function on the loop, after all that was called before and before what a later ``call`` does.

        Raises:
            WorkerClosed: the loop is at its end.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - the future tells
                future.set_exception(error)

        self.call(run)
        return future

    async def close(self) -> None:
        """Take no more calls, and wait for those that were taken; nothing may keep them from ending by now."""
        with self._lock:
            self._closed = True
        await asyncio.sleep(0)  # what was submitted until now starts
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _cancel(self, future: "Future[T]", task: "asyncio.Task[T]") -> None:
        if future.cancelled() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(task.cancel)

    def _settle(
        self,
        future: "Future[T]",
        task: "asyncio.Task[T]",
        on_unwanted: Callable[[T], object],
    ) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            future.cancel()
        if future.set_running_or_notify_cancel():
            if error is None:
                future.set_result(task.result())
            else:
                future.set_exception(error)
        elif error is None and not task.cancelled():
            on_unwanted(task.result())
