"""The scheduler under every order of events: each pull ends exactly once, and no end comes too early.

The books of ``scheduler_world`` check every effect: batches within budgets and windows, fences behind all bytes,
no dispatch for a pull that has failed, quiescence exactly when nothing of a failed pull is in flight.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvflow.errors import CapacityExceeded
from kvflow.transfer.events import TransferCompleted, TransferFailed, TransferStarted
from kvflow.transfer.requests import Budgets

from .caches import thorough
from .scheduler_world import BUDGETS, EPOCH, LEASE_S, LIMITS, PEERS, PROGRAMS, World

parts = st.lists(st.tuples(st.sampled_from(sorted(PROGRAMS)), st.integers(1, 40)), min_size=1, max_size=3)
verdicts = st.sampled_from((EPOCH, EPOCH, EPOCH - 1, EPOCH + 1, None))
SILENCE_S = 3 * max(BUDGETS.queue_s, BUDGETS.wire_s, BUDGETS.fence_s)


class SchedulerMachine(RuleBasedStateMachine):
    """Anything may happen at any time."""

    def __init__(self):
        super().__init__()
        self.world = World()

    @rule(parts=parts, priority=st.integers(-1, 3), admitted=st.booleans())
    def submit(self, parts, priority, admitted):
        if len(self.world.scheduler.open_pulls()) < LIMITS.pulls_max:
            self.world.submit(parts, priority=priority, admitted=admitted)

    @precondition(lambda self: self.world.flights)
    @rule(data=st.data())
    def complete_read(self, data):
        self.world.complete(data.draw(st.sampled_from(sorted(self.world.flights))))

    @precondition(lambda self: self.world.flights)
    @rule(count=st.integers(1, 10))
    def complete_oldest_reads(self, count):
        for read_id in sorted(self.world.flights)[:count]:
            self.world.complete(read_id)

    @precondition(lambda self: self.world.flights)
    @rule(data=st.data(), code=st.sampled_from(("peer_lost", "cancelled", "transport_error")))
    def fail_read(self, data, code):
        self.world.fail(data.draw(st.sampled_from(sorted(self.world.flights))), code)

    @precondition(lambda self: self.world.open_looks())
    @rule(data=st.data(), observed=verdicts)
    def settle_look(self, data, observed):
        self.world.settle_look(data.draw(st.sampled_from(self.world.open_looks())), observed)

    @precondition(lambda self: self.world.due_fences())
    @rule(data=st.data(), observed=verdicts)
    def settle_fence(self, data, observed):
        self.world.settle_fence(data.draw(st.sampled_from(self.world.due_fences())), observed)

    @precondition(lambda self: self.world.pulls)
    @rule(data=st.data())
    def cancel(self, data):
        pull_id = data.draw(st.sampled_from(sorted(self.world.pulls)))
        live = self.world.pulls[pull_id].live
        effects = self.world.scheduler.cancel(pull_id, code="transfer_cancelled", detail="", now=self.world.now)
        assert live or not effects
        self.world.apply(effects)
        assert not self.world.pulls[pull_id].live

    @rule(peer=st.sampled_from(PEERS))
    def fail_peer(self, peer):
        world = self.world
        needing = [
            pull
            for pull in world.pulls.values()
            if pull.live and any(leg.peer == peer and not leg.held for leg in pull.legs)
        ]
        world.fail_peer(peer)
        assert not any(pull.live for pull in needing)

    @rule(seconds=st.sampled_from((0.001, 0.01, 0.5, 1.5)))
    def tick(self, seconds):
        self.world.tick(seconds)

    @rule()
    def stay_silent(self):
        """A peer that hangs is found by the budgets, whatever state its pulls are in."""
        before = list(self.world.pulls.values())
        self.world.tick(SILENCE_S)
        for pull in before:
            assert {TransferCompleted, TransferFailed} & {*pull.kinds}

    @invariant()
    def never_more_than_a_batch_over_twice_the_window(self):
        largest = max(LIMITS.batch_bytes, *(nbytes for nbytes, _ in PROGRAMS.values()))
        assert self.world.in_flight()[0] < 2 * LIMITS.total_bytes + largest
        for peer in PEERS:
            nbytes, descriptors = self.world.in_flight(peer)
            assert nbytes < 2 * LIMITS.peer_bytes + largest
            assert descriptors < 2 * LIMITS.peer_descriptors + max(LIMITS.batch_descriptors, 20)

    def teardown(self):
        """Faults stop: then everything must come to its end, and every window be empty."""
        world = self.world
        for _ in range(10_000):
            if not world.scheduler.busy:
                break
            if world.flights:
                world.complete(min(world.flights))
            elif due := world.due_fences():
                world.settle_fence(due[0], EPOCH)
            elif looks := world.open_looks():
                world.settle_look(looks[0], EPOCH)
            else:
                world.tick(0.005)
        assert not world.scheduler.busy
        assert world.scheduler.in_flight() == (0, 0)
        for pull in world.pulls.values():
            ends = [kind for kind in pull.kinds if kind in (TransferCompleted, TransferFailed)]
            assert len(ends) == 1


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(thorough, max_examples=400, stateful_step_count=40)


@thorough
@given(parts, st.integers(1, 6), st.integers(0, 3))
def test_a_steady_stream_of_urgent_pulls_starves_no_one(parts, lag, priority):
    """Waiting is worth one step of priority for every ``aging_s``; what was ahead by then is served, and no more."""
    world = World(Budgets(queue_s=1000.0, wire_s=1000.0, fence_s=1000.0))
    urgent = [(program_id, 4) for program_id, _ in parts]
    world.submit(urgent, priority=0)
    world.submit(parts, priority=priority)
    patient = world.pulls[2]
    step_s = 0.05
    batches_ahead = LIMITS.pulls_max * sum(count for _, count in urgent)
    deadline = world.now + (priority + 1) * LIMITS.aging_s + batches_ahead * step_s
    while TransferStarted not in patient.kinds:
        assert world.now < deadline
        if len(world.scheduler.open_pulls()) < LIMITS.pulls_max:
            world.submit(urgent, priority=0)
        for read_id in sorted(world.flights)[:lag]:
            world.complete(read_id)
        for fence_id in world.due_fences():
            world.settle_fence(fence_id, EPOCH)
        world.tick(step_s)


def test_leases_are_renewed_before_they_run_out_and_no_longer_than_they_are_needed():
    world = World()
    world.submit([(10, 1)], priority=0)
    while world.flights:
        world.complete(min(world.flights))
    (slot,) = world.legs
    world.tick(0.5)
    assert world.renewals == [(slot, world.now)]  # at once: the ticket may have spent its lease in a router
    for _ in range(3):
        world.tick(0.5)
    assert len(world.renewals) == 1
    world.tick(0.5)
    assert world.renewals[1:] == [(slot, world.now)]
    assert world.now - world.renewals[0][1] <= LEASE_S / 2
    world.settle_fence(world.due_fences()[0], EPOCH)
    world.tick(LEASE_S)
    assert len(world.renewals) == 2


def test_pulls_are_bounded():
    world = World()
    for _ in range(LIMITS.pulls_max):
        world.submit([(10, 200)], priority=0)
    with pytest.raises(CapacityExceeded, match="open pulls"):
        world.submit([(10, 1)], priority=0)
