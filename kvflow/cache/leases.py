"""Leases: a producer's promises to keep blocks, and how they end.

A lease ends by release, expiry or revocation, and each end raises the epoch *before* anyone learns that the
blocks are free. It is released when all ranks of one consumer engine have said so, each counted once.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec import Struct

from kvflow.cache.epochs import EpochTable
from kvflow.cache.tickets import Grant
from kvflow.errors import BlockIdsInvalid, CapacityExceeded
from kvflow.heaps import Heap
from kvflow.ids import LeaseKey

PAST_MAX = 16384
"""Ended leases that are remembered for readers who ask how they ended: four for each slot that a worker has."""

Outcome = Literal["released", "expired", "revoked"]
Answer = Literal["held", "counted", "ended", "unknown"]


class LeaseEnded(Struct, frozen=True):
    """The epoch has been raised; the blocks may be reused now.

    Attributes:
        request_id: the producer's name of the request.
        outcome: how it ended.
        held_s: how long it was held.
    """

    request_id: str
    outcome: Outcome
    held_s: float


class PastLease(NamedTuple):
    """How a lease has ended.

    Attributes:
        ended_by: ``expired``, ``revoked``, ``used`` by a reader that has read it, or ``released`` by one that gave it
            back unread, or does not tell.
        ended_at: when, by the clock of the leases.
    """

    ended_by: str
    ended_at: float


class Reader(Struct, frozen=True):
    """Who releases: one rank of a consumer engine."""

    engine_id: str
    rank: int
    num_ranks: int


@dataclass(slots=True)
class Lease:
    """One promise that is being kept."""

    grant: Grant
    epoch: int
    admitted_at: float
    ends_at: float
    read: bool = False
    released_by: dict[tuple[str, int], set[int]] = field(default_factory=dict)

    @property
    def released(self) -> bool:
        """Whether all ranks of one engine have released it."""
        return any(len(ranks) == num_ranks for (_, num_ranks), ranks in self.released_by.items())


@dataclass(slots=True)
class _Early:
    """The releases of a lease that is not admitted yet.

    Attributes:
        epoch: of the lease.
        releases: how many were heard, repeated ones included.
        released_by: as of a lease.
    """

    epoch: int
    releases: int = 0
    released_by: dict[tuple[str, int], set[int]] = field(default_factory=dict)


READERS_MAX = 1024
"""Engines that count their ranks' releases of one lease: as many as a worker has peers. A reader says itself which
engine it is of, and a lease may be renewed for ever."""


EARLY_MAX = 1 << 16
"""Releases that are remembered before their leases are admitted: sixteen for each of 4,096 slots, some 10 MiB."""


def _count(released_by: dict[tuple[str, int], set[int]], reader: Reader) -> bool | None:
    """Count a reader's release.

    Returns:
        Whether all ranks of its engine have released; None if too many engines have released in part.
    """
    engine = (reader.engine_id, reader.num_ranks)
    if len(released_by) >= READERS_MAX and engine not in released_by:
        return None
    ranks = released_by.setdefault(engine, set())
    ranks.add(reader.rank)
    return len(ranks) >= reader.num_ranks


class LeaseTable:
    """The leases of one worker.

    Thread: not thread-safe; the worker holds a lock around every call but ``blocks_of``.
    """

    def __init__(self, epochs: EpochTable) -> None:
        self._epochs = epochs
        self._by_slot: dict[int, Lease] = {}
        self._by_request: dict[str, Lease] = {}
        self._early: dict[int, _Early] = {}
        self._early_releases = 0
        # Slots by the time to look at them: a renewed lease is not moved, and found to end later when its time comes.
        self._ends: Heap[int] = Heap()
        self._past: OrderedDict[LeaseKey, PastLease] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_slot)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    @property
    def highest_epoch(self) -> int:
        """The highest epoch that any slot has held."""
        return self._epochs.highest

    def admit(self, grant: Grant, now: float) -> LeaseEnded | None:
        """Start to keep a promise: from here on the slot holds the grant's epoch.

        Returns:
            How the lease has ended, if a reader had released it before it was admitted, as it may have been given all
            that it needs by other ranks.

        Raises:
            BlockIdsInvalid: the request is on offer already, or the grant's epoch is not newer than the slot's.
            CapacityExceeded: the slot is not in the table or is taken.
        """
        if grant.request_id in self._by_request:
            raise BlockIdsInvalid(f"request {grant.request_id!r} is on offer already", remedy="Revoke it first.")
        if grant.slot >= len(self._epochs) or grant.slot in self._by_slot:
            raise CapacityExceeded(
                "lease slots",
                len(self._epochs),
                remedy="Retire a lease in the mint only when it has ended on every rank.",
            )
        slot, epoch = grant.slot, grant.epoch_value
        if epoch <= self._epochs[slot]:
            raise BlockIdsInvalid(
                f"the grant's epoch {grant.epoch} is not newer than slot {grant.slot}'s",
                remedy="Admit each grant once, in this incarnation of the worker.",
            )
        lease = Lease(grant, epoch, now, now + grant.lease_s)
        early = self._forget_early(slot)
        if early is not None and early.epoch == epoch and not grant.admitted:
            lease.released_by = early.released_by
        self._by_slot[slot] = lease
        self._by_request[grant.request_id] = lease
        self._epochs.raise_to(slot, epoch)
        self._ends.put(slot, lease.ends_at)
        return self._end(lease, "released", now) if lease.released_by and lease.released else None

    def release(
        self, slot: int, epoch: int, reader: Reader, now: float, *, read: bool = False
    ) -> tuple[Answer, LeaseEnded | None]:
        """Count one reader's release; the lease ends with the last rank of an engine.

        A release may come before its lease is admitted: a reader of some ranks of a ticket releases all of them.
        It is answered ``unknown``, and counted when the lease is admitted.

        Args:
            slot: of the lease.
            epoch: of the lease.
            reader: who releases.
            now: seconds.
            read: whether it has read what the lease promises.
        """
        lease = self._find(slot, epoch)
        if lease is None:
            return self._release_early(slot, epoch, reader), None
        complete = _count(lease.released_by, reader)
        if complete is None:
            return "unknown", None  # the lease ends when it runs out
        lease.read = lease.read or read
        if not complete:
            return "counted", None
        return "ended", self._end(lease, "released", now)

    def renew(self, slot: int, epoch: int, now: float) -> Answer:
        """Let the lease last from now as long as it did from admission."""
        lease = self._find(slot, epoch)
        if lease is None:
            return "ended" if self._is_past(slot, epoch) else "unknown"
        lease.ends_at = max(lease.ends_at, now + lease.grant.lease_s)
        return "held"

    def grant_of(self, slot: int, epoch: int) -> Grant | None:
        """Return the grant of a lease that is held. Thread: any, without a lock, as ``blocks_of``."""
        lease = self._find(slot, epoch)
        return None if lease is None else lease.grant

    def blocks_of(self, slot: int, epoch: int) -> Sequence[Sequence[int]] | None:
        """Return the block ids of each group while that lease is held; None when it is not.

        An answer may be out of date when it arrives: a lease ends by its epoch, which is raised before this says None.

        Thread: any, without the worker's lock: one look into a dict is atomic, and a grant does not change.
        """
        lease = self._find(slot, epoch)
        return None if lease is None else lease.grant.block_ids

    def past(self, slot: int, epoch: int) -> PastLease | None:
        """Return how a lease has ended; None if that is not remembered."""
        return self._past.get((slot, epoch))

    def revoke(self, request_id: str, now: float) -> LeaseEnded | None:
        """End a lease now; None if it is unknown or has ended."""
        lease = self._by_request.get(request_id)
        return None if lease is None else self._end(lease, "revoked", now)

    def revoke_all(self, now: float) -> list[LeaseEnded]:
        """End every lease now."""
        return [self._end(lease, "revoked", now) for lease in list(self._by_slot.values())]

    def expire(self, now: float) -> list[LeaseEnded]:
        """End the leases that have run out."""
        ended = []
        for slot in self._ends.take_until(now):
            lease = self._by_slot[slot]
            if lease.ends_at > now:
                self._ends.put(slot, lease.ends_at)
            else:
                ended.append(self._end(lease, "expired", now))
        return ended

    def next_deadline(self) -> float | None:
        """Return when ``expire`` is worth calling: never later than the next lease runs out."""
        first = self._ends.first()
        return None if first is None else first[0]

    def _release_early(self, slot: int, epoch: int, reader: Reader) -> Answer:
        """Count the release of a lease that is not held: of one that may be admitted yet, one for each slot."""
        if slot >= len(self._epochs) or epoch <= self._epochs[slot]:
            return "ended" if self._is_past(slot, epoch) else "unknown"
        early = self._early.get(slot)
        if early is None or early.epoch != epoch:
            # A mint uses a slot again only when its lease has ended on every rank: what is older never comes.
            self._forget_early(slot)
            early = self._early[slot] = _Early(epoch)
        if self._early_releases < EARLY_MAX:
            _count(early.released_by, reader)
            self._early_releases += 1
            early.releases += 1
        return "unknown"

    def _forget_early(self, slot: int) -> _Early | None:
        early = self._early.pop(slot, None)
        if early is not None:
            self._early_releases -= early.releases
        return early

    def _find(self, slot: int, epoch: int) -> Lease | None:
        lease = self._by_slot.get(slot)
        return lease if lease is not None and lease.epoch == epoch else None

    def _is_past(self, slot: int, epoch: int) -> bool:
        return slot < len(self._epochs) and self._epochs.base < epoch < self._epochs[slot]

    def _end(self, lease: Lease, outcome: Outcome, now: float) -> LeaseEnded:
        grant = lease.grant
        self._epochs.raise_to(grant.slot, lease.epoch + 1)
        self._ends.remove(grant.slot)
        del self._by_slot[grant.slot]
        del self._by_request[grant.request_id]
        ended_by = "used" if outcome == "released" and lease.read else outcome
        self._past[grant.slot, lease.epoch] = PastLease(ended_by, now)
        if len(self._past) > PAST_MAX:
            self._past.popitem(last=False)
        return LeaseEnded(grant.request_id, outcome, now - lease.admitted_at)
