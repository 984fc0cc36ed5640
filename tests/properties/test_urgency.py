"""Urgent pulls overtake, and no pull starves: the real scheduler and the real ledger, over a wire that is counted.

The wire takes one chunk at a time. A chunk is the unit of every bound here, because nothing overtakes inside one.
"""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.ids import PeerId
from kvflow.transfer.events import TransferCompleted, TransferFailed
from kvflow.transfer.pairs import UnitPairs
from kvflow.transfer.queues import Limits
from kvflow.transfer.requests import Budgets, CancelReads, Demand, Dispatch, LegRequest, PullRequest
from kvflow.transfer.scheduler import Scheduler
from kvflow.transport.base import CHUNK_BYTES_MAX, Fence, FenceFailed, FenceJudged, Read, ReadCompleted, ReadFailed
from kvflow.transport.ledger import CHUNKS_IN_FLIGHT_MAX, OVERTAKEN_MAX, Chunk, Ledger

from .caches import thorough

EPOCH = 7
MIB = 1 << 20
GIB_16 = 16 << 10
CHUNK_S = 0.04
"""8 MiB at 0.2 GB/s, TCP over loopback: slow enough for pulls of 16 GB to be served for minutes."""
CHUNK_PAIRS = CHUNK_BYTES_MAX // MIB
TICK_S = 0.02


PATIENT = Budgets(queue_s=1e6, wire_s=1e6, fence_s=1e6)
"""Where more is asked for than the wire carries, less urgent pulls run out of time. What is proved is their turn."""


def named(letter):
    """A peer that goes by one letter."""
    return PeerId(letter, 0, "0" * 32, f"tcp://{letter}", "")


class Wire:
    """Both halves of a data path, and the chunks that were posted."""

    def __init__(self, *, in_flight=0, limits=Limits(), budgets=Budgets()):  # noqa: B008 - frozen
        self.scheduler = Scheduler(limits)
        self.ledger = Ledger()
        self.in_flight = in_flight
        self.budgets = budgets
        self.flying = deque()
        self.peers = set()
        self.now = 100.0
        self.ticked = 0.0
        self.owners = {}
        self.posted = []
        self.completed = set()

    def submit(self, pull_id, peer, mib, *, priority=0, program_id=1):
        """Pull so many pairs of one MiB."""
        if peer not in self.peers:
            self.peers.add(peer)
            self.ledger.open(named(peer))
        units = np.arange(mib, dtype=np.int64)
        demand = Demand(program_id, UnitPairs(units, units), MIB, 1, mib)
        leg = LegRequest(named(peer), 0, EPOCH, 30.0, (demand,))
        self.apply(self.scheduler.submit(PullRequest(pull_id, f"r{pull_id}", (leg,), priority, self.budgets), self.now))

    def step(self):
        """Post one chunk, or let the oldest one arrive; False: there is nothing to do."""
        work = self.ledger.take() if len(self.flying) <= self.in_flight else None
        if isinstance(work, Chunk):
            self.posted.append(self.owners[work.read.read_id])
            self.flying.append(work)
            if len(self.flying) <= self.in_flight:
                return True
        elif work is not None:
            self.feed(self.ledger.judged(work, EPOCH, 0.0))
            return True
        if not self.flying:
            return False
        self.now += CHUNK_S
        self.feed(self.ledger.arrived(self.flying.popleft(), self.now))
        if self.now >= self.ticked + TICK_S:
            self.ticked = self.now
            self.apply(self.scheduler.tick(self.now))
        return True

    def feed(self, events):
        for event in events:
            match event:
                case ReadCompleted(read_id=read_id):
                    self.apply(self.scheduler.on_read_completed(read_id, posted_s=0.0, now=self.now))
                case FenceJudged(fence_id=fence_id, observed=observed):
                    self.apply(self.scheduler.on_fence_judged(fence_id, observed=observed, fence_s=0.0, now=self.now))
                case ReadFailed() | FenceFailed():
                    raise AssertionError(event)

    def apply(self, effects):
        for effect in effects:
            match effect:
                case Dispatch():
                    self.post(effect)
                case TransferCompleted(pull_id=pull_id):
                    self.completed.add(pull_id)
                case CancelReads() | TransferFailed():
                    raise AssertionError(effect)

    def post(self, dispatch):
        index = dispatch.pairs.source.astype(np.int32)
        cuts = np.array([*range(0, len(index), CHUNK_PAIRS), len(index)])
        self.owners[dispatch.read_id] = dispatch.pull_ids
        fences = tuple(Fence(each.fence_id, each.slot, each.epoch, each.after) for each in dispatch.fences)
        read = Read(
            dispatch.read_id,
            dispatch.peer,
            dispatch.program_id,
            index,
            index,
            cuts,
            len(index) * MIB,
            priority=dispatch.priority,
            fences=fences,
        )
        self.feed(self.ledger.admit(read))

    def chunks_before(self, pull_id, *, at_most):
        """Go on until a chunk of a pull is posted; return how many of others were posted before it."""
        begun = len(self.posted)
        while not any(pull_id in owners for owners in self.posted[begun:]):
            assert len(self.posted) - begun <= at_most, "too many chunks went before it"
            assert self.step()
        return len(self.posted) - begun - 1


