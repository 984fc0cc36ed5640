"""A consumer in a process of its own, told what to pull by lines of JSON on standard input.

``{"op": "open", "shape": {...}, "settings": {...}}`` opens it. ``{"op": "pull", "pulls": [[request, params, blocks,
num_tokens], ...]}`` begins all of them at once and is answered when all have ended, by one outcome for each: ``right``,
``wrong``, or the code of the error. The end of the input ends it.
"""

import asyncio
import json
import sys
from contextlib import AsyncExitStack

import msgspec
import uvloop

from kvflow import errors

from .consuming import consuming
from .shapes import Shape, wrong


async def outcome(consumer, request, params, blocks, num_tokens):
    try:
        await consumer.pull(params, blocks)
    except errors.KvflowError as error:
        await consumer.worker.quiesced(request)
        return error.code
    return "wrong" if wrong(consumer.cache, request, blocks, num_tokens) else "right"


async def main():
    async with AsyncExitStack() as life:
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            match command["op"]:
                case "open":
                    shape = msgspec.convert(command["shape"], Shape)
                    consumer = await life.enter_async_context(consuming(shape, **command["settings"]))
                    answer = True
                case "pull":
                    answer = await asyncio.gather(*(outcome(consumer, *pull) for pull in command["pulls"]))
                case "stop":
                    return
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(main())
