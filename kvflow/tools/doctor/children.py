"""Run what may crash, hang or load heavy libraries in child processes: ``python -m kvflow.tools.doctor.child``."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

import msgspec
from msgspec import Struct

from kvflow.config import Encryption, TransportName
from kvflow.tools.doctor.probe import ProbeFigures

CHILD_S = 90.0
"""Loading torch and NIXL takes seconds, on a busy machine many; a read has its own deadlines. After this, it hangs."""

READ_S = 240.0
"""The same for a process that reads: over a slow network, one large read may take a minute."""

ERRORS_MAX = 2000
"""Characters that are kept of what a child writes to standard error: the last ones tell why it ended."""

LINE_BYTES_MAX = 1 << 20


class StartAgent(Struct, frozen=True, tag="agent"):
    """Load NIXL as a worker does, start an agent with its UCX plugin, and say which transports UCX offers.

    Attributes:
        device: on which the worker's cache would lie; torch is loaded if it is not ``cpu``.
    """

    device: str = "cpu"


class Listen(Struct, frozen=True, tag="listen"):
    """Offer probe blocks on loopback until standard input ends. The secret is in the environment."""

    transport: TransportName
    device: str = "cpu"


class Read(Struct, frozen=True, tag="read"):
    """Read the probe blocks of a worker. The secret and the private key are in the environment."""

    endpoint: str
    transport: TransportName
    device: str = "cpu"
    key: str = ""
    tcp_encryption: Encryption = "off"


class ListGpus(Struct, frozen=True, tag="devices"):
    """Ask torch which GPUs it can use."""


Task = StartAgent | Listen | Read | ListGpus


class AgentFigures(Struct, frozen=True, tag="agent"):
    """What a NIXL agent shows.

    Attributes:
        variant: module of NIXL that was loaded.
        cuda: version of CUDA that torch was built for; empty if torch was not loaded, or has none.
        transports: of UCX; empty if this release of NIXL writes metadata that kvflow cannot read.
    """

    variant: str
    cuda: str
    transports: tuple[str, ...]


class ListenerReady(Struct, frozen=True, tag="listening"):
    """The endpoint of a worker that offers probe blocks."""

    endpoint: str


class VisibleGpus(Struct, frozen=True, tag="devices"):
    """GPUs that torch can use.

    Attributes:
        names: of the GPUs, in torch's order.
        built_for: CUDA or ROCm, with its version; empty for a build for processors alone.
        refusal: why torch can use none; empty if it says nothing.
    """

    names: tuple[str, ...]
    built_for: str
    refusal: str


class ReadResult(Struct, frozen=True, tag="read"):
    """What a reader found; no figures if the worker offers no probe."""

    figures: ProbeFigures | None


class Refused(Struct, frozen=True, tag="refused"):
    """An error of kvflow that ended the task."""

    code: str
    message: str
    remedy: str


class ChildEnded(Struct, frozen=True):
    """A child that ended, or was ended, without an answer.

    Attributes:
        how: says how it ended.
        errors: the end of what it wrote to standard error.
    """

    how: str
    errors: str


Answer = AgentFigures | ListenerReady | VisibleGpus | ReadResult | Refused

_tasks, _answers = msgspec.json.Encoder(), msgspec.json.Decoder(Answer)


async def run(
    task: Task, environment: Mapping[str, str] | None = None, *, limit_s: float = CHILD_S
) -> Answer | ChildEnded:
    """Run a task in a child process, and return its answer.

    Args:
        task: the task.
        environment: of the child; None: ours.
        limit_s: after which the child is killed.
    """
    async with running(task, environment, limit_s=limit_s) as answer:
        return answer


@asynccontextmanager
async def running(
    task: Task, environment: Mapping[str, str] | None = None, *, limit_s: float = CHILD_S
) -> AsyncIterator[Answer | ChildEnded]:
    """Run a task in a child process that goes on until the block is left. See ``run``."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvflow.tools.doctor.child",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=LINE_BYTES_MAX,
        env=None if environment is None else dict(environment),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    errors, late = bytearray(), False
    collecting = asyncio.create_task(_collect(process.stderr, errors))
    try:
        process.stdin.write(_tasks.encode(task) + b"\n")
        line = b""
        try:
            async with asyncio.timeout(limit_s):
                line = await process.stdout.readline()
                if not line.endswith(b"\n"):
                    await process.wait()
        except TimeoutError:
            late = True
        if line.endswith(b"\n"):
            yield _answers.decode(line)
        else:
            if not late:
                await collecting
            how = f"did not answer within {limit_s:g} s" if late else _ending(process.returncode)
            yield ChildEnded(how, errors.decode(errors="replace").strip())
    finally:
        process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.0 if late else limit_s):
                await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
        collecting.cancel()
        await asyncio.wait([collecting])


async def _collect(stream: asyncio.StreamReader, errors: bytearray) -> None:
    while part := await stream.read(4096):
        errors += part
        del errors[:-ERRORS_MAX]


def _ending(status: int | None) -> str:
    if status is not None and status < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
    return f"ended with the status {status}"


def environment_without(*names: str, **more: str) -> dict[str, str]:
    """Return our environment without some variables, and with others."""
    return {**{name: value for name, value in os.environ.items() if name not in names}, **more}
