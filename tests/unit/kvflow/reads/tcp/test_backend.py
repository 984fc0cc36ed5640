"""The reader's side: what it asks for, what it believes, and what becomes of requests whose connection ends."""

import fcntl
import select
import socket
import termios
import time
from contextlib import ExitStack
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from kvflow.errors import FailureCode, ProtocolViolation
from kvflow.ids import Credentials
from kvflow.layout.component import Region
from kvflow.reads.backend import BackendError, Envelope, encode_envelope
from kvflow.reads.bounds import OutOfBounds
from kvflow.reads.contract import PeerAddress
from kvflow.reads.tcp import backend, opening, wire
from kvflow.reads.tcp import connection as module
from kvflow.reads.tcp.connection import ToldEpochs
from kvflow.worker.connections import connection_error
from tests.unit.kvflow.reads.tcp.peers import (
    EPOCH,
    Consumer,
    Leases,
    Producer,
    ScriptedExporter,
    block,
    certificate_of,
    frame,
    piece,
)

HELD = EPOCH + 1
WANTED = bytes(range(1, 129)) * 4


@pytest.fixture
def consume():
    made = []

    def open_consumer(**options):
        made.append(Consumer(**options))
        return made[-1]

    yield open_consumer
    for each in made:
        each.close()


@pytest.fixture(params=["off", "tls"])
def encryption(request):
    return request.param


@pytest.fixture
def consumer(consume, encryption):
    return consume(encryption=encryption)


@pytest.fixture
def producer(encryption):
    made = Producer(encryption)
    yield made
    made.put_away()


class Pair:
    """A consumer with a peer that says what the test wants."""

    def __init__(self, consumer):
        self.consumer = consumer
        self.far = ScriptedExporter(consumer)
        self.epoch = self.far.lease(0, range(64), [])
        self.peer = consumer.join(self.far)
        self.backend = consumer.backend

    def ask(self, *blocks, leases=None):
        """Post a read of some blocks, each to the place of its number; return what was posted, and the portion."""
        leases = [(0, HELD, len(blocks))] if leases is None else leases
        portion = self.consumer.read(self.peer, blocks, blocks, leases)
        return self.consumer.post(portion), portion


@pytest.fixture
def pair(consume, encryption):
    made = Pair(consume(encryption=encryption, connections=1))
    yield made
    made.far.close()


@pytest.fixture
def pair_of_two(consume, encryption):
    made = Pair(consume(encryption=encryption, connections=2))
    yield made
    made.far.close()


def runs_of(body):
    return [*wire.RUN.iter_unpack(body)]


