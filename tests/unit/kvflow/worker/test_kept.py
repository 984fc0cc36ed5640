"""Kept leases: the engine ends them, or an offer that needs a slot; readers and time do not."""

import asyncio
from functools import partial

import pytest

from kvflow.errors import ArgumentInvalid, BlockIdsInvalid, CapacityExceeded, StaleLease, WorkerDraining
from kvflow.events import LeaseEnded, OfferAdmitted
from kvflow.leases.table import Reader
from kvflow.rendezvous.issuer import TicketMint
from kvflow.worker.runtime import open_worker
from kvflow.worker.threaded import run_worker

from .helpers import PATIENCE_S, SECRET, Reports, cache_of
from .pulling import config, opened
from .virtual import virtual

SLOTS = 3
ALONE = Reader("decode-0", 0, 1)


def chain(*blocks, of="a"):
    """Return a digest for each block that covers those before."""
    return [f"{of}: {blocks[:end]}".encode() for end in range(1, len(blocks) + 1)]


def keep(worker, name, *blocks, **how):
    return worker.keep(name, [list(blocks)], 4 * len(blocks), [chain(*blocks, **how)])


def held(worker):
    return {lease.request_id: lease.kept for lease in worker.snapshot().held_leases}


def lease_of(ticket):
    return ticket.grants[0].slot, ticket.grants[0].epoch_value


@pytest.fixture
def reports():
    return Reports()


@pytest.fixture
async def producer(reports):
    async with open_worker(config(lease_slots=SLOTS), cache_of(10), hooks=[reports]) as producer:
        yield producer
        producer.check()


async def test_what_is_kept_is_read_by_many_and_ends_when_the_engine_says_so():
    async with opened() as world:
        ticket = keep(world.producer, "kept", 3, 4)
        assert ticket.grants[0].kind == "kept"
        assert [content.digests for content in ticket.grants[0].contents] == [(chain(3, 4)[-1],)]
        for _ in range(2):
            await world.pull(ticket)
            assert world.holds((1, 2), (3, 4))
        await world.pull(ticket, (1, -1))  # a shorter prefix
        await world.consumer.release(ticket)
        world.producer.check()
        assert held(world.producer) == {"kept": True}
        assert world.producer.revoke("kept")
        assert not world.producer.revoke("kept")
        with pytest.raises(StaleLease) as caught:
            await world.pull(ticket)
        assert caught.value.ended_by == "revoked"
        world.producer.check()


def test_neither_releases_nor_renewals_nor_time_end_it():
    with virtual(lease_s=1.0) as world:
        (producer,) = world.producers

        worker = producer.worker
        ticket = world.do(lambda: keep(worker, "kept", 1, 2), life=producer)
        world.do(lambda: worker.offer("offered", [[3]], 4), life=producer)
        release = partial(worker._leases.on_release, [lease_of(ticket)], ALONE, read=True)
        renew = partial(worker._leases.on_renew, [lease_of(ticket)], ALONE)
        for _ in range(3):
            assert world.do(release, life=producer) == ["held"]
            assert world.do(renew, life=producer)[0] == ["held"]
            world.pass_time(1000.0)
        (state,) = world.do(worker.snapshot, life=producer).held_leases
        assert (state.request_id, state.kept, state.expires_in_s, state.readers) == ("kept", True, 0.0, ())
        world.do(lambda: worker.revoke("kept"), life=producer)
        world.do(worker.check, life=producer)


