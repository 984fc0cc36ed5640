"""Both ends of the TCP data plane by hand: a producer with leases, and a reader that says what the test wants."""

import select
import socket
import struct
import time
from contextlib import suppress
from itertools import count

import numpy as np

from kvflow.config import TcpSettings
from kvflow.ids import Credentials, PeerId, pass_of
from kvflow.layout.component import Region
from kvflow.layout.tracks import Track
from kvflow.reads.backend import BackendError, CheckedList, Chunk, Envelope, Portion, Share, seal
from kvflow.reads.bounds import check_rows
from kvflow.reads.contract import LeaseName, PeerAddress, PreparedList, Serving
from kvflow.reads.tcp01 import wire
from kvflow.reads.tcp01.backend import TcpBackend
from kvflow.reads.tcp01.channel import ChannelClosed, PlainChannel, TlsChannel
from kvflow.reads.tcp01.exporter import TcpExporter

KEY = b"k" * 32
PATIENCE_MS = 60_000
SLOTS = 8
EPOCH = 1 << 40


def region_of(array):
    return Region(array.ctypes.data, array.nbytes)


def settings(*, encryption="off", connections=2):
    anywhere = "tcp://127.0.0.1:0"
    return TcpSettings(bind=anywhere, advertise=anywhere, connections=connections, encryption=encryption)


def credentials(*, name="reader", key="ab" * 32, rank=0, incarnation="1" * 32, pass_key=KEY):
    return Credentials(key, name, rank, incarnation, pass_of(pass_key, key, name, rank, incarnation))


class Leases:
    """A cache of two groups, and what of it is leased. Every byte of the cache is above zero."""

    def __init__(self, blocks=64, block_bytes=512, seed=0, *, keys_differ=False):
        self.keys_differ = keys_differ
        self.block_bytes, self.num_blocks = block_bytes, blocks
        draw = np.random.default_rng(seed)
        self.cache = draw.integers(1, 256, (2, blocks, block_bytes), dtype=np.uint8)
        self.epochs = np.full(SLOTS, EPOCH, np.uint64)
        self.held = {}
        self.barred = set()
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

    @property
    def regions(self):
        return [region_of(self.cache)]

    @property
    def serving(self):
        nbytes, blocks = self.block_bytes, self.num_blocks
        tracks = [(Track(each.ctypes.data, nbytes, nbytes, blocks),) for each in self.cache]
        admits, differ = (lambda key: key not in self.barred), self.keys_differ
        return Serving(tuple(tracks), self.blocks_of, admits, KEY, keys_differ=differ)

    def rows(self, group=0):
        return np.array([[self.cache[group].ctypes.data, self.block_bytes, 0, self.block_bytes, self.num_blocks]])


class Producer(Leases):
    """Leases, and an exporter that serves them."""

    def __init__(self, encryption="off", **cache):
        super().__init__(**cache)
        self.encryption = encryption
        self.exporter = TcpExporter(settings(encryption=encryption), self.regions, region_of(self.epochs), self.serving)
        host, port = self.exporter.endpoint.removeprefix("tcp://").split(":")
        self.address = (host, int(port))
        self._sockets = []

    @property
    def sender(self):
        (sender,) = self.exporter._senders
        return sender

    def close(self):
        self.exporter.close()

    def put_away(self):
        """Close it and every reader that it has made."""
        self.close()
        for sock in self._sockets:
            sock.close()

    def stranger(self, *, receive_bytes=None):
        """Return a socket that is connected."""
        sock = socket.socket()
        self._sockets.append(sock)
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(PATIENCE_MS / 1e3)
        sock.connect(self.address)
        return sock

    def visitor(self, **options):
        """Return a reader that has said nothing."""
        return Reader(self.stranger(**options), encrypted=self.encryption == "tls")

    def reader(self, who=None, **options):
        """Return a reader that was let in, and has told of both groups as prepared lists 0 and 1."""
        reader = self.visitor(**options)
        reader.open(who or credentials())
        for group in range(2):
            reader.say(wire.encode_list(group, group, self.rows(group)))
        return reader


class Reader:
    """One connection, which says and hears bytes, and waits for them."""

    def __init__(self, sock, *, encrypted=False, server=False, pump=None):
        self.channel = TlsChannel(sock, server=server) if encrypted else PlainChannel(sock)
        self._pump = pump
        self._poll = select.poll()
        self._poll.register(self.channel.fileno(), select.POLLIN)
        self._wait_until(self.channel.handshake)

    def say(self, *frames):
        """Send all of it."""
        left = memoryview(b"".join(frames))
        while left or self.channel.wants_write:
            count = self.channel.send([left])
            left = left[count:]
            if not count and (left or self.channel.wants_write):
                self._wait(select.POLLOUT)

    def hear(self, nbytes):
        """Receive exactly so many bytes."""
        heard = bytearray(nbytes)
        left = memoryview(heard)
        while left:
            count = self.channel.receive([left])
            left = left[count:]
            if not count:
                self._wait(select.POLLIN)
        return bytes(heard)

    def open(self, who):
        """Prove who we are, and return whether the exporter has proven that it knows us."""
        theirs = wire.nonce_of(self.hear(wire.GREETING_BYTES))
        ours = b"n" * wire.NONCE_BYTES
        nonces = (theirs, ours, self.channel.binding())
        self.say(wire.encode_hello(who, *nonces))
        return self.hear(wire.WELCOME_BYTES) == wire.proof_of_exporter(who.pass_, *nonces)

    def answer(self):
        """Receive one answer: its status, its bytes, and the epochs at its end."""
        status, _, leases, _, nbytes = wire.ANSWER.unpack(self.hear(wire.ANSWER.size))
        data = self.hear(nbytes)
        return status, data, list(struct.unpack(f"<{leases}Q", self.hear(8 * leases)))

    def epoch(self, slot=0):
        """Ask for the value of a slot."""
        self.say(wire.encode_epoch(slot))
        status, data, _ = self.answer()
        assert status == wire.DONE
        return int.from_bytes(data, "little")

    def ended(self):
        """Wait until the other end has closed the connection, after what it had said."""
        self.hear_all()
        return True

    def hear_all(self):
        """Receive everything until the other end has closed the connection."""
        heard, part = bytearray(), memoryview(bytearray(1 << 16))
        with suppress(ChannelClosed):
            while True:
                if count := self.channel.receive([part]):
                    heard += part[:count]
                else:
                    self._wait(select.POLLIN)
        return bytes(heard)

    def close(self):
        self.channel.close(reset=True)

    def _wait_until(self, done):
        while not done():
            self._wait(select.POLLIN | (select.POLLOUT if self.channel.wants_write else 0))

    def _wait(self, events):
        self._poll.modify(self.channel.fileno(), events)
        wait_for(self._poll, self._pump)


