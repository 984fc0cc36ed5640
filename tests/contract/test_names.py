"""Workers behind one name with several addresses, as while one pod replaces another: each is met, and none is ended."""

import asyncio
from contextlib import asynccontextmanager
from time import monotonic

import msgspec
import pytest

from handshake import CurveKeys
from kvflow.errors import AuthenticationFailed, DeadlineExceeded, PeerLost, StaleLease, TicketInvalid
from kvflow.events import BreakerOpened, PeerConnected, PeerDropped
from kvflow.leases.tickets import Ticket
from kvflow.rendezvous.endpoint import OWN_ADDRESS
from kvflow.worker.connections import FAILURES_MAX, SUPERSEDED_S
from kvflow.worker.environment import PRODUCTION
from kvflow.worker.runtime import open_worker
from tests.helpers.waiting import until
from tests.ports import free_port
from tests.unit.kvflow.worker.helpers import Clock, cache_of, turns
from tests.unit.kvflow.worker.pulling import (
    DATA_ENDPOINT,
    Faults,
    FaultyNetwork,
    config,
    issued_before,
    opened,
    with_faults,
)
from tests.unit.kvflow.worker.virtual import virtual

NAME = "tcp://prefill.invalid:5600"
ENGINES = pytest.mark.parametrize("new_engine", ["prefill-0", "prefill-1"], ids=["one id", "two ids"])
ORDERS = pytest.mark.parametrize("order", [1, -1], ids=["old first", "new first"])


class Rollout:
    """An old and a new pod that advertise one name, and a consumer. ``lead``: the pods to which the name leads."""

    def __init__(self, network, world, pods):
        self.network, self.world, self.pods = network, world, pods
        self.endpoints = dict(zip(pods, network.listening, strict=False))

    def lead(self, *pods):
        self.network.names[NAME] = tuple(self.endpoints[pod] for pod in pods)

    def offer(self, pod, request="request-1", later_s=0.0):
        """Offer blocks; ``later_s``: as if it had been signed so much later."""
        ticket = self.pods[pod].offer(request, [[3, 4]], 8)
        return issued_before(ticket, -later_s) if later_s else ticket

    async def pull(self, pod, *given, **how):
        return await self.world.pull(self.offer(pod, *given, **how))

    def connected(self):
        return [event.peer for event in self.world.of(PeerConnected)]


@asynccontextmanager
async def rolling(new_engine="prefill-0", *, planes=None, clock=monotonic, theirs=(), **ours):
    """Open the pods and the consumer. ``theirs``: settings of each pod."""
    network = FaultyNetwork()
    environment = with_faults(Faults(), planes=planes) if planes else PRODUCTION
    environment = msgspec.structs.replace(environment, network=network)
    old_config, new_config = (
        config(engine, advertise=NAME, **dict(theirs).get(pod, {}))
        for pod, engine in (("old", "prefill-0"), ("new", new_engine))
    )
    async with (
        open_worker(old_config, cache_of(), environment=environment) as old,
        open_worker(new_config, cache_of(), environment=environment) as new,
        opened(ranks=0, network=network, clock=clock, planes=planes and (planes, planes), **ours) as world,
    ):
        yield Rollout(network, world, {"old": old, "new": new})


@ENGINES
@ORDERS
@pytest.mark.parametrize("asked", [("old", "new"), ("new", "old")], ids=["old asked first", "new asked first"])
async def test_while_two_pods_share_the_name_both_are_read(new_engine, order, asked):
    async with rolling(new_engine) as rollout:
        rollout.lead(*("old", "new")[::order])
        for turn in range(3):
            for pod in asked:
                await rollout.pull(pod, f"{pod} {turn}")
        assert len(rollout.connected()) == 2
        assert rollout.world.of(PeerDropped) == []


