"""The scheduler's promises one by one, each in the shortest story that needs it. Properties tell the long ones."""

import itertools

import msgspec
import numpy as np
import pytest

from kvflow.errors import CapacityExceeded
from kvflow.transfer.events import (
    TransferCompleted,
    TransferFailed,
    TransferQuiesced,
    TransferRetried,
    TransferStarted,
)
from kvflow.transfer.pairs import UnitPairs
from kvflow.transfer.pulls import EARLY_RETRY_S
from kvflow.transfer.queues import Limits
from kvflow.transfer.requests import (
    NOT_HELD,
    Budgets,
    CancelReads,
    Demand,
    Dispatch,
    LegRequest,
    Look,
    PullRequest,
    RenewLease,
)
from kvflow.transfer.scheduler import Scheduler
from tests.counting import calls_of

EPOCH = 7
BUDGETS = Budgets(queue_s=4.0, wire_s=3.0, fence_s=2.0)
LIMITS = Limits(batch_bytes=100, batch_descriptors=100, peer_bytes=100, peer_descriptors=100, total_bytes=1000)


def leg(peer="p", count=5, slot=0, first=0, descriptors=2, **how):
    pairs = UnitPairs(np.arange(first, first + count), np.arange(first, first + count))
    return LegRequest(peer, slot, EPOCH, 30.0, (Demand(1, pairs, 10, 1, descriptors),), **how)


def pull(pull_id=1, *legs, priority=0):
    return PullRequest(pull_id, f"request-{pull_id}", legs or (leg(),), priority, BUDGETS)


def only(kind, effects):
    (found,) = [effect for effect in effects if isinstance(effect, kind)]
    return found


def kinds(effects):
    return [type(effect) for effect in effects]


@pytest.fixture
def scheduler():
    return Scheduler(LIMITS)


def arrive(scheduler, dispatch, now=1.0, unheld=()):
    return scheduler.on_read_completed(dispatch.read_id, posted_s=0.25, now=now, unheld=unheld)


def judged(scheduler, dispatch, observed=EPOCH, now=1.0):
    return scheduler.on_fence_judged(dispatch.fences[0].fence_id, observed=observed, fence_s=0.125, now=now)


def test_a_pull_from_submission_to_report(scheduler):
    effects = scheduler.submit(pull(), 0.5)
    assert kinds(effects) == [Dispatch, TransferStarted]
    dispatch = only(Dispatch, effects)
    assert (dispatch.peer, dispatch.program_id, dispatch.pull_ids) == ("p", 1, (1,))
    (fence,) = dispatch.fences
    assert (fence.slot, fence.epoch, fence.after) == (0, EPOCH, (dispatch.read_id,))
    assert arrive(scheduler, dispatch, now=1.5) == []
    event = only(TransferCompleted, judged(scheduler, dispatch, now=2.0))
    report = event.report
    assert (event.pull_id, report.request_id) == (1, "request-1")
    assert (report.nbytes, report.descriptors, report.reads) == (50, 2, 1)
    assert report.timings_s == {"queue": 0.0, "post": 0.25, "wire": 0.75, "scatter": 0.0, "fence": 0.125}
    assert not scheduler.busy
    assert scheduler.in_flight() == (0, 0)


def test_the_last_batch_is_fenced_behind_all_that_are_in_flight():
    scheduler = Scheduler(Limits(batch_bytes=20))
    dispatches = [effect for effect in scheduler.submit(pull(), 0.0) if isinstance(effect, Dispatch)]
    assert [len(dispatch.fences) for dispatch in dispatches] == [0, 0, 1]
    assert dispatches[-1].fences[0].after == tuple(dispatch.read_id for dispatch in dispatches)


def test_a_completion_makes_room_for_the_next_batch_in_the_same_call(scheduler):
    first = only(Dispatch, scheduler.submit(pull(1, leg(count=10)), 0.0))
    assert scheduler.submit(pull(2, leg(first=20)), 0.0) == []
    second = only(Dispatch, arrive(scheduler, first))
    assert second.pull_ids == (2,)


def test_pulls_of_one_program_share_a_batch(scheduler):
    first = only(Dispatch, scheduler.submit(pull(1, leg(count=10)), 0.0))
    for pull_id in (2, 3):
        scheduler.submit(pull(pull_id, leg(count=2, slot=pull_id, first=10 * pull_id)), 0.0)
    shared = only(Dispatch, arrive(scheduler, first))
    assert shared.pull_ids == (2, 3)
    assert [fence.slot for fence in shared.fences] == [2, 3]
    assert sorted(shared.pairs.target.tolist()) == [20, 21, 30, 31]


