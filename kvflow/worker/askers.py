"""Asks other workers what they hold, over connections that are dialed when they are needed, and kept."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from kvflow.config import WorkerConfig
from kvflow.errors import ArgumentInvalid, KvflowError, PeerLost, StaleLease, WorkerClosed, quoted
from kvflow.layout.manifest import Manifest
from kvflow.leases.tickets import Ticket, lease_name
from kvflow.rendezvous.dialer import DIGESTS_REMEDY, Asker, Claim, ContentQuestion, Told, open_asker
from kvflow.rendezvous.endpoint import security_of
from kvflow.validation import require_count, require_seconds

ASKERS_MAX = 64  # connections that are kept open. Beyond it, that which was used longest ago ends.
SETTLED_S = 30.0  # longest time that one question waits for the first blocks of an open offer

logger = logging.getLogger("kvflow")


class PrefixReader:
    """What ``open_reader`` yields: asks workers for the beginnings of prompts. It has one connection to each endpoint.

    An endpoint is ``tcp://HOST:PORT``, or ``tcp://HOST:PORT#KEY`` with the public key of a worker that has its own.
    The key must be among our allowed keys. A connection stays open for later calls, and is dialed again if it was lost.

    Thread: the event loop on which it was opened.
    """

    def __init__(self, tasks: asyncio.TaskGroup, config: WorkerConfig, limit: int = ASKERS_MAX, **how: Any) -> None:
        self._config = config
        self._how = how  # further arguments of ``open_asker``
        self._tasks = tasks
        self._limit = limit
        self._dialed: OrderedDict[str, tuple[asyncio.Task[None], asyncio.Future[Asker]]] = OrderedDict()

    async def find(
        self,
        endpoint: str,
        digests: Sequence[bytes] | Sequence[Sequence[bytes]],
        wait_s: float = 0.0,
        *,
        at_least: int = 1,
    ) -> tuple[Ticket | None, int]:
        """Ask a worker for the longest prefix of some content that its engine holds: see ``Worker.find``.

        Raises:
            KvflowError: of ``Worker.find``. ``WorkerClosed`` if the connection was closed here meanwhile.

        Cancellation: safe; dialing goes on for other callers.
        """
        require_seconds("wait_s", wait_s)
        require_count("at_least", at_least)
        asked = _first_digests(digests)
        asker = await self._connect(endpoint)
        return await asker.held(asked, self._config.tuning.handshake_s, wait_s=wait_s, at_least=at_least)

    def asks_for(self, digests: Sequence[bytes]) -> Callable[[str], Coroutine[Any, Any, Claim]]:
        """Return a function that asks the worker at an endpoint which of its leases holds the most of some content.

        Its question has at most 128 of the digests, and is encoded once for all workers. So a ``Claim`` may leave out
        some digests behind those that it counts. The function raises as ``find``. Cancellation: safe.

        Args:
            digests: chained, one for each block from the first one on, of 1 to 64 bytes each.

        Raises:
            ArgumentInvalid: ``digests`` has something else than digests.
        """
        return partial(self._claim, ContentQuestion(digests))

    async def _claim(self, question: ContentQuestion, endpoint: str) -> Claim:
        asker = await self._connect(endpoint)
        return await asker.claim(question, self._config.tuning.handshake_s)

    async def follow_kept(self, endpoint: str) -> AsyncIterator[Told]:
        """Yield the ends of the leases that a worker keeps: all of them in pieces, and then each change.

        The worker is asked when the caller wants the next, and may be silent until something changes. It ends at once
        if the worker tells nothing, as an old one does. The list helps to choose which worker to ask, and nothing else.

        Raises:
            KvflowError: of ``Worker.find``. Then start again: other changes may have been missed.

        Cancellation: safe; the worker forgets the question.
        """
        asker = await self._connect(endpoint)
        async for told in asker.follow_kept(self._config.tuning.handshake_s):
            yield told

    async def read_manifest(self, endpoint: str) -> Manifest:
        """Return what a worker says of its cache: the same object as long as the connection lives.

        Raises:
            KvflowError: of ``Worker.find``. ``ReleaseMismatch`` if another release has written it.

        Cancellation: safe.
        """
        asker = await self._connect(endpoint)
        return (await asker.read_manifest()).manifest

    async def wait_settled(self, endpoint: str, ticket: Ticket) -> None:
        """Wait until the first blocks of an open offer have settled; return at once if the offer is of another kind.

        Raises:
            StaleLease: the offer has ended.
            KvflowError: of ``Worker.find``.

        Cancellation: safe; the worker forgets the question.
        """
        grant = ticket.grants[0]
        lease, known = lease_name(ticket, 0), [0] * len(grant.num_tokens)
        within_s = self._config.tuning.handshake_s
        has_begun = not grant.is_open
        while not has_begun:
            asker = await self._connect(endpoint)
            (told,) = await asker.settled([lease], known=known, above=1, wait_s=SETTLED_S, within_s=within_s)
            if told.ended:
                raise StaleLease("the producer has ended its offer", ended_by=told.ended, peer=endpoint)
            has_begun = told.sealed or told.num_tokens > 0

    async def _connect(self, endpoint: str) -> Asker:
        """Return the connection to a worker; dial it if it is not connected, once for all callers."""
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
            async with open_asker(address, self._config, server_key=key, **self._how) as asker:
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


@asynccontextmanager
async def open_reader(config: WorkerConfig, *, connections_max: int = ASKERS_MAX) -> AsyncIterator[PrefixReader]:
    """Open what finds prefixes without a cache, as an engine's scheduler does; its ranks then ``pull`` the tickets.

    Args:
        config: the settings of the engine's workers. Neither NIXL nor a port is opened.
        connections_max: how many connections are kept. Beyond it, that which was used longest ago ends.

    Raises:
        ConfigInvalid: there is no usable secret.
    """
    require_count("connections_max", connections_max)
    security = security_of(config)
    failure: BaseException | None = None
    async with asyncio.TaskGroup() as tasks:
        reader = PrefixReader(tasks, config, connections_max, security=security)
        try:
            yield reader
        except BaseException as error:  # noqa: BLE001 - raised below: the task group would wrap it
            failure = error
        reader.close()
    if failure is not None:
        raise failure


def _first_digests(digests: Any) -> Sequence[bytes]:
    """Return the first group's list of a caller's question, which is one flat list, or one list per group."""
    first = digests[0] if isinstance(digests, list | tuple) and digests else digests
    found = first if isinstance(first, list | tuple) else digests
    if not isinstance(found, list | tuple):
        raise ArgumentInvalid("digests", "lists of bytes", digests, remedy=DIGESTS_REMEDY)
    return found
