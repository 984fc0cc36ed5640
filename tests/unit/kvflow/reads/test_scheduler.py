"""The scheduler's promises one by one, each in the shortest story that needs it. Properties tell the long ones."""

import numpy as np
import pytest

from kvflow.config import Tuning
from kvflow.events import PullFailed, TransferQuiesced
from kvflow.leases.tickets import LeaseName
from kvflow.planning.pairs import UnitPairs
from kvflow.reads import scheduler as scheduling
from kvflow.reads.contract import CancelReads, Outstanding, Part, RankRead, ReadEnded
from kvflow.reads.pulls import AWAITED, Pull
from kvflow.reads.scheduler import Delivered, LeaseEarly, StartReads
from tests.counting import calls_of

EPOCH = 7
BUDGETS = Tuning(queue_s=4.0, wire_s=3.0, fence_s=2.0)
PARTS = (Part(1, UnitPairs(np.arange(5), np.arange(5))),)


def read(peer="p", slot=0, **how):
    return RankRead(0, peer, LeaseName(slot, EPOCH), PARTS, **how)


class Scheduler(scheduling.Scheduler):
    """A scheduler with a book of every pull that there was."""

    def __init__(self, budgets=BUDGETS):
        self.pulls = {}
        super().__init__(budgets)

    def open_pulls(self):
        return tuple(number for number, pull in self.pulls.items() if any(rank.state in AWAITED for rank in pull.ranks))


def submit(scheduler, *reads, pull_id=1, now=0.0):
    """Open a pull of 50 bytes for each rank; return its reads."""
    reads = reads or (read(),)
    for each in reads:
        each.read_id = next(scheduler.read_ids)
    pull = Pull(pull_id, f"request-{pull_id}", now, reads, 50 * len(reads))
    scheduler.pulls[pull_id] = pull
    scheduler.submit(pull)
    return reads


def take(one, now=0.0):
    """Do as the data plane when it has a read."""
    one.phase, one.since = "queue", now


def start(one, now=0.0, outstanding=None):
    """Do as the data plane when it has posted the first chunk."""
    one.phase, one.since, one.started_at, one.outstanding = "wire", now, now, outstanding


def arrive(one, now=0.0, nbytes=50):
    """Do as the data plane when all bytes of a read have arrived."""
    one.phase, one.since, one.nbytes = "fence", now, nbytes


def answer(scheduler, one, verdict="held", now=1.0, **how):
    ended = ReadEnded(one.read_id, verdict, **{"nbytes": one.nbytes, "phase": one.phase} | how)
    return scheduler.on_read_ended(ended, now)


def only(kind, effects):
    (found,) = [effect for effect in effects if isinstance(effect, kind)]
    return found


def kinds(effects):
    return [type(effect) for effect in effects]


def read_again(effects):
    """Return the only read that is handed over."""
    (again,) = only(StartReads, effects).reads
    return again


@pytest.fixture
def scheduler():
    scheduler = Scheduler(BUDGETS)
    yield scheduler
    scheduler.check()


def test_ranks_are_read_again_in_the_order_in_which_they_are_named(scheduler):
    waiting = []
    for slot in (700, 5, 3):
        (one,) = submit(scheduler, read(slot=slot, check_first=True), pull_id=slot)
        waiting.append(only(LeaseEarly, answer(scheduler, one, "early")).rank)
    again = only(StartReads, scheduler.read_again(waiting[::-1], 1.5)).reads
    assert [one.lease.slot for one in again] == [3, 5, 700]
    assert all(one.check_first for one in again)


def test_a_lease_that_is_found_held_has_its_budgets_anew(scheduler):
    (one,) = submit(scheduler, read(check_first=True))
    rank = only(LeaseEarly, answer(scheduler, one, "early", 0.0)).rank
    late = BUDGETS.fence_s - 0.1
    again = read_again(scheduler.read_again([rank], late))
    start(again, late)
    assert scheduler.tick(late + BUDGETS.wire_s - 0.1) == []
    arrive(again, late + BUDGETS.wire_s)
    assert scheduler.tick(late + BUDGETS.wire_s + BUDGETS.fence_s - 0.1) == []


def test_blocks_that_were_not_served_are_read_again_at_once_and_only_once(scheduler):
    (one,) = submit(scheduler)
    arrive(one)
    again = read_again(answer(scheduler, one, "early", unserved=True))
    assert not again.check_first  # it was just found held
    arrive(again)
    failed, quiesced = answer(scheduler, again, "early", unserved=True)
    assert (failed.code, failed.phase, failed.peer) == ("transport_error", "fence", "p")
    assert failed.detail == "the producer holds the lease, and does not serve its blocks"
    assert (scheduler.pulls[1].nbytes_arrived, failed.quarantined) == (50, False)
    assert isinstance(quiesced, TransferQuiesced)


