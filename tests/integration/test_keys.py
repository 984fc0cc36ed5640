"""Workers with a key each: whom they meet, what a new list changes at once, and a change of secret without a pause."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from kvflow import errors
from kvflow.rendezvous.keys import draw_pair

from .consuming import until, works
from .producing import SECRET

BLOCKS = [[0, 1], [2, 3]]
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
        assert producer.worker.snapshot().rejected == {"key_unknown": 1}
        consumer.worker.allow_keys([STRANGER[1]])
        await refused(consumer, params, errors.AuthenticationFailed)
        assert consumer.worker.snapshot().dropped == {"key_removed": 1, "authentication_failed": 1}
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
        with pytest.raises(errors.PeerLost, match="not among our allowed keys"):
            await pulling
        gate.open()
        await consumer.worker.quiesced("r")


async def test_a_malformed_list_changes_nothing(near_world):
    async with three(near_world) as (producer, consumer, _):
        with pytest.raises(errors.ConfigInvalid):
            producer.worker.allow_keys([ANOTHER[1], "not a key"])
        await works(producer, consumer)


async def test_a_worker_that_shares_the_secret_has_no_list(near_world):
    async with near_world.producing() as producer:
        with pytest.raises(errors.ConfigInvalid, match="no key of its own"):
            producer.worker.allow_keys([])


@pytest.mark.parametrize("accepting", ["the producer", "the consumer"])
async def test_a_key_does_not_replace_the_secret_that_signs_tickets(near_world, accepting):
    """Two secrets are in use while one is changed, with or without keys."""
    other = {"cluster_secret": "the secret that comes next"}
    both = {"cluster_secret": SECRET, "cluster_secret_accepted": other["cluster_secret"]}
    theirs, ours = (both, other) if accepting == "the producer" else (other, both)
    async with (
        near_world.producing(**key(PRODUCER, CONSUMER), **theirs) as producer,
        near_world.consuming(**key(CONSUMER, PRODUCER), **ours) as consumer,
    ):
        if accepting == "the consumer":
            await works(producer, consumer)
        else:
            await refused(consumer, await producer.offer("r", BLOCKS, 8), errors.TicketInvalid)


@pytest.mark.parametrize("step", ["accept the next", "use the next", "forget the last"])
async def test_a_cluster_changes_its_secret_one_worker_at_a_time(near_world, step):
    last, following = "the secret that was", "the secret that comes next"
    before, after = {
        "accept the next": ((last, None), (last, following)),
        "use the next": ((last, following), (following, last)),
        "forget the last": ((following, last), (following, None)),
    }[step]
    for theirs, ours in ((before, after), (after, before)):
        async with (
            near_world.producing(cluster_secret=theirs[0], cluster_secret_accepted=theirs[1]) as producer,
            near_world.consuming(cluster_secret=ours[0], cluster_secret_accepted=ours[1]) as consumer,
        ):
            await works(producer, consumer)
