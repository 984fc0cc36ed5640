"""The parent's end of the processes that fuzz and are fuzzed."""

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

from .fuzzed import FINDING

ROOT = Path(__file__).parents[2]
SECRET = "the secret of the fuzzed cluster"
LINE_MAX = 1 << 26
PATIENCE_S = 60.0
START_PATIENCE_S = 240.0
"""A worker loads torch and NIXL first, on a machine that may be busy with other tests."""


class Died(Exception):
    """The process that was fuzzed is gone, or said something that it should not have."""


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}


async def start(module, *arguments, **streams):
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"tests.fuzz.{module}", *map(str, arguments), **streams, env=environment(), limit=LINE_MAX
    )


class Worker:
    """The worker that is fuzzed.

    Attributes:
        pid: of its process.
        endpoint: where it listens.
    """

    def __init__(self, process):
        self._process = process
        self._numbers = count()
        self._asked = {}
        self.pid = process.pid
        self.endpoint = ""

    async def ask(self, op, *, within_s=PATIENCE_S, **fields):
        """Have it do something, and return what it says of it.

        Raises:
            Died: it has ended, or the answer is a finding.
        """
        number = next(self._numbers)
        self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write((json.dumps({"id": number, "op": op, **fields}) + "\n").encode())
            await self._process.stdin.drain()
            async with asyncio.timeout(within_s):
                said = await self._asked[number]
        except ConnectionError as error:
            raise Died(f"the worker ended with {await self._process.wait()}") from error
        except TimeoutError as error:
            raise Died(f"{op} has not ended within {within_s} s") from error
        finally:
            del self._asked[number]
        if isinstance(said, str) and said.startswith(FINDING):
            raise Died(said)
        return said

    async def hear(self):
        """Pass on its answers until it ends."""
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            if (asked := self._asked.get(answer["id"])) is not None:
                asked.set_result(answer["said"])
        code = await self._process.wait()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(Died(f"the worker ended with {code}"))

    def rss(self):
        """Return its resident bytes."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def lives(self):
        return self._process.returncode is None


@asynccontextmanager
async def fuzzed_worker(transport):
    """Start a worker; it is asked to end, and then made to."""
    pipe = asyncio.subprocess.PIPE
    process = await start("fuzzed", transport, SECRET, stdin=pipe, stdout=pipe)
    worker = Worker(process)
    hearing = asyncio.create_task(worker.hear())
    try:
        worker.endpoint = await worker.ask("endpoint", within_s=START_PATIENCE_S)
        yield worker
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await hearing
        finally:
            if worker.lives:
                process.kill()
                await process.wait()
