"""The TCP data plane's backend against a real exporter, and against one that says what no honest exporter would."""

import os
import resource
import select
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvflow.ids import PeerId
from kvflow.layout.component import Region
from kvflow.reads.backend import BackendError, CheckedList, Envelope, seal
from kvflow.reads.bounds import check_rows
from kvflow.reads.contract import NOBODY, Carrier, PeerAddress, PreparedList
from kvflow.reads.tcp01 import backend as module
from kvflow.reads.tcp01 import wire
from tests.unit.kvflow.reads.tcp01.peers import EPOCH, Consumer, Producer, ScriptedExporter, credentials, done

WHO = credentials()
E7 = EPOCH + 7
ROWS = np.array([[4096, 512, 0, 512, 64]])
"""Of a producer that does not look."""


@pytest.fixture(params=["off", "tls"])
def encryption(request):
    return request.param


@pytest.fixture
def consume(encryption):
    """Makes consumers, which are closed in the end."""
    made = []

    def consume(**options):
        made.append(Consumer(encryption=encryption, **options))
        return made[-1]

    yield consume
    for each in made:
        each.close()


@pytest.fixture
def consumer(consume):
    return consume(connections=1)


@pytest.fixture
def producer(encryption):
    made = Producer(encryption)
    yield made
    made.put_away()


class Pair:
    """A consumer, and a scripted exporter that it reads from: prepared list 1 is prepared."""

    def __init__(self, consumer):
        self.consumer = consumer
        self.exporter = ScriptedExporter(consumer)
        self.peer = consumer.add(self.exporter.endpoint)
        consumer.prepare(self.peer, ROWS)
        self.connection = self.exporter.open()

    def post(self, count=2, leases=None):
        """Post a read of some blocks, one after the other."""
        read = self.consumer.read(self.peer, range(count), range(count), leases or [(3, E7, count)])
        return read, self.consumer.post(read)

    def asked(self, connection=None):
        """Hear the request for a read; a connection hears of the prepared list first."""
        connection = connection or self.connection
        request, body = self.exporter.request(connection)
        if request.kind == wire.PROGRAM:
            assert wire.decode_rows(body).tolist() == ROWS.tolist()
            request, body = self.exporter.request(connection)
        return request, body

    def close(self):
        self.exporter.close()


@pytest.fixture
def pair(consumer):
    made = Pair(consumer)
    yield made
    made.close()


@pytest.fixture
def pair_of_two(consume):
    made = Pair(consume(connections=2))
    yield made
    made.close()


DATA = bytes(range(1, 129)) * 8
"""Two blocks."""


# Peers that it adds.