@pytest.mark.parametrize(
    "endpoint", ["", "tcp://", "tcp://localhost:1", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:65536"]
)
def test_an_endpoint_that_is_no_address_is_refused(consumer, endpoint):
    with pytest.raises(BackendError, match="at no address") as refused:
        consumer.add(endpoint, Leases())
    assert refused.value.reason.code == FailureCode.METADATA_INVALID


@pytest.mark.parametrize(
    "blob",
    [
        b"\x00",
        b"",  # as releases before this one
        msgspec.msgpack.encode((0, ())),
        msgspec.msgpack.encode((1, (((0, 0, 0, 1, 1, -1),),))),
        msgspec.msgpack.encode((1, (((0, 0, 1, 0, 1, -1),),))),
        msgspec.msgpack.encode((1, (((1, 2**62, 5, 1, 1, -1),),))),
        msgspec.msgpack.encode((1, (((1, 1, 2**15, 1, 1, -1), (1, 1, 1, 1, 1, -1)),))),
        msgspec.msgpack.encode((1, ((),) * (wire.GROUPS_MAX + 1))),
    ],
    ids=range(8),
)
def test_stretches_that_make_no_sense_are_refused(consumer, blob):
    with pytest.raises(BackendError) as refused:
        consumer.add("tcp://127.0.0.1:1", Leases(), blob=blob)
    assert refused.value.reason.code == FailureCode.METADATA_INVALID


def test_a_producer_that_publishes_as_another_release_is_named(consumer):
    with pytest.raises(
        BackendError, match="what it publishes for its TCP data plane is not of this release"
    ) as refused:
        consumer.add("tcp://127.0.0.1:1", Leases(), blob=b"")
    error = connection_error("prefill-0", refused.value.reason.code, refused.value.reason.detail)
    assert (error.code, error.remedy.partition(".")[0]) == (
        "protocol_violation",
        "Run the same kvflow release on both sides",
    )


@pytest.mark.parametrize("magic", [b"kvftcp01", b"HTTP/1.1"])
def test_a_producer_that_greets_as_another_release_is_named(consumer, magic):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = consumer.add(
            f"tcp://127.0.0.1:{listener.getsockname()[1]}", Leases(), certificate=certificate_of(consumer.identity)
        )
        posted = consumer.check(peer, 0)
        consumer.backend.progress()
        visitor, _ = listener.accept()
        with visitor:
            visitor.sendall(magic + bytes(opening.NONCE_BYTES))
            reason = consumer.failure(posted)
            with pytest.raises(ConnectionResetError):  # and has said nothing
                visitor.recv(1)
    error = connection_error("prefill-0", reason.code, reason.detail)
    assert type(error) is ProtocolViolation
    assert str(error) == (
        "prefill-0 cannot be read from: its TCP data plane breaks the protocol: "
        f"its greeting is {magic!r}, and that of this release is b'kvftcp02' [protocol_violation] "
        "Run the same kvflow release on both sides. If they already do, treat the peer as hostile."
    )


def test_without_a_pass_nobody_is_dialed(consumer, producer):
    who = Credentials("ab" * 32, "reader", 0, "1" * 32, b"")
    planes = {"tcp": producer_metadata(producer)}
    with pytest.raises(BackendError, match="no pass"):
        consumer.backend.add(PeerAddress("p", planes, Region(8, 8), None, producer.exporter.endpoint, who))


def producer_metadata(producer):
    return encode_envelope(Envelope("tcp", "producer", wire.encode_layout(producer.serving.tracks)))


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ((0, 512, 0, 512, 63), "does not go through all 64 blocks"),
        ((1, 512, 0, 512, 64), "leaves the stretches"),
        ((-1, 16, 0, 512, 64), "leaves the stretches"),
        ((0, 512, 0, 1024, 64), "leaves the stretches"),
        ((0, 512, 1, 512, 64), None),
    ],
)
def test_rows_outside_the_stretches_cannot_be_prepared(pair, rows, why):
    address = pair.far.cache[0].ctypes.data
    table = np.array([[address + rows[0], *rows[1:]]])
    if why is None:  # the device of host memory means nothing
        pair.consumer.prepare(pair.peer, table, list_id=5)
        return
    with pytest.raises(OutOfBounds, match=why):
        pair.consumer.prepare(pair.peer, table, list_id=5)


def test_neighbors_are_one_run_as_they_are_one_descriptor_over_nixl(pair):
    pair.ask(*range(10, 50), 3)
    request, body = pair.far.request(pair.far.open())
    assert (request.group, request.slot, request.epoch) == (0, 0, HELD)
    assert runs_of(body) == [block(10, 40), block(3)]


def test_a_lease_is_shown_once_on_a_connection(pair):
    pair.ask(1)
    reader = pair.far.open()
    heard = reader.hear(wire.REQUEST.size + wire.MAC_BYTES)
    assert wire.decode_request(heard).kind == wire.LEASE
    pair.ask(2)
    frames = reader.hear(2 * (wire.REQUEST.size + wire.RUN.size))
    assert wire.decode_request(frames).kind == wire.READ
    assert wire.decode_request(frames[wire.REQUEST.size + wire.RUN.size :]).kind == wire.READ


def test_reader_and_exporter_forget_their_leases_together(consume, producer, encryption):
    """A lease that was shown before 256 others is shown again, and the connection goes on."""
    consumer = consume(encryption=encryption, connections=1)
    kept = producer.lease(1, [7], [])
    peer = consumer.join(producer)
    consumer.wait(consumer.post(consumer.read(peer, [7], [0], [(1, kept, 1)])))
    for at in range(wire.LEASES_MAX):
        epoch = producer.lease(0, [at % 64], [])
        posted = consumer.post(consumer.read(peer, [at % 64], [1], [(0, epoch, 1)]))
        assert consumer.wait(posted) == 0
        assert not posted.unheld
        producer.end(0)
    (sender,) = producer.sender.clients.values()
    assert consumer.wait(consumer.post(consumer.read(peer, [7], [2], [(1, kept, 1)]))) == 0
    assert np.array_equal(consumer.target[2], producer.cache[0][7])
    assert [*producer.sender.clients.values()] == [sender], "the connection was cut"
    assert len(sender.macs) == 2


