"""Detects forked children, which have copies of the parent's workers and mints, but not the threads that serve them."""

import os

from kvflow.errors import ForkedProcess


class Origin:
    """The process in which an object was opened; ``what`` names the object in the message. Thread: any.

    Parent and child would sign the same epoch for different blocks, and a reader would mistake one for the other.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is a forked child of the process that opened the object."""
        return os.getpid() != self._pid

    def require(self) -> None:
        """Raise ``ForkedProcess`` in a forked child."""
        if os.getpid() != self._pid:
            raise ForkedProcess(f"{self._what} belongs to process {self._pid}, and {os.getpid()} is its forked child")
