"""A simulated process: an asyncio event loop on virtual time that can be stopped, continued and killed.

Each process has a loop of its own, so that what belongs to a process is known: a process that is stopped keeps its
callbacks for later, as SIGSTOP does, and a killed one never runs another line, not even a ``finally``. ``bury`` lets
the remains of a killed process unwind after the scenario, when nobody looks at what they do any more.
"""

import asyncio
import contextvars
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, Literal, TypeVar

from kvflow.testing.world import Event, World

T = TypeVar("T")
Life = Literal["running", "stopped", "killed"]

OUR_TASKS = ("life", "drive")
"""How the names of those tasks begin that are the simulated engine's and not the worker's."""

TURN_S = 20e-6
"""Mean delay of a turn of the loop: processes run side by side, and none knows when the other's turn comes."""

EPOCH_S = 1.8e9
"""When every world begins, in seconds since 1970."""

THREAD_S = 1e-3
"""Mean time that work in a thread takes."""


class _Task(asyncio.Task[T]):
    """A task whose place in a set is the same in every run: asyncio cancels the tasks of a group in such an order."""

    def __init__(
        self, coroutine: Coroutine[Any, Any, T], *, loop: asyncio.AbstractEventLoop, serial: int, name: str
    ) -> None:
        self._serial = serial
        super().__init__(coroutine, loop=loop, name=name)

    def __hash__(self) -> int:
        return self._serial

    def __eq__(self, other: object) -> bool:
        return self is other