def test_a_failure_drops_the_other_ranks_and_is_quiescent_when_they_are(scheduler):
    one, held, other = submit(scheduler, read("p"), read("q"), read("r"))
    answer(scheduler, held)
    other.nbytes = 7
    failed, cancelled = answer(scheduler, one, "failed", code="transport_error", detail="odd", nbytes=3)
    assert (failed.code, failed.phase, failed.detail, failed.peer) == ("transport_error", "queue", "odd", "p")
    assert (failed.quarantined, cancelled) == (True, CancelReads((other.read_id,)))
    assert scheduler.pulls[1].nbytes_arrived == 10
    scheduler.check()
    assert scheduler.busy
    assert kinds(answer(scheduler, other, "failed", code="cancelled")) == [TransferQuiesced]
    assert not scheduler.busy


@pytest.mark.parametrize(
    ("progress", "phase"), [(take, "queue"), (start, "wire"), (arrive, "fence")], ids=["queue", "wire", "fence"]
)
def test_a_cancelled_pull_says_where_it_was_and_waits_for_its_reads(scheduler, progress, phase):
    (one,) = submit(scheduler)
    progress(one)
    failed, cancelled = scheduler.cancel(1, code="transfer_cancelled", detail="given up", now=2.0)
    assert (failed.code, failed.phase, failed.peer) == ("transfer_cancelled", phase, "")
    assert (failed.detail, failed.quarantined) == ("given up", True)
    assert cancelled.read_ids == (one.read_id,)
    assert scheduler.cancel(1, code="transfer_cancelled", detail="", now=2.0) == []
    assert kinds(answer(scheduler, one, "failed", code="cancelled")) == [TransferQuiesced]


def test_a_lost_peer_ends_the_pulls_that_need_it_and_no_others(scheduler):
    (alone,) = submit(scheduler, read("p"), pull_id=1)
    half, other_half = submit(scheduler, read("p"), read("q"), pull_id=2)
    submit(scheduler, read("q"), pull_id=3)
    (early,) = submit(scheduler, read("p", check_first=True), pull_id=4)
    answer(scheduler, early, "early")
    done, _ = submit(scheduler, read("p"), read("q"), pull_id=5)
    answer(scheduler, done)  # what it needs of that peer is there
    start(alone)
    effects = scheduler.on_peer_failed("p", code="peer_lost", detail="gone", now=1.0)
    failures = {effect.pull_id: effect for effect in effects if isinstance(effect, PullFailed)}
    told = {pull_id: (each.phase, each.quarantined, each.peer) for pull_id, each in failures.items()}
    assert told == {1: ("wire", True, "p"), 2: ("queue", True, "p"), 4: ("fence", False, "p")}
    cancelled = {read_id for effect in effects if isinstance(effect, CancelReads) for read_id in effect.read_ids}
    assert cancelled == {alone.read_id, half.read_id, other_half.read_id}
    assert [effect.pull_id for effect in effects if isinstance(effect, TransferQuiesced)] == [4]
    assert scheduler.on_peer_failed("p", code="peer_lost", detail="gone", now=1.0) == []
    assert scheduler.open_pulls() == (1, 2, 3, 5)


@pytest.mark.parametrize("taken", [True, False], ids=["taken", "its thread is in a call that does not return"])
def test_a_read_that_no_chunk_was_posted_of_in_time_fails(scheduler, taken):
    (one,) = submit(scheduler)
    if taken:
        take(one)
    assert scheduler.tick(BUDGETS.queue_s - 0.1) == []
    failed, cancelled = scheduler.tick(BUDGETS.queue_s + 0.6)
    assert (failed.code, failed.phase, failed.peer) == ("deadline_exceeded", "queue", "p")
    assert failed.detail == "queue took longer than its budget"
    assert (failed.quarantined, failed.timings_s) == (True, {"queue": BUDGETS.queue_s + 0.6})
    assert cancelled.read_ids == (one.read_id,)


def test_a_peer_that_owes_us_nothing_has_all_the_time_in_the_world(scheduler):
    (one,), outstanding = submit(scheduler), Outstanding()
    start(one, 0.0, outstanding)
    for now in range(1, 30):
        assert scheduler.tick(float(now)) == []
    outstanding.since = 30.0
    assert scheduler.tick(30.0 + BUDGETS.wire_s) == []
    failed = only(PullFailed, scheduler.tick(30.6 + BUDGETS.wire_s))
    assert (failed.code, failed.phase) == ("deadline_exceeded", "wire")