@pytest.mark.parametrize(
    "endpoint",
    [
        *("", "tcp://", "tcp://:5", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:0"),
        "tcp://127.0.0.1:65536",
        *("tcp://127.0.0.1:-1", "tcp://127.0.0.1:x", "tcp://example.org:80", "tcp://\0:80", "tcp://127.0.0.1\0:80"),
        *("tcp://" + "a" * 300 + ":80", "tcp://256.0.0.1:80", "tcp://[::1:80x", "tcp://127.0.0.1:1x", "\ud800:80"),
    ],
)
def test_an_endpoint_that_is_no_address_is_refused(consumer, endpoint):
    with pytest.raises(BackendError, match="metadata_invalid"):
        consumer.add(endpoint)


PEER = PeerId("producer", 0, "0" * 32, "tcp://127.0.0.1:1", "")


def address_of(sealed=None, *, plane="tcp", who=WHO):
    sealed = seal(Envelope(plane, "producer", b"")) if sealed is None else sealed
    return PeerAddress(PEER, {"tcp": sealed}, Region(8, 8), None, "tcp://127.0.0.1:1", who)


@pytest.mark.parametrize("sealed", [b"", b"\xc1", b"kvt1", bytes(100)])
def test_metadata_that_makes_no_sense_is_refused(consumer, sealed):
    with pytest.raises(BackendError, match="metadata_invalid"):
        consumer.backend.add(address_of(sealed))


def test_metadata_of_another_plane_is_refused(consumer):
    with pytest.raises(BackendError, match="metadata_invalid"):
        consumer.backend.add(address_of(plane="nixl"))


def test_without_a_pass_nobody_is_dialed(consumer):
    with pytest.raises(BackendError, match="plane_unfit: the producer has given us no pass"):
        consumer.backend.add(address_of(who=NOBODY))


def test_its_own_metadata_is_what_others_add(consumer):
    backend = consumer.backend
    address = PeerAddress(PEER, {"tcp": backend.metadata}, Region(8, 8), "consumer", backend.data_endpoint, WHO)
    assert consumer.backend.add(address) == Carrier("tcp", "kind")


def test_a_target_in_device_memory_is_refused_by_name_without_a_way_to_it(consumer):
    peer = consumer.add("tcp://127.0.0.1:1")
    prepared_list = PreparedList(1, peer, ROWS, ROWS, target_memory="VRAM")
    with pytest.raises(BackendError, match="bounds: the TCP data plane does not reach the memory of these devices"):
        consumer.backend.prepare(CheckedList(prepared_list, check_rows(ROWS), check_rows(ROWS)))


def test_more_rows_than_a_frame_takes_are_refused_by_name(consumer):
    peer = consumer.add("tcp://127.0.0.1:1")
    rows = np.repeat(np.array([[4096, 1, 0, 1, 1]]), wire.ROWS_MAX + 1, axis=0)
    with pytest.raises(BackendError, match="bounds: a prepared list of 32769 rows"):
        consumer.prepare(peer, rows, rows)


# What it reads.


@pytest.mark.parametrize("connections", [1, 2, 4])
def test_blocks_arrive_where_they_belong(consume, producer, connections):
    consumer = consume(connections=connections)
    peer = consumer.add(producer.exporter.endpoint)
    consumer.prepare(peer, producer.rows(0))
    consumer.prepare(peer, producer.rows(1), list_id=2, group=1)
    epochs = [producer.lease(0, range(64), []), producer.lease(1, [], range(64))]
    reads = [
        (consumer.read(peer, [5, 6, 60], [1, 9, 2], [(0, epochs[0], 3)]), (0, [5, 6, 60]), [1, 9, 2]),
        (consumer.read(peer, [7], [3], [(1, epochs[1], 1)], list_id=2), (1, [7]), [3]),
    ]
    all_posted = [consumer.post(read) for read, _, _ in reads]
    wanted = np.zeros_like(consumer.target)
    for posted, (_, source, target) in zip(all_posted, reads, strict=True):
        assert consumer.wait(posted) == 0
        wanted[target] = producer.cache[source]
    assert (consumer.target == wanted).all()
    for slot, (read, _, _) in enumerate(reads):
        assert consumer.fence(peer, slot, read) == epochs[slot]


def test_epoch_slots_are_read_with_one_post(consumer, producer):
    peer = consumer.add(producer.exporter.endpoint)
    epochs = {slot: producer.lease(slot, [1], [1]) for slot in (2, 5)}
    assert consumer.wait(consumer.check(peer, 2)) == [epochs[2]]
    assert consumer.wait(consumer.check(peer, 5, 3, 5, first=2, last=7)) == [0, EPOCH, 0, epochs[5], 0, 0]
    for slots in ((8,), (2, 8)):
        with pytest.raises(BackendError, match="bounds: there is no epoch slot 8"):
            consumer.wait(consumer.check(peer, *slots))


def test_a_check_asks_for_each_slot_once_over_one_connection(pair_of_two):
    pair = pair_of_two
    posted = pair.consumer.check(pair.peer, *range(5, 200), *range(5, 200))
    for slot in range(5, 200):
        request, _ = pair.exporter.request(pair.connection)
        assert (request.kind, request.number) == (wire.EPOCH, slot)
    pair.connection.say(b"".join(done((E7 + slot).to_bytes(8, "little")) for slot in range(5, 200)))
    assert pair.consumer.wait(posted) == [E7 + slot for slot in range(5, 200)]
    assert len(connections_of(pair)) == 1


def test_a_chunk_beyond_the_bounds_of_a_request_is_divided(monkeypatch, consumer, producer):
    monkeypatch.setattr(wire, "DESCRIPTORS_MAX", 5)
    monkeypatch.setattr(wire, "LEASES_MAX", 3)
    peer = consumer.add(producer.exporter.endpoint)
    consumer.prepare(peer, producer.rows())
    epochs = [producer.lease(slot, range(64), []) for slot in range(7)]
    for shares in ([1], [20, 20], [1] * 40, [3, 1, 9, 2, 2, 8, 15]):
        leases = [(slot % 7, epochs[slot % 7], pairs) for slot, pairs in enumerate(shares)]
        count = 17 if len(shares) == 1 else 40
        if len(shares) == 1:
            leases = [(0, epochs[0], count)]
        consumer.target[:] = 0
        read = consumer.read(peer, range(count), range(count), leases)
        consumer.wait(consumer.post(read))
        assert (consumer.target[:count] == producer.cache[0, :count]).all()
        for slot, epoch in {(slot, epoch) for slot, epoch, _ in leases}:
            assert consumer.fence(peer, slot, read) == epoch


def test_a_refusal_is_told_and_the_peer_lives(consumer, producer):
    peer = consumer.add(producer.exporter.endpoint)
    consumer.prepare(peer, producer.rows())
    epoch = producer.lease(0, [1], [])
    reason = consumer.failure(consumer.post(consumer.read(peer, [1, 2], [1, 2], [(0, epoch, 2)])))
    assert (reason.code, reason.detail) == ("bounds", "block 2 of group 0 is not one of the lease in slot 0")
    assert not consumer.target.any()
    consumer.wait(consumer.post(consumer.read(peer, [1], [1], [(0, epoch, 1)])))
    assert (consumer.target[1] == producer.cache[0, 1]).all()


def test_a_read_that_is_refused_does_not_fail_those_that_share_its_chunk(consumer, producer):
    peer = consumer.add(producer.exporter.endpoint)
    consumer.prepare(peer, producer.rows())
    epochs = [producer.lease(slot, range(4 * slot, 4 * slot + 4), []) for slot in range(3)]
    producer.end(2)
    portion = consumer.read(peer, [0, 1, 3, 8, 9], range(5), [(0, epochs[0], 2), (1, epochs[1], 1), (2, epochs[2], 2)])
    posted = consumer.post(portion)
    assert consumer.wait(posted) == 0
    refused, ended = portion.shares[1].read_id, portion.shares[2].lease
    assert {read_id: reason.code for read_id, reason in posted.refused.items()} == {refused: "bounds"}
    assert posted.unheld == {(ended.slot, ended.epoch)}
    assert (consumer.target[:2] == producer.cache[0, :2]).all()
    assert not consumer.target[2:].any()
    assert [consumer.fence(peer, slot, portion) for slot in (0, 2)] == [epochs[0], epochs[2] + 1]
    with pytest.raises(BackendError, match="bounds: no chunk of read"):
        consumer.fence(peer, 1, portion)


def test_reads_that_were_refused_together_are_asked_for_alone(pair):
    portion = pair.consumer.read(pair.peer, range(4), [7, 2, 9, 4], [(3, E7, 1), (4, E7, 2), (3, E7 + 1, 1)])
    posted = pair.consumer.post(portion)
    together, _ = pair.asked()
    assert (together.few, together.units) == (3, 4)
    pair.connection.say(answer(wire.REFUSED, 4, leases=0) + b"alas")
    asked = []
    for _ in range(3):
        request, body = pair.asked()
        leases, index, _ = wire.decode_read(request, body)
        asked.append((leases[0][:2], index.tolist()))
    assert asked == [((3, E7), [0]), ((4, E7), [1, 2]), ((3, E7 + 1), [3])]
    pair.connection.say(done(b"a" * 512, E7), answer(wire.REFUSED, 1, leases=0) + b"x", done(b"b" * 512, E7 + 1))
    assert pair.consumer.wait(posted) == 0
    assert {read_id: reason.detail for read_id, reason in posted.refused.items()} == {portion.shares[1].read_id: "x"}
    wanted = np.zeros_like(pair.consumer.target)
    wanted[7], wanted[4] = ord("a"), ord("b")
    assert (pair.consumer.target == wanted).all()


def test_a_connection_that_ends_during_separate_reads_fails_the_chunk(pair):
    portion = pair.consumer.read(pair.peer, range(2), range(2), [(3, E7, 1), (4, E7, 1)])
    posted = pair.consumer.post(portion)
    pair.asked()
    pair.connection.say(answer(wire.REFUSED, 4, leases=0) + b"alas")
    for _ in range(2):
        pair.asked()
    pair.connection.say(done(b"a" * 512, E7)[:100])
    drain(pair.consumer, lambda: connections_of(pair)[0]._begun)
    pair.connection.close()
    again = pair.exporter.open()
    pair.asked(again)
    assert pair.consumer.backend.poll(posted) is None
    again.say(done(b"b" * 512, E7))
    with pytest.raises(BackendError, match="peer_lost"):
        pair.consumer.wait(posted)


# What fences say.


def odd(pair, *answers, leases=((3, E7, 2),)):
    """Answer chunks of one portion with these epochs, and return the portion."""
    consumer = pair.consumer
    count = sum(pairs for _, _, pairs in leases)
    read = consumer.read(pair.peer, [*range(count)] * len(answers), [*range(count)] * len(answers), leases)
    for number, epochs in enumerate(answers):
        posted = consumer.post(read, number * count, (number + 1) * count)
        pair.asked()
        pair.connection.say(done(bytes(512 * count), *epochs))
        consumer.wait(posted)
    return read


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        ([E7], E7),
        ([E7 + 1], E7 + 1),
        ([E7 - 1], E7 - 1),
        ([E7, E7, E7], E7),
        ([E7, E7 + 1, E7], E7 + 1),
        ([E7 + 1, E7], E7 + 1),
        ([E7, E7 - 3], E7 - 3),
        ([E7 - 3, E7], E7 - 3),
        ([E7 - 3, E7 + 2, E7], E7 + 2),
        ([E7 + 2, E7 - 3], E7 + 2),
        ([E7 + 2, E7 + 5], E7 + 5),
        ([0, (1 << 64) - 1], (1 << 64) - 1),
    ],
)
def test_a_fence_says_the_worst_that_any_chunk_has_told(pair, seen, verdict):
    read = odd(pair, *[[epoch] for epoch in seen])
    assert pair.consumer.fence(pair.peer, 3, read) == verdict


