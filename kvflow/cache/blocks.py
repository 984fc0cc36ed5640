"""Who may use a block: lent to readers, or receiving, and never both.

A block that is lent is read by peers, so nothing may write into it; a block that receives holds nothing that could be
lent. Readers are counted, because requests share prefixes; a block receives for one pull at a time. Whoever takes a
reference gives it back once.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt

from kvflow.errors import BlockIdsInvalid

Int64s = npt.NDArray[np.int64]
Ids = list[int] | Int64s
"""Checked block ids of one group. Few are a list, for which NumPy's calls take longer than Python's; many an array."""

ABSENT = -1
RECEIVING = -1
QUIESCED = "Wait for worker.quiesced() of that pull before reusing its blocks."
ENDED = "Wait for worker.wait_offer() of every request that has the block, or revoke them."


class BlockAccount:
    """The references to all blocks of one cache.

    Block ids are one ``Ids`` per group; ``-1``, an absent block, counts as none. Each method does all or nothing.

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
        self._classes = [_Uses(num_blocks) for _ in range(max(self.aliases) + 1)]
        self._uses = [self._classes[alias] for alias in self.aliases]

    def lend(self, ids: Sequence[Ids]) -> None:
        """Count one more reader of each block.

        Raises:
            BlockIdsInvalid: a block is receiving, or still quarantined.
        """
        present = present_of(ids)
        with self._lock:
            for uses, blocks in zip(self._uses, present, strict=True):
                if uses.receives(blocks):
                    self._refuse(present, _receives, "cannot be offered: it is still the target of a pull", QUIESCED)
            for uses, blocks in zip(self._uses, present, strict=True):
                uses.add(blocks, 1)

    def end_loan(self, ids: Sequence[Ids]) -> None:
        """Count one reader less of each block."""
        present = present_of(ids)
        with self._lock:
            for uses, blocks in zip(self._uses, present, strict=True):
                uses.add(blocks, -1)

    def receive(self, ids: Sequence[Ids]) -> None:
        """Let each block be written into, by one pull.

        Raises:
            BlockIdsInvalid: a block is receiving for another pull, still quarantined, or lent.
        """
        present = present_of(ids)
        with self._lock:
            for uses, blocks in zip(self._uses, present, strict=True):
                if uses.any(blocks):
                    self._refuse_targets(present)
            for uses, blocks in zip(self._uses, present, strict=True):
                uses.receive(blocks)

    def end_receipt(self, ids: Sequence[Ids]) -> None:
        """Note that nothing writes into these blocks any more."""
        present = present_of(ids)
        with self._lock:
            for uses, blocks in zip(self._uses, present, strict=True):
                uses.end_receipt(blocks)

    def check(
        self,
        *,
        lent: Iterable[Sequence[Ids]] | None = None,
        receiving: Iterable[Sequence[Ids]] | None = None,
    ) -> None:
        """Check the law: what is counted is exactly what these leases, or these destinations, hold."""
        with self._lock:
            counted = np.stack([uses.array for uses in self._classes])
        lost = "references were lost or given back twice"
        if lent is not None:
            readers = self._sum(lent)
            assert not readers[counted == RECEIVING].any(), "a block is lent and receives"
            assert np.array_equal(readers, np.maximum(counted, 0)), lost
        if receiving is not None:
            assert np.array_equal(self._sum(receiving), counted == RECEIVING), lost

    def _sum(self, held: Iterable[Sequence[Ids]]) -> Int64s:
        summed = np.zeros((len(self._classes), len(self._classes[0].array)), np.int64)
        for ids in held:
            for alias, blocks in zip(self.aliases, present_of(ids), strict=True):
                np.add.at(summed[alias], np.asarray(blocks, np.int64), 1)
        return summed

    def _refuse_targets(self, present: Sequence[Ids]) -> None:
        """Say which block cannot be written into, and why."""
        self._refuse(present, _receives, "is still the target of another pull", "Wait for quiesced() of that pull")
        self._refuse(present, _is_lent, "is on offer, and peers may be reading it", "Wait until its leases have ended")

    def _refuse(self, present: Sequence[Ids], is_busy: Callable[[int], bool], words: str, remedy: str) -> None:
        for group, (uses, blocks) in enumerate(zip(self._uses, present, strict=True)):
            for block in blocks:
                if is_busy(uses.numbers[block]):
                    raise BlockIdsInvalid(
                        f"group {group}: block {block} {words}",
                        group=group,
                        remedy=f"{remedy} before reusing its blocks.",
                    )


class _Uses:
    """How each block of one class is used: its number of readers, or ``RECEIVING``. It cannot be both.

    Attributes:
        numbers: of which Python reads single ones fast.
        array: the same memory, for many at once.
    """

    def __init__(self, num_blocks: int) -> None:
        self.numbers = array("q", bytes(8 * num_blocks))
        self.array: Int64s = np.asarray(self.numbers).view(np.int64)  # a ``longlong`` adds slowly

    def any(self, blocks: Ids) -> bool:
        """Tell whether one is used."""
        if isinstance(blocks, list):
            numbers = self.numbers
            for block in blocks:  # noqa: SIM110 - a generator takes twice as long
                if numbers[block]:
                    return True
            return False
        return bool(self.array[blocks].any())

    def receives(self, blocks: Ids) -> bool:
        """Tell whether one receives."""
        if isinstance(blocks, list):
            numbers = self.numbers
            for block in blocks:  # noqa: SIM110 - a generator takes twice as long
                if numbers[block] < 0:
                    return True
            return False
        return bool((self.array[blocks] < 0).any())

    def add(self, blocks: Ids, readers: int) -> None:
        """Count readers."""
        if isinstance(blocks, list):
            numbers = self.numbers
            for block in blocks:
                left = numbers[block] + readers
                assert left >= 0, "a loan ended twice"
                numbers[block] = left
        else:
            np.add.at(self.array, blocks, readers)
            assert (self.array[blocks] >= 0).all(), "a loan ended twice"

    def receive(self, blocks: Ids) -> None:
        """Note that they receive."""
        if isinstance(blocks, list):
            numbers = self.numbers
            for block in blocks:
                numbers[block] = RECEIVING
        else:
            self.array[blocks] = RECEIVING

    def end_receipt(self, blocks: Ids) -> None:
        """Note that they do not receive any more."""
        if isinstance(blocks, list):
            numbers = self.numbers
            for block in blocks:
                assert numbers[block] == RECEIVING, "a block was given back twice"
                numbers[block] = 0
        else:
            assert (self.array[blocks] == RECEIVING).all(), "a block was given back twice"
            self.array[blocks] = 0


def _receives(number: int) -> bool:
    return number < 0


def _is_lent(number: int) -> bool:
    return number > 0


def present_of(ids: Sequence[Ids]) -> list[Ids]:
    """Return the blocks of each group that are not absent."""
    return [
        ([block for block in each if block >= 0] if ABSENT in each else each)
        if isinstance(each, list)
        else each[each >= 0]
        for each in ids
    ]
