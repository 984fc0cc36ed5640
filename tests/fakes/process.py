"""A simulated process: an asyncio event loop on virtual time that can be stopped, continued and killed.

Each process has a loop of its own, so that what belongs to a process is known: a process that is stopped keeps its
callbacks for later, as SIGSTOP does, and a killed one never runs another line, not even a ``finally``. ``bury`` lets
the remains of all processes unwind after the scenario.
"""

import asyncio
import contextvars
import warnings
from asyncio.events import _set_running_loop  # documented for event loops
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import count
from typing import Any, Literal, TypeVar

from tests.fakes.world import Event, World

T = TypeVar("T")
Life = Literal["running", "stopped", "killed"]

OUR_TASKS = ("life", "drive")
"""How the names of those tasks begin that are the simulated engine's and not the worker's."""

BURIAL_S = 60.0
"""Virtual seconds that the remains of processes may take to unwind."""

TURN_S = 20e-6
"""Mean delay of a iteration of the loop: processes run side by side, and none knows when the other's turn comes."""

EPOCH_S = 1.8e9
"""When every world begins, in seconds since 1970."""

THREAD_S = 1e-3
"""Mean time that work in a thread takes."""


class _Task(asyncio.Task[T]):
    """A task whose place in a set is the same in every run: asyncio cancels the tasks of a group in such an order."""

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, T],
        *,
        loop: asyncio.AbstractEventLoop,
        serial: int,
        name: str,
        context: contextvars.Context | None,
    ) -> None:
        self._serial = serial
        super().__init__(coroutine, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self._serial

    def __eq__(self, other: object) -> bool:
        return self is other


class _Call(asyncio.TimerHandle):
    """A call in the next turn, or when the clock shows ``when``; without what real loops keep of one for debugging."""

    __slots__ = ("args", "callback", "context")

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[object, ...],
        context: contextvars.Context | None,
        when: float = 0.0,
    ) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = contextvars.copy_context() if context is None else context
        self._when = when

    def cancel(self) -> None:
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None


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
        self._ready: deque[_Call] = deque()
        self._turn: Event | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._serials = count(1 + (len(world.processes) << 32))
        self._postponed: list[Callable[[], object]] = []
        self._unburied: list[Callable[[], object]] = []
        world.processes.append(self)

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

    def unwind(self) -> None:
        """Let what is left unwind: what the engine began is cancelled, and ends what it began itself."""
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
        handle = _Call(callback, args, context)
        self._ready.append(handle)
        if self._turn is None and self.life == "running":
            self._turn = self._world.later(TURN_S, self._run_turn)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Call after ``delay`` seconds."""
        handle = _Call(callback, args, context, self._world.now + self._began_s + delay)
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
        task = _Task(coro, loop=self, serial=serial, name=name or f"task {serial}", context=context)
        if len(self._tasks) > 256:
            self.pending()
        self._tasks.append(task)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run a function, all at once, when a thread would have done so."""
        future: asyncio.Future[T] = self.create_future()
        self._world.later(THREAD_S, self._run_in_thread, future, func, args)
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

    def _on_timer(self, timer: _Call) -> None:
        if timer.callback is not None:
            self._ready.append(timer)
            if self._turn is None:
                self._plan_turn()

    def _plan_turn(self) -> None:
        if self._turn is None and self._ready and self.life == "running":
            self._turn = self._world.later(TURN_S, self._run_turn)

    def _run_turn(self) -> None:
        self._turn = None
        if self.life != "running":
            return
        ready = self._ready
        _set_running_loop(self)
        try:
            for _ in range(len(ready)):
                call = ready.popleft()
                if call.callback is not None:
                    try:
                        call.context.run(call.callback, *call.args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:  # noqa: BLE001 - a scenario ends with the first defect
                        self._world.fail(error)
                if self.life != "running":  # it was stopped or killed by what it did
                    break
        finally:
            _set_running_loop(None)
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


def bury(world: World) -> None:
    """Let the remains of every process of a world unwind, one last time, whatever they do: nothing reads it afterwards.

    Otherwise the garbage collector would end them, parts before the whole, and say so in the midst of something else.
    """
    left: list[asyncio.Task[Any]] = []

    def all_done() -> bool:
        while left and left[-1].done():
            left.pop()
        if not left:
            left.extend(task for process in world.processes for task in process.pending())
        return not left

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        world.violation, world.over, world.recording = None, True, False
        for process in world.processes:
            process.unwind()
        world.run(all_done, world.now + BURIAL_S)
        for task in (task for process in world.processes for task in process.pending()):
            coroutine = task.get_coro()  # it waits for a thread, or for a call in the midst of which it was killed
            assert isinstance(coroutine, Coroutine)
            with suppress(RuntimeError):  # it waits for something else before it ends
                coroutine.close()


def _settle(future: asyncio.Future[T], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