@pytest.mark.parametrize("order", [1, -1])
def test_a_fence_of_several_reads_of_a_slot_says_the_latest(pair, order):
    reads = [odd(pair, [epoch]) for epoch in (E7, E7 - 2, E7 + 1)][::order]
    assert pair.consumer.fence(pair.peer, 3, *reads) == E7 + 1


def test_a_fence_of_several_slots_has_the_value_of_each(pair):
    leases = ((3, E7, 1), (4, E7, 2), (6, E7 + 2, 1))
    portion = odd(pair, [E7, E7, E7 + 2], [E7 + 2, E7, E7 + 1], leases=leases)
    reads = [(share.read_id, share.lease) for share in portion.shares]
    assert pair.consumer.backend.post_check(pair.peer, 2, 7, reads, fence=True) == [0, E7 + 2, E7, 0, E7 + 1, 0]


def test_a_read_that_was_not_served_is_told_beside_a_later_one_of_its_slot(pair):
    """The fence then says that the lease is held: the chunk has told that its bytes are missing."""
    early, held = (pair.consumer.read(pair.peer, [0], [0], [(3, E7, 1)]) for _ in range(2))
    all_posted = []
    for portion, epoch in ((early, E7 - 1), (held, E7)):
        all_posted.append(pair.consumer.post(portion))
        pair.asked()
        pair.connection.say(done(bytes(512), epoch))
        pair.consumer.wait(all_posted[-1])
    assert pair.consumer.fence(pair.peer, 3, early, held) == E7
    assert [posted.unheld for posted in all_posted] == [{(3, E7)}, set()]


