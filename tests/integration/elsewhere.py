"""The parent's end of ``producer_process``: child processes, told what to do, stopped and killed by their pid."""

import asyncio
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

from .forked import ForkedProcess, whole_name

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
    """A producer in a child process."""

    def __init__(self, child, name, endpoint):
        self.child = child
        self.endpoint = endpoint
        self._name = name

    async def offer(self, request, block_ids, num_tokens):
        return await self._ask("offer", request, block_ids=block_ids, num_tokens=num_tokens)

    async def offer_as_is(self, request, block_ids, num_tokens):
        return await self._ask("offer_as_is", request, block_ids=block_ids, num_tokens=num_tokens)

    async def write(self, request, block_ids, num_tokens):
        await self._ask("write", request, block_ids=block_ids, num_tokens=num_tokens)

    async def address(self):
        return await self.child.ask("address", name=self._name)

    async def admit(self, grant):
        await self.child.ask("admit", name=self._name, grant=msgspec.to_builtins(grant))

    async def refusal(self, grant):
        return await self.child.ask("refusal", name=self._name, grant=msgspec.to_builtins(grant))

    async def revoke(self, request):
        return await self._ask("revoke", request)

    async def recycle(self, request):
        return await self._ask("recycle", request)

    def recycle_now(self, request):
        """As ``recycle``, while the loop stands still."""
        return self.child.ask_now("recycle", name=self._name, request=request)

    async def outcome(self, request):
        return await self._ask("outcome", request)

    async def held(self):
        return await self.child.ask("held", name=self._name)

    async def check(self):
        await self.child.ask("check", name=self._name)

    async def leases(self):
        return await self.child.ask("leases", name=self._name)

    async def _ask(self, op, request, **fields):
        return await self.child.ask(op, name=self._name, request=request, **fields)
