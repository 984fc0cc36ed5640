"""Which blocks of the host buffer belong to which request. Thread: the scheduler's.

All ranks use the same ones. A request has as many as blocks of the device that it offers or loads, for as long.
"""

from collections.abc import Iterable

from kvflow.errors import CapacityExceeded, DefectFound
from kvflow.integrations.vllm.messages import BlockIds

RESOURCE = "blocks of the host buffer"

User = tuple[str, str]
"""``load`` or ``offer``, and the name of the request."""


class HostBlocks:
    """The blocks of a host buffer, free ones and those of requests."""

    def __init__(self) -> None:
        self._num_blocks = 0
        self._free: list[int] = []
        self._taken: dict[User, list[int]] = {}
        self._waiting: dict[User, None] = {}

    @property
    def num_blocks(self) -> int:
        """How many there are; 0 before the ranks have reported."""
        return self._num_blocks

    def meet(self, num_blocks: Iterable[int]) -> None:
        """Take how many blocks each rank has. Only the first report counts: a buffer stays while an engine sleeps."""
        if not self._num_blocks:
            self._num_blocks = min(num_blocks, default=0)
            self._free = list(range(self._num_blocks))[::-1]

    def has_room(self, user: User, count: int) -> bool:
        """Tell whether a request can take so many blocks now. If not, those that ask later wait for it.

        Raises:
            CapacityExceeded: it never can.
        """
        if count > self._num_blocks:
            self._waiting.pop(user, None)
            raise _too_few(self._num_blocks, count)
        self._waiting[user] = None  # the first one keeps its place
        return next(iter(self._waiting)) == user and count <= len(self._free)

    def take(self, user: User, block_ids: BlockIds) -> BlockIds:
        """Give a request one block for each of the device's, and return them in the same places; -1 stays.

        Raises:
            CapacityExceeded: fewer are free. The request then has none.
            DefectFound: it has some already.
        """
        if user in self._taken:
            raise DefectFound(f"request {user[1]} has blocks of the host buffer already")
        count = sum(block >= 0 for ids in block_ids for block in ids)
        if count > len(self._free):
            raise _too_few(self._num_blocks, count)
        self._waiting.pop(user, None)
        at = len(self._free) - count
        taken, self._free = self._free[at:], self._free[:at]
        # The lowest ones come first: blocks that lie side by side are copied and read together.
        self._taken[user] = taken = sorted(taken)
        given = iter(taken)
        return tuple([tuple([next(given) if block >= 0 else block for block in ids]) for ids in block_ids])

    def give(self, user: User) -> None:
        """Take back the blocks of a request. It may have none, and waits for none any longer."""
        self._waiting.pop(user, None)
        self._free += self._taken.pop(user, [])[::-1]


def _too_few(num_blocks: int, count: int) -> CapacityExceeded:
    remedy = f"{count} are needed: raise host_buffer_bytes, which gives {num_blocks}."
    if not num_blocks:
        remedy = "No rank has reported its host buffer. Put KVFlowConnector first in connectors of MultiConnector."
    return CapacityExceeded(RESOURCE, num_blocks, remedy=remedy)
