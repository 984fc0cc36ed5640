"""Decide how many bytes of a peer to keep in flight, when to look for the end of a chunk, and who posts. Pure.

Over shared memory a post is the copy: nothing is in flight when it returns, and small chunks block the thread least. On
a network card or a GPU's copy engine, a post only queues work. A few chunks of 8 MiB then last for a fraction of a
millisecond. But a thread that computes in Python can keep the interpreter from the read thread for 5 ms or more, and
the link becomes idle. So the window of such a peer grows until the link stays busy between two polls, and shrinks to
what the link carries in ``HORIZON_S``. Times are seconds of a monotonic clock.
"""

from kvflow.reads.contract import CHUNK_BYTES_MAX, CHUNK_DESCRIPTORS_MAX, TURN_S_MAX, ReadEnded

HORIZON_S = 10e-3
"""How many seconds of the measured rate a window has: one or two turns of a busy interpreter. Urgent and cancelled
reads wait this long."""

WINDOW_MIN = 2 * CHUNK_BYTES_MAX
WINDOW_MAX = 2 << 30  # bytes in flight of one peer; the largest value is ``HORIZON_S`` at 200 GB/s

WINDOW_CHUNKS = 8  # of a full window: one then takes a millisecond or more, and one ends before the next poll
LARGE_CHUNK_BYTES_MAX = 256 << 20
CHUNKS_MAX = 64  # in flight of one peer: small reads of many lists do not fill a window
ASYNCHRONOUS_POSTS = 3  # that must have returned in less than half of the time that their bytes took
REST_S_MAX = 0.1  # longest pause before an expected end
MEASURED_BYTES = 64 << 20  # after which the rate of a peer is known: 30 ms at 2 GB/s


HAND_OVER_WEIGHT = 0.25  # of the last hand-over


class HandOver:
    """What handing a read over to the idle read thread costs, as measured: ``seconds``. Thread: the event loop.

    It is the time until the loop has the answer, without that in which the read was made. A read that is expected to
    take less is made on the loop. It counts as half of a turn at most, and as that until it has been measured.
    """

    def __init__(self) -> None:
        self.seconds = TURN_S_MAX / 2
        self.read_id = -1  # of the read that measures it
        self._posted_at = 0.0

    def begin(self, read_id: int, now: float) -> None:
        """Take a read that was handed over alone, to an idle thread."""
        self.read_id, self._posted_at = read_id, now

    def end(self, ended: ReadEnded, now: float) -> None:
        """Take its end."""
        self.read_id = -1
        if ended.verdict == "held":
            made_s = ended.arrived_at + ended.fence_s - ended.started_at
            self.seconds += (min(TURN_S_MAX / 2, now - self._posted_at - made_s) - self.seconds) * HAND_OVER_WEIGHT


class Gauge:
    """Measures the rate of one peer, once, for the kinds of memory of its first chunk. Thread: one at a time.

    Chunks that were posted before the first one ended do not count: with them the connection is made.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.memories = ("", "")
        self._met_at: float | None = None
        self._closed_s = self._since = self._until = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in which a chunk was in flight, so that waiting for other peers does not count."""
        return self._closed_s + self._until - self._since

    def add(self, nbytes: int, posted_at: float, now: float, memories: tuple[str, str]) -> bool:
        """Count a chunk that has arrived. True: enough has been counted."""
        if self._met_at is None:
            self._met_at, self.memories = now, memories
        if posted_at < self._met_at or memories != self.memories:
            return False
        if posted_at > self._until:
            self._closed_s += self._until - self._since
            self._since = posted_at
        self._since, self._until = min(self._since, posted_at), now
        self.nbytes += nbytes
        return self.nbytes >= MEASURED_BYTES


class Pace:
    """The window of one peer, in bytes, and the most bytes and merged descriptors of one chunk. Thread: one at a time.

    A chunk has ``descriptors_max`` once the window has grown. ``bytes_per_s`` is the observed rate; 0: unknown.
    """

    def __init__(self, descriptors_max: int) -> None:
        self._descriptors_max = descriptors_max
        self._short_posts = 0
        self._landed = 0  # bytes that ended since ``_since``, while the link was never idle at a poll
        self._since = 0.0
        self._began_at = 0.0  # the latest time at which the oldest chunk began
        self._seen = False  # whether it was in flight at the last poll, or was just posted
        self.window, self.chunk_bytes, self.chunk_descriptors = WINDOW_MIN, CHUNK_BYTES_MAX, CHUNK_DESCRIPTORS_MAX
        self.bytes_per_s = 0.0
        self.bytes_in_flight = 0

    @property
    def asynchronous(self) -> bool:
        """Whether posts return long before their bytes have arrived."""
        return self._short_posts >= ASYNCHRONOUS_POSTS

    def has_room(self, chunks: int) -> bool:
        """Return whether one more chunk may be posted while ``chunks`` (two or more) are in flight."""
        return self.asynchronous and self.bytes_in_flight < self.window and chunks < CHUNKS_MAX

    def post(self, nbytes: int, now: float) -> None:
        """Record that a chunk was posted and is in flight."""
        if not self.bytes_in_flight:
            self._landed, self._since, self._began_at, self._seen = 0, now, now, True
        self.bytes_in_flight += nbytes

    def expected_at(self, nbytes: int) -> float:
        """Return when to poll the oldest chunk in flight; 0: now, as after an end: a late poll finds several."""
        if not (self._seen and self.bytes_per_s):
            return 0.0
        return self._began_at + nbytes / self.bytes_per_s

    def flies(self) -> None:
        """Record that the oldest chunk has not ended."""
        self._seen = True

    def end(self, nbytes: int, now: float, *, posted_at: float, post_s: float, waits: bool) -> None:
        """Record that a chunk has arrived, which was posted at ``posted_at`` in ``post_s``.

        ``waits``: whether more of this peer waits for its turn.
        """
        self.bytes_in_flight -= nbytes
        self._began_at, self._seen = now, False
        if not self.asynchronous:
            self._short_posts += 2 * post_s < now - posted_at
            return
        self._landed += nbytes
        took = max(now - self._since, 1e-9)
        if not self.bytes_in_flight:
            # The link may have been idle for some time, so this is a lower bound of its rate.
            self.bytes_per_s = max(self.bytes_per_s, self._landed / took)
            if waits:
                self._resize(2 * self.window)
        elif self._landed >= self.window:
            self.bytes_per_s = self._landed / took
            self._landed, self._since = 0, now
            # Shrink slowly: between two polls of a busy process the link may need more than the average.
            self._resize(max(int(self.bytes_per_s * HORIZON_S), self.window * 7 // 8))

    def drop(self, nbytes: int) -> None:
        """Record that a chunk has failed."""
        self.bytes_in_flight -= nbytes

    def _resize(self, window: int) -> None:
        self.window = min(max(window, WINDOW_MIN), WINDOW_MAX)
        self.chunk_bytes = min(max(self.window // WINDOW_CHUNKS, CHUNK_BYTES_MAX), LARGE_CHUNK_BYTES_MAX)
        self.chunk_descriptors = self._descriptors_max if self.window > WINDOW_MIN else CHUNK_DESCRIPTORS_MAX