def test_pulls_that_are_held_go_together_and_the_urgent_first():
    scheduler = Scheduler(Limits())
    for pull_id, priority in ((1, 1), (2, 1), (3, 0)):
        held = scheduler.submit(pull(pull_id, leg(first=10 * pull_id), priority=priority), 0.0, hold=True)
        assert held == []
    dispatches = [effect for effect in scheduler.pump(0.0) if isinstance(effect, Dispatch)]
    assert [dispatch.pull_ids for dispatch in dispatches] == [(3,), (1, 2)]
    assert scheduler.pump(0.0) == []


def test_a_pull_is_complete_when_every_rank_is_fenced(scheduler):
    one, other = (
        effect for effect in scheduler.submit(pull(1, leg("p"), leg("q", slot=3)), 0.0) if isinstance(effect, Dispatch)
    )
    assert arrive(scheduler, one) + judged(scheduler, one) + arrive(scheduler, other) == []
    assert kinds(judged(scheduler, other)) == [TransferCompleted]


def test_a_stale_fence_fails_at_once_and_is_quiescent(scheduler):
    dispatch = only(Dispatch, scheduler.submit(pull(), 0.0))
    arrive(scheduler, dispatch)
    failed, quiesced = judged(scheduler, dispatch, EPOCH + 1)
    assert (failed.code, failed.phase, failed.peer, failed.quarantined) == ("stale_lease", "fence", "p", False)
    assert isinstance(quiesced, TransferQuiesced)


def looked(scheduler, dispatch, observed=EPOCH, now=1.0):
    return scheduler.on_fence_judged(dispatch.looks[0].fence_id, observed=observed, fence_s=0.125, now=now)


def test_a_lease_that_may_be_admitted_later_is_looked_at_before_its_bytes_are_read(scheduler):
    read = only(Dispatch, scheduler.submit(pull(1, leg(admitted=False)), 0.0))
    assert [(look.slot, look.epoch, look.after) for look in read.looks] == [(0, EPOCH, ())]
    assert looked(scheduler, read) + arrive(scheduler, read) == []
    report = only(TransferCompleted, judged(scheduler, read)).report
    assert (report.nbytes, report.reads) == (50, 1)


def test_a_lease_that_was_held_before_its_ticket_was_out_is_not_looked_at(scheduler):
    assert only(Dispatch, scheduler.submit(pull(), 0.0)).looks == ()


def not_held(scheduler, dispatch, now=1.0):
    """Report as the transport does that a batch was not read, and that its fences fail with it."""
    effects = scheduler.on_read_failed(dispatch.read_id, code=NOT_HELD, detail="", now=now)
    for fence in dispatch.fences:
        effects += scheduler.on_fence_failed(fence.fence_id, code=NOT_HELD, detail="", now=now)
    return effects


def looked_alone(scheduler, look, observed=EPOCH, now=1.0):
    return scheduler.on_fence_judged(look.check.fence_id, observed=observed, fence_s=0.125, now=now)


def test_a_lease_that_is_not_admitted_yet_is_read_once_it_is(scheduler):
    early = only(Dispatch, scheduler.submit(pull(1, leg(admitted=False)), 0.0))
    assert kinds(looked(scheduler, early, EPOCH - 1)) == [TransferRetried]
    assert not_held(scheduler, early) == []
    assert scheduler.in_flight() == (0, 0)
    assert Look not in kinds(scheduler.tick(1.0 + EARLY_RETRY_S / 2))
    look = only(Look, scheduler.tick(1.0 + EARLY_RETRY_S))
    assert (look.peer, look.check.slot, look.check.epoch, look.check.after) == ("p", 0, EPOCH, ())
    assert kinds(looked_alone(scheduler, look, EPOCH - 1)) == [TransferRetried]
    look = only(Look, scheduler.tick(2.0))
    read = only(Dispatch, looked_alone(scheduler, look, now=2.0))
    assert read.pairs.target.tolist() == early.pairs.target.tolist() == [0, 1, 2, 3, 4]
    assert read.looks == ()  # it was found held
    assert arrive(scheduler, read) == []
    report = only(TransferCompleted, judged(scheduler, read)).report
    assert (report.nbytes, report.reads) == (50, 1)


