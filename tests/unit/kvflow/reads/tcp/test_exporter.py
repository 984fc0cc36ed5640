"""What the exporter serves, and what it refuses, to readers that say anything over real sockets."""

import threading
import time

import numpy as np
import pytest

from kvflow.reads.tcp import exporter as module
from kvflow.reads.tcp import wire
from kvflow.reads.tcp.stream import Stream
from tests.helpers.loops import looped
from tests.helpers.waiting import wait_until
from tests.unit.kvflow.reads.tcp.peers import EPOCH, SLOTS, Producer, block

BIG = 1 << 20


@pytest.fixture
def make():
    made = []

    def open_producer(*given, **options):
        made.append(Producer(*given, **options))
        return made[-1]

    yield open_producer
    for producer in made:
        producer.put_away()


@pytest.fixture(params=["off", "tls"])
def producer(request, make):
    return make(request.param)


@pytest.fixture
def clock(monkeypatch):
    """Returns a function that moves the exporter's clock on."""
    moved, now = [0.0], time.monotonic
    monkeypatch.setattr(module.time, "monotonic", lambda: now() + moved[0])

    def move(seconds):
        moved[0] += seconds

    return move


def still_serves(producer):
    reader = producer.reader()
    assert reader.epoch(SLOTS - 1) == producer.epochs[SLOTS - 1]
    reader.close()


def held_bytes(producer, *blocks, group=0):
    return b"".join(producer.cache[group, each].tobytes() for each in blocks)


def test_a_read_has_the_bytes_of_its_runs_in_order_and_the_epoch(producer):
    epoch = producer.lease(3, [1, 2, 3, 9], [4])
    reader = producer.reader()
    runs = [block(9), block(1, 3, offset=16, nbytes=8, stride=100, times=2)]
    cache = producer.cache[0]
    wanted = cache[9].tobytes() + b"".join(cache[at, 16 + t * 100 :][:8].tobytes() for at in (1, 2, 3) for t in (0, 1))
    assert reader.read(3, epoch, *runs) == (wire.DONE, wanted, epoch)
    many = [block(1 + at % 3, offset=at, nbytes=2) for at in range(200)]
    wanted = b"".join(cache[1 + at % 3, at : at + 2].tobytes() for at in range(200))
    assert reader.read(3, epoch, *many) == (wire.DONE, wanted, epoch)
    assert reader.read(3, epoch, block(4), group=1) == (wire.DONE, held_bytes(producer, 4, group=1), epoch)


def test_large_answers_come_in_pieces(make):
    producer = make(blocks=8, block_bytes=BIG)
    epoch = producer.lease(0, range(8), [])
    reader = producer.reader()
    reader.say(wire.encode_lease(0, epoch, b""), wire.encode_read(0, 0, epoch, [block(0, 8, nbytes=BIG)]))
    sizes = []
    while (found := wire.ANSWER.unpack(reader.hear(wire.ANSWER.size)))[0] == wire.PIECE:
        at = sum(sizes)
        sizes.append(found[-1])
        assert reader.hear(found[-1]) == producer.cache[0].tobytes()[at : at + found[-1]]
    assert found[0] == wire.DONE
    assert (max(sizes), sum(sizes)) == (wire.PIECE_BYTES_MAX, 8 * BIG)


@pytest.mark.parametrize(
    "frame",
    [
        b"\0" * wire.REQUEST.size,
        wire.REQUEST.pack(9, 0, 0, 0, 0, 0, 0),
        wire.REQUEST.pack(wire.READ, 0, 0, 0, 0, 0, 1),
        wire.REQUEST.pack(wire.READ, 0, 0, wire.RUNS_MAX + 1, 0, 0, 1),
        wire.REQUEST.pack(wire.READ, 1, 0, 1, 0, 0, 1),
        wire.REQUEST.pack(wire.LEASE, 0, 0, 1, 0, 0, 1),
        wire.REQUEST.pack(wire.EPOCH, 0, 1, 0, 0, 0, 1),
        wire.REQUEST.pack(wire.EPOCH, 0, 0, 0, 0, 5, 1),
        wire.encode_read(0, 0, EPOCH, [block(0)]),
    ],
    ids=range(9),
)
def test_a_request_out_of_bounds_ends_its_connection_only(producer, frame):
    other, reader = producer.reader(), producer.reader()
    reader.say(frame)
    assert reader.ended()
    assert other.epoch() == EPOCH


