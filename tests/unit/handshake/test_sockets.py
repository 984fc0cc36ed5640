import asyncio
import os
import resource
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
import zmq

import handshake.sockets
from handshake.errors import AddressInvalid, SocketsExhausted
from handshake.intake import MESSAGES_PER_TURN
from handshake.limits import Limits
from handshake.sockets import Delivery, LinkEvent, open_dialer, open_listener, running
from tests.helpers.waiting import patiently, until

from .helpers import LIMITS, OTHER_SECURITY, SECURITY

ANY_PORT = "tcp://127.0.0.1:0"


class Inbox:
    """A callback that remembers what it was called with."""

    def __init__(self):
        self.queue = asyncio.Queue()

    def __call__(self, item, *_key):
        self.queue.put_nowait(item)

    async def next(self):
        return await patiently(self.queue.get())

    async def until(self, item):
        while await self.next() != item:
            pass


@pytest.mark.parametrize("security", [SECURITY, None])
async def test_messages_travel_both_ways(security):
    heard, answered, links = Inbox(), Inbox(), Inbox()
    async with open_listener(ANY_PORT, security, LIMITS) as listener, running(listener.read(heard)):
        assert listener.endpoint.startswith("tcp://127.0.0.1:")
        assert not listener.endpoint.endswith(":0")
        async with (
            open_dialer(listener.endpoint, security, LIMITS) as dialer,
            running(dialer.read(answered), dialer.watch(links)),
        ):
            dialer.dial()
            assert [await links.next(), await links.next()] == [LinkEvent.ACCEPTED, LinkEvent.SECURED]
            assert dialer.send([b"question"]) is Delivery.QUEUED
            routing_id, question = await heard.next()
            assert question == b"question"
            assert listener.send([routing_id, b"answer"]) is Delivery.QUEUED
            assert await answered.next() == [b"answer"]
        # The dialer is gone; the listener finds out when it has something to say.
        await until(lambda: listener.send([routing_id, b"anyone?"]) is Delivery.GONE)


@pytest.mark.parametrize(("ours", "theirs"), [(SECURITY, OTHER_SECURITY), (SECURITY, None), (None, SECURITY)], ids=str)
async def test_without_the_same_secret_nothing_passes(ours, theirs):
    heard, links = Inbox(), Inbox()
    async with (
        open_listener(ANY_PORT, theirs, LIMITS) as listener,
        running(listener.read(heard)),
        open_dialer(listener.endpoint, ours, LIMITS) as dialer,
        running(dialer.watch(links)),
    ):
        dialer.send([b"let me in"])
        dialer.dial()
        assert await links.next() is LinkEvent.ACCEPTED
        assert await links.next() in (LinkEvent.DENIED, LinkEvent.CUT)
        assert await links.next() is LinkEvent.LOST
        assert heard.queue.empty()


async def test_a_client_key_that_is_not_the_derived_one_is_denied():
    """The server's public key is known to every client; only the derived client key opens the door."""
    links = Inbox()
    public, private = zmq.curve_keypair()
    stranger = msgspec.structs.replace(SECURITY, client=type(SECURITY.client)(public=public, private=private))
    async with (
        open_listener(ANY_PORT, SECURITY, LIMITS) as listener,
        open_dialer(listener.endpoint, stranger, LIMITS) as dialer,
        running(dialer.watch(links)),
    ):
        dialer.dial()
        await links.until(LinkEvent.DENIED)


async def test_what_a_monitor_tells_leaves_nothing_behind():
    known = len(zmq.Event._value2member_map_)  # flags are for ever, also those that have no name
    async with open_listener(ANY_PORT, SECURITY, LIMITS) as listener, AsyncExitStack() as stack:
        for _ in range(5):  # each with another file descriptor, which the monitor tells
            links = Inbox()
            dialer = await stack.enter_async_context(open_dialer(listener.endpoint, SECURITY, LIMITS))
            await stack.enter_async_context(running(dialer.watch(links)))
            dialer.dial()
            await links.until(LinkEvent.SECURED)
    assert len(zmq.Event._value2member_map_) == known


async def test_a_dialer_never_dials_again():
    links, other_links, heard = Inbox(), Inbox(), Inbox()
    async with AsyncExitStack() as first:
        listener = await first.enter_async_context(open_listener(ANY_PORT, None, LIMITS))
        async with open_dialer(listener.endpoint, None, LIMITS) as dialer, running(dialer.watch(links)):
            dialer.dial()
            await links.until(LinkEvent.SECURED)
            await first.aclose()
            await links.until(LinkEvent.LOST)
            # Somebody listens at the same address again, and is found by another dialer, but not by ours.
            async with (
                open_listener(listener.endpoint, None, LIMITS) as second,
                running(second.read(heard)),
                open_dialer(listener.endpoint, None, LIMITS) as other,
                running(other.watch(other_links)),
            ):
                # The monitor may tell of the loss before the socket has taken note of it.
                await until(lambda: dialer.send([b"ours"]) is Delivery.FULL)
                other.dial()
                await other_links.until(LinkEvent.SECURED)
                assert other.send([b"the other's"]) is Delivery.QUEUED
                assert (await heard.next())[1] == b"the other's"
                assert links.queue.empty()


async def test_a_full_queue_is_said_and_not_waited_for():
    limits = Limits(outgoing_max=4)
    async with open_dialer("tcp://127.0.0.1:9", None, limits) as dialer:
        dialer.dial()
        outcomes = [dialer.send([b"x"]) for _ in range(6)]
    assert outcomes == [Delivery.QUEUED] * 4 + [Delivery.FULL] * 2


