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
        with self._lock:
            for uses, blocks in zip(self._uses, ids, strict=True):
                if uses.least(blocks) < 0:
                    self._refuse(ids, _receives, "cannot be offered: it is still the target of a pull", QUIESCED)
            for uses, blocks in zip(self._uses, ids, strict=True):
                uses.add(blocks, 1)

    def end_loan(self, ids: Sequence[Ids]) -> None:
        """Count one reader less of each block."""
        with self._lock:
            for uses, blocks in zip(self._uses, ids, strict=True):
                uses.add(blocks, -1)

    def receive(self, ids: Sequence[Ids]) -> None:
        """Let each block be written into, by one pull.

        Raises:
            BlockIdsInvalid: a block is receiving for another pull, still quarantined, or lent.
        """
        with self._lock:
            for uses, blocks in zip(self._uses, ids, strict=True):
                few = isinstance(blocks, list)
                if any(map(uses.number_of, blocks)) if few else np.count_nonzero(uses.array[blocks]):
                    self._refuse_targets(ids)
            for uses, blocks in zip(self._uses, ids, strict=True):
                uses.put(blocks, RECEIVING)

    def end_receipt(self, ids: Sequence[Ids]) -> None:
        """Note that nothing writes into these blocks any more."""
        with self._lock:
            for uses, blocks in zip(self._uses, ids, strict=True):
                # No number is less than RECEIVING, so that the sum tells whether all are that. Absent blocks are 0.
                if isinstance(blocks, list):
                    right = sum(map(uses.number_of, blocks)) == RECEIVING * (len(blocks) - blocks.count(ABSENT))
                else:
                    others = np.count_nonzero(uses.array[blocks] - RECEIVING)
                    right = not others or others == np.count_nonzero(blocks < 0)
                assert right, "a block was given back twice"
                uses.put(blocks, 0)

    def check(
        self,
        *,
        lent: Iterable[Sequence[Ids]] | None = None,
        receiving: Iterable[Sequence[Ids]] | None = None,
    ) -> None:
        """Check the law: what is counted is exactly what these leases, or these destinations, hold."""
        lost = "references were lost or given back twice"
        with self._lock:
            counted = [uses.array.copy() for uses in self._classes]
        if lent is not None:
            for numbers, readers in zip(counted, self._sum(lent), strict=True):
                if (readers != np.maximum(numbers, 0)).any():
                    receives = readers[numbers == RECEIVING].any()
                    raise AssertionError("a block is lent and receives" if receives else lost)
        if receiving is not None:
            for numbers, writers in zip(counted, self._sum(receiving), strict=True):
                assert (writers == (numbers == RECEIVING)).all(), lost

    def _sum(self, held: Iterable[Sequence[Ids]]) -> list[Int64s]:
        """Return how often each block of each class is held."""
        listed: list[list[int]] = [[] for _ in self._classes]
        for ids in held:
            for alias, blocks in zip(self.aliases, present_of(ids), strict=True):
                listed[alias] += blocks if isinstance(blocks, list) else blocks.tolist()
        return [
            np.bincount(np.array(blocks, np.int64), minlength=len(uses.array))
            for blocks, uses in zip(listed, self._classes, strict=True)
        ]

    def _refuse_targets(self, ids: Sequence[Ids]) -> None:
        """Say which block cannot be written into, and why."""
        self._refuse(ids, _receives, "is still the target of another pull", "Wait for quiesced() of that pull")
        self._refuse(ids, _is_lent, "is on offer, and peers may be reading it", "Wait until its leases have ended")

    def _refuse(self, ids: Sequence[Ids], is_busy: Callable[[int], bool], words: str, remedy: str) -> None:
        for group, (uses, blocks) in enumerate(zip(self._uses, ids, strict=True)):
            for block in blocks:
                if is_busy(uses.numbers[block]):
                    raise BlockIdsInvalid(
                        f"group {group}: block {block} {words}",
                        group=group,
                        remedy=f"{remedy} before reusing its blocks.",
                    )


class _Uses:
    """How each block of one class is used: its number of readers, or ``RECEIVING``. It cannot be both.

    The number of an absent block, -1, is the last one. It stays 0.

    Attributes:
        numbers: of which Python reads single ones fast.
        number_of: reads one.
        array: the same memory, for many at once.
    """

    def __init__(self, num_blocks: int) -> None:
        self.numbers = array("q", bytes(8 * (num_blocks + 1)))
        self.number_of = self.numbers.__getitem__
        self.array: Int64s = np.frombuffer(self.numbers, np.int64)  # a ``longlong`` adds slowly

    def least(self, blocks: Ids) -> int:
        """Return the least of their numbers, or 0."""
        if isinstance(blocks, list):
            return min(map(self.number_of, blocks), default=0)
        return int(self.array[blocks].min(initial=0))

    def add(self, blocks: Ids, readers: int) -> None:
        """Count readers."""
        numbers = self.numbers
        if isinstance(blocks, list):
            for block in blocks:
                if block >= 0:
                    left = numbers[block] + readers
                    assert left >= 0, "a loan ended twice"
                    numbers[block] = left
        else:
            np.add.at(self.array, blocks, readers)
            numbers[ABSENT] = 0
            assert self.least(blocks) >= 0, "a loan ended twice"

    def put(self, blocks: Ids, number: int) -> None:
        """Give them this number."""
        numbers = self.numbers
        if isinstance(blocks, list):
            for block in blocks:
                numbers[block] = number
        else:
            self.array[blocks] = number
        numbers[ABSENT] = 0


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