async def test_the_oldest_that_is_kept_leaves_its_slot_to_an_offer(producer, reports):
    oldest = keep(producer, "oldest", 1)
    producer.offer("offer", [[2]], 4)
    keep(producer, "newer", 1)
    waiting = asyncio.ensure_future(producer.wait_offer("oldest"))
    await asyncio.sleep(0)
    offered = producer.offer("another", [[3]], 4)
    assert lease_of(offered)[0] == lease_of(oldest)[0]
    assert lease_of(offered)[1] > lease_of(oldest)[1]
    assert await asyncio.wait_for(waiting, PATIENCE_S) == "revoked"
    assert held(producer) == {"offer": False, "newer": True, "another": False}
    producer.check()
    keep(producer, "newest", 5)  # a slot of what is kept goes on to what is kept
    assert held(producer) == {"offer": False, "another": False, "newest": True}
    assert (await producer.offer_when_possible("third", [[6]], 4)).request_id == "third"
    for take in (lambda: producer.offer("fourth", [[7]], 4), lambda: keep(producer, "fourth", 7)):
        with pytest.raises(CapacityExceeded):
            take()
    ends = [(end.request_id, end.outcome, end.kept) for end in reports.of(LeaseEnded)]
    assert ends == [(name, "revoked", True) for name in ("oldest", "newer", "newest")]
    assert [(each.request_id, each.lease_s) for each in reports.of(OfferAdmitted)][:2] == [("oldest", 0), ("offer", 30)]


async def test_a_name_that_lost_its_slot_is_free_again(producer):
    for turn in range(3):
        keep(producer, "kept", 1, of=str(turn))
        for index in range(SLOTS):
            producer.offer(str(index), [[2]], 4)
        assert "kept" not in held(producer)
        producer.revoke("0")
        keep(producer, "kept", 1, of="in between")
        assert producer.revoke("kept")
        for index in range(1, SLOTS):
            producer.revoke(str(index))
    assert held(producer) == {}


async def test_an_offer_that_fails_ends_nothing(producer):
    for name in ("a", "b", "c"):
        keep(producer, name, 1)
    for wrong in ([[99]], [["x"]], [[1, 1, 1, 1]]):
        with pytest.raises(BlockIdsInvalid):
            producer.offer("wrong", wrong, 4)
        assert list(held(producer)) == ["a", "b", "c"]
    assert producer.revoke("a")
    producer.offer("right", [[1]], 4)
    producer.check()


@pytest.mark.parametrize("digests", [None, [], [[]], [[b"one"]], [["text", b""]], [[b"", b""]]], ids=repr)
async def test_what_is_kept_has_a_digest_for_each_block(producer, digests):
    with pytest.raises(ArgumentInvalid):
        producer.keep("kept", [[1, 2]], 8, digests)
    assert held(producer) == {}


async def test_draining_ends_what_is_kept():
    async with opened() as world:
        ticket = keep(world.producer, "kept", 3, 4)
        offered = world.producer.offer("offered", [[5]], 4)
        draining = asyncio.ensure_future(world.producer.drain(PATIENCE_S))
        while "kept" in held(world.producer):  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0)
        with pytest.raises(StaleLease):
            await world.pull(ticket)
        with pytest.raises(WorkerDraining):
            keep(world.producer, "late", 3)
        await world.pull(offered, (1,))
        assert (await draining).complete


async def test_a_grant_ends_the_kept_lease_that_has_its_slot(producer):
    """The scheduler has forgotten what it kept, and its ranks have not heard of that yet."""
    mint = TicketMint("prefill-0", [producer.rank_address], cluster_secret=SECRET, block_sizes=[4])
    blocks = {"block_ids": [[1, 2]], "num_tokens": 8}
    grants = [mint.keep(str(index), **blocks, digests=[chain(1, 2)])[1] for index in range(SLOTS + 1)]
    grants.append(mint.offer("offer", **blocks)[1])
    assert not mint.retire("0")
    assert mint.retire("3")
    for grant in grants:
        producer.admit(grant, [chain(1, 2)] if grant.kind == "kept" else None)
        producer.check()
    assert held(producer) == {"2": True, "3": True, "offer": False}
    with pytest.raises(BlockIdsInvalid):
        producer.admit(grants[0])  # its slot has gone on
    with pytest.raises(ArgumentInvalid):
        producer.admit(mint.keep("4", **blocks, digests=[chain(1, 2)])[1], [[b"one"]])


def test_a_worker_on_its_thread_keeps_and_does_not_report_the_end():
    with run_worker(config(), cache_of(10)) as worker:
        keep(worker, "kept", 1)
        worker.offer("offered", [[2]], 4)
        assert worker.revoke("kept")
        assert worker.revoke("offered")
        assert [end.request_id for end in worker.finished()] == ["offered"]
