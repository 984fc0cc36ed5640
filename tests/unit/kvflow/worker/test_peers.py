"""Producers as a consumer sees them: connected once for all pulls, lost, restarted, moved, and connected again."""

import asyncio
import socket
from contextlib import asynccontextmanager

import msgspec
import pytest

from handshake import CurveKeys
from kvflow.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    FailureCode,
    LayoutMismatch,
    PeerLost,
    PeerUnavailable,
    StaleLease,
    TransferCancelled,
    TransferFailed,
    WorkerClosed,
)
from kvflow.events import LayersOmitted, PeerConnected, PeerDropped
from kvflow.layout.groups import Group
from kvflow.layout.shards import Shard
from kvflow.leases.tickets import join_tickets
from kvflow.worker import open_pulls, prepared
from kvflow.worker.connections import FAILURES_MAX
from kvflow.worker.environment import PRODUCTION
from kvflow.worker.peers import PeerPool
from kvflow.worker.prepared import PreparedTable
from kvflow.worker.runtime import open_worker
from tests.helpers.waiting import patiently, until

from .helpers import PATIENCE_S, SPECS, Clock, cache_of, turns
from .pulling import Faults, FaultyNetwork, config, failure, issued_before, opened, with_faults

ADDRESS = "tcp://127.0.0.1:1"
"""An address that leads to one producer after the other."""


@pytest.fixture
async def network():
    return FaultyNetwork()


@pytest.fixture
async def world(network):
    async with opened(network=network) as world:
        yield world


@asynccontextmanager
async def living(network, cache=None, **settings):
    """Open a producer, in a new incarnation, where ``ADDRESS`` leads to from now on."""
    environment = msgspec.structs.replace(PRODUCTION, network=network)
    async with open_worker(
        config(advertise=ADDRESS, **settings), cache or cache_of(), environment=environment
    ) as worker:
        network.at[ADDRESS] = [network.listening[-1]]
        yield worker


def offered(worker, name="request-1", blocks=(3, 4)):
    return worker.offer(name, [list(blocks)], 4 * len(blocks))


def named(ticket):
    (member,) = ticket.members()
    return str(member.peer)


async def ended(worker, name="request-1"):
    """Return how an offer has ended."""
    return await patiently(worker.wait_offer(name))


async def test_pulls_that_start_together_share_one_connection():
    network = FaultyNetwork(ahead_s=-2.5)
    async with opened(network=network) as world:
        endpoint = world.producer.endpoint
        network.hold(endpoint)
        handles = [world.start(world.ticket(f"r{at}", (at,)), (at,)) for at in range(3)]
        await network.heard(1)
        handles[0].cancel()  # the others go on
        assert isinstance(await failure(handles[0]), TransferCancelled)
        network.let(endpoint)
        await patiently(asyncio.gather(*handles[1:]))
        assert world.holds((1, 2), (1, 2))
        assert network.dialed == [endpoint]
        (event,) = world.of(PeerConnected)
        assert (event.peer, event.endpoint) == (named(world.ticket("another")), endpoint)
        assert (event.transport, event.transport_known_by, event.plane) == ("loopback", "kind", "loopback")
        assert event.clock_ahead_s == pytest.approx(2.5, abs=1.0)


@pytest.mark.parametrize("changed", ["endpoint", "public_key"])
async def test_a_name_with_another_endpoint_or_key_is_another_peer(world, network, changed):
    world.minted.add(0)
    await world.connect()
    endpoint = world.producer.endpoint
    network.at[ADDRESS] = [endpoint]
    ticket, admit = world.early(**{changed: ADDRESS if changed == "endpoint" else None})
    admit()
    await world.pull(ticket)
    assert len(network.dialed) == len(world.of(PeerConnected)) == 2
    network.cut(network.dialed[-1])
    await world.heard(PeerDropped)
    await world.pull(world.ticket("again"))
    assert (len(network.dialed), len(world.of(PeerDropped))) == (2, 1), "the first is connected all the time"


async def test_a_lost_peer_is_told_once_and_connected_again_when_needed(world, network):
    await world.connect()
    network.cut(world.producer.endpoint)
    (dropped,) = await world.heard(PeerDropped)
    assert (dropped.peer, dropped.code) == (named(world.ticket("another")), "peer_lost")
    assert world.consumer.snapshot().dropped == {"peer_lost": 1}
    assert [gone for _, gone in world.faults.called("remove")] == [False], "it may come again"
    await turns(50)
    assert len(network.dialed) == 1
    await world.pull(world.ticket("again"))
    assert len(network.dialed) == 2


