"""Offers and their leases as an engine sees them: effective on return, from any thread, and in turn when slots lack."""

import asyncio
import threading
from contextlib import asynccontextmanager
from functools import partial

import pytest
from msgspec.structs import replace

from kvflow.errors import (
    ArgumentInvalid,
    BlockIdsInvalid,
    CapacityExceeded,
    ConfigInvalid,
    RequestUnknown,
    WorkerClosed,
)
from kvflow.events import LeaseEnded, OfferAdmitted
from kvflow.ids import FEW_IDS
from kvflow.layout.groups import Group
from kvflow.leases.table import Reader
from kvflow.rendezvous.issuer import TicketMint
from kvflow.worker.runtime import open_worker
from tests.fakes.models import Shape
from tests.helpers.waiting import patiently

from .helpers import PATIENCE_S, SECRET, SPECS, cache_of, futures_left, turns
from .pulling import config, opened
from .virtual import virtual

SLOTS = 3
TWO_GROUPS = tuple(Group((name,), SPECS[name].kind, SPECS[name].block_size) for name in SPECS)
"""Groups that share their bytes: block 3 of one is block 3 of the other."""
BLOCKS = ((1, 2), (3, 4))
ALONE = Reader("decode-0", 0, 1)


@asynccontextmanager
async def producing(*hooks):
    """Open a producer with few slots."""
    async with open_worker(config(lease_slots=SLOTS), cache_of(10, groups=TWO_GROUPS), hooks=hooks) as worker:
        yield worker


@pytest.fixture
async def producer(reports):
    async with producing(reports) as producer:
        yield producer


@pytest.fixture
async def full(producer):
    """A producer whose slots are all taken, by requests that are named by numbers."""
    for index in range(SLOTS):
        producer.offer(str(index), BLOCKS, 8)
    return producer


def requests(producer):
    return producer._leases.requests()


async def waited(*awaitables):
    return await patiently(asyncio.gather(*awaitables, return_exceptions=True))


async def test_an_offer_and_its_revocation_are_effective_on_return(producer, reports):
    producer.offer("r", BLOCKS, 8)
    assert producer.snapshot().leases == 1
    assert reports.of(OfferAdmitted) == [OfferAdmitted("r", 4, 30.0)]
    assert producer.revoke("r")
    assert producer.snapshot().leases == 0
    assert not producer.revoke("r")
    assert not producer.revoke("unknown")
    assert [(end.request_id, end.outcome) for end in reports.of(LeaseEnded)] == [("r", "revoked")]


@pytest.mark.parametrize("wait", ["wait_offer", "drain"])
async def test_a_caller_that_gives_up_waiting_is_forgotten(producer, wait, monkeypatch):
    producer.offer("r", BLOCKS, 8)
    call = partial(producer.wait_offer, "r") if wait == "wait_offer" else partial(producer.drain, PATIENCE_S)
    patient = asyncio.ensure_future(call())
    await turns(5)
    assert await futures_left(call, monkeypatch) == 0
    producer.revoke("r")
    (outcome,) = await waited(patient)
    assert outcome == "revoked" or outcome.complete


async def test_a_name_that_is_offered_again_forgets_its_past(producer, monkeypatch):
    monkeypatch.setattr("kvflow.worker.producer.ENDED_MAX", 2)
    for name in "abc":
        producer.offer(name, BLOCKS, 8)
        producer.revoke(name)
    assert await producer.wait_offer("b") == "revoked"
    with pytest.raises(RequestUnknown) as caught:  # of ended leases the last ones are remembered
        await producer.wait_offer("a")
    assert caught.value.request_id == "a"
    producer.offer("b", BLOCKS, 8)
    waiter = asyncio.ensure_future(producer.wait_offer("b"))
    await turns(5)
    assert not waiter.done()
    producer.revoke("b")
    assert await waited(waiter) == ["revoked"]


async def test_offers_and_ends_of_several_threads_lose_nothing(producer, reports):
    """Two threads offer and revoke the same blocks, while the loop gives back what a third one offers."""
    rounds = 40

    def offer_and_revoke(name):
        for turn in range(rounds):
            producer.offer(f"{name} {turn}", ((1, 2, 2, -1), (3, -1, -1, -1)), 16)
            assert producer.revoke(f"{name} {turn}")

    async def offer_and_release():
        for turn in range(rounds):
            (grant,) = (await asyncio.to_thread(producer.offer, f"c {turn}", BLOCKS, 8)).grants
            assert producer._leases.on_release([(grant.slot, grant.epoch)], ALONE) == ["ended"]

    failures = await waited(
        asyncio.to_thread(offer_and_revoke, "a"), asyncio.to_thread(offer_and_revoke, "b"), offer_and_release()
    )
    assert failures == [None] * 3
    assert producer.snapshot().leases == 0
    producer.check()
    assert len(reports.of(LeaseEnded)) == 3 * rounds
    assert len({producer.offer(str(index), BLOCKS, 8).grants[0].slot for index in range(SLOTS)}) == SLOTS


