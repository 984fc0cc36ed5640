"""Leases of producers that this worker holds: renewed while they are needed, and given back many at once."""

from asyncio import get_running_loop
from collections import defaultdict
from collections.abc import Iterable, Sequence

from msgspec import Struct, UnsetType

from kvflow.cache.tickets import Member
from kvflow.clock import Clock
from kvflow.errors import CapacityExceeded, KvflowError, PeerUnavailable
from kvflow.ids import LeaseKey, PeerId
from kvflow.worker.peers import PeerPool

RENEWALS_PER_LEASE = 3  # two may be lost before a lease runs out
TICK_S = 0.02  # renewals are due at ticks; most pulls end before the first
REDIAL_S = 0.5  # until a lease is due again whose peer was not connected
RELEASE_PAUSE_S = 0.02  # releases are collected: a message costs as much as several fences, and delays the next pull
RELEASES_MAX = 256  # when more wait, they are sent at once
KEPT_MAX = 65536  # as many leases as a producer's lease table remembers
NEW = -1  # the tick of leases whose first renewal is not planned yet
HeldLease = tuple[PeerId, int, int]
"""A lease of a producer: whose, its slot, its epoch."""
_Releases = dict[tuple[PeerId, bool], list[LeaseKey]]


class _Lease(Struct, eq=False):
    member: Member
    holders: int = 0  # open pulls, and one more if its ticket is kept
    tick: int = NEW  # when it is due


class LeasesHeld:
    """The leases of one worker's open pulls and kept tickets, and those that it has still to give back.

    A lease is renewed once, however many hold it. Fences tell the pulls that it has ended. The leases that are due at
    one tick lie in one dictionary: to hold a lease costs the same, however many are held.

    Attributes:
        kept: the leases of kept tickets.

    Thread: the event loop.
    """

    def __init__(self, pool: PeerPool, clock: Clock, wall: Clock) -> None:
        self._pool, self._clock, self._wall = pool, clock, wall
        self._leases: dict[HeldLease, _Lease] = {}
        self.kept: set[HeldLease] = set()
        self._due: dict[int, dict[HeldLease, _Lease]] = defaultdict(dict)
        self._tick: int | None = None  # the last whose leases were renewed; none while nothing is held
        self._waiting: _Releases = defaultdict(list)
        self._due_releases: list[_Releases] = []  # sent in the next turn of the loop
        self._num_waiting = 0

    def hold(self, members: Iterable[Member]) -> list[HeldLease]:
        """Renew the leases of one pull, until ``drop`` is called for what this returns, once."""
        keys = []
        for member in members:
            key = _key(member)
            keys.append(key)
            lease = self._leases.get(key)
            if lease is None:
                lease = self._leases[key] = self._due[NEW][key] = _Lease(member)
            lease.holders += 1
        if self._tick is None:
            self._tick = int(self._clock() / TICK_S)
            get_running_loop().call_later(TICK_S, self._renew)
        return keys

    def drop(self, keys: Iterable[HeldLease]) -> None:
        """End what ``hold`` began; the leases end by themselves."""
        for key in keys:
            lease = self._leases.get(key)
            if lease is not None:
                lease.holders -= 1
                if not lease.holders:
                    del self._leases[key]
                    self._due[lease.tick].pop(key, None)

    def release(self, keys: Sequence[HeldLease], *, read: bool) -> None:
        """Give leases back soon, but not before those who await the pull have run."""
        before = self._num_waiting
        for peer, slot, epoch in keys:
            self._waiting[peer, read].append((slot, epoch))
            self._num_waiting += 1
        if not before or before <= RELEASES_MAX < self._num_waiting:
            get_running_loop().call_later(0 if before else RELEASE_PAUSE_S, self._take)

    def keep(self, members: Iterable[Member]) -> None:
        """Renew the leases of a ticket until ``forget``; does nothing for one that is kept already.

        Raises:
            CapacityExceeded: too many are kept; those of this ticket may be, in part.
        """
        for member in members:
            if _key(member) not in self.kept:
                if len(self.kept) >= KEPT_MAX:
                    raise CapacityExceeded("leases of tickets that are kept", KEPT_MAX)
                self.kept.add(_key(member))
                self.hold([member])

    def forget(self, members: Iterable[Member]) -> None:
        """End what ``keep`` began; does nothing for a ticket that is not kept."""
        for key in map(_key, members):
            if key in self.kept:
                self.kept.remove(key)
                self.drop([key])

    def close(self) -> None:
        """Send every release that waits, and renew nothing from now on."""
        self._leases.clear()
        self._take()
        self._send()

    def _renew(self) -> None:
        """Renew what is due, again and again while anything is held; the renewals of one peer travel together."""
        if not self._leases or self._tick is None:
            self._due.clear()
            self._tick = None
            return
        get_running_loop().call_later(TICK_S, self._renew)
        now, last = self._clock(), self._tick
        for key, lease in self._due.pop(NEW, {}).items():
            self._put(key, lease, now + self._left_s(key[0], lease.member))
        self._tick = int(now / TICK_S)
        renewals: dict[PeerId, list[LeaseKey]] = {}
        for tick in range(last + 1, self._tick + 1):
            for key, lease in self._due.pop(tick, {}).items():
                renewals.setdefault(key[0], []).append(key[1:])
                again_at = self._again_at(key[0], lease.member, now)
                if lease.holders:
                    self._put(key, lease, again_at)
        for peer, leases in renewals.items():
            if (link := self._pool.link(peer)) is not None:
                link.renew(leases)

    def _put(self, key: HeldLease, lease: _Lease, due: float) -> None:
        lease.tick = max(int(due / TICK_S), (self._tick or 0) + 1)
        self._due[lease.tick][key] = lease

    def _left_s(self, peer: PeerId, member: Member) -> float:
        """Return the seconds until a ticket is renewed first: none if a third of its lease may be over."""
        link, grant = self._pool.link(peer), member.grant
        offset = None if link is None else link.clock_offset
        if offset is None or isinstance(grant.issued_ms, UnsetType):
            return 0.0
        age_s = self._wall() + offset.ahead_s + offset.error_s - grant.issued_ms / 1000
        # Below zero, the signer's clock is ahead of the producer's, and nothing is known.
        return max(0.0, grant.lease_s / RENEWALS_PER_LEASE - age_s) if age_s >= 0 else 0.0

    def _again_at(self, peer: PeerId, member: Member, now: float) -> float:
        """Say when a lease that is due is due again; a peer that is not connected is dialled."""
        try:
            if self._pool.link(peer) is None:
                self._pool.begin(member)
                return now + REDIAL_S
        except PeerUnavailable as error:
            return now + REDIAL_S + error.retry_after_s
        except KvflowError:  # its producer is gone, and its leases with it
            self.forget([member])
        return now + member.grant.lease_s / RENEWALS_PER_LEASE

    def _take(self) -> None:
        """Send what waits now in the next turn of the loop: by then those who await these pulls have run."""
        self._due_releases.append(self._waiting)
        self._waiting, self._num_waiting = defaultdict(list), 0
        get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        due, self._due_releases = self._due_releases, []
        for releases in due:
            for (peer, read), leases in releases.items():
                if (link := self._pool.link(peer)) is not None:
                    link.release(leases, read=read)


def _key(member: Member) -> HeldLease:
    return member.peer, member.grant.slot, member.grant.epoch_value
