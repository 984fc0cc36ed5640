"""Connections to the workers that this process asks what they hold: dialed when they are needed, and kept."""

import asyncio
import logging
from collections import OrderedDict
from functools import partial
from typing import Any

from kvflow.errors import KvflowError, PeerLost, WorkerClosed, quoted
from kvflow.rendezvous.dialer import Asker, open_asker

ASKERS_MAX = 64  # connections that are kept open. Beyond it, that which was used longest ago ends.

logger = logging.getLogger("kvflow")


class Askers:
    """One connection for each endpoint that is asked, opened with ``how`` of ``open_asker``. Thread: the event loop."""

    def __init__(self, tasks: asyncio.TaskGroup, limit: int = ASKERS_MAX, **how: Any) -> None:
        self._how = how
        self._tasks = tasks
        self._limit = limit
        self._dialed: OrderedDict[str, tuple[asyncio.Task[None], asyncio.Future[Asker]]] = OrderedDict()

    async def connect(self, endpoint: str) -> Asker:
        """Return the connection to a worker; dial it if it is not connected, once for all callers.

        Args:
            endpoint: ``tcp://HOST:PORT``, or ``tcp://HOST:PORT#KEY`` of a worker that has a key of its own.

        Raises:
            KvflowError: of ``open_asker``. ``WorkerClosed`` if the connection was closed here meanwhile.

        Cancellation: safe; dialing goes on for other callers.
        """
        if endpoint not in self._dialed:
            opened: asyncio.Future[Asker] = asyncio.get_running_loop().create_future()
            task = self._tasks.create_task(self._serve(endpoint, opened), name=f"asking {endpoint}")
            task.add_done_callback(partial(self._forget, endpoint, opened))
            self._dialed[endpoint] = task, opened
            if len(self._dialed) > self._limit:
                self._dialed.popitem(last=False)[1][0].cancel()
        self._dialed.move_to_end(endpoint)
        return await asyncio.shield(self._dialed[endpoint][1])

    def close(self) -> None:
        """End every connection; the next call of ``connect`` dials again."""
        while self._dialed:
            self._dialed.popitem()[1][0].cancel()

    async def _serve(self, endpoint: str, opened: "asyncio.Future[Asker]") -> None:
        """Open a connection, and leave it when it has ended."""
        address, _, key = endpoint.partition("#")
        try:
            async with open_asker(address, server_key=key, **self._how) as asker:
                opened.set_result(asker)
                await asker.wait_ended()
        except Exception as error:
            if not isinstance(error, KvflowError):  # a defect in kvflow ends this connection only
                logger.exception("asking %s failed", quoted(endpoint))
                error = PeerLost(f"asking {endpoint} failed: {error!r}", peer=endpoint)
            if not opened.done():
                opened.set_exception(error)
                opened.exception()  # if its caller has gone, nobody takes it

    def _forget(self, endpoint: str, opened: "asyncio.Future[Asker]", task: "asyncio.Task[None]") -> None:
        if not opened.done():
            opened.set_exception(WorkerClosed("the worker is closing"))
            opened.exception()
        if self._dialed.get(endpoint) == (task, opened):
            del self._dialed[endpoint]
