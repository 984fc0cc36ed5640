"""When quarantined blocks have to be freed by force.

Most of what is quarantined ends by itself: its reads land, fail, or die with their peer. What a peer that hangs has in
flight may end never. It is ended by destroying the agent that reads, which costs every peer a pause: the last resort.
Staging buffers are as good as blocks here: once all are in quarantine, no healthy peer can be read through them.
"""

from msgspec import Struct

from kvflow.cache.destinations import Standing
from kvflow.config import QuarantineLimits

STARVED_S_MAX = 5.0
"""How long peers may wait for a staging buffer while all are in quarantine. Who holds them was given up, or whoever
wanted the bytes has gone; a buffer of 8 MiB that still comes takes 5 s at 13 Mbit/s."""

DUE_AFTER_S = 5.0
"""Blocks that have been in quarantine for less count for no limit of bytes: the last chunks of a long prompt that was
cancelled land by themselves. More than the two seconds that a reset gives healthy peers to land what they have."""


class Demand(Struct, frozen=True):
    """Why the reader is to be reset.

    Attributes:
        setting: the limit that was exceeded, ``quarantine_bytes_max`` or ``quarantine_s_max``; ``staging_bytes`` if all
            staging memory was in quarantine.
        num_blocks: in quarantine at that moment.
    """

    setting: str
    num_blocks: int


class LastResort:
    """Decide when the reader is reset, once at a time.

    Args:
        limits: of the quarantine.
        block_nbytes: bytes of one block, at most.
    """

    def __init__(self, limits: QuarantineLimits, block_nbytes: int) -> None:
        self._limits = limits
        self._block_nbytes = block_nbytes
        self._demand: Demand | None = None
        self._starved_since: float | None = None

    def due(self, standing: Standing, now: float, *, starved: bool = False) -> bool:
        """Tell whether to reset the reader now; False while that is under way.

        Args:
            standing: what is in quarantine; blocks that have been there for ``DUE_AFTER_S`` are lasting.
            now: on the clock of the quarantine.
            starved: whether peers wait for a staging buffer while every one is in quarantine.
        """
        if not starved:
            self._starved_since = None
        elif self._starved_since is None:
            self._starved_since = now
        if self._demand is not None:
            return False
        num_blocks = standing.num_blocks
        if standing.lasting_blocks * self._block_nbytes > self._limits.quarantine_bytes_max:
            self._demand = Demand("quarantine_bytes_max", num_blocks)
        elif standing.since is not None and now - standing.since > self._limits.quarantine_s_max:
            self._demand = Demand("quarantine_s_max", num_blocks)
        elif self._starved_since is not None and now - self._starved_since > STARVED_S_MAX:
            self._demand = Demand("staging_bytes", num_blocks)
        return self._demand is not None

    def ended(self) -> Demand:
        """Note that the reset is over, and return why it was wanted."""
        demand, self._demand = self._demand, None
        assert demand is not None, "nothing asked for a reset"
        return demand