@ENGINES
async def test_a_pod_that_has_left_the_name_is_read_until_it_says_goodbye(new_engine):
    async with rolling(new_engine) as rollout:
        rollout.lead("old")
        await rollout.pull("old")
        rollout.lead("new")
        await rollout.pull("new")
        await rollout.pull("old", "again")
        assert rollout.world.of(PeerDropped) == []
        rollout.network.cut(rollout.endpoints["old"])
        await rollout.world.heard(PeerDropped)
        await rollout.pull("old", "where it has answered before")
        assert len(rollout.connected()) == 3


async def test_a_ticket_before_its_address_fails_and_the_next_is_read():
    """The name still leads to the old pod alone, which seems to be a restart. The next proves that it is not."""
    async with rolling() as rollout:
        rollout.lead("old")
        before = [rollout.offer("new", f"before {turn}", later_s=-turn) for turn in range(2)]
        for ticket, reason in zip(before, ("was restarted", "is closed"), strict=True):
            with pytest.raises(StaleLease, match=reason):
                await rollout.world.pull(ticket)
        assert len(rollout.network.dialed) == 1
        rollout.lead("old", "new")
        with pytest.raises(StaleLease, match="is closed"):
            await rollout.world.pull(before[0])
        assert len(rollout.network.dialed) == 1, "a replayed ticket proves nothing"
        await rollout.pull("new", "since", later_s=1.0)
        await rollout.world.pull(before[1])


async def test_a_forged_time_of_signing_proves_nothing():
    async with rolling() as rollout:
        rollout.lead("old")
        ticket = rollout.offer("new")
        with pytest.raises(StaleLease, match="was restarted"):
            await rollout.world.pull(ticket)
        rollout.lead("old", "new")
        (grant,) = ticket.grants
        forged = msgspec.structs.replace(grant, issued_ms=grant.issued_ms + 1000)
        with pytest.raises(TicketInvalid, match="changed after it was signed"):
            await rollout.world.pull(Ticket(grants=(forged,), signed=ticket.signed))
        with pytest.raises(StaleLease, match="is closed"):
            await rollout.world.pull(ticket)


async def test_another_engine_at_the_only_address_is_a_wrong_way():
    async with rolling("prefill-1") as rollout:
        rollout.lead("old")
        ticket = rollout.offer("new")
        for _ in range(2 * FAILURES_MAX):
            with pytest.raises(PeerLost) as caught:
                await rollout.world.pull(ticket)
            assert caught.value.code == "peer_lost", "neither stale nor left alone"
            assert caught.value.message == f"{NAME} is 'prefill-0' rank 0 now, not 'prefill-1' rank 0"
            assert caught.value.remedy == PeerLost.default_remedy
        # A renewal dials, too. A pull that joins its dial would hear of the old pod.
        await until(lambda: not rollout.world.consumer.snapshot().producers)
        rollout.lead("new")
        await rollout.world.pull(ticket)
        assert rollout.world.of(BreakerOpened) == []


async def test_an_incarnation_that_comes_back_is_read_again():
    clock = Clock()
    async with rolling(clock=clock) as rollout:
        rollout.lead("old")
        ticket, late = rollout.offer("old"), rollout.offer("old", "late")
        rollout.lead("new")
        for each in (ticket, late):
            with pytest.raises(StaleLease):
                await rollout.world.pull(each)
        rollout.lead("old")
        clock.now += SUPERSEDED_S - 1
        with pytest.raises(StaleLease):
            await rollout.world.pull(late)
        await rollout.pull("old", "since", later_s=1.0)
        await rollout.world.pull(late)


async def test_the_last_right_address_is_tried_first_of_many():
    async with rolling() as rollout:
        rollout.lead("new")
        await rollout.pull("new")
        rollout.network.cut(rollout.endpoints["new"])
        await rollout.world.heard(PeerDropped)
        port = free_port()
        rollout.network.names[NAME] = (*(f"tcp://127.1.{at}.1:{port}" for at in range(100)), rollout.endpoints["new"])
        rollout.network.dialed.clear()
        await rollout.pull("new", "again")
        assert rollout.network.dialed[0] == rollout.endpoints["new"]


