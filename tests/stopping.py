"""SIGSTOP, for tests that need a process to do nothing more from now on, and the other ends of processes."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.helpers.waiting import PATIENCE_S, wait_until


class Mortal:
    """Who has a ``process`` that a test stops, resumes and kills."""

    def stop(self):
        """Let it hang: its kernel answers, it does not."""
        stop_process(self.process.pid)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        """End it without a word."""
        self.process.kill()
        self.process.wait(PATIENCE_S)


def stop_process(pid: int) -> None:
    """Stop a process, and return when none of its threads runs any more.

    The signal alone is a request: it stops the process when one thread has taken it, and until that thread is given a
    core the others go on, a data plane's among them.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(state_of(task) in "TtZX" for task in Path(f"/proc/{pid}/task").iterdir()))


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process meanwhile; it may be killed before the end."""
    stop_process(pid)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def state_of(task: Path) -> str:
    """Return the letter of a thread's or process's state, that of a dead one if it has ended. Source: proc(5)."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
