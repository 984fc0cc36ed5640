"""Pulls whose lease is not admitted yet: real workers on virtual time."""

import asyncio
from contextlib import suppress
from functools import partial

import pytest

from kvflow.errors import CapacityExceeded, DeadlineExceeded
from kvflow.events import TransferRetried
from kvflow.rendezvous.dialer import Link
from kvflow.rendezvous.issuer import TicketMint
from kvflow.rendezvous.questions import Settled
from kvflow.worker import consumer, peers
from kvflow.worker.consumer import RETRY_S_MAX, REVOCATION_PAUSE_S

from .helpers import SECRET
from .virtual import virtual

SOON_S = 0.05
"""Some round trips, and far less than an early lease waits that is read again unasked."""


def early(world, count):
    """Start pulls of tickets whose leases are not admitted, in one turn; return grants and pulls."""
    (producer,) = world.producers
    mint = TicketMint("prefill-0", [producer.worker.rank_address], cluster_secret=SECRET)
    ticket, grant = mint.offer("connect", block_ids=[[1]], num_tokens=4)
    world.do(partial(producer.worker.admit, grant), life=producer)
    world.pull(ticket)
    signed = [mint.offer(f"early {number}", block_ids=[[number + 2]], num_tokens=4) for number in range(count)]
    items = [(ticket, [[number + 2]]) for number, (ticket, _) in enumerate(signed)]
    handles = world.do(lambda: world.consumer.worker.pull_many(items))
    pulls = [world.consumer.process.create_task(result(handle), name="drive a pull") for handle in handles]
    world.pass_time(2.5 * RETRY_S_MAX)
    assert not any(pull.done() for pull in pulls), [p.exception() for p in pulls]
    return [grant for _, grant in signed], pulls


async def result(handle):
    return await handle


def admit(world, *grants):
    for grant in grants:
        world.do(partial(world.producers[0].worker.admit, grant), life=world.producers[0])


def num_asking(world):
    (connection,) = world.consumer.worker._consumer.peers._connections.values()
    return connection.num_asking


@pytest.mark.parametrize(("most", "questions"), [(64, 1), (2, 3)])
def test_a_turn_that_finds_early_leases_asks_for_them_together(most, questions, monkeypatch):
    monkeypatch.setattr(consumer, "LEASES_ASKED_MAX", most)
    with virtual(fence_s=60.0) as world:
        grants, pulls = early(world, 5)
        assert num_asking(world) == questions
        admit(world, grants[3])
        world.pass_time(SOON_S)
        assert [pull.done() for pull in pulls] == [False, False, False, True, False]
        admit(world, *grants[:3], grants[4])
        world.pass_time(SOON_S)
        assert [pull.result().early for pull in pulls] == [1] * 5, "no other is read again"
        assert num_asking(world) == 0
        assert len(world.consumer.of(TransferRetried)) == 5


async def refused(_link, *_question, **_how):
    raise CapacityExceeded("questions to the producer", 1024)


async def silence(seconds):
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.get_running_loop().create_future()


async def lost(_link, *_question, wait_s, within_s, **_how):
    await silence(wait_s + within_s)
    raise DeadlineExceeded("the producer did not answer", phase="handshake", peer="the producer")


async def late(_link, leases, *, wait_s, **_how):
    await silence(wait_s)
    return [Settled()] * len(leases)


async def lied(_link, leases, **_how):
    return [Settled(block_ids=((),))] * len(leases)


@pytest.mark.parametrize(("answer", "within_s"), [(refused, 0.0), (lost, 15.0), (late, 10.0), (lied, 0.0)])
def test_a_lease_is_found_whatever_its_producer_answers(answer, within_s, monkeypatch):
    monkeypatch.setattr(Link, "settled", answer)
    with virtual(fence_s=40.0) as world:
        grants, (pull,) = early(world, 1)
        admit(world, *grants)
        world.pass_time(within_s + RETRY_S_MAX + SOON_S)
        assert 0 < pull.result().early < 12, "it is looked for patiently"
        assert len(world.consumer.of(TransferRetried)) == 1, "told once, however often it is read"


