"""Names with several addresses, which may lead to several servers: the one that is wanted is met, and no other."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest

from handshake.client import open_client
from handshake.errors import SocketsExhausted, WrongServer
from handshake.messages import ConnectionClosed, PeerReady, ReleaseAnswered, Released, ReleaseReceived
from handshake.sockets import ZeroMqNetwork
from tests.ports import free_port

from .helpers import (
    ANSWERS,
    CONSUMER,
    EXAMPLES,
    PATIENT,
    PRODUCED,
    PRODUCER,
    SECURITY,
    Recorder,
    ignore,
    patiently,
    serving,
)
from .test_client import silent

NAME = "tcp://several.invalid:5600"
OTHER = msgspec.structs.replace(PRODUCER, engine_id="prefill-9")


class Names(ZeroMqNetwork):
    """One name. ``dialed``: each address that was dialed; ``most``: at once; ``failing``: what dialing raises."""

    def __init__(self, *addresses):
        self.addresses, self.dialed, self.most, self._open = addresses, [], 0, 0
        self.failing = None

    async def resolve(self, endpoint):
        assert endpoint == NAME
        return self.addresses

    @asynccontextmanager
    async def open_dialer(self, endpoint, security, limits):
        self.dialed.append(endpoint)
        if self.failing:
            raise self.failing
        self._open += 1
        self.most = max(self.most, self._open)
        try:
            async with super().open_dialer(endpoint, security, limits) as channel:
                yield channel
        finally:
            self._open -= 1


def wanting_producer(server):
    return "" if server == PRODUCER else f"{server.engine_id!r}, not {PRODUCER.engine_id!r}"


def meeting(network, *, on_event=ignore, limits=PATIENT, **how):
    return open_client(
        NAME,
        identity=CONSUMER,
        publication=PRODUCED,
        security=SECURITY,
        on_event=on_event,
        limits=limits,
        network=network,
        why_not=wanting_producer,
        **how,
    )


async def not_met(network, error, **how):
    recorder = Recorder()
    with pytest.raises(error) as caught:
        async with meeting(network, on_event=recorder, **how):
            raise AssertionError("unreachable")
    assert recorder.seen == [], "without PeerReady there is no event"
    return caught.value


@pytest.mark.parametrize("order", [1, -1])
async def test_only_the_server_that_is_wanted_is_heard(order):
    served, passed_over, answered = Recorder(), Recorder(), Recorder()
    async with serving(on_event=served) as right, serving(identity=OTHER, on_event=passed_over) as wrong:
        network = Names(*(right.endpoint, wrong.endpoint)[::order])
        async with meeting(network, on_event=answered) as client:
            assert (client.identity, client.address, client.is_only) == (PRODUCER, right.endpoint, False)
            await passed_over.wait_of(ConnectionClosed)
            client.send(EXAMPLES["release"])
            await served.wait_of(ReleaseReceived)
            key = next(key for key, event in served.seen if isinstance(event, ReleaseReceived))
            right.send(key, Released(leases=ANSWERS))
            await answered.wait_of(ReleaseAnswered)
        assert [type(event) for (event,) in answered.seen] == [PeerReady, ReleaseAnswered, ConnectionClosed]
        await served.wait_of(ConnectionClosed)


async def test_a_server_at_two_addresses_is_met_once():
    served, answered = Recorder(), Recorder()
    async with serving(bind="tcp://0.0.0.0:0", on_event=served) as server:
        port = server.endpoint.rpartition(":")[2]
        async with meeting(Names(*(f"tcp://127.0.0.{at}:{port}" for at in (1, 2, 3))), on_event=answered):
            await served.wait_of(ConnectionClosed, len(served.of(PeerReady)) - 1)
        assert [type(event) for (event,) in answered.seen] == [PeerReady, ConnectionClosed]


async def test_a_server_of_its_own_address_is_told_from_another_one():
    async with serving(identity=OTHER) as wrong:
        error = await not_met(Names(wrong.endpoint), WrongServer)
        assert (error.message, error.answered) == (f"{NAME} is 'prefill-9', not 'prefill-0'", OTHER)
        assert error.code == "wrong_server"
        assert "give each server an address or a name of its own" in error.remedy


async def test_a_server_that_starts_to_listen_at_one_of_several_is_met():
    port = free_port()
    network = Names(f"tcp://127.0.0.2:{port}", f"tcp://127.0.0.1:{port}")
    met = asyncio.Event()

    async def meet():
        async with meeting(network):
            met.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(meet())
        while len(network.dialed) < 4:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.001)
        async with serving(bind=f"tcp://127.0.0.1:{port}"):
            await patiently(met.wait())


async def test_an_address_that_is_silent_keeps_no_other_waiting():
    async with serving() as server:
        port = server.endpoint.rpartition(":")[2]
        with silent("127.0.0.2", int(port)):
            async with meeting(Names(f"tcp://127.0.0.2:{port}", server.endpoint)) as client:
                assert client.address == server.endpoint


async def test_what_this_process_lacks_is_told_first():
    network = Names("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    network.failing = SocketsExhausted("open files", 10)
    error = await not_met(network, SocketsExhausted)
    assert error.local


async def test_an_earlier_address_is_tried_first_and_if_the_name_has_lost_it():
    async with serving() as right, serving(identity=OTHER) as wrong:
        for addresses in ((wrong.endpoint, right.endpoint), (wrong.endpoint,)):
            network = Names(*addresses)
            async with meeting(network, first=right.endpoint) as client:
                assert client.address == right.endpoint
            assert network.dialed[0] == right.endpoint
        async with meeting(Names(right.endpoint), first=right.endpoint) as client:
            assert client.is_only


async def test_canceling_a_search_at_any_moment_leaves_nothing_behind():
    async with serving() as right, serving(identity=OTHER) as wrong:
        before, turns, entered = asyncio.all_tasks(), 0, 0

        async def visit():
            nonlocal entered
            limits = msgspec.structs.replace(PATIENT, closing_s=0.02)
            async with meeting(Names(wrong.endpoint, right.endpoint), limits=limits):
                entered += 1
                await asyncio.Event().wait()

        while not entered:
            visiting = asyncio.ensure_future(visit())
            for _ in range(turns):
                await asyncio.sleep(0)
            visiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await visiting
            assert asyncio.all_tasks() == before
            turns += 1 + turns // 8
            assert turns < 1_000_000, "it was never entered"
