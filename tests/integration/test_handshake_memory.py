"""What a peer makes another process hold: peak resident memory, of strangers, of members and of servers."""

import asyncio
import socket
from contextlib import asynccontextmanager, suppress

import zmq
import zmq.asyncio

from handshake.codec import encode
from handshake.limits import Limits
from handshake.messages import WIRE_VERSION, Answered, Ask, Publish, Welcome
from handshake.sockets import Delivery, open_listener, running
from tests.helpers.waiting import patiently, until
from tests.unit.handshake.helpers import (
    CONSUMED,
    EXAMPLES,
    LIMITS,
    PRODUCER,
    SECRET,
    SECURITY,
    Recorder,
    connected,
    frames_of,
    raw_dealer,
)
from tests.world.node import hosted

from .handshaking import dialing_apart, serving_apart

ANY_PORT = "tcp://127.0.0.1:0"
STRANGERS = 100
FRAMES = 1_000_000
"""Of one message: 70 MiB on the wire, and several times that as Python objects."""
STRANGERS_MIB_MAX = 30
"""Of a hundred strangers: 9 MiB were seen, and 403 when ZeroMQ kept what they sent."""
FRAMES_MIB_MAX = 100
"""Of one message of a million frames: 32 to 54 MiB were seen, and 2,430 when Python had them all."""
ENDLESS_MIB = 400
"""As much of one message as is sent at most. It would take twice that in ZeroMQ."""
QUESTIONS = 500
"""Each is answered with 1 MiB."""
ANSWERS_MIB_MAX = 60
"""Of these questions: 12 MiB were seen, and 506 when all answers waited."""

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
MORE = b"\x01\x20" + bytes(32)
"""One frame of a message that goes on, without encryption."""


def greeting(mechanism):
    return GREETING + mechanism.ljust(20, b"\0") + bytes(32)


def named(name, value):
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def ready(socket_type):
    body = b"\x05READY" + named(b"Socket-Type", socket_type) + named(b"Identity", b"")
    return b"\x04" + bytes([len(body)]) + body


def command(nbytes, given):
    """The beginning of one command of ZeroMQ's own handshake."""
    return b"\x06" + nbytes.to_bytes(8, "big") + bytes(given)


def of(endpoint):
    host, port = endpoint.removeprefix("tcp://").split(":")
    return host, int(port)


async def begun(endpoint, words):
    """Connect as a stranger and say this; the writer is full of it, or the server has hung up."""
    _, writer = await asyncio.open_connection(*of(endpoint))
    writer.write(greeting(b"CURVE") + words)
    with suppress(ConnectionError):
        await writer.drain()
    return writer


async def test_strangers_make_a_server_hold_little():
    async with hosted(serving_apart, ANY_PORT, SECRET, forked=False) as server:
        before = await server.peak_mib()
        for nbytes in (4 << 20, LIMITS.client_frame_bytes_max):
            writers = [await patiently(begun(server.endpoint, command(nbytes, nbytes - 1))) for _ in range(STRANGERS)]
            async with connected(server.endpoint):  # the first connection has been read
                pass
            for writer in writers:
                writer.close()
        grown = await server.peak_mib() - before
        assert grown < STRANGERS_MIB_MAX


async def drain(dealer):
    """Read until the connection is cut, which the monitor tells."""
    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    await patiently(monitor.recv_multipart())
    dealer.disable_monitor()


async def test_a_message_of_many_frames_is_refused_and_its_connection_cut():
    async with hosted(serving_apart, ANY_PORT, SECRET, forked=False) as server, connected(server.endpoint):
        before = await server.peak_mib()
        async with raw_dealer(server.endpoint) as member:
            member.set(zmq.SNDHWM, 0)
            await patiently(asyncio.gather(drain(member), member.send_multipart([bytes(40)] * FRAMES)))
        async with connected(server.endpoint) as honest:
            assert honest.rtt_s is not None
        grown = await server.peak_mib() - before
        assert grown < FRAMES_MIB_MAX


async def introduced(reader, writer, socket_type):
    """Get through ZeroMQ's handshake without encryption."""
    writer.write(greeting(b"NULL"))
    await reader.readexactly(64)
    writer.write(ready(socket_type))
    await reader.readuntil(b"READY")


async def endless(writer):
    """Send one message that never ends; return how much of it was taken before the connection was cut."""
    sent, part = 0, MORE * 10_000
    with suppress(ConnectionError):
        while sent < ENDLESS_MIB << 20:
            writer.write(part)
            await writer.drain()
            sent += len(part)
    return sent >> 20


