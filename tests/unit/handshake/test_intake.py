"""What has arrived on a connection and was not taken decides whether it is cut, and nothing else does."""

import asyncio
import os
import socket

import pytest

from handshake.intake import SLACK_BYTES, SWEEP_S, Intake, watched, wire_bytes

from .helpers import patiently

HELD_MAX = 1 << 20


class Pair:
    """Both ends of a TCP connection."""

    def __init__(self):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.theirs = socket.create_connection(listening.getsockname())
            self.ours, _ = listening.accept()

    def send(self, nbytes):
        """Send, and read on our side, as ZeroMQ would."""
        self.theirs.sendall(bytes(nbytes))
        while nbytes:
            nbytes -= len(self.ours.recv(nbytes))

    def is_cut(self):
        self.theirs.settimeout(0.0)
        try:
            return self.theirs.recv(1) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def close(self):
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.close()


def send_most(pair):
    """Send as much as may be held."""
    for _ in range(2):
        pair.send(HELD_MAX // 2)
    pair.send(SLACK_BYTES - 1)


def test_a_connection_is_cut_when_more_was_read_than_may_be_held(pair):
    cut = []
    intake = Intake(HELD_MAX, cut.append)
    intake.opened(pair.ours.fileno())
    send_most(pair)
    intake.sweep()
    assert (cut, pair.is_cut(), len(intake)) == ([], False, 1)
    pair.send(2)
    intake.sweep()
    assert pair.is_cut()
    assert cut == ["{}:{}".format(*pair.theirs.getsockname())]
    assert len(intake) == 0


def test_what_was_taken_is_not_held(pair):
    intake = Intake(HELD_MAX)
    for _ in range(8):
        pair.send(HELD_MAX)
        intake.took(pair.ours.fileno(), HELD_MAX)
        intake.sweep()
    assert not pair.is_cut()


def test_what_the_kernel_still_has_is_not_held(pair):
    pair.ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    pair.theirs.setblocking(False)
    intake = Intake(-SLACK_BYTES + 100)
    intake.opened(pair.ours.fileno())
    assert pair.theirs.send(bytes(200_000)) > 100
    intake.sweep()
    assert not pair.is_cut()


def test_whoever_has_the_descriptor_of_a_closed_connection_is_let_alone(pair):
    intake = Intake(HELD_MAX)
    intake.opened(pair.ours.fileno())
    send_most(pair)
    pair.send(2)
    other = Pair()
    os.dup2(other.ours.fileno(), pair.ours.fileno())  # as if it had been closed, and opened anew
    intake.sweep()
    assert not other.is_cut()
    intake.opened(pair.ours.fileno())
    intake.sweep()
    assert len(intake) == 1
    other.close()


def test_a_connection_that_has_ended_is_forgotten():
    pair, intake = Pair(), Intake(HELD_MAX)
    intake.opened(pair.ours.fileno())
    intake.opened(pair.ours.fileno())
    assert len(intake) == 1
    pair.close()
    intake.sweep()
    assert len(intake) == 0
    intake.opened(10_000_000)
    intake.took(10_000_000, 1)
    assert len(intake) == 0


@pytest.mark.parametrize(
    ("nbytes", "secured", "expected"),
    [(0, False, 2), (255, False, 257), (256, False, 265), (0, True, 35), (222, True, 257), (223, True, 265)],
)
def test_bytes_on_the_wire(nbytes, secured, expected):
    assert wire_bytes(nbytes, secured=secured) == expected


async def test_an_intake_is_swept_as_long_as_it_is_watched():
    class Counted(Intake):
        sweeps = 0

        def sweep(self):
            self.sweeps += 1
            swept.set()

    first, second = Counted(1), Counted(1)
    with watched(first):
        for _ in range(2):
            swept = asyncio.Event()
            await patiently(swept.wait())
        with watched(second):
            pass
    counted = first.sweeps, second.sweeps
    await asyncio.sleep(2 * SWEEP_S)  # nothing happens, and nothing tells of it
    assert (first.sweeps, second.sweeps) == counted == (2, 0)
