"""Pulls whose lease is not admitted yet: real workers on virtual time."""

import asyncio
from functools import partial

import pytest

from kvflow.errors import ReleaseMismatch
from kvflow.reads.pulls import PROBE_S_MAX
from kvflow.rendezvous.dialer import Link
from kvflow.rendezvous.issuer import TicketMint
from kvflow.worker import peers

from .helpers import SECRET
from .virtual import virtual

SOON_S = 0.05
"""Some round trips, and far less than a probe takes that nobody asks for."""


def early(world, count, asked=64):
    """Start pulls of tickets whose leases are not admitted, of which so many are asked for; return grants and pulls."""
    (producer,) = world.producers
    mint = TicketMint("prefill-0", [producer.worker.rank_address], cluster_secret=SECRET)
    ticket, grant = mint.offer("connect", block_ids=[[1]], num_tokens=4)
    world.do(partial(producer.worker.admit, grant), life=producer)
    world.pull(ticket)
    (connection,) = world.consumer.worker._consumer.peers._connections.values()
    connection.admissions = asyncio.Semaphore(asked)
    signed = [mint.offer(f"early {number}", block_ids=[[number + 2]], num_tokens=4) for number in range(count)]
    pulls = [world.start(ticket, (number + 2,)) for number, (ticket, _) in enumerate(signed)]
    world.pass_time(2.5 * PROBE_S_MAX)  # half way between two probes
    assert not any(pull.done() for pull in pulls)
    return [grant for _, grant in signed], pulls


def test_a_pull_goes_on_when_its_lease_is_admitted():
    with virtual(fence_s=60.0) as world:
        (grant,), (pull,) = early(world, 1)
        world.do(partial(world.producers[0].worker.admit, grant), life=world.producers[0])
        world.pass_time(SOON_S)
        assert pull.result().early > 0


def test_one_answer_finds_all_leases_that_are_admitted():
    """Only one is asked for at a time, and it is admitted last."""
    with virtual(fence_s=60.0) as world:
        grants, pulls = early(world, 3, asked=1)
        for grant in (grants[2], grants[1], grants[0]):
            world.do(partial(world.producers[0].worker.admit, grant), life=world.producers[0])
        world.pass_time(SOON_S)
        assert [pull.done() for pull in pulls] == [True] * 3


def test_of_many_that_wait_some_are_asked_for_and_the_others_are_found(monkeypatch):
    monkeypatch.setattr(peers, "ASKING_MAX", 1)
    with virtual(fence_s=60.0) as world:
        grants, pulls = early(world, 3)
        (connection,) = world.consumer.worker._consumer.peers._connections.values()
        assert connection.num_asking == 1
        for grant in grants[::-1]:  # the first is asked for
            world.do(partial(world.producers[0].worker.admit, grant), life=world.producers[0])
        world.pass_time(SOON_S)
        assert [pull.done() for pull in pulls] == [True] * 3
        assert connection.num_asking == 0


def test_a_producer_that_knows_no_questions_is_probed(monkeypatch):
    async def unknown(_link, *_question, **_how):
        raise ReleaseMismatch("the producer", "wire version", "1", "2 for questions")

    monkeypatch.setattr(Link, "settled", unknown)
    with virtual(fence_s=60.0) as world:
        (grant,), (pull,) = early(world, 1)
        world.do(partial(world.producers[0].worker.admit, grant), life=world.producers[0])
        world.pass_time(2 * PROBE_S_MAX)
        assert pull.result().early > 0


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
