"""Clients over a network of their own, where things happen in the order that a real one has them once in a while."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise

import pytest

from handshake.client import open_client
from handshake.errors import ConnectionLost, ConnectionRefused, TimedOut, Unauthenticated
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


async def connect(network, limits):
    """Open a client in vain."""
    async with open_client(
        LateNetwork.endpoint,
        identity=CONSUMER,
        publication=PRODUCED,
        security=None,
        on_event=lambda event: None,
        limits=limits,
        network=network,
    ):
        raise AssertionError("unreachable")


async def test_a_connection_that_is_secured_after_the_deadline_changes_nothing():
    network = LateNetwork()

    async def dial():
        with pytest.raises(TimedOut) as caught:
            await connect(network, Limits(handshake_s=0.05, closing_s=60))
        assert caught.value.phase == "handshake"

    task = asyncio.ensure_future(dial())
    await patiently(network.secured.wait())
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() or task.exception() is None


class PlayedNetwork(ZeroMqNetwork):
    """Does what it is told to each connection, and notes when each was dialed; time is that of a loop without seconds.

    ``outcomes``: of each connection in turn, and the last one of all others: what the server refuses, or how the link
    ends; None: nothing happens.
    """

    def __init__(self, clock, outcomes, addresses=1):
        self.now, self.outcomes, self.dialed = clock, outcomes, []
        self.addresses = tuple(f"tcp://10.0.0.{number}:9" for number in range(addresses))

    def draw(self):
        return 1.0

    async def resolve(self, endpoint):
        return self.addresses

    @asynccontextmanager
    async def open_dialer(self, endpoint, security, limits):
        outcome = self.outcomes[min(len(self.dialed), len(self.outcomes) - 1)]
        channel = LateNetwork()
        channel.dial = lambda: self.dialed.append((endpoint, self.now()))
        channel.watch = partial(self._watch, outcome)
        channel.read = partial(self._read, channel, outcome)
        yield channel

    async def _watch(self, outcome, on_link):
        if isinstance(outcome, Refuse):
            on_link(LinkEvent.ACCEPTED)
            on_link(LinkEvent.SECURED)
        elif outcome is not None:
            on_link(outcome)
        await asyncio.Event().wait()

    async def _read(self, channel, outcome, on_frames):
        await channel.said.wait()
        on_frames(frames_of(outcome))
        await asyncio.Event().wait()


def failed(error, outcomes, addresses=1):
    """Dial until it fails; return when each connection was dialed, and when it was given up, from the first dial on."""
    world = World(1)
    process = Process(world, "client", "10.0.0.1", began_s=1.0, skew_s=0.0)
    network = PlayedNetwork(process.time, outcomes, addresses)

    async def dial():
        with pytest.raises(error):
            await connect(network, Limits(connect_s=5.0, handshake_s=6.0))
        return process.time()

    task = process.create_task(dial(), name="dial")
    assert world.run(task.done, 60.0)
    (_, first), *_ = network.dialed
    return [(endpoint, at - first) for endpoint, at in network.dialed], task.result() - first


BUSY = Refuse(code="busy", reason="64 handshakes are under way")


@pytest.mark.parametrize(
    ("outcome", "error"),
    [(BUSY, ConnectionRefused), (LinkEvent.UNREACHABLE, ConnectionLost)],
    ids=["busy", "nobody listens"],
)
def test_a_server_with_no_place_is_dialed_at_longer_and_longer_intervals(outcome, error):
    dialed, ended_s = failed(error, [outcome])
    pauses = [later - earlier for (_, earlier), (_, later) in pairwise(dialed)]
    assert pauses == pytest.approx([0.02, 0.04, 0.08, 0.16] + [0.25] * (len(pauses) - 4), abs=1e-3)
    assert len(dialed) == 23
    assert dialed[-1][1] <= ended_s < 5.0


def test_only_cuts_in_a_row_are_taken_for_another_secret():
    cut, nobody = LinkEvent.CUT, LinkEvent.UNREACHABLE
    assert len(failed(Unauthenticated, [cut, nobody, cut, cut])[0]) == 4
    assert len(failed(ConnectionLost, [cut, nobody, cut, nobody])[0]) > 10


def test_silent_addresses_have_equal_shares_of_all_of_the_time():
    """Four at a time, until the handshake has no more time."""
    dialed, ended_s = failed(TimedOut, [None], addresses=12)
    assert [endpoint for endpoint, _ in dialed] == [f"tcp://10.0.0.{number}:9" for number in range(12)]
    assert [at for _, at in dialed] == pytest.approx([0.0] * 4 + [2.0] * 4 + [4.0] * 4, abs=1e-2)
    assert ended_s == pytest.approx(6.0, abs=1e-2)
