"""Children that are forked off a process which has imported everything: a restart that takes no seconds of imports."""

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

ROOT = Path(__file__).parents[2]
PRELOADED = [
    "tests.world.process",
    "tests.integration.consuming",
    "tests.contract.exporting",
    "tests.gpu.source",
]
PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""


def run(environment, stdin, stdout):
    """Be a child, in a process that was forked just now."""
    end_with_parent()
    for number, connection in ((0, stdin), (1, stdout)):
        os.dup2(connection.fileno(), number)
        connection.close()
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    os.environ.update(environment)
    uvloop.run(importlib.import_module("tests.world.process").main())


def end_with_parent():
    """Have this process killed with the server that it was forked off, which ends with whoever has started that.

    A process that is stopped does not notice that its input has ended. If its starter is killed meanwhile it would stay
    for ever.
    """
    # Every child inherits what tells the server that it is still wanted: a stopped one would keep it alive.
    os.close(forkserver._forkserver._forkserver_alive_fd)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class ForkedProcess:
    """As much of ``subprocess.Popen`` as a child needs, which runs ``process``.

    Args:
        environment: more variables. Those that count while Python starts come too late.
    """

    def __init__(self, environment):
        context = multiprocessing.get_context("forkserver")
        # For the server that is forked off: Python 3.11 tells it our path too late, and what it then cannot import
        # beforehand it leaves to each child, without a word.
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
        try:
            context.set_forkserver_preload(PRELOADED)
            (their_stdin, self.stdin), (self.stdout, their_stdout) = self._pipe("w"), self._pipe("r")
            # By its whole name: a test that was imported by its path has another module of that name.
            target = importlib.import_module("tests.world.forked").run
            self._process = context.Process(target=target, args=(environment, their_stdin, their_stdout), daemon=True)
            self._process.start()
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before
        self.pid = self._process.pid
        self._status = None
        their_stdin.close()
        their_stdout.close()

    def _pipe(self, mode):
        reading, writing = os.pipe()
        if mode == "w":
            return Connection(reading, writable=False), os.fdopen(writing, "w")
        return os.fdopen(reading), Connection(writing, readable=False)

    def poll(self):
        if self._status is None:
            self._status = self._process.exitcode
        return self._status

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def join(self, timeout_s):
        """Wait for its end for so long; tell whether it has ended."""
        if self._status is None:
            self._process.join(timeout_s)
        return self.poll() is not None

    def wait(self, timeout_s):
        assert self.join(timeout_s)

    def close(self):
        """Forget a process that has ended, with its descriptors here."""
        self.wait(0)
        self._process.close()
