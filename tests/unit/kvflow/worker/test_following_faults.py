"""Pulls of open offers that are overtaken by a fault: real workers on virtual time, or threads of their own."""

from functools import partial

import pytest

from kvflow.errors import DeadlineExceeded, PeerLost, StaleLease, TransferCancelled
from kvflow.events import PullFailed, ReaderReset, TransferQuiesced
from kvflow.reads.contract import RESET_DRAIN_S
from kvflow.worker.threaded import run_worker
from tests.fakes import FabricFaults
from tests.helpers.waiting import wait_until

from .helpers import PATIENCE_S, cache_of
from .pulling import config
from .virtual import LONG_S, virtual

SLOW = FabricFaults(at_once=0.0, inline=0.0, piece_s=1e-3, pieces_max=1)
HUNG = FabricFaults(at_once=0.0, inline=0.0, piece_s=1e6)
QUICK = FabricFaults(at_once=1.0, inline=1.0)
TARGETS = (4, 5, 6, 7)


class Followed:
    """A pull that has read the first of four blocks, and waits for its producer."""

    def __init__(self, world):
        self.world, (self.producer,) = world, world.producers
        offers = partial(self.producer.worker.offer_progressive, "followed", [[1]], 16)
        self.offer = world.do(offers, life=self.producer)
        self.pull = world.start(self.offer.ticket, TARGETS)
        self.advance(4)
        assert self.reaches(lambda state: state.phase == "compute" and state.nbytes)

    def advance(self, *how):
        self.world.do(partial(self.offer.advance, *how), life=self.producer)

    def seal(self, *how):
        self.world.do(partial(self.offer.seal, *how), life=self.producer)

    def reaches(self, condition):
        """Let time pass until the state of the pull is so."""

        def so():
            return any(map(condition, self.world.consumer.worker._consumer.listed(1)))

        return self.world._world.run(so, self.world.now + LONG_S)


@pytest.mark.parametrize("phase", ["wire", "fence"])
def test_a_range_that_hangs_has_a_budget_and_keeps_our_blocks(phase):
    with virtual(follow_bytes_min=1, wire_s=2.0, fence_s=1.0, quarantine_s_max=6.0, lease_s=LONG_S) as world:
        followed = Followed(world)
        world.fabric.faults = SLOW
        followed.advance(8, [[2]])
        assert followed.reaches(lambda state: state.phase == phase)
        followed.producer.process.hang()
        before = world.now
        assert world._world.run(followed.pull.done, world.now + LONG_S)
        error = followed.pull.exception()
        assert (type(error), error.phase, error.quarantined) == (DeadlineExceeded, phase, True)
        assert world.now - before < 4.0, "its budget has ended it, no other"
        (entry,) = world.do(world.consumer.worker.snapshot).quarantined
        assert entry.num_blocks == len(TARGETS)
        world.pass_time(20.0 + RESET_DRAIN_S)  # the reader is reset
        assert world.do(world.consumer.worker.snapshot).quarantined == ()
        assert len(world.consumer.of(PullFailed)) == len(world.consumer.of(TransferQuiesced)) == 1
        world.do(world.consumer.worker.check)


@pytest.mark.parametrize("reading", [False, True])
def test_a_reset_of_the_reader_ends_the_pulls_that_follow_a_hung_peer(reading):
    with virtual(follow_bytes_min=1, quarantine_s_max=5.0, wire_s=LONG_S, fence_s=LONG_S, lease_s=LONG_S) as world:
        followed = Followed(world)
        world.fabric.faults = HUNG
        if reading:
            followed.advance(8, [[2]])
        cancelled = world.start(world.offer((9,)), (9,))
        world.pass_time(0.1)
        world.consumer.process.call_soon(cancelled.cancel)
        world.pass_time(6.0 + RESET_DRAIN_S)
        assert len(world.consumer.of(ReaderReset)) == 1
        world.fabric.faults = QUICK
        assert isinstance(followed.pull.exception(), PeerLost)  # it hangs, and is connected again
        world.do(partial(followed.producer.worker.revoke, "followed"), life=followed.producer)
        again = Followed(world)
        again.seal([[2, 3, 7]])
        world.pass_time(1.0)
        assert again.pull.result().ranges == 2
        assert world.do(world.consumer.worker.snapshot).quarantined == ()
        world.do(world.consumer.worker.check)


@pytest.mark.parametrize("how", ["leaves", "killed"])
def test_a_producer_that_starts_anew_is_another_one(how):
    with virtual(follow_bytes_min=1, lease_s=60.0) as world:
        followed = Followed(world)
        if how == "leaves":
            followed.producer.leave()
        else:
            followed.producer.process.kill()
            world.fabric.kill(followed.producer.process)
        world.producers[:] = [world.reborn(followed.producer)]
        world.pull(world.offer((9,)), (9,))  # at the same address, in another incarnation
        error = followed.pull.exception()
        assert isinstance(error, PeerLost | StaleLease)
        assert not error.quarantined
        assert getattr(error, "ended_by", "") == ("revoked" if how == "leaves" else "")
        again = Followed(world)
        again.seal([[2, 3, 8]])
        world.pass_time(1.0)
        assert again.pull.result().ranges == 2
        world.do(world.consumer.worker.check)


@pytest.mark.parametrize("who", ["consumer", "producer"])
def test_a_worker_that_is_suspended_ends_the_pull_that_follows(who):
    with (
        run_worker(config(), cache_of()) as producer,
        run_worker(config("decode-0", follow_bytes_min=1), cache_of()) as consumer,
    ):
        for _ in range(2):  # once more, to see that nothing of it is left
            offer = producer.offer_progressive("request-1", [[1]], 16)
            pull = consumer.pull(offer.ticket, [list(TARGETS)])
            offer.advance(4)
            wait_until(
                lambda: (
                    [(each.phase, each.nbytes > 0) for each in consumer.snapshot().open_pulls] == [("compute", True)]
                )
            )
            suspended = consumer if who == "consumer" else producer
            suspended.suspend()
            error = pull.exception(PATIENCE_S)
            assert isinstance(error, TransferCancelled if who == "consumer" else StaleLease | PeerLost)
            assert [end.outcome for end in consumer.finished()] == ["failed"]
            suspended.resume(cache_of())
            producer.revoke("request-1")
        offer = producer.offer_progressive("request-1", [[1]], 16)
        pull = consumer.pull(offer.ticket, [list(TARGETS)])
        offer.advance(4)
        offer.seal([[2, 3, 7]])
        assert pull.result(PATIENCE_S).nbytes > 0
