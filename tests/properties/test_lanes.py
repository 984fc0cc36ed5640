"""Reads of several peers in real lanes, over a wire that ends its work in any order: what each owes and answers."""

import math

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvflow.errors import FailureCode
from kvflow.leases.epochs import judge
from kvflow.reads.backend import Cause
from kvflow.reads.contract import SPAN_MAX
from kvflow.reads.lanes import CHECKS_IN_FLIGHT_MAX, CHUNKS_IN_FLIGHT_MAX, OVERTAKEN_MAX, Check
from tests.unit.kvflow.reads.lane_reads import STAGED, Bench, prepared

from .caches import thorough, thoroughly

PEERS = "pq"
SLOTS = (0, 0, 1, 1, 2, SPAN_MAX)
BUFFERS = 2
LOST = Cause(FailureCode.PEER_LOST, "the wire broke")


class Expected:
    """What is known of a read."""

    def __init__(self, read):
        self.read, self.arrived, self.failed, self.cancelled = read, 0, False, False
        self.post_s = self.scatter_s = 0.0
        self.in_flight, self.checked = 0, not read.check_first


class LanesMachine(RuleBasedStateMachine):
    """Work is taken, and ends or fails; reads are admitted and cancelled meanwhile, and peers abandoned and opened."""

    def __init__(self):
        super().__init__()
        self.bench, self.reads, self.count = Bench(*PEERS, buffers=BUFFERS), {}, 0
        self.lists = [prepared(2, portion=4), prepared(3, shared=6, list_id=2), STAGED]
        self.flying, self.open = [], {*PEERS}
        self.since = dict.fromkeys(PEERS, math.inf)  # of what a peer owes

    @property
    def lanes(self):
        return self.bench.lanes

    @rule(
        peer=st.sampled_from(PEERS),
        which=st.sampled_from((0, 0, 1, 1, 2)),
        chunks=st.integers(1, 6),
        slot=st.sampled_from(SLOTS),
        epoch=st.sampled_from((7, 7, 9)),
        parts=st.integers(1, 2),
        check_first=st.booleans(),
        count=st.integers(1, 3),
    )
    def admit(self, peer, which, count, **how):
        for _ in range(count if peer in self.open else 0):
            self.count += 1
            read = self.bench.admit(self.count, self.lists[which], peer=peer, **how)
            self.reads[self.count] = Expected(read)

    @rule(count=st.integers(1, 3))
    def post(self, count):
        for _ in range(count):
            work = self.bench.take()
            if work is None:
                return
            peer = work.lane.peer
            self.flying.append(work)
            if self.since[peer] == math.inf:
                self.since[peer] = self.bench.now
            mine = [isinstance(each, Check) for each in self.flying if each.lane is work.lane]
            assert mine.count(True) <= CHECKS_IN_FLIGHT_MAX
            assert mine.count(False) <= CHUNKS_IN_FLIGHT_MAX
            names = [opened.read.read_id for opened in work.reads]
            assert len(set(names)) == len(names)
            if isinstance(work, Check):
                assert work.last - work.first < SPAN_MAX
                leases = {}
                for opened in work.reads:
                    lease = opened.read.lease
                    assert leases.setdefault(lease.slot, lease.epoch) == lease.epoch, "it has one answer for a slot"
                    assert work.first <= lease.slot <= work.last
                    each = self.reads[opened.read.read_id]
                    wanted = sum(len(part.pairs.source) for part in opened.read.parts)
                    assert each.arrived == wanted if work.fence else not each.checked
                    assert not each.in_flight
            else:
                for name in names:
                    assert self.reads[name].checked, "its first check comes first"
                    self.reads[name].in_flight += 1

    def over(self, work):
        """Something that a peer owed has ended."""
        self.flying.remove(work)
        peer = work.lane.peer
        self.since[peer] = self.bench.now if any(each.lane.peer == peer for each in self.flying) else math.inf

    @precondition(lambda self: self.flying)
    @rule(which=st.integers(0, 9), scatter_s=st.sampled_from((0.0, 0.25, 1.0)), raised=st.booleans())
    def arrive(self, which, scatter_s, raised):
        work = self.flying[which % len(self.flying)]
        self.over(work)
        if isinstance(work, Check):
            values = [7 + 2 * raised] * (work.last + 1 - work.first)
            verdicts = {}
            for opened in work.reads:
                lease = opened.read.lease
                verdicts[opened.read.read_id] = judge(lease.epoch, values[lease.slot - work.first])
            self.lanes.checked(work, values)
            for name, verdict in verdicts.items():
                if name in self.reads and verdict == "held" and not work.fence:
                    self.reads[name].checked = True
                elif name in self.reads:
                    self.ends(name, verdict)
        else:
            work.scatter_s, work.post_s = scatter_s, 2 * scatter_s
            self.note_chunk(work)
            self.lanes.arrived(work)
        self.look()

    def note_chunk(self, work):
        for share, opened in zip(work.chunk.portion.shares, work.reads, strict=True):
            each = self.reads[opened.read.read_id]
            each.in_flight -= 1
            each.scatter_s += work.scatter_s
            each.post_s += work.post_s
            each.arrived += share.pairs if len(work.reads) > 1 else work.nbytes

    @precondition(lambda self: self.flying)
    @rule(which=st.integers(0, 9))
    def fail(self, which):
        work = self.flying[which % len(self.flying)]
        self.over(work)
        for opened in work.reads:
            each = self.reads.get(opened.read.read_id)
            if each is not None:
                each.failed = True
                each.in_flight -= not isinstance(work, Check)
        self.lanes.failed(work, LOST)
        self.look()

    @precondition(lambda self: self.reads)
    @rule(which=st.integers(0, 9))
    def cancel(self, which):
        name = [*self.reads][which % len(self.reads)]
        self.reads[name].cancelled = True
        self.lanes.cancel([name])
        self.look()

    @rule(peer=st.sampled_from(PEERS), sure=st.sampled_from((True, False, False)))
    def abandon(self, peer, sure):
        """Its reads end once nothing of them is in flight. When all has ended, it may be opened again."""
        if peer not in self.open and self.lanes.drained(peer):
            self.lanes.open(peer)
            self.open.add(peer)
        elif peer in self.open and sure:
            self.open.remove(peer)
            for each in self.reads.values():
                each.failed |= each.read.peer == peer
            self.lanes.abandon(peer, LOST)
            self.look()

    @rule(seconds=st.sampled_from((0.5, 2.0)))
    def time_passes(self, seconds):
        self.bench.now += seconds

    def ends(self, name, verdict):
        """A read has ended with a verdict, unless it was to fail."""
        (answer,) = [each for each in self.bench.answers if each.read_id == name]
        assert answer.verdict == verdict

    def look(self):
        """Look at the answers: each read ends once, when nothing of it is in flight, and says what it took."""
        for answer in self.bench.answers:
            each = self.reads.pop(answer.read_id)
            assert not each.in_flight, "nothing writes any longer"
            assert (answer.post_s, answer.scatter_s) == (each.post_s, each.scatter_s)
            assert answer.nbytes == each.arrived
            wanted = sum(len(part.pairs.source) for part in each.read.parts)
            if answer.verdict == "failed":
                assert each.failed or each.cancelled
                assert answer.code == (FailureCode.PEER_LOST if not each.cancelled else answer.code)
            elif answer.verdict == "held":
                assert each.arrived == wanted
        self.bench.answers.clear()
        for name, each in self.reads.items():
            if each.failed:
                assert each.in_flight, (name, "it ends with its last chunk")

    @invariant()
    def each_peer_owes_since_it_last_gave_something(self):
        for peer in PEERS:
            lane = self.lanes._lanes.get(peer)
            assert self.since[peer] == (math.inf if lane is None else lane.outstanding.since)
            assert self.lanes.drained(peer) == (peer not in self.open and self.since[peer] == math.inf)

    @invariant()
    def a_buffer_has_one_chunk_in_flight(self):
        self.lanes.check()
        buffers = [each.chunk.buffer for each in self.flying if not isinstance(each, Check)]
        taken = [buffer for buffer in buffers if buffer >= 0]
        assert len(set(taken)) == len(taken) == self.lanes.staging()[0]

    def teardown(self):
        """Once everything has ended, every read has its answer, and nobody owes anything."""
        for _ in range(10_000):
            self.post(9)
            if not self.flying:
                break
            self.arrive(0, 0.0, False)
        self.look()
        assert self.reads == {}
        assert set(self.since.values()) == {math.inf}


LanesMachine.TestCase.settings = thoroughly(120, least=100, stateful_step_count=40)
TestLanes = LanesMachine.TestCase


@thorough
@given(st.integers(1, 30), st.integers(2, 6), st.integers(1, 3))
def test_an_old_read_is_overtaken_by_eight_urgent_chunks_at_a_time(chunks, rounds, urgent):
    bench, one = Bench("p", "q"), prepared()
    bench.admit(1, one, peer="p", chunks=chunks, priority=1)
    posted = []
    for number in range(2, 2 + rounds * (OVERTAKEN_MAX + 1)):
        for each in range(urgent):
            bench.admit(100 * number + each, one, peer="q", priority=0)
        work = bench.lanes.take_chunk()
        posted.append(work.reads[0].read.read_id)
        bench.land(work)
    mine = [at for at, read_id in enumerate(posted) if read_id == 1]
    assert mine == list(range(OVERTAKEN_MAX, len(posted), OVERTAKEN_MAX + 1))[:chunks]