def test_a_pull_goes_on_without_the_early_one_that_shared_its_batch():
    scheduler = Scheduler(Limits())
    scheduler.submit(pull(1, leg(count=2, admitted=False)), 0.0, hold=True)
    scheduler.submit(pull(2, leg(count=2, slot=1, admitted=False)), 0.0, hold=True)
    shared = only(Dispatch, scheduler.pump(0.0))
    held, early = shared.looks
    scheduler.on_fence_judged(held.fence_id, observed=EPOCH, fence_s=0.0, now=1.0)
    scheduler.on_fence_judged(early.fence_id, observed=EPOCH - 1, fence_s=0.0, now=1.0)
    again = only(Dispatch, not_held(scheduler, shared))
    assert (again.pull_ids, again.looks, again.pairs.target.tolist()) == ((1,), (), [0, 1])
    arrive(scheduler, again)
    assert only(TransferCompleted, judged(scheduler, again)).report.reads == 1
    assert scheduler.open_pulls() == (2,)


def test_a_look_alone_that_fails_fails_its_pull(scheduler):
    early = only(Dispatch, scheduler.submit(pull(1, leg(admitted=False)), 0.0))
    looked(scheduler, early, EPOCH - 1)
    not_held(scheduler, early)
    look = only(Look, scheduler.tick(2.0))
    effects = scheduler.on_fence_failed(look.check.fence_id, code="peer_lost", detail="gone", now=2.0)
    assert kinds(effects) == [TransferFailed, TransferQuiesced]
    assert (effects[0].code, effects[0].phase, effects[0].quarantined) == ("peer_lost", "fence", False)


def test_all_batches_wait_for_one_look_until_its_verdict_is_known(scheduler):
    one, other = leg(admitted=False).demands[0], msgspec.structs.replace(leg().demands[0], program_id=2)
    request = LegRequest("p", 0, EPOCH, 30.0, (one, other), admitted=False)
    first, second = (e for e in scheduler.submit(pull(1, request), 0.0) if isinstance(e, Dispatch))
    assert first.looks == second.looks
    looked(scheduler, first)
    arrive(scheduler, first)
    arrive(scheduler, second)
    assert only(TransferCompleted, judged(scheduler, second)).report.reads == 2


def test_a_look_that_finds_the_lease_ended_fails_the_pull_when_nothing_writes_any_more(scheduler):
    read = only(Dispatch, scheduler.submit(pull(1, leg(admitted=False)), 0.0))
    assert kinds(looked(scheduler, read, EPOCH + 1)) == [CancelReads]
    ended = scheduler.on_read_failed(read.read_id, code="cancelled", detail="", now=1.0)
    assert kinds(ended) == [TransferFailed, TransferQuiesced]
    assert ended[0].code == "stale_lease"
    assert looked(scheduler, read) == judged(scheduler, read) == []


def test_a_look_that_fails_leaves_the_failure_to_its_reads(scheduler):
    read = only(Dispatch, scheduler.submit(pull(1, leg(admitted=False)), 0.0))
    assert scheduler.on_fence_failed(read.looks[0].fence_id, code="bounds", detail="", now=1.0) == []
    failed = scheduler.on_read_failed(read.read_id, code="bounds", detail="no such slot", now=1.0)
    assert kinds(failed) == [TransferFailed, TransferQuiesced]


def test_only_the_pulls_whose_leases_were_not_held_are_read_again(scheduler):
    """Each time that a pull shares a batch with others, these may not be held yet: it has nothing to do with them."""
    scheduler.submit(pull(1, leg(count=2)), 0.0, hold=True)
    read = only(Dispatch, scheduler.submit(pull(2, leg(count=2, slot=1)), 0.0))
    arrive(scheduler, read, unheld={(1, EPOCH)})
    fences = {fence.slot: fence.fence_id for fence in read.fences}
    held, other = (scheduler.on_fence_judged(fences[slot], observed=EPOCH, fence_s=0.125, now=1.0) for slot in (0, 1))
    assert kinds(held) == [TransferCompleted]
    again = only(Dispatch, other)
    assert again.leases[0].slot == 1
    arrive(scheduler, again, unheld={(1, EPOCH)})
    failed = only(TransferFailed, judged(scheduler, again))
    assert (failed.code, failed.phase) == ("transport_error", "fence")


