"""Workers with a key each: whom they meet, what a new list changes at once, and a change of secret without a pause."""

import asyncio
from contextlib import asynccontextmanager

import pytest

import kvflow
from kvflow import errors
from kvflow.rendezvous.issuer import draw_pair

from .consuming import until, works
from .producing import minting, write_and_admit
from .shapes import Shape

BLOCKS = [[0, 1], [2, 3]]
OTHER_BLOCKS = [[4, 5], [6, 7]]
LAST_BLOCKS = [[8, 9], [10, 11]]
PRODUCER, CONSUMER, ANOTHER, STRANGER = (draw_pair() for _ in range(4))


def key(pair, *trusted):
    return {"private_key": pair[0], "allowed_keys": tuple(public for _, public in trusted)}


@asynccontextmanager
async def three(world):
    """A producer, and two consumers of which it trusts the first."""
    async with (
        world.producing(**key(PRODUCER, CONSUMER)) as producer,
        world.consuming(**key(CONSUMER, PRODUCER)) as consumer,
        world.consuming(engine_id="decode-1", **key(ANOTHER, PRODUCER)) as another,
    ):
        yield producer, consumer, another


async def refused(consumer, params, kind):
    with pytest.raises(kind) as caught:
        await consumer.pull(params, BLOCKS)
    assert caught.value.remedy
    consumer.at_rest()


async def test_workers_meet_whom_they_trust_and_nobody_else(near_world):
    async with three(near_world) as (producer, consumer, another):
        assert producer.worker.rank_address.public_key == PRODUCER[1]
        await works(producer, consumer)
        params = await producer.offer("r", BLOCKS, 8)
        await refused(another, params, errors.AuthenticationFailed)
        await until(lambda: producer.worker.snapshot().rejected)  # its own socket tells the producer
        assert set(producer.worker.snapshot().rejected) == {"key_unknown"}  # once, or again by its release
        consumer.worker.allow_keys([STRANGER[1]])
        await refused(consumer, params, errors.AuthenticationFailed)
        dropped = consumer.worker.snapshot().dropped
        assert dropped.pop("key_removed") == 1
        assert set(dropped) == {"authentication_failed"}  # of the pull, and by now perhaps of its release
        consumer.worker.allow_keys([PRODUCER[1]])
        await consumer.pull(params, BLOCKS)
        consumer.has("r", BLOCKS, 8)


async def test_a_new_list_admits_and_drops_readers_at_once(near_world):
    async with three(near_world) as (producer, consumer, another):
        await works(producer, consumer)
        producer.worker.allow_keys([CONSUMER[1], ANOTHER[1]])
        await works(producer, another)
        producer.worker.allow_keys([ANOTHER[1]])
        await until(lambda: consumer.worker.snapshot().dropped)
        params = await producer.offer("r", BLOCKS, 8)
        await refused(consumer, params, errors.AuthenticationFailed)
        await another.pull(params, BLOCKS)
        another.has("r", BLOCKS, 8)
        assert producer.worker.snapshot().rejected["key_removed"] == 1


async def test_a_pull_from_a_producer_that_is_no_longer_trusted_fails(near_world, gate):
    async with three(near_world) as (producer, consumer, _):
        params = await producer.offer("r", BLOCKS, 8)
        pulling = asyncio.create_task(consumer.pull(params, BLOCKS))
        await until(gate.reached.is_set)
        consumer.worker.allow_keys([])
        with pytest.raises(errors.PeerLost, match="no longer among our allowed keys"):
            await pulling
        gate.open()
        await consumer.worker.quiesced("r")


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.parametrize("first", ["the impostor", "the real one"])
async def test_a_member_that_takes_the_name_of_another_is_not_taken_for_it(far_world, spawn, first):
    """It has the secret, a key that is allowed, and copies engine, rank, incarnation and epochs."""
    impostors = spawn()
    async with (
        far_world.producing(alike=True, **key(PRODUCER, CONSUMER)) as real,
        impostors.producing(Shape(), transport="nixl", alike=True, **key(ANOTHER, CONSUMER)) as impostor,
        far_world.consuming(**key(CONSUMER, PRODUCER, ANOTHER)) as consumer,
    ):
        met, other = (impostor, real) if first == "the impostor" else (real, impostor)
        await works(met, consumer, "met")
        await other.offer("met", BLOCKS, 8)
        assert await other.revoke("met")  # so that what both offer next has one slot and one epoch
        params = await real.offer("r", BLOCKS, 8)
        forged = await impostor.offer("forged", BLOCKS, 8)
        assert named(params) == named(forged)
        await consumer.pull(params, BLOCKS)
        consumer.has("r", BLOCKS, 8)
        assert await real.outcome("r") == "released"
        assert await impostor.held() == ["forged"]
        # Nor does its end, or its breach, keep the real one from being read.
        await consumer.pull(forged, OTHER_BLOCKS)
        consumer.has("forged", OTHER_BLOCKS, 8)
        impostors.kill()
        await until(lambda: consumer.worker.snapshot().dropped)
        await works(real, consumer, "after it")
        assert await real.leases() == 0


def named(params):
    """Whom a ticket names, and its lease."""
    (grant,) = kvflow.Ticket.from_params(params).grants
    return grant.engine_id, grant.ranks[0].rank, grant.ranks[0].incarnation, grant.slot, grant.epoch


@pytest.mark.parametrize("changes", ["another endpoint", "no key"])
async def test_a_worker_that_a_mint_names_otherwise_is_read_under_both_names(world, changes):
    """The tickets of one mint have its endpoint, those of a mint behind a gateway another; or a mint omits the key."""
    async with world.producing() as producer, world.consuming() as consumer:
        mint, params = await minting(producer), {}
        for request, blocks in (("first", BLOCKS), ("last", LAST_BLOCKS)):
            ticket, grant = mint.offer(request, block_ids=blocks, num_tokens=8)
            await write_and_admit(grant, producer)
            params[request] = ticket.to_params()
        await consumer.pull(params["first"], BLOCKS)
        assert await producer.outcome("first") == "released"
        if changes == "another endpoint":
            changed = {"endpoint": producer.endpoint.replace("127.0.0.1", "localhost")}
        else:
            changed = {"public_key": None}
        mint = await minting(producer, changed=changed)
        ticket, grant = mint.offer("minted", block_ids=OTHER_BLOCKS, num_tokens=8)
        await write_and_admit(grant, producer)
        await consumer.pull(ticket.to_params(), OTHER_BLOCKS)
        assert await producer.outcome("minted") == "released"
        await consumer.pull(params["last"], LAST_BLOCKS)
        assert await producer.outcome("last") == "released"
        for request, blocks in (("first", BLOCKS), ("minted", OTHER_BLOCKS), ("last", LAST_BLOCKS)):
            consumer.has(request, blocks, 8)
        assert consumer.worker.snapshot().dropped == {}
