"""Detect forked children. A child has copies of the parent's workers and mints, but not the threads that serve them."""

import os

from kvflow.errors import ForkedProcess


class Origin:
    """The process in which an object was opened. A child that is forked later is another process.

    Parent and child would sign the same epoch for different blocks, and a reader would mistake one for the other.

    Args:
        what: the object, for the message.

    Thread: any.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is a forked child of the process that opened the object."""
        return os.getpid() != self._pid

    def require(self) -> None:
        """Refuse a call in a process that did not open the object.

        Raises:
            ForkedProcess: this is a forked child.
        """
        if os.getpid() != self._pid:
            raise ForkedProcess(f"{self._what} belongs to process {self._pid}, and {os.getpid()} is its forked child")
