"""Many pulls as one batch: handed over together, and each succeeds or fails alone."""

import asyncio

import pytest

from kvflow.errors import (
    ArgumentInvalid,
    BlockIdsInvalid,
    CapacityExceeded,
    StaleLease,
    TicketInvalid,
    TransferCancelled,
)
from kvflow.events import PeerConnected
from kvflow.worker.runtime import open_worker
from tests.helpers.waiting import patiently

from .helpers import cache_of
from .pulling import config, failure, opened


@pytest.fixture
async def world():
    async with opened(num_blocks=32, inline_s_max=0) as world:
        yield world


def items_of(world, count=6):
    """One pull for each of the first blocks, each with a name of its own."""
    return [(world.ticket(f"r{at}", (at,)), [[at]], f"ours {at}") for at in range(1, count + 1)]


async def outcomes(handles):
    return await patiently(asyncio.gather(*handles, return_exceptions=True))


async def test_a_batch_is_handed_over_at_once_and_shares_a_chunk_and_its_checks(world):
    await world.connect()
    world.faults.calls.clear()
    world.faults.chunks.clear()
    handles = world.consumer.pull_many(items_of(world), priority=2)
    (reads,) = world.faults.batches
    assert {read.priority for read in reads} == {2}
    reports = await outcomes(handles)
    assert [report.request_id for report in reports] == [f"r{at}" for at in range(1, 7)]
    assert world.holds(range(1, 7), range(1, 7))
    assert world.faults.chunks == [[read.read_id for read in reads]]
    records = await world.records(6)
    assert {name: record.local_request_id for name, record in records.items()} == {
        f"r{at}": f"ours {at}" for at in range(1, 7)
    }
    for at in range(1, 7):
        assert await patiently(world.producer.wait_offer(f"r{at}")) == "released"


async def test_a_batch_of_peers_that_are_not_met_connects_each_once(world):
    reports = await outcomes(world.consumer.pull_many(items_of(world)))
    assert [report.nbytes > 0 for report in reports] == [True] * 6
    assert len(world.of(PeerConnected)) == 1
    assert world.holds(range(1, 7), range(1, 7))


async def test_a_batch_of_nothing_is_nothing(world):
    assert world.consumer.pull_many([]) == []
    assert world.faults.batches == []


async def test_the_name_of_the_request_may_be_left_out(world):
    (handle,) = world.consumer.pull_many(iter([(world.ticket(), [[1, 2]])]))
    await outcomes([handle])
    assert (await world.record()).local_request_id == ""


@pytest.mark.parametrize("connected", [True, False])
async def test_pulls_that_cannot_be_posted_fail_alone(world, connected):
    if connected:
        await world.connect()
    async with open_worker(config("prefill-1", cluster_secret="another secret of the tests"), cache_of()) as stranger:
        forged = stranger.offer("forged", [[3]], 4)
    right = items_of(world)
    wrong = {
        "out of bounds": ((world.ticket("out of bounds", (7,)), [[32]]), BlockIdsInvalid),
        "twice": ((world.ticket("twice", (7,)), [[8, 8]]), BlockIdsInvalid),
        "forged": ((forged, [[9]]), TicketInvalid),
        "": (({"kvflow": {}}, [[9]]), ArgumentInvalid),
    }
    items = [*right[:3], *(item for item, _ in wrong.values()), *right[3:]]
    handles = world.consumer.pull_many(items)
    ends = await outcomes(handles)
    assert [type(end) for end in ends[3:-3]] == [kind for _, kind in wrong.values()]
    assert [end.request_id for end in ends[:3] + ends[-3:]] == [f"r{at}" for at in range(1, 7)]
    assert world.holds(range(1, 7), range(1, 7))
    records = await world.records(10)
    for name, (_, kind) in wrong.items():
        assert records[name].code == kind.code


async def test_of_two_pulls_of_a_batch_into_one_block_the_first_goes_on(world):
    await world.connect()
    world.faults.hung.add(0)
    items = [(world.ticket(f"r{at}", (at,)), [[5]]) for at in (1, 2)]
    first, second = world.consumer.pull_many(items)
    assert isinstance(await failure(second), BlockIdsInvalid)
    world.faults.heal()
    await outcomes([first])
    assert world.holds((5,), (1,))