async def test_a_peer_that_was_lost_is_dialed_again_at_a_drawn_moment(world, network, monkeypatch):
    monkeypatch.setattr("kvflow.worker.connections.SPREAD_S", PATIENCE_S)
    await world.connect()
    network.draw = lambda: 0.5
    network.cut(world.producer.endpoint)
    await world.heard(PeerDropped)
    handle = world.start()
    await turns(50)
    assert len(network.dialed) == 1
    handle.cancel()


async def test_a_peer_that_said_goodbye_is_closed_and_never_dialed(network):
    async with opened(ranks=0, network=network) as world:
        async with living(network) as producer:
            await world.pull(offered(producer))
            late = offered(producer, "late")
        (dropped,) = await world.heard(PeerDropped)
        assert dropped.code == "peer_closed"
        assert [gone for _, gone in world.faults.called("remove")] == [True]
        for ask in (world.pull, world.consumer.release):
            with pytest.raises(StaleLease, match="it said goodbye"):
                await ask(late)
        await turns(50)
        assert len(network.dialed) == 1


async def test_a_successor_is_dialed_by_its_own_pull_and_the_old_ones_once(network):
    async with (
        living(network) as older,
        living(network) as old,
        living(network) as new,
        opened(ranks=0, network=network) as world,
    ):
        late = offered(old, "late")
        with pytest.raises(StaleLease, match="was restarted"):
            await world.pull(issued_before(offered(old), -1))
        with pytest.raises(StaleLease, match="was restarted"):
            await world.pull(offered(older))
        await turns(50)
        assert len(network.dialed) == 2
        await world.pull(offered(new))
        with pytest.raises(StaleLease, match="is closed"):
            await world.pull(late)
        assert len(network.dialed) == 3
        assert len(world.of(PeerConnected)) == 1
        assert [gone for _, gone in world.faults.called("remove")] == [True] * 2


async def test_an_answer_of_a_successor_ends_the_peer_that_was_there_before(network):
    async with living(network) as old, opened(ranks=0, network=network) as world:
        await world.pull(offered(old))
        late = offered(old, "late")
        await world.pull(issued_before(offered(old, "newest"), -1))
        async with living(network) as new:
            await world.pull(offered(new))
            (dropped,) = await world.heard(PeerDropped)
            assert (dropped.peer, dropped.code) == (named(offered(old, "another")), "peer_lost")
            with pytest.raises(StaleLease, match="answers at its address"):
                await world.pull(late)
            assert len(network.dialed) == 2


async def test_a_dead_address_is_dialed_some_times_and_then_left_alone(network):
    clock = Clock()
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))  # and does not listen
        nobody = "tcp://{}:{}".format(*dead.getsockname())
        async with living(network) as producer, opened(ranks=0, network=network, clock=clock) as world:
            network.draw = lambda: 1e6  # each pull dials once: the pause before the next dial is too long for it
            alive, network.at[ADDRESS] = network.at[ADDRESS], [nobody]
            ticket = offered(producer)
            for _ in range(FAILURES_MAX):
                with pytest.raises(PeerLost):
                    await world.pull(ticket)
            assert len(world.of(PeerDropped)) == FAILURES_MAX
            dialed = len(network.dialed)
            for ask in (world.pull, world.consumer.release):
                with pytest.raises(PeerUnavailable) as caught:
                    await ask(ticket)
                assert caught.value.retry_after_s > 0
            assert len(network.dialed) == dialed
            network.at[ADDRESS] = alive
            clock.now += 60.0
            async with asyncio.timeout(PATIENCE_S):  # one dials, and the others wait for it
                await asyncio.gather(*(world.pull(ticket, (block,)) for block in (1, 2, 3)))
            assert len(network.dialed) == dialed + 1


async def test_a_peer_that_is_lost_when_its_plan_is_made_gives_nothing(world, network, monkeypatch):
    shares = PreparedTable.shares

    async def lose(self, peers):
        found = await shares(self, peers)
        network.cut(world.producer.endpoint)
        return found

    network.leaving.clear()  # its lists are there until its connection has ended
    monkeypatch.setattr(PreparedTable, "shares", lose)
    try:
        error = await failure(world.start())
    finally:
        network.leaving.set()
    assert isinstance(error, PeerLost)
    assert "was lost while" in error.message
    assert world.faults.batches == []


