"""Clients over a network of their own, where things happen in the order that a real one has them once in a while."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from handshake.client import open_client
from handshake.errors import TimedOut
from handshake.limits import Limits
from handshake.sockets import Delivery, LinkEvent, ZeroMqNetwork
from tests.helpers.waiting import patiently

from .helpers import CONSUMER, PRODUCED


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
