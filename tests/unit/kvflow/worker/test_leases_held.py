"""Leases that are renewed while pulls or kept tickets need them, and given back together."""

import asyncio
from collections import Counter

import msgspec
import pytest

from handshake import ClockOffset
from kvflow.cache.mint import Mint
from kvflow.cache.tickets import RankAddress, join_tickets
from kvflow.errors import CapacityExceeded, PeerUnavailable, StaleLease
from kvflow.worker import leases_held
from kvflow.worker.leases_held import (
    KEPT_MAX,
    REDIAL_S,
    RELEASES_MAX,
    RENEWALS_PER_LEASE,
    TICK_S,
    LeasesHeld,
)
from tests.counting import calls_of

from .helpers import PATIENCE_S, Clock

LEASE_S = 6.0
PART_S = LEASE_S / RENEWALS_PER_LEASE
SLACK_S = 2 * TICK_S  # what is due now is renewed at the next tick
ISSUED_AT = 1000.0


def keys(members):
    """Name leases as ``LeasesHeld.hold`` does."""
    return [(member.peer, member.grant.slot, member.grant.epoch_value) for member in members]


class Link:
    def __init__(self, pool, peer):
        self.clock_offset = pool.offset
        self._pool, self._peer = pool, peer

    def renew(self, leases):
        self._pool.renewed.append((self._peer.rank, leases))

    def release(self, leases, *, read):
        self._pool.released.append((self._peer.rank, read, leases))
        self._pool.heard.set()


class Pool:
    """Peers that are connected or not, as a test says."""

    def __init__(self):
        self.connected = True
        self.offset = ClockOffset(ahead_s=0.0, error_s=0.0)
        self.refusal = None
        self.dialled = []
        self.renewed = []
        self.released = []
        self.heard = asyncio.Event()

    def link(self, peer):
        return Link(self, peer) if self.connected else None

    def begin(self, member):
        self.dialled.append(member.peer)
        if self.refusal:
            raise self.refusal


class World:
    """Leases on a clock that stands still; its ticks come when a test says."""

    def __init__(self, monkeypatch):
        self.pool, self.clock, self.wall = Pool(), Clock(), Clock(ISSUED_AT)
        self.held = LeasesHeld(self.pool, self.clock, self.wall)
        self._later = []
        loop = asyncio.get_running_loop()
        call_later = loop.call_later

        def ticking(delay_s, call, *args):
            if delay_s == TICK_S and call.__name__ == "_renew":
                self._later.append(call)
                return None
            return call_later(delay_s, call, *args)

        monkeypatch.setattr(loop, "call_later", ticking)

    def pass_time(self, seconds):
        """Let time pass, and then a tick come."""
        self.clock.now += seconds
        self.wall.now += seconds
        due, self._later = self._later, []
        for call in due:
            call()
        renewed, self.pool.renewed = self.pool.renewed, []
        return renewed

    @property
    def ticks(self):
        return bool(self._later)

    async def releases(self, count=1):
        async with asyncio.timeout(PATIENCE_S):
            while sum(len(leases) for *_, leases in self.pool.released) < count:
                self.pool.heard.clear()
                await self.pool.heard.wait()
        return self.pool.released


@pytest.fixture
async def world(monkeypatch):
    return World(monkeypatch)


def mint_of(rank=0):
    address = RankAddress(
        rank=rank, incarnation="ab" * 16, endpoint=f"tcp://127.0.0.1:{5600 + rank}", epoch_base="4096", slots=64
    )
    return Mint(
        "prefill", [address], sign=lambda _: bytes(32), lease_s=LEASE_S, head_start=7, wall_clock=lambda: ISSUED_AT
    )


def members_of(*, count=1, ranks=1):
    mints = [mint_of(rank) for rank in range(ranks)]
    tickets = []
    for number in range(count):
        offers = [mint.offer(f"request-{number}", block_ids=[[number]], num_tokens=4)[0] for mint in mints]
        tickets.append(tuple(join_tickets(offers).members()))
    return tickets


