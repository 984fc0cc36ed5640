"""A producer is met once for all who need it, and anew after it was let go."""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest

from handshake import ClockOffset, Limits
from kvflow.cache.mint import Mint
from kvflow.cache.tickets import RankAddress, join_tickets
from kvflow.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    LayoutMismatch,
    PeerLost,
    PeerUnavailable,
    StaleLease,
    TicketInvalid,
    TransferCancelled,
    WorkerClosed,
)
from kvflow.ids import Credentials
from kvflow.layout.groups import Group
from kvflow.layout.manifest import Identity
from kvflow.layout.region import Region
from kvflow.observability.events import PeerConnected, PeerDropped
from kvflow.rendezvous.dialer import Restarted
from kvflow.transfer.cover import Share
from kvflow.transfer.plan import PlanCache
from kvflow.transport.base import UNFIT, Carrier, PeerAddress, Published
from kvflow.worker.breaker import FAILURES_MAX
from kvflow.worker.peers import PeerPool

from .helpers import PATIENCE_S, SPECS, Clock, Reports, cache_of

ADDRESS = RankAddress(0, "0" * 32, "tcp://127.0.0.1:5000", "0", 4)
SOURCE = cache_of(groups=None).manifest()
CREDENTIALS = Credentials("12" * 32, "decode-0", 0, "b" * 32, b"a pass")
CARRIER = Carrier("cma", "addresses", "loopback")


class Transport:
    """A data plane that connects when it is told to."""

    def __init__(self, planes):
        self.planes = planes
        self.added = []
        self.removed = []
        self.gone = []
        self.prepared = []

    def published(self):
        return Published(planes=dict.fromkeys(self.planes, b"how to read us"))

    def add_peer(self, address):
        self.added.append(address)

    def remove_peer(self, peer, *, gone=False):
        self.removed.append(peer)
        self.gone += [peer] if gone else []

    def prepare(self, program):
        self.prepared.append(program)


class Wire:
    """Stands for ``open_link``: counts who dials, and fails or waits when told to."""

    def __init__(self):
        self.dialled = 0
        self.left = 0
        self.error = None
        self.moved_on = {}
        self.hung_up = None
        self.open, self.leaving = asyncio.Event(), asyncio.Event()
        self.open.set()
        self.leaving.set()
        self.planes = ("loopback",)
        self.data_endpoint = ""
        self.tcp_encryption = "off"
        self.manifest = SOURCE
        self.clock_offset = None
        self.over = False

    async def require_held(self, grant, *, within_s):
        if self.over:
            raise StaleLease(f"{grant.request_id} has ended")

    @asynccontextmanager
    async def link(self, peer, *, ours, on_ended):
        self.dialled += 1
        await self.open.wait()
        if error := self.moved_on.get(peer.incarnation, self.error):
            raise error
        self.hung_up = on_ended
        advertisement = SimpleNamespace(
            manifest=self.manifest,
            planes={plane: f"how to read {peer}".encode() for plane in self.planes},
            data_endpoint=self.data_endpoint,
            tcp_encryption=self.tcp_encryption,
            epochs=Region(8192, 64),
        )
        yield SimpleNamespace(
            peer=peer,
            agent=f"agent of {peer}",
            advertisement=advertisement,
            credentials=CREDENTIALS,
            clock_offset=self.clock_offset,
            require_held=self.require_held,
        )
        await self.leaving.wait()
        self.left += 1


