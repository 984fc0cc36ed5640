"""A worker or a command in a process with other variables, for which something may be wrong."""

import asyncio
import io
from contextlib import AsyncExitStack, asynccontextmanager, redirect_stdout

import kvflow
from kvflow.tools.cli import main as main_of_commands

from .saying import Sayings
from .shapes import Shape


class Misconfigured:
    """A worker, unless it was refused.

    Attributes:
        endpoint: of the worker.
    """

    def __init__(self, worker, said):
        self._worker = worker
        self._said = said
        self.endpoint = worker and worker.endpoint

    def said(self):
        """Return what was said when it was opened."""
        return self._said

    def offer(self, block_ids, num_tokens):
        """Return what a router carries."""
        return self._worker.offer("request-1", block_ids, num_tokens).to_params()

    async def command(self, arguments):
        """Return what a command of kvflow prints here."""
        with redirect_stdout(io.StringIO()) as printed:
            await asyncio.to_thread(main_of_commands, arguments)
        return printed.getvalue()


@asynccontextmanager
async def misconfigured(shape: Shape, settings):
    """Open a worker with these settings; none if they are None, for commands."""
    async with AsyncExitStack() as stack:
        worker = None
        with Sayings() as heard:
            try:
                if settings is not None:
                    config = kvflow.WorkerConfig.read({"engine_id": "prefill-0", **settings})
                    worker = await stack.enter_async_context(kvflow.open_worker(config, shape.build()))
            except kvflow.errors.KvflowError as error:
                heard.add_error(error)
        yield Misconfigured(worker, heard.said)