async def test_a_name_that_leads_to_ourselves_too_is_no_obstacle():
    async with rolling("prefill-1") as rollout:
        rollout.endpoints["ourselves"] = rollout.world.consumer.endpoint
        rollout.lead("ourselves", "new")
        await rollout.pull("new")
        with pytest.raises(PeerLost, match="is 'decode-0' rank 0 now, not 'prefill-0' rank 0"):
            await rollout.pull("old")
        await turns(50)
        rollout.world.consumer.check()


async def test_a_name_without_an_address_is_a_peer_that_cannot_be_reached(monkeypatch):
    async def none(*_args, **_kwargs):
        return []

    async with rolling() as rollout:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", none)
        with pytest.raises(PeerLost) as caught:
            await rollout.pull("new")
        assert caught.value.message == f"{NAME} cannot be resolved: it has no address"
        assert "getent hosts" in caught.value.remedy


KEYS = [CurveKeys.from_private(bytes.fromhex(digits * 32)) for digits in ("12", "34", "56")]


async def test_a_pod_with_another_key_is_a_wrong_way():
    ours, *pods = KEYS
    theirs = {
        pod: {"private_key": keys.private_key, "allowed_keys": (ours.public_key,)}
        for pod, keys in zip(("old", "new"), pods, strict=True)
    }
    allowed = tuple(keys.public_key for keys in pods)
    async with rolling(theirs=theirs, private_key=ours.private_key, allowed_keys=allowed) as rollout:
        rollout.lead("old", "new")
        for pod in ("new", "old"):
            await rollout.pull(pod)
        assert rollout.world.of(PeerDropped) == []
    async with rolling(theirs=theirs, private_key=ours.private_key, allowed_keys=allowed) as rollout:
        rollout.network.names[NAME] = (rollout.endpoints["old"], rollout.world.consumer.endpoint)
        with pytest.raises(AuthenticationFailed, match="does not share our cluster secret, or does not trust our key"):
            await rollout.pull("new")


@ORDERS
@pytest.mark.parametrize("data_name", [DATA_ENDPOINT, NAME], ids=["a name of its own", "the same name"])
async def test_the_data_plane_is_dialed_where_the_control_connection_is(monkeypatch, order, data_name):
    """Both names lead to both pods. The data port of the wrong one is open, too, and would refuse our pass."""
    data_endpoint = data_name.replace(":5600", ":5700")
    monkeypatch.setattr("tests.unit.kvflow.worker.pulling.DATA_ENDPOINT", data_endpoint)
    hosts = {"old": "tcp://127.0.0.2", "new": "tcp://127.0.0.3"}
    theirs = {pod: {"bind": f"{host}:0", "transport": "tcp"} for pod, host in hosts.items()}
    async with rolling("prefill-1", planes=("tcp",), theirs=theirs, transport="tcp") as rollout:
        rollout.lead("old", "new")
        rollout.network.names[data_endpoint] = tuple(f"{host}:5700" for host in list(hosts.values())[::order])
        for pod, host in hosts.items():
            if data_name == NAME:  # the pod has left the name since its control connection was made
                rollout.network.names[data_endpoint] = (f"{hosts['new']}:5700",)
            await rollout.pull(pod)
            assert rollout.world.faults.called("add")[-1].data_endpoint == f"{host}:5700"


# --- on virtual time: how long it takes, and what nobody answers ---

SILENT = [f"10.1.0.{at}" for at in range(20)]
ADVERTISED = {"advertise": NAME}


