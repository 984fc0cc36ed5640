"""The program of every process that tests start, pause and kill: lines of JSON say what is opened, and what it does.

``{"id": 1, "op": "open", "of": "a", "args": ["tests.integration.producing:producing", ...], "named": {...}}`` enters a
context manager, asynchronous or not, and knows by the name ``a`` what that yields. ``close`` leaves it, and so does
another ``open``; each other ``op`` is a method of it. A line is answered by one with its ``id`` when it is done, others
are served meanwhile: ``answer``, or ``error``. ``stop``, or the end of the input, ends all. Arguments whose annotation
is a structure may be its fields. What libraries write when they abort the process goes into the file that
``KVFLOW_TEST_WORDS`` names. ``KVFLOW_TEST_NAMESPACE`` names a network namespace.
"""

import asyncio
import importlib
import inspect
import json
import logging
import os
import sys
import traceback
from contextlib import AsyncExitStack

import msgspec
import uvloop

from .wire import enter

LINE_MAX = 1 << 28


class LoggedErrors(logging.Handler):
    """Remembers every error that anybody logs: each is a defect."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.texts = []

    def emit(self, record):
        self.texts.append(self.format(record))


def logged_errors():
    """Return what was logged as an error in this process, if anybody listens."""
    handlers = logging.getLogger().handlers
    return [text for handler in handlers if isinstance(handler, LoggedErrors) for text in handler.texts]


class Life:
    """One thing from its opening to its closing, in a task of its own: who leaves a context has to have entered it."""

    def __init__(self, manager):
        self.thing = asyncio.get_running_loop().create_future()
        self._left = asyncio.Event()
        self._task = asyncio.create_task(self._live(manager))

    async def opened(self):
        """Wait until it is open, and return it."""
        await asyncio.wait([self._task, self.thing], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            await self._task  # why it could not be opened
        return await self.thing

    async def close(self):
        self._left.set()
        await self._task

    async def _live(self, manager):
        async with AsyncExitStack() as stack:
            is_asynchronous = hasattr(manager, "__aenter__")
            opened = await stack.enter_async_context(manager) if is_asynchronous else stack.enter_context(manager)
            self.thing.set_result(opened)
            await self._left.wait()


class Process:
    """What is open here."""

    def __init__(self):
        self._lives = {}

    async def do(self, op, of, args, named):
        """Do what one line says; return the answer."""
        match op:
            case "open":
                return await self._open(of, *args, **named)
            case "close":
                return await self._lives.pop(of).close()
            case _:
                return await done(getattr(await self._lives[of].thing, op), args, named)

    async def _open(self, of, kind, *args, **named):
        if of in self._lives:
            await self._lives.pop(of).close()
        module, _, name = kind.partition(":")
        self._lives[of] = life = Life(await done(getattr(importlib.import_module(module), name), args, named))
        try:
            return getattr(await life.opened(), "endpoint", None)
        except Exception:
            del self._lives[of]
            raise

    async def close(self):
        """Close what is still open, the last first."""
        for life in reversed(self._lives.values()):
            await life.close()


async def done(function, args, named):
    """Call what is asynchronous or not, with structures made of their fields."""
    bound = inspect.signature(function).bind(*args, **named)
    for name, value in bound.arguments.items():
        wanted = bound.signature.parameters[name].annotation
        if inspect.isclass(wanted) and issubclass(wanted, msgspec.Struct):
            bound.arguments[name] = msgspec.convert(value, wanted)
    answer = function(*bound.args, **bound.kwargs)
    return await answer if inspect.isawaitable(answer) else answer


async def serve(process, number, command):
    try:
        answer = await process.do(**command)
    except Exception:  # noqa: BLE001 - the one that asked is told all of it
        say(id=number, error=traceback.format_exc())
    else:
        say(id=number, answer=answer)


def say(**words):
    sys.stdout.write(json.dumps(words, default=msgspec.to_builtins) + "\n")
    sys.stdout.flush()


async def main():
    logging.basicConfig(handlers=[LoggedErrors()])
    if words := os.environ.get("KVFLOW_TEST_WORDS"):
        os.dup2(os.open(words, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    if namespace := os.environ.get("KVFLOW_TEST_NAMESPACE"):
        enter(namespace)
    lines = asyncio.StreamReader(limit=LINE_MAX)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    process, commands = Process(), set()
    try:
        while (line := await lines.readline()) and (command := json.loads(line))["op"] != "stop":
            task = asyncio.create_task(serve(process, command.pop("id"), command))
            commands.add(task)
            task.add_done_callback(commands.discard)
        for task in commands:
            task.cancel()
    finally:
        await process.close()


if __name__ == "__main__":
    uvloop.run(main())
