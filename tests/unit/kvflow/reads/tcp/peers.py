"""Both ends of the TCP data plane by hand: a producer with leases, and a reader that says what the test wants."""

import queue
import select
import time
from contextlib import suppress
from itertools import count

import numpy as np

from kvflow.config import TcpSettings
from kvflow.ids import Credentials, PeerId, pass_of
from kvflow.layout.component import Region
from kvflow.layout.tracks import Track
from kvflow.leases.tickets import LeaseName
from kvflow.reads.backend import BackendError, CheckedList, Chunk, Envelope, Portion, Share, encode_envelope
from kvflow.reads.bounds import check_rows
from kvflow.reads.contract import PeerAddress, PreparedList, Serving
from kvflow.reads.tcp import wire
from kvflow.reads.tcp.access import Access
from kvflow.reads.tcp.backend import TcpBackend
from kvflow.reads.tcp.certificates import draw_identity
from kvflow.reads.tcp.exporter import TcpExporter
from kvflow.reads.tcp.opening import Opening, introduction
from tests.helpers.lines import Line

KEY = b"k" * 32
PATIENCE_MS = 60_000
MOMENT_S = 0.001
SLOTS = 8
EPOCH = 1 << 40


def region_of(array):
    return Region(array.ctypes.data, array.nbytes)


def settings(*, encryption="off", connections=2, handshake_s=5.0):
    anywhere = "tcp://127.0.0.1:0"
    return TcpSettings(
        bind=anywhere, advertise=anywhere, connections=connections, encryption=encryption, handshake_s=handshake_s
    )


def credentials(*, name="reader", key="ab" * 32, rank=0, incarnation="1" * 32, ours=b"", theirs=b""):
    """What a reader presents; ``ours`` and ``theirs`` are certificates."""
    pass_ = pass_of(KEY, key, name, rank, incarnation, certificate=ours)
    return Credentials(key, name, rank, incarnation, pass_, theirs)


def certificate_of(identity):
    return b"" if identity is None else identity.certificate


class Leases:
    """A cache of two groups, [group, block, byte], and what of it is leased. Every byte of the cache is above zero.

    ``stretches``: of each block, in which it is told to readers.
    """

    def __init__(self, blocks=64, block_bytes=512, seed=0, *, stretches=1):
        self.block_bytes, self.num_blocks, self._stretches = block_bytes, blocks, stretches
        draw = np.random.default_rng(seed)
        self.cache = draw.integers(1, 256, (2, blocks, block_bytes), dtype=np.uint8)
        self.epochs = np.full(SLOTS, EPOCH, np.uint64)
        self.held = {}
        self.barred = set()
        self.macs = None
        self.before_answer = lambda: None

    def lease(self, slot, *blocks):
        """Lease these blocks of each group, and return the epoch."""
        epoch = int(self.epochs[slot]) + 1
        self.held[slot, epoch] = tuple([*ids] for ids in blocks)
        self.epochs[slot] = epoch
        return epoch

    def end(self, slot):
        epoch = int(self.epochs[slot])
        self.epochs[slot] = epoch + 1
        del self.held[slot, epoch]

    def blocks_of(self, slot, epoch):
        found = self.held.get((slot, epoch))
        self.before_answer()
        return found

    def vouches(self, slot, epoch, mac):
        self.vouched.append(mac)
        return (slot, epoch) in self.held and mac == self.macs

    @property
    def serving(self):
        nbytes, blocks, part = self.block_bytes, self.num_blocks, self.block_bytes // self._stretches
        tracks = tuple(
            tuple(Track(each.ctypes.data + at, nbytes, part, blocks) for at in range(0, nbytes, part))
            for each in self.cache
        )
        self.vouched = []
        vouches = None if self.macs is None else self.vouches
        return Serving(tracks, self.blocks_of, lambda key: key not in self.barred, KEY, vouches)

    def rows(self, group=0):
        return np.array([[self.cache[group].ctypes.data, self.block_bytes, 0, self.block_bytes, self.num_blocks]])


