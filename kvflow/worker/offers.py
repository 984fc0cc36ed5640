"""Offers of an engine of one process: mint and admit in one, and a line for those that find every slot taken."""

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvflow.cache.mint import Mint
from kvflow.cache.tickets import Ticket
from kvflow.errors import CapacityExceeded, KvflowError
from kvflow.worker.producer import LeaseKeeper

WAITING_MAX = 4096
"""Offers that may wait for a slot: as many again as there are slots. An engine with more to offer prefills too much."""

Digests = Sequence[Sequence[bytes]] | None
"""The content of each block of an offer, group by group; None if the engine does not say."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """One offer that waits for a slot."""

    request_id: str
    block_ids: Sequence[Sequence[int]]
    num_tokens: int | Sequence[int]
    digests: Digests
    ticket: asyncio.Future[Ticket]


class Offers:
    """Offers of one worker.

    Thread: ``offer`` from any thread; everything else on the event loop.
    """

    def __init__(self, mint: Mint, keeper: LeaseKeeper, loop: asyncio.AbstractEventLoop) -> None:
        self._mint = mint
        self._keeper = keeper
        self._loop = loop
        self._lock = threading.Lock()
        self._line: deque[_Waiting] = deque()
        keeper.call_around_ends(self._vacate, self._retire)

    def offer(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int | Sequence[int],
        digests: Digests = None,
    ) -> Ticket:
        """Sign a ticket and hold its lease. See ``Worker.offer``."""
        try:
            if self._line:
                self._keeper.require_open()
                raise CapacityExceeded(
                    "leases", self._mint.slots, remedy="Others wait for the next slot: use offer_when_possible."
                )
            return self._offer(request_id, block_ids, num_tokens, digests)
        except KvflowError as error:
            self._keeper.report_refusal(request_id, error)
            raise

    async def offer_when_possible(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int | Sequence[int],
        *,
        digests: Digests = None,
        timeout_s: float | None,
    ) -> Ticket:
        """Wait for a slot, then offer. See ``Worker.offer_when_possible``."""
        try:
            if len(self._line) >= WAITING_MAX:
                raise CapacityExceeded("offers that wait for a slot", WAITING_MAX)
            waiting = _Waiting(request_id, block_ids, num_tokens, digests, self._loop.create_future())
            self._line.append(waiting)
            # Also where others wait: a slot that came free before we stood in line is announced to nobody.
            self.serve()
            return await self._wait(waiting, timeout_s)
        except KvflowError as error:
            self._keeper.report_refusal(request_id, error)
            raise

    async def _wait(self, waiting: _Waiting, timeout_s: float | None) -> Ticket:
        try:
            async with asyncio.timeout(timeout_s):
                return await waiting.ticket
        except TimeoutError:
            if waiting.ticket.done() and not waiting.ticket.cancelled():
                return waiting.ticket.result()  # it came in the very moment
            self._leave(waiting)
            raise CapacityExceeded("leases", self._mint.slots, remedy=f"No slot came free in {timeout_s} s.") from None
        except asyncio.CancelledError:
            if _has_ticket(waiting):
                self._keeper.revoke(waiting.request_id)  # nobody will hear of this ticket
            self._leave(waiting)
            raise

    def serve(self) -> None:
        """Offer for those in line, first come, first served, until every slot is taken or the line is at its end."""
        while self._line:
            waiting = self._line[0]
            if not waiting.ticket.cancelled():  # if it is, its caller has not had its turn of the loop yet
                try:
                    ticket = self._offer(waiting.request_id, waiting.block_ids, waiting.num_tokens, waiting.digests)
                except CapacityExceeded:
                    return  # the end of the next lease comes here again
                except Exception as error:  # noqa: BLE001 - its caller gets it; those behind it must not wait for ever
                    waiting.ticket.set_exception(error)
                else:
                    waiting.ticket.set_result(ticket)
            # Only now, so that no other thread's offer slips in before the one whose turn it is.
            self._line.popleft()

    def _offer(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int | Sequence[int],
        digests: Digests,
    ) -> Ticket:
        self._keeper.require_open()
        with self._lock:
            ticket, grant = self._mint.offer(request_id, block_ids=block_ids, num_tokens=num_tokens, digests=digests)
        try:
            self._keeper.hold(grant)
        except BaseException:
            self._retire([request_id])
            raise
        return ticket

    def _leave(self, waiting: _Waiting) -> None:
        waiting.ticket.cancel()
        if waiting in self._line:
            self._line.remove(waiting)

    def _vacate(self, request_ids: Sequence[str]) -> None:
        with self._lock:
            self._mint.vacate(request_ids)
        if self._line and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.serve)

    def _retire(self, request_ids: Sequence[str]) -> None:
        with self._lock:
            for request_id in request_ids:
                self._mint.retire(request_id)


def _has_ticket(waiting: _Waiting) -> bool:
    future = waiting.ticket
    return future.done() and not future.cancelled() and future.exception() is None
