"""Exceptions of kvflow's own, which must not reach vLLM: an exception out of its scheduler ends the engine."""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

logger = logging.getLogger("vllm.kvflow")  # vLLM shows what stands below its own name

Method = TypeVar("Method", bound=Callable[..., Any])


class Guard:
    """What was kept from vLLM. Thread: the scheduler's.

    Attributes:
        caught: exceptions since the last ``take``, by the method that raised them.
    """

    def __init__(self) -> None:
        self.caught: dict[str, int] = {}
        self._told: set[tuple[str, type[Exception]]] = set()

    def note(self, method: str, error: Exception) -> None:
        """Count an exception, and log its traceback the first time."""
        self.caught[method] = self.caught.get(method, 0) + 1
        known = (method, type(error)) in self._told
        self._told.add((method, type(error)))
        logger.error(
            "kvflow: %s has failed: %s: %.200s", method, type(error).__name__, error, exc_info=None if known else error
        )

    def take(self) -> dict[str, int]:
        """Return the counts since the last call."""
        caught, self.caught = self.caught, {}
        return caught


class Guarded(Protocol):
    """What has methods that vLLM's scheduler calls."""

    guard: Guard


def guarded(answer: Any, mend: Callable[..., Any] | None = None) -> Callable[[Method], Method]:
    """Return a decorator for a method that must not raise, ``MemoryError`` and ``RecursionError`` included.

    Args:
        answer: what the method returns when it has raised and cannot be mended.
        mend: called with the method's object, the exception and the method's arguments when it has raised; what it
            returns is the method's answer.
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(self: Guarded, *args: Any) -> Any:
            try:
                return method(self, *args)
            except Exception as error:  # noqa: BLE001 - any exception would end vLLM
                return mended(self, method.__name__, error, *args)

        return cast("Method", call)

    def mended(self: Guarded, name: str, error: Exception, *args: Any) -> Any:
        with suppress(Exception):  # memory may be short
            self.guard.note(name, error)
        try:
            return answer if mend is None else mend(self, error, *args)
        except Exception:  # noqa: BLE001 - as above
            return answer

    return decorate
