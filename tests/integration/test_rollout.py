"""A rolling update behind one name: an old and a new pod share it, then the new one alone has it, under requests."""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest

from handshake.sockets import ZeroMqNetwork
from kvflow.worker.environment import PRODUCTION
from tests.ports import free_port

from .conftest import ELSEWHERE
from .consuming import consuming
from .shapes import Shape

NAME = "prefill.invalid"
HOSTS = {"old": "127.0.0.2", "new": "127.0.0.3"}
REQUESTS = 200
AT_ONCE = 4
SHAPE = Shape(num_blocks=4 * AT_ONCE)


class Names(ZeroMqNetwork):
    """A name server of one name. ``hosts``: its addresses now."""

    hosts = ()

    async def resolve(self, endpoint):
        port = endpoint.rpartition(":")[2]
        if NAME in endpoint:
            return tuple(f"tcp://{host}:{port}" for host in self.hosts)
        return await super().resolve(endpoint)


class Rollout:
    """The pods, the name, and the requests. ``waits``: seconds that each request took."""

    def __init__(self, pods):
        self.pods, self.network, self.waits, self.asked = pods, Names(), [], 0

    def lead(self, *pods):
        self.network.hosts = tuple(HOSTS[pod] for pod in pods)

    @asynccontextmanager
    async def decoding(self, name):
        """Open a decode engine."""
        environment = msgspec.structs.replace(PRODUCTION, network=self.network)
        async with consuming(SHAPE, engine_id=name, environment=environment, transport="auto") as consumer:
            yield consumer

    async def run(self, consumer, count, *pods):
        """Run requests to these pods in turn, some at once. Any failure fails the test."""
        lanes = asyncio.Queue()
        for lane in range(AT_ONCE):
            lanes.put_nowait([[4 * lane, 4 * lane + 1], [4 * lane + 2, 4 * lane + 3]])

        async def ask(pod, request):
            blocks = await lanes.get()
            began = time.monotonic()
            params = await self.pods[pod].offer(request, blocks, 8)
            await consumer.pull(params, blocks)
            self.waits.append(time.monotonic() - began)
            consumer.has(request, blocks, 8)
            assert await self.pods[pod].outcome(request) == "released"
            lanes.put_nowait(blocks)

        async with asyncio.TaskGroup() as group:
            for at in range(count):
                self.asked += 1
                group.create_task(ask(pods[at % len(pods)], f"r{self.asked}"))


@pytest.mark.parametrize(
    "plane", [pytest.param("nixl", marks=ELSEWHERE), pytest.param("tcp", marks=pytest.mark.processes)]
)
@pytest.mark.parametrize("order", [("old", "new"), ("new", "old")], ids="-".join)
@pytest.mark.parametrize("engines", [("prefill-0", "prefill-0"), ("prefill-0", "prefill-1")], ids=["one id", "two ids"])
async def test_none_of_two_hundred_requests_fails(spawn, record_property, plane, order, engines):
    ports = free_port(), free_port()
    children = [spawn(), spawn()]

    def pod(name, child, engine_id):
        host = HOSTS[name]
        data = {"tcp_bind": f"tcp://{host}:{ports[1]}", "tcp_advertise": f"tcp://{NAME}:{ports[1]}"}
        bind, advertise = (f"tcp://{each}:{ports[0]}" for each in (host, NAME))
        settings = {"engine_id": engine_id, "bind": bind, "advertise": advertise, "transport": plane}
        return child.producing(SHAPE, **settings, **(data if plane == "tcp" else {}))

    async with AsyncExitStack() as cluster:
        draining = await cluster.enter_async_context(AsyncExitStack())
        rollout = Rollout({"old": await draining.enter_async_context(pod("old", children[0], engines[0]))})
        rollout.lead("old")
        steady = await cluster.enter_async_context(rollout.decoding("decode-0"))
        await rollout.run(steady, 20, "old")
        rollout.pods["new"] = await cluster.enter_async_context(pod("new", children[1], engines[1]))
        rollout.lead(*order)
        await rollout.run(steady, 40, "new", "old")
        for number in range(1, 5):  # each meets both pods for the first time
            async with rollout.decoding(f"decode-{number}") as fresh:
                await rollout.run(fresh, 10, *order)
        rollout.lead("new")
        await rollout.run(steady, 40, "old", "new")  # the old one drains
        await draining.aclose()
        await rollout.run(steady, 40, "new")
        async with rollout.decoding("decode-5") as fresh:
            await rollout.run(fresh, 20, "new")
        steady.at_rest()
        assert len(rollout.waits) == rollout.asked == REQUESTS
        record_property("longest_s", round(max(rollout.waits), 3))
