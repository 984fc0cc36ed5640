"""Many links: a thousand of one process, a herd at a server that stands still, and the limits that stop a dialer."""

import asyncio
import resource
import time
from collections import Counter
from contextlib import AsyncExitStack
from itertools import count

import pytest
import zmq

import handshake.sockets
from handshake.errors import Closed, SocketsExhausted
from handshake.limits import Limits
from handshake.sockets import DESCRIPTORS_OF_A_LINK, open_dialer
from tests.helpers.limits import files_limited, many_files, open_files
from tests.helpers.waiting import patiently, until
from tests.unit.handshake.helpers import LIMITS, SECURITY, connected, serving

LINKS = 1024
FILES = 6 * LINKS
"""Four for each link here, and one at the server, which is in this process, too."""
AT_ONCE = 16
PATIENT = Limits(connect_s=60.0, handshake_s=60.0)


@pytest.fixture
def files():
    with many_files(FILES):
        yield


async def test_one_process_has_a_thousand_links(files):
    turn = asyncio.Semaphore(AT_ONCE)

    async def link(stack, endpoint):
        async with turn:
            return await stack.enter_async_context(connected(endpoint, limits=PATIENT))

    async with serving(limits=PATIENT) as server:
        stacks = [AsyncExitStack() for _ in range(LINKS)]
        try:
            clients = await asyncio.gather(*(link(stack, server.endpoint) for stack in stacks))
            await until(lambda: len(server.peers) == LINKS, PATIENT.handshake_s)  # it hears of the last ones later
            assert all(client.publication == clients[0].publication for client in clients)
        finally:
            await asyncio.gather(*(stack.aclose() for stack in stacks))


HERD = 300
TAKEN_S = 2.0
TAKEN_AT = 50
"""Of those whose handshake has begun: when they go on, the others are in the middle of theirs."""


async def test_a_server_whose_cpu_is_taken_serves_its_whole_herd(files):
    begun, everyone = count(1), asyncio.Barrier(HERD)

    def make_pass(_key, _identity):
        if next(begun) == TAKEN_AT:
            time.sleep(TAKEN_S)
        return b""

    async def visit(endpoint):
        async with connected(endpoint, limits=PATIENT) as client:
            try:
                await client.ask(report=False)  # answered where the server, too, has it as ready
            except Closed:
                return (await client.wait_closed()).reason
            finally:
                await everyone.wait()
            return "served"

    async with serving(make_pass=make_pass, limits=PATIENT) as server:
        served = await patiently(asyncio.gather(*(visit(server.endpoint) for _ in range(HERD))))
        assert Counter(served) == {"served": HERD}


async def dial_until_refused(stack):
    for _ in range(LINKS):
        try:
            await stack.enter_async_context(open_dialer("tcp://127.0.0.1:9", SECURITY, LIMITS))
        except SocketsExhausted as refusal:
            return refusal
    raise AssertionError("nothing stopped it")


async def test_too_few_open_files_are_named():
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(open_dialer("tcp://127.0.0.1:9", SECURITY, LIMITS))
        limit = open_files() + 5 * DESCRIPTORS_OF_A_LINK
        with files_limited(limit):
            refusal = await dial_until_refused(stack)
    assert (refusal.resource, refusal.limit) == ("open files (RLIMIT_NOFILE)", limit)
    assert "ulimit -n" in refusal.remedy


async def test_too_many_sockets_are_named(monkeypatch):
    monkeypatch.setattr(handshake.sockets, "_sockets_max", lambda _context: 30)
    async with AsyncExitStack() as stack:
        refusal = await dial_until_refused(stack)
    assert (refusal.resource, refusal.limit) == ("ZeroMQ sockets", 30)
    assert "processes" in refusal.remedy


async def test_as_many_sockets_as_files_may_be_open():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with zmq.Context() as context, files_limited(min(soft, 512)):
        expected = min(hard, context.get(zmq.SOCKET_LIMIT))
        assert handshake.sockets._sockets_max(context) == expected, "the soft limit may be raised later"