class Process(asyncio.AbstractEventLoop):
    """One process of a world. Made running.

    Attributes:
        name: for the record.
        host: where it runs; the network parts hosts.
        life: whether it runs.
        hung: whether its host hangs: then it never runs again, and nothing of it is read or written.
        stopped_s: how long it was stopped, together.
        skew_s: how far its wall clock is ahead of the right time.

    Args:
        world: whose time it is.
        name: as above.
        host: as above.
        began_s: what its clock shows when the world's shows zero: monotonic clocks of two hosts have nothing in common.
        skew_s: how far its wall clock is ahead of the right time.
    """

    def __init__(self, world: World, name: str, host: str, *, began_s: float, skew_s: float) -> None:
        self.name = name
        self.host = host
        self.life: Life = "running"
        self.hung = False
        self.stopped_s = 0.0
        self._stopped_at = 0.0
        self._world = world
        self.skew_s = skew_s
        self._began_s = began_s
        self._ready: deque[asyncio.Handle] = deque()
        self._turn: Event | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._serials = count(1)
        self._postponed: list[Callable[[], object]] = []
        self._unburied: list[Callable[[], object]] = []

    @property
    def running(self) -> bool:
        """Whether it runs: neither stopped nor killed."""
        return self.life == "running"

    @property
    def alive(self) -> bool:
        """Whether it was not killed; it may be stopped."""
        return self.life != "killed"

    def time(self) -> float:
        """Return the seconds of this process's monotonic clock."""
        return self._world.now + self._began_s

    def wall(self) -> float:
        """Return what its wall clock shows, in seconds since 1970."""
        return EPOCH_S + self._world.now + self.skew_s

    def stop(self) -> None:
        """Stop, as by SIGSTOP: nothing of it runs, and the kernel goes on to answer for it."""
        if self.life == "running":
            self.life = "stopped"
            self._stopped_at = self._world.now
            self._world.note(self.name, "stopped")

    def hang(self) -> None:
        """Stop for good, with the host: it may only be killed."""
        self.hung = True
        self.stop()

    def resume(self) -> None:
        """Go on, as by SIGCONT: what has become due meanwhile is done now."""
        if self.life == "stopped" and not self.hung:
            self.life = "running"
            self.stopped_s += self._world.now - self._stopped_at
            self._world.note(self.name, "resumed")
            self._plan_turn()
            postponed, self._postponed = self._postponed, []
            for call in postponed:
                call()

    def kill(self) -> None:
        """End, as by SIGKILL."""
        self.hung = False
        self.life = "killed"  # what it would have done is kept for its burial, or its tasks could not unwind
        self._world.note(self.name, "killed")
        postponed, self._postponed = self._postponed, []
        for call in postponed:  # what waits for it learns that it waits in vain
            call()

    def postpone(self, call: Callable[[], object]) -> None:
        """Do something as soon as the process goes on: it is stopped."""
        self._postponed.append(call)

    def pending(self) -> list[asyncio.Task[Any]]:
        """Return its tasks that are not done."""
        self._tasks = [task for task in self._tasks if not task.done()]
        return self._tasks

    def bury(self) -> None:
        """Let what is left of a killed process unwind, one last time: what the engine began is cancelled."""
        self.life = "running"
        for task in self.pending():
            if task.get_name().startswith(OUR_TASKS):
                task.cancel()
        unburied, self._unburied = self._unburied, []
        for call in unburied:
            call()
        self._plan_turn()

    # What asyncio asks of a loop.

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Call in the next turn; a process that was killed has none."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if self._turn is None:
            self._plan_turn()
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Call after ``delay`` seconds."""
        handle = asyncio.TimerHandle(self.time() + delay, callback, args, self, context)
        self._world.after(delay, self._on_timer, handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Call when its clock shows ``when``."""
        return self.call_later(when - self.time(), callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        """Return a task of this loop."""
        serial = next(self._serials)
        make = contextvars.copy_context() if context is None else context
        task: asyncio.Task[T] = make.run(_Task, coro, loop=self, serial=serial, name=name or f"task {serial}")
        if len(self._tasks) > 256:
            self.pending()
        self._tasks.append(task)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run a function, all at once, when a thread would have done so."""
        future: asyncio.Future[T] = self.create_future()
        self._world.after(self._world.delay(THREAD_S), self._run_in_thread, future, func, args)
        return future

    def get_debug(self) -> bool:
        """Return False: a world is debugged by replaying it."""
        return False

    def is_running(self) -> bool:
        """Return whether it was not killed."""
        return self.alive

    def is_closed(self) -> bool:
        """Return False: a simulated loop needs no closing."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Take what nobody handled for a broken promise, unless it is the end of something that nobody awaited."""
        error = context.get("exception")
        if "never retrieved" not in context["message"]:
            self._world.fail(error or context["message"])

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is found when it is due."""

    def _on_timer(self, handle: asyncio.TimerHandle) -> None:
        if not handle.cancelled():
            self._ready.append(handle)
            if self._turn is None:
                self._plan_turn()

    def _plan_turn(self) -> None:
        if self._turn is None and self._ready and self.life == "running":
            self._turn = self._world.after(self._world.delay(TURN_S), self._run_turn)

    def _run_turn(self) -> None:
        self._turn = None
        if self.life != "running":
            return
        events._set_running_loop(self)  # noqa: SLF001 - documented for whoever implements an event loop
        try:
            for _ in range(len(self._ready)):
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()  # noqa: SLF001 - likewise
                if self.life != "running":  # it was stopped or killed by what it did
                    break
        finally:
            events._set_running_loop(None)  # noqa: SLF001
        self._plan_turn()

    def _run_in_thread(self, future: asyncio.Future[T], func: Callable[..., T], args: tuple[Any, ...]) -> None:
        if self.life == "stopped":
            self.postpone(lambda: self._run_in_thread(future, func, args))
            return
        if self.life == "killed":
            self._unburied.append(lambda: self._run_in_thread(future, func, args))  # its task waits for it to unwind
            return
        if future.done():
            return
        try:
            result = func(*args)
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller that awaits the thread
            self.call_soon(_settle, future, None, error)
        else:
            self.call_soon(_settle, future, result, None)


def _settle(future: asyncio.Future[T], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