def test_progress_of_the_peer_extends_the_wire_budget(scheduler):
    (one,), outstanding = submit(scheduler), Outstanding(0.0)
    start(one, 0.0, outstanding)
    for now in range(1, 30):
        outstanding.since = float(now)
        assert scheduler.tick(now + 0.9 * BUDGETS.wire_s) == []
    assert PullFailed in kinds(scheduler.tick(29.6 + BUDGETS.wire_s))


def test_each_budget_counts_from_the_start_of_its_own_phase(scheduler):
    """Queued for almost all of one budget, read for almost all of the next, and so on: together longer than any."""
    (one,), outstanding = submit(scheduler), Outstanding()
    take(one)
    assert scheduler.tick(3.9) == []
    start(one, 3.9, outstanding)
    outstanding.since = 3.9
    assert scheduler.tick(6.8) == []
    arrive(one, 6.8)
    outstanding.since = 6.8
    assert scheduler.tick(8.7) == []
    assert kinds(answer(scheduler, one, now=8.7)) == [Delivered]


def test_a_fence_that_is_not_read_in_time_fails_in_its_own_phase(scheduler):
    (one,) = submit(scheduler)
    arrive(one, 2.5)
    assert scheduler.tick(2.5 + BUDGETS.fence_s) == []
    failed = only(PullFailed, scheduler.tick(3.1 + BUDGETS.fence_s))
    assert (failed.code, failed.phase, failed.peer) == ("deadline_exceeded", "fence", "p")


def test_a_stale_lease_is_told_when_the_other_ranks_are_quiet_too(scheduler):
    one, other = submit(scheduler, read("p"), read("q"))
    arrive(one)
    start(other)
    assert answer(scheduler, one, "stale", observed=EPOCH + 1) == [CancelReads((other.read_id,))]
    assert scheduler.tick(BUDGETS.wire_s) == []
    failed, quiesced = answer(scheduler, other)
    assert (failed.code, failed.peer, failed.quarantined) == ("stale_lease", "p", False)
    assert isinstance(quiesced, TransferQuiesced)


def test_a_stale_lease_beside_a_hung_rank_is_told_in_the_end(scheduler):
    one, other = submit(scheduler, read("p"), read("q"))
    start(other)
    answer(scheduler, one, "stale", now=1.0)
    failed = only(PullFailed, scheduler.tick(BUDGETS.wire_s + 2.0))
    assert (failed.code, failed.phase, failed.quarantined) == ("deadline_exceeded", "wire", True)
    assert (failed.peer, failed.detail) == ("q", "wire took longer than its budget")  # not the rank that answered
    assert scheduler.tick(BUDGETS.wire_s + 4.0) == []
    assert kinds(answer(scheduler, other, "failed", code="peer_lost")) == [TransferQuiesced]


def test_a_read_that_is_lost_breaks_the_law(scheduler):
    (one,) = submit(scheduler)
    rank = scheduler._reads.pop(one.read_id)
    with pytest.raises(AssertionError, match="a rank read was lost"):
        scheduler.check()
    scheduler._reads[one.read_id] = rank


def crowd(count, *peers):
    """Open so many pulls of each peer."""
    scheduler, pull_id = Scheduler(BUDGETS), 0
    for peer in peers:
        for _ in range(count):
            pull_id += 1
            (one,) = submit(scheduler, read(peer, slot=pull_id), pull_id=pull_id)
            take(one)
    return scheduler


def test_losing_a_peer_costs_the_same_for_each_pull_however_many_are_open():
    def cost(count):
        scheduler, ended = crowd(count, "p", "q"), []
        calls = calls_of(lambda: ended.extend(scheduler.on_peer_failed("p", code="peer_lost", detail="", now=1.0)))
        assert kinds(ended).count(PullFailed) == count
        return calls

    assert cost(800) < 2.2 * cost(400)


def test_a_tick_looks_only_at_what_is_due():
    def cost(count):
        scheduler = crowd(count, "p")
        scheduler.tick(0.3)  # when all of them are looked at
        return calls_of(lambda: scheduler.tick(0.31))

    assert cost(400) == cost(10)


def test_an_answer_costs_nothing_for_other_pulls():
    def cost(count):
        scheduler = crowd(count, "p")
        (one,) = submit(scheduler, read("q"), pull_id=9999)
        return calls_of(lambda: answer(scheduler, one))

    assert cost(400) == cost(10)


def test_a_number_is_free_again_when_its_pull_was_delivered(scheduler):
    for now in (0.0, 2.0):  # the ranges of an open offer
        assert scheduler.cancel(1, code="late", detail="", now=now) == []
        (one,) = submit(scheduler, now=now)
        assert scheduler.pulls[1].phase == "queue"
        assert kinds(answer(scheduler, one, now=now + 1.0)) == [Delivered]
        assert not scheduler.busy
