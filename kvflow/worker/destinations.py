"""Destination blocks: which of our blocks a read may write into, and when the reader is reset to free them.

A block is in at most one destination. It is *receiving* from the submission of a pull, *quarantined* when the pull has
ended while a read may still write, and leaves the table when the transfer is quiescent.

Most quarantined blocks become free automatically. Reads from a hung peer may never end. Resetting the reader ends them:
it destroys the agent that reads, and every peer pauses meanwhile. Staging buffers count like blocks: once all of them
are quarantined, nothing can be read through them.
"""

from collections import OrderedDict
from collections.abc import Sequence

from msgspec import Struct

from kvflow.config import Tuning
from kvflow.ids import Ids
from kvflow.leases.blocks import BlockAccount, present_of
from kvflow.validation import Count, Name, Number


class Quarantined(Struct, frozen=True):
    """Blocks that must not be reused yet.

    Attributes:
        pull_id: the pull that took them.
        reason: code of the failure that ended the pull.
        since: when the pull ended, on the worker's clock.
        num_blocks: number of blocks.
    """

    pull_id: Count
    reason: Name
    since: Number
    num_blocks: Count


class Standing(Struct, frozen=True):
    """The sum of all quarantined blocks, those that have been there for longer than ``lasting_s``, and since when."""

    num_blocks: int = 0
    lasting_blocks: int = 0
    since: float | None = None


class DestinationTable:
    """Every block that a pull may write into. ``aliases``: the alias class of each group."""

    def __init__(self, account: BlockAccount) -> None:
        self.aliases = account.aliases
        self._account = account
        self._open: dict[int, Sequence[Ids]] = {}
        # The oldest first: recent entries, and those that have passed ``lasting_s``.
        self._fresh = _Quarantine()
        self._lasting = _Quarantine()

    def __len__(self) -> int:
        return len(self._open)

    def take(self, pull_id: int, ids: Sequence[Ids]) -> None:
        """Take the checked blocks of one pull; all or none.

        Raises:
            BlockIdsInvalid: a block is a target of another pull, still quarantined, or on offer.
        """
        self._account.receive(ids)
        self._open[pull_id] = ids

    def quarantine(self, pull_id: int, reason: str, now: float) -> None:
        """Quarantine the blocks of a pull that has ended while a read may still write."""
        num_blocks = sum(map(len, present_of(self._open[pull_id])))
        self._fresh.add(Quarantined(pull_id, reason, now, num_blocks))

    def give_back(self, pull_id: int) -> None:
        """Return the blocks of a quiescent pull to the account."""
        self._account.end_receipt(self._open.pop(pull_id))
        if self._fresh.entries or self._lasting.entries:
            self._fresh.remove(pull_id)
            self._lasting.remove(pull_id)

    def quarantined(self) -> list[Quarantined]:
        """Return what is in quarantine, the oldest first."""
        return [*self._lasting.entries.values(), *self._fresh.entries.values()]

    def standing(self, now: float, lasting_s: float) -> Standing:
        """Sum up what is in quarantine, without visiting every entry.

        ``now`` is never less than in an earlier call, and ``lasting_s`` is the same in every call.
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
        """Check the invariant: the receiving blocks are exactly those of the open destinations."""
        self._account.check(receiving=self._open.values())


class _Quarantine:
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


STARVED_S_MAX = 5.0
"""How long peers may wait for a staging buffer while all are quarantined: a buffer of 8 MiB takes 5 s at 13 Mbit/s."""

DUE_AFTER_S = 5.0
"""Blocks that were quarantined more recently do not count against the limit of bytes: the last chunks of a cancelled
pull arrive without a reset. The value exceeds the two seconds that a reset gives healthy peers to complete reads."""


class ResetReason(Struct, frozen=True):
    """The setting whose limit was exceeded, and the number of blocks in quarantine."""

    setting: str
    num_blocks: int


class ReaderResetPolicy:
    """Decide when the reader is reset; at most one reset at a time."""

    def __init__(self, limits: Tuning, block_nbytes: int) -> None:
        self._limits = limits
        self._block_nbytes = block_nbytes
        self._reason: ResetReason | None = None
        self._starved_since: float | None = None

    def due(self, standing: Standing, now: float, *, starved: bool = False) -> bool:
        """Return whether to reset the reader now; False while a reset is under way.

        ``starved``: whether peers wait for a staging buffer while every one is quarantined.
        """
        if not starved:
            self._starved_since = None
        elif self._starved_since is None:
            self._starved_since = now
        if self._reason is not None:
            return False
        num_blocks = standing.num_blocks
        if standing.lasting_blocks * self._block_nbytes > self._limits.quarantine_bytes_max:
            self._reason = ResetReason("quarantine_bytes_max", num_blocks)
        elif standing.since is not None and now - standing.since > self._limits.quarantine_s_max:
            self._reason = ResetReason("quarantine_s_max", num_blocks)
        elif self._starved_since is not None and now - self._starved_since > STARVED_S_MAX:
            self._reason = ResetReason("staging_bytes", num_blocks)
        return self._reason is not None

    def ended(self) -> ResetReason:
        """Note that the reset has ended, and return its reason."""
        reason, self._reason = self._reason, None
        assert reason is not None, "nothing asked for a reset"
        return reason
