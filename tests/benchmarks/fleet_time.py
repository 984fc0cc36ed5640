"""Virtual time for many threads that each run an asyncio loop: code of the product runs on it unchanged."""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any


class Clock:
    """Calls functions at their virtual times, in seconds; those of the same time in the order in which they came."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._numbers = count()

    def at(self, when: float, call: Callable[..., Any], *args: Any) -> None:
        """Call a function at a time, or now if that is over."""
        heapq.heappush(self._calls, (max(when, self.now), next(self._numbers), call, args))

    def run(self, until: float) -> None:
        """Call all that is due until then."""
        while self._calls and self._calls[0][0] <= until:
            self.now, _, call, args = heapq.heappop(self._calls)
            call(*args)
        self.now = until

    def monotonic(self) -> float:
        """Return the time of the loop that runs, in which it may have computed; outside of loops that of the clock."""
        loop = asyncio._get_running_loop()
        return self.now if loop is None else loop.time()


class Loop(asyncio.AbstractEventLoop):
    """The loop of one thread. What a callback computes (``compute``) delays those behind it, and no other thread."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._busy_until = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._is_awake = False

    def compute(self, seconds: float) -> None:
        """Let the callback that runs take so much time."""
        self._busy_until = self.time() + seconds

    def time(self) -> float:
        return max(self.clock.now, self._busy_until)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self.clock.at(when, self._append, handle)
        return handle

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> "asyncio.Task[Any]":
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise RuntimeError(context["message"]) from context.get("exception")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays in the clock, which then finds it cancelled."""

    def _append(self, handle: asyncio.Handle) -> None:
        if handle.cancelled():
            return
        self._ready.append(handle)
        if not self._is_awake:
            self._is_awake = True
            self.clock.at(self.time(), self._turn)

    def _turn(self) -> None:
        """Run what is ready, until that has taken time."""
        asyncio._set_running_loop(self)
        try:
            while self._ready and self._busy_until <= self.clock.now:
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(None)
        self._is_awake = bool(self._ready)
        if self._ready:
            self.clock.at(self._busy_until, self._turn)