def wait_for(poll, pump):
    """Wait for an event, and meanwhile let ``pump`` drive the other end, if it has no thread of its own."""
    until = time.monotonic() + PATIENCE_MS / 1e3
    while not poll.poll(PATIENCE_MS if pump is None else 1):
        assert pump is not None, "the other end does not go on"
        assert time.monotonic() < until, "the other end does not go on"
        pump()


def read_frame(prepared_list, leases, blocks, owners=None):
    """Return a request for blocks; each lease is a slot and an epoch."""
    lease_of = None if owners is None else np.array(owners, np.uint16)
    return wire.encode_read(prepared_list, [_Named(*lease) for lease in leases], np.array(blocks, np.int32), lease_of)


class Consumer:
    """A backend that reads into memory of its own, driven by hand."""

    def __init__(self, *, blocks=64, block_bytes=512, **options):
        self.target = np.zeros((blocks, block_bytes), np.uint8)
        self.settings = settings(**options)
        region = region_of(self.target)
        self.backend = TcpBackend("consumer", self.settings, [region], region, Leases().serving)
        self._reads = count(1)

    def add(self, endpoint, *, number=0, who=None):
        """Add the producer at an endpoint, and return who it is."""
        peer = PeerId("producer", number, "0" * 32, "tcp://127.0.0.1:1", "")
        planes = {"tcp": seal(Envelope("tcp", "producer", b""))}
        self.backend.add(PeerAddress(peer, planes, Region(8, 8), None, endpoint, who or credentials()))
        return peer

    def prepare(self, peer, source_rows, target_rows=None, *, list_id=1, group=0):
        """Prepare a list from rows of the producer to rows of ours: by default one for each block."""
        blocks, nbytes = self.target.shape
        if target_rows is None:
            target_rows = np.array([[self.target.ctypes.data, nbytes, 0, nbytes, blocks]])
        prepared_list = PreparedList(list_id, peer, source_rows, target_rows, group=group)
        self.backend.prepare(CheckedList(prepared_list, check_rows(source_rows), check_rows(target_rows)))

    def read(self, peer, source, target, leases, *, nbytes=512, list_id=1):
        """Return a portion of descriptors; each lease is that of a read of its own, of so many pairs."""
        index = [np.array(each, np.int32) for each in (source, target)]
        cuts = np.array([0, len(source)])
        shares = tuple(Share(next(self._reads), LeaseName(slot, epoch), pairs) for slot, epoch, pairs in leases)
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

    def wait(self, posted):
        """Drive the backend until a post is over."""
        poll = select.poll()
        poll.register(self.backend.fileno(), select.POLLIN)
        until = time.monotonic() + PATIENCE_MS / 1e3
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


class ScriptedExporter:
    """What a consumer dials, and says what the test wants."""

    def __init__(self, consumer):
        self._consumer = consumer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)
        self._accepted = []
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def accept(self):
        """Wait for the next connection, of which nothing has been said."""
        wait_for(self._poll, self._consumer.backend.progress)
        sock, _ = self._listener.accept()
        encrypted = self._consumer.settings.encryption == "tls"
        self._accepted.append(sock)
        return Reader(sock, encrypted=encrypted, server=True, pump=self._consumer.backend.progress)

    def open(self):
        """Wait for the next connection, and let it in."""
        reader = self.accept()
        self.prove(reader)
        return reader

    def prove(self, reader, pass_=None):
        """Greet, hear the hello, and prove that we know the pass."""
        ours = b"t" * wire.NONCE_BYTES
        reader.say(wire.greeting(ours))
        hello = wire.decode_hello(reader.hear(wire.HELLO_BYTES))
        name = reader.hear(hello.engine_bytes).decode()
        known = pass_of(KEY, hello.public_key, name, hello.rank, hello.incarnation)
        nonces = (ours, hello.nonce, reader.channel.binding())
        assert hello.proof == wire.proof_of_reader(known, *nonces)
        reader.say(wire.proof_of_exporter(known if pass_ is None else pass_, *nonces))

    def request(self, reader):
        """Hear one request and its body."""
        request = wire.decode_request(reader.hear(wire.HEADER.size))
        return request, reader.hear(request.nbytes)

    def close(self):
        self._listener.close()
        for sock in self._accepted:
            sock.close()


def done(data, *epochs):
    """Return an answer with bytes."""
    return wire.ANSWER.pack(wire.DONE, 0, len(epochs), 0, len(data)) + data + struct.pack(f"<{len(epochs)}Q", *epochs)


class _Named:
    def __init__(self, slot, epoch, mac=b""):
        self.slot, self.epoch, self.mac = slot, epoch, mac
