"""When quarantined blocks have to be freed by force.

Most of what is quarantined ends by itself: its reads land, fail, or die with their peer. What a peer that hangs has in
flight may end never. It is ended by destroying the agent that reads, which costs every peer a pause: the last resort.
"""

from collections.abc import Sequence

from msgspec import Struct

from kvflow.cache.destinations import Quarantined
from kvflow.config import QuarantineLimits


class Demand(Struct, frozen=True):
    """Why the reader is to be renewed.

    Attributes:
        setting: the limit that was exceeded, ``quarantine_bytes_max`` or ``quarantine_s_max``.
        num_blocks: in quarantine at that moment.
    """

    setting: str
    num_blocks: int


class LastResort:
    """Decide when the reader is renewed, once at a time.

    Args:
        limits: of the quarantine.
        block_nbytes: bytes of one block, at most.
    """

    def __init__(self, limits: QuarantineLimits, block_nbytes: int) -> None:
        self._limits = limits
        self._block_nbytes = block_nbytes
        self._demand: Demand | None = None

    def due(self, entries: Sequence[Quarantined], now: float) -> bool:
        """Tell whether to renew the reader now; False while that is under way.

        Args:
            entries: what is in quarantine.
            now: on the clock of the entries.
        """
        if not entries or self._demand is not None:
            return False
        num_blocks = sum(entry.num_blocks for entry in entries)
        if num_blocks * self._block_nbytes > self._limits.quarantine_bytes_max:
            self._demand = Demand("quarantine_bytes_max", num_blocks)
        elif now - min(entry.since for entry in entries) > self._limits.quarantine_s_max:
            self._demand = Demand("quarantine_s_max", num_blocks)
        return self._demand is not None

    def ended(self) -> Demand:
        """Note that the renewal is over, and return why it was wanted."""
        demand, self._demand = self._demand, None
        assert demand is not None, "nobody asked for a renewal"
        return demand
