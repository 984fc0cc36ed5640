"""Leases are renewed while pulls and held tickets need them, and released together: real workers on virtual time."""

import asyncio
from itertools import pairwise

import pytest

from kvflow.errors import BlockIdsInvalid, CapacityExceeded, ContentMismatch, PeerLost, StaleLease
from kvflow.events import LeaseEnded, PeerDropped
from kvflow.rendezvous.dialer import Link
from kvflow.worker import renewals
from kvflow.worker.peers import PeerPool
from kvflow.worker.renewals import (
    REDIAL_S,
    RELEASE_PAUSE_S,
    RELEASE_PAUSES_MAX,
    RENEWALS_PER_LEASE,
    LeaseRenewer,
)
from tests.counting import calls_of
from tests.fakes import FabricFaults

from .virtual import LONG_S, virtual

LEASE_S = 6.0
PART_S = LEASE_S / RENEWALS_PER_LEASE
SLACK_S = 0.1  # what is due now is renewed at the next tick
SLOW = FabricFaults(at_once=0.0, inline=0.0, piece_s=10.0)
PATIENT = {"queue_s": LONG_S, "wire_s": LONG_S, "fence_s": LONG_S}


@pytest.fixture
def world():
    with virtual(lease_s=LEASE_S) as world:
        world.pull(world.offer())  # its peer is connected from now on
        world.pass_time(1.0)
        yield world


def outcomes(world, rank=0):
    """Return how each request has ended."""
    return {event.request_id: event.outcome for event in world.producers[rank].of(LeaseEnded)}


def hold(world, ticket, name=""):
    world.do(lambda: world.consumer.worker.hold(ticket, local_request_id=name))


def end_hold(world, ticket, name=""):
    """Pull into a block that does not exist: the pull ends the hold, and releases nothing."""
    with pytest.raises(BlockIdsInvalid):
        world.pull(ticket, (10**6,), local_request_id=name)


def parts(times):
    """Return the times from one renewal to the next."""
    return [after - before for before, after in pairwise(times)]


def test_a_pull_that_ends_before_the_second_tick_renews_nothing(world):
    world.pull(world.offer(), (2,))
    world.pass_time(LEASE_S)
    assert world.heard("Renew") == []
    assert set(outcomes(world).values()) == {"released"}


def test_a_long_pull_renews_its_lease_when_it_starts_and_each_third_of_it():
    with virtual(lease_s=LEASE_S, **PATIENT) as world:
        world.pull(world.offer())
        world.fabric.faults = SLOW
        began = world.now
        world.pull(world.offer((2, 3)), (2, 3))
        assert world.now - began > 2 * LEASE_S
        renewed = world.heard("Renew")
        assert renewed[0] - began == pytest.approx(0.0, abs=SLACK_S)
        assert parts(renewed) == pytest.approx([PART_S] * (len(renewed) - 1), abs=SLACK_S)
        world.pass_time(LEASE_S)
        assert world.heard("Renew") == renewed
        assert set(outcomes(world).values()) == {"released"}


def test_long_pulls_that_begin_together_renew_their_leases_each():
    with virtual(lease_s=LEASE_S, **PATIENT) as world:
        world.pull(world.offer())
        world.fabric.faults = SLOW
        tickets = [world.offer((block,)) for block in (2, 3)]
        pulls = [world.start(ticket, (block,)) for block, ticket in enumerate(tickets, 2)]
        world.pass_time(LONG_S)
        assert [pull.result().request_id for pull in pulls] == [ticket.request_id for ticket in tickets]
        assert set(outcomes(world).values()) == {"released"}


def test_a_request_that_starts_no_pull_holds_a_ticket_for_compute_s():
    """Otherwise an engine whose scheduler hangs would renew it for ever."""
    with virtual(lease_s=LEASE_S, compute_s=4 * LEASE_S) as world:
        world.pull(world.offer())
        held, renewer = world.offer(), world.consumer.worker._consumer._renewals
        hold(world, held, "a")
        world.pass_time(2 * LEASE_S)
        hold(world, held, "b")
        pulled = world.offer((2,))
        hold(world, pulled)
        world.pass_time(2 * LEASE_S + PART_S)
        assert [sorted(names) for names in renewer.held.values()] == [["b"], [""]]
        world.pull(pulled, (2,))
        world.pass_time(2 * LEASE_S)
        assert renewer.held == {}
        assert world.leases() == 1
        world.pass_time(LEASE_S)
        assert outcomes(world)[held.request_id] == "expired"
        assert outcomes(world)[pulled.request_id] == "released"