class World:
    def __init__(self, tasks, wire, handshake_s=PATIENCE_S, planes=("loopback",), resolve=None):
        self.wire, self.transport, self.reports, self.dropped = wire, Transport(planes), Reports(), []
        self.blamed = []
        self.trusted = True
        self.clock = Clock()
        self.pool = PeerPool(
            ours=SimpleNamespace(
                limits=Limits(handshake_s=handshake_s),
                identity=SimpleNamespace(rank=0),
                network=SimpleNamespace(resolve=resolve),
                trusts=lambda _peer: self.trusted,
            ),
            manifest=msgspec.structs.replace(cache_of().manifest(), identity=Identity(model="ours")),
            transport=self.transport,
            tasks=tasks,
            clock=self.clock,
            report=self.reports,
            on_dropped=lambda *dropped: self.dropped.append(dropped),
            plans=PlanCache(),
            draw=lambda: 0.5,
        )

    async def meet(self, rank=0):
        task = asyncio.ensure_future(self.pool.meet(member(rank)))
        await settle()
        return task

    async def met(self, rank=0):
        task = await self.meet(rank)
        self.pool.on_added(member(rank).peer, CARRIER)
        async with asyncio.timeout(PATIENCE_S):
            return await task

    async def connected(self, *ranks):
        """Return the route of a ticket of these ranks, all of which are met or can be at once."""
        for rank in ranks:
            await self.met(rank)
        async with asyncio.timeout(PATIENCE_S):
            return await self.pool.connect(ticket(*ranks), self.blamed.append)


def ticket(*ranks):
    """A ticket of these ranks, one grant for each."""
    return join_tickets([offer(rank) for rank in ranks])


def member(rank=0):
    return next(offer(rank).members())


def offer(rank):
    address = msgspec.structs.replace(ADDRESS, rank=rank, endpoint=f"tcp://127.0.0.1:{5000 + rank}")
    mint = Mint("prefill-0", [address], sign=lambda payload: bytes(32), lease_s=30.0)
    return mint.offer("r", block_ids=[[1]], num_tokens=1)[0]


def successor():
    address = msgspec.structs.replace(ADDRESS, incarnation="1" * 32)
    return msgspec.structs.replace(member(), address=address)


def restarted_as(name):
    return Restarted("restarted", peer=ADDRESS.endpoint, incarnation=name * 32)


class AtOnce(ThreadPoolExecutor):
    """Runs what is given to a thread at once, so that a few turns of the loop are all that anything takes."""

    def submit(self, function, /, *args, **kwargs):
        done = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - it belongs to the caller that awaits the thread
            done.set_exception(error)
        return done


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def world(monkeypatch):
    wire = Wire()
    asyncio.get_running_loop().set_default_executor(AtOnce())
    monkeypatch.setattr("kvflow.worker.peers.open_link", wire.link)
    async with asyncio.TaskGroup() as tasks:
        world = World(tasks, wire)
        yield world
        wire.open.set()
        world.pool.close()


async def test_a_peer_is_met_once_for_all_who_need_it(world):
    waiting = [await world.meet() for _ in range(3)]
    assert not any(task.done() for task in waiting)
    assert len(world.transport.added) == 1
    world.pool.on_added(member().peer, CARRIER)
    peers = await asyncio.gather(*waiting)
    assert world.wire.dialled == 1
    assert peers[0] is peers[1] is peers[2] is await world.pool.meet(member())
    met = PeerConnected(
        str(member().peer), ADDRESS.endpoint, 0.0, transport="cma", transport_known_by="addresses", plane="loopback"
    )
    assert world.reports.events == [met]
    assert peers[0].carrier == CARRIER


async def test_a_ticket_that_names_no_slot_of_the_peer_is_invalid_before_anything_is_read(world):
    await world.met()
    lying = member()
    lying = msgspec.structs.replace(lying, grant=msgspec.structs.replace(lying.grant, slot=8))
    with pytest.raises(TicketInvalid, match="no epoch slot 8"):
        await world.pool.meet(lying)


def named_otherwise(**changes):
    """A ticket of the same name that leads to another endpoint, or to another key."""
    return msgspec.structs.replace(member(), address=msgspec.structs.replace(ADDRESS, **changes))


@pytest.mark.parametrize("changes", [{"endpoint": "tcp://127.0.0.1:6000"}, {"public_key": "ab" * 32}], ids=str)
async def test_a_peer_met_under_a_name_is_not_taken_for_another_endpoint_or_key(world, changes):
    impostor, real = named_otherwise(**changes), member()
    meetings = []
    for each in (impostor, real):
        meetings.append(asyncio.ensure_future(world.pool.meet(each)))
        await settle()
        world.clock.now += 1.0
    assert world.wire.dialled == 2
    for each in (impostor, real):
        world.pool.on_added(each.peer, CARRIER)
    met = await asyncio.gather(*meetings)
    assert [peer.link.peer for peer in met] == [impostor.peer, real.peer]
    assert world.dropped == []
    world.pool.drop(impostor.peer, "peer_lost", "gone")
    await settle()
    assert world.pool.link(real.peer) is met[1].link
    assert world.transport.removed == [impostor.peer]