def test_a_large_request_over_an_idle_connection_is_sent_to_its_end(pair):
    """The socket takes a part of it. When it takes more, only its descriptor tells."""
    check = pair.consumer.check(pair.peer, 0)
    reader = pair.far.open()
    pair.far.request(reader)
    reader.say(frame(wire.DONE, EPOCH))
    pair.consumer.wait(check)
    (connection,) = pair.backend._peers[pair.peer].connections
    numbers, count = range(0, 64, 2), 0  # no two are neighbors: each is a run
    while not connection._said:  # the socket has taken all of it
        pair.ask(*numbers, leases=[(0, HELD, len(numbers))])
        count += 1
    assert connection.interest == select.EPOLLIN | select.EPOLLOUT
    poll = select.poll()
    poll.register(pair.backend.fileno(), select.POLLIN)
    reader._pump = lambda: poll.poll(0) and pair.backend.progress()
    for _ in range(count):
        assert runs_of(pair.far.request(reader)[1]) == [block(number) for number in numbers]
    assert connection.interest == select.EPOLLIN
    assert not poll.poll(0), "the socket has room, and nothing to say"


@pytest.mark.parametrize("encryption", ["tls"])
def test_a_request_goes_to_the_connection_that_owes_the_fewest_bytes(pair_of_two):
    large, _ = pair_of_two.ask(*range(40))
    first = pair_of_two.far.open()
    pair_of_two.far.request(first)
    small, _ = pair_of_two.ask(50)
    second = pair_of_two.far.open()
    assert runs_of(pair_of_two.far.request(second)[1]) == [block(50)]
    pair_of_two.ask(51)
    assert runs_of(pair_of_two.far.request(second)[1]) == [block(51)]
    first.say(piece(WANTED * 40) + frame(wire.DONE, HELD))
    assert pair_of_two.consumer.wait(large) == 0
    pair_of_two.ask(52)  # the first owes nothing now
    assert runs_of(pair_of_two.far.request(first)[1]) == [block(52)]
    second.say(piece(WANTED) + frame(wire.DONE, HELD))
    assert pair_of_two.consumer.wait(small) == 0
    assert not pair_of_two.backend._opening, "nothing is opening any longer"


@pytest.mark.parametrize("encryption", ["off"])
def test_the_end_of_an_answer_is_reported_as_soon_as_it_is_there(monkeypatch, pair):
    """While much is awaited, small parts of it wake nobody."""
    monkeypatch.setattr(module, "_AWAITED_BYTES_MIN", 100)
    monkeypatch.setattr(module, "_AT_ONCE_BYTES", 400)
    posted, _ = pair.ask(3)
    reader = pair.far.open()
    pair.far.request(reader)
    poll = select.poll()
    poll.register(pair.backend.fileno(), select.POLLIN)

    def receive(upto):
        while not pair.consumer.target[3, upto - 1]:
            assert poll.poll(60_000), "what has arrived is not reported"
            pair.backend.progress()

    reader.say(frame(wire.PIECE, 512) + WANTED[:20])
    receive(20)
    reader.say(WANTED[20:30])
    assert not poll.poll(50)
    reader.say(WANTED[30:460])
    receive(460)
    for at in range(460, 512):
        reader.say(WANTED[at : at + 1])
        receive(at + 1)
    reader.say(frame(wire.DONE, HELD))
    assert pair.consumer.wait(posted) == 0


@pytest.mark.parametrize("encryption", ["off"])
def test_one_connection_receives_a_portion_before_others_have_their_turn(monkeypatch, pair):
    asked = [pair.ask(number)[0] for number in (3, 4, 5)]
    reader = pair.far.open()
    for _ in asked:
        pair.far.request(reader)
    (connection,) = pair.backend._peers[pair.peer].connections
    answers = (piece(WANTED) + frame(wire.DONE, HELD)) * 3
    reader.say(answers)
    waiting = bytearray(4)
    while int.from_bytes(waiting, "little") < len(answers):
        fcntl.ioctl(connection.descriptor, termios.FIONREAD, waiting)
    monkeypatch.setattr(module, "_PORTION_BYTES", 500)
    connection.on_ready()
    assert [pair.backend.poll(posted) for posted in asked] == [0, None, None]
    assert pair.consumer.wait(*asked) == 0


def test_what_openssl_has_decrypted_is_received_without_another_event(monkeypatch, pair):
    monkeypatch.setattr(module, "_PORTION_BYTES", 1)
    posted, portion = pair.ask(3)
    reader = pair.far.open()
    pair.far.request(reader)
    reader.say(piece(WANTED) + frame(wire.DONE, HELD))  # one record
    assert pair.consumer.wait(posted) == 0
    assert pair.consumer.target[3].tobytes() == WANTED
    assert pair.consumer.fence(pair.peer, 0, portion) == HELD