@pytest.mark.parametrize("offset_s", [0.0, 0.005, 0.01, 0.015])
def test_a_lease_that_is_due_before_the_next_tick_is_renewed_at_it(offset_s):
    """A third of it is shorter than a tick, and the next renewal is due in the tick that is just over."""
    with virtual(lease_s=0.05) as world:
        world.pull(world.offer())
        world.pass_time(offset_s)
        hold(world, world.offer())
        world.pass_time(1.0)
        assert world.leases() == 1
        assert len(world.heard("Renew")) > 20


def test_a_lease_that_many_need_is_renewed_once_until_the_last_ends(world):
    ticket = world.offer()
    for name in "abb":
        hold(world, ticket, name)
    world.pass_time(3 * LEASE_S)
    renewed = world.heard("Renew")
    assert parts(renewed) == pytest.approx([PART_S] * (len(renewed) - 1), abs=SLACK_S)
    for name in "aac":  # the last of these holds nothing
        end_hold(world, ticket, name)
    world.pass_time(2 * LEASE_S)
    assert world.leases() == 1
    end_hold(world, ticket, "b")
    world.pass_time(LEASE_S + SLACK_S)
    assert outcomes(world)[ticket.request_id] == "expired"
    assert world.consumer.worker._consumer._renewals.held == {}


@pytest.mark.parametrize(("held", "ended"), [("", "r"), ("r", ""), ("", "")])
def test_a_request_without_an_id_of_its_own_ends_any_hold(world, held, ended):
    ticket = world.offer()
    hold(world, ticket, held)
    end_hold(world, world.offer((2,)), ended)  # which nobody holds
    assert len(world.consumer.worker._consumer._renewals.held) == 1
    end_hold(world, ticket, ended)
    world.pass_time(LEASE_S + SLACK_S)
    assert outcomes(world)[ticket.request_id] == "expired"


def test_a_hold_that_ends_is_over_on_every_rank_and_renews_nothing_more():
    with virtual(ranks=2, lease_s=LEASE_S) as world:
        world.pull(world.offer())
        hold(world, world.offer())
        world.pass_time(PART_S / 2)
        ended = world.offer((2,))
        hold(world, ended)
        world.pass_time(SLACK_S)
        end_hold(world, ended)
        assert len(world.consumer.worker._consumer._renewals.held) == 2, "one lease of each rank"
        since = world.now
        world.pass_time(2 * LEASE_S)
        for rank in range(2):
            assert outcomes(world, rank)[ended.request_id] == "expired"
            renewed = world.heard("Renew", rank, since)
            assert parts(renewed) == pytest.approx([PART_S] * (len(renewed) - 1), abs=SLACK_S)


def test_leases_of_one_peer_are_renewed_in_one_message():
    with virtual(ranks=2, lease_s=LEASE_S) as world:
        world.pull(world.offer())
        for ticket in [world.offer((block,)) for block in (1, 2, 3)]:
            hold(world, ticket)
        world.pass_time(2.5 * PART_S)
        assert [len(world.heard("Renew", rank)) for rank in range(2)] == [3, 3]
        assert [world.leases(rank) for rank in range(2)] == [3, 3]


def test_the_loop_is_woken_only_while_a_lease_is_held(world, monkeypatch):
    ticks, renew = [], LeaseRenewer._renew
    monkeypatch.setattr(LeaseRenewer, "_renew", lambda self: (ticks.append(world.now), renew(self)))
    for _ in range(2):
        ticket = world.offer()
        hold(world, ticket)
        world.pass_time(1.0)
        end_hold(world, ticket)
        world.pass_time(SLACK_S)
        assert len(ticks) > 10
        ticks.clear()
        world.pass_time(10 * LEASE_S)
        assert ticks == []


