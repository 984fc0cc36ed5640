"""How far a peer's wall clock is ahead of ours, from questions that it answered with its own time.

Its answer was written at some moment between our question and its arrival. Taking the middle is wrong by half of
the round trip at most, so the shortest of the last round trips says it best.
"""

from collections import deque

from msgspec import Struct

SAMPLES_MAX = 8
"""Round trips that are remembered. Older ones say how far the clocks were apart before they drifted."""


class ClockOffset(Struct, frozen=True):
    """One estimate.

    Attributes:
        ahead_s: seconds by which the peer's wall clock is ahead of ours.
        error_s: by how much that may be wrong, either way.
    """

    ahead_s: float
    error_s: float


class OffsetFilter:
    """The last round trips with one peer.

    Attributes:
        best: the estimate of the shortest round trip; None before the first. Each pull asks for it.
    """

    def __init__(self) -> None:
        self._samples: deque[ClockOffset] = deque(maxlen=SAMPLES_MAX)
        self.best: ClockOffset | None = None

    def add(self, *, asked_at: float, answered_at: float, clock_s: float) -> None:
        """Record one round trip.

        Args:
            asked_at: our wall clock when the question left.
            answered_at: our wall clock when the answer was here.
            clock_s: what the peer's wall clock showed in between.
        """
        self._samples.append(ClockOffset(clock_s - (asked_at + answered_at) / 2, (answered_at - asked_at) / 2))
        self.best = min(self._samples, key=lambda sample: sample.error_s)