class Producer(Leases):
    """Leases, and an exporter that serves them; ``macs``: the MAC of each ticket, None if readers need none."""

    def __init__(self, encryption="off", *, macs=None, **cache):
        super().__init__(**cache)
        self.macs = macs
        self.identity = draw_identity() if encryption == "tls" else None
        self.exporter = TcpExporter(
            settings(encryption=encryption), region_of(self.epochs), self.serving, self.identity
        )
        host, port = self.exporter.endpoint.removeprefix("tcp://").split(":")
        self.place = (host, int(port))
        self._readers = []

    @property
    def sender(self):
        (sender,) = self.exporter._senders
        return sender

    def close(self):
        self.exporter.close()

    def put_away(self):
        """Close it and every reader that it has made."""
        self.close()
        for reader in self._readers:
            reader.close()

    def reader(self, **who):
        """Return a reader that was let in."""
        ours = None if self.identity is None else draw_identity()
        who = credentials(ours=certificate_of(ours), theirs=certificate_of(self.identity), **who)
        self._readers.append(Reader(let_in(self.place, who, ours)))
        return self._readers[-1]


def let_in(place, who, identity):
    """Open a connection as a reader does; return its stream."""
    opening = Opening(place, introduction(who, identity), time.monotonic() + PATIENCE_MS / 1e3)
    poll = select.poll()
    poll.register(opening.fileno(), select.POLLIN)
    try:
        while (stream := opening.advance()) is None:
            poll.poll(50)
    finally:
        opening.close()
    return stream


class Reader(Line):
    """One connection, which asks for runs of blocks and hears the answers."""

    def answer(self):
        """Receive one answer: the kind of its end, all of its bytes, and the value or text at its end."""
        data = b""
        while True:
            kind, *zeros, value = wire.ANSWER.unpack(self.hear(wire.ANSWER.size))
            assert zeros == [0, 0, 0]
            if kind == wire.REFUSED:
                return kind, data, self.hear(value).decode()
            if kind != wire.PIECE:
                return kind, data, value
            data += self.hear(value)

    def read(self, slot, epoch, *runs, group=0, mac=b""):
        """Show a lease, and ask for runs of it."""
        self.say(wire.encode_lease(slot, epoch, mac), wire.encode_read(group, slot, epoch, runs))
        return self.answer()

    def epoch(self, slot=0):
        """Ask for the value of a slot."""
        self.say(wire.encode_epoch(slot))
        kind, data, value = self.answer()
        assert (kind, data) == (wire.DONE, b"")
        return value

    def ended(self):
        """Wait until the other end has closed the connection, after what it had said."""
        self.hear_all()
        return True

    def close(self):
        self.stream.close(reset=True)


def block(number, count=1, *, stretch=0, offset=0, nbytes=512, stride=0, times=1):
    """Return a run: by default of one whole block."""
    return stretch, number, count, offset, nbytes, stride, times


