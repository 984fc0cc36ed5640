"""Names with several addresses, which may lead to several servers: the one that is wanted is met, and no other."""

import asyncio

import msgspec
import pytest

from handshake.client import open_client
from handshake.errors import SocketsExhausted
from handshake.sockets import ZeroMqNetwork

from .helpers import (
    CONSUMER,
    PATIENT,
    PRODUCED,
    PRODUCER,
    SECURITY,
    ignore,
    serving,
)

NAME = "tcp://several.invalid:5600"
OTHER = msgspec.structs.replace(PRODUCER, engine_id="prefill-9")


class Names(ZeroMqNetwork):
    """One name. ``dialed``: each address that was dialed; ``failing``: what dialing raises."""

    def __init__(self, *addresses, failing=None):
        self.addresses, self.dialed, self.failing = addresses, [], failing

    async def resolve(self, endpoint):
        assert endpoint == NAME
        return self.addresses

    def open_dialer(self, endpoint, security, limits):
        self.dialed.append(endpoint)
        if self.failing:
            raise self.failing
        return super().open_dialer(endpoint, security, limits)


def wanting_producer(server):
    return "" if server == PRODUCER else f"{server.engine_id!r}, not {PRODUCER.engine_id!r}"


def meeting(network, *, limits=PATIENT, **how):
    return open_client(
        NAME,
        identity=CONSUMER,
        publication=PRODUCED,
        security=SECURITY,
        on_event=ignore,
        limits=limits,
        network=network,
        why_not=wanting_producer,
        **how,
    )


async def test_what_this_process_lacks_is_told_first():
    network = Names("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", failing=SocketsExhausted("open files", 10))
    with pytest.raises(SocketsExhausted) as caught:
        async with meeting(network):
            raise AssertionError("unreachable")
    assert caught.value.local


async def test_an_earlier_address_is_tried_first_and_if_the_name_has_lost_it():
    async with serving() as right, serving(identity=OTHER) as wrong:
        for addresses in ((wrong.endpoint, right.endpoint), (wrong.endpoint,)):
            network = Names(*addresses)
            async with meeting(network, first=right.endpoint) as client:
                assert (client.identity, client.address, client.is_only) == (PRODUCER, right.endpoint, False)
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
