"""A real exporter, and readers that say what no honest reader would."""

import logging
import os
import resource
import select
import socket
import threading
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

from kvflow.errors import ConfigInvalid, TransportUnavailable
from kvflow.layout.component import Region
from kvflow.reads.tcp01 import answers as tcp_answers
from kvflow.reads.tcp01 import exporter as module
from kvflow.reads.tcp01 import requests as tcp_requests
from kvflow.reads.tcp01 import wire
from kvflow.reads.tcp01.channel import ChannelClosed
from kvflow.reads.tcp01.exporter import HostMemory, TcpExporter
from tests.unit.kvflow.reads.tcp01.peers import EPOCH, Producer, Reader, credentials, read_frame, region_of, settings

LARGE = {"blocks": 1024, "block_bytes": 32 << 10}
"""More bytes than sockets and TLS keep."""

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _one_sender(monkeypatch):
    monkeypatch.setattr(module, "senders_for", lambda _cores: 1)


@pytest.fixture
def clock(monkeypatch):
    """The exporter's clock, which stands still; the exporter looks at it all the time."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(module, "_TICK_S", 0.01)
    return clock


@pytest.fixture(params=["off", "tls"])
def make(request):
    """Makes producers, which are closed in the end."""
    made = []

    def make(encryption=request.param, **cache):
        made.append(Producer(encryption, **cache))
        return made[-1]

    yield make
    for each in made:
        each.put_away()


@pytest.fixture
def producer(make):
    return make()


def said_by(reader, hello):
    """Say a hello, and return the welcome."""
    reader.say(hello)
    return reader.hear(wire.WELCOME_BYTES)


def hello_of(who, reader, nonce=b"n" * 32):
    theirs = wire.nonce_of(reader.hear(wire.GREETING_BYTES))
    return wire.encode_hello(who, theirs, nonce, reader.channel.binding())


def assert_serves(producer):
    """An honest reader reads what it asks for."""
    slot = 7
    epoch = producer.lease(slot, [3], [])
    reader = producer.reader(credentials(name="honest"))
    reader.say(read_frame(0, [(slot, epoch)], [3]))
    assert reader.answer() == (wire.DONE, producer.cache[0, 3].tobytes(), [epoch])
    producer.end(slot)
    reader.close()


# Who is let in.


def test_a_reader_with_a_pass_is_let_in_and_knows_the_producer(producer):
    assert producer.visitor().open(credentials())
    assert_serves(producer)


@pytest.mark.parametrize(
    "lie",
    [
        {"pass_key": b"l" * 32},
        {"pass_key": b""},
    ],
)
def test_a_wrong_pass_is_refused(producer, lie):
    reader = producer.visitor()
    assert said_by(reader, hello_of(credentials(**lie), reader)) == bytes(wire.WELCOME_BYTES)
    assert reader.ended()
    assert_serves(producer)


@pytest.mark.parametrize(
    "lie", [{"name": "another"}, {"rank": 1}, {"incarnation": "2" * 32}, {"key": "cd" * 32}, {"key": "00" * 32}]
)
def test_a_pass_is_good_for_one_identity_only(producer, lie):
    class Liar:
        """Claims another identity, and proves what it can."""

        pass_ = credentials().pass_

        def __getattr__(self, name):
            return getattr(credentials(**lie), name)

    reader = producer.visitor()
    assert said_by(reader, hello_of(Liar(), reader)) == bytes(wire.WELCOME_BYTES)
    assert reader.ended()


def test_the_hello_of_another_connection_is_refused(producer):
    first, second = producer.visitor(), producer.visitor()
    hello = hello_of(credentials(), first)
    second.hear(wire.GREETING_BYTES)
    assert said_by(second, hello) == bytes(wire.WELCOME_BYTES)
    assert second.ended()
    assert any(said_by(first, hello))


def test_a_key_that_is_not_admitted_is_refused(producer):
    producer.barred.add("ab" * 32)
    reader = producer.visitor()
    assert said_by(reader, hello_of(credentials(), reader)) == bytes(wire.WELCOME_BYTES)
    assert reader.ended()
    producer.barred.clear()
    assert producer.visitor().open(credentials())


@pytest.mark.parametrize("request_", [wire.encode_epoch(0), read_frame(0, [(0, EPOCH + 1)], [0])])
def test_a_key_that_is_not_admitted_any_longer_has_no_further_answer(producer, request_):
    producer.lease(0, [0], [0])
    reader, other = producer.reader(), producer.reader(credentials(key="cd" * 32))
    reader.epoch()
    producer.barred.add("ab" * 32)
    reader.say(request_)
    assert reader.ended()
    assert other.epoch() == EPOCH + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda hello: b"kvftcp99" + hello[8:],
        lambda hello: hello[:108] + b"\0\0" + hello[110:],
        lambda hello: hello[:108] + (wire.ENGINE_BYTES_MAX + 1).to_bytes(2, "little") + hello[110:],
        lambda hello: hello[:-1] + b"\xff",
        lambda _hello: b"GET / HTTP/1.1\r\n\r\n" * 20,
        lambda _hello: bytes(1000),
        lambda _hello: wire.encode_epoch(0) * 100,
    ],
)
def test_what_is_no_hello_ends_the_connection(producer, change):
    reader = producer.visitor()
    hello = hello_of(credentials(), reader)
    assert hello[:8] == wire.MAGIC
    reader.say(change(hello))
    try:
        assert reader.hear(wire.WELCOME_BYTES) == bytes(wire.WELCOME_BYTES)
    except ChannelClosed:
        return
    assert reader.ended()


def test_words_of_another_protocol_end_the_connection(producer):
    sock = producer.stranger()
    sock.sendall(b"\x16\x03\x01\xff\xff" + bytes(70_000) if producer.encryption == "off" else b"GET / HTTP/1.1\r\n\r\n")
    with suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    assert_serves(producer)


# What is asked.


def test_a_read_has_the_bytes_and_the_epoch(producer):
    epoch = producer.lease(1, [5, 9, 2], [7])
    reader = producer.reader()
    reader.say(read_frame(0, [(1, epoch)], [9, 5, 5, 2]), read_frame(1, [(1, epoch)], [7]))
    assert reader.answer() == (wire.DONE, producer.cache[0, [9, 5, 5, 2]].tobytes(), [epoch])
    assert reader.answer() == (wire.DONE, producer.cache[1, 7].tobytes(), [epoch])
    assert reader.epoch(1) == epoch
    assert reader.epoch(0) == EPOCH


def head(kind, few, number, units, nbytes, *, zero=0):
    return wire.HEADER.pack(kind, zero, few, number, units, nbytes)


@pytest.mark.parametrize(
    "frame",
    [
        head(0, 0, 0, 0, 0),
        head(9, 0, 0, 0, 0),
        head(wire.EPOCH, 0, 0, 0, 0, zero=1),
        head(wire.EPOCH, 0, 0, 0, 8),
        head(wire.PROGRAM, 0, 5, 0, 0),
        head(wire.PROGRAM, 0, 5, wire.ROWS_MAX + 1, 40 * wire.ROWS_MAX + 40),
        head(wire.PROGRAM, 0, 5, (1 << 32) - 1, (1 << 32) - 1),
        head(wire.READ, 0, 0, 1, 4),
        head(wire.READ, 1, 0, 0, 12),
        head(wire.READ, wire.LEASES_MAX + 1, 0, 1, 12 * wire.LEASES_MAX + 18),
        head(wire.READ, 1, 0, wire.DESCRIPTORS_MAX + 1, 4 * wire.DESCRIPTORS_MAX + 16),
        read_frame(0, [(0, 1), (1, 1)], [0, 0], [0, 2]),
        wire.encode_list(0, 0, np.ones((1, 5), np.int64)),  # the number is taken
        b"\xff" * 300,
    ],
)
def test_a_request_out_of_bounds_ends_its_connection_only(producer, frame):
    reader, beside = producer.reader(), producer.reader()
    assert beside.epoch() == EPOCH
    reader.say(frame)
    assert reader.ended()
    assert beside.epoch() == EPOCH
    assert_serves(producer)


def test_prepared_lists_are_bounded_by_their_number(monkeypatch, producer):
    monkeypatch.setattr(wire, "LISTS_MAX", 5)
    reader = producer.reader()
    rows = producer.rows()
    reader.say(*[wire.encode_list(number, 0, rows) for number in (2, 3, 4)])
    reader.epoch()
    reader.say(wire.encode_list(5, 0, rows))
    assert reader.ended()


def test_prepared_lists_are_bounded_by_their_rows(monkeypatch, producer):
    monkeypatch.setattr(tcp_requests, "ROWS_OF_ONE_MAX", 10)
    reader = producer.reader()
    rows = np.repeat(producer.rows(), 8, axis=0)
    reader.say(wire.encode_list(2, 0, rows))
    reader.epoch()
    reader.say(wire.encode_list(3, 0, rows[:1]))
    assert reader.ended()


def outside(rows):
    """Rows that do not lie in the blocks of group 0."""
    address, nbytes, _, stride, count = rows[0].tolist()
    return [
        [address - 1, nbytes, 0, stride, count],
        [address + 1, nbytes, 0, stride, count],
        [address, nbytes, 0, stride, count + 1],
        [address, nbytes + 1, 0, stride + 1, count],
        [address, nbytes, 1, stride, count],
        [address, 2 * nbytes, 0, 2 * stride, count // 2],
        [address, 0, 0, 0, 0],
        [-1] * 5,
        [(1 << 63) - 1] * 5,
        [0, 1 << 62, 0, 1 << 62, 2],
    ]


def test_rows_outside_the_blocks_are_refused_at_the_first_read(producer):
    epoch = producer.lease(0, range(64), range(64))
    reader = producer.reader()
    bad = outside(producer.rows())
    for number, row in enumerate(bad):
        reader.say(wire.encode_list(10 + number, 0, np.array([row], np.int64)))
        reader.say(read_frame(10 + number, [(0, epoch)], [0]))
        status, why, epochs = reader.answer()
        assert (status, epochs) == (wire.REFUSED, []), row
        assert why.decode()
    reader.say(read_frame(0, [(0, epoch)], [1]))
    assert reader.answer() == (wire.DONE, producer.cache[0, 1].tobytes(), [epoch])


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (read_frame(77, [(0, 1)], [0]), "prepared list 77 is not known"),
        (read_frame(0, [(0, 1)], [64]), "a descriptor's number leaves"),
        (read_frame(0, [(0, 1)], [-1]), "a descriptor's number leaves"),
        (read_frame(0, [(8, 1)], [0]), "there is no epoch slot 8"),
        (read_frame(0, [((1 << 32) - 1, 1)], [0]), "there is no epoch slot"),
        (wire.encode_epoch(8), "there is no epoch slot 8"),
        (wire.encode_epoch((1 << 32) - 1), "there is no epoch slot"),
        (wire.encode_list(5, 2, np.ones((1, 5), np.int64)) + read_frame(5, [(0, 1)], [0]), "there is no group 2"),
        (wire.encode_list(5, 65535, np.ones((1, 5), np.int64)) + read_frame(5, [(0, 1)], [0]), "no group 65535"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name_and_the_connection_lives(producer, frame, why):
    reader = producer.reader()
    reader.say(frame)
    status, detail, epochs = reader.answer()
    assert (status, epochs) == (wire.REFUSED, [])
    assert why in detail.decode()
    assert reader.epoch() == EPOCH


def test_a_block_that_is_not_leased_is_refused_and_no_byte_is_sent(producer):
    epoch = producer.lease(0, [4, 5, 6], [9])
    reader = producer.reader()
    for prepared_list, blocks, block in ((0, [4, 7, 5], 7), (0, [63], 63), (1, [9, 4], 4)):
        reader.say(read_frame(prepared_list, [(0, epoch)], blocks))
        assert reader.answer() == (
            wire.REFUSED,
            f"block {block} of group {prepared_list} is not one of the lease in slot 0".encode(),
            [],
        )
    reader.say(read_frame(0, [(0, epoch)], [6]))
    assert reader.answer()[1] == producer.cache[0, 6].tobytes()


def test_a_block_of_another_lease_of_the_same_read_is_refused(producer):
    leases = [(0, producer.lease(0, [1], [])), (1, producer.lease(1, [2], []))]
    reader = producer.reader()
    reader.say(read_frame(0, leases, [1, 2], [0, 1]), read_frame(0, leases, [1, 2], [1, 0]))
    assert reader.answer()[1] == producer.cache[0, [1, 2]].tobytes()
    status, why, _ = reader.answer()
    assert (status, why) == (wire.REFUSED, b"block 2 of group 0 is not one of the lease in slot 0")


@pytest.mark.parametrize("step", [-1, 1, -(1 << 39), 1 << 62])
def test_under_an_epoch_that_is_not_held_nothing_is_sent(producer, step):
    epoch = producer.lease(0, [4], [9])
    reader = producer.reader()
    reader.say(read_frame(0, [(0, epoch + step)], [4]))
    assert reader.answer() == (wire.NOT_HELD, b"", [epoch])


def test_nothing_is_sent_under_a_free_slot_even_with_its_epoch(producer):
    reader = producer.reader()
    reader.say(read_frame(0, [(3, EPOCH)], [4]))
    assert reader.answer() == (wire.NOT_HELD, b"", [EPOCH - 1])


def test_of_two_leases_the_one_that_is_not_held_gives_zeros(producer):
    leases = [(0, producer.lease(0, [1, 2], [])), (1, EPOCH + 9)]
    reader = producer.reader()
    reader.say(read_frame(0, leases, [1, 60, 61, 2], [0, 1, 1, 0]))
    size = producer.block_bytes
    wanted = producer.cache[0, 1].tobytes() + bytes(2 * size) + producer.cache[0, 2].tobytes()
    assert reader.answer() == (wire.DONE, wanted, [leases[0][1], EPOCH])


# Leases that begin or end meanwhile.


def cut_of(data, source):
    """Return where zeros begin in what was sent of a source without zeros; all before that is right."""
    data, source = np.frombuffer(data, np.uint8), source.reshape(-1)
    cut = int(np.argmax(data == 0)) if (data == 0).any() else len(data)
    assert (data[:cut] == source[:cut]).all()
    assert not data[cut:].any()
    return cut


def test_of_a_lease_that_ends_during_an_answer_the_rest_is_zeros(make):
    producer = make(**LARGE)
    epoch = producer.lease(2, range(1024), [])
    reader = producer.reader(receive_bytes=64 << 10)
    reader.say(read_frame(0, [(2, epoch)], range(0, 1024, 2)))
    begun = reader.hear(wire.ANSWER.size)  # the socket is full then, or soon: the answer is larger than sockets
    producer.end(2)
    nbytes = producer.cache[0, ::2].nbytes
    assert wire.ANSWER.unpack(begun) == (wire.DONE, 0, 1, 0, nbytes)
    assert cut_of(reader.hear(nbytes), producer.cache[0, ::2]) < nbytes
    assert int.from_bytes(reader.hear(8), "little") == epoch + 1
    assert reader.epoch(2) == epoch + 1


def test_of_two_leases_in_one_read_the_one_that_lasts_is_served_to_the_end(make):
    producer = make(**LARGE)
    leases = [(0, producer.lease(0, range(512), [])), (1, producer.lease(1, range(512, 1024), []))]
    order = np.arange(1024).reshape(2, 512).T.ravel()  # in turns
    reader = producer.reader(receive_bytes=64 << 10)
    reader.say(read_frame(0, leases, order, order // 512))
    reader.hear(wire.ANSWER.size)
    producer.end(1)
    data = np.frombuffer(reader.hear(producer.cache[0].nbytes), np.uint8).reshape(512, 2, -1)
    assert (data[:, 0] == producer.cache[0, :512]).all()
    assert cut_of(np.ascontiguousarray(data[:, 1]), producer.cache[0, 512:]) < data[:, 1].size
    assert np.frombuffer(reader.hear(16), "<u8").tolist() == [leases[0][1], leases[1][1] + 1]


def test_an_ended_lease_whose_slot_is_leased_again_does_not_count_as_held(make):
    producer = make(**LARGE)
    epoch = producer.lease(2, range(1024), [])
    reader = producer.reader(receive_bytes=64 << 10)
    reader.say(read_frame(0, [(2, epoch)], range(1024)))
    reader.hear(wire.ANSWER.size)
    producer.end(2)
    assert producer.lease(2, [1], []) == epoch + 2
    assert cut_of(reader.hear(producer.cache[0].nbytes), producer.cache[0]) < producer.cache[0].nbytes
    assert epoch < int.from_bytes(reader.hear(8), "little") <= epoch + 2


def test_a_lease_that_begins_during_an_answer_of_zeros_is_not_held(make):
    producer = make(**LARGE)
    held, early = (0, producer.lease(0, range(1024), [])), (1, EPOCH + 1)
    reader = producer.reader(receive_bytes=64 << 10)
    reader.say(read_frame(0, [held, early], range(1024), [0] * 1000 + [1] * 24))
    reader.hear(wire.ANSWER.size)
    assert producer.lease(1, range(1024), []) == EPOCH + 1
    data = np.frombuffer(reader.hear(producer.cache[0].nbytes), np.uint8).reshape(1024, -1)
    assert (data[:1000] == producer.cache[0, :1000]).all()
    assert not data[1000:].any()
    assert np.frombuffer(reader.hear(16), "<u8").tolist() == [held[1], EPOCH]


def test_a_lease_that_begins_while_it_is_looked_up_is_not_taken_for_held(producer):
    reader = producer.reader()
    reader.epoch()

    def admit():
        producer.before_answer = lambda: None
        producer.lease(4, [1], [])

    producer.before_answer = admit  # the table was asked, and has said no
    reader.say(read_frame(0, [(4, EPOCH + 1)], [1]))
    assert reader.answer() == (wire.NOT_HELD, b"", [EPOCH])
    reader.say(read_frame(0, [(4, EPOCH + 1)], [1]))
    assert reader.answer() == (wire.DONE, producer.cache[0, 1].tobytes(), [EPOCH + 1])


# Much, little, slowly.


def test_more_requests_than_answers_may_wait_are_answered_in_order(make):
    producer = make(blocks=64, block_bytes=4096)
    epoch = producer.lease(0, range(64), [])
    reader = producer.reader(receive_bytes=4096)
    count = 20 * module.ANSWERS_MAX
    draw = np.random.default_rng(5)
    asked = [draw.integers(0, 64, draw.integers(1, 5)) for _ in range(count)]
    saying = threading.Thread(target=reader.say, args=[read_frame(0, [(0, epoch)], blocks) for blocks in asked])
    saying.start()  # while nothing is heard, nothing more is taken
    for blocks in asked if producer.encryption == "off" else ():
        assert reader.answer() == (wire.DONE, producer.cache[0, blocks].tobytes(), [epoch])
    if producer.encryption == "tls":  # which is not for two threads
        saying.join()
        for blocks in asked:
            assert reader.answer() == (wire.DONE, producer.cache[0, blocks].tobytes(), [epoch])
    saying.join()


def test_answers_that_wait_are_bounded_by_their_descriptors(make):
    producer = make(blocks=256, block_bytes=64)
    epoch = producer.lease(0, range(256), [])
    reader = producer.reader(receive_bytes=4096)
    blocks = np.tile(np.arange(0, 256, 2), 256)  # none touches the one before it
    frame = read_frame(0, [(0, epoch)], blocks)
    seen = []
    advance = producer.sender._advance

    def look(descriptor, client):
        again = advance(descriptor, client)
        seen.append((len(client.answers), sum(each.waiting for each in client.answers)))
        return again

    producer.sender._advance = look
    saying = threading.Thread(target=reader.say, args=[frame] * 12)
    if producer.encryption == "off":
        saying.start()
    else:
        reader.say(*[frame] * 4)
    for _ in range(12 if producer.encryption == "off" else 4):
        assert reader.answer()[1] == producer.cache[0, blocks].tobytes()
    assert max(waiting for _, waiting in seen) < module.STRETCHES_MAX + wire.DESCRIPTORS_MAX
    assert max(answers for answers, _ in seen) > 1
    if saying.is_alive():
        saying.join()


def test_requests_may_come_byte_by_byte(producer):
    epoch = producer.lease(0, [1, 2], [])
    reader = producer.visitor()
    for byte in hello_of(credentials(), reader):
        reader.say(bytes([byte]))
    assert any(reader.hear(wire.WELCOME_BYTES))
    frames = wire.encode_list(0, 0, producer.rows()) + read_frame(0, [(0, epoch)], [2, 1]) + wire.encode_epoch(0)
    for byte in frames:
        reader.say(bytes([byte]))
    assert reader.answer() == (wire.DONE, producer.cache[0, [2, 1]].tobytes(), [epoch])
    assert reader.answer()[0] == wire.DONE


@pytest.mark.parametrize("said", [0, 1, wire.HELLO_BYTES - 1, wire.HELLO_BYTES, wire.HELLO_BYTES + 2])
def test_half_a_hello_costs_nothing(producer, said):
    turns = {}
    advance = producer.sender._advance

    def count(descriptor, client):
        turns[client] = turns.get(client, 0) + 1
        return advance(descriptor, client)

    producer.sender._advance = count
    stranger = producer.visitor()
    stranger.say(hello_of(credentials(), stranger)[:said])
    member = producer.reader()
    for _ in range(100):
        member.epoch()
    waiting = next(iter(turns))
    assert not waiting.name
    assert turns[waiting] < 20  # and not thousands


def test_a_member_that_says_half_a_request_costs_nothing(producer):
    turns = {}
    reader = producer.reader()
    reader.epoch()
    advance = producer.sender._advance

    def count(descriptor, client):
        turns[client.name] = turns.get(client.name, 0) + 1
        return advance(descriptor, client)

    producer.sender._advance = count
    reader.say(read_frame(0, [(0, 1)], range(60))[:100])
    member = producer.reader(credentials(name="member"))
    for _ in range(100):
        member.epoch()
    (half,) = [count for name, count in turns.items() if name.startswith("reader")]
    assert half < 20


def test_a_reader_that_asks_for_much_work_has_it_done_in_turns(producer):
    turns = []
    learn, advance = producer.sender._desk._learn, producer.sender._advance
    producer.sender._advance = lambda *args: (turns.append(0), advance(*args))[1]

    def count(*args):
        turns[-1] += 1
        learn(*args)

    producer.sender._desk._learn = count
    greedy = producer.reader()
    prepared_lists = [wire.encode_list(2 + each, 0, producer.rows()) for each in range(3000)]
    greedy.say(*prepared_lists, wire.encode_epoch(0))
    assert greedy.answer()[0] == wire.DONE
    assert sum(turns) == 3002
    assert max(turns) <= 64  # one portion that is received has 4,681 of them


# Too many.


def test_strangers_are_bounded_and_the_oldest_goes(monkeypatch, producer):
    monkeypatch.setattr(module, "STRANGERS_MAX", 4)
    strangers = [producer.stranger() for _ in range(9)]
    if producer.encryption == "off":
        for each in strangers[-4:]:
            assert each.recv(wire.GREETING_BYTES, socket.MSG_WAITALL)
    assert producer.visitor().open(credentials())
    for each in strangers[:5]:
        with suppress(ConnectionError):
            while each.recv(1 << 10):
                pass


def hold(producer, reader):
    """Keep the thread that serves in the middle of a reader's request, until the event that is returned."""
    busy, go_on = threading.Event(), threading.Event()

    def wait():
        producer.before_answer = lambda: None
        busy.set()
        assert go_on.wait(PATIENCE_S)

    reader.epoch()
    producer.before_answer = wait
    reader.say(read_frame(0, [(0, 1)], [0]))
    assert busy.wait(PATIENCE_S)
    return go_on