@pytest.mark.parametrize(
    ("runs", "options", "why"),
    [
        ([block(0)], {"group": 2}, "there is no group 2"),
        ([block(0)], {"slot": SLOTS}, f"there is no epoch slot {SLOTS}"),
        ([block(0, stretch=1)], {}, "stretch 1 has a number out of bounds"),
        ([block(64)], {}, "leaves the blocks"),
        ([block(0, nbytes=513)], {}, "leaves the blocks or the bytes"),
        ([block(0, offset=2**62, nbytes=2**62)], {}, "leaves the blocks or the bytes"),
        ([block(0, stride=511, times=2)], {}, "leaves the blocks or the bytes"),
        ([block(-1)], {}, "out of bounds"),
        ([block(0, 0)], {}, "out of bounds"),
        ([block(5)], {}, "block 5 of group 0 is not one of the lease in slot 3"),
        ([block(0, 9)], {}, "block 4 of group 0 is not one"),
        ([block(1)], {"group": 1}, "block 1 of group 1 is not one"),
        ([block(0, nbytes=1)] * 40 + [block(0, nbytes=513)], {}, "out of bounds"),
        ([block(0, nbytes=1)] * 40 + [block(5)], {}, "block 5 of group 0 is not one"),
        ([block(0, 4, nbytes=1, times=64)] * 40, {}, "runs of 10240 pieces"),
    ],
)
def test_what_is_not_leased_or_not_there_is_refused(producer, runs, options, why):
    epoch = producer.lease(3, [0, 1, 2, 3], [])
    reader = producer.reader()
    kind, data, detail = reader.read(options.get("slot", 3), epoch, *runs, group=options.get("group", 0))
    assert (kind, data) == (wire.REFUSED, b"")
    assert why in detail
    assert reader.epoch(3) == epoch


def test_nothing_is_sent_under_a_free_slot_even_with_its_epoch(producer):
    assert producer.reader().read(3, EPOCH, block(0)) == (wire.ENDED, b"", EPOCH - 1)


def test_a_mac_is_required_and_looked_at_once(make):
    producer = make(macs=b"m" * 32)
    epoch = producer.lease(3, [0], [])
    reader = producer.reader()
    for _ in range(3):
        assert reader.read(3, epoch, block(0), mac=b"m" * 32)[0] == wire.DONE
    assert producer.reader().read(3, epoch, block(0), mac=b"m" * 32)[0] == wire.DONE
    assert producer.sender._leased._vouches.__self__.vouched == [b"m" * 32]
    liar = producer.reader()
    liar.say(wire.encode_lease(3, epoch, b"x" * 32), wire.encode_read(0, 3, epoch, [block(0)]))
    assert liar.ended()
    assert reader.read(3, epoch, block(0), mac=b"m" * 32)[0] == wire.DONE


def test_both_sides_forget_all_leases_when_there_are_too_many(monkeypatch, producer):
    monkeypatch.setattr(wire, "LEASES_MAX", 2)
    epochs = [producer.lease(slot, [slot], []) for slot in range(3)]
    reader = producer.reader()
    for slot, epoch in enumerate(epochs):
        assert reader.read(slot, epoch, block(slot))[0] == wire.DONE
    reader.say(wire.encode_read(0, 2, epochs[2], [block(2)]))
    assert reader.answer()[0] == wire.DONE
    reader.say(wire.encode_read(0, 0, epochs[0], [block(0)]))
    assert reader.ended()


def test_a_key_that_is_not_admitted_any_longer_has_no_further_answer(producer):
    reader = producer.reader()
    assert reader.epoch() == EPOCH
    producer.barred.add("ab" * 32)
    reader.say(wire.encode_epoch(0))
    assert reader.ended()


def stuck(producer, other):
    """Wait until the kernel takes no more of the answer to a long read: turns of the thread send nothing."""
    left = -1
    while (now := sum(each.piece.left for each in [*producer.sender.clients.values()] if each.piece)) != left:
        left = now
        for _ in range(3):
            other.epoch()


def long_read(producer, reader, slot, epoch):
    """Ask for all blocks of group 0, and hear the first byte."""
    runs = [block(0, producer.num_blocks, nbytes=producer.block_bytes)]
    reader.say(wire.encode_lease(slot, epoch, b""), wire.encode_read(0, slot, epoch, runs))
    kind, *_, nbytes = wire.ANSWER.unpack(reader.hear(wire.ANSWER.size))
    assert kind == wire.PIECE
    return nbytes


