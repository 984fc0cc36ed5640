"""The epoch table: a small array of u64 that peers read before and after the data.

One slot per lease. Epochs start at a random value per incarnation and only grow. While a lease is held its
slot equals the ticket's epoch; ending the lease raises the slot before the blocks go back to the engine.
"""

from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvflow.memory.mapping import map_bytes

EPOCH_BITS = 62  # epochs fit a signed 64-bit number. No worker lives for 2**62 leases.

EpochVerdict = Literal["held", "stale", "early"]


def judge(expected: int, observed: int) -> EpochVerdict:
    """Compare the epoch that a check has read with that of the ticket.

    ``held``: the bytes that were read before are right. ``stale``: the lease has ended. ``early``: it is not admitted.
    """
    if observed == expected:
        return "held"
    return "stale" if observed > expected else "early"


class EpochTable:
    """The slots of one worker, at first ``base``. A slot is one aligned 8-byte store: readers never see half of it.

    Attributes:
        array: uint64, shape (slots,), in separate pages: the memory that is registered and read by peers.
        numbers: the same memory, from which Python reads one number in a third of the time.
    """

    def __init__(self, slots: int, base: int, order_memory: Callable[[], object] = lambda: None) -> None:
        self._order_memory = order_memory
        self.array: npt.NDArray[np.uint64] = map_bytes(8 * slots).view(np.uint64)  # peers can read whole pages
        self.array[:] = base
        self.numbers = self.array.data
        self.base = base

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, slot: int) -> int:
        number: int = self.numbers[slot]
        return number

    @property
    def highest(self) -> int:
        """The highest epoch of any slot: a new issuer starts above it."""
        return int(self.array.max())

    def raise_all(self, epochs: Iterable[tuple[int, int]]) -> None:
        """Set slots to higher epochs.

        Peers see them after everything that was written before, and before everything that is written later:
        docs/explanation/correctness.md.
        """
        array, numbers = self.array, self.numbers
        self._order_memory()  # a reader that sees the lease held also sees its bytes
        for slot, epoch in epochs:
            assert epoch > numbers[slot], f"epoch of slot {slot} would not grow: {self[slot]} -> {epoch}"
            array[slot] = epoch
        self._order_memory()  # a reader that sees a later byte also sees the end of the lease