def test_of_ten_thousand_addresses_sixteen_are_tried_and_the_error_says_so():
    with virtual(theirs=ADVERTISED) as world:
        (old,), new = world.producers, world.open("prefill-0", **ADVERTISED)
        dead = tuple(f"tcp://10.{1 + at // 250}.{at % 250}.1:5000" for at in range(9999))
        world.wires.names[NAME] = (old.config.bind, *dead)
        ticket = world.do(lambda: new.worker.offer("request-1", [[1]], 4), life=new)
        with pytest.raises(PeerLost) as caught:
            world.pull(ticket)
        assert caught.value.code == "peer_lost"
        message = f"{NAME} has 10000 addresses. 16 were tried, and none leads to the server that is wanted: "
        assert caught.value.message.startswith(message)
        assert f"{old.config.bind} is another incarnation of 'prefill-0' rank 0" in caught.value.message
        assert "nobody listens at tcp://10.1." in caught.value.message
        assert len(caught.value.message) < 600
        assert caught.value.remedy == OWN_ADDRESS
        world.wires.names[NAME] = (*dead[:15], new.config.bind)
        world.pull(ticket)
    with virtual(theirs=ADVERTISED) as world:
        world.wires.names[NAME] = dead[:2]
        with pytest.raises(PeerLost, match=r"has 2 addresses. 2 were tried.*nobody listens at .*nobody listens at"):
            world.pull(world.offer())


def fall_silent(world):
    """Let packets to some hosts be lost, as a firewall and a host without power do; return their endpoints."""
    for host in SILENT:
        world.wires.part("10.0.0.2", host)
    return tuple(f"tcp://{host}:5000" for host in SILENT)


def timed(world, ticket):
    began = world.now
    world.pull(ticket)
    return world.now - began


def test_fifteen_silent_addresses_leave_time_for_the_sixteenth():
    with virtual(theirs=ADVERTISED) as world:
        silent, right = fall_silent(world), "tcp://10.0.0.1:5000"
        world.wires.names[NAME] = (*silent[:3], right)
        assert timed(world, world.offer()) < 0.1, "silent ones that are tried beside the right one cost nothing"
    with virtual(theirs=ADVERTISED) as world:
        world.wires.names[NAME] = (*fall_silent(world)[:15], right)
        assert timed(world, world.offer()) < 4.0


def test_four_hung_pods_leave_time_for_the_fifth_address():
    """A pod that is stopped accepts a connection, and says nothing."""
    with virtual(theirs=ADVERTISED) as world:
        hung = [world.open("prefill-0", **ADVERTISED) for _ in range(4)]
        for life in hung:
            life.process.stop()
        addresses = [life.config.bind for life in hung]
        world.wires.names[NAME] = (*addresses, "tcp://10.0.0.1:5000")
        assert timed(world, world.offer()) < 3.5


@pytest.mark.parametrize("count", [16, 17])
def test_silence_at_every_address_ends_within_the_budget(count):
    with virtual(theirs=ADVERTISED) as world:
        world.wires.names[NAME] = fall_silent(world)[:count]
        began = world.now
        with pytest.raises(DeadlineExceeded if count == 16 else PeerLost) as caught:
            world.pull(world.offer())
        assert world.now - began < 5.5
        if count == 17:
            assert f"{NAME} has 17 addresses. 16 were tried" in caught.value.message


@ENGINES
@ORDERS
@pytest.mark.parametrize("cut", [False, True], ids=["connected", "cut before each"])
def test_of_two_hundred_requests_of_a_rollout_none_fails(new_engine, order, cut):
    with virtual(theirs=ADVERTISED) as world:
        (old,) = world.producers
        new = world.open(new_engine, **ADVERTISED)
        at = {old: "tcp://10.0.0.1:5000", new: "tcp://10.0.0.3:5000"}
        waits = []
        for number in range(200):
            stage = number // 50  # the old pod alone, both, the new one while the old one drains, and the new one alone
            if number == 150:
                old.leave()
            pods = [(old,), (old, new), (new,), (new,)][stage]
            world.wires.names[NAME] = tuple(at[pod] for pod in pods[::order])
            if cut:
                world.cut()
            pod = new if stage == 3 or (stage and number % 2) else old
            ticket = world.do(lambda: pod.worker.offer(f"r{number}", [[1]], 4), life=pod)  # noqa: B023
            waits.append(timed(world, ticket))
        assert len(waits) == 200
        assert max(waits) < 0.1
