"""Where a worker lives: one process, and one event loop in it."""

import asyncio

from kvflow.errors import WrongEventLoop
from kvflow.forks import Origin


class Home:
    """The process and the event loop in which a worker was opened.

    A call from another place would wait for ever, because futures resolve only on their own loop.

    Thread: any.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.origin = Origin("the worker")
        self.require_process = self.origin.require

    def require_loop(self) -> None:
        """Refuse what may be called on the worker's event loop only.

        Raises:
            ForkedProcess: this is a forked child of the worker's process.
            WrongEventLoop: the caller runs on another event loop, or on none.
        """
        self.require_process()
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            raise WrongEventLoop("the worker was called where no event loop runs") from None
        if here is not self._loop:
            raise WrongEventLoop("the worker was called on another event loop than its own")
