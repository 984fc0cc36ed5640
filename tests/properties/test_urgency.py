"""Urgent reads overtake, peers take turns by weight, and no read starves: real lanes over a wire that is counted.

The wire takes one chunk at a time. A chunk is the unit of every bound here, because nothing overtakes inside one.
"""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from kvflow.reads.lanes import CHUNKS_IN_FLIGHT_MAX, OVERTAKEN_MAX, Check
from tests.helpers.loops import looped
from tests.unit.kvflow.reads.lane_reads import Bench, ids, prepared

from .caches import thorough

CHUNK_S = 0.04
"""8 MiB at 0.2 GB/s, TCP over loopback: slow enough for reads of 16 GB to be served for minutes."""
CHUNK_UNITS = 8
CHUNKS_OF_16_GB = 2048


class Wire:
    """Lanes, and the chunks that were posted."""

    def __init__(self, *, in_flight=0, weights=None):
        self.bench = Bench(*"pqrs", weights=weights)
        self.bench.lanes.open("idle")
        self.prepared_list = prepared(CHUNK_UNITS, portion=4 * CHUNK_UNITS)
        self.in_flight = in_flight
        self.flying = deque()
        self.posted = []
        self.peers = {}

    @property
    def ended(self):
        return {answer.read_id for answer in self.bench.answers}

    def submit(self, read_id, peer, chunks, priority=0):
        self.peers[read_id] = peer
        self.bench.admit(read_id, self.prepared_list, peer=peer, chunks=chunks * CHUNK_UNITS, priority=priority)

    def step(self):
        """Post one chunk, or let the oldest one arrive; False: there is nothing to do."""
        work = self.bench.take() if len(self.flying) <= self.in_flight else None
        if isinstance(work, Check):
            self.bench.land(work)
            return True
        if work is not None:
            self.posted.append(ids(work)[0])
            self.flying.append(work)
            if len(self.flying) <= self.in_flight:
                return True
        if not self.flying:
            return False
        self.bench.now += CHUNK_S
        self.bench.land(self.flying.popleft())
        return True

    def chunks_before(self, read_id, *, at_most):
        """Go on until a chunk of a read is posted; return how many of others were posted before it."""
        begun = len(self.posted)
        while read_id not in self.posted[begun:]:
            assert len(self.posted) - begun <= at_most, "too many chunks went before it"
            assert self.step()
        return len(self.posted) - begun - 1


@looped("in_flight", [0, CHUNKS_IN_FLIGHT_MAX])
@looped("served_s", [0.0, 5.0, 12.0, 60.0])
@looped("bulk, urgent", [("p", "p"), ("p", "idle"), ("pqrs", "idle"), ("pqrs", "q")])
def test_an_urgent_read_is_posted_within_two_chunks_of_bulk_reads(bulk, urgent, served_s, in_flight):
    wire = Wire(in_flight=in_flight)
    for number, peer in enumerate(bulk):
        wire.submit(number, peer, CHUNKS_OF_16_GB)
    begun = wire.bench.now
    while not wire.posted or wire.bench.now < begun + served_s:
        assert wire.step()
    for read_id, priority in ((101, -1), (102, -2)):
        wire.submit(read_id, urgent, 1, priority)
        assert wire.chunks_before(read_id, at_most=2) <= 2
    assert wire.ended <= {101, 102}


@thorough
@given(weights=st.fixed_dictionaries(dict.fromkeys("pqr", st.integers(1, 64))), priority=st.integers(-2, 2))
def test_peers_that_all_wait_share_the_wire_by_their_weights(weights, priority):
    wire = Wire(weights=weights)
    for number, peer in enumerate(weights):
        wire.submit(number, peer, CHUNKS_OF_16_GB, priority)
    turn = sum(weights.values())
    while len(wire.posted) < 5 * turn:
        assert wire.step()
    # In each cycle of turns each peer has what it weighs.
    for first in range(0, 5 * turn, turn):
        served = [wire.peers[read_id] for read_id in wire.posted[first : first + turn]]
        assert {peer: served.count(peer) for peer in weights} == weights


@thorough
@given(st.data())
def test_no_read_starves_beside_an_endless_stream_of_urgent_ones(data):
    """Whatever is ahead of a read when it comes, it is read after a bounded number of chunks."""
    peers, weight = st.sampled_from("pqr"), data.draw(st.integers(1, 3))
    wire = Wire(in_flight=data.draw(st.integers(0, 2)), weights=dict.fromkeys("pqr", weight))
    crowd = data.draw(st.lists(st.tuples(peers, st.integers(1, 10), st.integers(-3, 3)), max_size=6))
    streams = data.draw(st.lists(st.tuples(peers, st.integers(1, 5), st.integers(-3, 0)), min_size=1, max_size=3))
    for number, (peer, count, priority) in enumerate(crowd):
        wire.submit(number, peer, count, priority)
    patient, peer, count, priority = 999, data.draw(peers), data.draw(st.integers(1, 10)), data.draw(st.integers(-2, 4))
    wire.submit(patient, peer, count, priority)
    # Each chunk of the oldest read waits for the chunks that overtake it, for a turn of each queue beside it, and where
    # its peer has all that may be in flight, for that.
    queues = {(peer, priority) for peer, _, priority in [*crowd, *streams]} | {(peer, priority)}
    each = OVERTAKEN_MAX + 1 + weight * len(queues) + CHUNKS_IN_FLIGHT_MAX
    ahead = sum(chunks for _, chunks, _ in crowd)
    bound = each * (ahead + count)
    fresh = 1000
    while wire.posted.count(patient) < count:
        assert len(wire.posted) <= bound
        for stream in streams:
            if len(wire.bench.lanes.reads) < 40:
                wire.submit(fresh, *stream)
                fresh += 1
        assert wire.step()