def test_a_fence_of_a_read_without_a_chunk_fails(pair):
    read = pair.consumer.read(pair.peer, [0], [0], [(3, E7, 1)])
    with pytest.raises(BackendError, match="bounds: no chunk of read"):
        pair.consumer.fence(pair.peer, 3, read)


def test_what_reads_have_told_is_remembered_for_a_while(monkeypatch, pair):
    monkeypatch.setattr(module, "READS_MAX", 3)
    reads = [odd(pair, [E7]) for _ in range(5)]
    for read in reads[:2]:
        with pytest.raises(BackendError, match="bounds: no chunk of read"):
            pair.consumer.fence(pair.peer, 3, read)
    assert [pair.consumer.fence(pair.peer, 3, read) for read in reads[2:]] == [E7] * 3


def test_what_was_told_is_forgotten_with_the_fence(pair):
    read = odd(pair, [E7])
    assert pair.consumer.fence(pair.peer, 3, read) == E7
    assert not pair.consumer.backend._told._values


@pytest.mark.parametrize("value", [E7 + 1, E7 - 1])
def test_a_lease_that_is_not_held_gives_no_byte_and_is_told(pair, value):
    read, posted = pair.post()
    pair.asked()
    pair.connection.say(wire.ANSWER.pack(wire.NOT_HELD, 0, 1, 0, 0) + value.to_bytes(8, "little"))
    assert pair.consumer.wait(posted) == 0
    assert posted.unheld == {(3, E7)}
    assert pair.consumer.fence(pair.peer, 3, read) == value
    assert not pair.consumer.target.any()