async def test_an_offer_that_is_refused_costs_no_slot(producer):
    for block_ids, num_tokens in ((((1,),), 4), (((10,), (1,)), 4), (((1,), (-2,)), 4), (((3,), (3,)), 4)):
        for _ in range(SLOTS + 1):
            with pytest.raises(BlockIdsInvalid):
                producer.offer("r", block_ids, num_tokens)
    producer.offer("0", ((3, 3), (4, -1)), 8)  # twice in one group is for the reader to judge
    for index in range(1, SLOTS):
        producer.offer(str(index), BLOCKS, 8)
    with pytest.raises(BlockIdsInvalid, match="on offer already"):
        producer.offer("0", BLOCKS, 8)
    with pytest.raises(CapacityExceeded):
        producer.offer("one too many", BLOCKS, 8)
    producer.check()


@pytest.mark.parametrize(
    ("block_ids", "num_tokens", "group"),
    [(((1, 2, 3), (4,)), 8, 0), (((1,), (2, 3)), (4, 4), 1), (((1, 2), (3,)), 4, 0)],
)
async def test_more_blocks_than_tokens_are_refused(producer, block_ids, num_tokens, group):
    """The last block must hold the last token; a block behind it would shift everything by one."""
    with pytest.raises(BlockIdsInvalid, match="blocks for") as caught:
        producer.offer("r", block_ids, num_tokens)
    assert caught.value.group == group
    assert producer.snapshot().leases == 0


def test_a_request_has_one_state():
    with virtual(shape=Shape("state", 4, 1, "BLHNC", "content")) as world:
        (producer,) = world.producers
        with pytest.raises(BlockIdsInvalid, match="group 1: 2 blocks for 8 tokens, which at most 1 can hold"):
            world.do(lambda: producer.worker.offer("r", [[1, 2], [3, 4]], 8), life=producer)


@pytest.mark.parametrize("changed", ["engine_id", "incarnation"])
async def test_a_grant_for_another_worker_or_incarnation_is_refused(producer, changed):
    address = producer.rank_address
    if changed == "incarnation":
        address = replace(address, incarnation="1" * 32)
    mint = TicketMint("prefill-1" if changed == "engine_id" else "prefill-0", [address], cluster_secret=SECRET)
    _, grant = mint.offer("r", block_ids=[[1], [2]], num_tokens=4)
    with pytest.raises(BlockIdsInvalid, match="does not name this worker"):
        producer.admit(grant)


async def test_an_end_is_told_before_its_name_and_after_its_slot_is_free():
    """A hook that offers the next request must find a slot, and must not take this end for that of the same name."""
    refused = []

    def on_end(event):
        if isinstance(event, LeaseEnded) and not refused:
            with pytest.raises(BlockIdsInvalid, match="on offer already") as caught:
                producer.offer(event.request_id, BLOCKS, 8)
            refused.append(caught.value)
            producer.offer("next", BLOCKS, 8)

    async with producing(on_end) as producer:
        for index in range(SLOTS):
            producer.offer(str(index), BLOCKS, 8)
        producer.revoke("0")
        assert len(refused) == 1
        assert requests(producer) == ("1", "2", "next")
        with pytest.raises(CapacityExceeded):
            producer.offer("one too many", BLOCKS, 8)


