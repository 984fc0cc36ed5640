"""Connections to the workers that this one asks what they keep."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from kvflow.errors import KvflowError, PeerLost, WorkerClosed
from kvflow.leases.tickets import Ticket
from kvflow.rendezvous.dialer import Asker, open_asker
from kvflow.worker.environment import Shared

DIGEST_EXTRA_BYTES = 2  # of each, in msgpack
QUESTION_DIGESTS_BYTES = 47 << 10  # a question has at most 48 KiB

ASKERS_MAX = 64  # connections that are kept open. Beyond it, that which was used longest ago ends.

logger = logging.getLogger("kvflow")


class Askers:
    """The connections of one worker, one for each endpoint that was asked. Thread: the event loop."""

    def __init__(self, shared: Shared, tasks: asyncio.TaskGroup) -> None:
        self._config, self._network = shared.config, shared.environment.network
        self._tasks = tasks
        self._lifecycle = shared.lifecycle
        self._dialed: OrderedDict[str, tuple[asyncio.Task[None], asyncio.Future[Asker]]] = OrderedDict()

    async def find(self, endpoint: str, digests: Sequence[bytes], wait_s: float) -> tuple[Ticket | None, int]:
        """Ask a worker what it keeps; dial it if it is not connected, once for all callers.

        Of more digests than a question can have, every second is asked for, or every third, and so on.
        """
        self._lifecycle.require_open("finds nothing")
        if endpoint not in self._dialed:
            opened: asyncio.Future[Asker] = asyncio.get_running_loop().create_future()
            task = self._tasks.create_task(self._serve(endpoint, opened), name=f"asking {endpoint}")
            task.add_done_callback(partial(self._forget, endpoint, opened))
            self._dialed[endpoint] = task, opened
            if len(self._dialed) > ASKERS_MAX:
                next(iter(self._dialed.values()))[0].cancel()
        self._dialed.move_to_end(endpoint)
        asker = await asyncio.shield(self._dialed[endpoint][1])
        step = sum(map(len, digests), DIGEST_EXTRA_BYTES * len(digests)) // QUESTION_DIGESTS_BYTES + 1
        ticket, count = await asker.held([digests[step - 1 :: step]], wait_s + self._config.tuning.handshake_s)
        return ticket, count * step

    def close(self) -> None:
        """End every connection."""
        for task, _ in self._dialed.values():
            task.cancel()

    async def _serve(self, endpoint: str, opened: "asyncio.Future[Asker]") -> None:
        """Open a connection, and leave it when it has ended."""
        try:
            async with open_asker(endpoint, self._config, network=self._network) as asker:
                opened.set_result(asker)
                await asker.wait_ended()
        except Exception as error:
            if not isinstance(error, KvflowError):  # a defect in kvflow ends this connection only
                logger.exception("asking %s failed", endpoint)
                error = PeerLost(f"asking {endpoint} failed: {error!r}", peer=endpoint)
            if not opened.done():
                opened.set_exception(error)
                opened.exception()  # if its caller has gone, nobody takes it

    def _forget(self, endpoint: str, opened: "asyncio.Future[Asker]", _task: "asyncio.Task[None]") -> None:
        if not opened.done():
            opened.set_exception(WorkerClosed("the worker is closing"))
            opened.exception()
        del self._dialed[endpoint]