@pytest.mark.parametrize("state", ["is being left", "is gone", "is connected again"])
async def test_a_rank_that_is_lost_while_another_is_connected_gives_nothing(network, state):
    async with opened(ranks=2, network=network) as world:
        first, second = world.producers
        connections = world.consumer._consumer.peers._connections

        async def link():
            """Link the first rank, until it is known that its cache can fill ours."""
            await world.consumer.release(offered(first))
            await until(lambda: any(each.readable for each in connections.values() if each.member.address.rank == 0))

        await link()
        network.hold(second.endpoint)
        handle = world.start(world.ticket("both"))
        await network.heard(2)
        if state == "is being left":
            network.leaving.clear()
        network.cut(first.endpoint)
        if state != "is being left":
            await world.heard(PeerDropped)
        if state == "is connected again":
            await link()
        network.let(second.endpoint)
        error = await failure(handle)
        assert isinstance(error, PeerLost)
        assert "while other ranks" in error.message
        assert world.faults.called("prepare") == []
        network.leaving.set()
        await world.pull(world.ticket("again"))


@pytest.mark.parametrize("stage", ["not begun", "dialing", "linked"])
async def test_closing_does_not_wait_for_a_peer_that_is_being_connected(network, stage):
    faults, dropped = Faults(), []

    def on_event(event):
        if isinstance(event, PeerDropped):
            dropped.append((event.peer, event.code, event.detail))
            faults.heal()

    environment = msgspec.structs.replace(with_faults(faults), network=network)
    async with asyncio.timeout(PATIENCE_S), open_worker(config(), cache_of()) as producer:
        async with open_worker(config("decode-1"), cache_of(), hooks=[on_event], environment=environment) as consumer:
            if stage == "dialing":
                network.hold(producer.endpoint)
            faults.stuck.clear()
            handle = consumer.start_pull(offered(producer), [[1, 2]])
            if stage == "not begun":
                await turns(2)  # its task exists, and has not taken its first step
            elif stage == "dialing":
                await network.heard(1)
            else:
                await faults.strike()
        error = await failure(handle)
        assert isinstance(error, TransferCancelled)
        assert dropped == [(named(offered(producer, "another")), "closing", "the worker is closing")]
        assert len(network.dialed) == (stage != "not begun")


async def test_a_closed_worker_does_not_connect_a_peer_that_it_is_leaving(network):
    environment = msgspec.structs.replace(PRODUCTION, network=network)
    async with asyncio.timeout(PATIENCE_S), open_worker(config(), cache_of()) as producer:
        async with open_worker(config("decode-1"), cache_of(), environment=environment) as consumer:
            await consumer.pull(offered(producer), [[1, 2]])
            network.leaving.clear()
            network.cut(producer.endpoint)
            late = asyncio.ensure_future(consumer.release(offered(producer, "late")))
            await turns(50)
            asyncio.get_running_loop().call_soon(network.leaving.set)
        with pytest.raises(WorkerClosed):
            await late


async def test_a_peer_can_be_released_before_it_can_be_read_from(world):
    world.faults.stuck.clear()
    handle = world.start()
    await world.faults.strike()
    await world.consumer.release(world.ticket("unread", (5,)))
    assert await ended(world.producer, "unread") == "released"
    assert not handle.done()
    world.faults.heal()
    await patiently(handle)


async def test_a_data_plane_that_connects_to_nobody_has_a_deadline(world, monkeypatch):
    attach = PeerPool._attach

    async def attach_soon(pool, link, connection):
        limits = msgspec.structs.replace(pool._local.limits, handshake_s=0.1)
        with monkeypatch.context() as patch:  # for the data plane alone: to be linked may take as long as it takes
            patch.setattr(pool, "_local", msgspec.structs.replace(pool._local, limits=limits))
            return await attach(pool, link, connection)

    world.faults.stuck.clear()
    with monkeypatch.context() as patch:
        patch.setattr(PeerPool, "_attach", attach_soon)
        error = await failure(world.start())
    assert isinstance(error, DeadlineExceeded)
    (dropped,) = await world.heard(PeerDropped)
    assert (dropped.code, dropped.peer, error.phase) == ("deadline_exceeded", error.peer, "handshake")
    world.faults.heal()  # it has connected after all, and nobody waits
    await world.pull(world.ticket("again"))


async def test_a_peer_that_the_data_plane_loses_is_dropped(world):
    world.faults.refused = "peer_lost"
    error = await failure(world.start())
    assert isinstance(error, PeerLost)
    assert "as the test says" in error.message
    (dropped,) = await world.heard(PeerDropped)
    assert dropped.code == "peer_lost"


