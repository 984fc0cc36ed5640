"""Where a worker lives: one process, and one event loop in it."""

import asyncio
import os
from asyncio import _get_running_loop

from kvflow.errors import WrongEventLoop
from kvflow.forks import Origin


class Home:
    """The process and the event loop in which a worker was opened.

    A call from another place would wait for ever, because futures resolve only on their own loop.

    Thread: any.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pid = os.getpid()
        self.origin = Origin("the worker")
        self.require_process = self.origin.require

    def require_loop(self) -> None:
        """Refuse what may be called on the worker's event loop only.

        Raises:
            ForkedProcess: this is a forked child of the worker's process.
            WrongEventLoop: the caller runs on another event loop, or on none.
        """
        here = _get_running_loop()
        if here is self._loop and os.getpid() == self._pid:
            return
        self.require_process()
        if here is None:
            raise WrongEventLoop("the worker was called where no event loop runs")
        raise WrongEventLoop("the worker was called on another event loop than its own")