def leases_of(*tickets):
    return [(member.grant.slot, member.grant.epoch_value) for members in tickets for member in members]


async def test_a_pull_that_ends_within_a_third_of_its_lease_renews_nothing(world):
    (ticket,) = members_of()
    world.held.hold(ticket)
    assert world.pass_time(TICK_S) == []
    assert world.pass_time(PART_S - SLACK_S) == []
    world.held.drop(keys(ticket))
    assert world.pass_time(LEASE_S) == []
    assert not world.ticks


async def test_a_long_pull_renews_its_lease_each_third_of_it(world):
    (ticket,) = members_of()
    world.held.hold(ticket)
    assert world.pass_time(TICK_S) == []
    for _ in range(3):
        assert world.pass_time(PART_S - SLACK_S) == []
        assert world.pass_time(2 * SLACK_S) == [(0, leases_of(ticket))]


@pytest.mark.parametrize("age_s", [PART_S, LEASE_S, 10 * LEASE_S])
async def test_a_ticket_that_is_older_than_a_third_is_renewed_at_once(world, age_s):
    world.wall.now = ISSUED_AT + age_s
    (ticket,) = members_of()
    world.held.hold(ticket)
    assert world.pass_time(TICK_S) == [(0, leases_of(ticket))]
    assert world.pass_time(PART_S - TICK_S) == []


async def test_a_ticket_is_renewed_when_a_third_has_passed_since_it_was_signed(world):
    world.wall.now = ISSUED_AT + PART_S / 2
    (ticket,) = members_of()
    world.held.hold(ticket)
    assert world.pass_time(TICK_S) == []
    assert world.pass_time(PART_S / 2 - SLACK_S) == []
    assert world.pass_time(SLACK_S) == [(0, leases_of(ticket))]


@pytest.mark.parametrize(
    "offset", [None, ClockOffset(ahead_s=-1.0, error_s=0.1), ClockOffset(ahead_s=0.0, error_s=PART_S)]
)
async def test_a_ticket_whose_age_is_unknown_is_renewed_at_once(world, offset):
    world.pool.offset = offset
    (ticket,) = members_of()
    world.held.hold(ticket)
    assert world.pass_time(TICK_S) == [(0, leases_of(ticket))]


async def test_a_ticket_that_does_not_say_when_it_was_signed_is_renewed_at_once(world):
    ((member,),) = members_of()
    grant = msgspec.structs.replace(member.grant, issued_ms=msgspec.UNSET)
    ticket = (msgspec.structs.replace(member, grant=grant),)
    world.held.hold(ticket)
    assert world.pass_time(TICK_S) == [(0, leases_of(ticket))]


async def test_a_lease_that_many_hold_is_renewed_once_until_the_last_ends(world):
    (ticket,) = members_of()
    for _ in range(3):
        world.held.hold(ticket)
    world.held.keep(ticket)
    assert world.pass_time(PART_S + SLACK_S) == [(0, leases_of(ticket))]
    world.held.drop(keys(ticket))
    world.held.drop(keys(ticket))
    world.held.forget(ticket)
    assert world.pass_time(PART_S + SLACK_S) == [(0, leases_of(ticket))]
    world.held.drop(keys(ticket))
    assert world.pass_time(PART_S + SLACK_S) == []


async def test_leases_of_one_peer_are_renewed_together_and_of_others_beside(world):
    first, second = members_of(count=2, ranks=2)
    world.held.hold(first)
    world.held.keep(second)
    by_rank = [(rank, leases_of([first[rank]], [second[rank]])) for rank in range(2)]
    assert world.pass_time(PART_S + SLACK_S) == by_rank


async def test_what_is_kept_twice_is_forgotten_once(world):
    first, second = members_of(count=2)
    for ticket in (first, first, second):
        world.held.keep(ticket)
    world.held.forget(first)
    world.held.forget(first)
    assert world.pass_time(PART_S + SLACK_S) == [(0, leases_of(second))]


