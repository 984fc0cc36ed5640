"""Children that are forked off a process which has imported everything: a restart that takes no seconds of imports."""

import ctypes
import importlib
import inspect
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

TESTS = Path(__file__).parents[1]
MODULES = ["producer_process", "consumer_process", "tests.contract.exporter_process", "tests.gpu.source_process"]
PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""


def whole_name(module):
    """Return the name under which a child finds a module: of the integration tests, if it names no other."""
    return module if "." in module else f"integration.{module}"


def run(module, arguments, environment, stdin, stdout):
    """Be a child, in a process that was forked just now."""
    end_with_parent()
    for number, connection in ((0, stdin), (1, stdout)):
        os.dup2(connection.fileno(), number)
        connection.close()
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    os.environ.update(environment)
    sys.argv[1:] = arguments
    outcome = importlib.import_module(module).main()
    if inspect.iscoroutine(outcome):
        uvloop.run(outcome)


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
    """As much of ``subprocess.Popen`` as a child needs.

    Args:
        module: whose ``main`` it runs: of the integration tests, or the one that its whole name says.
        environment: more variables. Those that count while Python starts come too late.
        arguments: of its command line.
    """

    def __init__(self, module, environment, arguments=()):
        context = multiprocessing.get_context("forkserver")
        sys.path.insert(0, str(TESTS))
        # For the server that is forked off: Python 3.11 tells it our path too late, and what it then cannot import
        # beforehand it leaves to each child, without a word.
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        try:
            context.set_forkserver_preload([whole_name(name) for name in [*MODULES, module]])
            target = importlib.import_module("tests.world.forked").run
            (their_stdin, self.stdin), (self.stdout, their_stdout) = self._pipe("w"), self._pipe("r")
            told = (whole_name(module), list(arguments), environment, their_stdin, their_stdout)
            self._process = context.Process(target=target, args=told, daemon=True)
            self._process.start()
        finally:
            sys.path.remove(str(TESTS))
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before
        their_stdin.close()
        their_stdout.close()

    def _pipe(self, mode):
        reading, writing = os.pipe()
        if mode == "w":
            return Connection(reading, writable=False), os.fdopen(writing, "w")
        return os.fdopen(reading), Connection(writing, readable=False)

    @property
    def pid(self):
        return self._process.pid

    def poll(self):
        return self._process.exitcode

    def send_signal(self, number):
        os.kill(self._process.pid, number)

    def kill(self):
        self._process.kill()

    def join(self, timeout_s):
        """Wait for its end for so long."""
        self._process.join(timeout_s)

    def wait(self, timeout_s):
        self._process.join(timeout_s)
        assert self._process.exitcode is not None

    def close(self):
        """Forget a process that has ended, with its descriptors here."""
        self._process.close()
