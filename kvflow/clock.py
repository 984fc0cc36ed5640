"""Time as an argument: the protocol and the one real clock.

The pure packages never read a clock; a shell reads one and passes ``now``.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Tell the seconds of a monotonic clock with an arbitrary origin."""

    def __call__(self) -> float:
        """Return now, in seconds."""
        ...


monotonic: Clock = time.monotonic