async def test_the_agent_that_a_peer_must_bear_is_that_of_its_link(world):
    peer = await world.met()
    assert [address.agent for address in world.transport.added] == [peer.link.agent]


async def test_a_ticket_is_connected_once_and_its_route_is_known_from_then_on(world):
    assert world.pool.route(ticket(0)) is None
    peer = await world.met()
    assert world.transport.prepared == [], "nothing has been asked of it yet"
    route = await world.connected(0)
    assert world.pool.route(ticket(0)) is route
    assert await world.pool.connect(ticket(0), world.blamed.append) == route
    ((leg_peer, at, programs),) = route.legs
    assert (leg_peer, at, route.ranks) == (peer, 0, ((peer, 0),))
    assert (route.transport, route.plane) == ("cma", "loopback")
    assert [program.program_id for program in world.transport.prepared] == [program_id for program_id, _ in programs]
    for program, (_, binding) in zip(world.transport.prepared, programs, strict=True):
        assert program.binding is binding
        assert program.source_rows is binding.source.table
        assert program.target_rows is binding.target.table
    assert world.pool.link(member().peer) is peer.link


async def test_each_order_of_the_grants_has_a_route_of_the_same_ranks(world):
    route, turned = await world.connected(0, 1), await world.connected(1, 0)
    assert [peer for peer, _ in route.ranks] == [peer for peer, _ in turned.ranks]
    assert [at for _, at in route.ranks] == [0, 1]
    assert [at for _, at in turned.ranks] == [1, 0]
    assert [leg.programs for leg in route.legs] == [leg.programs for leg in turned.legs]
    assert world.pool.route(ticket(0)) is None
    assert route.transport == "cma"


async def test_carriers_of_several_ranks_are_joined(world):
    for rank, carrier in enumerate([CARRIER, Carrier("rc_mlx5", "addresses", "nixl")]):
        meeting = await world.meet(rank)
        world.pool.on_added(member(rank).peer, carrier)
        await meeting
    route = await world.pool.connect(ticket(0, 1), world.blamed.append)
    assert (route.transport, route.plane) == ("cma+rc_mlx5", "loopback+nixl")


async def test_routes_are_bounded_and_one_that_was_forgotten_is_found_again(world, monkeypatch):
    monkeypatch.setattr("kvflow.worker.peers.ROUTES_MAX", 2)
    for ranks in ((0, 1), (1, 0), (0,)):
        await world.connected(*ranks)
    assert [world.pool.route(ticket(*ranks)) is None for ranks in ((0, 1), (1, 0), (0,))] == [True, False, False]
    prepared = len(world.transport.prepared)
    await world.connected(0, 1)
    assert len(world.transport.prepared) == prepared


async def test_the_rank_that_cannot_be_met_is_blamed(world):
    await world.met()
    world.wire.error = PeerLost("nobody there")
    with pytest.raises(PeerLost):
        await world.pool.connect(ticket(0, 1), world.blamed.append)
    assert [str(each.peer) for each in world.blamed] == [str(member(1).peer)]
    assert world.pool.route(ticket(0, 1)) is None


async def test_a_program_says_which_of_the_peers_groups_it_reads(world):
    groups = tuple(Group((name,), SPECS[name].kind, SPECS[name].block_size) for name in "ba")
    world.wire.manifest = cache_of(groups=groups).manifest()
    await world.connected(0)
    assert sorted(program.group for program in world.transport.prepared) == [0, 1]
    for program in world.transport.prepared:
        assert program.binding.group.source_group == program.group


