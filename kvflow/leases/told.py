"""The ends of kept leases, as short digests: a member that knows them asks only workers that keep some of a prompt.

Changes have numbers, within one incarnation. Of each end only the last change is remembered, and of ends that have gone
only those that went last: who is further behind gets all of them again.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from kvflow.leases.held import Lease
from kvflow.leases.tickets import Grant

END_BYTES = 8  # of a digest
STRIDE_TOKENS = 1024  # a lease has an end at the last whole block before each multiple, and one at its last block
ENDS_MAX = 1 << 16  # of all leases: 10 MiB at most, with those that have gone
GONE_MAX = 1 << 13
PIECE_MAX = 1 << 12  # changes that are told at a time: 32 KiB, in 2 ms


class Changes(NamedTuple):
    """Ends that are new and that have gone, one after the other, up to the change ``until``.

    ``begun``: the last change when all began to be told. ``is_all``: nothing is left to tell, and no lease is untold.
    """

    until: int
    begun: int
    new: bytes
    gone: bytes
    is_all: bool


def shortened(digest: bytes) -> bytes:
    """Return a digest as it is told."""
    return digest[:END_BYTES].ljust(END_BYTES, b"\0")


def ends_of(digests: Sequence[bytes], grant: Grant) -> tuple[bytes, ...]:
    """Return the ends of a lease; ``digests``: of its blocks of the first group, up to the last one."""
    block_size, num_tokens = grant.contents[0].block_size if grant.contents else 0, grant.num_tokens[0]
    if not block_size:
        return ()
    count = -(-num_tokens // block_size)
    places = {end // block_size - 1 for end in range(STRIDE_TOKENS, num_tokens + 1, STRIDE_TOKENS)} | {count - 1}
    found = [digests[place - count] for place in places if count - len(digests) <= place]
    return tuple([shortened(digest) for digest in found if digest])


class KeptEnds:
    """The ends of the kept leases of one worker. Thread: as ``LeaseTable``."""

    def __init__(self) -> None:
        self.number = 1  # of the last change
        self._counts: Counter[bytes] = Counter()  # how many leases have an end
        self._untold: set[Lease] = set()  # for which there was no room
        self._changed: list[tuple[int, bytes]] = []
        self._forgotten = 0  # the last change of an end that has gone and is not remembered

    def add(self, lease: Lease) -> None:
        """Tell the ends of a lease from now on."""
        ends = lease.names.ends
        if len(self._counts) + len(ends) > ENDS_MAX:
            self._untold.add(lease)
            self.number += 1
            return
        new = [end for end in ends if end not in self._counts]
        self._counts.update(ends)
        self._change(new)

    def remove(self, lease: Lease) -> None:
        """Tell that a lease has ended."""
        if lease in self._untold:
            self._untold.discard(lease)
            self.number += 1
            return
        self._counts.subtract(lease.names.ends)
        gone = [end for end in lease.names.ends if not self._counts[end]]
        for end in gone:
            del self._counts[end]
        self._change(gone)

    def after(self, since: int, begun: int) -> Changes:
        """Return what has changed since a change, or the next piece of it, for who was told the others.

        Who knows nothing, or too little, is told all from the start, and forgets the rest: ``begun`` is then another.
        """
        if not since or not self._forgotten <= max(since, begun) <= self.number:
            since, begun = 0, self.number
        first = bisect_right(self._changed, since, key=itemgetter(0))
        piece, is_last = self._changed[first : first + PIECE_MAX], first + PIECE_MAX >= len(self._changed)
        until = self.number if is_last else piece[-1][0]
        ends = dict.fromkeys([end for _, end in piece])
        new, gone = [[end for end in ends if (end in self._counts) is held] for held in (True, False)]
        return Changes(until, begun, b"".join(new), b"".join(gone), is_last and not self._untold)

    def _change(self, ends: Sequence[bytes]) -> None:
        for end in ends:
            self.number += 1
            self._changed.append((self.number, end))
        if len(self._changed) > 2 * (len(self._counts) + GONE_MAX):
            self._forget()

    def _forget(self) -> None:
        """Drop all but the last change of each end, and those of most ends that have gone."""
        last = {end: number for number, end in self._changed}
        gone = [number for number, end in self._changed if last[end] == number and end not in self._counts]
        if len(gone) > GONE_MAX:
            self._forgotten = gone[-GONE_MAX - 1]
        self._changed = [
            (number, end)
            for number, end in self._changed
            if last[end] == number and (end in self._counts or number > self._forgotten)
        ]
