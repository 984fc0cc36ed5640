"""An engine in a process of its own, told what to do by lines of JSON on standard input.

``{"id": 1, "op": "open", ...}``, with the arguments of ``engine``, opens it, and every other ``op`` is a method of
``Engine``; with ``"kind": "producer"`` or ``"reader"``, of those in ``pair``. Each line is answered by one line with
its ``id``, when it is done: others are served meanwhile. The end of the input ends the process. What UCX says when it
aborts it goes into the file that ``KVFLOW_CHAOS_WORDS`` names. ``KVFLOW_CHAOS_NAMESPACE`` names a network namespace.
"""

import asyncio
import inspect
import json
import logging
import os
import sys
import traceback
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from .engine import LoggedErrors, engine
from .pair import producing, reading
from .wire import enter

KINDS = {"engine": engine, "producer": producing, "reader": reading}


async def main():
    logging.basicConfig(handlers=[LoggedErrors()], level=logging.ERROR)
    redirect_errors(os.environ["KVFLOW_CHAOS_WORDS"])
    if namespace := os.environ.get("KVFLOW_CHAOS_NAMESPACE"):
        enter(namespace)
    commands = set()
    async with AsyncExitStack() as life:
        running = None
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            number, op = command.pop("id", 0), command.pop("op")
            if op == "stop":
                break
            if op == "open":
                running = await life.enter_async_context(KINDS[command.pop("kind", "engine")](**command))
                say(id=number, answer=running.endpoint)
                continue
            task = asyncio.create_task(serve(number, getattr(running, op), command))
            commands.add(task)
            task.add_done_callback(commands.discard)
        for task in commands:
            task.cancel()


async def serve(number, method, arguments):
    try:
        answer = method(**arguments)
        answer = await answer if inspect.isawaitable(answer) else answer
    except Exception:  # noqa: BLE001 - whoever asked is told, with all there is
        say(id=number, error=traceback.format_exc())
    else:
        say(id=number, answer=answer)


def redirect_errors(path):
    """Send what libraries write to the standard error into a file."""
    with Path(path).open("a") as words:
        os.dup2(words.fileno(), 2)


def say(**words):
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(main())
