"""A worker hears its readers: each is the rank of its first words, and its releases count for that rank."""

import asyncio

import msgspec
import pytest

from handshake.limits import Limits
from handshake.messages import LeaseRef, Release
from handshake.sockets import ZEROMQ
from kvflow.errors import ConfigInvalid
from kvflow.events import ConsumerRejected
from kvflow.worker.runtime import open_worker
from tests.helpers.waiting import patiently, until
from tests.unit.kvflow.worker.helpers import lease_of
from tests.unit.kvflow.worker.pulling import FaultyNetwork

from .helpers import OURS, PATIENCE_S, READER_INCARNATION, SECURITY, cache_of, config, linked, producing, side


async def ended(producer, name):
    return await patiently(producer.wait_offer(name))


async def test_a_lease_ends_when_every_rank_of_a_reader_has_released_it():
    ranks = [side(READER_INCARNATION, engine_id="decode-0", rank=rank, num_ranks=2) for rank in range(2)]
    async with producing() as producer, linked(producer, local=ranks[0]) as first:
        tickets = [producer.offer(name, [[1]], 4) for name in ("one", "both", "again")]
        async with linked(producer, local=ranks[1]) as second:
            for link in (first, first, second):
                link.release([lease_of(tickets[1]), (99, 99)], read=True)
            assert await ended(producer, "both") == "released"
        second.release([lease_of(tickets[0])], read=True)  # it has left, and nobody hears it
        first.release([lease_of(tickets[0])], read=True)
        async with linked(producer) as alone:
            alone.release([lease_of(tickets[2])], read=True)
            assert await ended(producer, "again") == "released"
        assert producer._leases.requests() == ("one",)


@pytest.mark.parametrize(("said", "end"), [(True, "used"), (False, "released")])
async def test_a_lease_was_used_if_its_reader_says_that_it_has_read(said, end):
    async with producing() as producer, linked(producer) as link:
        ticket = producer.offer("r", [[1]], 4)
        slot, epoch = lease_of(ticket)
        link._client.send(Release(leases=(LeaseRef(slot=slot, epoch=epoch),), read=said))
        assert (await link.ask_end(lease_of(ticket), within_s=PATIENCE_S)).ended_by == end


async def test_a_reader_that_breaks_the_protocol_is_reported_by_name():
    heard, network = asyncio.Queue(), FaultyNetwork()
    local = msgspec.structs.replace(OURS, network=network)
    async with producing(heard.put_nowait) as producer, linked(producer, local=local):
        network.channels[producer.endpoint].send([b"not a message"])
        rejected = await next_of(heard)
        assert (rejected.peer, rejected.code) == (f"decode-0/0/{READER_INCARNATION}", "protocol_violation")


async def test_a_stranger_is_reported_by_its_connection():
    heard = asyncio.Queue()
    async with (
        producing(heard.put_nowait) as producer,
        ZEROMQ.open_dialer(producer.endpoint, SECURITY, Limits()) as channel,
    ):
        channel.dial()
        channel.send([b"not a message"])
        rejected = await next_of(heard)
        assert rejected.peer
        assert "decode" not in rejected.peer


async def next_of(heard):
    async with asyncio.timeout(PATIENCE_S):
        while not isinstance(event := await heard.get(), ConsumerRejected):
            pass
    return event


async def test_a_reader_that_leaves_in_peace_is_forgotten():
    heard = []
    async with producing(heard.append) as producer:
        listener = producer._listener
        async with linked(producer):
            await until(lambda: len(listener._readers) == 1)  # linked before the producer knows
        await until(lambda: not listener._readers)
        assert listener._names == {}
    assert not [event for event in heard if isinstance(event, ConsumerRejected)]


@pytest.mark.parametrize("bind", ["tcp://nowhere.invalid:5000", "tcp://203.0.113.7:5000"])
async def test_an_address_that_cannot_be_bound_is_a_matter_of_configuration(bind):
    with pytest.raises(ConfigInvalid):
        async with open_worker(config(bind=bind), cache_of()):
            pytest.fail("it listens")


async def test_a_reader_is_known_by_the_key_that_it_has_proved():
    """Releases that arrive before their leases are bounded for each key."""
    async with producing() as producer, linked(producer) as link, linked(producer, local=side("c" * 32)) as other:
        for each in (link, other):
            await each.ask_end((0, 1), within_s=PATIENCE_S)
        readers = producer._listener._readers.values()
        assert {reader.engine_id for reader in readers} == {"decode-0", "prefill-0"}
        assert {reader.public_key for reader in readers} == {SECURITY.client.public_key}