def test_a_lease_that_is_found_held_has_its_budgets_anew(scheduler):
    early = only(Dispatch, scheduler.submit(pull(1, leg(admitted=False)), 0.0))
    looked(scheduler, early, EPOCH - 1, now=0.0)
    not_held(scheduler, early, now=0.0)
    late = BUDGETS.fence_s - 0.1
    look = only(Look, scheduler.tick(late))
    read = only(Dispatch, looked_alone(scheduler, look, now=late))
    assert TransferFailed not in kinds(scheduler.tick(late + BUDGETS.wire_s - 0.1))
    arrive(scheduler, read, now=late + BUDGETS.wire_s)
    assert TransferFailed not in kinds(scheduler.tick(late + BUDGETS.wire_s + BUDGETS.fence_s - 0.1))


def test_a_peer_that_the_transport_has_asked_for_nothing_owes_nothing(scheduler):
    read = only(Dispatch, scheduler.submit(pull(), 0.0))
    held_until = 3 * BUDGETS.wire_s
    for now in np.arange(0.0, held_until + 1, BUDGETS.wire_s / 2):
        assert TransferFailed not in kinds(scheduler.tick(now, held_up={read.peer}))
    assert TransferFailed not in kinds(scheduler.tick(held_until + BUDGETS.wire_s, held_up={"another"}))
    failed = only(TransferFailed, scheduler.tick(held_until + 2 * BUDGETS.wire_s))
    assert (failed.code, failed.phase) == ("deadline_exceeded", "wire")


def test_an_early_fence_reads_the_data_again_once_the_lease_is_held(scheduler):
    dispatch = only(Dispatch, scheduler.submit(pull(), 0.0))
    arrive(scheduler, dispatch)
    assert kinds(judged(scheduler, dispatch, EPOCH - 1, now=1.0)) == [TransferRetried]
    look = only(Look, scheduler.tick(1.0 + EARLY_RETRY_S))
    assert judged(scheduler, dispatch) == []  # the verdict of another time counts no more
    again = only(Dispatch, looked_alone(scheduler, look, now=1.5))
    assert again.pairs.target.tolist() == dispatch.pairs.target.tolist()
    arrive(scheduler, again, now=1.5)
    report = only(TransferCompleted, judged(scheduler, again, now=1.5)).report
    assert (report.nbytes, report.reads) == (50, 2)
    assert (report.early, report.early_bytes) == (1, 50)


def test_waiting_for_an_admission_becomes_patient_but_not_endlessly(scheduler):
    """A budget of an hour is thousands of retries: the pause between them stays what it became."""
    patient = PullRequest(1, "r", (leg(),), 0, Budgets(queue_s=9999.0, wire_s=9999.0, fence_s=9999.0))
    dispatch, now, pauses = only(Dispatch, scheduler.submit(patient, 0.0)), 0.0, []
    arrive(scheduler, dispatch, now)
    judged(scheduler, dispatch, EPOCH - 1, now)
    for _ in range(1200):
        for pause in (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5):
            looks = [effect for effect in scheduler.tick(now + pause) if isinstance(effect, Look)]
            if looks:
                break
        (look,), now = looks, now + pause
        looked_alone(scheduler, look, EPOCH - 1, now)
        pauses.append(pause)
    assert pauses[:8] == [0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5]
    assert set(pauses[8:]) == {0.5}


def test_waiting_for_an_admission_has_one_budget_in_all(scheduler):
    dispatch, now = only(Dispatch, scheduler.submit(pull(), 0.0)), 0.0
    arrive(scheduler, dispatch, now)
    effects = judged(scheduler, dispatch, EPOCH - 1, now)
    while TransferFailed not in kinds(effects):
        assert now < 10 * BUDGETS.fence_s
        for look in (effect for effect in effects if isinstance(effect, Look)):
            looked_alone(scheduler, look, EPOCH - 1, now)
        now += 0.5
        effects = scheduler.tick(now)
    failed = only(TransferFailed, effects)
    assert (failed.code, failed.phase) == ("deadline_exceeded", "fence")
    assert now == BUDGETS.fence_s + 0.5


def test_a_failed_read_fails_the_pull_and_drops_the_rest(scheduler):
    dispatch = only(Dispatch, scheduler.submit(pull(1, leg(count=30)), 0.0))
    effects = scheduler.on_read_failed(dispatch.read_id, code="peer_lost", detail="gone", now=1.0)
    assert kinds(effects) == [TransferFailed, TransferQuiesced]
    assert (effects[0].code, effects[0].detail, effects[0].quarantined) == ("peer_lost", "gone", False)
    assert not scheduler.busy


