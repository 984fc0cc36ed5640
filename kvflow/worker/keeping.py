"""Leases that are renewed before anything is read under them: those of requests that wait for room in our engine."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from kvflow.cache.tickets import Member
from kvflow.clock import Clock
from kvflow.errors import CapacityExceeded, KvflowError, PeerUnavailable
from kvflow.ids import LeaseKey, PeerId
from kvflow.transfer.scheduler import RENEWALS_PER_LEASE
from kvflow.worker.peers import PeerPool

KEPT_MAX = 65536
"""Leases of tickets that are kept at once: as many as a producer's lease table remembers."""

TICK_S = 0.1
"""Leases last for seconds, and a third of one may pass before it is renewed."""

REDIAL_S = 0.5
"""Pause before it is looked again whether a peer is connected that was not."""


@dataclass(slots=True)
class _Kept:
    """One lease that is kept.

    Attributes:
        member: who has given it.
        renew_at: when it is due.
    """

    member: Member
    renew_at: float

    @property
    def lease(self) -> LeaseKey:
        return self.member.grant.slot, self.member.grant.epoch_value


class Keeping:
    """Leases of one worker that are kept until their tickets are read or given back.

    A lease that has ended, or whose producer is gone, is not missed here: whoever reads under it is told.

    Thread: the event loop.
    """

    def __init__(self, pool: PeerPool, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock
        self._kept: dict[tuple[PeerId, LeaseKey], _Kept] = {}
        self._any = asyncio.Event()

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, members: Iterable[Member]) -> None:
        """Keep the leases of a ticket; does nothing for one that is kept already.

        Raises:
            CapacityExceeded: too many are kept; those of this ticket may be, in part.
        """
        for member in members:
            kept = _Kept(member, self._clock())
            key = (member.peer, kept.lease)
            if key not in self._kept and len(self._kept) >= KEPT_MAX:
                raise CapacityExceeded("leases of tickets that are kept", KEPT_MAX)
            self._kept.setdefault(key, kept)
        self._any.set()

    def end(self, members: Iterable[Member]) -> None:
        """Keep them no more."""
        for member in members:
            self._kept.pop((member.peer, (member.grant.slot, member.grant.epoch_value)), None)

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
        for key, kept in list(self._kept.items()):
            if kept.renew_at > now:
                continue
            peer = kept.member.peer
            if self._pool.link(peer) is None:
                kept.renew_at = now + REDIAL_S
                self._dial(key, kept)
            else:
                kept.renew_at = now + kept.member.grant.lease_s / RENEWALS_PER_LEASE
                renewals.setdefault(peer, []).append(kept.lease)
        for peer, leases in renewals.items():
            link = self._pool.link(peer)
            if link is not None:
                link.renew(leases)

    def _dial(self, key: tuple[PeerId, LeaseKey], kept: _Kept) -> None:
        try:
            self._pool.begin(kept.member)
        except PeerUnavailable as error:
            kept.renew_at += error.retry_after_s
        except KvflowError:
            del self._kept[key]  # it is gone, and its leases with it