async def test_a_set_of_ranks_is_prepared_again_only_in_part_when_one_of_them_is_another(world):
    await world.connected(0, 1)
    prepared = len(world.transport.prepared)
    for _ in range(3):
        world.pool.drop(member(1).peer, "peer_lost", "gone")
        assert world.pool.route(ticket(0, 1)) is None
        await settle()
        await world.connected(0, 1)
    again = world.transport.prepared[prepared:]
    assert member(0).peer not in {program.peer for program in again}, "what the other rank gives is the same"
    assert prepared > 0


async def test_what_is_prepared_for_any_sets_of_ranks_is_bounded(world, monkeypatch):
    monkeypatch.setattr("kvflow.worker.programs.PROGRAMS_MAX", 1)
    monkeypatch.setattr("kvflow.worker.programs.DIVISIONS_MAX", 2)
    monkeypatch.setattr("kvflow.worker.peers.ROUTES_MAX", 1)
    for rank, name in enumerate("ab"):
        world.wire.manifest = cache_of(specs={name: SPECS[name]}).manifest()
        await world.met(rank)
    world.wire.manifest = SOURCE
    await world.connected(0, 1)
    await world.connected(2)
    prepared = len(world.transport.prepared)
    await world.connected(1, 0)
    assert len(world.pool._programs._divisions) == 2
    await world.connected(0, 1)
    assert len(world.transport.prepared) == prepared, "one that was forgotten is divided again, and not prepared"
    monkeypatch.setattr("kvflow.worker.programs.share_out", lambda *_args, **_kwargs: [Share(0, {})])
    with pytest.raises(CapacityExceeded, match="different parts"):
        await world.connected(0, 2)
    assert len(world.transport.prepared) == prepared


async def test_whoever_gives_up_does_not_stop_the_meeting(world):
    impatient, patient = await world.meet(), await world.meet()
    impatient.cancel()
    await settle()
    world.pool.on_added(member().peer, CARRIER)
    assert (await patient).link is world.pool.link(member().peer)


@pytest.mark.parametrize("error", [StaleLease("restarted"), PeerLost("nobody"), ValueError("a defect")])
async def test_a_meeting_that_fails_tells_all_and_is_tried_anew(world, error):
    world.wire.error = error
    world.wire.open.clear()
    waiting = [await world.meet() for _ in range(2)]
    world.wire.open.set()
    for task in waiting:
        with pytest.raises(Exception, match=str(error.args[0])) as caught:
            await task
        assert hasattr(caught.value, "code")
    assert world.pool.link(member().peer) is None
    (event,) = world.reports.of(PeerDropped)
    assert world.dropped == [(member().peer, event.code, event.detail)]
    world.wire.error = None
    await world.met()
    assert world.wire.dialled == 2


async def test_another_data_plane_cannot_be_read(world):
    world.wire.planes = ("nixl",)
    task = await world.meet()
    with pytest.raises(LayoutMismatch) as caught:
        await task
    assert (caught.value.field, caught.value.source, caught.value.target) == ("transport", "nixl", "loopback")
    assert "transport to 'auto'" in caught.value.remedy
    assert world.transport.added == []
    # What it offers can be given back all the same, over the connection that stays.
    link = await world.pool.reach(member())
    assert world.pool.link(member().peer) is link
    assert world.wire.dialled == 1


async def test_a_peer_that_no_plane_can_read_is_refused_by_name_and_stays_linked(world):
    task = await world.meet()
    world.pool.on_failed(member().peer, UNFIT, "loopback: no one-sided path: both sides share only tcp")
    with pytest.raises(LayoutMismatch, match="both sides share only tcp") as caught:
        await task
    assert (caught.value.field, caught.value.source) == ("transport", "loopback")
    assert world.pool.link(member().peer) is await world.pool.reach(member())
    assert world.reports.of(PeerDropped) == []
    world.pool.on_failed(member().peer, UNFIT, "said again, of a peer that nobody waits for")
    await settle()
    assert world.pool.link(member().peer) is None


async def test_any_other_failure_lets_the_peer_go(world):
    task = await world.meet()
    world.pool.on_failed(member().peer, "peer_lost", "gone")
    with pytest.raises(PeerLost, match="gone"):
        await task