def test_the_rest_of_a_piece_is_zeros_after_the_end_of_its_lease(make):
    producer = make(blocks=16, block_bytes=BIG)
    epoch = producer.lease(0, range(16), [])
    reader = producer.reader()
    promised = long_read(producer, reader, 0, epoch)
    stuck(producer, producer.reader())
    producer.end(0)
    producer.before = producer.cache[0].tobytes()
    producer.cache[:] = 0xEE  # the engine has the blocks again
    heard = promised
    content = reader.hear(promised)
    while (found := wire.ANSWER.unpack(reader.hear(wire.ANSWER.size)))[0] == wire.PIECE:
        heard += found[-1]
        content += reader.hear(found[-1])
    assert (found[0], found[-1]) == (wire.ENDED, epoch + 1)
    assert heard < 16 * BIG, "all was sent before the lease ended"
    sent = producer.before[: len(content)]
    assert content.rstrip(b"\0") == sent[: len(content.rstrip(b"\0"))], "bytes of blocks that are not leased any longer"
    assert producer.reader().read(0, producer.lease(0, [1], []), block(1))[0] == wire.DONE


def test_a_lease_may_end_between_the_head_of_a_piece_and_its_bytes(monkeypatch, make):
    producer = make(blocks=8, block_bytes=BIG)
    epoch = producer.lease(0, range(8), [])
    reader = producer.reader()
    flush = producer.sender._flush

    def end_after_head(client):
        if client.piece is not None and (0, epoch) in producer.held:
            producer.end(0)
        return flush(client)

    monkeypatch.setattr(producer.sender, "_flush", end_after_head)
    promised = long_read(producer, reader, 0, epoch)
    assert not any(reader.hear(promised)), "bytes of blocks that are not leased any longer"
    assert reader.answer()[::2] == (wire.ENDED, epoch + 1)


def test_leases_that_are_shown_count_in_the_account(producer):
    reader = producer.reader()
    reader.say(*(wire.encode_lease(3, EPOCH + at, b"") for at in range(wire.LEASES_MAX)))
    assert reader.epoch(3) == EPOCH
    accounts = producer.exporter._access.accounts
    while accounts.buffered != 320 * wire.LEASES_MAX:
        still_serves(producer)
    reader.say(wire.encode_lease(3, 1, b""))
    while accounts.buffered != 320:
        still_serves(producer)


def test_a_slot_that_is_leased_again_does_not_count_as_held(make):
    producer = make(blocks=16, block_bytes=BIG)
    epoch = producer.lease(0, range(16), [])
    reader = producer.reader()
    promised = long_read(producer, reader, 0, epoch)
    stuck(producer, producer.reader())
    producer.end(0)
    producer.lease(0, range(16), [])
    reader.hear(promised)
    assert reader.answer()[::2] == (wire.ENDED, epoch + 2)


def test_a_lease_that_begins_while_it_is_looked_up_is_not_taken_for_held(producer):
    epoch = EPOCH + 1

    def begin():
        producer.before_answer = lambda: None
        producer.lease(3, [0], [])

    producer.before_answer = begin
    assert producer.reader().read(3, epoch, block(0)) == (wire.ENDED, b"", epoch - 1)


def test_the_epoch_is_compared_after_the_last_byte_was_copied(monkeypatch, producer):
    epoch = producer.lease(3, [0], [])
    ordered = []

    def order():
        if not ordered:
            ordered.append(True)
            producer.end(3)

    monkeypatch.setattr(module, "order_memory", order)
    assert producer.reader().read(3, epoch, block(0)) == (wire.ENDED, b"", epoch + 1)


def test_requests_may_come_byte_by_byte_and_many_at_once(producer):
    epoch = producer.lease(3, range(64), [])
    reader = producer.reader()
    requests = [wire.encode_lease(3, epoch, b"")]
    requests += [wire.encode_read(0, 3, epoch, [block(at), block(63 - at)]) for at in range(64)]
    for byte in b"".join(requests[:2]):
        reader.say(bytes([byte]))
    reader.say(*requests[2:])
    for at in range(64):
        assert reader.answer() == (wire.DONE, held_bytes(producer, at, 63 - at), epoch)


def test_while_a_reader_takes_nothing_no_further_request_is_received(make):
    """What waits is bounded by the buffers of the kernel, and one request and answer of ours."""
    producer = make(blocks=16, block_bytes=BIG)
    epoch = producer.lease(0, range(16), [])
    reader = producer.reader()
    long_read(producer, reader, 0, epoch)
    frame = wire.encode_read(0, 0, epoch, [block(0, nbytes=1)] * wire.RUNS_MAX)
    reader.stream._sock.setblocking(False)
    said = 0
    while (count := reader.stream.write(frame)) and said < 64 << 20:
        said += count
    still_serves(producer)
    kept = max(len(each.buffer) + len(each.said) for each in [*producer.sender.clients.values()])
    assert kept <= wire.FRAME_BYTES_MAX + module.COPIED_BYTES_MAX
    assert said < 64 << 20


