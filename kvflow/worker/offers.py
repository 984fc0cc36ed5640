"""Offers of an engine of one process."""

import threading
from collections.abc import Sequence

from kvflow.cache.mint import Mint
from kvflow.cache.tickets import Ticket
from kvflow.worker.producer import LeaseKeeper


class Offers:
    """Offers of an engine of one process: mint and admit in one.

    Thread: any.
    """

    def __init__(self, mint: Mint, keeper: LeaseKeeper) -> None:
        self._mint = mint
        self._keeper = keeper
        self._lock = threading.Lock()
        keeper.call_when_ended(self._retire)

    def offer(self, request_id: str, block_ids: Sequence[Sequence[int]], num_tokens: int | Sequence[int]) -> Ticket:
        """Sign a ticket and hold its lease. See ``Worker.offer``."""
        with self._lock:
            ticket, grant = self._mint.offer(request_id, block_ids=block_ids, num_tokens=num_tokens)
        try:
            self._keeper.admit(grant)
        except BaseException:
            self._retire(request_id)
            raise
        return ticket

    def _retire(self, request_id: str) -> None:
        with self._lock:
            self._mint.retire(request_id)