def test_no_bytes_under_a_lease_that_is_held_are_no_answer(pair):
    """They would be taken for the bytes of the lease."""
    _, posted = pair.post()
    pair.asked()
    pair.connection.say(wire.ANSWER.pack(wire.NOT_HELD, 0, 1, 0, 0) + E7.to_bytes(8, "little"))
    reason = pair.consumer.failure(posted)
    assert reason.code == "peer_lost"
    assert "sends nothing although the lease in slot 3 is held" in reason.detail


# An exporter that breaks the protocol.


def answer(status, nbytes, leases=1, zero=0, rest=0):
    return wire.ANSWER.pack(status, zero, leases, rest, nbytes)


@pytest.mark.parametrize(
    "said",
    [
        answer(wire.DONE, 1023),
        answer(wire.DONE, 1025),
        answer(wire.DONE, 0),
        answer(wire.DONE, (1 << 64) - 1),
        answer(wire.DONE, 1024, leases=0),
        answer(wire.DONE, 1024, leases=2),
        answer(wire.DONE, 1024, leases=65535),
        answer(wire.DONE, 1024, zero=1),
        answer(wire.DONE, 1024, rest=1),
        answer(wire.NOT_HELD, 1),
        answer(wire.NOT_HELD, 1024),
        answer(wire.NOT_HELD, 0, leases=0),
        answer(wire.REFUSED, 0, leases=0),
        answer(wire.REFUSED, wire.DETAIL_BYTES_MAX + 1, leases=0),
        answer(wire.REFUSED, (1 << 64) - 1, leases=0),
        answer(3, 1024),
        answer(255, 0, leases=0),
        b"\xff" * 16,
    ],
)
def test_an_answer_of_another_size_ends_the_connection_unwritten(pair, said):
    _, posted = pair.post()
    pair.asked()
    pair.connection.say(said, b"\xee" * 5000)
    reason = pair.consumer.failure(posted)
    assert reason.code == "peer_lost"
    assert "breaks the protocol" in reason.detail
    assert not pair.consumer.target.any()
    assert pair.connection.ended()


@pytest.mark.parametrize("said", [answer(wire.NOT_HELD, 0, leases=0), answer(wire.DONE, 9, leases=0), done(b"", 1)])
def test_a_slot_has_one_value(pair, said):
    posted = pair.consumer.check(pair.peer, 3)
    assert pair.exporter.request(pair.connection)[0].kind == wire.EPOCH
    pair.connection.say(said)
    assert pair.consumer.failure(posted).code == "peer_lost"


def test_an_unexpected_answer_ends_the_connection_and_the_next_redials(pair):
    pair.connection.say(done(DATA, E7))
    assert pair.connection.ended()
    read, posted = pair.post()
    connection = pair.exporter.open()
    pair.asked(connection)
    connection.say(done(DATA, E7))
    pair.consumer.wait(posted)
    assert pair.consumer.target[:2].tobytes() == DATA
    assert pair.consumer.fence(pair.peer, 3, read) == E7


def test_an_answer_too_many_behind_an_answer_is_noticed(pair):
    _, posted = pair.post()
    pair.asked()
    pair.connection.say(done(DATA, E7), done(b"\xee" * 1024, E7))
    assert pair.consumer.wait(posted) == 0
    assert pair.connection.ended()
    assert pair.consumer.target[:2].tobytes() == DATA


@pytest.mark.parametrize("detail", [b"x", b"\xff\xfe", b"x" * wire.DETAIL_BYTES_MAX])
def test_a_refusal_is_any_text_and_the_connection_lives(pair, detail):
    _, posted = pair.post()
    pair.asked()
    pair.connection.say(answer(wire.REFUSED, len(detail), leases=0) + detail)
    reason = pair.consumer.failure(posted)
    assert (reason.code, reason.detail) == ("bounds", detail.decode(errors="replace"))
    _, posted = pair.post()
    pair.asked()
    pair.connection.say(done(DATA, E7))
    assert pair.consumer.wait(posted) == 0