def test_epoch_slots_are_read_with_one_post_over_one_connection(pair_of_two):
    posted = pair_of_two.consumer.check(pair_of_two.peer, 2, 4, 4, first=2, last=5)
    reader = pair_of_two.far.open()
    for slot in (2, 4):
        assert pair_of_two.far.request(reader)[0].slot == slot
        reader.say(frame(wire.DONE, EPOCH + slot))
    found = pair_of_two.consumer.wait(posted)
    assert (found[0], found[2]) == (EPOCH + 2, EPOCH + 4)


def test_a_chunk_beyond_the_bounds_of_a_request_is_divided(monkeypatch, consumer, producer):
    monkeypatch.setattr(wire, "RUNS_MAX", 5)
    epoch = producer.lease(3, range(64), [])
    peer = consumer.join(producer)
    source = np.random.default_rng(0).permutation(64)
    consumer.wait(consumer.post(consumer.read(peer, source, range(64), [(3, epoch, 64)])))
    assert np.array_equal(consumer.target, producer.cache[0][source])


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        ([HELD, HELD], HELD),
        ([HELD + 2, HELD], HELD + 2),
        ([HELD, HELD - 1], HELD - 1),
        ([HELD - 1, HELD + 1], HELD + 1),
    ],
)
def test_a_fence_says_the_worst_that_any_chunk_has_told(pair, seen, verdict):
    told = ToldEpochs()
    share = pair.ask(1, 2)[1].shares[0]
    for value in seen:
        told.note(share, value)
    assert told.verdicts(0, 0, [(share.read_id, share.lease)]) == [verdict]
    with pytest.raises(BackendError, match="no chunk of read"):
        told.verdicts(0, 0, [(share.read_id, share.lease)])


def test_what_reads_have_told_is_remembered_for_a_while(monkeypatch, pair):
    monkeypatch.setattr(module, "READS_MAX", 1)
    told = ToldEpochs()
    first, second = (pair.ask(1)[1].shares[0] for _ in range(2))
    told.note(first, HELD)
    told.note(second, HELD)
    with pytest.raises(BackendError, match="no chunk of read"):
        told.verdicts(0, 0, [(first.read_id, first.lease)])


@pytest.mark.parametrize(
    "said",
    [
        frame(wire.DONE, HELD),
        piece(WANTED) + frame(wire.DONE, HELD + 1),
        piece(WANTED) + piece(b"x"),
        frame(wire.PIECE, 0),
        frame(wire.PIECE, 513),
        frame(wire.ENDED, HELD),
        piece(WANTED[:5]) + frame(wire.REFUSED, 4) + b"text",
        frame(wire.REFUSED, 0),
        frame(wire.REFUSED, wire.DETAIL_BYTES_MAX + 1),
        frame(7, 1),
        piece(WANTED[:5]) + wire.ANSWER.pack(wire.PIECE, 1, 0, 0, 507),
    ],
    ids=range(11),
)
def test_an_answer_that_breaks_the_protocol_ends_the_connection(pair, said):
    posted, _ = pair.ask(3)
    reader = pair.far.open()
    pair.far.request(reader)
    reader.say(said)
    reason = pair.consumer.failure(posted)
    assert reason.code == FailureCode.PROTOCOL_VIOLATION
    assert "breaks the protocol" in reason.detail
    assert not pair.consumer.target[[*range(3), *range(4, 64)]].any()


def test_an_answer_may_come_in_any_pieces(pair):
    posted, portion = pair.ask(3, 9)
    reader = pair.far.open()
    pair.far.request(reader)
    content = WANTED + WANTED[::-1]
    for first in range(0, 1024, 300):
        for byte in piece(content[first : first + 300]):
            reader.say(bytes([byte]))
    reader.say(frame(wire.DONE, HELD))
    pair.consumer.wait(posted)
    assert pair.consumer.target[[3, 9]].tobytes() == content
    assert pair.consumer.fence(pair.peer, 0, portion) == HELD


@pytest.mark.parametrize("detail", [b"why", b"\xff\xfe", b"x" * wire.DETAIL_BYTES_MAX])
def test_a_refusal_is_any_text_and_the_connection_lives(pair, detail):
    posted, _ = pair.ask(3)
    reader = pair.far.open()
    pair.far.request(reader)
    reader.say(frame(wire.REFUSED, len(detail)) + detail)
    assert pair.consumer.failure(posted).detail == detail.decode(errors="replace")
    again, _ = pair.ask(3)
    pair.far.request(reader)
    reader.say(piece(WANTED) + frame(wire.DONE, HELD))
    assert pair.consumer.wait(again) == 0


def test_what_was_asked_over_a_connection_that_ends_is_asked_once_more(pair):
    posted, _ = pair.ask(3)
    reader = pair.far.open()
    pair.far.request(reader)
    reader.close()
    again = pair.far.open()
    assert runs_of(pair.far.request(again)[1]) == [block(3)]
    again.close()
    assert pair.consumer.failure(posted).code == FailureCode.PEER_LOST


