"""Which blocks a reader may get from a worker that serves reads: those that its lease holds now. Pure.

With one-sided reads, a peer can read all registered memory. A plane that serves reads knows who asks, and under which
lease. The lease table is asked each time; the sorted ids are cached.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvflow.ids import Flags, Int64s
from kvflow.reads.bounds import OutOfBounds
from kvflow.reads.contract import Serving

LEASES_MAX = 256
"""How many leases have cached blocks."""

LEASED_IDS_MAX = 1 << 22
"""How many block ids are cached for all leases: 32 MiB."""


class OtherTicket(OutOfBounds):
    """The MAC is not that of the lease's ticket."""


class LeasedBlocks:
    """The blocks of leases, as sorted arrays. Those of the most recent leases are cached. Thread: one only."""

    def __init__(self, serving: Serving, *, leases_max: int = LEASES_MAX, ids_max: int = LEASED_IDS_MAX) -> None:
        self._blocks_of = serving.blocks_of
        self._vouches = serving.vouches
        self._leases_max = leases_max
        self._ids_max = ids_max
        self._kept: OrderedDict[tuple[int, int], _CachedLease] = OrderedDict()
        self._ids = 0

    def held(self, slot: int, epoch: int, group: int, block: Int64s, *, mac: bytes = b"") -> Flags | None:
        """Return for each block whether the lease that a peer names holds it now; None if the lease is not held.

        ``mac``: that of the ticket that the peer presents. Raises ``OtherTicket`` if it is that of another one.
        """
        kept = self._held(slot, epoch, mac)
        if kept is None:
            return None
        if group not in kept.arrays:
            kept.arrays[group] = _sorted(kept.of_group(group))
        ids = kept.arrays[group]
        # The last entry is larger than any block, so that every search finds one.
        held: Flags = ids[ids.searchsorted(block)] == block
        return held

    def ids(self, slot: int, epoch: int, group: int, *, mac: bytes = b"") -> frozenset[int] | None:
        """Return the blocks of a lease, for a few comparisons; otherwise as ``held``."""
        kept = self._held(slot, epoch, mac)
        if kept is None:
            return None
        if group not in kept.sets:
            kept.sets[group] = frozenset(kept.of_group(group))
        return kept.sets[group]

    def _held(self, slot: int, epoch: int, mac: bytes) -> "_CachedLease | None":
        """Ask whether a lease is held, check the MAC once, and return the cache entry."""
        kept = self._kept_of(slot, epoch)
        if kept is not None and self._vouches is not None and kept.mac != mac:
            if not self._vouches(slot, epoch, mac):
                if self._blocks_of(slot, epoch) is None:  # it ended after the previous line
                    return None
                raise OtherTicket(f"the lease in slot {slot} is that of another ticket")
            kept.mac = mac
        return kept

    def _kept_of(self, slot: int, epoch: int) -> "_CachedLease | None":
        lease = (slot, epoch)
        blocks = self._blocks_of(slot, epoch)
        kept = self._kept.get(lease)
        if kept is not None and kept.blocks is blocks:
            self._kept.move_to_end(lease)
            return kept
        if kept is not None:
            self._ids -= self._kept.pop(lease).count
        if blocks is None:
            return None
        kept = self._kept[lease] = _CachedLease(blocks, sum(map(len, blocks)))
        self._ids += kept.count
        while len(self._kept) > 1 and (len(self._kept) > self._leases_max or self._ids > self._ids_max):
            self._ids -= self._kept.popitem(last=False)[1].count
        return kept


@dataclass(slots=True, eq=False)
class _CachedLease:
    """One lease. ``blocks`` are those that the lease table returned, and ``mac`` the last one that was checked."""

    blocks: Sequence[Sequence[int]]
    count: int
    arrays: dict[int, Int64s] = field(default_factory=dict)
    sets: dict[int, frozenset[int]] = field(default_factory=dict)
    mac: bytes | None = None

    def of_group(self, group: int) -> Sequence[int]:
        """Return the ids of a group; none if the lease does not have the group."""
        return self.blocks[group] if 0 <= group < len(self.blocks) else ()


_NO_BLOCKS = np.array([np.iinfo(np.int64).max], np.int64)


def _sorted(ids: Sequence[int]) -> Int64s:
    """Return block ids in the form that ``held`` searches, without absent blocks (-1)."""
    found = np.unique(np.array(ids, np.int64))
    return np.append(found[found >= 0], _NO_BLOCKS)


def order_memory() -> None:
    """Order this thread's loads and stores before the call ahead of those after it, also on weakly ordered machines.

    Releasing a lock and then acquiring one is such a barrier on every machine that CPython runs on
    (docs/explanation/correctness.md). No other thread uses this lock, so the call never waits.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()
