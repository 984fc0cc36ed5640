"""Pulls that are not over: whose blocks may still be written to, and who waits until they may not."""

import asyncio
from collections import Counter

Waiters = dict[asyncio.Future[None], None]


class Unsettled:
    """The pulls of one worker, from the call to quiescence.

    Thread: the event loop.
    """

    def __init__(self) -> None:
        self._requests: dict[int, str] = {}
        self._pulls_of: Counter[str] = Counter()
        self._waiters: dict[str, Waiters] = {}
        self._idle: Waiters = {}

    def __len__(self) -> int:
        return len(self._requests)

    def begin(self, pull_id: int, request_id: str) -> None:
        """Note that a pull has been called."""
        self._requests[pull_id] = request_id
        self._pulls_of[request_id] += 1

    def end(self, pull_id: int) -> None:
        """Note that nothing writes for a pull any more, and tell whoever waits for that."""
        request_id = self._requests.pop(pull_id)
        self._pulls_of[request_id] -= 1
        if not self._pulls_of[request_id]:
            del self._pulls_of[request_id]
            _tell(self._waiters.pop(request_id, {}))
        if not self._requests:
            _tell(self._idle)
            self._idle = {}

    def requests(self) -> tuple[str, ...]:
        """Return the producers' names of what is pulled, one for each pull."""
        return tuple(self._requests.values())

    async def quiesced(self, request_id: str) -> None:
        """Wait until no pull of a request is left.

        Cancellation: safe.
        """
        if request_id in self._pulls_of:
            waiters = self._waiters.setdefault(request_id, {})
            try:
                await _wait_in(waiters)
            finally:
                if not waiters and self._waiters.get(request_id) is waiters:
                    del self._waiters[request_id]

    async def wait_idle(self) -> None:
        """Wait until no pull at all is left; of use when new ones are refused.

        Cancellation: safe.
        """
        if self._requests:
            await _wait_in(self._idle)


async def _wait_in(waiters: Waiters) -> None:
    """Wait to be told, and leave the table then: a caller that asks again and again must not fill it."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiters[waiter] = None
    try:
        await waiter
    finally:
        del waiters[waiter]


def _tell(waiters: Waiters) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
