"""Streams: bytes by address in any rows, in both directions, and how each end is told."""

import ctypes
import errno
import itertools
import random
import select
import socket

import numpy as np
import pytest

from kvflow.reads.tcp import stream as module
from kvflow.reads.tcp.stream import ByteRows, ChannelClosed, PlainStream, prepare_socket, rows_of
from tests.helpers.loops import looped

PATIENCE_MS = 60_000


def wait(stream, events):
    poller = select.poll()
    poller.register(stream.fileno(), events)
    assert poller.poll(PATIENCE_MS), "nothing came"


@pytest.fixture
def pair():
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    listener.close()
    for sock in (near, far):
        prepare_socket(sock)
    streams = PlainStream(near), PlainStream(far)
    yield streams
    for stream in streams:
        stream.close()


def rows_in(memory, choose, count):
    """Rows of ``count`` bytes at places in some order that do not overlap, some neighbors."""
    cuts = sorted({0, count, *(choose.randrange(count) for _ in range(choose.randrange(3000)))})
    rows = [(memory.ctypes.data + first, stop - first) for first, stop in itertools.pairwise(cuts)]
    choose.shuffle(rows)
    return np.array(rows, np.int64)


def content_of(table):
    base = np.concatenate([module.np.ctypeslib.as_array((module.ctypes.c_uint8 * n).from_address(a)) for a, n in table])
    return base.tobytes()


@pytest.mark.parametrize("seed", range(4))
def test_rows_arrive_in_the_rows_of_the_other_side(pair, seed):
    choose, (near, far) = random.Random(seed), pair
    count = choose.choice((1, 4097, 3 << 20))
    source, target = np.random.default_rng(seed).integers(0, 256, count, np.uint8), np.zeros(count, np.uint8)
    tables = [rows_in(memory, choose, count) for memory in (source, target)]
    sending, filling = (ByteRows(table.copy()) for table in tables)
    while filling.left:
        if not (sending.left and near.send(sending)) and not far.receive(filling):
            wait(far, select.POLLIN)
    assert not sending.left
    assert content_of(tables[0].tolist()) == content_of(tables[1].tolist())


@looped("seed", range(20))
def test_cuts_take_every_byte_once_and_in_order(seed):
    choose = random.Random(seed)
    memory = np.random.default_rng(seed).integers(0, 256, 40_000, np.uint8)
    table = rows_in(memory, choose, len(memory))
    whole, spans, found = content_of(table.tolist()), ByteRows(table.copy()), b""
    tail = bytearray(b"tail")
    while spans.left:
        most, left = choose.randrange(1, 9000), spans.left
        after = choose.choice((None, rows_of(tail).rows()))
        piece = spans.cut(most, after)
        assert len(piece.rows()) <= module.ROWS_AT_ONCE
        taken = content_of(piece.rows().tolist())
        assert piece.left == len(taken)
        if after is not None and left - spans.left == most:
            assert taken.endswith(tail)
            taken = taken[:-4]
        assert len(taken) == left - spans.left <= most
        found += taken
    assert found == whole


def test_what_cannot_go_on_returns_0(pair):
    near, far = pair
    assert far.read(memoryview(bytearray(9))) == far.receive(rows_of(bytearray(9))) == 0
    big = rows_of(bytearray(1 << 20))
    while near.send(big) if big.left else (big := rows_of(bytearray(1 << 20))):
        pass
    assert near.write(b"more") == 0


def test_words_are_written_and_read(pair):
    near, far = pair
    assert near.write(b"words") == 5
    wait(far, select.POLLIN)
    into = bytearray(9)
    assert far.read(memoryview(into)) == 5
    assert into[:5] == b"words"


@pytest.mark.parametrize("call", ["read", "receive"])
@pytest.mark.parametrize("reset", [False, True])
def test_the_end_of_the_other_side_closes_the_stream(pair, call, reset):
    near, far = pair
    near.close(reset=reset)
    wait(far, select.POLLIN)
    into = bytearray(4)
    with pytest.raises(ChannelClosed, match="the other side has " + ("reset" if reset else "closed")):
        getattr(far, call)(memoryview(into) if call == "read" else rows_of(into))
    near.close()
    with pytest.raises(ChannelClosed, match="this side has closed"):
        near.write(b"a")


@pytest.mark.parametrize("call", ["read", "write", "receive", "send"])
@pytest.mark.parametrize("number", sorted(module.SHORTAGES))
def test_a_shortage_of_this_host_ends_no_connection(monkeypatch, call, number):
    """It may go on when epoll says so."""
    assert {errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM} == module.SHORTAGES

    class Short:
        def recv_into(self, _into):
            raise OSError(number, "short")

        def send(self, _content, _flags):
            raise OSError(number, "short")

        def fileno(self):
            return -1

    stream = PlainStream(Short())
    for name in ("recvmsg", "sendmsg"):
        monkeypatch.setattr(module._libc, name, lambda *_: (ctypes.set_errno(number), -1)[1])
    given = {"read": memoryview(bytearray(8)), "write": b"8 bytes."}.get(call) or rows_of(bytearray(8))
    assert getattr(stream, call)(given) == 0
    assert not hasattr(given, "left") or given.left == 8
