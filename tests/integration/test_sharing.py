"""One lease and several readers, one block and several leases: the law of blocks holds, and nobody is counted twice."""

import asyncio

import pytest

import kvflow
from kvflow import errors

from .consuming import until
from .test_ranks import engine

BLOCKS = [[0, 1], [2, 3]]
TARGETS = [[5, 4], [7, 6]]
PREFIX = [[0, 1], [2, 3]]
SHARERS = 10


async def ended(consumer, params):
    try:
        await consumer.pull(params, TARGETS)
    except errors.StaleLease as error:
        return "quarantined" if error.quarantined else error.code
    consumer.has("r", TARGETS, 8)
    return "right"


@pytest.mark.both_loops
async def test_two_engines_read_one_ticket_at_once(world):
    """The first that has it all ends the lease: the other one has the right bytes or an error, and nothing between."""
    async with (
        world.producing() as producer,
        world.consuming() as one,
        world.consuming(engine_id="decode-1") as other,
    ):
        ends = []
        for _ in range(10):
            params = await producer.offer("r", BLOCKS, 8)
            ends += await asyncio.gather(ended(one, params), ended(other, params))
            assert await producer.outcome("r") == "released"
            assert await producer.leases() == 0
            await producer.check()
        assert ends.count("right") >= 10
        assert set(ends) <= {"right", "stale_lease"}
        one.at_rest()
        other.at_rest()


async def test_ranks_of_different_engines_are_not_added_up(world):
    async with (
        world.producing() as producer,
        engine(world.consuming_whole, 2) as pair,
        engine(world.consuming_whole, 2, engine_id="decode-1") as others,
    ):
        params = await producer.offer("r", BLOCKS, 8)
        for consumer in (pair[0], others[0], pair[0]):
            assert await ended(consumer, params) == "right"
            assert await producer.leases() == 1
        assert await ended(others[1], params) == "right"
        assert await producer.outcome("r") == "released"
        assert await ended(pair[1], params) == "stale_lease"
        await producer.check()


async def test_one_of_two_ranks_is_not_enough(world):
    """The other one never comes: the lease runs out, and the blocks are the producer's again."""
    async with world.producing(lease_s=1.0) as producer, engine(world.consuming_whole, 2) as (consumer, _):
        params = await producer.offer("r", BLOCKS, 8)
        for _ in range(3):
            assert await ended(consumer, params) in ("right", "stale_lease")  # the machine may be slow
        assert await producer.outcome("r") == "expired"
        assert await producer.leases() == 0
        await producer.check()
        assert await ended(consumer, params) == "stale_lease"


async def test_a_prefix_is_shared_by_ten_leases(near_world):
    """Its blocks are lent until the last of them has ended, however each ends and in whatever order."""
    async with near_world.producing() as producer, near_world.consuming() as consumer:
        names = [f"r{number}" for number in range(SHARERS)]
        own = {name: [[10 + number], [20 + number]] for number, name in enumerate(names)}
        lists = {name: [PREFIX[group] + own[name][group] for group in (0, 1)] for name in names}
        await producer.write("prefix", PREFIX, 8)
        params = {name: await producer.offer_as_is(name, lists[name], 12) for name in names}
        elsewhere = await producer.offer("elsewhere", [[30], [31]], 4)
        for number, name in enumerate(names):
            with pytest.raises(errors.BlockIdsInvalid, match="is on offer"):
                await pull_into(producer, elsewhere, [[PREFIX[0][0]], [-1]])
            match number % 3:
                case 0:
                    await consumer.pull(params[name], [[*PREFIX[0], 4], [*PREFIX[1], 5]])
                    consumer.has("prefix", PREFIX, 8)
                case 1:
                    assert await producer.revoke(name)
                case 2:
                    pull = asyncio.create_task(consumer.pull(params[name], [[*PREFIX[0], 4], [*PREFIX[1], 5]]))
                    await producer.revoke(name)
                    with pytest.raises(errors.StaleLease):
                        await pull
            await until(lambda left=SHARERS - number: producer.worker.snapshot().leases == left)
            await producer.check()
            consumer.at_rest()
            consumer.worker._consumer._destinations.check()
        # Now they may be written into, for the first time.
        with pytest.raises(errors.BlockIdsInvalid, match="is on offer"):
            await pull_into(producer, elsewhere, [[30], [-1]])
        await producer.worker.pull(consumer_ticket(consumer), [[PREFIX[0][0]], [-1]])
        await producer.check()


def consumer_ticket(consumer):
    """An offer of the consumer's own: every worker is both."""
    return consumer.worker.offer("back", [[9], [-1]], 4)


async def pull_into(producer, params, targets):
    """Have the producer pull into blocks of its own; it is refused before anything is dialed."""
    await producer.worker.pull(kvflow.Ticket.from_params(params), targets)
