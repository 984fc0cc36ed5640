"""What goes into the scheduler and what it asks its shell to do."""

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter

import numpy as np
from msgspec import Struct

from kvflow.ids import PeerId
from kvflow.transfer.events import TransferEvent
from kvflow.transfer.pairs import Int64s, UnitPairs

NOT_HELD = "lease_not_held"
"""Code of a batch that was not read, because a look at one of its leases did not find it held."""

PRIORITY_MAX = 1 << 31
"""Largest priority either way: beside a time, a float holds it and its age exactly enough."""


class Demand(Struct, frozen=True, eq=False):
    """Unit pairs of one group of one source rank.

    Attributes:
        program_id: which prepared lists they index.
        pairs: at least one pair.
        unit_bytes: bytes that one pair fills.
        unit_descriptors: descriptors of one pair before merging.
        descriptors: of all pairs, neighbours merged.
        extra_bytes: bytes that are read for one pair beyond those that it fills, because it is staged.
    """

    program_id: int
    pairs: UnitPairs
    unit_bytes: int
    unit_descriptors: int
    descriptors: int
    extra_bytes: int = 0

    @property
    def read_bytes(self) -> int:
        """Bytes that are read for one pair."""
        return self.unit_bytes + self.extra_bytes


class LegRequest(Struct, frozen=True, eq=False):
    """Everything that one source rank must give to one pull, and the lease that vouches for it.

    Attributes:
        peer: the source rank.
        slot: its epoch slot.
        epoch: what the slot must hold.
        lease_s: how long the lease lasts unless renewed.
        demands: at least one.
        admitted: whether the lease was held before anyone had the ticket. If not, it may be admitted, and its blocks
            be written, while we read: then it must be seen to be held before the read that counts.
        mac: of its ticket, which a producer that serves reads asks for.
    """

    peer: PeerId
    slot: int
    epoch: int
    lease_s: float
    demands: tuple[Demand, ...]
    admitted: bool = True
    mac: bytes = b""


class Budgets(Struct, frozen=True, kw_only=True):
    """Seconds that each phase of a pull may take, each from its own start.

    Attributes:
        queue_s: submission to the first dispatch.
        wire_s: without any completion from a peer that owes us one. A hung peer is found only by this.
        fence_s: from the last byte to the verdict, all waiting for a late admission included.
    """

    queue_s: float = 30.0
    wire_s: float = 30.0
    fence_s: float = 10.0


class PullRequest(Struct, frozen=True, eq=False):
    """One pull.

    Attributes:
        pull_id: chosen by the caller, unique.
        request_id: the producer's name of the request, for the record.
        legs: one per source rank, at least one.
        priority: lower is more urgent; from ``-PRIORITY_MAX`` to ``PRIORITY_MAX``.
        budgets: of its phases.
    """

    pull_id: int
    request_id: str
    legs: tuple[LegRequest, ...]
    priority: int
    budgets: Budgets

    @property
    def nbytes(self) -> int:
        """Bytes that it fills."""
        return sum(len(part.pairs.source) * part.unit_bytes for leg in self.legs for part in leg.demands)


class EpochCheck(Struct, frozen=True):
    """A fence to be read once the reads in ``after`` are complete."""

    fence_id: int
    slot: int
    epoch: int
    after: tuple[int, ...]


class LeaseShare(Struct, frozen=True):
    """Unit pairs of a batch that follow each other, and the lease that vouches for them.

    Attributes:
        slot: its epoch slot.
        epoch: what the slot must hold.
        pairs: how many unit pairs, at least one.
        mac: of its ticket.
    """

    slot: int
    epoch: int
    pairs: int
    mac: bytes = b""


class Dispatch(Struct, frozen=True, eq=False):
    """Post one batch.

    Attributes:
        read_id: names the batch in ``on_read_completed`` and ``on_read_failed``.
        peer: the source rank.
        program_id: prepared lists.
        pairs: unit pairs of one or several pulls.
        leases: whose pairs these are, in the order of the pairs; neighbours are of different leases.
        priority: lower is more urgent.
        fences: fences that become due with this batch.
        looks: fences to be read before this batch, which is not read unless they find every lease held.
        pull_ids: whose pairs these are.
    """

    read_id: int
    peer: PeerId
    program_id: int
    pairs: UnitPairs
    leases: tuple[LeaseShare, ...]
    priority: int
    fences: tuple[EpochCheck, ...]
    looks: tuple[EpochCheck, ...]
    pull_ids: tuple[int, ...]


class Look(Struct, frozen=True):
    """Read one epoch slot of a peer now.

    Attributes:
        peer: the source rank.
        check: the slot, and what it must hold.
    """

    peer: PeerId
    check: EpochCheck


class CancelReads(Struct, frozen=True):
    """Drop what was not posted yet of these batches; nobody wants them any more."""

    read_ids: tuple[int, ...]


class RenewLease(Struct, frozen=True):
    """Ask the peer to keep a lease that a pull still needs."""

    peer: PeerId
    slot: int
    epoch: int


Effect = Dispatch | Look | CancelReads | RenewLease | TransferEvent


def join_pairs(parts: list[tuple[UnitPairs, int, int]]) -> UnitPairs:
    """Join slices ``[first, last)`` of several pair lists into one batch.

    Each stays together: if all were sorted by source, two readers of the same blocks would break each other's runs.
    """
    if len(parts) == 1:
        pairs, first, last = parts[0]
        return UnitPairs(pairs.source[first:last], pairs.target[first:last])
    source: Int64s = np.concatenate([pairs.source[first:last] for pairs, first, last in parts])
    target: Int64s = np.concatenate([pairs.target[first:last] for pairs, first, last in parts])
    return UnitPairs(source, target)


def join_shares(parts: Iterable[LeaseShare]) -> tuple[LeaseShare, ...]:
    """Join the shares of slices: neighbours of one lease become one share."""
    return tuple(
        LeaseShare(slot, epoch, sum(share.pairs for share in run), mac)
        for (slot, epoch, mac), run in groupby(parts, key=attrgetter("slot", "epoch", "mac"))
    )
