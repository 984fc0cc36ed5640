"""The scheduler under every order of events: each pull ends exactly once, and no end comes too early.

The books of ``scheduler_world`` check every effect: nothing is delivered with a rank that was not held, no read of a
failed pull goes on uncancelled, and quiescence is told exactly when the data plane has nothing of a failed pull.
"""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvflow.config import Tuning
from kvflow.events import PullFailed
from kvflow.reads.scheduler import Delivered

from .caches import thorough, thoroughly
from .scheduler_world import BUDGETS, PEERS, PULLS_MAX, World

ranks = st.lists(st.sampled_from(PEERS), min_size=1, max_size=3, unique=True)
verdicts = st.sampled_from(("held", "held", "held", "early", "early", "stale", "failed"))
SILENCE_S = 3 * max(BUDGETS.queue_s, BUDGETS.wire_s, BUDGETS.fence_s)


class SchedulerMachine(RuleBasedStateMachine):
    """Anything may happen at any time."""

    def __init__(self):
        super().__init__()
        self.world = World()

    @rule(peers=ranks, priority=st.integers(-1, 3), check_first=st.booleans())
    def submit(self, peers, priority, check_first):
        if len(self.world.pulls) < PULLS_MAX:
            self.world.submit(peers, priority=priority, check_first=check_first)

    @precondition(lambda self: self.world.plane)
    @rule(data=st.data())
    def advance(self, data):
        self.world.advance(data.draw(st.sampled_from(sorted(self.world.plane))))

    @precondition(lambda self: self.world.plane)
    @rule(data=st.data(), verdict=verdicts, unserved=st.booleans())
    def answer(self, data, verdict, unserved):
        self.world.answer(data.draw(st.sampled_from(sorted(self.world.plane))), verdict, unserved=unserved)

    @precondition(lambda self: self.world.plane)
    @rule(verdict=verdicts)
    def answer_everything(self, verdict):
        for read_id in sorted(self.world.plane):
            self.world.answer(read_id, verdict)

    @precondition(lambda self: self.world.asked())
    @rule(data=st.data())
    def tell(self, data):
        """What is told may come late: the rank may be read again already, or be over."""
        asked = self.world.asked()
        self.world.tell([asked[at] for at in data.draw(st.sets(st.integers(0, len(asked) - 1), min_size=1))])

    @precondition(lambda self: self.world.stories)
    @rule(data=st.data())
    def cancel(self, data):
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.stories))))

    @rule(peer=st.sampled_from(PEERS))
    def fail_peer(self, peer):
        self.world.fail_peer(peer)

    @rule(seconds=st.sampled_from((0.001, 0.006, 0.05, 0.5, 1.5)))
    def tick(self, seconds):
        self.world.tick(seconds)

    @rule(peer=st.sampled_from(PEERS))
    def make_progress(self, peer):
        outstanding = self.world.outstanding[peer]
        if any(read.peer == peer and read.phase != "queue" for read in self.world.plane.values()):
            outstanding.since = self.world.now

    @rule()
    def stay_silent(self):
        """A peer that hangs is found by the budgets, whatever state its pulls are in."""
        before = list(self.world.stories.values())
        self.world.tick(SILENCE_S)
        assert all(story.ended for story in before)

    def teardown(self):
        self.world.finish()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = thoroughly(400, stateful_step_count=40)


@thorough
@given(st.lists(st.sampled_from((0.0, 0.002, 0.02, 0.3)), min_size=200, max_size=200), st.booleans())
def test_a_lease_that_is_read_early_again_and_again_has_one_budget(pauses, unserved):
    world = World()
    world.submit(PEERS[:1], check_first=True)
    story = world.stories[1]
    started = world.now
    for pause in pauses:
        for read_id in sorted(world.plane):
            world.answer(read_id, "early", unserved=unserved and not story.ranks[0].unserved)
        world.tick(pause + 0.02)
        assert not story.live or world.now - started < BUDGETS.fence_s + 1.0
        world.tell(world.waiting())
    assert PullFailed in story.told
    world.finish()


@thorough
@given(st.permutations(range(6)), st.integers(0, 5))
def test_a_pull_is_delivered_in_whatever_order_its_ranks_answer(order, early):
    """Six pulls of two ranks, one of which is early once."""
    world = World(Tuning(queue_s=1000.0, wire_s=1000.0, fence_s=1000.0))
    for _ in range(3):
        world.submit(PEERS[:2], check_first=True)
    reads = sorted(world.plane)
    for at in order:
        world.answer(reads[at], "early" if at == early else "held")
    world.tell(world.asked())
    world.finish()
    assert all(story.told == [Delivered] for story in world.stories.values())