class Names:
    """A name server."""

    def __init__(self, *found):
        self.found = found
        self.asked = []

    async def resolve(self, endpoint):
        self.asked.append(endpoint)
        if isinstance(self.found[0], Exception):
            raise self.found[0]
        await asyncio.sleep(0)
        return self.found


TCP = "tcp://10.0.0.7:5700"
NAMED = "tcp://node-7:5700"


@asynccontextmanager
async def negotiating(monkeypatch, ours, theirs, names, *, encryption="off"):
    """A world of ours whose peer publishes these planes."""
    wire = Wire()
    wire.planes, wire.data_endpoint, wire.tcp_encryption = theirs, NAMED if "tcp" in theirs else "", encryption
    asyncio.get_running_loop().set_default_executor(AtOnce())
    monkeypatch.setattr("kvflow.worker.peers.open_link", wire.link)
    async with asyncio.TaskGroup() as tasks:
        world = World(tasks, wire, planes=ours, resolve=names.resolve)
        yield world
        world.pool.close()


@pytest.mark.parametrize(
    ("ours", "theirs", "both"),
    [
        (("nixl", "tcp"), ("tcp", "nixl"), {"nixl", "tcp"}),
        (("nixl", "tcp"), ("tcp",), {"tcp"}),
        (("tcp",), ("nixl", "tcp", "of a newer release"), {"tcp"}),
        (("nixl", "tcp"), ("nixl",), {"nixl"}),
    ],
)
async def test_the_transport_is_given_the_planes_of_both_sides(monkeypatch, ours, theirs, both):
    names = Names("tcp://[fd00::7]:5700", TCP)
    async with negotiating(monkeypatch, ours, theirs, names) as world:
        await world.met()
        (address,) = world.transport.added
        peer = member().peer
        assert address == PeerAddress(
            peer,
            dict.fromkeys(both, f"how to read {peer}".encode()),
            Region(8192, 64),
            agent=f"agent of {peer}",
            data_endpoint=TCP if "tcp" in both else "",
            credentials=CREDENTIALS,
        )
        assert names.asked == ([NAMED] if "tcp" in both else [])


@pytest.mark.parametrize("error", [OSError("no such name"), UnicodeError("no name"), ValueError("embedded null")])
async def test_a_tcp_plane_at_a_name_that_cannot_be_looked_up_is_left_out_if_there_is_another(monkeypatch, error):
    async with negotiating(monkeypatch, ("nixl", "tcp"), ("nixl", "tcp"), Names(error)) as world:
        await world.met()
        (address,) = world.transport.added
        assert (set(address.planes), address.data_endpoint) == ({"nixl"}, "")
    async with negotiating(monkeypatch, ("tcp",), ("nixl", "tcp"), Names(error)) as world:
        with pytest.raises(PeerLost, match=f"{NAMED}, which cannot be looked up"):
            await world.pool.meet(member())
        assert world.transport.added == []


async def test_different_encryption_is_refused_by_name_where_only_tcp_could_serve(monkeypatch):
    async with negotiating(monkeypatch, ("tcp",), ("nixl", "tcp"), Names(TCP), encryption="tls") as world:
        with pytest.raises(LayoutMismatch) as caught:
            await world.pool.meet(member())
        error = caught.value
        assert (error.field, error.source, error.target) == ("tcp_encryption", "tls", "off")
        assert "tcp_encryption" in error.remedy
        assert world.transport.added == []


async def test_different_encryption_does_not_keep_another_plane_from_serving(monkeypatch):
    both = ("nixl", "tcp")
    async with negotiating(monkeypatch, both, both, Names(TCP), encryption="tls") as world:
        await world.met()
        assert [set(address.planes) for address in world.transport.added] == [{"nixl"}]
    async with negotiating(monkeypatch, both, both, Names(TCP), encryption="tls") as world:
        task = await world.meet()
        world.pool.on_failed(member().peer, UNFIT, "nixl: no one-sided path")
        with pytest.raises(LayoutMismatch) as caught:
            await task
        assert caught.value.field == "tcp_encryption"