def test_half_a_request_is_counted_has_its_time_and_harms_nobody(clock, producer):
    reader = producer.reader()
    frame = wire.encode_read(0, 0, EPOCH, [block(0)] * 900)
    reader.say(frame[:-1])
    accounts = producer.exporter._access.accounts
    while accounts.buffered != len(frame) - 1:
        still_serves(producer)
    clock(module.HALF_S_MAX + 1)
    assert reader.ended()
    while accounts.buffered:
        still_serves(producer)


def test_a_request_that_trickles_in_has_no_more_time_than_half_of_one(clock, producer):
    """Its time counts from its first byte: a byte now and then buys none."""
    reader = producer.reader()
    assert reader.epoch() == EPOCH
    (client,) = producer.sender.clients.values()
    frame = wire.encode_read(0, 0, EPOCH, [block(0)] * 900)
    served_s = 0.0
    while client in [*producer.sender.clients.values()]:
        assert served_s <= module.HALF_S_MAX, "each byte buys time"
        at = round(served_s / 20)
        reader.say(frame[at : at + 1])
        while len(client.buffer) <= at:
            still_serves(producer)
        clock(20.0)
        served_s += 20.0
        for _ in range(2):  # the thread looks after it has served
            still_serves(producer)
    assert reader.ended()
    assert served_s > module.HALF_S_MAX


def test_a_reader_that_takes_nothing_is_closed_in_time(clock, make):
    producer = make(blocks=16, block_bytes=BIG)
    epoch = producer.lease(0, range(16), [])
    reader, idle = producer.reader(), producer.reader()
    long_read(producer, reader, 0, epoch)
    assert idle.epoch(1) == EPOCH
    while len(producer.sender.clients) > 1:
        clock(module.STALLED_S_MAX + 1)  # again, because the kernel may have taken some meanwhile
        assert idle.epoch(1) == EPOCH
    assert reader.ended()


@pytest.mark.parametrize("said", [0, 10, 24, 40])
def test_a_reader_that_goes_in_the_middle_of_a_request_is_let_go(producer, said):
    reader = producer.reader()
    reader.say(wire.encode_read(0, 0, EPOCH, [block(0)])[:said])
    reader.close()
    while producer.sender.clients:
        still_serves(producer)
    accounts = producer.exporter._access.accounts
    wait_until(lambda: not (accounts.count or accounts.buffered))


def test_each_request_makes_its_connection_the_last_that_is_closed(producer):
    reader = producer.reader()
    assert reader.epoch() == EPOCH
    (client,) = producer.sender.clients.values()
    for _ in range(2):
        used_at = client.member.account.used_at
        assert reader.epoch() == EPOCH
        assert client.member.account.used_at > used_at


class Tap(Stream):
    """A reader that has said something before, and takes so many bytes."""

    def __init__(self, requests, room):
        self.requests, self.room, self.taken = bytearray(requests), room, 0

    def read(self, into):
        count = min(len(into), len(self.requests))
        into[:count] = self.requests[:count]
        del self.requests[:count]
        return count

    def write(self, content):
        return self._take(len(content))

    def send(self, spans):
        count = self._take(spans.left)
        if count:
            spans.skip(count)
        return count

    def _take(self, nbytes):
        count = min(nbytes, self.room - self.taken)
        self.taken += count
        return count


def client_of(producer, *requests, room=1 << 40):
    """Return a client of the exporter that is served by hand."""
    account = producer.exporter._access.accounts.enter("a key", None)
    who = producer.reader()
    assert who.epoch(SLOTS - 1) == EPOCH
    (served,) = producer.sender.clients.values()
    return module._Client(served.member._replace(stream=Tap(b"".join(requests), room), account=account), 0.0)


def test_each_byte_that_a_reader_takes_gives_it_time(make, clock):
    producer = make()
    epoch = producer.lease(0, range(64), [])
    request = wire.encode_read(0, 0, epoch, [block(0, 64)])
    client = client_of(producer, wire.encode_lease(0, epoch, b""), request, room=0)
    while producer.sender._advance(client):
        pass
    unsent = len(client.said)
    for _ in range(3):
        since = client.since
        clock(1.0)
        assert not producer.sender._advance(client)
        assert client.since == since
        client.member.stream.room += 10
        assert not producer.sender._advance(client)
        assert client.since > since
    assert len(client.said) == unsent - 30