async def test_ticks_come_only_while_a_lease_is_held(world):
    (ticket,) = members_of()
    assert not world.ticks
    for _ in range(2):
        world.held.keep(ticket)
        assert world.ticks
        world.held.forget(ticket)
        world.pass_time(3600.0)
        assert not world.ticks


async def test_a_peer_that_is_not_connected_is_dialled_and_asked_again_soon(world):
    world.pool.connected = False
    (ticket,) = members_of()
    world.held.keep(ticket)
    assert world.pass_time(TICK_S) == []
    assert world.pass_time(TICK_S) == []
    assert world.pool.dialled == [ticket[0].peer]
    world.pool.connected = True
    assert world.pass_time(REDIAL_S + SLACK_S) == [(0, leases_of(ticket))]


async def test_an_address_that_is_not_tried_now_is_tried_when_it_may_be(world):
    world.pool.connected = False
    world.pool.refusal = PeerUnavailable("silent", peer="prefill", retry_after_s=4.0)
    (ticket,) = members_of()
    world.held.keep(ticket)
    world.pass_time(TICK_S)
    world.pass_time(REDIAL_S + SLACK_S)
    assert len(world.pool.dialled) == 1
    world.pass_time(4.0 + SLACK_S)
    assert len(world.pool.dialled) == 2


async def test_a_kept_ticket_of_a_producer_that_is_gone_is_forgotten(world, monkeypatch):
    monkeypatch.setattr(leases_held, "KEPT_MAX", 1)
    world.pool.connected = False
    world.pool.refusal = StaleLease("gone")
    first, second = members_of(count=2)
    world.held.keep(first)
    world.pass_time(TICK_S)
    world.held.keep(second)  # there is room again
    assert world.pool.dialled == [first[0].peer]


async def test_an_open_pull_of_a_producer_that_is_gone_ends_as_any_other(world):
    world.pool.connected = False
    world.pool.refusal = StaleLease("gone")
    (ticket,) = members_of()
    world.held.hold(ticket)
    world.held.keep(ticket)
    world.pass_time(TICK_S)
    world.held.drop(keys(ticket))
    world.pass_time(TICK_S)
    assert not world.ticks


async def test_no_more_are_kept_than_there_is_room_for(world, monkeypatch):
    monkeypatch.setattr(leases_held, "KEPT_MAX", 1)
    first, second = members_of(count=2)
    world.held.keep(first)
    world.held.keep(first)
    with pytest.raises(CapacityExceeded):
        world.held.keep(second)
    world.held.hold(second)  # a pull needs no room among the kept
    world.held.forget(first)
    world.held.keep(second)


async def test_it_renews_by_itself_from_the_first_lease_on():
    pool, renewed = Pool(), asyncio.Event()
    pool.offset = None
    pool.link = lambda _peer: type("Heard", (), {"clock_offset": None, "renew": lambda *_: renewed.set()})()
    held = LeasesHeld(pool, asyncio.get_running_loop().time, lambda: 0.0)
    (ticket,) = members_of()
    for _ in range(2):  # it stops when nothing is held, and begins again
        held.hold(ticket)
        async with asyncio.timeout(PATIENCE_S):
            await renewed.wait()
        held.drop(keys(ticket))
        renewed.clear()
        while held._tick is not None:  # noqa: ASYNC110 - it tells nobody that it has stopped
            await asyncio.sleep(TICK_S)


async def test_releases_are_collected_into_one_message_of_a_peer(world):
    first, second, third = members_of(count=3, ranks=2)
    for ticket in (first, second, third):
        world.held.hold(ticket)
    world.held.release(keys(first), read=True)
    world.held.release(keys(second), read=True)
    world.held.release(keys(third), read=False)
    assert world.pool.released == []
    assert sorted(await world.releases(6)) == sorted(
        (rank, read, leases_of(*([ticket[rank]] for ticket in tickets)))
        for rank in range(2)
        for read, tickets in ((True, (first, second)), (False, (third,)))
    )