@pytest.mark.parametrize("item", [None, 7, (), ("one",), "ab", (1, 2, 3, 4)], ids=repr)
async def test_what_is_no_item_fails_alone(world, item):
    right = items_of(world, 2)
    handles = world.consumer.pull_many([right[0], item, right[1]])
    ends = await outcomes(handles)
    assert isinstance(ends[1], ArgumentInvalid)
    assert [end.request_id for end in (ends[0], ends[2])] == ["r1", "r2"]


async def test_an_iterable_that_fails_starts_nothing(world):
    def items():
        yield from items_of(world, 2)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        world.consumer.pull_many(items())
    assert world.consumer.snapshot().pulls == 0
    await world.pull()


@pytest.mark.parametrize("inline_s_max", [0.0, 60.0])
async def test_pulls_whose_leases_have_ended_fail_alone(inline_s_max):
    async with opened(num_blocks=32, inline_s_max=inline_s_max) as world:
        await world.connect()
        items = items_of(world)
        for name in ("r2", "r5"):
            world.producer.revoke(name)
        handles = world.consumer.pull_many(items)
        ends = await outcomes(handles)
        assert [isinstance(end, StaleLease) for end in ends] == [False, True, False, False, True, False]
        assert not any(end.quarantined for end in ends if isinstance(end, StaleLease))
        records = await world.records(6)
        codes = {name: getattr(record, "code", "") for name, record in records.items()}
        assert codes == {f"r{at}": "stale_lease" if at in {2, 5} else "" for at in range(1, 7)}
        for handle in handles:
            await handle.quiesced()


async def test_a_batch_that_is_too_large_is_cut_before_anything_is_posted():
    async with opened(num_blocks=32, inline_s_max=0, pulls_max=4) as world:
        await world.connect()
        before = len(world.faults.batches)
        ends = await outcomes(world.consumer.pull_many(items_of(world)))
        assert [isinstance(end, CapacityExceeded) for end in ends] == [False] * 4 + [True] * 2
        assert [len(reads) for reads in world.faults.batches[before:]] == [4]


@pytest.mark.parametrize("inline_s_max", [0.0, 60.0])
async def test_a_callback_may_cancel_other_pulls_of_its_turn(inline_s_max):
    async with opened(num_blocks=32, inline_s_max=inline_s_max) as world:
        world.minted.add(0)
        await world.connect()
        for turn in range(3):
            ticket, admit = world.early(f"early {turn}", (9,))
            items = [(world.ticket(f"r{turn}", (1,)), [[1]]), (ticket, [[9]]), (world.ticket(f"s{turn}", (2,)), [[2]])]
            before = [world.start(world.ticket(f"{turn}.{at}", (at,)), (at,)) for at in range(10, 20)]
            # The turn has taken so long by now that these are posted together, at its end.
            first, early, last = [world.consumer.start_pull(*item) for item in items]
            first.on_quiesced(lambda _, others=(early, last): [other.cancel() for other in others])
            ends = await outcomes([first, early, last])
            await outcomes(before)
            assert ends[0].nbytes
            assert isinstance(ends[1], TransferCancelled)
            for handle in (early, last):
                await handle.quiesced()
            world.consumer.check()
            admit()


async def test_canceling_one_pull_of_a_batch_leaves_the_others(world):
    await world.connect()
    world.faults.hung.add(0)
    handles = world.consumer.pull_many(items_of(world))
    await world.faults.strike()
    handles[2].cancel()
    error = await failure(handles[2])
    assert isinstance(error, TransferCancelled)
    assert error.quarantined
    world.faults.heal()
    ends = await outcomes(handles)
    assert [isinstance(end, TransferCancelled) for end in ends] == [False, False, True, False, False, False]
    await patiently(handles[2].quiesced())
    await world.records(6)


async def test_one_chunk_that_fails_ends_each_of_its_pulls(world):
    await world.connect()
    world.faults.failing[0] = "bounds"
    handles = world.consumer.pull_many(items_of(world))
    ends = await outcomes(handles)
    assert {end.code for end in ends} == {"protocol_violation"}
    records = await world.records(6)
    assert {record.cause for record in records.values()} == {"bounds"}
    world.faults.heal()
    await world.pull()