def test_a_turn_of_one_reader_has_a_bound_in_bytes(make):
    """Also if the reader takes each piece at once."""
    producer = make(blocks=16, block_bytes=BIG)
    epoch = producer.lease(0, range(16), [])
    runs = [block(0, 16, nbytes=BIG)]
    client = client_of(producer, wire.encode_lease(0, epoch, b""), wire.encode_read(0, 0, epoch, runs))
    turns = 1
    before = 0
    while producer.sender._advance(client):
        assert client.member.stream.taken - before <= 2 * wire.PIECE_BYTES_MAX
        before = client.member.stream.taken
        turns += 1
    assert turns >= 4
    assert client.member.stream.taken >= 16 * BIG


def test_what_is_made_for_a_reader_that_takes_nothing_has_a_bound(make):
    producer = make()
    epoch = producer.lease(0, range(64), [])
    many = [wire.encode_read(0, 0, epoch, [block(0, 64)])] * 1000
    client = client_of(producer, wire.encode_lease(0, epoch, b""), *many, room=0)
    while producer.sender._advance(client):
        pass
    assert module.COPIED_BYTES_MAX <= len(client.said) <= 2 * module.COPIED_BYTES_MAX
    assert len(client.buffer) <= wire.FRAME_BYTES_MAX


def test_a_buffer_has_room_for_one_request_and_no_more(make):
    producer = make()
    frame = wire.encode_read(0, 0, EPOCH, [block(0)] * wire.RUNS_MAX)
    client = client_of(producer, frame[:-1])
    assert not producer.sender._advance(client)
    assert len(client.buffer) == len(frame) - 1
    client.member.stream.requests += frame[-1:] * 1000
    producer.sender._receive(client)
    assert len(client.buffer) == wire.FRAME_BYTES_MAX


def test_a_defect_of_ours_ends_one_connection(monkeypatch, producer, caplog):
    broken = producer.reader()
    monkeypatch.setattr(producer.sender, "_read", None)
    broken.say(wire.encode_lease(3, EPOCH, b""), wire.encode_read(0, 3, EPOCH, [block(0)]))
    assert broken.ended()
    assert "serving a reader over TCP failed" in caplog.text
    still_serves(producer)


def test_closing_ends_every_connection_and_every_read_of_the_cache(make):
    producer = make(blocks=16, block_bytes=BIG)
    epoch = producer.lease(0, range(16), [])
    readers = [producer.reader() for _ in range(3)]
    for reader in readers[:2]:
        long_read(producer, reader, 0, epoch)
    producer.close()
    producer.close()
    assert all(reader.ended() for reader in readers)
    assert "kvflow-tcp-0" not in [thread.name for thread in threading.enumerate()]


@looped("cores, senders", [(None, 1), (1, 1), (4, 1), (8, 2), (64, 4)])
def test_senders_leave_cores_to_the_engine(cores, senders):
    assert module.senders_for(cores) == senders


def test_members_are_divided_among_the_threads(monkeypatch, make):
    monkeypatch.setattr(module, "senders_for", lambda _cores: 3)
    producer = make()
    for _ in range(6):
        assert producer.reader().epoch() == EPOCH
    assert sorted(len(sender.clients) for sender in producer.exporter._senders) == [2, 2, 2]


def test_members_that_arrive_together_are_divided_among_the_threads(monkeypatch, make):
    """Before the first of them has been welcomed; and those that never are have ended with the exporter."""
    monkeypatch.setattr(module, "senders_for", lambda _cores: 3)
    producer = make()
    for sender in producer.exporter._senders:
        monkeypatch.setattr(sender, "_welcome", lambda: None)
    readers = [producer.reader() for _ in range(6)]
    wait_until(lambda: [len(sender._arriving) for sender in producer.exporter._senders] == [2, 2, 2])
    producer.close()
    assert all(reader.ended() for reader in readers)
    assert producer.exporter._access.accounts.count == 0


def test_cached_blocks_of_a_lease_do_not_outlive_it(producer):
    epoch = producer.lease(3, [0, 1], [])
    reader = producer.reader()
    assert reader.read(3, epoch, block(0, 2))[0] == wire.DONE
    producer.end(3)
    epoch = producer.lease(3, [0], [])
    assert reader.read(3, epoch, block(1))[0] == wire.REFUSED
    assert np.array_equal(np.frombuffer(reader.read(3, epoch, block(0))[1], np.uint8), producer.cache[0, 0])
