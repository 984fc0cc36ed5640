"""Arithmetic: what a peer may send per second and leave unread, pauses after failures, how far two clocks are apart."""

from collections import deque

from msgspec import Struct

from handshake.limits import Limits

BURST_S = 1.0  # after a second of silence, a second's worth may come at once
SAMPLES_MAX = 8  # round trips that count: clocks drift
PINGS_MIN = 8  # in as many bytes as may be unread: a client that reads is a round trip behind


class Bucket:
    """Tokens that come back at a constant rate. At most ``at_once`` are there: without it, those of ``BURST_S``."""

    def __init__(self, per_s: float, now: float, at_once: float | None = None) -> None:
        self._per_s = per_s
        self._held = self._held_max = per_s * BURST_S if at_once is None else at_once
        self._filled_at = now

    def take(self, tokens: float, now: float) -> bool:
        """Take tokens; False, and nothing is taken, if there are too few."""
        self._held = min(self._held_max, self._held + (now - self._filled_at) * self._per_s)
        self._filled_at = now
        if tokens > self._held:
            return False
        self._held -= tokens
        return True


class Allowance:
    """What one key, or one connection where all share a key, may send: messages, leases that they name, questions.

    ``reports``: questions for a report; ``questions``: others.
    """

    def __init__(self, limits: Limits, now: float) -> None:
        self.messages = Bucket(limits.messages_per_s_max, now)
        self.leases = Bucket(limits.leases_per_s_max, now)
        self.reports = Bucket(limits.reports_per_s_max, now)
        self.questions = Bucket(limits.questions_per_s_max, now)


class Unread:
    """The bytes of answers that a client has not read: it reads in order, so its answer to a ping shows how far."""

    def __init__(self, nbytes_max: int) -> None:
        self._nbytes_max = nbytes_max
        self._nbytes = self._at_ping = 0  # now, and at a ping that is not answered
        self._nonce = 0

    def add(self, nbytes: int) -> bool:
        """Count an answer; return whether that is too much."""
        self._nbytes += nbytes
        return self._nbytes > self._nbytes_max

    @property
    def wants_ping(self) -> bool:
        """Whether the client should show how far it has read."""
        return not self._at_ping and self._nbytes * PINGS_MIN > self._nbytes_max

    def on_ping(self) -> int:
        """Return the nonce of the next ping."""
        self._at_ping = self._nbytes
        self._nonce += 1
        return self._nonce

    def on_pong(self, nonce: int) -> bool:
        """Return whether this answers the last ping, and count what it shows."""
        if nonce != self._nonce:
            return False
        self._nbytes -= self._at_ping
        self._at_ping = 0
        return True


def pause_s(attempt: int, first_s: float, longest_s: float, draw: float = 1.0) -> float:
    """Return the seconds to wait after a failure: doubled with each attempt, and half of it random.

    Args:
        attempt: the one that failed, counted from 0.
        first_s: the longest pause after the first.
        longest_s: the longest of all.
        draw: a random number in [0, 1], so that many that failed together do not return together; 1 waits in full.
    """
    doublings = min(max(attempt, 0), 32)
    return float(min(longest_s, first_s * 2**doublings) * (0.5 + draw / 2))


class ClockOffset(Struct, frozen=True):
    """An estimate of the difference of two wall clocks."""

    ahead_s: float  # seconds by which the peer's is ahead of ours
    error_s: float  # largest error of ``ahead_s``, either way


class OffsetFilter:
    """Estimates ``best`` from questions that a peer answered with its own time; None before the first.

    Each answer was written between our question and its arrival. The middle is wrong by half of the round trip at most,
    so the shortest of the last round trips counts. ``wall_ahead_s``: of our wall clock, to the monotonic one.
    """

    def __init__(self, wall_ahead_s: float = 0.0) -> None:
        self._wall_ahead_s = wall_ahead_s
        self._samples: deque[ClockOffset] = deque(maxlen=SAMPLES_MAX)
        self.best: ClockOffset | None = None

    def wall(self, now: float) -> float:
        """Return what our wall clock shows at ``now``."""
        return now + self._wall_ahead_s

    def add(self, *, asked_at: float, answered_at: float, clock_s: float) -> None:
        """Record one round trip: our monotonic clock at question and answer, and the peer's wall clock in between."""
        middle_s = self.wall((asked_at + answered_at) / 2)
        self._samples.append(ClockOffset(clock_s - middle_s, (answered_at - asked_at) / 2))
        self.best = min(self._samples, key=lambda sample: sample.error_s)
