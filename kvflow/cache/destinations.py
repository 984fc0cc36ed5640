"""Destination blocks: which of our blocks something may write into, until it is known to be done.

A block is in at most one destination. It is *receiving* from the submission of a pull, *quarantined* when the
pull has ended while something may still write, and leaves the ledger when the transfer is quiescent.
"""

from collections import OrderedDict
from collections.abc import Sequence

from msgspec import Struct

from kvflow.cache.blocks import BlockAccount, Ids, present_of


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


class Standing(Struct, frozen=True):
    """What is in quarantine, in sum.

    Attributes:
        num_blocks: blocks in quarantine.
        lasting_blocks: of these, blocks that have been there for longer than was asked about.
        since: when the oldest came, on the worker's clock; None if there is none.
    """

    num_blocks: int = 0
    lasting_blocks: int = 0
    since: float | None = None


class DestinationLedger:
    """Every block that a pull may write into.

    Attributes:
        aliases: alias class of each group.
    """

    def __init__(self, account: BlockAccount) -> None:
        self.aliases = account.aliases
        self._account = account
        self._open: dict[int, Sequence[Ids]] = {}
        # The oldest first: what has just come, and what was found to have been there for long.
        self._fresh = _Quarantine()
        self._lasting = _Quarantine()

    def __len__(self) -> int:
        return len(self._open)

    def take(self, pull_id: int, ids: Sequence[Ids]) -> None:
        """Take blocks for one pull; all or none.

        Args:
            pull_id: names the destination.
            ids: checked block ids, one ``Ids`` per group.

        Raises:
            BlockIdsInvalid: a block is a target of another pull, still quarantined, or on offer.
        """
        self._account.receive(ids)
        self._open[pull_id] = ids

    def quarantine(self, pull_id: int, reason: str, now: float) -> None:
        """Note that the pull has ended, but not its writes."""
        num_blocks = sum(map(len, present_of(self._open[pull_id])))
        self._fresh.add(Quarantined(pull_id, reason, now, num_blocks))

    def give_back(self, pull_id: int) -> None:
        """Give back the blocks of a pull that is quiescent."""
        self._account.end_receipt(self._open.pop(pull_id))
        if self._fresh.entries or self._lasting.entries:
            self._fresh.remove(pull_id)
            self._lasting.remove(pull_id)

    def quarantined(self) -> list[Quarantined]:
        """List what is in quarantine, the oldest first."""
        return [*self._lasting.entries.values(), *self._fresh.entries.values()]

    def standing(self, now: float, lasting_s: float) -> Standing:
        """Sum up what is in quarantine, without going through all of it.

        Args:
            now: on the worker's clock; it never goes back.
            lasting_s: seconds after which blocks count as lasting, the same in every call.
        """
        while (entry := self._fresh.oldest()) is not None and now - entry.since > lasting_s:
            self._fresh.remove(entry.pull_id)
            self._lasting.add(entry)
        oldest = self._lasting.oldest() or self._fresh.oldest()
        return Standing(
            num_blocks=self._fresh.num_blocks + self._lasting.num_blocks,
            lasting_blocks=self._lasting.num_blocks,
            since=None if oldest is None else oldest.since,
        )

    def check(self) -> None:
        """Check the law: what receives is exactly the sum of the open destinations."""
        self._account.check(receiving=self._open.values())


class _Quarantine:
    """Some of what is in quarantine, the oldest first, and its blocks."""

    def __init__(self) -> None:
        self.entries: OrderedDict[int, Quarantined] = OrderedDict()
        self.num_blocks = 0

    def add(self, entry: Quarantined) -> None:
        self.entries[entry.pull_id] = entry
        self.num_blocks += entry.num_blocks

    def remove(self, pull_id: int) -> None:
        entry = self.entries.pop(pull_id, None)
        if entry is not None:
            self.num_blocks -= entry.num_blocks

    def oldest(self) -> Quarantined | None:
        return next(iter(self.entries.values()), None)
