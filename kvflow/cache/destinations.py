"""Destination blocks: which of our blocks something may write into, until it is known to be done.

A block is in at most one destination. It is *receiving* from the submission of a pull, *quarantined* when the
pull has ended while something may still write, and leaves the ledger when the transfer is quiescent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from kvflow.cache.blocks import BlockAccount, Int64s


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
        aliases: alias class of each group.
    """

    def __init__(self, account: BlockAccount) -> None:
        self.aliases = account.aliases
        self._account = account
        self._open: dict[int, _Destination] = {}

    def __len__(self) -> int:
        return len(self._open)

    def take(self, pull_id: int, ids: Sequence[Int64s]) -> None:
        """Take blocks for one pull; all or none.

        Args:
            pull_id: names the destination.
            ids: checked block ids, one array per group.

        Raises:
            BlockIdsInvalid: a block is a target of another pull, still quarantined, or on offer.
        """
        self._account.receive(ids)
        self._open[pull_id] = _Destination(tuple(ids))

    def quarantine(self, pull_id: int, reason: str, now: float) -> None:
        """Note that the pull has ended, but not its writes."""
        destination = self._open[pull_id]
        destination.reason, destination.since = reason, now

    def give_back(self, pull_id: int) -> None:
        """Give back the blocks of a pull that is quiescent."""
        self._account.end_receipt(self._open.pop(pull_id).ids)

    def quarantined(self) -> list[Quarantined]:
        """List what is in quarantine."""
        return [
            Quarantined(pull_id, entry.reason, entry.since, sum(int((array >= 0).sum()) for array in entry.ids))
            for pull_id, entry in self._open.items()
            if entry.reason
        ]

    def check(self) -> None:
        """Check the law: what receives is exactly the sum of the open destinations."""
        self._account.check(receiving=[entry.ids for entry in self._open.values()])
