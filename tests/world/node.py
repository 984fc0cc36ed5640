"""The tests' end of processes that are started, paused, killed and started again; ``process`` is the program of all."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path

import msgspec

from tests.stopping import Mortal

from .forked import ROOT, ForkedProcess

PATIENCE_S = 60.0
PROGRAM = "tests.world.process"

_names = count(1)


class NodeDied(Exception):
    """A process ended instead of answering.

    Attributes:
        node: the process.
    """

    def __init__(self, node):
        super().__init__(node.name)
        self.node = node


class NodeFailed(Exception):
    """What was asked of a process raised an exception there."""


def environment_of_children():
    """The variables with which a child finds this package."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


class Opened:
    """Something that was opened in a process. Its methods are coroutines here, of which several may be under way.

    With ``_now`` behind its name each is none: the caller's thread stands still until it has an answer.

    Attributes:
        node: the process.
        endpoint: of what was opened, if it has one.
    """

    def __init__(self, node, name, endpoint=None):
        self.node = node
        self.endpoint = endpoint
        self._name = name

    def __getattr__(self, op):
        if op.startswith("_"):
            raise AttributeError(op)
        return partial(self.ask_now, op.removesuffix("_now")) if op.endswith("_now") else partial(self.ask, op)

    def begin(self, op, *arguments, **named):
        """Ask for something; return a future of the answer, whose result any thread may wait for.

        Of functions among the arguments the names are told.

        Raises:
            NodeDied: the process has ended; if it ends meanwhile, the future raises this.
        """
        return self.node.say(op, self._name, arguments, named)

    async def ask(self, op, *arguments, **named):
        return await asyncio.wrap_future(self.begin(op, *arguments, **named))

    def ask_now(self, op, *arguments, **named):
        return self.begin(op, *arguments, **named).result()


class Node(Mortal, Opened):
    """One process, and what was opened in it without a name.

    Args:
        name: of it.
        forked: whether it is forked off a process that has imported everything, which saves it seconds of imports.
        before: words of the command line that come before its own; not of one that is forked.
        options: of Python; likewise.
        words: file for what libraries say last, if they abort it.
        namespace: network namespace that it lives in.
        environment: more variables.

    Attributes:
        killed: whether somebody has killed it.
        process: as much of ``subprocess.Popen`` as is needed.
    """

    def __init__(self, name="", *, forked=True, before=(), options=(), words="", namespace="", **environment):
        super().__init__(self, "")
        self.name = name
        self.words = words
        self.killed = False
        self._silent = False
        self._asked = {}
        self._ids = count(1)
        self._lock = threading.Lock()
        environment |= {"KVFLOW_TEST_WORDS": str(words), "KVFLOW_TEST_NAMESPACE": namespace}
        self.process = (
            ForkedProcess(environment)
            if forked
            else subprocess.Popen(
                [*before, sys.executable, *options, "-m", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment_of_children() | environment,
            )
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def pid(self):
        return self.process.pid

    @property
    def lives(self):
        return self.process.poll() is None

    async def open(self, kind, *arguments, **named):
        """Open what a context manager yields, there; from now on it is what this process does."""
        self.endpoint = await self.ask("open", kind, *arguments, **named)

    async def open_another(self, kind, *arguments, **named):
        """Open one more thing there, and return it."""
        name = f"{self.name} {next(_names)}"
        return Opened(self, name, await Opened(self, name).ask("open", kind, *arguments, **named))

    def say(self, op, of, arguments=(), named=()):
        """Say one line; return a future of its answer."""
        answer, number = Future(), next(self._ids)
        told = [f"{each.__module__}:{each.__qualname__}" if callable(each) else each for each in arguments]
        line = {"id": number, "op": op, "of": of, "args": told, "named": dict(named)}
        with self._lock:
            if self._silent:
                raise NodeDied(self)
            self._asked[number] = answer
            with suppress(BrokenPipeError):  # the listener hears of its end
                self.process.stdin.write(json.dumps(line, default=msgspec.to_builtins) + "\n")
                self.process.stdin.flush()
        return answer

    def kill(self):
        """End it without a word."""
        self.killed = True
        super().kill()

    def crashed(self):
        """Return the signal that ended it although nobody has killed it, 0 for none; None if it lives."""
        status = self.process.poll()
        return None if status is None or self.killed else max(0, -status)

    def last_words(self):
        """Return what UCX said last, if it has aborted the process."""
        lines = [line for line in Path(self.words).read_text().splitlines() if "Fatal" in line or "Assert" in line]
        return lines[-1].partition("]")[2].strip() if lines else "no word"

    def go(self):
        """End it politely if it lives, and return when it is gone."""
        try:
            if self.lives:
                self.resume()
                with suppress(NodeDied):
                    self.say("stop", "")
                self.process.wait(PATIENCE_S)
        finally:
            self.end()

    def end(self):
        """End it, whatever it does, and forget it."""
        if self.lives:
            self.kill()
        self._listener.join(PATIENCE_S)
        self.process.stdout.close()
        with suppress(BrokenPipeError):  # of a child that did not live to read it all
            self.process.stdin.close()
        if isinstance(self.process, ForkedProcess):
            self.process.close()

    def _listen(self):
        for line in self.process.stdout:
            said = json.loads(line)
            asked = self._asked.pop(said["id"])
            with suppress(InvalidStateError):  # nobody waits for it now
                if "error" in said:
                    asked.set_exception(NodeFailed(f"{self.name}: {said['error']}"))
                else:
                    asked.set_result(said["answer"])
        with self._lock:
            self._silent = True
        for asked in self._asked.values():
            with suppress(InvalidStateError):
                asked.set_exception(NodeDied(self))


@asynccontextmanager
async def hosted(kind, *arguments, forked=True, **named):
    """Open something in a process of its own, which must end in order unless it is killed."""
    node = await asyncio.to_thread(partial(Node, kind.__name__, forked=forked))
    try:
        await node.open(kind, *arguments, **named)
        yield node
    finally:
        await asyncio.to_thread(node.go)
    assert node.killed or node.process.poll() == 0
