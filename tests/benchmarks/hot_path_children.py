"""Processes of a benchmark that do what they are asked, one request after the other."""

import asyncio
import multiprocessing
import traceback
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from multiprocessing.connection import Connection
from typing import Any, Self

import uvloop

SPAWN = multiprocessing.get_context("spawn")


class Child:
    """A process that opens an object and calls its coroutines. Close it, or use it as a context manager.

    Args:
        opens: a function of a module; returns an asynchronous context manager of the object.
        arguments: of that function.
    """

    def __init__(self, opens: Callable[..., AbstractAsyncContextManager[Any]], *arguments: Any) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_serve, args=(theirs, opens, arguments))
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a coroutine of the object, and return what it returns.

        Raises:
            RuntimeError: it raised something, or the process has ended.
        """
        self._pipe.send((name, arguments, named))
        try:
            failure, value = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the process that was asked for {name} has ended") from None
        if failure:
            raise RuntimeError(f"{name} failed in its process:\n{failure}")
        return value

    def close(self) -> None:
        """Have the object closed, and wait for the end of the process."""
        with suppress(OSError):
            self._pipe.send(None)
        self._process.join()


def _serve(
    pipe: Connection, opens: Callable[..., AbstractAsyncContextManager[Any]], arguments: tuple[Any, ...]
) -> None:
    with suppress(EOFError):  # the process that asks has ended
        uvloop.run(_answer(pipe, opens(*arguments)))


async def _answer(pipe: Connection, opening: AbstractAsyncContextManager[Any]) -> None:
    async with opening as served:
        while (request := await asyncio.to_thread(pipe.recv)) is not None:
            name, arguments, named = request
            try:
                answer = "", await getattr(served, name)(*arguments, **named)
            except Exception:  # noqa: BLE001  # who has asked is told
                answer = traceback.format_exc(), None
            pipe.send(answer)
