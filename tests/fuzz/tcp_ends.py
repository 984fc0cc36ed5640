"""The ends of the TCP data plane that the units have, where tickets have a MAC and blocks two parts."""

import os
import select
import socket
from contextlib import suppress

import numpy as np

from kvflow.addresses import place_of
from kvflow.reads.tcp import wire
from tests.helpers import lines
from tests.unit.kvflow.reads.tcp import peers

MAC = b"m" * wire.MAC_BYTES
STRETCHES = 2
"""Of each block."""


class Leases(peers.Leases):
    """Leases of which all tickets of the cluster are vouched for, also of those that have ended."""

    def __init__(self, blocks, block_bytes):
        super().__init__(blocks, block_bytes, stretches=STRETCHES)
        self.macs = MAC
        self.cache //= 2  # bytes below 128: what is never leased has others

    def vouches(self, _slot, _epoch, mac):
        return mac == MAC


class Consumer(peers.Consumer):
    """A consumer that reads whole blocks of an exporter."""

    def join(self, served):
        """Add the producer that serves this, and prepare its groups as lists 0 and 1: a row for each stretch."""
        self._num_source = served.blocks
        peer = self.add(served.endpoint, certificate=served.certificate, blob=served.layout)
        blocks, nbytes = self.target.shape
        ours = rows_of(self.target.ctypes.data, nbytes, blocks)
        for group, address in enumerate(served.addresses):
            self.prepare(peer, rows_of(address, nbytes, served.blocks), ours, list_id=group, group=group)
        return peer

    def post_blocks(self, peer, group, lease, source, target):
        """Read blocks under a lease, slot and epoch; return the post and its portion."""
        index = [
            np.concatenate([np.array(blocks, np.int32) + at * num for at in range(STRETCHES)])
            for blocks, num in ((source, self._num_source), (target, len(self.target)))
        ]
        nbytes = self.target.shape[1] // STRETCHES
        portion = self.read(peer, *index, [(*lease, len(source))], nbytes=nbytes, list_id=group, mac=MAC)
        return self.post(portion), portion


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


def open_line(served, identity):
    """Open a connection as a reader does."""
    who = peers.credentials(name="hostile", ours=peers.certificate_of(identity), theirs=served.certificate)
    return Line(peers.let_in(place_of(served.endpoint), who, identity))