async def test_a_stage_with_none_of_our_layers_is_met_and_gives_nothing(world):
    world.wire.manifest = cache_of(specs={"of another stage": SPECS["a"]}).manifest()
    other = await world.met()
    with pytest.raises(LayoutMismatch) as caught:  # alone it is of no use
        await world.connected(0)
    assert (caught.value.field, caught.value.source, caught.value.target) == (
        "layers",
        ["of another stage"],
        ["a", "b"],
    )
    world.wire.manifest = SOURCE
    route = await world.connected(0, 1)
    assert next(peer for peer, _ in route.ranks) is other
    assert [(leg.peer is other, leg.grant) for leg in route.legs] == [(False, 1)]


async def test_a_stage_of_another_model_is_refused_whatever_its_layers_are(world):
    manifest = cache_of(specs={"of another stage": SPECS["a"]}).manifest()
    world.wire.manifest = msgspec.structs.replace(manifest, identity=Identity(model="theirs"))
    task = await world.meet()
    with pytest.raises(LayoutMismatch, match="model"):
        await task


@pytest.mark.parametrize("by", ["the transport", "the connection"])
async def test_a_peer_that_is_let_go_is_forgotten_and_met_anew(world, by):
    await world.connected(0)
    if by == "the transport":
        world.pool.drop(member().peer, "peer_lost", "gone")
    else:
        world.wire.hung_up("peer_lost", "gone")
    world.pool.drop(member().peer, "peer_lost", "told twice")
    await settle()
    assert world.pool.link(member().peer) is None
    assert world.pool.route(ticket(0)) is None
    assert world.transport.removed == [member().peer]
    assert world.dropped == [(member().peer, "peer_lost", "gone")]
    assert world.wire.left == 1
    await world.connected(0)
    assert world.wire.dialled == 2
    assert {program.program_id for program in world.transport.prepared} == {1, 2}


@pytest.mark.parametrize("state", ["is let go", "is forgotten", "is met anew"])
async def test_a_peer_that_is_lost_while_another_is_met_gives_nothing(world, state):
    await world.met()
    connecting = asyncio.ensure_future(world.pool.connect(ticket(0, 1), world.blamed.append))
    await settle()
    world.pool.drop(member().peer, "peer_lost", "gone")
    if state != "is let go":
        await settle()
    if state == "is met anew":
        await world.met()
    world.pool.on_added(member(1).peer, CARRIER)
    with pytest.raises(PeerLost, match="while others"):
        await connecting
    assert world.transport.prepared == []
    assert world.pool.route(ticket(0, 1)) is None


async def test_closing_ends_a_life_that_has_not_begun(world):
    first = asyncio.ensure_future(world.pool.meet(member()))
    await asyncio.sleep(0)  # the life is a task now, and has not taken its first step
    assert world.wire.dialled == 0
    late = asyncio.ensure_future(world.pool.meet(member()))
    world.pool.close()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(TransferCancelled):
            await first
        with pytest.raises(WorkerClosed):
            await late
    assert world.wire.dialled == 0


async def test_a_transport_that_cannot_connect_fails_the_meeting(world):
    task = await world.meet()
    world.pool.drop(member().peer, "peer_lost", "no route")
    with pytest.raises(PeerLost, match="no route"):
        await task
    assert world.transport.removed == [member().peer]


async def test_a_peer_can_be_reached_before_it_can_be_read_from(world):
    task = await world.meet()
    link = await world.pool.reach(member())
    assert not task.done()
    world.pool.on_added(member().peer, CARRIER)
    assert (await task).link is link


async def test_whoever_comes_while_a_peer_is_let_go_meets_it_anew(world):
    await world.met()
    world.wire.leaving.clear()
    world.pool.drop(member().peer, "peer_lost", "gone")
    late = await world.meet()
    assert world.wire.dialled == 1
    world.wire.leaving.set()
    await settle()
    assert world.wire.dialled == 2
    world.pool.on_added(member().peer, CARRIER)
    assert (await late).link is world.pool.link(member().peer)


