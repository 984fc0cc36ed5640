"""Detect forked children. A child has copies of the parent's workers and mints, but not the threads that serve them."""

import os

from kvflow.errors import ForkedProcess


class Origin:
    """The process in which something was opened. A child that is forked off it later is another one.

    Parent and child would sign the same epoch for different blocks, and a reader would take one for the other.

    Args:
        what: was opened, for the message.

    Thread: any.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is a forked child of the one where it was opened."""
        return os.getpid() != self._pid

    def require(self) -> None:
        """Refuse what only the process that has opened it may do.

        Raises:
            ForkedProcess: this is a forked child.
        """
        if os.getpid() != self._pid:
            raise ForkedProcess(f"{self._what} belongs to process {self._pid}, and {os.getpid()} is its forked child")
