"""The parent's end of ``node``: engines in processes that are stopped, killed and started again."""

import asyncio
import json
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path

from tests.integration.elsewhere import Child

MODULE = "tests.world.node"


class NodeDied(Exception):
    """A process ended instead of answering."""


class NodeFailed(Exception):
    """What was asked of a process raised an exception there."""


class Node(Child):
    """One process with an engine; several things may be asked of it at once.

    Args:
        name: of the engine.
        words: file for what UCX says last.
        namespace: network namespace that it lives in.
        environment: more variables.
    """

    def __init__(self, name, words, *, namespace="", **environment):
        self.name = name
        self.endpoint = ""
        self.words = words
        self.killed = False
        self._silent = False
        self._asked = {}
        self._ids = count(1)
        self._loop = asyncio.get_running_loop()
        ours = {"KVFLOW_CHAOS_WORDS": str(words), "KVFLOW_CHAOS_NAMESPACE": namespace}
        super().__init__(MODULE, **ours, **environment)
        threading.Thread(target=self._listen, daemon=True).start()

    async def open(self, *, num_offered=0, num_slots=0, **settings):
        """Open its worker; returns when it listens."""
        await self.open_as("engine", num_offered=num_offered, num_slots=num_slots, **settings)

    async def open_as(self, kind, **settings):
        """Open what ``node`` knows by that name."""
        self.endpoint = await self.ask("open", kind=kind, engine_id=self.name, **settings)

    async def ask(self, op, **fields):
        if self._silent:
            raise NodeDied(self.name)
        asked = self._asked[number := next(self._ids)] = self._loop.create_future()
        with suppress(BrokenPipeError):  # whoever listens hears of its end
            self.say(op, id=number, **fields)
        return await asked

    async def offer(self, *arguments, **options):
        names = ("number", "successor", "num_blocks")
        return await self.ask("offer", **dict(zip(names, arguments, strict=True)), **options)

    async def pull(self, *arguments):
        names = ("number", "mark", "params", "num_blocks")
        return tuple(await self.ask("pull", **dict(zip(names, arguments, strict=True))))

    async def revoke(self, number):
        return await self.ask("revoke", number=number)

    async def at_rest(self, patience_s):
        return await self.ask("at_rest", patience_s=patience_s)

    async def overwritten(self):
        return await self.ask("overwritten")

    async def logged(self):
        return await self.ask("logged")

    def kill(self):
        self.killed = True
        super().kill()

    def end(self):
        """End it, whatever it does, and forget it."""
        self.kill()
        self.process.stdout.close()
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.close()

    def ended(self):
        """Return how it ended although nobody has killed it: the number of a signal, 0 for none; None if it lives."""
        status = self.process.poll()
        return None if status is None or self.killed else max(0, -status)

    def last_words(self):
        """Return what UCX said last, if it has aborted the process."""
        lines = [line for line in Path(self.words).read_text().splitlines() if "Fatal" in line or "Assert" in line]
        return lines[-1].partition("]")[2].strip() if lines else "no word"

    def _listen(self):
        with suppress(ValueError, OSError):  # closed under our hands
            for line in self.process.stdout:
                said = json.loads(line)
                self._loop.call_soon_threadsafe(self._hear, said)
        with suppress(RuntimeError):  # the loop may be closed by then
            self._loop.call_soon_threadsafe(self._end)

    def _hear(self, said):
        asked = self._asked.pop(said["id"])
        if asked.done():
            return
        if "error" in said:
            asked.set_exception(NodeFailed(f"{self.name}: {said['error']}"))
        else:
            asked.set_result(said["answer"])

    def _end(self):
        self._silent = True
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(NodeDied(self.name))
        self._asked.clear()
