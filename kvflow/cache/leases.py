"""Leases: a producer's promises to keep blocks, and how they end.

A lease ends by release, expiry or revocation, and each end raises the epoch *before* anyone learns that the
blocks are free. It is released when all ranks of one consumer engine have said so, each counted once.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Literal

from msgspec import Struct

from kvflow.cache.epochs import EpochTable
from kvflow.cache.tickets import Grant
from kvflow.errors import BlockIdsInvalid, CapacityExceeded
from kvflow.ids import LeaseKey

PAST_MAX = 16384
"""Ended leases that are remembered for readers who ask how they ended: four for each slot that a worker has."""

Outcome = Literal["released", "expired", "revoked"]
Answer = Literal["held", "counted", "ended", "unknown"]


class LeaseEnded(Struct, frozen=True, gc=False):
    """The epoch has been raised; the blocks may be reused now.

    Attributes:
        request_id: the producer's name of the request.
        outcome: how it ended.
        held_s: how long it was held.
    """

    request_id: str
    outcome: Outcome
    held_s: float


class PastLease(Struct, frozen=True, gc=False):
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


class Lease(Struct, eq=False):
    """One promise that is being kept."""

    grant: Grant
    epoch: int
    admitted_at: float
    ends_at: float
    read: bool = False
    released_by: dict[tuple[str, int], set[int]] = {}

    @property
    def released(self) -> bool:
        """Whether all ranks of one engine have released it."""
        return any(len(ranks) == num_ranks for (_, num_ranks), ranks in self.released_by.items())


class _Early(Struct, eq=False):
    """The releases of a lease that is not admitted yet.

    Attributes:
        epoch: of the lease.
        releases: how many were heard, repeated ones included.
        released_by: as of a lease.
    """

    epoch: int
    releases: int = 0
    released_by: dict[tuple[str, int], set[int]] = {}


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
        self._slots = len(epochs)
        self._by_slot: dict[int, Lease] = {}
        self._by_request: dict[str, Lease] = {}
        self._early: dict[int, _Early] = {}
        self._early_releases = 0
        # The leases of one duration in the order of their ends: the last to be admitted or renewed is the last to end.
        self._ends: defaultdict[int, OrderedDict[int, Lease]] = defaultdict(OrderedDict)
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
        request_id, slot, epoch, lease_ms = grant.request_id, grant.slot, int(grant.epoch), grant.lease_ms
        if request_id in self._by_request:
            raise BlockIdsInvalid(f"request {request_id!r} is on offer already", remedy="Revoke it first.")
        if slot >= self._slots or slot in self._by_slot:
            raise CapacityExceeded(
                "lease slots", self._slots, remedy="Retire a lease in the mint only when it has ended on every rank."
            )
        if epoch <= self._epochs.numbers[slot]:
            raise BlockIdsInvalid(
                f"the grant's epoch {epoch} is not newer than slot {slot}'s",
                remedy="Admit each grant once, in this incarnation of the worker.",
            )
        lease = Lease(grant, epoch, now, now + lease_ms / 1000)
        self._by_slot[slot] = self._ends[lease_ms][slot] = self._by_request[request_id] = lease
        self._epochs.raise_all(((slot, epoch),))
        early = self._forget_early(slot) if self._early else None
        if early is not None and early.epoch == epoch and not grant.admitted:
            lease.released_by = early.released_by
            if lease.released:
                return self._end([lease], "released", now)[0]
        return None

    def release(
        self, leases: Sequence[LeaseKey], reader: Reader, now: float, *, read: bool = False
    ) -> tuple[list[Answer], list[LeaseEnded]]:
        """Count one reader's releases; a lease ends with the last rank of an engine.

        A release may come before its lease is admitted: a reader of some ranks of a ticket releases all of them.
        It is answered ``unknown``, and counted when the lease is admitted.

        Args:
            leases: that it releases.
            reader: who releases.
            now: seconds.
            read: whether it has read what the leases promise.

        Returns:
            What became of each, in their order; and how those that have ended now did.
        """
        answers: list[Answer] = []
        done: dict[int, Lease] = {}
        alone = reader.num_ranks == 1
        for slot, epoch in leases:
            lease = self._by_slot.get(slot)
            if lease is None or lease.epoch != epoch:
                answers.append(self._release_early(slot, epoch, reader))
                continue
            complete = alone or _count(lease.released_by, reader)
            if complete is None:
                answers.append("unknown")  # the lease ends when it runs out
                continue
            if read:
                lease.read = True
            if complete:
                done[slot] = lease
            answers.append("ended" if complete else "counted")
        return answers, self._end(done.values(), "released", now) if done else []

    def renew(self, leases: Sequence[LeaseKey], now: float) -> list[Answer]:
        """Let leases last from now as long as they did from admission; answer each."""
        answers: list[Answer] = []
        for slot, epoch in leases:
            lease = self._by_slot.get(slot)
            if lease is None or lease.epoch != epoch:
                answers.append("ended" if self._is_past(slot, epoch) else "unknown")
                continue
            lease_ms = lease.grant.lease_ms
            lease.ends_at = now + lease_ms / 1000
            self._ends[lease_ms].move_to_end(slot)
            answers.append("held")
        return answers

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
        return None if lease is None else self._end([lease], "revoked", now)[0]

    def revoke_all(self, now: float) -> list[LeaseEnded]:
        """End every lease now."""
        return self._end(list(self._by_slot.values()), "revoked", now)

    def expire(self, now: float) -> list[LeaseEnded]:
        """End the leases that have run out."""
        due = [
            lease
            for leases in self._ends.values()
            for lease in takewhile(lambda lease: lease.ends_at <= now, leases.values())
        ]
        return self._end(due, "expired", now) if due else []

    def next_deadline(self) -> float | None:
        """Return when the next lease runs out."""
        return min((next(iter(leases.values())).ends_at for leases in self._ends.values()), default=None)

    def _release_early(self, slot: int, epoch: int, reader: Reader) -> Answer:
        """Count the release of a lease that is not held: of one that may be admitted yet, one for each slot."""
        if slot >= self._slots or epoch <= self._epochs[slot]:
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
        return slot < self._slots and self._epochs.base < epoch < self._epochs[slot]

    def _end(self, leases: Collection[Lease], outcome: Outcome, now: float) -> list[LeaseEnded]:
        self._epochs.raise_all([(lease.grant.slot, lease.epoch + 1) for lease in leases])
        ended = []
        used, past = PastLease("used", now), PastLease(outcome, now)
        for lease in leases:
            grant = lease.grant
            slot, request_id, same = grant.slot, grant.request_id, self._ends[grant.lease_ms]
            del self._by_slot[slot], self._by_request[request_id], same[slot]
            if not same:
                del self._ends[grant.lease_ms]
            self._past[slot, lease.epoch] = used if lease.read and outcome == "released" else past
            ended.append(LeaseEnded(request_id, outcome, now - lease.admitted_at))
        while len(self._past) > PAST_MAX:
            self._past.popitem(last=False)
        return ended
