"""Clients over a network of their own, where things happen in the order that a real one has them once in a while."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise

import pytest

from handshake.client import open_client
from handshake.errors import ConnectionLost, ConnectionRefused, TimedOut
from handshake.limits import Limits
from handshake.messages import Refuse
from handshake.sockets import Delivery, LinkEvent, ZeroMqNetwork
from tests.fakes import Process, World

from .helpers import CONSUMER, PRODUCED, frames_of, patiently


class LateNetwork(ZeroMqNetwork):
    """Encrypts a connection only when the client has given the handshake up."""

    endpoint = "tcp://127.0.0.1:9"

    def __init__(self):
        self.said = asyncio.Event()
        self.secured = asyncio.Event()

    @asynccontextmanager
    async def open_dialer(self, endpoint, security, limits):
        yield self

    def dial(self):
        pass

    def send(self, frames):
        self.said.set()
        return Delivery.QUEUED

    async def read(self, on_frames):
        await asyncio.Event().wait()

    async def watch(self, on_link):
        on_link(LinkEvent.ACCEPTED)
        await self.said.wait()
        on_link(LinkEvent.SECURED)
        self.secured.set()
        await asyncio.Event().wait()


async def test_a_connection_that_is_secured_after_the_deadline_changes_nothing():
    network = LateNetwork()

    async def dial():
        with pytest.raises(TimedOut) as caught:
            async with open_client(
                network.endpoint,
                identity=CONSUMER,
                publication=PRODUCED,
                security=None,
                on_event=lambda event: None,
                limits=Limits(handshake_s=0.05, closing_s=60),
                network=network,
            ):
                raise AssertionError("unreachable")
        assert caught.value.phase == "handshake"

    task = asyncio.ensure_future(dial())
    await patiently(network.secured.wait())
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() or task.exception() is None


class FullNetwork(ZeroMqNetwork):
    """Refuses every connection, and notes when each was dialed; the time is that of a loop without real seconds."""

    endpoint = "tcp://127.0.0.1:9"

    def __init__(self, clock, refusal):
        self.now, self.refusal, self.dialed = clock, refusal, []

    def draw(self):
        return 1.0

    @asynccontextmanager
    async def open_dialer(self, endpoint, security, limits):
        channel = LateNetwork()
        channel.dial = lambda: self.dialed.append(self.now())
        channel.watch = partial(self._watch, channel)
        channel.read = partial(self._read, channel)
        yield channel

    async def _watch(self, channel, on_link):
        for link in (LinkEvent.ACCEPTED, LinkEvent.SECURED) if self.refusal else (LinkEvent.UNREACHABLE,):
            on_link(link)
        await asyncio.Event().wait()

    async def _read(self, channel, on_frames):
        await channel.said.wait()
        on_frames(frames_of(self.refusal))
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("refusal", "error"),
    [(Refuse(code="busy", reason="64 handshakes are under way"), ConnectionRefused), (None, ConnectionLost)],
    ids=["busy", "nobody listens"],
)
def test_a_server_with_no_place_is_dialed_at_longer_and_longer_intervals(refusal, error):
    world = World(1)
    process = Process(world, "client", "10.0.0.1", began_s=1.0, skew_s=0.0)
    network = FullNetwork(process.time, refusal)

    async def dial():
        with pytest.raises(error):
            async with open_client(
                network.endpoint,
                identity=CONSUMER,
                publication=PRODUCED,
                security=None,
                on_event=lambda event: None,
                limits=Limits(connect_s=5.0),
                network=network,
            ):
                raise AssertionError("unreachable")
        return True

    task = process.create_task(dial(), name="dial")
    assert world.run(task.done, 60.0)
    assert task.result()
    pauses = [later - earlier for earlier, later in pairwise(network.dialed)]
    assert pauses == pytest.approx([0.02, 0.04, 0.08, 0.16] + [0.25] * (len(pauses) - 4), abs=1e-3)
    assert len(network.dialed) == 23
    assert network.dialed[-1] - network.dialed[0] < 5.0
