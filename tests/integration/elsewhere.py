"""The parent's end of ``producer_process``: child processes, told what to do, stopped and killed by their pid."""

import asyncio
import inspect
import json
import os
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path

import msgspec

from tests.stopping import Mortal
from tests.world.forked import ForkedProcess, whole_name

from .producing import Producer

TESTS = Path(__file__).parents[1]
PATIENCE_S = 60.0

_names = count()


def environment_of_children():
    """The variables with which a child finds this package."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}


class Child(Mortal):
    """A process that hosts producers, and runs a module of this folder, or the one that its whole name says.

    Args:
        module: that it runs.
        forked: whether it is forked off a process that has imported everything, which saves it seconds of imports.
        before: words of the command line that come before its own; not of one that is forked.
        options: of Python; likewise.
        environment: more variables.
    """

    def __init__(self, module="producer_process", *, forked=True, before=(), options=(), **environment):
        self._asking = threading.Lock()
        self.process = (
            ForkedProcess(module, environment)
            if forked
            else subprocess.Popen(
                [*before, sys.executable, *options, "-m", whole_name(module)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment_of_children() | environment,
            )
        )

    async def ask(self, op, **fields):
        return await asyncio.to_thread(self.ask_now, op, **fields)

    def say(self, op, **fields):
        """Tell it what to do, and wait for no answer."""
        self.process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
        self.process.stdin.flush()

    def ask_now(self, op, **fields):
        with self._asking:  # one answer is awaited at a time
            self.say(op, **fields)
            answer = self.process.stdout.readline()
        assert answer, f"the child ended instead of answering {op}"
        return json.loads(answer)

    @asynccontextmanager
    async def producing(self, shape, **settings):
        """Open a producer there, with the methods of ``Producer``."""
        name = str(next(_names))
        endpoint = await self.ask("open", name=name, shape=msgspec.to_builtins(shape), settings=settings)
        try:
            yield RemoteProducer(self, name, endpoint)
        finally:
            if self.process.poll() is None:
                self.resume()  # one that a failed test left stopped would not answer
                await self.ask("close", name=name)

    def go(self):
        """End it politely, and return when it is gone."""
        try:
            if self.process.poll() is None:
                self.resume()
                self.process.stdin.write('{"op": "stop"}\n')
                self.process.stdin.flush()
                self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.stdout.close()
            with suppress(BrokenPipeError):  # of a child that did not live to read it all
                self.process.stdin.close()


class RemoteProducer:
    """A producer in a child process, with the asynchronous methods of ``Producer``."""

    def __init__(self, child, name, endpoint):
        self.child = child
        self.endpoint = endpoint
        self._name = name

    def __getattr__(self, op):
        method = inspect.signature(getattr(Producer, op))

        async def ask(*arguments, **named):
            fields = method.bind(self, *arguments, **named).arguments
            del fields["self"]
            return await self.child.ask(op, name=self._name, **msgspec.to_builtins(fields))

        return ask

    def recycle_now(self, request):
        """As ``recycle``, while the loop stands still."""
        return self.child.ask_now("recycle", name=self._name, request=request)
