"""A worker or a command in a process of its own, with its own variables: lines of JSON go in, and answers come out.

``{"op": "open", "settings": {...}}`` is answered with what was said and, if the worker has opened, its endpoint.
``offer`` is answered with what a router carries, and ``command`` with what a command of kvflow prints. ``stop``, or the
end of the input, ends the process.
"""

import asyncio
import io
import json
import sys
from contextlib import AsyncExitStack, redirect_stdout

import uvloop

import kvflow
from kvflow.tools.cli import main as main_of_commands

from .saying import Sayings
from .shapes import Shape


async def main():
    async with AsyncExitStack() as stack:
        worker = None
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            match command.pop("op"):
                case "open":
                    with Sayings() as heard:
                        try:
                            cache = Shape(**command.get("shape", {})).build()
                            config = kvflow.WorkerConfig.read({"engine_id": "prefill-0", **command["settings"]})
                            worker = await stack.enter_async_context(kvflow.open_worker(config, cache))
                        except kvflow.errors.KvflowError as error:
                            heard.add_error(error)
                    answer = {"said": heard.said, "endpoint": worker and worker.endpoint}
                case "command":
                    with redirect_stdout(io.StringIO()) as printed:
                        await asyncio.to_thread(main_of_commands, command["arguments"])
                    answer = printed.getvalue()
                case "offer":
                    answer = worker.offer("request-1", **command).to_params()
                case "stop":
                    return
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(main())