def holding(taken_mib):
    """Return what a message may make a process hold of which so much was taken: twice that, in ZeroMQ's frames."""
    return 3 * taken_mib + STRANGERS_MIB_MAX


async def test_a_message_without_an_end_is_cut_before_it_is_one():
    async with hosted(serving_apart, ANY_PORT, "", forked=False) as server, connected(server.endpoint, security=None):
        before = await server.peak_mib()
        reader, writer = await asyncio.open_connection(*of(server.endpoint))
        await patiently(introduced(reader, writer, b"DEALER"))
        taken = await patiently(endless(writer))
        assert taken < ENDLESS_MIB
        writer.close()
        async with connected(server.endpoint, security=None):
            pass
        grown = await server.peak_mib() - before
        assert grown < holding(taken)


async def test_a_client_that_reads_no_answers_is_refused_and_others_are_answered():
    async with hosted(serving_apart, ANY_PORT, SECRET, forked=False) as server:
        before = await server.peak_mib()
        async with raw_dealer(server.endpoint, held_max=1) as member:
            for message in (EXAMPLES["hello"], Publish(publication=CONSUMED)):
                await member.send_multipart(frames_of(message))
            for nonce in range(QUESTIONS):
                await member.send_multipart(frames_of(Ask(nonce=nonce, question=b"?")))
            assert await patiently(server.failure()) == "congested"
            heard = Recorder()
            async with connected(server.endpoint, on_event=heard) as honest:
                for nonce in range(2 * LIMITS.outgoing_bytes_max >> 20):
                    honest.send(Ask(nonce=nonce, question=b"?"))
                    await heard.wait_for(lambda recorder, count=nonce + 1: len(recorder.of(Answered)) == count)
        grown = await server.peak_mib() - before
        assert grown < ANSWERS_MIB_MAX


async def test_what_a_peer_never_takes_is_dropped_with_its_connection():
    limits = Limits(ping_interval_s=0.5, silence_s_max=1.0)
    met = asyncio.get_running_loop().create_future()

    def on_frames(frames, _key):
        met.set_result(frames[0])
        return True

    async with (
        open_listener(ANY_PORT, SECURITY, limits) as listener,
        running(listener.read(on_frames)),
        raw_dealer(listener.endpoint, held_max=1) as member,
    ):
        await member.send(b"hello")
        name = await patiently(met)
        for _ in range(40):
            assert listener.send([name, bytes(1 << 20)]) is Delivery.QUEUED
        await until(lambda: listener.send([name, b""]) is Delivery.GONE)


@asynccontextmanager
async def hostile_router():
    """A server with the cluster's keys, which says what the test says."""
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    try:
        router.set(zmq.SNDHWM, 0)
        router.set(zmq.CURVE_SERVER, 1)
        router.set(zmq.CURVE_SECRETKEY, SECURITY.server.private)
        router.bind(ANY_PORT)
        yield router
    finally:
        context.destroy(linger=0)


async def test_a_reader_refuses_a_message_of_many_frames():
    async with hostile_router() as router:
        endpoint = router.get_string(zmq.LAST_ENDPOINT)
        async with hosted(dialing_apart, endpoint, SECRET, forked=False) as reader:
            name, _hello = await patiently(router.recv_multipart())
            before = await reader.peak_mib()
            await router.send_multipart(
                [name, *encode(Welcome(clock_s=1.5, version=WIRE_VERSION, identity=PRODUCER), 1 << 16)]
            )
            await router.send_multipart([name] + [bytes(40)] * FRAMES)
            assert await patiently(reader.failure()) in ("protocol_violation", "connection_lost")
            grown = await reader.peak_mib() - before
            assert grown < FRAMES_MIB_MAX


async def test_a_reader_cuts_a_message_without_an_end():
    taken = asyncio.get_running_loop().create_future()

    async def say(reader, writer):
        await introduced(reader, writer, b"ROUTER")
        taken.set_result(await endless(writer))
        writer.close()

    server = await asyncio.start_server(say, "127.0.0.1", 0, family=socket.AF_INET)
    async with server:
        host, port = server.sockets[0].getsockname()
        async with hosted(dialing_apart, f"tcp://{host}:{port}", "", forked=False) as reader:
            before = await reader.peak_mib()
            assert await patiently(taken) < ENDLESS_MIB
            assert await patiently(reader.failure()) == "connection_lost"
            grown = await reader.peak_mib() - before
            assert grown < holding(taken.result())