async def test_many_releases_are_sent_before_their_pause_is_over(world, monkeypatch):
    monkeypatch.setattr(leases_held, "RELEASE_PAUSE_S", 10 * PATIENCE_S)
    tickets = members_of(count=1) * (RELEASES_MAX + 1)
    for ticket in tickets:
        world.held.release(keys(ticket), read=True)
    ((_, _, leases),) = await world.releases(len(tickets))
    assert len(leases) == len(tickets)
    world.held.release(keys(tickets[0]), read=True)  # the next waits for its own pause
    await asyncio.sleep(0)
    assert len(world.pool.released) == 1
    world.held.close()
    assert len(world.pool.released) == 2


@pytest.mark.parametrize("pause_s", [0.0, 10 * PATIENCE_S])
async def test_no_release_overtakes_the_caller(world, monkeypatch, pause_s):
    monkeypatch.setattr(leases_held, "RELEASE_PAUSE_S", pause_s)
    tickets = members_of(count=1) * (RELEASES_MAX + 1)
    ended, order = asyncio.get_running_loop().create_future(), []

    async def caller():
        await ended
        order.append("caller")
        order.append(len(world.pool.released))

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)
    for ticket in tickets:
        world.held.release(keys(ticket), read=True)
    ended.set_result(None)  # in the same turn, and last
    await task
    await world.releases(len(tickets))
    assert order == ["caller", 0]


async def test_closing_sends_what_waits_and_renews_nothing(world):
    first, second = members_of(count=2)
    world.held.keep(first)
    world.held.hold(second)
    world.held.release(keys(second), read=True)
    world.held.close()
    assert world.pool.released == [(0, True, leases_of(second))]
    assert world.pass_time(LEASE_S) == []
    assert not world.ticks
    world.held.drop(keys(first))  # what ends later does no damage
    world.held.release(keys(first), read=False)


async def test_releases_of_a_peer_that_is_gone_are_dropped(world):
    (ticket,) = members_of()
    world.held.release(keys(ticket), read=True)
    world.pool.connected = False
    world.held.close()
    assert world.pool.released == []


async def test_a_lease_costs_the_same_however_many_are_held(world):
    def cost(count):
        held = LeasesHeld(world.pool, world.clock, world.wall)
        *others, ticket = members_of(count=count)
        for members in others:
            held.hold(members)

        def pull():
            held.hold(ticket)
            held.release(keys(ticket), read=True)

        pull()
        return calls_of(pull)

    assert cost(60) == cost(10)


async def test_leases_that_are_not_due_are_not_looked_at(world):
    def cost(count):
        for members in members_of(count=count):
            world.held.keep(members)
        world.pass_time(TICK_S)
        return calls_of(lambda: world.pass_time(0.0))

    assert cost(10) == cost(60)


async def test_holders_are_counted_right_in_any_order(world):
    tickets = members_of(count=3)
    holders, kept = Counter(), set()
    steps = [(which, step) for step in range(60) for which in range(3)]
    for which, step in steps:
        ticket, turn = tickets[which], (which * 7 + step * 5) % 4
        if turn == 0:
            world.held.hold(ticket)
            holders[which] += 1
        elif turn == 1 and holders[which]:
            world.held.drop(keys(ticket))
            holders[which] -= 1
        elif turn == 2:
            world.held.keep(ticket)
            kept.add(which)
        else:
            world.held.forget(ticket)
            kept.discard(which)
        needed = leases_of(*(tickets[each] for each in range(3) if holders[each] or each in kept))
        renewed = world.pass_time(PART_S + SLACK_S)
        assert sorted(lease for _, leases in renewed for lease in leases) == sorted(needed)


def test_as_many_are_kept_as_a_producer_remembers():
    assert KEPT_MAX == 65536
