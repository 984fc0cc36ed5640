"""``python -m kvflow.tools.doctor.child``: do one task, and answer in one line of JSON. ``children`` starts it."""

import asyncio
import ctypes
import os
import secrets
import signal
import sys
from collections.abc import Callable

import msgspec

from kvflow.config import KEY_VARIABLE, Tuning, WorkerConfig
from kvflow.errors import KvflowError, TransportUnavailable
from kvflow.tools.doctor.children import (
    AgentFigures,
    Answer,
    Listen,
    ListenerReady,
    ListGpus,
    Read,
    ReadResult,
    Refused,
    StartAgent,
    Task,
    VisibleGpus,
)

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Do the task that the first line of standard input names."""
    # The doctor may be killed; nobody would then end us.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Libraries may print. The answer has standard output alone.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    task: Task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)

    def answer(value: Answer) -> None:
        answers.write(msgspec.json.encode(value) + b"\n")
        answers.flush()

    try:
        match task:
            case StartAgent(device=device):
                answer(_start_agent(device))
            case ListGpus():
                answer(_list_gpus())
            case Listen():
                asyncio.run(_listen(task, answer))
            case Read():
                answer(asyncio.run(_read(task)))
    except KvflowError as error:
        answer(Refused(str(error.code), error.message, error.remedy))


def _start_agent(device: str) -> AgentFigures:
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
        transports = {each.transport or "unknown" for each in inspect(blob, name).interfaces}
    except ValueError:
        transports = set()
    agent.destroy()
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return AgentFigures(variant, cuda or "", tuple(sorted(transports)))


def _list_gpus() -> VisibleGpus:
    from kvflow.memory.device import visible_devices  # noqa: PLC0415 - loads torch

    return VisibleGpus(*visible_devices())


async def _listen(task: Listen, answer: Callable[[Answer], None]) -> None:
    from kvflow.tools.doctor.blocks import listening  # noqa: PLC0415 - loads torch

    config = WorkerConfig(engine_id="doctor", bind="tcp://127.0.0.1:0", transport=task.transport)
    async with listening(config, device=task.device) as worker:
        answer(ListenerReady(worker.endpoint))
        await asyncio.to_thread(sys.stdin.buffer.read)


async def _read(task: Read) -> ReadResult:
    from kvflow.tools.doctor.blocks import read_probe  # noqa: PLC0415 - loads torch

    keys = (task.key,) if task.key else () if os.environ.get(KEY_VARIABLE) else None
    config = WorkerConfig(
        engine_id="doctor",
        allowed_keys=keys,
        transport=task.transport,
        tuning=Tuning(tcp_encryption=task.tcp_encryption, wire_s=15.0),
    )
    return ReadResult(await read_probe(task.endpoint, config, device=task.device, key=task.key))


if __name__ == "__main__":
    main()