def test_a_pull_that_fails_while_it_is_read_is_quarantined_until_the_transport_is_done(scheduler):
    one, other = (
        effect for effect in scheduler.submit(pull(1, leg("p"), leg("q", slot=3)), 0.0) if isinstance(effect, Dispatch)
    )
    effects = scheduler.on_read_failed(one.read_id, code="transport_error", detail="", now=1.0)
    assert only(TransferFailed, effects).quarantined
    assert only(CancelReads, effects).read_ids == (other.read_id,)
    assert scheduler.open_pulls() == (1,)
    assert kinds(arrive(scheduler, other)) == [TransferQuiesced]
    assert not scheduler.busy


def test_a_batch_that_another_pull_still_wants_is_not_cancelled(scheduler):
    first = only(Dispatch, scheduler.submit(pull(1, leg(count=10)), 0.0))
    for pull_id in (2, 3):
        scheduler.submit(pull(pull_id, leg(count=2, slot=pull_id, first=10 * pull_id)), 0.0)
    shared = only(Dispatch, arrive(scheduler, first))
    effects = scheduler.cancel(2, code="transfer_cancelled", detail="", now=1.0)
    assert kinds(effects) == [TransferFailed]
    effects = scheduler.cancel(3, code="transfer_cancelled", detail="", now=1.0)
    assert only(CancelReads, effects).read_ids == (shared.read_id,)
    effects = scheduler.on_read_failed(shared.read_id, code="cancelled", detail="", now=1.0)
    assert [effect.pull_id for effect in effects] == [2, 3]


def test_a_queued_pull_is_cancelled_at_once(scheduler):
    scheduler.submit(pull(1, leg(count=10)), 0.0)
    scheduler.submit(pull(2, leg(first=20)), 0.0)
    effects = scheduler.cancel(2, code="transfer_cancelled", detail="enough", now=1.0)
    assert kinds(effects) == [TransferFailed, TransferQuiesced]
    assert effects[0].phase == "queue"
    assert scheduler.cancel(2, code="transfer_cancelled", detail="", now=1.0) == []


@pytest.mark.parametrize(("code", "detail"), [("peer_lost", "the agent is gone"), ("cancelled", "removed")])
def test_a_fence_that_cannot_be_read_delivers_nothing(scheduler, code, detail):
    dispatch = only(Dispatch, scheduler.submit(pull(), 0.0))
    arrive(scheduler, dispatch)
    effects = scheduler.on_fence_failed(dispatch.fences[0].fence_id, code=code, detail=detail, now=1.0)
    assert kinds(effects) == [TransferFailed, TransferQuiesced]
    assert (effects[0].code, effects[0].phase, effects[0].detail) == (code, "fence", detail)


def test_a_peer_that_fails_ends_its_pulls_and_no_others(scheduler):
    scheduler.submit(pull(1, leg("p")), 0.0)
    scheduler.submit(pull(2, leg("q")), 0.0)
    failed = only(TransferFailed, scheduler.on_peer_failed("p", code="peer_lost", detail="", now=1.0))
    assert failed.pull_id == 1
    assert scheduler.open_pulls() == (1, 2)


def test_a_rank_that_has_delivered_may_fail_afterwards(scheduler):
    one, other = (
        effect for effect in scheduler.submit(pull(1, leg("p"), leg("q", slot=3)), 0.0) if isinstance(effect, Dispatch)
    )
    arrive(scheduler, one)
    judged(scheduler, one)
    assert scheduler.on_peer_failed("p", code="peer_lost", detail="", now=1.0) == []
    arrive(scheduler, other)
    assert kinds(judged(scheduler, other)) == [TransferCompleted]


def test_a_pull_that_is_not_dispatched_in_time_fails(scheduler):
    scheduler.submit(pull(1, leg(count=10)), 0.0)
    scheduler.submit(pull(2, leg(first=20)), 0.0)
    for now in (1.0, 2.0, 2.9):
        assert TransferFailed not in kinds(scheduler.tick(now))
    dispatch_progress = scheduler.tick(3.5)
    assert [effect.phase for effect in dispatch_progress if isinstance(effect, TransferFailed)] == ["wire"]
    effects = scheduler.tick(BUDGETS.queue_s + 0.5)
    assert only(TransferFailed, effects).phase == "queue"