@pytest.mark.parametrize(
    ("greeting", "why"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3, "greeting"), (bytes(100), "greeting")],
)
def test_another_protocols_greeting_fails_what_waits(consumer, greeting, why):
    exporter = ScriptedExporter(consumer)
    peer = consumer.add(exporter.endpoint)
    consumer.prepare(peer, ROWS)
    posted = consumer.post(consumer.read(peer, [0], [0], [(3, E7, 1)]))
    connection = exporter.accept()
    connection.say(greeting)
    reason = consumer.failure(posted)
    assert reason.code == "peer_lost"
    assert why in reason.detail
    assert connection.ended()
    exporter.close()


@pytest.mark.parametrize(("pass_", "why"), [(b"l" * 32, "has not proven that it is the producer")])
def test_an_exporter_without_the_pass_is_not_believed(consumer, pass_, why):
    exporter = ScriptedExporter(consumer)
    peer = consumer.add(exporter.endpoint)
    consumer.prepare(peer, ROWS)
    posted = consumer.post(consumer.read(peer, [0], [0], [(3, E7, 1)]))
    connection = exporter.accept()
    exporter.prove(connection, pass_)
    connection.say(done(bytes(512), E7))
    reason = consumer.failure(posted)
    assert (reason.code, why in reason.detail) == ("peer_lost", True)
    assert connection.ended()
    assert not consumer.target.any()
    exporter.close()


def test_a_pass_that_is_not_accepted_is_told(consumer, producer):
    peer = consumer.add(producer.exporter.endpoint, who=credentials(pass_key=b"another"))
    consumer.prepare(peer, producer.rows())
    reason = consumer.failure(consumer.post(consumer.read(peer, [0], [0], [(3, E7, 1)])))
    assert reason.code == "peer_lost"
    assert "does not accept our pass" in reason.detail


def test_no_request_is_sent_before_the_exporter_has_proven_who_it_is(consumer):
    exporter = ScriptedExporter(consumer)
    peer = consumer.add(exporter.endpoint)
    consumer.prepare(peer, ROWS)
    consumer.post(consumer.read(peer, [0], [0], [(3, E7, 1)]))
    connection = exporter.accept()
    connection.say(wire.greeting(b"t" * 32))
    hello = wire.decode_hello(connection.hear(wire.HELLO_BYTES))
    connection.hear(hello.engine_bytes)
    for _ in range(20):
        consumer.backend.progress()
    poll = select.poll()
    poll.register(connection.channel.fileno(), select.POLLIN)
    assert not poll.poll(0)
    exporter.close()


# Connections that end.


def test_what_was_asked_over_a_connection_that_ends_is_asked_once_more(pair):
    read, posted = pair.post()
    asked = pair.asked()
    pair.connection.close()
    again = pair.exporter.open()
    assert pair.asked(again) == asked
    again.say(done(DATA, E7))
    assert pair.consumer.wait(posted) == 0
    assert pair.consumer.target[:2].tobytes() == DATA
    assert pair.consumer.fence(pair.peer, 3, read) == E7


def test_what_was_asked_twice_is_not_asked_again(pair):
    _, posted = pair.post()
    pair.asked()
    pair.connection.close()
    again = pair.exporter.open()
    pair.asked(again)
    again.close()
    assert pair.consumer.failure(posted).code == "peer_lost"


@pytest.mark.parametrize("said", [1, 15, 16, 17, 1039, 1047])
def test_an_answer_that_has_begun_is_not_requested_again_later_ones_are(pair, said):
    _, first = pair.post()
    second_read, second = pair.post()
    pair.asked()
    pair.asked()
    pair.connection.say(done(DATA, E7)[:said])
    drain(pair.consumer, lambda: connections_of(pair)[0]._begun)
    pair.connection.close()
    assert pair.consumer.failure(first).code == "peer_lost"
    again = pair.exporter.open()
    pair.asked(again)
    again.say(done(DATA, E7))
    assert pair.consumer.wait(second) == 0
    assert pair.consumer.fence(pair.peer, 3, second_read) == E7


def drain(consumer, reached):
    """Drive the backend until something is so."""
    poll = select.poll()
    poll.register(consumer.backend.fileno(), select.POLLIN)
    while not reached():
        assert poll.poll(60_000)
        consumer.backend.progress()