def test_a_peer_that_is_not_connected_is_dialed_and_asked_soon():
    with virtual(lease_s=LEASE_S) as world:
        ticket, began = world.offer(), world.now
        hold(world, ticket)
        world.pass_time(2 * LEASE_S)
        renewed = world.heard("Renew")
        assert renewed[0] - began == pytest.approx(REDIAL_S, abs=SLACK_S)
        assert parts(renewed) == pytest.approx([PART_S] * (len(renewed) - 1), abs=SLACK_S)
        assert world.leases() == 1


def test_an_address_that_is_not_tried_now_is_tried_when_it_may_be(monkeypatch):
    asked, start_connecting = [], PeerPool.start_connecting
    monkeypatch.setattr(PeerPool, "start_connecting", lambda *given: (asked.append(1), start_connecting(*given)))
    with virtual(lease_s=120.0) as world:
        ticket = world.offer()
        hosts = world.producers[0].process.host, world.consumer.process.host
        world.wires.part(*hosts)
        hold(world, ticket)
        world.pass_time(60.0)
        attempts = len(world.consumer.of(PeerDropped))
        assert 3 < attempts < 25
        assert len(asked) < 60, "far fewer than one each half second"
        world.wires.join()
        world.pass_time(300.0)
        assert world.leases() == 1


def test_a_held_ticket_of_a_producer_that_is_closed_is_forgotten(world, monkeypatch):
    monkeypatch.setattr(renewals, "HELD_MAX", 1)
    first, second = world.offer(), world.offer((2,))
    hold(world, first)
    hold(world, first)
    with pytest.raises(CapacityExceeded):
        hold(world, second)
    world.producers[0].leave()
    world.pass_time(LEASE_S)
    hold(world, second)  # there is room again
    world.pass_time(LEASE_S)
    assert world.consumer.worker._consumer._renewals.held == {}


def test_a_lease_of_a_producer_that_is_closed_is_not_due_again():
    with virtual(ranks=2, lease_s=LEASE_S) as world:
        world.pull(world.offer())
        hold(world, world.offer())
        world.producers[1].leave()
        world.pass_time(2 * LEASE_S)
        renewer = world.consumer.worker._consumer._renewals
        due = [key for leases in renewer._due.values() for key in leases]
        assert due == [*renewer.held]
        assert len(due) == 1
        assert world.leases() == 1


def test_an_open_pull_of_a_producer_that_closes_ends_as_any_other():
    with virtual(lease_s=LEASE_S, **PATIENT) as world:
        world.pull(world.offer())
        world.fabric.faults = SLOW
        ticket = world.offer()
        task = world.start(ticket)
        world.pass_time(1.0)
        hold(world, ticket, "another")
        world.producers[0].leave()
        world.pass_time(2 * LEASE_S)
        with pytest.raises((PeerLost, StaleLease)):
            task.result()
        assert world.consumer.worker._consumer._renewals._leases == {}


def test_releases_of_one_moment_are_one_message_of_each_kind_to_each_peer():
    with virtual(ranks=2, lease_s=LEASE_S) as world:
        world.pull(world.offer())
        world.pass_time(1.0)
        began = world.now
        tickets = [world.offer((block,), digests=[[b"ours"]]) for block in (1, 2, 3)]
        wanted = [[[b"ours"]], [[b"ours"]], [[b"another"]]]
        pulls = [
            world.start(ticket, (block,), expected_digests=digests)
            for block, (ticket, digests) in enumerate(zip(tickets, wanted, strict=True), 1)
        ]
        world.pass_time(1.0)
        assert [type(pull.exception()) for pull in pulls] == [type(None), type(None), ContentMismatch]
        for rank in range(2):
            assert set(outcomes(world, rank).values()) == {"released"}
            assert len(world.heard("Release", rank, began)) == 2, "those that were read, and those that were not"
        assert world.heard("Released", life=world.consumer) == [], "an end that its reader expects is not told"


def test_a_release_that_no_other_joins_is_sent_after_one_pause(world):
    world.pull(world.offer((2,)), (2,))
    began = world.now
    world.pass_time(SLACK_S)
    (sent,) = world.heard("Release", since=began)
    assert 0 < sent - began < 2 * RELEASE_PAUSE_S