async def test_a_frame_above_the_limit_never_arrives():
    limits = Limits(client_frame_bytes_max=1000)
    heard, links = Inbox(), Inbox()
    async with (
        open_listener(ANY_PORT, SECURITY, limits) as listener,
        running(listener.read(heard)),
        open_dialer(listener.endpoint, SECURITY, LIMITS) as dialer,
        running(dialer.watch(links)),
    ):
        dialer.dial()
        dialer.send([bytes(1000)])
        assert len((await heard.next())[1]) == 1000
        dialer.send([bytes(100_000)])
        await links.until(LinkEvent.LOST)
        assert heard.queue.empty()


async def test_without_encryption_nobody_is_who_he_says_he_is():
    """A client may send any properties within ZeroMQ's handshake, such as the one that names a key, in any bytes."""
    heard = asyncio.Queue()

    def named(name, value):
        return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value

    async with (
        open_listener(ANY_PORT, None, LIMITS) as listener,
        running(listener.read(lambda frames, key: heard.put_nowait((frames[1:], key)))),
    ):
        for user_id in (b"\xff\xfe", b"0" * 64):
            host, port = listener.endpoint.removeprefix("tcp://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
            await patiently(reader.readexactly(64))
            ready = b"\x05READY" + named(b"Socket-Type", b"DEALER") + named(b"User-Id", user_id)
            writer.write(b"\x04" + bytes([len(ready)]) + ready + b"\x00\x05hello")
            assert await patiently(heard.get()) == ([b"hello"], "")
            writer.close()


async def test_a_flood_does_not_starve_the_loop():
    """Messages that are there already are received without suspending, so the reader has to step aside."""
    turns = 0
    limits = Limits(incoming_max=10_000, outgoing_max=10_000)
    flood = MESSAGES_PER_TURN * 20
    done = asyncio.Event()
    seen = []

    def on_frames(frames, _key):
        seen.append(turns)
        if len(seen) == flood:
            done.set()

    async def count_turns():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    links = Inbox()
    async with (
        open_listener(ANY_PORT, None, limits) as listener,
        open_dialer(listener.endpoint, None, limits) as dialer,
        running(dialer.watch(links)),
    ):
        dialer.dial()
        await links.until(LinkEvent.SECURED)
        for _ in range(flood):
            assert dialer.send([b"x"]) is Delivery.QUEUED
        async with running(listener.read(on_frames), count_turns()):
            await patiently(done.wait())
    runs = [seen.count(turn) for turn in set(seen)]
    assert max(runs) <= 2 * MESSAGES_PER_TURN


async def test_an_address_that_cannot_be_bound_is_a_configuration_error():
    with pytest.raises(AddressInvalid, match="cannot listen on"):
        async with open_listener("tcp://192.0.2.1:0", None, LIMITS):
            raise AssertionError("unreachable")


async def test_an_address_in_use_is_a_configuration_error():
    async with open_listener(ANY_PORT, None, LIMITS) as listener:
        with pytest.raises(AddressInvalid, match="in use"):
            async with open_listener(listener.endpoint, SECURITY, LIMITS):
                raise AssertionError("unreachable")


async def test_an_address_that_cannot_be_dialed_is_a_configuration_error():
    async with open_dialer("nonsense", None, LIMITS) as dialer:
        with pytest.raises(AddressInvalid, match="cannot dial"):
            dialer.dial()


async def test_running_passes_the_error_of_its_block_unchanged():
    with pytest.raises(KeyError, match="mine"):
        async with running(asyncio.Event().wait()):
            raise KeyError("mine")


async def test_running_raises_the_error_of_its_tasks():
    async def fail():
        raise KeyError("the task's")

    with pytest.raises(ExceptionGroup):
        async with running(fail()):
            await asyncio.Event().wait()


async def test_running_leaves_no_task():
    async with running(asyncio.Event().wait(), asyncio.Event().wait()):
        assert len(asyncio.all_tasks()) == 3
    assert len(asyncio.all_tasks()) == 1


def threads():
    return len(list(Path("/proc/self/task").iterdir()))


async def test_hundreds_of_dialers_cost_no_threads_of_their_own():
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(open_dialer("tcp://127.0.0.1:9", SECURITY, LIMITS))
        before = threads()
        for _ in range(50):
            await stack.enter_async_context(open_dialer("tcp://127.0.0.1:9", SECURITY, LIMITS))
        assert threads() <= before  # one of an earlier test may end meanwhile


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_without_a_file_descriptor_left_nothing_is_dialed():
    """libzmq would end the whole process, where it starts its threads."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors(), hard))
        with pytest.raises(SocketsExhausted, match="limit of open files") as caught:
            async with open_dialer("tcp://127.0.0.1:9", SECURITY, LIMITS):
                raise AssertionError("unreachable")
        assert caught.value.local
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    async with open_dialer("tcp://127.0.0.1:9", SECURITY, LIMITS) as dialer:
        dialer.dial()


async def test_a_forked_child_makes_a_context_of_its_own():
    """It has inherited the numbers of the sockets, and waiting for them would be for ever."""
    async with open_dialer("tcp://127.0.0.1:9", SECURITY, LIMITS):
        code = os.fork()
        if not code:
            with handshake.sockets._dialers.borrowed() as context:
                os._exit(0 if not context.closed else 1)
        assert await asyncio.to_thread(os.waitpid, code, 0) == (code, 0)