def test_two_connections_that_end_at_once_are_both_dialed_again(pair_of_two):
    pair = pair_of_two
    all_posted = [pair.post()[1] for _ in range(2)]
    connections = [pair.connection, pair.exporter.open()]
    for each in connections:
        pair.asked(each)
    for each in connections:
        each.close()
    wait_until_ended([each.descriptor for each in connections_of(pair)])
    pair.consumer.backend.progress()  # both are ready at once
    for _ in all_posted:
        again = pair.exporter.open()
        pair.asked(again)
        again.say(done(DATA, E7))
    for posted in all_posted:
        assert pair.consumer.wait(posted) == 0


@pytest.mark.parametrize("first", [0, 1])
def test_a_request_repeated_on_a_dead_connection_goes_to_a_third(pair_of_two, first):
    """It does not matter which end is noticed first."""
    pair = pair_of_two
    idle = pair.post()[1]
    posted = pair.post()[1]
    busy = pair.exporter.open()
    pair.asked()
    pair.connection.say(done(DATA, E7))
    assert pair.consumer.wait(idle) == 0
    pair.asked(busy)
    for each in (busy, pair.connection):
        each.close()
    wait_until_ended([each.descriptor for each in connections_of(pair)])
    pair.consumer.backend._go_on(connections_of(pair)[first])
    pair.consumer.backend.progress()
    again = pair.exporter.open()
    pair.asked(again)
    again.say(done(DATA, E7))
    assert pair.consumer.wait(posted) == 0


def connections_of(pair):
    return pair.consumer.backend._peers[pair.peer].connections


def wait_until_ended(descriptors):
    for descriptor in descriptors:
        poll = select.poll()
        poll.register(descriptor, select.POLLRDHUP)
        assert poll.poll(60_000)


def test_a_second_connection_that_is_not_opened_does_not_end_the_first(pair_of_two):
    pair = pair_of_two
    first = pair.post()[1]
    second = pair.post()[1]
    refused = pair.exporter.accept()
    pair.asked()
    pair.connection.say(done(DATA, E7))
    assert pair.consumer.wait(first) == 0
    refused.close()
    pair.asked()
    pair.connection.say(done(DATA, E7))
    assert pair.consumer.wait(second) == 0


def test_nobody_at_the_endpoint_fails_what_waits(consumer):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    peer = consumer.add(f"tcp://127.0.0.1:{port}")
    consumer.prepare(peer, ROWS)
    reason = consumer.failure(consumer.post(consumer.read(peer, [0], [0], [(3, E7, 1)])))
    assert reason.code == "peer_lost"
    assert "ECONNREFUSED" in reason.detail


