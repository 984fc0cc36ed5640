"""Wait for what nothing tells: look until it has happened, within a generous deadline. What tells is awaited itself."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

PATIENCE_S = 60.0
PAUSE_S = 0.001

T = TypeVar("T")


async def patiently(awaitable: Awaitable[T]) -> T:
    """Await what tells that it has happened, and must happen."""
    async with asyncio.timeout(PATIENCE_S):
        return await awaitable


async def until(condition: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """Return what a condition says once that is true; TimeoutError if it never is."""
    async with asyncio.timeout(patience_s):
        while not (found := condition()):  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(PAUSE_S)
    return found


def wait_until(condition: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """Do likewise where there is no event loop."""
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"it has not happened for {patience_s} s")
        time.sleep(PAUSE_S)
    return found