@pytest.mark.parametrize("said", [0, 10, 16, 20])
def test_a_reader_that_goes_in_the_middle_of_a_request_is_let_go(producer, said):
    """Its last bytes and the end of the connection arrive together."""
    sock = producer.stranger()
    reader = Reader(sock, encrypted=producer.encryption == "tls")
    reader.open(credentials())
    reader.say(wire.encode_list(0, 0, producer.rows()))
    go_on = hold(producer, reader)
    reader.say(read_frame(0, [(0, 1)], [0])[:said])
    sock.shutdown(socket.SHUT_WR)
    go_on.set()
    assert reader.ended()
    assert_serves(producer)


def test_connections_that_were_accepted_do_not_pile_up(monkeypatch, producer):
    """While the thread is busy, others wait for it in a bounded queue."""
    monkeypatch.setattr(module, "STRANGERS_MAX", 4)
    taken = threading.Semaphore(0)
    take = producer.sender.take
    monkeypatch.setattr(producer.sender, "take", lambda sock: (take(sock), taken.release()))
    reader = producer.reader()
    go_on = hold(producer, reader)
    strangers = [producer.stranger() for _ in range(20)]
    for _ in strangers:
        assert taken.acquire(timeout=PATIENCE_S)
    assert len(producer.sender._arriving) <= 4
    go_on.set()
    assert reader.answer()[0] == wire.NOT_HELD
    assert_serves(producer)


