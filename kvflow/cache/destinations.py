"""Destination blocks: which of our blocks something may write into, until it is known to be done.

A block is in at most one destination. It is *receiving* from the submission of a pull, *quarantined* when the
pull has ended while something may still write, and leaves the ledger when the transfer is quiescent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvflow.errors import BlockIdsInvalid

Int64s = npt.NDArray[np.int64]


class Quarantined(Struct, frozen=True):
    """Blocks that are kept from reuse.

    Attributes:
        pull_id: the pull that took them.
        reason: why the pull ended early.
        since: when, on the worker's clock.
        num_blocks: how many.
    """

    pull_id: int
    reason: str
    since: float
    num_blocks: int


@dataclass(slots=True)
class _Destination:
    ids: tuple[Int64s, ...]
    reason: str = ""
    since: float = 0.0


class DestinationLedger:
    """Every block that a pull may write into.

    Attributes:
        aliases: alias class of each group; groups of one class share bytes, and so share the ledger's rows.
    """

    def __init__(self, aliases: Sequence[int], num_blocks: int) -> None:
        self.aliases = tuple(aliases)
        self._taken = np.zeros((max(self.aliases) + 1, num_blocks), bool)
        self._open: dict[int, _Destination] = {}

    def __len__(self) -> int:
        return len(self._open)

    def take(self, pull_id: int, ids: Sequence[Int64s]) -> None:
        """Take blocks for one pull; all or none.

        Args:
            pull_id: names the destination.
            ids: checked block ids, one array per group.

        Raises:
            BlockIdsInvalid: a block is a target of another pull, or still quarantined.
        """
        present = tuple(array[array >= 0] for array in ids)
        for group, (alias, array) in enumerate(zip(self.aliases, present, strict=True)):
            busy = array[self._taken[alias, array]]
            if busy.size:
                raise BlockIdsInvalid(
                    f"group {group}: block {busy[0]} is still the target of another pull",
                    group=group,
                    remedy="Wait for worker.quiesced() of that pull before reusing its blocks.",
                )
        for alias, array in zip(self.aliases, present, strict=True):
            self._taken[alias, array] = True
        self._open[pull_id] = _Destination(present)

    def quarantine(self, pull_id: int, reason: str, now: float) -> None:
        """Note that the pull has ended, but not its writes."""
        destination = self._open[pull_id]
        destination.reason, destination.since = reason, now

    def give_back(self, pull_id: int) -> None:
        """Give back the blocks of a pull that is quiescent."""
        destination = self._open.pop(pull_id)
        for alias, array in zip(self.aliases, destination.ids, strict=True):
            assert self._taken[alias, array].all(), "a block was given back twice"
            self._taken[alias, array] = False

    def quarantined(self) -> list[Quarantined]:
        """List what is in quarantine."""
        return [
            Quarantined(pull_id, entry.reason, entry.since, sum(len(array) for array in entry.ids))
            for pull_id, entry in self._open.items()
            if entry.reason
        ]

    def check(self) -> None:
        """Check the law: what is taken is exactly the sum of the open destinations."""
        counted = np.zeros_like(self._taken, dtype=np.int64)
        for entry in self._open.values():
            for alias, array in zip(self.aliases, entry.ids, strict=True):
                np.add.at(counted[alias], array, 1)
        assert counted.max(initial=0) <= 1, "a block is in two destinations"
        assert np.array_equal(counted.astype(bool), self._taken), "taken blocks and destinations differ"