@pytest.mark.parametrize("why", ["another data plane", "the data plane finds no way"])
async def test_a_peer_that_no_data_plane_can_read_stays_linked(network, why):
    plane = "tcp" if why == "another data plane" else "loopback"
    async with opened(network=network, theirs={"transport": plane}) as world:
        world.faults.refused = FailureCode.PLANE_UNFIT
        for _ in range(2):
            error = await failure(world.start(world.ticket("unread")))
            assert isinstance(error, LayoutMismatch)
            assert (error.field, error.source) == ("transport", plane)
            assert error.target == "loopback" if plane == "tcp" else "as the test says" in error.target
            assert "transport to 'auto'" in error.remedy
            world.producer.revoke("unread")
        await world.consumer.release(world.ticket())
        assert await ended(world.producer) == "released"
        assert len(network.dialed) == 1
        assert world.of(PeerDropped) == []


@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        ("kvflow.worker.connections.PlaneNegotiation.address", TransferFailed),
        ("kvflow.worker.peers.count_unread_layers", PeerLost),  # when the peer could be read from already
    ],
)
async def test_a_defect_of_ours_ends_one_peer_and_it_is_tried_again(world, network, monkeypatch, broken, kind):
    def divide(*_):
        raise ZeroDivisionError("by zero")

    with monkeypatch.context() as patch:
        patch.setattr(broken, divide)
        handles = [world.start(world.ticket(f"r{at}", (at,)), (at,)) for at in range(2)]
        for handle in handles:
            assert type(await failure(handle)) is kind
    (dropped,) = await world.heard(PeerDropped)
    assert (dropped.code, dropped.detail) == ("transfer_failed", "ZeroDivisionError('by zero')")
    await world.pull()
    assert len(network.dialed) == 2


async def test_a_stage_with_none_of_our_layers_is_connected_and_gives_nothing():
    sources = [cache_of(specs={"of another stage": SPECS["a"]}), cache_of()]
    async with opened(sources=sources) as world:
        error = await failure(world.start(offered(world.producers[0], "alone")))
        assert isinstance(error, LayoutMismatch)
        assert (error.field, error.source, error.target) == ("layers", ["of another stage"], ["a", "b"])
        await world.pull()
        assert world.holds((1, 2), (3, 4))
        assert {prepared_list.peer.rank for prepared_list in world.faults.called("prepare")} == {1}
        assert [await ended(producer) for producer in world.producers] == ["released"] * 2


DRAFTING = SPECS | {"draft": SPECS["a"]}


async def test_layers_that_we_can_rebuild_are_left_unread_and_told_once():
    target = cache_of(specs=DRAFTING, rebuilt=["draft"])
    target.component("draft", "k").fill_(7)
    async with opened(target=target) as world:
        for request_id in ("first", "second"):
            await world.pull(world.ticket(request_id))
        for name in SPECS:
            assert bool((target.views[name][1] == 4).all()), "the layers of both are read"
        assert bool((target.component("draft", "k") == 7).all()), "nothing writes what is not read"
        (told,) = world.of(LayersOmitted)
        assert (told.remote_engine_id, told.side, told.layers) == ("prefill-0", "target", "draft")


async def test_layers_of_the_producer_alone_are_told_if_it_can_rebuild_them():
    async with opened(sources=[cache_of(specs=DRAFTING, rebuilt=["draft"])]) as world:
        await world.pull()
        assert world.holds((1, 2), (3, 4))
        (told,) = world.of(LayersOmitted)
        assert (told.remote_engine_id, told.side, told.layers) == ("prefill-0", "source", "draft")


async def test_carriers_of_several_ranks_are_joined():
    async with opened(ranks=2) as world:
        world.faults.carriers[1] = "rc_mlx5"
        report = await world.pull()
        assert (report.transport, report.plane) == ("loopback+rc_mlx5", "loopback")


async def test_each_group_is_read_from_the_group_of_the_peer_that_has_its_layers():
    groups = tuple(Group((name,), SPECS[name].kind, SPECS[name].block_size) for name in "ba")
    async with opened(sources=[cache_of(groups=groups)]) as world, asyncio.timeout(PATIENCE_S):
        await world.consumer.start_pull(world.producer.offer("request-1", [[3], [4]], 4), [[1]])
        assert {name: float(view[1].max()) for name, view in world.target.views.items()} == {"b": 4.0, "a": 5.0}
        assert sorted(prepared_list.group for prepared_list in world.faults.called("prepare")) == [0, 1]


