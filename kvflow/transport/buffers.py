"""Staging buffers: who has which, and the law that none is lost. Pure.

A buffer is taken by one chunk when it is posted, and given back when the chunk is terminal: scattered, failed or
dropped. A chunk of a hung peer is not, so that its buffer stays taken. That is the quarantine of staging.
"""


class Buffers:
    """The staging buffers of one transport, by number. Thread: one only.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count))
        self._taken: dict[int, int] = {}

    @property
    def has_free(self) -> bool:
        """Whether ``take`` would give one."""
        return bool(self._free)

    @property
    def taken(self) -> dict[int, int]:
        """Buffer -> the read whose chunk has it."""
        return dict(self._taken)

    def take(self, read_id: int) -> int:
        """Give a free buffer to a chunk of this read: the one that came back last, of which most is in a cache."""
        buffer = self._free.pop()
        self._taken[buffer] = read_id
        return buffer

    def give_back(self, buffer: int) -> None:
        """Note that nothing reads or writes the buffer any more."""
        del self._taken[buffer]
        self._free.append(buffer)

    def check(self) -> None:
        """Check that each buffer is either free or taken, and only once."""
        assert sorted([*self._free, *self._taken]) == list(range(self._count)), (
            "a staging buffer is lost, or there twice"
        )
