"""Workers without the fence, and workers that release nothing: to measure what both cost, and show what they are for.

They are made with the arguments that every worker takes, its transport and its network. What is read without the fence
may be another request's bytes, so that this is no part of the package.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from handshake.messages import Release
from handshake.network import DialledChannel, Network
from handshake.sockets import Delivery
from kvflow.config import WorkerConfig
from kvflow.ids import PeerId
from kvflow.transport.base import Fence, FenceFailed, FenceJudged, Read, ReadCompleted, ReadFailed, Sink, Transport
from kvflow.transport.base import TransportEvent as Event
from kvflow.worker.surroundings import REAL, OpenTransport, Surroundings

RELEASE = msgspec.msgpack.encode(str(Release.__struct_config__.tag))
"""The name of the message in its frame, near the beginning."""

HEAD_BYTES = 32


@dataclass
class LeftOut:
    """What a worker would have done otherwise.

    Attributes:
        fences: epochs that were not read.
        releases: messages that were not sent.
    """

    fences: int = 0
    releases: int = 0


def without_fence(surroundings: Surroundings = REAL, left_out: LeftOut | None = None) -> Surroundings:
    """Return surroundings whose transport says of every epoch what the ticket says, and reads none."""
    counts = LeftOut() if left_out is None else left_out

    def open_fenceless(config: WorkerConfig, agent_name: str, sink: Sink, staging_bytes: int = 0) -> Transport:
        fenceless = Fenceless(sink, counts)
        fenceless.wrap(surroundings.open_transport(config, agent_name, fenceless.on_event, staging_bytes))
        return cast("Transport", fenceless)

    return msgspec.structs.replace(surroundings, open_transport=cast("OpenTransport", open_fenceless))


def without_release(surroundings: Surroundings = REAL, left_out: LeftOut | None = None) -> Surroundings:
    """Return surroundings whose network forgets every message that releases leases."""
    counts = LeftOut() if left_out is None else left_out
    return msgspec.structs.replace(surroundings, network=cast("Network", _Unreleasing(surroundings.network, counts)))


class Fenceless:
    """Wraps a transport: reads are real, and fences and looks are judged here.

    Args:
        sink: takes the events, on the owner thread.
        left_out: counts what is not read.
    """

    def __init__(self, sink: Sink, left_out: LeftOut) -> None:
        self._sink = sink
        self._left_out = left_out
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
        self._left_out.fences += len(read.fences) + len(read.looks)
        if read.fences:
            self._waiting[read.read_id] = read.fences
        for look in read.looks:
            self._sink(FenceJudged(look.fence_id, look.epoch, 0.0))
        self._transports[0].post(msgspec.structs.replace(read, fences=(), looks=()))

    def look(self, peer: PeerId, fence: Fence) -> None:
        """Find every lease held."""
        self._left_out.fences += 1
        self._sink(FenceJudged(fence.fence_id, fence.epoch, 0.0))

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


class _Unreleasing:
    """Wraps a network, whose diallers forget releases."""

    def __init__(self, network: Network, left_out: LeftOut) -> None:
        self._network = network
        self._left_out = left_out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    @asynccontextmanager
    async def open_dialler(self, *arguments: Any) -> AsyncIterator[DialledChannel]:
        dialler: AbstractAsyncContextManager[DialledChannel] = self._network.open_dialler(*arguments)
        async with dialler as channel:
            yield cast("DialledChannel", _UnreleasingChannel(channel, self._left_out))


class _UnreleasingChannel:
    """Wraps a channel to a producer."""

    def __init__(self, channel: DialledChannel, left_out: LeftOut) -> None:
        self._channel = channel
        self._left_out = left_out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def send(self, frames: list[bytes]) -> Delivery:
        """Send a message unless it is a release; say that it was sent."""
        if RELEASE not in frames[0][:HEAD_BYTES]:
            return self._channel.send(frames)
        self._left_out.releases += 1
        return Delivery.QUEUED
