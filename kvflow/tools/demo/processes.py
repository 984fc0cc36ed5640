"""Start engines as processes, wait for them, and end them with the parent process."""

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from msgspec import Struct

from kvflow.config import SECRET_VARIABLE
from kvflow.tools.demo.router import EngineFailed

START_S = 60.0
"""Importing torch from a cold disk takes ten seconds; NIXL's first agent another one."""

STOP_S = 15.0
"""A worker says goodbye within its own budget of five seconds."""

LISTENING_AT = b"listening at "
"""The line begins so in which an engine prints its address."""


class EngineCommand(Struct, frozen=True, kw_only=True):
    """How to start one engine.

    Attributes:
        name: of its log files.
        role: ``prefill``, ``decode`` or ``monolithic``.
        layout: of its cache.
        kv: ``content`` or ``split``.
    """

    name: str
    role: str
    layout: str
    kv: str


def engine_environment() -> dict[str, str]:
    """Return an environment for engines that belong together: a cluster secret drawn now, and one core each."""
    return os.environ | {SECRET_VARIABLE: secrets.token_urlsafe(32), "OMP_NUM_THREADS": "1"}


@asynccontextmanager
async def open_process(command: EngineCommand, logs: Path, environment: dict[str, str]) -> AsyncIterator[str]:
    """Start an engine, enter with its address when it serves, and end it on leaving.

    Args:
        command: what to start.
        logs: folder for ``NAME.jsonl``, its log, and ``NAME.stderr``, whatever else it has to say.
        environment: its variables.

    Raises:
        EngineFailed: it ended, or was silent, before it served.
    """
    complaints = logs / f"{command.name}.stderr"
    flags = {"layout": command.layout, "kv": command.kv, "log": str(logs / f"{command.name}.jsonl")}
    arguments = [f"--{flag}={value}" for flag, value in flags.items()]
    with complaints.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvflow.tools.demo", command.role, *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env=environment,
        )
    assert process.stdout is not None
    try:
        yield await _address(process.stdout, command.name, complaints)
    finally:
        await _stop(process)


async def _address(stdout: asyncio.StreamReader, name: str, complaints: Path) -> str:
    with suppress(TimeoutError):
        async with asyncio.timeout(START_S):
            async for line in stdout:
                if line.startswith(LISTENING_AT):
                    return line.removeprefix(LISTENING_AT).decode().strip()
    raise EngineFailed(f"the {name} engine did not start; the end of {complaints}:\n{_tail(complaints)}")


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-8:])


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Ask a process to end, and make it end."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
