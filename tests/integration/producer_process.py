"""Producers in a process of their own, told what to do by lines of JSON on standard input.

``{"op": "open", "name": "a", "shape": {...}, "settings": {...}}`` opens a producer, ``close`` closes it, and every
other ``op`` is a method of ``Producer``. Each line is answered by one line. ``stop``, or the end of the input, ends it.
"""

import asyncio
import json
import sys
from contextlib import AsyncExitStack

import msgspec
import uvloop

from .producing import producing
from .shapes import Shape


async def main():
    opened = {}
    async with AsyncExitStack() as everything:
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            op, name = command.pop("op"), command.pop("name", "")
            answer = None
            match op:
                case "open":
                    life = await everything.enter_async_context(AsyncExitStack())
                    shape = msgspec.convert(command["shape"], Shape)
                    producer = await life.enter_async_context(producing(shape, **command["settings"]))
                    opened[name] = (producer, life)
                    answer = producer.worker.endpoint
                case "close":
                    _, life = opened.pop(name)
                    await life.aclose()
                case "stop":
                    return
                case _:
                    answer = await getattr(opened[name][0], op)(**command)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(main())
