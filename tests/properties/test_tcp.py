"""Bytes over the TCP data plane, of any list, leases, cuts and connections, against an oracle that copies them."""

from itertools import pairwise

import numpy as np
import pytest

from kvflow.reads.tcp import access as tcp_access
from kvflow.reads.tcp import opening as tcp_opening
from tests.unit.kvflow.reads.tcp.peers import SLOTS, Consumer, Producer

BLOCKS, BLOCK_BYTES = 48, 960
GUARD = 0xA5
SEEDS = range(12)


@pytest.fixture(params=[None, 2048], ids=["usual", "tiny"])
def buffers(request, monkeypatch):
    """Sockets as usual, or with buffers so small that every answer takes many turns."""
    prepare = tcp_access.prepare_socket

    def prepare_small(sock):
        prepare(sock)
        if request.param:
            sock.setsockopt(1, 7, request.param)  # SOL_SOCKET, SO_SNDBUF
            sock.setsockopt(1, 8, request.param)  # SO_RCVBUF

    monkeypatch.setattr(tcp_opening, "prepare_socket", prepare_small)
    monkeypatch.setattr(tcp_access, "prepare_socket", prepare_small)
    return request.param


class Drawn:
    """A prepared list that moves blocks in pieces, each piece to another place of a block."""

    def __init__(self, draw):
        pieces = int(draw.integers(1, 6))
        cuts = np.sort(draw.choice(np.arange(1, BLOCK_BYTES), pieces - 1, replace=False))
        self.lengths = np.diff(np.concatenate(([0], cuts, [BLOCK_BYTES])))
        if draw.random() < 0.5:
            pieces = int(draw.choice([1, 2, 4, 8]))
            self.lengths = np.full(pieces, BLOCK_BYTES // pieces)
        self.pieces = pieces
        self.order = draw.permutation(pieces)  # piece k lies at place order[k] of the target
        self.sources = np.cumsum(self.lengths) - self.lengths
        placed = self.lengths[np.argsort(self.order)]
        self.targets = (np.cumsum(placed) - placed)[self.order]

    def rows(self, address, offsets):
        fields = [(address + at, n, 0, BLOCK_BYTES, BLOCKS) for at, n in zip(offsets, self.lengths, strict=True)]
        return np.array(fields, np.int64)

    def index(self, blocks):
        """Run by run, all blocks."""
        return (np.arange(self.pieces)[:, None] * BLOCKS + blocks[None, :]).ravel().astype(np.int32)

    def copy(self, source, target):
        """Copy one block."""
        for at, to, nbytes in zip(self.sources, self.targets, self.lengths, strict=True):
            target[to : to + nbytes] = source[at : at + nbytes]


@pytest.mark.parametrize("encryption", ["off", "tls"])
@pytest.mark.parametrize("connections", [1, 2, 4])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("buffers")
def test_bytes_arrive_as_an_oracle_copies_them(seed, connections, encryption):
    draw = np.random.default_rng([seed, connections])
    producer = Producer(encryption, blocks=BLOCKS, block_bytes=BLOCK_BYTES, seed=seed)
    consumer = Consumer(encryption=encryption, connections=connections, blocks=BLOCKS, block_bytes=BLOCK_BYTES)
    try:
        peer = consumer.join(producer)
        for turn in range(6):
            _read_and_compare(draw, producer, consumer, peer, turn)
    finally:
        consumer.close()
        producer.put_away()


def _read_and_compare(draw, producer, consumer, peer, turn):
    prepared_list, group = Drawn(draw), int(draw.integers(2))
    rows = prepared_list.rows(producer.cache[group].ctypes.data, prepared_list.sources)
    target_rows = prepared_list.rows(consumer.target.ctypes.data, prepared_list.targets)
    consumer.prepare(peer, rows, target_rows, list_id=turn + 2, group=group)
    shares = draw.integers(1, 10, draw.integers(1, 5))
    pairs = int(shares.sum())
    target = draw.permutation(BLOCKS)[:pairs]
    source = draw.integers(0, BLOCKS, pairs) if draw.random() < 0.5 else np.arange(pairs)
    slots = draw.permutation(SLOTS)[: len(shares)]
    lease_of = np.repeat(np.arange(len(shares)), shares)
    leases, held = [], []
    for number, slot in enumerate(slots.tolist()):
        blocks = {*source[lease_of == number].tolist(), int(draw.integers(BLOCKS))}
        epoch = producer.lease(slot, *((sorted(blocks), []) if group == 0 else ([], sorted(blocks))))
        held.append(draw.random() < 0.85)
        leases.append((slot, epoch if held[-1] else epoch - 1, int(shares[number])))
    index = prepared_list.index(source), prepared_list.index(target)
    count = len(index[0])
    read = consumer.read(peer, *index, leases, nbytes=0, list_id=turn + 2)
    cuts = np.unique([0, count, *draw.integers(0, count, draw.integers(0, 5))])
    wanted = np.full_like(consumer.target, GUARD)
    for number, (here, there) in enumerate(zip(source, target, strict=True)):
        if held[lease_of[number]]:
            prepared_list.copy(producer.cache[group, here], wanted[there])
    consumer.target[:] = GUARD
    all_posted = [consumer.post(read, first, stop) for first, stop in pairwise(cuts.tolist())]
    for posted in all_posted:
        assert consumer.wait(posted) == 0
    assert (consumer.target == wanted).all()
    for (slot, epoch, _), lasts in zip(leases, held, strict=True):
        verdict = consumer.fence(peer, slot, read)
        assert verdict == epoch if lasts else verdict == epoch + 1
        producer.end(slot)
