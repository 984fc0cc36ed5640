"""What has arrived on a connection and was not taken decides whether it is cut, and nothing else does."""

import errno
import os
import socket
from contextlib import nullcontext

import pytest

from handshake.intake import SLACK_BYTES, Intake, wire_bytes
from tests.helpers.loops import looped
from tests.helpers.waiting import PATIENCE_S

HELD_MAX = 1 << 20


class Pair:
    """Both ends of a TCP connection. ``listening``: what accepts it, if others have the same endpoint."""

    def __init__(self, listening=None):
        with nullcontext(listening) if listening else socket.create_server(("127.0.0.1", 0)) as accepting:
            self.endpoint = "tcp://{}:{}".format(*accepting.getsockname())
            self.theirs = socket.create_connection(accepting.getsockname())
            self.ours, _ = accepting.accept()

    def send(self, nbytes):
        """Send, and read on our side, as ZeroMQ would."""
        self.theirs.sendall(bytes(nbytes))
        while nbytes:
            nbytes -= len(self.ours.recv(nbytes))

    def is_cut(self, within_s=0.0):
        """Tell whether the other end has ended it, of which the kernel of a busy host brings the news later."""
        self.theirs.settimeout(within_s)
        try:
            return self.theirs.recv(1) == b""
        except (BlockingIOError, TimeoutError):
            return False
        except ConnectionError:
            return True
        finally:
            self.theirs.setblocking(True)

    def close(self):
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.close()


def intake_of(pair, held_max=HELD_MAX, **how):
    """The intake of a socket that listens at one end of a pair."""
    return Intake(held_max, lambda: pair.endpoint, listens=True, **how)


def send_most(pair):
    """Send as much as may be held."""
    for _ in range(2):
        pair.send(HELD_MAX // 2)
    pair.send(SLACK_BYTES - 1)


def test_what_the_kernel_still_has_is_not_held(pair):
    pair.ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    pair.theirs.setblocking(False)
    intake = intake_of(pair, -SLACK_BYTES + 100)
    intake.opened(pair.ours.fileno())
    assert pair.theirs.send(bytes(200_000)) > 100
    intake.sweep()
    assert not pair.is_cut()


def test_a_socket_with_the_descriptor_of_a_closed_connection_is_let_alone(pair):
    intake = intake_of(pair)
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


def test_a_connection_inherits_nothing_of_the_one_that_had_its_descriptor(pair):
    cut = []
    intake = intake_of(pair, on_cut=cut.append)
    for _ in range(4):
        pair.send(HELD_MAX)
        intake.took(pair.ours.fileno(), HELD_MAX)
    other = Pair()
    os.dup2(other.ours.fileno(), pair.ours.fileno())
    pair.endpoint = other.endpoint
    intake.opened(pair.ours.fileno())
    send_most(other)
    intake.sweep()
    assert not cut
    other.send(2)
    intake.sweep()
    assert cut == ["{}:{}".format(*other.theirs.getsockname())]
    other.close()


@pytest.mark.parametrize("listens", [True, False])
def test_a_socket_of_somebody_else_is_never_touched(pair, listens):
    """ZeroMQ tells of a descriptor when its connection may be gone, and the number another socket's of this process."""
    cut, other = [], Pair()
    ours, theirs = (pair.ours, other.ours) if listens else (pair.theirs, other.theirs)
    intake = Intake(-SLACK_BYTES, lambda: pair.endpoint, cut.append, listens=listens)
    for descriptor in (theirs.fileno(), *os.pipe()):
        intake.opened(descriptor)
        intake.took(descriptor, 1)
    assert len(intake) == 0
    intake.opened(ours.fileno())
    assert len(intake) == 1
    other.close()


def test_a_flood_is_cut_when_no_descriptor_is_left(pair, monkeypatch):
    cut = []
    intake = intake_of(pair, on_cut=cut.append)
    intake.opened(pair.ours.fileno())
    send_most(pair)
    pair.send(2)

    def exhausted(_descriptor):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "dup", exhausted)
    intake.sweep()
    assert cut
    assert pair.is_cut(PATIENCE_S)
    pair.ours.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)  # still open: it is ZeroMQ's to close


def test_a_connection_that_has_ended_is_forgotten():
    pair = Pair()
    intake = intake_of(pair)
    intake.opened(pair.ours.fileno())
    intake.opened(pair.ours.fileno())
    assert len(intake) == 1
    pair.close()
    intake.sweep()
    assert len(intake) == 0
    intake.opened(10_000_000)
    intake.took(10_000_000, 1)
    assert len(intake) == 0


@looped(
    "nbytes, secured, expected",
    [(0, False, 2), (255, False, 257), (256, False, 265), (0, True, 35), (222, True, 257), (223, True, 265)],
)
def test_bytes_on_the_wire(nbytes, secured, expected):
    assert wire_bytes(nbytes, secured=secured) == expected