def test_a_peer_has_so_many_open_questions_and_others_are_found(monkeypatch):
    monkeypatch.setattr(peers, "ASKING_MAX", 1)
    monkeypatch.setattr(consumer, "LEASES_ASKED_MAX", 1)
    with virtual(fence_s=60.0) as world:
        grants, pulls = early(world, 3)
        assert num_asking(world) == 1
        admit(world, *grants)
        world.pass_time(RETRY_S_MAX + SOON_S)
        assert [pull.done() for pull in pulls] == [True] * 3


@pytest.mark.parametrize("ending", ["revoke", "void", "never"])
def test_a_lease_that_ends_or_never_comes_fails_its_pull(ending):
    with virtual(fence_s=4.0) as world:
        (grant,), (pull,) = early(world, 1)
        (producer,) = world.producers
        if ending == "revoke":
            world.do(partial(producer.worker.admit, grant), life=producer)
            world.do(partial(producer.worker.revoke, grant.request_id), life=producer)
        elif ending == "void":
            world.do(partial(producer.worker.revoke, grant.request_id, grant), life=producer)
        if ending != "never":
            world.pass_time(SOON_S)
            assert (pull.exception().code, pull.exception().ended_by) == ("stale_lease", "revoked")
        else:
            world.pass_time(60.0)
            assert (pull.exception().code, pull.exception().phase) == ("deadline_exceeded", "fence")
        world.do(world.consumer.worker.check)


REST_S = 2 * REVOCATION_PAUSE_S + SOON_S


def signed_for_all(world):
    """Return a ticket of all ranks and its grant, which no rank has admitted."""
    mint = TicketMint("prefill-0", [each.worker.rank_address for each in world.producers], cluster_secret=SECRET)
    return mint.offer("early", block_ids=[[2]], num_tokens=4)


def revoke(world, grant, *ranks, void=False):
    for rank in ranks:
        producer = world.producers[rank]
        world.do(partial(producer.worker.revoke, grant.request_id, grant if void else None), life=producer)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_reader_of_one_rank_hears_from_the_others_that_the_lease_is_void(when):
    """Its rank is on another host and got neither the lease nor the reset."""
    with virtual(ranks=2, reader=(1, 2), fence_s=600.0) as world:
        ticket, grant = signed_for_all(world)
        if when == "before":
            revoke(world, grant, 0, void=True)
        pull = world.start(ticket, (2,))
        world.pass_time(SOON_S)
        assert not pull.done()
        (reading,) = world.consumer.worker._consumer.pulls.by_id.values()
        assert [rank.read.peer.rank for rank in reading.ranges[-1].ranks] == [1]
        if when == "after":
            revoke(world, grant, 0, void=True)
        world.pass_time(REST_S)
        assert (pull.exception().code, pull.exception().ended_by) == ("stale_lease", "revoked")
        world.do(world.consumer.worker.check)


@pytest.mark.parametrize("other", ["held", "never", "released", "expired", "unknown"])
def test_what_other_ranks_do_without_revoking_ends_no_pull(other, monkeypatch):
    settled, asked = Link.settled, []

    async def answer(link, leases, **how):
        if link.peer.rank == 1:
            return await settled(link, leases, **how)
        asked.append(other)
        return [Settled(ended=other)] * len(leases)

    with virtual(ranks=2, reader=(1, 2), fence_s=600.0) as world:
        ticket, grant = signed_for_all(world)
        first, second = world.producers
        if other == "held":
            world.do(partial(first.worker.admit, grant), life=first)
        elif other != "never":
            monkeypatch.setattr(Link, "settled", answer)
        pull = world.start(ticket, (2,))
        world.pass_time(2 * REST_S)
        assert asked in ([], [other] * 4)
        assert not pull.done()
        world.do(partial(second.worker.admit, grant), life=second)
        world.pass_time(SOON_S)
        assert pull.result().early > 0
        asked.clear()
        world.pass_time(2 * REST_S)
        assert asked == [], "nobody asks when the lease is admitted"