def test_releases_that_others_keep_joining_wait_for_all_their_pauses(world):
    world.pull(world.offer((2,)), (2,))  # connects
    world.pass_time(SLACK_S)
    tickets = [world.offer((2,)) for _ in range(4 * RELEASE_PAUSES_MAX)]
    began = world.now
    for ticket in tickets:
        world.start(ticket, (2,))
        world.pass_time(RELEASE_PAUSE_S / 2)
    sent, *_ = world.heard("Release", since=began)
    assert RELEASE_PAUSE_S * RELEASE_PAUSES_MAX < sent - began < RELEASE_PAUSE_S * (RELEASE_PAUSES_MAX + 8)


def test_many_releases_are_sent_before_their_pause_is_over(world, monkeypatch):
    monkeypatch.setattr(renewals, "RELEASE_PAUSE_S", 2 * LONG_S)
    monkeypatch.setattr(renewals, "RELEASES_MAX", 2)
    for block in (1, 2, 3, 4):
        world.pull(world.offer((block,)), (block,))
    world.pass_time(1.0)
    assert list(outcomes(world).values()) == ["released"] * 4
    assert world.leases() == 1, "the last waits for a pause of its own"
    world.consumer.leave()
    world.pass_time(1.0)
    assert list(outcomes(world).values()) == ["released"] * 5, "closing sends what waits"


def test_releases_of_a_pull_of_several_ranks_may_pass_the_limit_by_some(monkeypatch):
    monkeypatch.setattr(renewals, "RELEASE_PAUSE_S", 2 * LONG_S)
    monkeypatch.setattr(renewals, "RELEASES_MAX", 3)
    with virtual(ranks=2, lease_s=LEASE_S) as world:
        for block in (1, 2):
            world.pull(world.offer((block,)), (block,))
        world.pass_time(1.0)
        assert [world.leases(rank) for rank in range(2)] == [0, 0]


def test_tickets_that_are_released_unread_travel_together(world):
    """Each as a message of its own would fill the queue of a peer that reads slowly, and then that counts as lost."""
    world.pull(world.offer((1,)), (1,))
    world.pass_time(1.0)
    began, tickets = world.now, [world.offer((1,)) for _ in range(20)]

    async def release_all():
        for ticket in tickets:
            await world.consumer.worker.release(ticket)

    world.do(release_all)
    world.pass_time(1.0)
    assert len(world.heard("Release", since=began)) == 1
    assert {outcomes(world)[ticket.request_id] for ticket in tickets} == {"released"}


def test_no_release_overtakes_the_caller(world, monkeypatch):
    """A pull ends in the very turn in which releases are taken, and its caller runs in the next."""
    order, release = [], Link.release
    monkeypatch.setattr(Link, "release", lambda *given, **how: (order.append("release"), release(*given, **how)))
    ticket, renewer = world.offer(), world.consumer.worker._consumer._renewals

    async def caller(ended):
        await ended
        order.append("caller")

    async def same_turn():
        loop = asyncio.get_running_loop()
        ended, leases = loop.create_future(), renewer.start(ticket.members())
        task = loop.create_task(caller(ended))
        await asyncio.sleep(0)
        loop.call_soon(lambda: (renewer.release(leases, read=True), ended.set_result(None)))
        loop.call_soon(renewer._take)
        await task
        renewer.stop(leases)

    world.do(same_turn)
    world.pass_time(SLACK_S)
    assert order == ["caller", "release"]
    assert outcomes(world)[ticket.request_id] == "released"


def test_releases_of_a_peer_that_is_gone_are_dropped(world, monkeypatch):
    monkeypatch.setattr(renewals, "RELEASE_PAUSE_S", 60.0)
    world.pull(world.offer())
    world.producers[0].leave()
    world.pass_time(120.0)
    assert world.consumer.worker._consumer._renewals._waiting == {}


def test_a_lease_costs_the_same_however_many_are_held(world):
    def cost(count):
        *others, last = [world.offer((block,)) for block in range(1, count + 1)]
        for ticket in others:
            hold(world, ticket)
        return world.do(lambda: calls_of(lambda: world.consumer.worker.hold(last)))

    cost(2)
    assert cost(10) == cost(30)


def test_leases_that_are_not_due_are_not_looked_at(world):
    renewer = world.consumer.worker._consumer._renewals

    def cost(count):
        for block in range(1, count + 1):
            hold(world, world.offer((block,)))
        world.pass_time(SLACK_S)
        return world.do(lambda: calls_of(renewer._renew))

    assert cost(10) == cost(30)
