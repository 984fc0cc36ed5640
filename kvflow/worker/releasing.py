"""Releases on their way to producers: after the caller's turn, and many in one message."""

import asyncio
from collections import deque
from collections.abc import Sequence

from kvflow.cache.tickets import Member
from kvflow.ids import LeaseKey, PeerId
from kvflow.worker.peers import PeerPool

RELEASE_PAUSE_S = 0.005
"""A release is a message, encrypted, answered and decrypted: ten times the work of a fence, and it falls into the next
pull. What is read by then is released with it. The producer has its blocks back so much later."""


class Releasing:
    """What one worker has read, and has still to give back.

    Thread: the event loop.
    """

    def __init__(self, pool: PeerPool) -> None:
        self._pool = pool
        self._delivered: deque[Sequence[Member]] = deque()
        self._leases: dict[tuple[PeerId, bool], list[LeaseKey]] = {}

    def after_caller(self, members: Sequence[Member]) -> None:
        """Release what was delivered just now, once whoever awaits it has had a turn of the loop.

        It would overtake the caller if it were added now, and releases were sent in this very turn.
        """
        self._delivered.append(members)
        asyncio.get_running_loop().call_soon(self._take_delivered)

    def add(self, members: Sequence[Member], *, read: bool) -> None:
        """Release every rank that a ticket names, read or not; those of a few milliseconds travel together."""
        if not self._leases:
            asyncio.get_running_loop().call_later(RELEASE_PAUSE_S, self._send)
        for member in members:
            self._leases.setdefault((member.peer, read), []).append((member.grant.slot, member.grant.epoch_value))

    def flush(self) -> None:
        """Send all there is now."""
        self._take_delivered()
        self._send()

    def _take_delivered(self) -> None:
        while self._delivered:
            self.add(self._delivered.popleft(), read=True)

    def _send(self) -> None:
        releases, self._leases = self._leases, {}
        for (peer, read), leases in releases.items():
            link = self._pool.link(peer)
            if link is not None:
                link.release(leases, read=read)
