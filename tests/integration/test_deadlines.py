"""Each phase of a pull has a budget of its own, and the error says which one was used up."""

import asyncio
import socket
import time
from contextlib import contextmanager

import msgspec
import pytest

import kvflow
from handshake.sockets import DialedChannel
from kvflow import errors
from tests.unit.handshake.helpers import PATIENT, connected, serving

from .consuming import works
from .producing import SECRET
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


@contextmanager
def mute():
    """A listener that accepts and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("stranger", "phase", "budget"), [(deaf, "connect", "connect_s"), (mute, "handshake", "handshake_s")]
)
async def test_a_peer_that_is_not_met(near_world, stranger, phase, budget):
    async with near_world.producing() as producer, near_world.consuming(**{budget: 0.2}) as consumer:
        with stranger() as endpoint, pytest.raises(errors.DeadlineExceeded) as caught:
            await consumer.pull(ticket_to(endpoint), BLOCKS)
        assert (caught.value.phase, caught.value.quarantined) == (phase, False)
        assert caught.value.remedy
        consumer.at_rest()
        await works(producer, consumer, at_last=True)


async def test_a_read_that_does_not_end(near_world, gate):
    async with near_world.producing() as producer, near_world.consuming(wire_s=0.2) as consumer:
        params = await producer.offer("r", BLOCKS, 8)
        with pytest.raises(errors.DeadlineExceeded) as caught:
            await consumer.pull(params, BLOCKS)
        assert (caught.value.phase, caught.value.quarantined) == ("wire", True)
        assert [entry.reason for entry in consumer.worker.snapshot().quarantined] == ["deadline_exceeded"]
        gate.open()
        await consumer.worker.quiesced("r")
        consumer.at_rest()
        await consumer.pull_at_last(params, BLOCKS)
        consumer.has("r", BLOCKS, 8)


async def test_an_admission_that_does_not_come(near_world):
    async with near_world.producing() as producer, near_world.consuming(fence_s=0.2) as consumer:
        mint = kvflow.TicketMint("prefill-0", [producer.worker.rank_address], cluster_secret=SECRET)
        ticket, _ = mint.offer("r", block_ids=BLOCKS, num_tokens=8)
        with pytest.raises(errors.DeadlineExceeded) as caught:
            await consumer.pull(ticket.to_params(), BLOCKS)
        assert (caught.value.phase, caught.value.quarantined) == ("fence", False)
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
