"""Workers without the fence, and workers that release nothing: to measure what both cost, and show what they are for.

They are made with the arguments that every worker takes, its transport and its network. What is read without the fence
may be another request's bytes, so that this is no part of the package.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from handshake.messages import Release
from handshake.sockets import Delivery, DialedChannel, Network
from kvflow.config import WorkerConfig
from kvflow.ids import PeerId
from kvflow.leases.tickets import LeaseName
from kvflow.reads.contract import Sink, Transport
from kvflow.reads.planes import PlaneBackends
from kvflow.reads.thread import ThreadedTransport
from kvflow.worker.environment import PRODUCTION, Environment, OpenTransport

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


def without_fence(environment: Environment = PRODUCTION, left_out: LeftOut | None = None) -> Environment:
    """Return environment whose transport says of every epoch what the ticket says, and reads none."""
    counts = LeftOut() if left_out is None else left_out

    def open_fenceless(config: WorkerConfig, agent_name: str, sink: Sink, staging_bytes: int = 0) -> Transport:
        transport = environment.open_transport(config, agent_name, sink, staging_bytes)
        assert isinstance(transport, ThreadedTransport)
        opened: Any = transport
        opened._open_planes = _without_checks(opened._open_planes, counts)
        return transport

    return msgspec.structs.replace(environment, open_transport=cast("OpenTransport", open_fenceless))


def without_release(environment: Environment = PRODUCTION, left_out: LeftOut | None = None) -> Environment:
    """Return environment whose network forgets every message that releases leases."""
    counts = LeftOut() if left_out is None else left_out
    return msgspec.structs.replace(environment, network=cast("Network", _Unreleasing(environment.network, counts)))


def _without_checks(open_planes: Callable[..., PlaneBackends], left_out: LeftOut) -> Callable[..., PlaneBackends]:
    """Return what opens planes whose checks, first ones and fences, find every lease held."""

    def post_check(
        peer: PeerId, first: int, last: int, reads: Sequence[tuple[int, LeaseName]], *, fence: bool
    ) -> Sequence[int]:
        del peer, fence
        left_out.fences += len(reads)
        values = [0] * (last - first + 1)
        for _, lease in reads:
            values[lease.slot - first] = lease.epoch
        return values

    def open_unchecked(**given: Any) -> PlaneBackends:
        planes = open_planes(**given)
        for plane in planes.backends.values():
            plane.post_check = post_check  # type: ignore[method-assign]
        return planes

    return open_unchecked


class _Unreleasing:
    """Wraps a network, whose dialers forget releases."""

    def __init__(self, network: Network, left_out: LeftOut) -> None:
        self._network = network
        self._left_out = left_out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    @asynccontextmanager
    async def open_dialer(self, *arguments: Any) -> AsyncIterator[DialedChannel]:
        dialer: AbstractAsyncContextManager[DialedChannel] = self._network.open_dialer(*arguments)
        async with dialer as channel:
            yield cast("DialedChannel", _UnreleasingChannel(channel, self._left_out))


class _UnreleasingChannel:
    """Wraps a channel to a producer."""

    def __init__(self, channel: DialedChannel, left_out: LeftOut) -> None:
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