def test_an_answer_that_has_begun_is_not_requested_again_later_ones_are(pair):
    posted, later = pair.ask(3)[0], pair.ask(4)[0]
    reader = pair.far.open()
    for _ in range(2):
        pair.far.request(reader)
    reader.say(frame(wire.PIECE, 512) + WANTED[:7])
    pair.consumer.backend.progress()
    while not pair.consumer.target[3, 6]:
        pair.consumer.backend.progress()
    reader.close()
    again = pair.far.open()
    assert runs_of(pair.far.request(again)[1]) == [block(4)]
    again.say(piece(WANTED) + frame(wire.DONE, HELD))
    assert pair.consumer.failure(posted).code == FailureCode.PEER_LOST
    assert pair.consumer.wait(later) == 0


def test_a_cancelled_read_ends_at_once_and_others_are_asked_again(pair):
    (posted, portion), other = pair.ask(3), pair.ask(4)[0]
    check = pair.consumer.check(pair.peer, 0)
    reader = pair.far.open()
    for _ in range(3):
        pair.far.request(reader)
    reader.say(frame(wire.PIECE, 512) + WANTED[:7])
    while not pair.consumer.target[3, 6]:
        pair.consumer.backend.progress()
    pair.backend.cancel([portion.shares[0].read_id])
    assert pair.backend.poll(posted) == 0
    assert [each.code for each in posted.refused.values()] == [FailureCode.CANCELLED]
    before = pair.consumer.target.copy()
    assert reader.ended()
    again = pair.far.open()
    assert runs_of(pair.far.request(again)[1]) == [block(4)]
    again.say(piece(WANTED) + frame(wire.DONE, HELD))
    assert pair.far.request(again)[0].kind == wire.EPOCH
    again.say(frame(wire.DONE, EPOCH))
    assert pair.consumer.wait(other, check) == [EPOCH]
    assert np.array_equal(pair.consumer.target[3], before[3])
    pair.backend.cancel([portion.shares[0].read_id, 10**6])
    assert pair.consumer.check(pair.peer, 0)
    assert pair.far.request(again)[0].kind == wire.EPOCH, "the connection lives"


def test_a_pass_that_is_not_accepted_is_told(consumer, producer):
    producer.barred.add("ab" * 32)
    peer = consumer.join(producer)
    reason = consumer.failure(consumer.check(peer, 0))
    assert (reason.code, reason.detail) == (FailureCode.PEER_LOST, "it does not accept our pass")


def test_nobody_at_the_endpoint_fails_what_waits(consumer):
    far = ScriptedExporter(consumer)
    far.close()
    peer = consumer.add(far.endpoint, far, certificate=certificate_of(far.identity))
    assert consumer.failure(consumer.check(peer, 0)).code == FailureCode.PEER_LOST


@pytest.mark.parametrize("how", ["silent", "reset"])
def test_a_peer_that_answers_and_lets_nobody_in_is_late_and_not_lost(monkeypatch, consumer, how):
    late_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s)
    for part in (opening, backend):
        monkeypatch.setattr(part, "time", clock)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        far = ScriptedExporter(consumer)
        stack.callback(far.close)
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        peer = consumer.add(endpoint, far, certificate=certificate_of(far.identity))
        posted = consumer.check(peer, 0)
        consumer.backend.progress()
        visitor = stack.enter_context(listener.accept()[0])
        visitor.sendall(opening.MAGIC + bytes(opening.NONCE_BYTES))
        poll = select.poll()
        poll.register(visitor, select.POLLIN)
        while not poll.poll(1):  # it has heard who we are when it says who it is
            consumer.backend.progress()
        if how == "reset":
            visitor.close()
        late_s = 60.0
        reason = consumer.failure(posted)
    assert (reason.code, reason.detail) == (
        FailureCode.DEADLINE_EXCEEDED,
        "it did not open in time: it answers, but is too busy to let us in, or we have too many connections",
    )


def test_readable_means_news_and_nothing_is_polled(pair):
    poll = select.poll()
    poll.register(pair.backend.fileno(), select.POLLIN)
    posted, _ = pair.ask(3)
    assert not posted.polled
    reader = pair.far.open()
    pair.far.request(reader)
    pair.backend.progress()
    assert not poll.poll(0)
    reader.say(piece(WANTED) + frame(wire.DONE, HELD))
    assert poll.poll(60_000)
    pair.consumer.wait(posted)
    assert not poll.poll(0)
