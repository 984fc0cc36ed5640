"""Who may use a block: lent to readers, or receiving, and never both.

A block that is lent is read by peers, so nothing may write into it; a block that receives holds nothing that could be
lent. Readers are counted, because requests share prefixes; a block receives for one pull at a time. Whoever takes a
reference gives it back once.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt

from kvflow.errors import BlockIdsInvalid

Int64s = npt.NDArray[np.int64]

QUIESCED = "Wait for worker.quiesced() of that pull before reusing its blocks."
ENDED = "Wait for worker.wait_offer() of every request that has the block, or revoke them."


class BlockAccount:
    """The references to all blocks of one cache.

    Block ids are one array per group; ``-1``, an absent block, counts as none. Each method does all or nothing.

    Attributes:
        aliases: alias class of each group; groups of one class share bytes, and so share the account's rows.

    Args:
        aliases: as above.
        num_blocks: blocks in the pool.
        lock: held within each method: offers come from any thread.
    """

    def __init__(
        self, aliases: Sequence[int], num_blocks: int, lock: AbstractContextManager[object] | None = None
    ) -> None:
        self.aliases = tuple(aliases)
        self._lock = lock or nullcontext()
        self._lent = np.zeros((max(self.aliases) + 1, num_blocks), np.int64)
        self._receiving = np.zeros((max(self.aliases) + 1, num_blocks), bool)

    def lend(self, ids: Sequence[Int64s]) -> None:
        """Count one more reader of each block.

        Raises:
            BlockIdsInvalid: a block is receiving, or still quarantined.
        """
        with self._lock:
            self._refuse(ids, self._receiving, "cannot be offered: it is still the target of a pull", QUIESCED)
            for alias, array in zip(self.aliases, _present(ids), strict=True):
                np.add.at(self._lent[alias], array, 1)

    def end_loan(self, ids: Sequence[Int64s]) -> None:
        """Count one reader less of each block."""
        with self._lock:
            for alias, array in zip(self.aliases, _present(ids), strict=True):
                np.subtract.at(self._lent[alias], array, 1)
                assert not array.size or self._lent[alias, array].min() >= 0, "a loan ended twice"

    def receive(self, ids: Sequence[Int64s]) -> None:
        """Let each block be written into, by one pull.

        Raises:
            BlockIdsInvalid: a block is receiving for another pull, still quarantined, or lent.
        """
        with self._lock:
            self._refuse(
                ids, self._receiving, "is still the target of another pull", "Wait for quiesced() of that pull"
            )
            self._refuse(
                ids, self._lent, "is on offer, and peers may be reading it", "Wait until its leases have ended"
            )
            for alias, array in zip(self.aliases, _present(ids), strict=True):
                self._receiving[alias, array] = True

    def end_receipt(self, ids: Sequence[Int64s]) -> None:
        """Note that nothing writes into these blocks any more."""
        with self._lock:
            for alias, array in zip(self.aliases, _present(ids), strict=True):
                assert self._receiving[alias, array].all(), "a block was given back twice"
                self._receiving[alias, array] = False

    def check(
        self,
        *,
        lent: Iterable[Sequence[Int64s]] | None = None,
        receiving: Iterable[Sequence[Int64s]] | None = None,
    ) -> None:
        """Check the law: what is counted is exactly what these leases, or these destinations, hold."""
        with self._lock:
            for counted, held in ((self._lent, lent), (self._receiving, receiving)):
                if held is not None:
                    assert np.array_equal(self._sum(held), counted), "references were lost or given back twice"
            assert not (self._lent.astype(bool) & self._receiving).any(), "a block is lent and receives"

    def _sum(self, held: Iterable[Sequence[Int64s]]) -> Int64s:
        summed = np.zeros_like(self._lent)
        for ids in held:
            for alias, array in zip(self.aliases, _present(ids), strict=True):
                np.add.at(summed[alias], array, 1)
        return summed

    def _refuse(self, ids: Sequence[Int64s], used: npt.NDArray[np.generic], words: str, remedy: str) -> None:
        for group, (alias, array) in enumerate(zip(self.aliases, _present(ids), strict=True)):
            busy = array[used[alias, array].astype(bool)]
            if busy.size:
                raise BlockIdsInvalid(
                    f"group {group}: block {busy[0]} {words}",
                    group=group,
                    remedy=f"{remedy} before reusing its blocks.",
                )


def _present(ids: Sequence[Int64s]) -> list[Int64s]:
    return [array[array >= 0] for array in ids]