def test_a_connection_that_comes_before_the_bell_is_read_is_let_in(monkeypatch, producer):
    """It rings a bell that has rung for another one and is not read yet: one reading silences both."""
    taken, strangers, read, take = threading.Semaphore(0), [], os.eventfd_read, producer.sender.take
    monkeypatch.setattr(producer.sender, "take", lambda sock: (take(sock), taken.release()))

    def late(bell):
        if not strangers:
            strangers.append(producer.stranger())
            for _ in range(2):
                assert taken.acquire(timeout=PATIENCE_S)
        return read(bell)

    monkeypatch.setattr(os, "eventfd_read", late)
    assert producer.visitor().open(credentials())
    assert not producer.sender._arriving, "it waits until another one comes"
    assert Reader(strangers[0], encrypted=producer.encryption == "tls").open(credentials())


def test_connections_of_one_reader_are_bounded(monkeypatch, producer):
    monkeypatch.setattr(module, "CLIENTS_OF_ONE_MAX", 3)
    other = producer.reader(credentials(name="other"))
    mine = [producer.reader() for _ in range(3)]
    for each in (mine[1], mine[0], mine[2]):
        each.epoch()
    newest = producer.reader()
    newest.epoch()
    assert mine[1].ended()  # used least recently
    for each in (mine[0], mine[2], other, newest):
        assert each.epoch() == EPOCH


