"""The epoch table: a small array of u64 that peers read after the data.

One slot per lease. Epochs start at a random value per incarnation and only grow. While a lease is held its
slot equals the ticket's epoch; ending the lease raises the slot before the blocks go back to the engine.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

EPOCH_BITS = 62
"""Epochs stay below 2**63, so that they fit a signed 64-bit number anywhere; 2**62 leases never end."""

Verdict = Literal["held", "stale", "early"]


def judge(expected: int, observed: int) -> Verdict:
    """Compare what a fence read with what the ticket says.

    Returns:
        ``held``: the bytes read before are right. ``stale``: the lease has ended, deliver nothing.
        ``early``: the producer has not admitted the lease yet, wait and read the data again.
    """
    if observed == expected:
        return "held"
    return "stale" if observed > expected else "early"


class EpochTable:
    """The slots of one worker.

    Attributes:
        array: uint64, shape (slots,), 8-byte aligned: the memory that is registered and read by peers.
        base: value of every slot at the start.

    Thread: a slot is one aligned 8-byte store; readers never see half of it.
    """

    def __init__(self, slots: int, base: int) -> None:
        self.array: npt.NDArray[np.uint64] = np.full(slots, base, np.uint64)
        self.base = base

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, slot: int) -> int:
        return int(self.array[slot])

    @property
    def highest(self) -> int:
        """The highest epoch of any slot: a new mint starts above it."""
        return int(self.array.max())

    def raise_to(self, slot: int, epoch: int) -> None:
        """Set a slot to a higher epoch."""
        assert epoch > self[slot], f"epoch of slot {slot} would not grow: {self[slot]} -> {epoch}"
        self.array[slot] = epoch