def test_progress_of_the_peer_extends_the_wire_budget():
    scheduler = Scheduler(Limits(batch_bytes=10, peer_bytes=20))
    first, _ = [effect for effect in scheduler.submit(pull(), 0.0) if isinstance(effect, Dispatch)]
    arrive(scheduler, first, now=2.0)
    assert TransferFailed not in kinds(scheduler.tick(BUDGETS.wire_s + 1.9))
    assert TransferFailed in kinds(scheduler.tick(BUDGETS.wire_s + 2.1))


def test_each_budget_counts_from_the_start_of_its_own_phase(scheduler):
    """Queued for almost all of one budget, read for almost all of the next, and so on: together longer than any."""
    first = only(Dispatch, scheduler.submit(pull(1, leg(count=10)), 0.0))
    assert scheduler.submit(pull(2, leg(slot=1, first=20)), 0.0) == []
    assert TransferFailed not in kinds(scheduler.tick(2.9))
    second = only(Dispatch, arrive(scheduler, first, now=2.9))
    judged(scheduler, first, now=2.9)
    dispatched, arrived = 2.9, 2.9 + 2.9
    assert TransferFailed not in kinds(scheduler.tick(arrived))
    arrive(scheduler, second, now=arrived)
    judged_at = arrived + 1.9
    assert judged_at > dispatched + max(BUDGETS.queue_s, BUDGETS.wire_s, BUDGETS.fence_s)
    assert TransferFailed not in kinds(scheduler.tick(judged_at))
    assert kinds(judged(scheduler, second, now=judged_at)) == [TransferCompleted]


def test_a_fence_that_is_not_read_in_time_fails_in_its_own_phase(scheduler):
    dispatch = only(Dispatch, scheduler.submit(pull(), 0.0))
    arrive(scheduler, dispatch, now=2.5)
    assert TransferFailed not in kinds(scheduler.tick(2.5 + BUDGETS.fence_s))
    failed = only(TransferFailed, scheduler.tick(2.6 + BUDGETS.fence_s))
    assert (failed.code, failed.phase, failed.peer) == ("deadline_exceeded", "fence", "p")


def test_overload_does_not_fire_the_budget_of_the_wire():
    """Two hundred pulls of a slow producer take a hundred times the budget, and a batch comes every other second."""
    patient = Budgets(queue_s=10_000.0, wire_s=3.0, fence_s=2.0)
    scheduler = Scheduler(LIMITS)
    effects = []
    for pull_id in range(1, 201):
        request = PullRequest(pull_id, "r", (leg(slot=pull_id, first=10 * pull_id),), pull_id % 3, patient)
        effects += scheduler.submit(request, 0.0)
    waiting, now, completed = [effect for effect in effects if isinstance(effect, Dispatch)], 0.0, 0
    while waiting:
        dispatch, now = waiting.pop(0), now + 2.0
        effects = scheduler.tick(now) + arrive(scheduler, dispatch, now)
        for fence in dispatch.fences:
            effects += scheduler.on_fence_judged(fence.fence_id, observed=EPOCH, fence_s=0.0, now=now)
        assert TransferFailed not in kinds(effects)
        waiting += [effect for effect in effects if isinstance(effect, Dispatch)]
        completed += kinds(effects).count(TransferCompleted)
    assert completed == 200
    assert now > 60 * patient.wire_s


def test_overload_ends_by_the_budget_of_the_queue_and_says_so():
    scheduler = Scheduler(LIMITS)
    waiting = [only(Dispatch, scheduler.submit(pull(1, leg(count=10)), 0.0))]
    for pull_id in range(2, 20):
        scheduler.submit(pull(pull_id, leg(count=10, slot=pull_id, first=10 * pull_id)), 0.0)
    now, phases = 0.0, []
    while waiting:
        dispatch, now = waiting.pop(0), now + 1.0
        effects = arrive(scheduler, dispatch, now) + judged(scheduler, dispatch, now=now) + scheduler.tick(now)
        waiting += [effect for effect in effects if isinstance(effect, Dispatch)]
        phases += [effect.phase for effect in effects if isinstance(effect, TransferFailed)]
    assert set(phases) == {"queue"}