@pytest.mark.parametrize("in_flight", [0, CHUNKS_IN_FLIGHT_MAX], ids=["copied by the post", "two in flight"])
@pytest.mark.parametrize("served_s", [0.0, 5.0, 12.0, 60.0])
@pytest.mark.parametrize(("bulk", "urgent"), [("p", "p"), ("p", "idle"), ("pqrs", "idle"), ("pqrs", "q")])
def test_an_urgent_pull_is_posted_within_two_chunks_however_long_bulk_was_served(bulk, urgent, served_s, in_flight):
    wire = Wire(in_flight=in_flight)
    for number, peer in enumerate(bulk):
        wire.submit(number, peer, GIB_16)
    begun = wire.now
    while not wire.posted or wire.now < begun + served_s:
        assert wire.step()
    for pull_id, priority in ((101, -1), (102, -2)):
        wire.submit(pull_id, urgent, 1, priority=priority)
        assert wire.chunks_before(pull_id, at_most=2) <= 2
    assert wire.completed <= {101, 102}


@thorough
@given(st.data())
def test_no_pull_starves_beside_an_endless_stream_of_urgent_ones(data):
    """Whatever is ahead of a pull when it comes, it is read after a bounded number of chunks.

    The most urgent stream never ends, and always has more than the windows hold.
    """
    limits = Limits(peer_bytes=64 << 20, total_bytes=160 << 20)
    wire = Wire(in_flight=data.draw(st.integers(0, 2)), limits=limits, budgets=PATIENT)
    peers = st.sampled_from("pqr")
    crowd = data.draw(st.lists(st.tuples(peers, st.integers(1, 80), st.integers(-3, 3)), max_size=6))
    streams = data.draw(st.lists(st.tuples(peers, st.integers(1, 40), st.integers(-3, 0)), min_size=1, max_size=3))
    for number, (peer, mib, priority) in enumerate(crowd):
        wire.submit(number, peer, mib, priority=priority)
    fresh = 1000
    patient, peer, mib, priority = 999, data.draw(peers), data.draw(st.integers(1, 80)), data.draw(st.integers(-2, 4))
    wire.submit(patient, peer, mib, priority=priority)
    waits_s = (priority - min(each for _, _, each in [*streams, *crowd, ("", 0, 0)]) + 1) * limits.aging_s
    ahead = sum(-(-each // CHUNK_PAIRS) + 1 for _, each, _ in crowd)
    windows = 2 * (2 * limits.total_bytes + limits.batch_bytes) // CHUNK_BYTES_MAX
    own = -(-mib // CHUNK_PAIRS) + 1
    bound = waits_s / CHUNK_S + (OVERTAKEN_MAX + 1) * (ahead + windows + own)
    while patient not in wire.completed:
        assert len(wire.posted) <= bound
        for stream in streams:
            if sum(len(lane) for lane in [wire.scheduler.open_pulls()]) < 40:
                wire.submit(fresh, stream[0], stream[1], priority=stream[2], program_id=2)
                fresh += 1
        assert wire.step()
