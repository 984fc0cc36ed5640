"""``kvflow bench fence`` measures what it says: each of its workers does what its name says, and nothing else."""

from contextlib import asynccontextmanager

import msgspec
import pytest

import kvflow
from handshake.messages import Release
from kvflow.reads.thread import create_transport
from kvflow.worker.environment import PRODUCTION
from tests.benchmarks import fence
from tests.benchmarks.fence import FENCE_ONLY, WHOLE, WITHOUT
from tests.benchmarks.fenceless import RELEASE, LeftOut

from .producing import configured

pytestmark = [pytest.mark.nixl, pytest.mark.processes]

ROUNDS, IN_A_ROW, BLOCKS = 3, 2, 4
PULLS = (ROUNDS + 1) * IN_A_ROW
SMALL = msgspec.structs.replace(fence.GEOMETRY, num_blocks=16)


class Counting:
    """Environment that count what reaches the real transport and the real network."""

    def __init__(self):
        self.fences = self.releases = 0
        self.environment = msgspec.structs.replace(PRODUCTION, open_transport=self.open_transport, network=self)

    def open_transport(self, config, agent_name, sink, staging_bytes=0):
        transport = create_transport(config, agent_name, sink, staging_bytes)
        open_planes = transport._open_planes

        def open_counted(**given):
            planes = open_planes(**given)
            for plane in planes.backends.values():
                plane.post_check = self.counted(plane.post_check)
            return planes

        transport._open_planes = open_counted
        return transport

    def counted(self, post_check):
        def post_counted(peer, first, last, reads, *, fence):
            self.fences += len(reads)
            return post_check(peer, first, last, reads, fence=fence)

        return post_counted

    def __getattr__(self, name):
        return getattr(PRODUCTION.network, name)

    @asynccontextmanager
    async def open_dialer(self, *arguments):
        async with PRODUCTION.network.open_dialer(*arguments) as channel:
            send = channel.send

            def counted(frames):
                self.releases += RELEASE in frames[0]
                return send(frames)

            channel.send = counted
            yield channel


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv("KVFLOW_CLUSTER_SECRET", configured("").cluster_secret)


class Offers:
    """What a producer has offered to one worker."""

    def __init__(self, producer, name):
        self.producer, self.name = producer, name
        self.tickets = []

    async def offer(self, block_ids, num_tokens, count):
        first = len(self.tickets)
        names = [f"{self.name} {number}" for number in range(first, first + count)]
        self.tickets += [self.producer.offer(name, block_ids, num_tokens) for name in names]
        return self.tickets[first:]


async def test_each_worker_does_what_its_name_says(secret):
    counting = {name: Counting() for name in (WHOLE, FENCE_ONLY, WITHOUT)}
    found = {name: fence.variants(counted.environment)[name] for name, counted in counting.items()}
    async with kvflow.open_worker(configured("source", lease_s=600.0), SMALL.build()) as producer:
        offers = {name: Offers(producer, name) for name in found}
        async with fence.open_variants(found, SMALL) as workers:
            for name, worker in workers.items():
                samples = await fence.measure(offers[name].offer, {name: worker}, BLOCKS, IN_A_ROW, ROUNDS)
                assert len(samples[name]) == ROUNDS * IN_A_ROW
                assert len(offers[name].tickets) == PULLS
            for ticket in offers[WHOLE].tickets:
                assert await producer.wait_offer(ticket.request_id) == "released"
        # The others are closed as well, and have sent all that they had to send. Their leases are left.
        assert producer.snapshot().leases == 2 * PULLS
        assert all(producer.revoke(ticket.request_id) for ticket in offers[FENCE_ONLY].tickets)
        assert all(producer.revoke(ticket.request_id) for ticket in offers[WITHOUT].tickets)
    assert {name: counted.fences for name, counted in counting.items()} == {WHOLE: PULLS, FENCE_ONLY: PULLS, WITHOUT: 0}
    assert counting[WHOLE].releases > 0
    assert counting[FENCE_ONLY].releases == counting[WITHOUT].releases == 0
    assert found[WHOLE].left_out == LeftOut(0, 0)
    for name, fences in {FENCE_ONLY: 0, WITHOUT: PULLS}.items():
        assert found[name].left_out.fences == fences
        assert 0 < found[name].left_out.releases <= PULLS


async def test_it_measures_the_same_number_of_pulls_of_each(monkeypatch):
    monkeypatch.setattr(fence, "SIZES", {"64 KiB": (1, 2)})
    shown = []
    (table,) = await fence.run(5, 0, shown.append)
    assert [row[:3] for row in table.rows] == [("64 KiB", FENCE_ONLY, 10), ("64 KiB", WHOLE, 10)]
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert shown == ["fence, 64 KiB"]


def test_a_release_is_known_by_its_frame():
    assert msgspec.msgpack.encode(Release(read=True, leases=())).startswith(b"\x83\xa4type" + RELEASE)