def test_a_pull_between_two_batches_of_a_hung_peer_has_a_deadline_too(scheduler):
    """The window is full of another pull's reads, which never end: without a deadline this one waited for ever."""
    scheduler.submit(pull(1, leg(count=5)), 0.0)
    shared = only(Dispatch, scheduler.submit(pull(2, leg(count=20, slot=1, first=50)), 0.0))
    hog = scheduler.submit(pull(3, leg(count=10, slot=2, first=100), priority=-1), 0.0)
    assert kinds(hog) == [Dispatch, TransferStarted]
    assert arrive(scheduler, shared, now=1.0) == []
    effects = scheduler.tick(1.1 + BUDGETS.wire_s)
    failed = {
        effect.pull_id: (effect.code, effect.phase, effect.quarantined)
        for effect in effects
        if isinstance(effect, TransferFailed)
    }
    assert failed[2] == ("deadline_exceeded", "wire", False)
    assert failed[3] == ("deadline_exceeded", "wire", True)


def test_a_pull_that_others_leave_no_room_is_no_fault_of_its_own_peer():
    """A hung peer fills the total window: whoever waits for room runs into the budget of the queue, not of the wire."""
    scheduler = Scheduler(msgspec.structs.replace(LIMITS, batch_bytes=50, total_bytes=100))
    patient = Budgets(queue_s=6.0, wire_s=3.0, fence_s=2.0)
    scheduler.submit(PullRequest(1, "r", (leg("hung", count=5),), 0, patient), 0.0)
    first = only(Dispatch, scheduler.submit(PullRequest(2, "s", (leg(count=15, slot=1),), 0, patient), 0.0))
    urgent = scheduler.submit(PullRequest(3, "t", (leg("hung", count=5, slot=2, first=90),), -1, patient), 0.0)
    assert only(Dispatch, urgent).pull_ids == (3,)
    assert arrive(scheduler, first, now=1.0) == []
    effects = scheduler.tick(4.5)
    failed = [effect for effect in effects if isinstance(effect, TransferFailed)]
    assert {(effect.pull_id, effect.phase, effect.peer) for effect in failed} == {
        (1, "wire", "hung"),
        (3, "wire", "hung"),
    }
    failed = only(TransferFailed, scheduler.tick(7.5))
    assert (failed.pull_id, failed.phase, failed.peer) == (2, "queue", "p")


def test_a_lease_is_renewed_while_a_pull_needs_it(scheduler):
    patient = PullRequest(1, "r", (leg(),), 0, Budgets(queue_s=99.0, wire_s=99.0, fence_s=99.0))
    scheduler.submit(patient, 0.0)
    # At once, because the ticket may be old, and then three times per lease.
    assert [scheduler.tick(now) for now in (0.1, 10.0, 10.1, 20.0, 20.1)] == [
        [RenewLease("p", 0, EPOCH)],
        [],
        [RenewLease("p", 0, EPOCH)],
        [],
        [RenewLease("p", 0, EPOCH)],
    ]


def test_a_stale_lease_is_told_when_the_other_ranks_are_quiet_too(scheduler):
    effects = scheduler.submit(pull(1, leg(), leg("q")), 0.0)
    one, other = (effect for effect in effects if isinstance(effect, Dispatch))
    arrive(scheduler, one)
    assert kinds(judged(scheduler, one, EPOCH + 1)) == [CancelReads]
    assert TransferFailed not in kinds(scheduler.tick(BUDGETS.wire_s))
    failed, quiesced = arrive(scheduler, other)
    assert (failed.code, failed.quarantined) == ("stale_lease", False)
    assert isinstance(quiesced, TransferQuiesced)


def test_a_stale_lease_beside_a_hung_rank_is_told_in_the_end(scheduler):
    effects = scheduler.submit(pull(1, leg(), leg("q")), 0.0)
    one, _ = (effect for effect in effects if isinstance(effect, Dispatch))
    arrive(scheduler, one)
    judged(scheduler, one, EPOCH + 1)
    failed = only(TransferFailed, scheduler.tick(BUDGETS.wire_s + 1.1))
    assert (failed.code, failed.quarantined) == ("deadline_exceeded", True)
    assert (failed.peer, failed.detail) == ("q", "wire took longer than its budget")  # not the rank that answered
    assert TransferFailed not in kinds(scheduler.tick(BUDGETS.wire_s + 2.0))


def test_what_a_lost_peer_has_in_flight_takes_no_room_from_others():
    scheduler = Scheduler(Limits(batch_bytes=50, peer_bytes=50, total_bytes=50))
    lost = only(Dispatch, scheduler.submit(pull(1), 0.0))
    assert Dispatch not in kinds(scheduler.submit(pull(2, leg("q")), 0.0))
    other = only(Dispatch, scheduler.on_peer_failed("p", code="peer_lost", detail="", now=0.0))
    assert other.peer == "q"
    assert kinds(scheduler.on_read_failed(lost.read_id, code="peer_lost", detail="", now=0.0)) == [TransferQuiesced]
    arrive(scheduler, other)
    assert scheduler.in_flight() == (0, 0)