async def test_only_the_rank_that_was_lost_is_prepared_again(monkeypatch):
    divided, assign = [], prepared.assign_sources

    def noted(*given, **how):
        divided.append(given)
        return assign(*given, **how)

    monkeypatch.setattr(prepared, "assign_sources", noted)
    async with opened(ranks=2) as world:
        await world.connect()
        for turn in range(1, 3):
            world.faults.failing[1] = "peer_lost"
            assert isinstance(await failure(world.start(world.ticket(f"lost {turn}"))), PeerLost)
            await world.heard(PeerDropped, turn)
            world.faults.heal()
            await world.pull(world.ticket(f"again {turn}"))
        assert [prepared_list.peer.rank for prepared_list in world.faults.called("prepare")] == [0, 1, 1, 1]
    assert len(divided) == 3, "who comes back may have other memory, of which an old division knows nothing"


async def test_what_is_remembered_of_sets_of_ranks_is_bounded(monkeypatch):
    monkeypatch.setattr("kvflow.worker.prepared.SHARES_MAX", 1)
    monkeypatch.setattr("kvflow.worker.prepared.DIVISIONS_MAX", 1)
    monkeypatch.setattr("kvflow.worker.peers.ROUTES_MAX", 1)
    specs = {"a": msgspec.structs.replace(SPECS["a"], num_kv_heads=8)}
    # Heads 0-3, 0-2, 4-7, all, and 3-5.
    shards = [Shard(tp_rank=rank, tp_size=size) for rank, size in ((0, 2), (0, 3), (1, 2), (0, 1), (1, 3))]
    sources = [cache_of(specs=specs, shard=shard) for shard in shards]
    async with opened(sources=sources, target=cache_of(specs=specs)) as world:

        def start(*ranks):
            name = str(len(world.events))
            return world.start(join_tickets([offered(world.producers[rank], name) for rank in ranks]))

        async with asyncio.timeout(PATIENCE_S):
            for ranks in ((0, 2), (3,)):
                await start(*ranks)
            prepared = len(world.faults.called("prepare"))
            await start(2, 0)
        pool = world.consumer._consumer.peers
        assert (len(pool._routes), len(pool._prepared._divisions)) == (1, 1)
        error = await failure(start(1, 2, 4))  # the second would give fewer heads than before
        assert isinstance(error, CapacityExceeded)
        assert "different shares" in error.message
        assert prepared == 3
        assert len(world.faults.called("prepare")) == prepared + 1, "what was forgotten was divided, and not prepared"


KEYS = [CurveKeys.from_private(bytes.fromhex(digits * 32)) for digits in ("12", "34")]


@pytest.mark.parametrize("connected", [True, False])
async def test_a_peer_whose_key_is_removed_is_dropped(network, connected):
    theirs, ours = KEYS
    settings = {"private_key": theirs.private_key, "allowed_keys": (ours.public_key,)}
    async with opened(
        network=network, theirs=settings, private_key=ours.private_key, allowed_keys=(theirs.public_key,)
    ) as world:
        if connected:
            await world.connect()
            world.consumer.allow_keys([theirs.public_key])
            assert world.of(PeerDropped) == []
            world.consumer.allow_keys([])
        else:
            world.faults.stuck.clear()
            handle = world.start()
            await world.faults.strike()
            world.consumer.allow_keys([])
            error = await failure(handle)
            assert isinstance(error, PeerLost)
            assert "no longer among our allowed keys" in error.message
        (dropped,) = await world.heard(PeerDropped)
        peers, (member,) = world.consumer._consumer.peers, offered(world.producers[0], "request-2").members()
        peers.start_connecting(member)
        assert peers.listed(1) == (), "a renewal that is due now dials no worker that we do not trust"
        assert "no longer among our allowed keys" in dropped.detail
        assert sum(world.consumer.snapshot().dropped.values()) == 1


async def test_an_ended_lease_is_reported_before_any_read_and_the_peer_stays(world, network, monkeypatch):
    monkeypatch.setattr(open_pulls, "EXPLAIN_S", PATIENCE_S)
    await world.connect()
    before = len(world.faults.chunks)
    ticket = issued_before(world.ticket(), 60.0)
    world.producer.revoke("request-1")
    error = await failure(world.start(ticket))
    assert isinstance(error, StaleLease)
    assert error.ended_by == "revoked"
    assert len(world.faults.chunks) == before
    await world.pull(world.ticket("again"))
    assert len(network.dialed) == 1