@pytest.mark.parametrize("greets", [False, True])
def test_a_peer_that_accepts_and_says_nothing_fails_in_time(monkeypatch, consumer, greets):
    clock = SimpleNamespace(now=50.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    exporter = ScriptedExporter(consumer)
    peer = consumer.add(exporter.endpoint)
    consumer.prepare(peer, ROWS)
    posted = consumer.post(consumer.read(peer, [0], [0], [(3, E7, 1)]))
    if greets:
        connection = exporter.accept()
        connection.say(wire.greeting(b"t" * 32))
        connection.hear(wire.HELLO_BYTES)
    clock.now += module.OPENING_S_MAX
    consumer.backend.progress()
    assert consumer.backend.poll(posted) is None
    clock.now += 0.1
    consumer.backend.progress()
    with pytest.raises(BackendError, match="peer_lost: connecting took longer than 5 s"):
        consumer.backend.poll(posted)
    exporter.close()


def test_an_open_connection_may_be_silent(monkeypatch, pair):
    clock = SimpleNamespace(now=time.monotonic())  # the connection was opened by the real one
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    _, posted = pair.post()
    pair.asked()
    clock.now += 1000.0
    pair.consumer.backend.progress()
    pair.connection.say(done(DATA, E7))
    assert pair.consumer.wait(posted) == 0


def test_without_files_to_open_a_read_fails_and_the_next_one_is_read(pair):
    pair.connection.close()
    drain(pair.consumer, lambda: not connections_of(pair))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        _, posted = pair.post()
        reason = pair.consumer.failure(posted)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert reason.code == "peer_lost"
    assert "Too many open files" in reason.detail
    _, posted = pair.post()
    connection = pair.exporter.open()
    pair.asked(connection)
    connection.say(done(DATA, E7))
    assert pair.consumer.wait(posted) == 0


# The end of what is in flight.


def flying(pair):
    """Have a read in the middle of its answer, one behind it, and a check."""
    all_posted = [pair.post()[1], pair.post()[1], pair.consumer.check(pair.peer, 3)]
    pair.asked()
    pair.connection.say(done(DATA, E7)[:500])
    drain(pair.consumer, pair.consumer.target.any)
    return all_posted


def leave(consumer, peer):
    consumer.backend.leave(peer)


def remove(consumer, peer):
    consumer.backend.remove(peer, gone=False)


def reset(consumer, _peer):
    consumer.backend.reset()


def close(consumer, _peer):
    consumer.backend.close()
    consumer.close = lambda: None


@pytest.mark.parametrize("end", [leave, remove, reset, close])
def test_what_is_in_flight_ends_at_once_and_nothing_is_written_after_that(pair, end):
    all_posted = flying(pair)
    end(pair.consumer, pair.peer)
    before = pair.consumer.target.copy()
    for posted in all_posted:
        with pytest.raises(BackendError, match="peer_lost"):
            pair.consumer.backend.poll(posted)
    with suppress(module.ChannelClosed):
        pair.connection.say(done(b"\xee" * 1024, E7) * 100)
    if end is not close:
        for _ in range(50):
            pair.consumer.backend.progress()
    assert (pair.consumer.target == before).all()


@pytest.mark.parametrize("end", [leave, remove, reset, close])
def test_reads_that_were_refused_together_end_with_their_peer(pair, end):
    """Even before they are asked for alone."""
    portion = pair.consumer.read(pair.peer, range(2), range(2), [(3, E7, 1), (4, E7, 1)])
    posted = pair.consumer.post(portion)
    pair.asked()
    pair.connection.say(answer(wire.REFUSED, 4, leases=0) + b"alas")
    (connection,) = connections_of(pair)
    while connection.owed:
        pair.consumer.backend._go_on(connection)
    assert pair.consumer.backend.poll(posted) is None
    end(pair.consumer, pair.peer)
    with pytest.raises(BackendError, match="peer_lost: the peer was removed"):
        pair.consumer.backend.poll(posted)


@pytest.mark.parametrize("end", [leave, reset])
def test_a_peer_can_be_read_from_again_after_that(pair, end):
    flying(pair)
    end(pair.consumer, pair.peer)
    if end is reset:
        assert pair.consumer.add(pair.exporter.endpoint) == pair.peer
        pair.consumer.prepare(pair.peer, ROWS)
    _, posted = pair.post()
    connection = pair.exporter.open()
    pair.asked(connection)
    connection.say(done(DATA, E7))
    assert pair.consumer.wait(posted) == 0
    assert pair.consumer.target[:2].tobytes() == DATA


def test_another_peer_is_not_touched(pair):
    other = Pair.__new__(Pair)
    other.consumer, other.exporter = pair.consumer, ScriptedExporter(pair.consumer)
    other.peer = pair.consumer.add(other.exporter.endpoint, number=1)
    pair.consumer.prepare(other.peer, ROWS)
    other.connection = other.exporter.open()
    _, theirs = other.post()
    other.asked()
    flying(pair)
    pair.consumer.backend.remove(pair.peer, gone=True)
    pair.consumer.backend.remove(pair.peer, gone=True)  # again
    other.connection.say(done(DATA, E7))
    assert pair.consumer.wait(theirs) == 0
    other.close()


def open_files():
    return {path.name for path in Path("/proc/self/fd").iterdir() if path.exists()}


def test_no_descriptor_of_a_file_is_left(encryption):
    before = open_files()
    consumer = Consumer(encryption=encryption, connections=4)
    pair = Pair(consumer)
    flying(pair)
    pair.close()
    consumer.close()
    assert open_files() == before


def test_readable_means_news(pair):
    """Its descriptor tells of each answer, so that nobody needs to ask."""
    poll = select.poll()
    poll.register(pair.consumer.backend.fileno(), select.POLLIN)
    _, posted = pair.post()
    pair.asked()
    for _ in range(20):
        pair.consumer.backend.progress()
    assert not poll.poll(0)
    pair.connection.say(done(DATA, E7))
    assert poll.poll(60_000)
    assert pair.consumer.wait(posted) == 0
    pair.consumer.backend.progress()
    assert not poll.poll(0)
