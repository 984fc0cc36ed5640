"""Run what may crash, hang or load heavy libraries in child processes."""

import asyncio
import ctypes
import multiprocessing
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from msgspec import Struct

from kvflow.config import KEY_VARIABLE, Encryption, TransportName, Tuning, WorkerConfig
from kvflow.errors import KvflowError, TransportUnavailable
from kvflow.tools.doctor.codes import FailureFigures, failure_of
from kvflow.tools.doctor.probe import ProbeFigures, listening, read_probe

T = TypeVar("T")

CHILD_S = 90.0
"""Loading torch and NIXL takes seconds, on a busy machine many; a read has its own deadlines. After this, it hangs."""

READ_S = 240.0
"""The same for a process that reads: over a slow network, one large read may take a minute."""

ERRORS_MAX = 2000
"""Bytes that are kept of what a child prints: the last ones say why it ended."""

_PR_SET_PDEATHSIG = 1

# Unlike an executor of processes, single processes with pipes need no semaphore, so no /dev/shm.
_spawn = multiprocessing.get_context("spawn")


class AgentFigures(Struct, frozen=True):
    """What a NIXL agent shows: its module, torch's version of CUDA, and UCX's transports; empty if not known."""

    variant: str
    cuda: str
    transports: tuple[str, ...]


class VisibleGpus(Struct, frozen=True):
    """GPUs that torch can use, why it uses none, and what it was built for: CUDA, ROCm or processors alone (empty)."""

    names: tuple[str, ...]
    built_for: str
    refusal: str


class ChildEnded(Struct, frozen=True):
    """How a child ended, or was ended, without an answer, and the last of what it printed."""

    how: str
    errors: str


async def run(
    work: Callable[[], T], environment: Mapping[str, str] | None = None, *, limit_s: float = CHILD_S
) -> T | FailureFigures | ChildEnded:
    """Call a function of a module in a child, which is killed after ``limit_s``, and return its result."""
    async with running(partial(_answer, work), environment, limit_s=limit_s) as answer:
        result: T | FailureFigures | ChildEnded = answer
        return result


@asynccontextmanager
async def running(
    work: Callable[[Connection], None], environment: Mapping[str, str] | None = None, *, limit_s: float = CHILD_S
) -> AsyncIterator[Any]:
    """Start ``work`` in a child, and have the first answer that it sends, an error of kvflow, or how the child ended.

    The child sees its pipe end when the block is left, and has ``limit_s`` then, too.
    """
    (ours, theirs), (printed, printing) = _spawn.Pipe(), _spawn.Pipe(duplex=False)
    variables = dict(os.environ if environment is None else environment)
    process = _spawn.Process(target=_work, args=(work, theirs, printing, variables), daemon=True)
    process.start()
    theirs.close()
    printing.close()
    loop, errors = asyncio.get_running_loop(), bytearray()

    def collect() -> None:
        while printed.poll():
            part = os.read(printed.fileno(), 1 << 16)
            if not part:
                loop.remove_reader(printed.fileno())
                return
            errors.extend(part)
            del errors[:-ERRORS_MAX]

    loop.add_reader(printed.fileno(), collect)
    try:
        try:
            answer = await _first(ours, limit_s)
        except (EOFError, OSError) as error:
            if late := isinstance(error, TimeoutError):
                process.kill()
            await asyncio.to_thread(process.join)
            collect()
            how = f"did not answer within {limit_s:g} s" if late else _ending(process.exitcode)
            answer = ChildEnded(how, errors.decode(errors="replace").strip())
        yield answer
        ours.close()
        await asyncio.to_thread(process.join, limit_s)
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
        loop.remove_reader(printed.fileno())
        printed.close()
        ours.close()


async def _first(pipe: Connection, limit_s: float) -> object:
    there = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), there.set)
    try:
        async with asyncio.timeout(limit_s):
            await there.wait()
    finally:
        loop.remove_reader(pipe.fileno())
    return pipe.recv()


def _work(work: Callable[[Connection], None], pipe: Connection, printed: Connection, variables: dict[str, str]) -> None:
    # The doctor may be killed; nothing else would then end us.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.environ.clear()
    os.environ.update(variables)
    for standard in (1, 2):
        os.dup2(printed.fileno(), standard)
    try:
        work(pipe)
    except KvflowError as error:
        pipe.send(failure_of(error))


def _answer(work: Callable[[], object], pipe: Connection) -> None:
    pipe.send(work())


def _ending(status: int | None) -> str:
    if status is not None and status < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
    return f"ended with the status {status}"


def start_agent(device: str = "cpu") -> AgentFigures:
    """Load NIXL as a worker does whose cache lies on a device, start an agent with UCX, and say what UCX offers.

    Raises:
        TransportUnavailable: no agent starts.
    """
    if device != "cpu":
        from kvflow.memory.device import require_device  # noqa: PLC0415 - loads torch, which decides NIXL's variant

        require_device(device)
    from kvflow.layout.component import Region  # noqa: PLC0415 - what a task does not need is not loaded
    from kvflow.memory.mapping import map_bytes  # noqa: PLC0415 - likewise
    from kvflow.reads.nixl.binding import Agent, error_types, load_binding  # noqa: PLC0415 - likewise
    from kvflow.reads.nixl.metadata import inspect  # noqa: PLC0415 - likewise

    binding = load_binding("WARN")
    variant = binding.__name__.partition(".")[0]
    name, memory = f"doctor-{secrets.token_hex(8)}", map_bytes(4096)
    try:
        agent = Agent(binding, name, progress=False)
        agent.register([Region(memory.ctypes.data, memory.nbytes)])
        blob = agent.metadata()
    except error_types(binding) as error:
        raise TransportUnavailable(f"{variant}: {type(error).__name__}: {error}") from error
    try:
        transports = {each.transport for each in inspect(blob, name).interfaces}
    except ValueError:
        transports = set()
    agent.destroy()
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return AgentFigures(variant, cuda or "", tuple(sorted(transports)))


def list_gpus() -> VisibleGpus:
    """Ask torch which GPUs it can use."""
    from kvflow.memory.device import visible_devices  # noqa: PLC0415 - loads torch

    return VisibleGpus(*visible_devices())


def listen(transport: TransportName, device: str, pipe: Connection) -> None:
    """Offer probe blocks on loopback until a pipe ends; send the endpoint. The secret is in the environment."""

    async def offer() -> None:
        config = WorkerConfig(engine_id="doctor", bind="tcp://127.0.0.1:0", transport=transport)
        async with listening(config, device=device) as worker:
            pipe.send(worker.endpoint)
            with suppress(EOFError, ConnectionError):
                await asyncio.to_thread(pipe.recv)

    asyncio.run(offer())


def read(
    endpoint: str, transport: TransportName, device: str = "cpu", key: str = "", tcp_encryption: Encryption = "off"
) -> ProbeFigures | None:
    """Read the probe blocks of a worker; None if it offers none. Secret and private key are in the environment."""
    config = WorkerConfig(
        engine_id="doctor",
        allowed_keys=(key,) if key else () if os.environ.get(KEY_VARIABLE) else None,
        transport=transport,
        tuning=Tuning(tcp_encryption=tcp_encryption, wire_s=15.0),
    )
    return asyncio.run(read_probe(endpoint, config, device=device, key=key))
