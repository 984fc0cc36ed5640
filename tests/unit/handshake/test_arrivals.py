"""What arrives on a ZeroMQ socket is taken, whatever else is asked of the socket, and on any event loop."""

import asyncio
import select
import time

import pytest
import uvloop
import zmq

from handshake.intake import MESSAGES_PER_TURN, Arrivals
from handshake.sockets import running
from tests.helpers.waiting import patiently

PATIENCE_S = 30.0
DELAY_S = 0.01  # ZeroMQ looks for news within a send only if it has not looked for a moment


class Pair:
    """Two sockets over TCP, one of which is listened to."""

    def __init__(self):
        self.context = zmq.Context()
        self.ours, self.theirs = self.context.socket(zmq.DEALER), self.context.socket(zmq.DEALER)
        for socket in (self.ours, self.theirs):
            socket.set(zmq.RCVHWM, 0)
            socket.set(zmq.SNDHWM, 0)
        port = self.ours.bind_to_random_port("tcp://127.0.0.1")
        self.theirs.connect(f"tcp://127.0.0.1:{port}")
        self.theirs.send(b"first")
        self.ours.recv()  # connected
        assert not self.ours.get(zmq.EVENTS) & zmq.POLLIN  # ZeroMQ tells of the next only when none is left
        self.arrivals = Arrivals(self.ours)
        self.heard = asyncio.Queue()

    def take(self):
        self.heard.put_nowait(self.ours.recv(zmq.NOBLOCK))

    async def next(self):
        return await patiently(self.heard.get())

    def wait_for_word(self):
        """Stop the loop until ZeroMQ has something to tell."""
        assert select.select([self.ours.get(zmq.FD)], [], [], PATIENCE_S)[0]
        time.sleep(DELAY_S)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request):
    def run_on_loop(main):
        async def with_pair():
            pair = Pair()
            try:
                await main(pair)
            finally:
                pair.context.destroy(linger=0)

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(with_pair())

    return run_on_loop


def test_what_arrives_before_a_send_is_taken(run):
    async def main(pair):
        async with running(pair.arrivals.run(pair.take)):
            for number in range(20):
                await asyncio.sleep(0)
                pair.theirs.send(b"%d" % number)
                pair.wait_for_word()
                pair.ours.send(b"something else")  # ZeroMQ may hear of the message here
                pair.arrivals.read_again()
                assert await pair.next() == b"%d" % number

    run(main)


def test_what_arrived_before_anyone_listened_is_taken(run):
    async def main(pair):
        pair.theirs.send(b"early")
        pair.wait_for_word()
        assert pair.ours.get(zmq.EVENTS) & zmq.POLLIN  # and ZeroMQ will not tell of it again
        pair.arrivals.read_again()  # nobody listens yet
        async with running(pair.arrivals.run(pair.take)):
            assert await pair.next() == b"early"

    run(main)


def test_many_messages_and_sends_lose_nothing(run):
    count = 50 * MESSAGES_PER_TURN

    async def main(pair):
        def take_and_answer():
            pair.take()
            pair.ours.send(b"answer")
            pair.arrivals.read_again()

        async with running(pair.arrivals.run(take_and_answer)):
            for number in range(count):
                pair.theirs.send(b"%d" % number)
                if number % 7 == 0:
                    pair.ours.send(b"word")
                    pair.arrivals.read_again()
                    await asyncio.sleep(0)
            assert [await pair.next() for _ in range(count)] == [b"%d" % number for number in range(count)]

    run(main)


def test_nothing_is_taken_after_it_was_cancelled_and_nothing_is_lost(run):
    async def main(pair):
        async with running(pair.arrivals.run(pair.take)):
            pair.theirs.send(b"one")
            assert await pair.next() == b"one"
        pair.theirs.send(b"two")
        pair.wait_for_word()
        pair.ours.send(b"something else")
        pair.arrivals.read_again()
        await asyncio.sleep(0)
        assert pair.heard.empty()
        async with running(pair.arrivals.run(pair.take)):
            assert await pair.next() == b"two"

    run(main)


def test_a_message_that_uses_up_its_turn_lets_others_run(run):
    async def main(pair):
        turns, seen = 0, []

        def take():
            pair.take()
            seen.append(turns)
            return True

        async def count_turns():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        for _ in range(5):
            pair.theirs.send(b"x")
        pair.wait_for_word()
        async with running(pair.arrivals.run(take), count_turns()):
            for _ in range(5):
                await pair.next()
        assert len(set(seen)) == 5

    run(main)


def test_what_fails_ends_the_reader_with_its_error(run):
    async def main(pair):
        def take():
            raise ZeroDivisionError

        pair.theirs.send(b"x")
        with pytest.raises(ZeroDivisionError):
            await patiently(pair.arrivals.run(take))

    run(main)
