"""Offers that wait for a slot: first come, first served, and none is held that nobody hears of."""

import asyncio

import pytest

from kvflow.cache.leases import LeaseEnded
from kvflow.errors import ArgumentInvalid, BlockIdsInvalid, CapacityExceeded, WorkerClosed, WorkerDraining
from kvflow.observability.events import OfferAdmitted

from .helpers import PATIENCE_S
from .test_producer import SLOTS, Producer


@pytest.fixture
async def full():
    """A producer whose slots are all taken, by requests that are named by numbers."""
    producer = Producer()
    for index in range(SLOTS):
        producer.offer(str(index))
    return producer


def waiting(producer, name, *, block_ids=((1, 2), (3,)), timeout_s=None):
    offering = producer.offers.offer_when_possible(name, block_ids, 8, timeout_s=timeout_s)
    return asyncio.ensure_future(offering)


async def turns(count=5):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_an_offer_that_finds_a_slot_does_not_wait():
    producer = Producer()
    ticket = await producer.offers.offer_when_possible("r", ((1,), (2,)), 4, timeout_s=0)
    assert ticket.request_id == "r"
    assert producer.keeper.held() == 1


async def test_first_come_first_served(full):
    line = [waiting(full, name) for name in "abc"]
    await turns()
    assert not any(task.done() for task in line)
    for index in range(SLOTS):
        full.keeper.revoke(str(index))
    async with asyncio.timeout(PATIENCE_S):
        tickets = await asyncio.gather(*line)
    assert [ticket.request_id for ticket in tickets] == ["a", "b", "c"]
    admitted = [event.request_id for event in full.reports.of(OfferAdmitted)]
    assert admitted[SLOTS:] == ["a", "b", "c"]


async def test_nobody_slips_in_before_those_who_wait(full):
    task = waiting(full, "patient")
    await turns()
    full.keeper.revoke("0")
    with pytest.raises(CapacityExceeded, match="leases") as caught:
        full.offer("impatient")
    assert "offer_when_possible" in caught.value.remedy
    async with asyncio.timeout(PATIENCE_S):
        assert (await task).request_id == "patient"
    full.keeper.revoke("1")
    full.offer("impatient")


async def test_whoever_gives_up_leaves_the_line(full):
    line = [waiting(full, name) for name in "abc"]
    await turns()
    line[0].cancel()
    line[1].cancel()
    full.keeper.revoke("0")  # before they have had their turn of the loop
    async with asyncio.timeout(PATIENCE_S):
        assert (await line[2]).request_id == "c"
    assert full.keeper.requests() == ("1", "2", "c")
    assert line[0].cancelled()
    assert line[1].cancelled()


async def test_a_ticket_that_nobody_will_hear_of_is_revoked(full):
    task = waiting(full, "a")
    await turns()
    full.keeper.revoke("0")
    full.offers.serve()
    assert "a" in full.keeper.requests()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "a" not in full.keeper.requests()
    assert full.reports.of(LeaseEnded)[-1].request_id == "a"
    full.offer("b")


async def test_waiting_has_an_end(full):
    with pytest.raises(CapacityExceeded, match="leases") as caught:
        await full.offers.offer_when_possible("a", ((1,), (2,)), 4, timeout_s=0.01)
    assert "0.01 s" in caught.value.remedy
    full.keeper.revoke("0")
    await turns()
    full.offer("b")
    assert full.keeper.requests() == ("1", "2", "b")


async def test_those_who_wait_are_bounded(full, monkeypatch):
    monkeypatch.setattr("kvflow.worker.offers.WAITING_MAX", 2)
    line = [waiting(full, name) for name in "ab"]
    await turns()
    with pytest.raises(CapacityExceeded, match="offers that wait") as caught:
        await waiting(full, "c")
    assert caught.value.limit == 2
    for task in line:
        task.cancel()
    await asyncio.wait(line)


async def test_a_wrong_offer_holds_up_nobody_behind_it(full):
    wrong, right = waiting(full, "a", block_ids=((99,), (1,))), waiting(full, "b")
    await turns()
    full.keeper.revoke("0")
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(BlockIdsInvalid):
            await wrong
        assert (await right).request_id == "b"


class Broken:
    """Lists that fail in a way that nobody foresaw."""

    def __iter__(self):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("wrong", "error"),
    [({"name": ["unhashable"]}, ArgumentInvalid), ({"name": "a", "block_ids": Broken()}, ZeroDivisionError)],
    ids=["name", "lists"],
)
async def test_an_offer_that_fails_in_any_way_stops_neither_those_behind_it_nor_later_ones(full, wrong, error):
    broken, right = waiting(full, **wrong), waiting(full, "b")
    await turns()
    full.keeper.revoke("0")
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(error):
            await broken
        assert (await right).request_id == "b"
    full.keeper.revoke("1")
    with pytest.raises(error):
        await waiting(full, **wrong)  # it finds a slot, and an empty line
    full.offer("c")


@pytest.mark.parametrize(("stop", "kind"), [("drain", WorkerDraining), ("close", WorkerClosed)])
async def test_those_who_wait_are_refused_when_the_worker_makes_no_promises_any_more(full, stop, kind):
    line = [waiting(full, name) for name in "ab"]
    await turns()
    getattr(full.keeper, stop)()
    full.offers.serve()
    for task in [*line, waiting(full, "late")]:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(WorkerClosed) as caught:
                await task
        assert type(caught.value) is kind
    with pytest.raises(kind):
        full.offer("late")


async def test_a_slot_is_free_when_its_end_is_told():
    """A hook that offers the next request at once must not find the table full of the one that has just ended."""
    offered = []

    def hook(event):
        if isinstance(event, LeaseEnded) and not offered:
            offered.append(producer.offer("next"))

    producer = Producer(hook)
    for index in range(SLOTS):
        producer.offer(str(index))
    producer.keeper.revoke("0")
    assert [grant.request_id for grant in offered] == ["next"]
    assert producer.keeper.held() == SLOTS
    with pytest.raises(CapacityExceeded):
        producer.offer("one too many")