async def test_a_transport_that_says_nothing_has_a_deadline(monkeypatch):
    wire = Wire()
    asyncio.get_running_loop().set_default_executor(AtOnce())
    monkeypatch.setattr("kvflow.worker.peers.open_link", wire.link)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        world = World(tasks, wire, handshake_s=0.01)
        with pytest.raises(DeadlineExceeded) as caught:
            await world.pool.meet(member())
        assert (caught.value.phase, caught.value.peer) == ("handshake", str(member().peer))
        await settle()
        assert world.dropped[0][:2] == (member().peer, "deadline_exceeded")


async def test_closing_lets_all_go_and_meets_no_one(world):
    await world.met()
    world.pool.close()
    await settle()
    assert world.dropped == [(member().peer, "closing", "the worker is closing")]
    with pytest.raises(WorkerClosed):
        await world.pool.meet(member())


@pytest.mark.parametrize("dialling", [True, False])
async def test_closing_does_not_wait_for_a_peer_that_is_being_met(world, dialling):
    if dialling:
        world.wire.open.clear()
    task = await world.meet()
    world.pool.close()
    with pytest.raises(TransferCancelled, match="closing"):
        await task
    await settle()
    assert world.dropped == [(member().peer, "closing", "the worker is closing")]


async def test_a_peer_that_was_in_use_and_is_lost_is_met_again_without_being_asked_for(world, monkeypatch):
    monkeypatch.setattr("kvflow.worker.redial.PAUSE_S", 0.0)
    await world.connected(0)
    world.wire.hung_up("peer_lost", "silent")
    async with asyncio.timeout(PATIENCE_S):
        while world.wire.dialled < 2:  # noqa: ASYNC110 - nothing announces an attempt
            await asyncio.sleep(0)
        await settle()
        world.pool.on_added(member().peer, CARRIER)
        await world.pool.meet(member())
    assert world.wire.dialled == 2


@pytest.mark.parametrize("why", ["it was never in use", "it said goodbye", "we leave"])
async def test_who_is_not_met_again_by_itself(world, monkeypatch, why):
    monkeypatch.setattr("kvflow.worker.redial.PAUSE_S", 0.0)
    await world.met()
    if why != "it was never in use":
        await world.connected(0)
    if why == "we leave":
        world.pool.close()
    else:
        world.wire.hung_up("peer_closed" if why == "it said goodbye" else "peer_lost", why)
    for _ in range(50):
        await asyncio.sleep(0)
    assert world.wire.dialled == 1


async def test_whoever_said_goodbye_is_gone_and_not_dialled_any_more(world):
    await world.met()
    world.wire.hung_up("peer_closed", "the server is leaving")
    await settle()
    for ask in (world.pool.meet, world.pool.reach):
        with pytest.raises(StaleLease, match="it said goodbye"):
            await ask(member())
    assert world.wire.dialled == 1
    assert world.transport.gone == [member().peer]


async def test_whoever_is_lost_without_a_word_may_come_again(world):
    await world.met()
    world.wire.hung_up("peer_lost", "silent")
    await settle()
    assert world.transport.removed == [member().peer]
    assert world.transport.gone == []


async def test_a_successor_is_met_by_itself_and_its_predecessor_is_never_dialled_again(world):
    world.wire.moved_on[ADDRESS.incarnation] = restarted_as("1")
    with pytest.raises(StaleLease):
        await (await world.meet())
    await settle()
    assert [address.peer for address in world.transport.added] == [successor().peer]
    world.pool.on_added(successor().peer, CARRIER)
    async with asyncio.timeout(PATIENCE_S):
        await world.pool.meet(successor())
    dialled = world.wire.dialled
    with pytest.raises(StaleLease, match="is gone"):
        await world.pool.meet(member())
    assert world.wire.dialled == dialled == 2
    assert world.transport.gone == [member().peer]


async def test_an_address_that_has_another_name_each_time_is_not_followed_for_ever(world):
    names = "0123456789abcdef"
    for name, next_name in pairwise(names):
        world.wire.moved_on[name * 32] = restarted_as(next_name)
    with pytest.raises(StaleLease):
        await (await world.meet())
    await settle()
    assert world.wire.dialled == 2


