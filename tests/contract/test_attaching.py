"""All ranks of a ticket are linked, and our transport is connected to those that are read."""

import asyncio
import socket
from contextlib import asynccontextmanager

import msgspec
import pytest
import torch

from kvflow.errors import PeerLost, PeerRefused, StaleLease, TicketInvalid
from kvflow.events import BreakerClosed, BreakerOpened, PeerConnected
from kvflow.layout.shards import Shard
from kvflow.leases.tickets import join_tickets
from kvflow.rendezvous.issuer import TicketMint
from kvflow.worker.connections import FAILURES_MAX
from kvflow.worker.environment import PRODUCTION
from kvflow.worker.runtime import open_worker
from tests.unit.kvflow.worker.helpers import PATIENCE_S, SECRET, SPECS, Clock, cache_of
from tests.unit.kvflow.worker.pulling import FaultyNetwork, config, failure, opened

NAME = "tcp://127.0.0.1:1"
"""An address that leads to one worker after the other."""

EIGHT_HEADS = {"a": msgspec.structs.replace(SPECS["a"], num_kv_heads=8)}


def shard_of(rank, size):
    return cache_of(specs=EIGHT_HEADS, shard=Shard(tp_rank=rank, tp_size=size))


@asynccontextmanager
async def engines(source_size, target_rank, target_size, **how):
    """Open one rank of a decode engine, and every rank of a prefill engine whose heads differ from each other."""
    sources, target = [shard_of(rank, source_size) for rank in range(source_size)], shard_of(target_rank, target_size)
    async with opened(sources=sources, target=target, **how) as world:
        for source in sources:
            first, count, _ = source.held("a", "k")
            for role in ("k", "v"):
                source.component("a", role)[...] = torch.arange(first, first + count).view(-1, 1, 1)
        yield world


def attached(world):
    """Return the ranks to which the data plane is connected, by what the data plane was told and by the snapshot."""
    ranks = sorted(address.peer.rank for address in world.faults.called("add"))
    states = {int(each.name.split("/")[1]): each.state for each in world.consumer.snapshot().producers}
    assert states.keys() == set(range(len(world.producers))), "all are linked"
    assert sorted(rank for rank, state in states.items() if state == "connected") == ranks
    assert {state for rank, state in states.items() if rank not in ranks} <= {"linked"}
    return ranks


async def outcomes(world, name="request-1"):
    async with asyncio.timeout(PATIENCE_S):
        return {await producer.wait_offer(name) for producer in world.producers}


@pytest.mark.parametrize(
    ("source_size", "target_rank", "target_size", "read"),
    [(8, 0, 8, [0]), (8, 5, 8, [5]), (8, 1, 4, [2, 3]), (4, 5, 8, [2]), (8, 0, 1, [*range(8)])],
)
async def test_only_the_ranks_that_are_read_are_attached(source_size, target_rank, target_size, read):
    async with engines(source_size, target_rank, target_size) as world:
        for name in ("first", "second"):
            report = await world.pull(world.ticket(name))
            assert (report.transport, report.plane) == ("loopback", "loopback")
            assert attached(world) == read
            assert await outcomes(world, name) == {"released"}, "a release goes to all"
        first, count, _ = world.target.held("a", "k")
        for role in ("k", "v"):
            heads = world.target.component("a", role)[1:3, :, 0, 0]
            assert heads.tolist() == [list(range(first, first + count))] * 2
        assert sorted(int(each.peer.split("/")[1]) for each in world.of(PeerConnected)) == read


async def test_a_release_links_all_ranks_and_attaches_none():
    async with engines(8, 0, 8) as world:
        await world.consumer.release(world.ticket())
        assert await outcomes(world) == {"released"}
        assert attached(world) == []


async def test_a_rank_that_was_linked_alone_is_attached_once_it_is_read():
    """The ranks hold the same heads, so that one of them is enough."""
    network = FaultyNetwork()
    async with opened(sources=[cache_of(), cache_of()], network=network) as world:
        await world.pull()
        assert attached(world) == [0]
        other = world.producers[1]
        await world.pull(other.offer("alone", [[5, 6]], 8))
        assert attached(world) == [0, 1]
        assert world.holds((1, 2), (5, 6))
        assert len(network.dialed) == 2
        assert world.of(PeerConnected)[1].handshake_s < PATIENCE_S


async def test_an_unread_rank_is_checked_for_its_slot():
    async with opened(sources=[cache_of(), cache_of()], theirs={"lease_slots": 1}) as world:
        mint = TicketMint(
            "prefill-0", [msgspec.structs.replace(world.producers[1].rank_address, slots=2)], cluster_secret=SECRET
        )
        mint.offer("another", block_ids=[[3, 4]], num_tokens=8)
        late, _ = mint.offer("request-1", block_ids=[[3, 4]], num_tokens=8)
        error = await failure(world.start(join_tickets([world.producers[0].offer("request-1", [[3, 4]], 8), late])))
        assert isinstance(error, TicketInvalid)
        assert "prefill-0/1" in error.message
        assert "has no epoch slot 1" in error.message
        assert world.faults.called("add") == []


