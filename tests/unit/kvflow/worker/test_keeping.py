"""Leases that are renewed while nobody reads under them yet."""

import asyncio

import pytest

from kvflow.cache.mint import Mint
from kvflow.cache.tickets import RankAddress, join_tickets
from kvflow.errors import CapacityExceeded, PeerUnavailable, StaleLease
from kvflow.transfer.scheduler import RENEWALS_PER_LEASE
from kvflow.worker import keeping
from kvflow.worker.keeping import REDIAL_S, Keeping
from tests.counting import calls_of

from .helpers import PATIENCE_S, Clock

LEASE_S = 6.0
DUE_S = LEASE_S / RENEWALS_PER_LEASE


class Link:
    def __init__(self, said):
        self.renew = said.append


class Pool:
    """Peers that are connected or not, as a test says."""

    def __init__(self, *, connected=True):
        self.connected = connected
        self.refusal = None
        self.dialled = []
        self.said = []

    def link(self, peer):
        return Link(self.said) if self.connected else None

    def begin(self, member):
        self.dialled.append(member.peer)
        if self.refusal:
            raise self.refusal


def mint_of(rank=0):
    address = RankAddress(
        rank=rank, incarnation="ab" * 16, endpoint=f"tcp://127.0.0.1:{5600 + rank}", epoch_base="4096", slots=64
    )
    return Mint("prefill", [address], sign=lambda _: bytes(32), lease_s=LEASE_S, head_start=7, wall_clock=lambda: 0.0)


def members_of(*, count=1, ranks=1):
    mints = [mint_of(rank) for rank in range(ranks)]
    tickets = []
    for number in range(count):
        offers = [mint.offer(f"request-{number}", block_ids=[[number]], num_tokens=4)[0] for mint in mints]
        tickets.append(list(join_tickets(offers).members()))
    return tickets


def leases_of(*tickets):
    return [(member.grant.slot, member.grant.epoch_value) for members in tickets for member in members]


def test_a_lease_is_renewed_at_once_and_whenever_a_part_of_it_has_passed():
    pool, clock = Pool(), Clock()
    (ticket,) = members_of()
    kept = Keeping(pool, clock)
    kept.begin(ticket)
    for _ in range(3):
        kept.renew_due()
        kept.renew_due()  # not due yet
        clock.now += DUE_S
    assert pool.said == [leases_of(ticket)] * 3


def test_leases_of_one_peer_are_renewed_together_and_those_of_others_beside_them():
    pool = Pool()
    first, second = members_of(count=2, ranks=2)
    kept = Keeping(pool, Clock())
    kept.begin(first)
    kept.begin(second)
    kept.renew_due()
    by_rank = [[first[rank], second[rank]] for rank in range(2)]
    assert pool.said == [leases_of(members) for members in by_rank]


def test_what_is_kept_no_more_is_not_renewed_and_twice_is_once():
    pool, clock = Pool(), Clock()
    first, second = members_of(count=2)
    kept = Keeping(pool, clock)
    for ticket in (first, first, second):
        kept.begin(ticket)
    kept.renew_due()
    kept.end(first)
    kept.end(first)
    clock.now += DUE_S
    kept.renew_due()
    assert pool.said == [leases_of(first, second), leases_of(second)]
    assert len(kept) == 1


def test_a_peer_that_is_not_connected_is_dialled_and_asked_again_soon():
    pool, clock = Pool(connected=False), Clock()
    (ticket,) = members_of()
    kept = Keeping(pool, clock)
    kept.begin(ticket)
    kept.renew_due()
    kept.renew_due()
    assert pool.dialled == [ticket[0].peer]
    pool.connected = True
    clock.now += REDIAL_S
    kept.renew_due()
    assert pool.said == [leases_of(ticket)]


def test_an_address_that_is_not_tried_now_is_tried_when_it_may_be():
    pool, clock = Pool(connected=False), Clock()
    pool.refusal = PeerUnavailable("silent", peer="prefill", retry_after_s=4.0)
    (ticket,) = members_of()
    kept = Keeping(pool, clock)
    kept.begin(ticket)
    kept.renew_due()
    clock.now += REDIAL_S
    kept.renew_due()
    clock.now += 4.0
    kept.renew_due()
    assert len(pool.dialled) == 2


def test_a_producer_that_is_gone_is_forgotten():
    pool = Pool(connected=False)
    pool.refusal = StaleLease("gone")
    (ticket,) = members_of()
    kept = Keeping(pool, Clock())
    kept.begin(ticket)
    kept.renew_due()
    assert len(kept) == 0


def test_no_more_are_kept_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr(keeping, "KEPT_MAX", 1)
    first, second = members_of(count=2)
    kept = Keeping(Pool(), Clock())
    kept.begin(first)
    kept.begin(first)
    with pytest.raises(CapacityExceeded):
        kept.begin(second)
    kept.end(first)
    kept.begin(second)


async def test_it_renews_by_itself_from_the_first_ticket_on():
    renewed = asyncio.Event()
    pool = Pool()
    pool.link = lambda _peer: type("Heard", (), {"renew": lambda _self, _leases: renewed.set()})()
    kept = Keeping(pool, Clock())
    task = asyncio.create_task(kept.renew_while_any())
    await asyncio.sleep(0)
    assert not renewed.is_set()
    (ticket,) = members_of()
    kept.begin(ticket)
    async with asyncio.timeout(PATIENCE_S):
        await renewed.wait()
    task.cancel()


def test_leases_that_are_not_due_are_not_looked_at():
    def cost(count):
        clock = Clock()
        keeping_ = Keeping(Pool(), clock)
        for members in members_of(count=count):
            keeping_.begin(members)
        keeping_.renew_due()
        return calls_of(keeping_.renew_due)

    assert cost(60) == cost(10)
