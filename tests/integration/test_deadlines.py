"""Each phase of a pull has a budget of its own, and the error says which one was used up."""

import asyncio
import socket
import time
from contextlib import contextmanager

import msgspec
import pytest

from handshake.sockets import DialedChannel
from kvflow import errors
from tests.unit.handshake.helpers import PATIENT, connected, serving

from .consuming import works
from .strangers import ticket_to

BLOCKS = [[0, 1], [2, 3]]


@contextmanager
def deaf():
    """An address whose queue of connections is full: it neither accepts nor refuses."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as listener,
        socket.socket() as first,
        socket.socket() as next_,
    ):
        address = listener.getsockname()
        for client in (first, next_):
            client.setblocking(False)
            client.connect_ex(address)
        yield f"tcp://127.0.0.1:{address[1]}"


async def test_a_peer_that_does_not_accept(near_world):
    """Of the budgets of other phases, ``test_records.py`` and ``test_ranks.py`` tell."""
    async with near_world.producing() as producer, near_world.consuming(connect_s=0.2) as consumer:
        with deaf() as endpoint, pytest.raises(errors.DeadlineExceeded) as caught:
            await consumer.pull(ticket_to(endpoint), BLOCKS)
        assert (caught.value.phase, caught.value.quarantined) == ("connect", False)
        assert caught.value.remedy
        consumer.at_rest()
        await works(producer, consumer, at_last=True)


async def test_time_in_which_the_event_loop_stands_still_is_not_the_servers(monkeypatch):
    dial = DialedChannel.dial

    def stall_and_dial(channel):  # as if all threads of the process had stood still
        time.sleep(0.5)
        dial(channel)

    monkeypatch.setattr(
        DialedChannel, "dial", lambda channel: asyncio.get_running_loop().call_soon(stall_and_dial, channel)
    )
    async with serving() as server, connected(server.endpoint, limits=msgspec.structs.replace(PATIENT, connect_s=0.2)):
        pass