class Consumer:
    """A backend that reads into memory of its own, driven by hand."""

    def __init__(self, *, blocks=64, block_bytes=512, **options):
        self.target = np.zeros((blocks, block_bytes), np.uint8)
        self.settings = settings(**options)
        region = region_of(self.target)
        self.backend = TcpBackend("consumer", self.settings, [region], region, Leases().serving)
        self.identity = self.backend._identity
        self._reads = count(1)

    def add(self, endpoint, leases=None, *, certificate=b"", blob=None):
        """Add the producer of these leases at an endpoint, or of this layout, and return who it is."""
        peer = PeerId("producer", 0, "0" * 32, "tcp://127.0.0.1:1", "")
        blob = wire.encode_layout(leases.serving.tracks) if blob is None else blob
        who = credentials(ours=certificate_of(self.identity), theirs=certificate)
        planes = {"tcp": encode_envelope(Envelope("tcp", "producer", blob))}
        self.backend.add(PeerAddress(peer, planes, Region(8, 8), None, endpoint, who))
        return peer

    def join(self, producer, **options):
        """Add a producer, and prepare list 1 of all blocks of its group 0."""
        certificate = certificate_of(producer.identity)
        peer = self.add(producer.exporter.endpoint, producer, certificate=certificate, **options)
        self.prepare(peer, producer.rows())
        return peer

    def prepare(self, peer, source_rows, target_rows=None, *, list_id=1, group=0):
        """Prepare a list from rows of the producer to rows of ours: by default one for each block."""
        blocks, nbytes = self.target.shape
        if target_rows is None:
            target_rows = np.array([[self.target.ctypes.data, nbytes, 0, nbytes, blocks]])
        prepared_list = PreparedList(list_id, peer, source_rows, target_rows, group=group)
        self.backend.prepare(CheckedList(prepared_list, check_rows(source_rows), check_rows(target_rows)))

    def read(self, peer, source, target, leases, *, nbytes=512, list_id=1, mac=b""):
        """Return a portion of descriptors; each lease is that of a read of its own, of so many pairs."""
        index = [np.array(each, np.int32) for each in (source, target)]
        cuts = np.array([0, len(source)])
        shares = tuple(Share(next(self._reads), LeaseName(slot, epoch, mac), pairs) for slot, epoch, pairs in leases)
        return Portion(peer, list_id, *index, cuts, nbytes * len(source), shares)

    def post(self, portion, first=0, stop=None):
        return self.backend.post(Chunk(portion, first, len(portion.source_index) if stop is None else stop))

    def fence(self, peer, slot, *portions):
        """Return what the fence of the reads in these portions whose lease is in this slot says."""
        shares = [share for portion in portions for share in portion.shares if share.lease.slot == slot]
        reads = [(share.read_id, share.lease) for share in shares]
        (value,) = self.backend.post_check(peer, slot, slot, reads, fence=True)
        return value

    def check(self, peer, *slots, first=None, last=None):
        """Ask for the values of slots, and return the post."""
        first, last = min(slots) if first is None else first, max(slots) if last is None else last
        reads = [(next(self._reads), LeaseName(slot, EPOCH)) for slot in slots]
        return self.backend.post_check(peer, first, last, reads, fence=False)

    def wait(self, *all_posted):
        """Drive the backend until posts are over, and return the value of the last."""
        poll = select.poll()
        poll.register(self.backend.fileno(), select.POLLIN)
        until = time.monotonic() + PATIENCE_MS / 1e3
        for posted in all_posted:
            while (value := self.backend.poll(posted)) is None:
                assert time.monotonic() < until, "the other end does not go on"
                poll.poll(100)
                self.backend.progress()
        return value

    def failure(self, posted):
        """Drive the backend until a post has failed, or the one read that it is of, and return why."""
        try:
            self.wait(posted)
        except BackendError as failed:
            return failed.reason
        (reason,) = posted.refused.values()
        return reason

    def close(self):
        self.backend.close()


class ScriptedExporter(Leases):
    """What a consumer dials, and what says to a reader that is in what the test wants."""

    def __init__(self, consumer, **cache):
        super().__init__(**cache)
        self._consumer = consumer
        self.identity = None if consumer.identity is None else draw_identity()
        self._members = queue.SimpleQueue()
        self._access = Access(consumer.settings, self.serving, self.identity, self._members.put)
        self._access.start()
        self.endpoint = self._access.endpoint
        self._accepted = []
        self.exporter = self

    def open(self):
        """Wait for the next connection that is let in."""
        until, member = time.monotonic() + PATIENCE_MS / 1e3, None
        while member is None:
            assert time.monotonic() < until, "nobody has come"
            self._consumer.backend.progress()
            with suppress(queue.Empty):
                member = self._members.get(timeout=MOMENT_S)
        self._accepted.append(member)
        return Reader(member.stream, pump=self._consumer.backend.progress)

    def request(self, reader):
        """Hear one request that is not LEASE, and its body."""
        while True:
            request = wire.decode_request(reader.hear(wire.REQUEST.size))
            body = reader.hear(request.nbytes)
            if request.kind != wire.LEASE:
                return request, body

    def hang_up(self):
        """Close all connections."""
        for member in self._accepted:
            member.account.leave()
            member.stream.close(reset=True)
        self._accepted.clear()

    def close(self):
        self._access.close()
        self.hang_up()


def frame(kind, value):
    return wire.ANSWER.pack(kind, 0, 0, 0, value)


def piece(data):
    return frame(wire.PIECE, len(data)) + data
