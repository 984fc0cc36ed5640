"""Both ends of the TCP data plane, by hand: leases that an exporter serves, a backend that reads, and bare lines."""

import os
import select
import socket
import time
from contextlib import suppress
from itertools import count

import numpy as np

from kvflow.addresses import place_of
from kvflow.config import TcpSettings
from kvflow.ids import Credentials, PeerId, pass_of
from kvflow.layout.component import Region
from kvflow.layout.tracks import Track
from kvflow.leases.tickets import LeaseName
from kvflow.reads.backend import CheckedList, Chunk, Portion, Share
from kvflow.reads.bounds import check_rows
from kvflow.reads.contract import PeerAddress, PreparedList, Serving
from kvflow.reads.tcp import wire
from kvflow.reads.tcp.backend import TcpBackend
from kvflow.reads.tcp.opening import Opening, introduction
from tests.helpers import lines

PASS_KEY = b"k" * 32
MAC = b"m" * wire.MAC_BYTES
PUBLIC_KEY, INCARNATION = "ab" * 32, "1" * 32
PATIENCE_S = 60.0
SLOTS = 8
EPOCH = 1 << 40
STRETCHES = 2
"""Of each block."""


def region_of(array):
    return Region(array.ctypes.data, array.nbytes)


def settings(encryption, connections=2):
    anywhere = "tcp://127.0.0.1:0"
    return TcpSettings(bind=anywhere, advertise=anywhere, connections=connections, encryption=encryption)


def credentials(name, ours, theirs):
    """Return what a reader presents, with the certificates of both sides; empty without encryption."""
    who = (PUBLIC_KEY, name, 0, INCARNATION)
    return Credentials(*who, pass_of(PASS_KEY, *who, certificate=ours), theirs)


class Leases:
    """A cache of two groups, [group, block, byte], and what of it is leased. Each block is two stretches."""

    def __init__(self, blocks, block_bytes, seed=0):
        draw = np.random.default_rng(seed)
        self.cache = draw.integers(1, 128, (2, blocks, block_bytes), dtype=np.uint8)
        self.epochs = np.full(SLOTS, EPOCH, np.uint64)
        self._held = {}

    def lease(self, slot, *blocks):
        """Lease these blocks of each group, and return the epoch."""
        epoch = int(self.epochs[slot]) + 1
        self._held[slot, epoch] = tuple([*ids] for ids in blocks)
        self.epochs[slot] = epoch
        return epoch

    def end(self, slot):
        epoch = int(self.epochs[slot])
        self.epochs[slot] = epoch + 1
        del self._held[slot, epoch]

    @property
    def serving(self):
        _, blocks, nbytes = self.cache.shape
        half = nbytes // STRETCHES
        tracks = tuple(
            tuple(Track(each.ctypes.data + at * half, nbytes, half, blocks) for at in range(STRETCHES))
            for each in self.cache
        )
        return Serving(
            tracks,
            lambda slot, epoch: self._held.get((slot, epoch)),
            lambda _key: True,
            PASS_KEY,
            vouches=lambda _slot, _epoch, mac: mac == MAC,
        )


class Consumer:
    """A backend that reads into memory of its own, [block, byte], driven by hand."""

    def __init__(self, name, blocks, block_bytes, encryption, connections=2):
        self.target = np.zeros((blocks, block_bytes), np.uint8)
        region, nobody = region_of(self.target), Leases(1, STRETCHES)
        self.backend = TcpBackend(name, settings(encryption, connections), [region], region, nobody.serving)
        self._name = name
        self._num_source = 0
        self._read_ids = count(1)

    def add(self, served):
        """Add the producer that serves this, and prepare its groups as lists 0 and 1: a row for each stretch."""
        peer, self._num_source = PeerId("producer", 0, "0" * 32, "tcp://127.0.0.1:1", ""), served.blocks
        who = credentials(self._name, self.backend.certificate, served.certificate)
        self.backend.add(PeerAddress(peer, {"tcp": served.metadata}, Region(8, 8), None, served.endpoint, who))
        for group, address in enumerate(served.addresses):
            rows = [
                check_rows(rows_of(start, self.target.shape[1], blocks))
                for start, blocks in ((address, served.blocks), (self.target.ctypes.data, len(self.target)))
            ]
            prepared_list = PreparedList(group, peer, *(each.table for each in rows), group=group)
            self.backend.prepare(CheckedList(prepared_list, *rows))
        return peer

    def post(self, peer, group, leases, source, target):
        """Read blocks, and return the post and its shares; each lease is slot, epoch and how many of the blocks."""
        shares = [Share(next(self._read_ids), LeaseName(slot, epoch, MAC), pairs) for slot, epoch, pairs in leases]
        index = [
            np.concatenate([np.array(blocks, np.int32) + at * num for at in range(STRETCHES)])
            for blocks, num in ((source, self._num_source), (target, len(self.target)))
        ]
        nbytes = self.target.shape[1] * len(source)
        portion = Portion(peer, group, *index, np.array([0, len(index[0])]), nbytes, tuple(shares))
        return self.backend.post(Chunk(portion, 0, len(index[0]))), shares

    def wait(self, posted):
        """Drive the backend until a post is over."""
        poll = select.poll()
        poll.register(self.backend.fileno(), select.POLLIN)
        until = time.monotonic() + PATIENCE_S
        while self.backend.poll(posted) is None:
            assert time.monotonic() < until, "the other end does not go on"
            poll.poll(100)
            self.backend.progress()

    def fence(self, peer, shares):
        """Return what the fence says of the one slot of these shares."""
        slot = shares[0].lease.slot
        reads = [(share.read_id, share.lease) for share in shares]
        (value,) = self.backend.post_check(peer, slot, slot, reads, fence=True)
        return value


def rows_of(start, block_bytes, blocks):
    """Return a row for each stretch of the blocks at this address."""
    half = block_bytes // STRETCHES
    return np.array([[start + at * half, half, 0, block_bytes, blocks] for at in range(STRETCHES)])


class Line(lines.Line):
    """One that goes on saying while the other end speaks, and may stop in the middle."""

    SAYING = select.POLLOUT | select.POLLIN

    def hang_up(self):
        """Say nothing more, where that can be told; TLS of Python cannot."""
        with socket.socket(fileno=os.dup(self.stream.fileno())) as sock, suppress(OSError):
            sock.shutdown(socket.SHUT_WR)


def open_line(served, name, identity):
    """Open a connection as a reader does."""
    ours = b"" if identity is None else identity.certificate
    place = place_of(served.endpoint)
    said = introduction(credentials(name, ours, served.certificate), identity)
    opening = Opening(place, said, time.monotonic() + PATIENCE_S)
    try:
        poll = select.poll()
        poll.register(opening.fileno(), select.POLLIN)
        while (stream := opening.advance()) is None:
            poll.poll(max(0.0, min(opening.due - time.monotonic(), 0.1)) * 1e3)
    finally:
        opening.close()
    return Line(stream)
