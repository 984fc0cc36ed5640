"""Offers without a sign of a reader hold half of the blocks: real workers on virtual time."""

import pytest

from kvflow.errors import StaleLease
from kvflow.events import LeaseEnded
from kvflow.rendezvous.dialer import UNREAD_REMEDY
from tests.fakes import FabricFaults
from tests.unit.kvflow.worker.virtual import LONG_S, virtual

LEASE_S, UNREAD_S = 30.0, 10.0
PATIENT = {"connect_s": LONG_S, "handshake_s": LONG_S, "queue_s": LONG_S, "wire_s": LONG_S, "fence_s": LONG_S}
CROWD = tuple(range(10, 50))  # more than half of the 64 blocks
SLOW = FabricFaults(at_once=0.0, inline=0.0, piece_s=25.0)


@pytest.fixture
def world():
    with virtual(lease_s=LEASE_S, theirs={"unread_s": UNREAD_S}, **PATIENT) as world:
        world.pull(world.offer())  # its peer is connected from now on
        world.pass_time(1.0)
        yield world


def ends(world):
    """Return how each request has ended, and how long it was held."""
    return {each.request_id: (each.outcome, each.held_s) for each in world.producers[0].of(LeaseEnded)}


def hold(world, ticket):
    world.do(lambda: world.consumer.worker.hold(ticket))


def finish(world, task):
    world.pass_time(LONG_S)
    return task.result()


def test_a_read_of_25_s_is_not_cut_off_by_offers_that_nobody_reads(world):
    ticket, crowd = world.offer((1, 2)), world.offer(CROWD)
    world.fabric.faults = SLOW
    task, began = world.start(ticket, (1, 2)), world.now
    world.pass_time(UNREAD_S + 2.0)
    assert ends(world)[crowd.request_id] == ("unread", pytest.approx(UNREAD_S, abs=1.5))
    assert finish(world, task).nbytes
    outcome, held_s = ends(world)[ticket.request_id]
    assert (outcome, held_s > 25.0) == ("released", True), began


@pytest.mark.parametrize("crowd", ["none", "of less than half", "that was held"])
def test_a_ticket_that_a_router_has_for_25_s_is_read(world, crowd):
    ticket = world.offer((1, 2))
    if crowd != "none":
        other = world.offer(CROWD if crowd == "that was held" else CROWD[:30])
    if crowd == "that was held":
        hold(world, other)
    world.pass_time(25.0)
    assert world.pull(ticket, (1, 2)).nbytes


def test_a_ticket_that_comes_late_to_a_full_engine_says_why_it_is_stale(world):
    ticket, crowd = world.offer((1, 2)), world.offer(CROWD)
    world.pass_time(25.0)
    with pytest.raises(StaleLease, match="it had no reader yet when the producer ran short of blocks") as caught:
        world.pull(ticket, (1, 2))
    assert (caught.value.ended_by, caught.value.remedy) == ("unread", UNREAD_REMEDY)
    assert [ends(world)[each.request_id][0] for each in (ticket, crowd)] == ["unread"] * 2


def test_a_first_meeting_of_8_s_is_in_time():
    with virtual(lease_s=LEASE_S, theirs={"unread_s": UNREAD_S}, **PATIENT) as world:
        world.fabric.faults = SLOW
        ticket, crowd = world.offer((1, 2)), world.offer(CROWD)
        world.wires.part(world.producers[0].process.host, world.consumer.process.host)
        task = world.start(ticket, (1, 2))
        world.pass_time(8.0)
        world.wires.join()
        world.pass_time(UNREAD_S)
        assert ends(world)[crowd.request_id][0] == "unread"
        assert finish(world, task).nbytes


def test_an_engine_whose_readers_have_stopped_offers_on(world):
    """Blocks come back after ten seconds, not when the lease is over."""
    offered, free_at = 0, {}
    while world.now < 100.0:
        for first in range(0, 64, 8):
            name = free_at.get(first)
            if name is None or name in ends(world):
                free_at[first] = world.offer(tuple(range(first, first + 8))).request_id
                offered += 1
        world.pass_time(1.0)
    assert {outcome for outcome, _ in ends(world).values()} == {"released", "unread"}
    assert offered > 8 * 8, "each block once in about ten seconds"