async def test_a_hook_may_ask_and_act_when_it_hears_of_an_end():
    """A hook runs where the end happened; it must not wait for what its own thread holds."""
    heard = []

    def on_end(event):
        if isinstance(event, LeaseEnded) and event.request_id in "ab":
            heard.append((event.request_id, len(producer._leases.requests()), producer.revoke("b")))
            if event.request_id == "b":
                producer.offer("c", BLOCKS, 8)

    async with producing(on_end) as producer:
        for name in "ab":
            producer.offer(name, BLOCKS, 8)
        thread = threading.Thread(target=producer.revoke, args=("a",), daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert sorted(heard) == [("a", 1, True), ("b", 0, False)]
        assert requests(producer) == ("c",)


async def test_one_message_releases_short_lists_long_lists_and_shared_blocks(producer):
    lists = {"a": ((1, 2, 2, -1), (3, -1, -1, -1)), "c": ((1,) * (FEW_IDS + 1), (-1,) * (FEW_IDS + 1))}
    lists["b"] = lists["a"]
    for names in ("ab", "abc"):
        grants = [producer.offer(name, lists[name], 4 * len(lists[name][0])).grants[0] for name in names]
        leases = [(grant.slot, grant.epoch) for grant in grants]
        assert producer._leases.on_release(leases, ALONE) == ["ended"] * len(names)
        producer.check()
    producer._leases._account.check(lent=[])


async def test_blocks_on_offer_are_no_targets_and_targets_are_not_offered():
    """Any number of leases may hold a block, and it is free when the last has ended."""
    async with opened() as world:
        consumer = world.consumer
        await world.connect()
        consumer.offer("a", [[1, 2]], 8)
        consumer.offer("b", [[2, 3]], 8)
        for left, block in (("a", 1), ("b", 2)):
            error = world.start(blocks=(block, 7)).exception()
            assert isinstance(error, BlockIdsInvalid)
            assert "is on offer" in error.message
            consumer.revoke(left)
            consumer.check()
            world.producer.revoke("request-1")
        world.faults.hung.add(0)
        handle = world.start(blocks=(1, 2))
        with pytest.raises(BlockIdsInvalid, match="group 0: block 2 cannot be offered") as caught:
            consumer.offer("c", [[2, 3]], 8)
        assert caught.value.remedy
        assert consumer.snapshot().leases == 0
        world.faults.heal()
        await waited(handle)
        consumer.offer("c", [[2, 3]], 8)
        consumer.check()


def waiting(producer, name, *, block_ids=BLOCKS, timeout_s=None):
    return asyncio.ensure_future(producer.offer_when_possible(name, block_ids, 8, timeout_s=timeout_s))


async def test_a_caller_that_gives_up_leaves_the_line(full):
    line = [waiting(full, name) for name in "abc"]
    await turns(5)
    line[0].cancel()
    full.revoke("0")
    line[1].cancel()  # it has not run when the slot is given away
    assert (await waited(line[2]))[0].request_id == "c"
    assert requests(full) == ("1", "2", "c")
    assert line[0].cancelled()
    assert line[1].cancelled()


async def test_an_offer_that_gave_up_waiting_keeps_no_other_from_the_slot(full):
    task = waiting(full, "a")
    await turns(5)
    task.cancel()
    await asyncio.wait([task])
    full.revoke("0")
    assert full.offer("b", BLOCKS, 8).request_id == "b", "nobody is in line"


async def test_a_ticket_that_its_caller_never_gets_is_revoked(full, reports):
    task = waiting(full, "a")
    await turns(5)
    full.revoke("0")
    await asyncio.sleep(0)
    assert "a" in requests(full), "its ticket is made, and its caller has not run yet"
    task.cancel()
    await waited(task)
    assert task.cancelled()
    assert "a" not in requests(full)
    assert reports.of(LeaseEnded)[-1].request_id == "a"
    full.offer("b", BLOCKS, 8)


async def test_a_ticket_that_comes_at_the_end_of_the_wait_is_given(full, reports):
    """Its slot is given away after its caller began to wait, and before the timeout has run, which is due by then."""
    hasty = waiting(full, "hasty", timeout_s=0)

    async def serve():
        full.revoke("0")
        return await full.offer_when_possible("b", BLOCKS, 8, timeout_s=None)  # which serves those before it first

    patient = asyncio.ensure_future(serve())
    (ticket,) = await waited(hasty)
    assert ticket.request_id == "hasty"
    assert requests(full) == ("1", "2", "hasty")
    full.revoke("hasty")
    assert (await waited(patient))[0].request_id == "b"
    assert [end.request_id for end in reports.of(LeaseEnded)] == ["0", "hasty"]


async def test_callers_that_wait_are_bounded(full, monkeypatch):
    monkeypatch.setattr("kvflow.worker.producer.WAITING_MAX", 2)
    line = [waiting(full, name) for name in "ab"]
    await turns(5)
    with pytest.raises(CapacityExceeded, match="offers that wait") as caught:
        await waiting(full, "c")
    assert caught.value.limit == 2
    for task in line:
        task.cancel()
    await asyncio.wait(line)


class Broken:
    """Lists that fail in a way that nobody foresaw."""

    def __len__(self):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"name": "a", "block_ids": ((99,), (1,))}, BlockIdsInvalid),
        ({"name": ["unhashable"]}, ArgumentInvalid),
        ({"name": "a", "block_ids": Broken()}, ZeroDivisionError),
    ],
    ids=["blocks", "name", "lists"],
)
async def test_a_failing_offer_does_not_stop_the_offers_after_it(full, wrong, error):
    broken, right = waiting(full, **wrong), waiting(full, "b")
    await turns(5)
    full.revoke("0")
    failed, ticket = await waited(broken, right)
    assert isinstance(failed, error)
    assert ticket.request_id == "b"
    full.revoke("1")
    assert isinstance((await waited(waiting(full, **wrong)))[0], error)  # it finds a slot, and an empty line
    full.offer("c", BLOCKS, 8)


async def test_callers_that_wait_are_refused_when_the_worker_closes():
    async with producing() as producer:
        for index in range(SLOTS):
            producer.offer(str(index), BLOCKS, 8)
        line = [waiting(producer, name) for name in "ab"]
        await turns(5)
    assert [type(error) for error in await waited(*line, waiting(producer, "late"))] == [WorkerClosed] * 3
    with pytest.raises(WorkerClosed):
        producer.offer("late", BLOCKS, 8)


async def test_a_consumer_offers_nothing_and_holds_no_grant():
    async with open_worker(config(role="consumer"), cache_of(10, groups=TWO_GROUPS)) as consumer:
        with pytest.raises(ConfigInvalid, match="the role of this worker is consumer"):
            consumer.offer("r", BLOCKS, 8)
        mint = TicketMint("prefill-0", [consumer.rank_address], cluster_secret=SECRET)
        with pytest.raises(ConfigInvalid, match="the role of this worker is consumer"):
            consumer.admit(mint.offer("r", block_ids=BLOCKS, num_tokens=8)[1])
        assert not requests(consumer)
