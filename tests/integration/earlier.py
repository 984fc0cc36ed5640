"""Earlier releases of kvflow as they are in the history: their own workers, in processes of their own programs."""

import asyncio
import io
import json
import subprocess
import sys
import tarfile
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from tests.world.node import PATIENCE_S, environment_of_children

ROOT = Path(__file__).parents[2]


def unpack(commit, folder):
    """Put an earlier commit into a folder. The test is skipped in a copy of the repository without that commit."""
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]
    known = subprocess.run([*git, "cat-file", "-e", commit], capture_output=True, check=False)
    if known.returncode:
        pytest.skip(
            f"commit {commit} is not here: {known.stderr.decode().strip()}. This test needs the history of the "
            "repository: clone it whole, or run git fetch --unshallow"
        )
    found = subprocess.run([*git, "archive", commit, "kvflow", "handshake", "tests"], capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


class Earlier:
    """A program of an earlier commit's integration tests, which imports nothing of this one: one answer a line.

    Args:
        folder: the commit.
        module: name of the program.
    """

    def __init__(self, folder, module):
        # The current folder is this repository, and must not be looked at.
        ours = {"PYTHONPATH": f"{folder}:{folder / 'tests'}", "PYTHONSAFEPATH": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"integration.{module}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment_of_children() | ours,
        )

    async def ask(self, op, **fields):
        return await asyncio.to_thread(self._ask, {"op": op, **fields})

    def _ask(self, command):
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    @asynccontextmanager
    async def producing(self, shape, **settings):
        """Open a producer there; yield what asks it."""
        await self.ask("open", name="it", shape=msgspec.to_builtins(shape), settings=settings)
        yield self
        await self.ask("close", name="it")

    def go(self):
        """End it, and return when it is gone."""
        with self._process:
            self._process.stdin.close()
            self._process.wait(PATIENCE_S)
