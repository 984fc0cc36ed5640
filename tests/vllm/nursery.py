"""Import vLLM once, and fork an engine for everyone who connects: ``python -m tests.vllm.nursery SOCKET``.

The import takes longer than the start of an engine, and is over before any thread is started. Nothing of kvflow or of
these tests is imported before the fork. Whoever connects to ``SOCKET``, of the file system, sends one line: a JSON
object with ``root``, ``log``, ``environment`` and ``settings``. From then on the connection is the engine's: see
``engine_process``. Ends with its standard input.

It can run for as long as one works on a connector: ``KVFLOW_TEST_VLLM_NURSERY`` names its socket to tests, which start
their own otherwise::

    sleep infinity | OMP_NUM_THREADS=1 python -m tests.vllm.nursery /tmp/nursery
"""

import importlib
import json
import os
import random
import selectors
import signal
import socket
import sys
from pathlib import Path

MODULES = (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
)
"""What an engine imports in any case, and ``import vllm`` does not."""


def become_engine(connection: socket.socket) -> None:
    """Be the engine that the other end of the connection asks for."""
    commands = connection.makefile("r")
    wanted = json.loads(commands.readline())
    with Path(wanted["log"]).open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(wanted["environment"])
    sys.path.insert(0, wanted["root"])
    os.chdir(wanted["root"])
    random.seed()
    from tests.vllm.engine_process import run

    run(wanted["settings"], commands, connection.makefile("w"))


def await_connection(path: str) -> socket.socket | None:
    """Fork for each connection; return it in the child, and None in the parent when standard input has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for an engine
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(path)
        listener.listen()
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin.buffer, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if listener in ready:
                connection, _ = listener.accept()
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    return connection
                connection.close()
            elif not sys.stdin.buffer.read1():
                return None


def main() -> None:
    import vllm

    _ = vllm.LLM, vllm.SamplingParams  # imported on first use
    for name in MODULES:
        importlib.import_module(name)
    connection = await_connection(sys.argv[1])
    if connection is not None:
        become_engine(connection)


if __name__ == "__main__":
    main()