def test_a_reader_with_a_key_of_its_own_has_no_more_by_other_names(monkeypatch, make):
    monkeypatch.setattr(module, "CLIENTS_OF_ONE_MAX", 3)
    producer = make(keys_differ=True)
    other = producer.reader(credentials(name="reader 0", key="cd" * 32))
    mine = [producer.reader(credentials(name=f"reader {number}")) for number in range(4)]
    mine[3].epoch()
    assert mine[0].ended()
    for each in (mine[1], mine[2], mine[3], other):
        assert each.epoch() == EPOCH


def test_connections_of_all_readers_are_bounded(monkeypatch, producer):
    monkeypatch.setattr(module, "CLIENTS_MAX", 3)
    readers = [producer.reader(credentials(name=f"reader {number}")) for number in range(3)]
    for each in reversed(readers):
        each.epoch()
    newest = producer.reader(credentials(name="newest"))
    newest.epoch()
    assert readers[2].ended()
    for each in (readers[0], readers[1], newest):
        assert each.epoch() == EPOCH


def test_half_requests_of_all_readers_are_bounded(monkeypatch, make):
    monkeypatch.setattr(module, "BUFFERED_BYTES_MAX", 1 << 20)
    producer = make()
    frame = wire.encode_list(9, 0, np.ones((wire.ROWS_MAX // 2, 5), np.int64))
    readers = [producer.reader(credentials(name=f"reader {number}")) for number in range(3)]
    ends = select.poll()
    for each in readers:
        ends.register(each.channel.fileno(), select.POLLIN)
        with suppress(ChannelClosed):
            each.say(frame[:-1])
    assert ends.poll(PATIENCE_S * 1e3)  # nobody is answered, so one of them was closed
    assert_serves(producer)


# Time.


def test_a_stranger_that_says_nothing_is_closed_in_time(clock, producer):
    strangers = [producer.stranger() for _ in range(2)]
    half = producer.visitor()
    half.say(hello_of(credentials(), half)[:50])
    member = producer.reader()
    member.epoch()
    clock.now += module.OPENING_S_MAX - 0.5
    half.say(b"x")  # more of it wins no time
    assert member.epoch() == EPOCH
    clock.now += 1.0
    for each in strangers:
        with suppress(ConnectionError):
            while each.recv(1 << 10):
                pass
    assert half.ended()
    assert member.epoch() == EPOCH  # a member may be idle


def test_a_reader_that_takes_nothing_is_closed_in_time(clock, make):
    producer = make(**LARGE)
    epoch = producer.lease(0, range(1024), [])
    stalled, slow = (producer.reader(receive_bytes=64 << 10) for _ in range(2))
    for each in (stalled, slow):
        each.say(read_frame(0, [(0, epoch)], range(1024)))
        each.hear(wire.ANSWER.size)
    portion = producer.cache[0].nbytes // 4
    for _ in range(3):
        clock.now += module.STALLED_S_MAX * 0.6
        slow.hear(portion)  # takes something, slowly
    assert stalled.ended()
    slow.hear(portion)
    assert int.from_bytes(slow.hear(8), "little") == epoch


def test_a_reader_that_was_idle_for_long_has_its_time_again(clock, producer):
    reader, other = producer.reader(), producer.reader()
    for each in (reader, other):  # once the second is served, the exporter has noted when it served the first
        each.epoch()
    clock.now += 10 * module.STALLED_S_MAX
    for _ in range(20):  # the exporter looks at its deadlines while the first reader is idle
        assert other.epoch() == EPOCH
    for _ in range(20):
        assert reader.epoch() == EPOCH


# Descriptors of files.


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []
        self.said = threading.Event()

    def emit(self, record):
        self.texts.append(record.getMessage())
        self.said.set()


@pytest.fixture
def lines():
    handler = _Lines()
    logging.getLogger("kvflow.reads").addHandler(handler)
    yield handler
    logging.getLogger("kvflow.reads").removeHandler(handler)


@pytest.mark.parametrize("left", [0, 1])
def test_without_file_descriptors_connections_wait_and_later_ones_work(monkeypatch, producer, lines, left):
    """With one left, it is accepted, and TLS cannot begin."""
    monkeypatch.setattr(module, "_TICK_S", 0.05)
    member = producer.reader()
    member.epoch()
    sock = socket.socket()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, limits[1]))
    try:
        sock.connect(producer.address)
        if left == 0 or producer.encryption == "tls":
            assert lines.said.wait(PATIENCE_S)
            assert any("accept" in text or "serve" in text or "closed" in text for text in lines.texts)
        assert member.epoch() == EPOCH  # who is in is served
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert_serves(producer)
    sock.close()


# The end.


def serving_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvflow-tcp")]


def test_closing_ends_every_connection_and_every_read_of_the_cache(make):
    before = len(serving_threads())
    producer = make(**LARGE)
    assert len(serving_threads()) == before + 2
    epoch = producer.lease(0, range(1024), [])
    reader = producer.reader(receive_bytes=64 << 10)
    idle, stranger, late = producer.reader(), producer.visitor(), producer.stranger()
    reader.say(read_frame(0, [(0, epoch)], range(1024)))
    reader.hear(wire.ANSWER.size)
    producer.close()
    assert len(serving_threads()) == before
    producer.cache[:] = 0
    for each in (reader, idle, stranger):
        assert each.ended()
    with suppress(ConnectionError):
        while late.recv(1 << 10):
            pass
    producer.close()  # again


def test_what_is_sent_while_it_closes_is_right_or_not_sent(make):
    producer = make(**LARGE)
    epoch = producer.lease(0, range(1024), [])
    reader = producer.reader(receive_bytes=64 << 10)
    source = producer.cache[0].tobytes()
    reader.say(read_frame(0, [(0, epoch)], range(1024)))
    reader.hear(wire.ANSWER.size)
    producer.close()
    producer.cache[:] = 0
    heard = reader.hear_all()
    assert len(heard) < len(source)
    assert heard == source[: len(heard)]


def test_an_address_that_is_taken_is_named(producer):
    taken = settings()
    host, port = producer.address
    with pytest.raises(TransportUnavailable, match=f"cannot listen on tcp://{host}:{port}"):
        TcpExporter(
            type(taken)(bind=f"tcp://{host}:{port}", advertise="tcp://127.0.0.1:0", connections=1, encryption="off"),
            producer.regions,
            region_of(producer.epochs),
            producer.serving,
        )


def test_it_is_found_where_it_is_advertised():
    one = Producer()
    one.put_away()
    made = TcpExporter(
        type(settings())(bind="tcp://127.0.0.1:0", advertise="tcp://example.org:0", connections=1, encryption="off"),
        one.regions,
        region_of(one.epochs),
        one.serving,
    )
    made.close()
    assert made.endpoint.startswith("tcp://example.org:")
    assert not made.endpoint.endswith(":0")


# Parts.


def test_regions_that_touch_or_overlap_are_one_memory():
    data = np.arange(100, dtype=np.uint8)
    at = data.ctypes.data
    whole = HostMemory([Region(at + 40, 60), Region(at, 40)])
    overlapping = HostMemory([Region(at + 20, 80), Region(at, 40), Region(at + 10, 5)])
    apart = HostMemory([Region(at + 50, 50), Region(at, 40), Region(at, 40, "VRAM")])
    addresses, lengths = np.array([at + 10, at + 39]), np.array([60, 2])
    for memory in (whole, overlapping):
        assert [bytes(each) for each in memory.stretches(addresses, lengths)] == [
            bytes(range(10, 70)),
            bytes(range(39, 41)),
        ]
    assert [bytes(each) for each in apart.stretches(np.array([at + 50, at]), np.array([3, 2]))] == [
        bytes([50, 51, 52]),
        bytes([0, 1]),
    ]


@pytest.mark.parametrize(("cores", "senders"), [(None, 1), (1, 1), (4, 1), (8, 2), (64, 4)])
def test_senders_leave_cores_to_the_engine(monkeypatch, cores, senders):
    monkeypatch.undo()
    assert module.senders_for(cores) == senders


def test_zeros_have_any_length():
    zeros = memoryview(bytes(10))
    for nbytes in (0, 1, 9, 10, 11, 35):
        assert b"".join(tcp_answers.zeros_for(nbytes, zeros)) == bytes(nbytes)


def test_tls_that_this_machine_cannot_do_is_told_before_anything_listens(monkeypatch):
    def refuse():
        raise ConfigInvalid("no TLS here")

    monkeypatch.setattr(module, "check_tls", refuse)
    monkeypatch.setattr(module, "_listen", lambda _endpoint: pytest.fail("it listens"))
    with pytest.raises(ConfigInvalid, match="no TLS here"):
        Producer("tls")
