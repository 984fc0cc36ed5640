"""A transport without the fence: to measure what the fence costs, and to show that the proofs with it can fail.

No setting leads here. What is read through it may be another request's bytes.
"""

from typing import Any, cast

import msgspec

from kvflow.transport.base import Fence, FenceFailed, FenceJudged, Read, ReadCompleted, ReadFailed, Sink, Transport
from kvflow.transport.base import TransportEvent as Event
from kvflow.transport.factory import create_transport


class Fenceless:
    """Wraps a transport: reads are real, and of every epoch it says what the ticket says, without a look at it.

    Args:
        sink: takes the events, on the owner thread.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._transports: list[Transport] = []  # one, once it is wrapped
        # Written before a read is posted, and taken when one ends, on the owner thread: no lock, which would cost time.
        self._waiting: dict[int, tuple[Fence, ...]] = {}
        self._open: set[int] = set()

    def wrap(self, transport: Transport) -> None:
        """Take the transport, whose sink is ``on_event``."""
        self._transports.append(transport)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transports[0], name)

    def post(self, read: Read) -> None:
        """Post a read without its fences and looks."""
        self._open.add(read.read_id)
        if read.fences:
            self._waiting[read.read_id] = read.fences
        for look in read.looks:
            self._sink(FenceJudged(look.fence_id, look.epoch, 0.0))
        self._transports[0].post(msgspec.structs.replace(read, fences=(), looks=()))

    def on_event(self, event: Event) -> None:
        """Pass an event on, and judge the fences that are due with it."""
        self._sink(event)
        if isinstance(event, ReadCompleted | ReadFailed):
            self._open.discard(event.read_id)
            for read_id in [*self._waiting]:
                for fence in self._waiting[read_id]:
                    self._judge(read_id, fence, event)

    def _judge(self, read_id: int, fence: Fence, ended: ReadCompleted | ReadFailed) -> None:
        after = {*fence.after, read_id}
        if isinstance(ended, ReadFailed) and ended.read_id in after:
            self._sink(FenceFailed(fence.fence_id, ended.code, ended.detail))
        elif after & self._open:
            return
        else:
            self._sink(FenceJudged(fence.fence_id, fence.epoch, 0.0))
        left = tuple(other for other in self._waiting.get(read_id, ()) if other is not fence)
        if left:
            self._waiting[read_id] = left
        else:
            self._waiting.pop(read_id, None)


def open_fenceless(name: str, agent_name: str, sink: Sink, staging_bytes: int = 0) -> Transport:
    """Construct one, in place of ``create_transport``."""
    fenceless = Fenceless(sink)
    fenceless.wrap(create_transport(name, agent_name, fenceless.on_event, staging_bytes))
    return cast("Transport", fenceless)