async def test_an_answer_of_a_successor_ends_whoever_lived_there_before(world):
    await world.met()
    task = asyncio.ensure_future(world.pool.meet(successor()))
    await settle()
    world.pool.on_added(successor().peer, CARRIER)
    async with asyncio.timeout(PATIENCE_S):
        await task
    assert world.dropped[0][:2] == (member().peer, "peer_lost")
    with pytest.raises(StaleLease, match="answers at its address"):
        await world.pool.meet(member())


async def test_a_dead_address_is_dialled_some_times_and_then_left_alone(world):
    world.wire.error = PeerLost("nobody listens")
    for _ in range(FAILURES_MAX):
        with pytest.raises(PeerLost, match="nobody listens"):
            await world.pool.meet(member())
    for ask in (world.pool.meet, world.pool.reach):
        with pytest.raises(PeerUnavailable) as caught:
            await ask(member())
        assert caught.value.retry_after_s > 0
    assert world.wire.dialled == FAILURES_MAX
    world.pool._clock.now += 60
    world.wire.error = None
    await world.met()
    assert world.wire.dialled == FAILURES_MAX + 1


async def test_whoever_needs_the_peer_that_is_probed_waits_for_the_probe(world):
    world.wire.error = PeerLost("nobody listens")
    for _ in range(FAILURES_MAX):
        with pytest.raises(PeerLost):
            await world.pool.meet(member())
    world.pool._clock.now += 60
    world.wire.error = None
    probing = [await world.meet() for _ in range(3)]
    world.pool.on_added(member().peer, CARRIER)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*probing)
    assert world.wire.dialled == FAILURES_MAX + 1


async def test_news_of_strangers_are_ignored(world):
    world.pool.on_added("nobody", CARRIER)
    world.pool.drop("nobody", "peer_lost", "")
    assert world.pool.link("nobody") is None


async def test_a_peer_that_is_not_trusted_any_more_is_let_go(world):
    await world.met()
    world.pool.drop_distrusted()
    await settle()
    assert world.dropped == []
    world.trusted = False
    world.pool.drop_distrusted()
    await settle()
    assert [code for _, code, _ in world.dropped] == ["key_removed"]
    assert world.pool.drops == {"key_removed": 1}


async def test_a_peer_that_is_not_trusted_while_it_is_met_is_let_go_as_soon_as_it_is(world):
    world.wire.open.clear()
    meeting = await world.meet()
    world.trusted = False
    world.pool.drop_distrusted()
    world.wire.open.set()
    with pytest.raises(PeerLost, match="not among our allowed keys"):
        async with asyncio.timeout(PATIENCE_S):
            await meeting
    assert [detail for _, _, detail in world.dropped] == [str(meeting.exception().message)]


async def test_a_lease_that_has_ended_is_told_before_anything_is_read_and_the_peer_stays(world):
    peer = await world.met()
    world.wire.over = True
    with pytest.raises(StaleLease):
        await world.pool.meet(member())
    world.wire.over = False
    assert await world.pool.meet(member()) is peer


async def test_how_far_the_clocks_are_apart_is_reported(world):
    world.wire.clock_offset = ClockOffset(2.5, 0.25)
    await world.met()
    (event,) = world.reports.events
    assert (event.clock_ahead_s, event.clock_error_s) == (2.5, 0.25)


async def test_of_two_that_are_dialled_side_by_side_neither_ends_the_other(world):
    world.wire.open.clear()
    both = [asyncio.ensure_future(world.pool.meet(each)) for each in (successor(), member())]
    await settle()
    world.clock.now += 1.0  # both are connected later than either was dialled, the one that died as the last
    world.wire.open.set()
    await settle()
    for each in (successor(), member()):
        world.pool.on_added(each.peer, CARRIER)
    async with asyncio.timeout(PATIENCE_S):
        met = [await task for task in both]
        assert [peer.link.peer for peer in met] == [successor().peer, member().peer]
        assert await world.pool.meet(successor()) is met[0]
    assert world.dropped == []