async def test_an_unread_rank_of_another_incarnation_ends_the_pull():
    async with opened(sources=[cache_of(), cache_of()]) as world:
        world.minted.add(1)
        late, _ = world.early("request-1", rank=1, incarnation="0" * 32)
        error = await failure(world.start(join_tickets([world.producers[0].offer("request-1", [[3, 4]], 8), late])))
        assert isinstance(error, StaleLease)
        assert "was restarted" in error.message
        assert world.faults.called("add") == []


async def test_a_rank_that_is_lost_while_another_is_attached_gives_nothing():
    network = FaultyNetwork()
    sources = [shard_of(0, 2), shard_of(1, 2), shard_of(1, 2)]
    async with opened(sources=sources, target=shard_of(0, 1), network=network) as world:
        first, second, equal = world.producers

        def joined(name, other):
            return join_tickets([each.offer(name, [[3, 4]], 8) for each in (first, other)])

        await world.pull(joined("before", second))
        world.faults.stuck.clear()
        handle = world.start(joined("lost", equal))
        await world.faults.strike()
        network.leaving.clear()
        network.cut(first.endpoint)
        world.faults.heal()
        error = await failure(handle)
        assert isinstance(error, PeerLost)
        assert "was lost while other ranks" in error.message
        network.leaving.set()
        await world.pull(joined("again", equal))


async def test_an_address_answers_although_nothing_is_read_there():
    """It has failed before, and is left alone no longer."""
    clock, network = Clock(), FaultyNetwork()
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))  # and does not listen
        nobody = "tcp://{}:{}".format(*dead.getsockname())
        async with opened(sources=[cache_of(), cache_of()], network=network, clock=clock) as world:
            network.draw = lambda: 1e6  # each pull dials once: the pause before the next dial is too long for it
            network.at[world.producers[1].endpoint] = [nobody]
            for at in range(FAILURES_MAX):
                assert isinstance(await failure(world.start(world.ticket(f"r{at}"))), PeerLost)
            assert len(world.of(BreakerOpened)) == 1
            del network.at[world.producers[1].endpoint]
            clock.now += 60.0
            await world.pull()
            assert attached(world) == [0]
            assert len(world.of(BreakerClosed)) == 1


async def test_who_was_only_linked_at_an_address_keeps_no_other_peer_from_it():
    clock, network = Clock(), FaultyNetwork()
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        nobody = "tcp://{}:{}".format(*dead.getsockname())
        environment = msgspec.structs.replace(PRODUCTION, network=network)
        async with (
            open_worker(config(advertise=NAME), cache_of(), environment=environment) as one,
            open_worker(config("prefill-1", advertise=NAME), cache_of(), environment=environment) as other,
            opened(ranks=0, network=network, clock=clock) as world,
        ):
            network.draw = lambda: 1e6
            tickets = [each.offer("request-1", [[3, 4]], 8) for each in (one, other)]
            network.at[NAME] = [nobody]
            for at in range(FAILURES_MAX + 1):
                assert isinstance(await failure(world.start(tickets[at % 2])), PeerLost)
            clock.now += 60.0
            network.at[NAME] = list(network.listening[:2])
            await world.consumer.release(tickets[0])
            await world.pull(tickets[1])


FULL = {"peers_max": 1, "handshake_s": 1.0}


async def test_a_pull_that_meets_a_full_peer_dials_again_until_there_is_room():
    network = FaultyNetwork()
    async with asyncio.timeout(PATIENCE_S), opened(network=network, theirs=FULL) as world:
        async with open_worker(config("decode-1"), cache_of()) as other:
            await other.pull(world.ticket("first"), [[1, 2]])
            handle = world.start(world.ticket("second"))
            await network.heard(2)
            assert not handle.done()
        await handle
        assert world.holds((1, 2), (3, 4))


async def test_a_pull_of_a_full_peer_fails_at_its_deadline():
    async with (
        asyncio.timeout(PATIENCE_S),
        opened(theirs=FULL, queue_s=0.1) as world,
        open_worker(config("decode-1"), cache_of()) as other,
    ):
        await other.pull(world.ticket("first"), [[1, 2]])
        error = await failure(world.start(world.ticket("second")))
        assert isinstance(error, PeerRefused)
        assert error.refusal == "too_many_peers"
        assert (await world.record()).peer == f"prefill-0/0/{world.producer.incarnation}"