def test_open_pulls_are_bounded_and_draining_ones_count():
    scheduler = Scheduler(Limits(pulls_max=1))
    dispatch = only(Dispatch, scheduler.submit(pull(), 0.0))
    scheduler.cancel(1, code="transfer_cancelled", detail="", now=0.0)
    with pytest.raises(CapacityExceeded, match="open pulls") as caught:
        scheduler.submit(pull(2), 0.0)
    assert caught.value.limit == 1
    arrive(scheduler, dispatch)
    assert kinds(scheduler.submit(pull(2), 1.0)) == [Dispatch, TransferStarted]


def test_descriptors_are_those_of_the_demands_however_they_travel(scheduler):
    pulls = {1: leg(count=13, descriptors=4), 2: leg(count=2, slot=2, first=20, descriptors=1)}
    effects = [effect for pull_id, each in pulls.items() for effect in scheduler.submit(pull(pull_id, each), 0.0)]
    counts = {}
    while dispatches := [effect for effect in effects if isinstance(effect, Dispatch)]:
        effects = [effect for dispatch in dispatches for effect in arrive(scheduler, dispatch)]
        for fence in (fence for dispatch in dispatches for fence in dispatch.fences):
            judged_ = scheduler.on_fence_judged(fence.fence_id, observed=EPOCH, fence_s=0.0, now=1.0)
            event = only(TransferCompleted, judged_)
            counts[event.pull_id] = (event.report.descriptors, event.report.reads)
    assert counts == {1: (4, 2), 2: (1, 1)}


def crowd(count, *, peers=("p",), in_flight=True, **how):
    """Open so many small pulls of each peer; a long one goes first, so that most of them wait."""
    scheduler = Scheduler(Limits(shared_bytes=1000, batch_bytes=1000, peer_bytes=2000, peer_descriptors=9999, **how))
    numbers = itertools.count(1)
    for peer in peers:
        for nbytes in (200, *[1] * count):
            number = next(numbers)
            request = pull(number, leg(peer, nbytes, slot=number, first=10 * number))
            scheduler.submit(request, 0.0, hold=True)
    if in_flight:
        scheduler.pump(0.0)
    return scheduler


@pytest.mark.parametrize("in_flight", [False, True])
def test_losing_a_peer_costs_the_same_for_each_pull_however_many_wait(in_flight):
    def cost(count):
        scheduler = crowd(count, peers=("p", "q"), in_flight=in_flight)
        ended = []
        calls = calls_of(lambda: ended.extend(scheduler.on_peer_failed("p", code="peer_lost", detail="", now=1.0)))
        assert kinds(ended).count(TransferFailed) == count + 1
        return calls

    assert cost(800) < 2.2 * cost(400)


def test_a_batch_that_many_pulls_share_is_given_up_at_the_same_cost_for_each():
    def cost(count):
        scheduler = Scheduler(Limits(batch_descriptors=9999))
        for number in range(count):
            scheduler.submit(pull(number, leg(slot=number, first=10 * number)), 0.0, hold=True)
        assert kinds(scheduler.pump(0.0)).count(Dispatch) == 1
        ended = []
        calls = calls_of(lambda: ended.extend(scheduler.on_peer_failed("p", code="peer_lost", detail="", now=1.0)))
        assert kinds(ended).count(CancelReads) == 1
        return calls

    assert cost(800) < 2.2 * cost(400)


def test_a_tick_looks_only_at_what_is_due():
    def cost(count):
        scheduler = crowd(count)
        assert kinds(scheduler.tick(0.01)).count(RenewLease) == count + 1
        return calls_of(lambda: scheduler.tick(0.03))

    assert cost(400) == cost(10)


def test_what_happens_to_one_peer_costs_nothing_for_the_pulls_of_others():
    def cost(count):
        scheduler = crowd(count)
        (read,) = [e for e in scheduler.submit(pull(9999, leg("q", slot=9999)), 0.0) if isinstance(e, Dispatch)]
        assert read.peer == "q"
        return calls_of(lambda: scheduler.on_peer_failed("q", code="peer_lost", detail="", now=1.0))

    assert cost(400) == cost(10)
