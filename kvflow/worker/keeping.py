"""Leases that are renewed before anything is read under them: those of requests that wait for room in our engine."""

import asyncio
from collections.abc import Iterable

from kvflow.cache.tickets import Member
from kvflow.clock import Clock
from kvflow.errors import CapacityExceeded, KvflowError, PeerUnavailable
from kvflow.heaps import Heap
from kvflow.ids import LeaseKey, PeerId
from kvflow.transfer.scheduler import RENEWALS_PER_LEASE
from kvflow.worker.peers import PeerPool

KEPT_MAX = 65536
"""Leases of tickets that are kept at once: as many as a producer's lease table remembers."""

TICK_S = 0.1
"""Leases last for seconds, and a third of one may pass before it is renewed."""

REDIAL_S = 0.5
"""Pause before it is looked again whether a peer is connected that was not."""


_Key = tuple[PeerId, LeaseKey]


class Keeping:
    """Leases of one worker that are kept until their tickets are read or given back.

    A lease that has ended, or whose producer is gone, is not missed here: whoever reads under it is told.

    Thread: the event loop.
    """

    def __init__(self, pool: PeerPool, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock
        self._kept: dict[_Key, Member] = {}
        self._due: Heap[_Key] = Heap()
        self._any = asyncio.Event()

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, members: Iterable[Member]) -> None:
        """Keep the leases of a ticket; does nothing for one that is kept already.

        Raises:
            CapacityExceeded: too many are kept; those of this ticket may be, in part.
        """
        for member in members:
            key = _key(member)
            if key in self._kept:
                continue
            if len(self._kept) >= KEPT_MAX:
                raise CapacityExceeded("leases of tickets that are kept", KEPT_MAX)
            self._kept[key] = member
            self._due.put(key, self._clock())
        self._any.set()

    def end(self, members: Iterable[Member]) -> None:
        """Keep them no more."""
        for member in members:
            self._forget(_key(member))

    async def renew_while_any(self) -> None:
        """Renew what is due, for ever; costs nothing while no ticket is kept."""
        while True:
            await self._any.wait()
            self.renew_due()
            await asyncio.sleep(TICK_S)
            if not self._kept:
                self._any.clear()

    def renew_due(self) -> None:
        """Renew what is due; the renewals of one peer travel together."""
        now = self._clock()
        renewals: dict[PeerId, list[LeaseKey]] = {}
        for key in self._due.take_until(now):
            (peer, lease), member = key, self._kept[key]
            if self._pool.link(peer) is None:
                self._dial(key, member, now)
            else:
                self._due.put(key, now + member.grant.lease_s / RENEWALS_PER_LEASE)
                renewals.setdefault(peer, []).append(lease)
        for peer, leases in renewals.items():
            link = self._pool.link(peer)
            if link is not None:
                link.renew(leases)

    def _dial(self, key: _Key, member: Member, now: float) -> None:
        again_at = now + REDIAL_S
        try:
            self._pool.begin(member)
        except PeerUnavailable as error:
            again_at += error.retry_after_s
        except KvflowError:
            self._forget(key)  # it is gone, and its leases with it
            return
        self._due.put(key, again_at)

    def _forget(self, key: _Key) -> None:
        self._kept.pop(key, None)
        self._due.remove(key)


def _key(member: Member) -> _Key:
    return member.peer, (member.grant.slot, member.grant.epoch_value)
