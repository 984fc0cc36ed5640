"""When blocks have been in quarantine for too long, or too many of them, the reader is reset."""

import numpy as np
import pytest

from kvflow.config import Tuning
from kvflow.events import ReaderReset
from kvflow.leases.blocks import BlockAccount
from kvflow.reads.contract import RESET_DRAIN_S
from kvflow.worker.destinations import (
    DUE_AFTER_S,
    STARVED_S_MAX,
    DestinationTable,
    ReaderResetPolicy,
    ResetReason,
    Standing,
)
from tests.counting import calls_of
from tests.fakes import FabricFaults
from tests.fakes.transport import SimulatedTransport

from .virtual import LONG_S, SHAPE, bytes_per_block, virtual

HUNG = FabricFaults(at_once=0.0, inline=0.0, piece_s=1e6)
LONG = {"queue_s": LONG_S, "wire_s": LONG_S, "fence_s": LONG_S}


def cancel_hung(world, blocks):
    """Cancel a pull whose bytes may still arrive."""
    task = world.start(world.offer(blocks), blocks)
    world.pass_time(0.1)
    world.consumer.process.call_soon(task.cancel)
    world.pass_time(0.1)
    assert task.cancelled()


@pytest.mark.parametrize(
    ("cancelled", "blocks_max", "setting", "after_s"),
    [
        ([(0.0, (1, 2)), (50.0, (3,))], 3, "quarantine_s_max", 60.0),
        ([(0.0, (1, 2)), (3.0, (3, 4))], 3, "quarantine_bytes_max", 3.0 + DUE_AFTER_S),
        ([(0.0, (1, 2)), (3.0, (3,))], 1, "quarantine_bytes_max", DUE_AFTER_S),
    ],
)
def test_the_reader_is_reset_above_a_limit_and_not_at_it(monkeypatch, cancelled, blocks_max, setting, after_s):
    demanded, reset_reader = [], SimulatedTransport.reset_reader
    monkeypatch.setattr(SimulatedTransport, "reset_reader", lambda self: (demanded.append(1), reset_reader(self)))
    limits = {"quarantine_bytes_max": blocks_max * bytes_per_block(SHAPE), "quarantine_s_max": 60.0}
    with virtual(lease_s=LONG_S, **LONG, **limits) as world:
        world.pull(world.offer())
        for turn in (1, 2):  # each reset ends what is in quarantine, and there may be another
            world.fabric.faults = HUNG
            began, total = world.now, 0
            for at, blocks in cancelled:
                world.pass_time(began + at - world.now)
                cancel_hung(world, blocks)
                total += len(blocks)
            world.pass_time(began + after_s - 0.1 - world.now)
            assert len(world.consumer.of(ReaderReset)) == turn - 1
            world.pass_time(1.0 + RESET_DRAIN_S)
            reset = world.consumer.of(ReaderReset)[-1]
            assert (reset.setting, reset.num_blocks, reset.ended) == (setting, total, len(cancelled))
            assert world.do(world.consumer.worker.snapshot).quarantined == ()
            world.fabric.faults = FabricFaults(at_once=1.0, inline=1.0)
            world.pull(world.offer((1, 2)), (1, 2))
            world.pass_time(10.0)
            assert len(world.consumer.of(ReaderReset)) == len(demanded) == turn


def test_it_is_due_when_peers_have_waited_too_long_for_staging_buffers():
    policy, held = ReaderResetPolicy(Tuning(quarantine_bytes_max=10, quarantine_s_max=60.0), 1), Standing(2, 2, 0.0)
    assert not policy.due(held, 1.0, starved=True)
    assert not policy.due(held, 1.0 + STARVED_S_MAX, starved=True)
    assert not policy.due(held, 1.5 + STARVED_S_MAX)  # a buffer came back: the wait starts again
    assert not policy.due(held, 2.0 + STARVED_S_MAX, starved=True)
    assert not policy.due(held, 2.0 + 2 * STARVED_S_MAX, starved=True)
    assert policy.due(held, 2.5 + 2 * STARVED_S_MAX, starved=True)
    assert policy.ended() == ResetReason("staging_bytes", 2)


def test_a_canceled_pull_has_longer_to_end_than_one_reset_gives():
    assert DUE_AFTER_S > RESET_DRAIN_S


def test_summing_up_does_not_go_through_all_that_is_in_quarantine():
    def cost(count):
        table = DestinationTable(BlockAccount([0], count))
        for pull_id in range(count):
            table.take(pull_id, (np.array([pull_id]),))
            table.quarantine(pull_id, "why", 0.0)
        assert table.standing(6.0, 5.0) == Standing(count, count, 0.0), "however many have become lasting since"
        return calls_of(lambda: table.standing(6.1, 5.0))

    assert cost(100) == cost(10)
