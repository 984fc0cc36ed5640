"""Renew the leases of open pulls and held tickets, and send releases in batches."""

from asyncio import get_running_loop
from collections import defaultdict
from collections.abc import Iterable, Sequence

from msgspec import Struct

from kvflow.errors import CapacityExceeded, KvflowError, PeerUnavailable
from kvflow.ids import Clock, LeaseKey, PeerId
from kvflow.leases.tickets import Member
from kvflow.worker.peers import PeerPool

RENEWALS_PER_LEASE = 3  # two may be lost before a lease runs out
TICK_S = 0.02  # renewals are due at ticks. The first is due at the second tick, and most pulls end before
REDIAL_S = 0.5  # until the next renewal of a lease whose peer is not connected
RELEASE_PAUSE_S = 0.0005  # collects releases: a message costs as much as several fences, and delays the next pull
RELEASE_PAUSES_MAX = 40  # releases wait for one pause more while others join them, at most for so many
RELEASES_MAX = 256  # more than this many waiting releases are sent at once
HELD_MAX = 65536  # as many leases as a producer's lease table remembers
NEW = -1  # the tick of leases whose first renewal is not planned yet
HeldLease = tuple[PeerId, int, int]  # a lease of a producer: the peer, the slot, the epoch
_Releases = dict[tuple[PeerId, bool], list[LeaseKey]]


class _Lease(Struct, eq=False, gc=False):
    member: Member
    holders: int = 0  # open pulls, and requests that hold its ticket
    tick: int = NEW  # when it is due


class LeaseRenewer:
    """Renew the leases of one worker's open pulls and held tickets, and release them. Thread: the event loop.

    The first renewal of a lease tells its producer that it has a reader, so it is sent at once. A lease is renewed once
    for all pulls that need it. Those due at one tick are in one dictionary, so the cost of a lease does not depend on
    their number. ``held``: the lease of each held ticket, the requests that hold it, and since when; each does so for
    at most ``hold_s``.
    """

    def __init__(self, pool: PeerPool, clock: Clock, hold_s: float) -> None:
        self._pool, self._clock, self._hold_s = pool, clock, hold_s
        self._leases: dict[HeldLease, _Lease] = {}
        self.held: dict[HeldLease, dict[str, float]] = {}
        self._num_held = 0  # of all requests
        self._due: dict[int, dict[HeldLease, _Lease]] = defaultdict(dict)
        self._tick: int | None = None  # the last whose leases were renewed; none while nothing is held
        self._waiting: _Releases = defaultdict(list)
        self._due_releases: list[_Releases] = []  # sent in the next iteration of the loop
        self._num_waiting = 0

    def start(self, members: Iterable[Member]) -> tuple[HeldLease, ...]:
        """Renew the leases of one pull; pass the result to ``stop`` once."""
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
        return tuple(keys)

    def stop(self, keys: Iterable[HeldLease]) -> None:
        """Stop renewing the leases of one pull."""
        for key in keys:
            lease = self._leases.get(key)
            if lease is not None:
                lease.holders -= 1
                if not lease.holders:
                    del self._leases[key]
                    self._due.get(lease.tick, {}).pop(key, None)  # the tick at which it ends is gone already

    def release(self, keys: Sequence[HeldLease], *, read: bool) -> None:
        """Release leases soon, after the tasks that await the pull have run."""
        before = self._num_waiting
        for peer, slot, epoch in keys:
            self._waiting[peer, read].append((slot, epoch))
        self._num_waiting = after = before + len(keys)
        if not before:
            get_running_loop().call_later(RELEASE_PAUSE_S, self._await_more, self._waiting, after)
        elif before <= RELEASES_MAX < after:
            get_running_loop().call_soon(self._take)

    def hold_ticket(self, members: Iterable[Member], name: str = "") -> None:
        """Renew the leases of a ticket for one request until ``end_ticket``. Several may hold one ticket.

        Raises:
            CapacityExceeded: too many leases are held; some leases of this ticket may be among them.
        """
        now = self._clock()
        for member in members:
            names = self.held.setdefault(_key(member), {})
            if name not in names:
                if self._num_held >= HELD_MAX:
                    raise CapacityExceeded("leases of tickets that are held", HELD_MAX)
                names[name] = now
                self._num_held += 1
                self.start([member])

    def end_ticket(self, members: Iterable[Member], name: str = "") -> None:
        """Stop renewing the leases of a ticket for one request. Do nothing if no request holds it.

        A request without an id ends any hold, and a hold without an id is ended by any request.
        """
        for key in map(_key, members):
            names = self.held.get(key)
            if names:
                found = name if name in names else "" if "" in names else "" if name else min(names)
                if found in names:
                    self._end_hold(key, found)

    async def release_ticket(self, members: Sequence[Member], name: str = "") -> None:
        """End the hold of one request, and release a ticket that it does not read. Raises as ``PeerPool.connect``."""
        self.end_ticket(members, name)
        errors: list[KvflowError] = []
        for member in members:
            try:
                await self._pool.connect_link(member)
            except KvflowError as error:
                errors.append(error)  # release the other ranks nevertheless
            else:
                self.release([_key(member)], read=False)
        if errors:
            raise errors[0]

    def _end_hold(self, key: HeldLease, name: str) -> None:
        names = self.held[key]
        del names[name]
        self._num_held -= 1
        if not names:
            del self.held[key]
        self.stop([key])

    def close(self) -> None:
        """Send every waiting release, and stop renewing."""
        self._leases.clear()
        self._take()
        self._send()

    def _renew(self) -> None:
        """Renew the leases that are due, one message for each peer, and call this again at the next tick."""
        if not self._leases or self._tick is None:
            self._due.clear()
            self._tick = None
            return
        get_running_loop().call_later(TICK_S, self._renew)
        now, last = self._clock(), self._tick
        for key, lease in self._due.pop(NEW, {}).items():
            self._put(key, lease, now)
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

    def _again_at(self, peer: PeerId, member: Member, now: float) -> float:
        """Return when a lease that is renewed now is due again; start to connect its peer if it is not connected.

        A request that has held it for too long does so no more.
        """
        for name, since in tuple(self.held.get(_key(member), {}).items()):
            if now - since >= self._hold_s:
                self._end_hold(_key(member), name)
        try:
            if self._pool.link(peer) is None:
                self._pool.start_connecting(member)
                return now + REDIAL_S
        except PeerUnavailable as error:
            return now + REDIAL_S + error.retry_after_s
        except KvflowError:  # its producer is closed, and with it the lease
            for name in tuple(self.held.get(_key(member), ())):
                self._end_hold(_key(member), name)
        return now + member.grant.lease_s / RENEWALS_PER_LEASE

    def _await_more(self, waiting: _Releases, joined: int, pauses: int = 1) -> None:
        """Send releases that no other has joined during a pause, or that have waited for all their pauses."""
        if waiting is self._waiting:  # otherwise they were too many, and have been taken
            if joined == self._num_waiting or pauses == RELEASE_PAUSES_MAX:
                self._take()
            else:
                joined = self._num_waiting
                get_running_loop().call_later(RELEASE_PAUSE_S, self._await_more, waiting, joined, pauses + 1)

    def _take(self) -> None:
        """Send the waiting releases in the loop's next iteration, after the tasks that await these pulls."""
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
    return member.peer, member.grant.slot, member.grant.epoch
