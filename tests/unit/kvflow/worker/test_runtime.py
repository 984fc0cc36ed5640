"""Opening and leaving a worker: what is wired, what is reported, and what an exception inside it becomes."""

import asyncio
import logging
import resource
import threading

import msgspec
import pytest

from kvflow import events
from kvflow.errors import (
    BlockIdsInvalid,
    ConfigInvalid,
    SpecInvalid,
    TransportUnavailable,
    WorkerClosed,
    WorkerDraining,
)
from kvflow.layout.component import Region
from kvflow.layout.manifest import Manifest
from kvflow.layout.shards import Shard
from kvflow.planning import plan
from kvflow.reads.contract import PeerAddress
from kvflow.reads.loopback import LoopbackBackend
from kvflow.reads.serving import order_memory
from kvflow.reads.staging import StagingMemory
from kvflow.reads.thread import ThreadedTransport
from kvflow.rendezvous import dialer
from kvflow.rendezvous.endpoint import files_wanted
from kvflow.worker import prepared, runtime
from kvflow.worker.environment import PRODUCTION, staging_of
from kvflow.worker.runtime import open_worker
from tests.helpers.waiting import patiently

from .helpers import PATIENCE_S, cache_of
from .pulling import config


@pytest.mark.parametrize("peers", [64, 200])
@pytest.mark.parametrize("missing", [1, 0])
async def test_few_files_for_the_most_peers_are_told_when_a_worker_starts(caplog, peers, missing):
    before, wanted = resource.getrlimit(resource.RLIMIT_NOFILE), files_wanted(peers)
    files = wanted - missing
    if before[0] < wanted:
        pytest.skip(f"{before[0]} open files are too few")
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, before[1]))
    try:
        async with asyncio.timeout(PATIENCE_S), open_worker(config(peers_max=peers), cache_of()):
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == files, "a library does not raise it"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    messages = [record.getMessage() for record in caplog.records if "ulimit -n" in record.getMessage()]
    assert len(messages) == missing
    said = f"{files} files", f"{peers} peers (peers_max)", f"needs {wanted}", "or lower peers_max"
    assert all(each in message for message in messages for each in said)


@pytest.mark.parametrize("keys", [{}, {"private_key": "01" * 32, "allowed_keys": ("02" * 32,)}])
async def test_a_data_plane_hears_whether_each_reader_has_its_own_key(keys):
    heard = []

    def open_transport(_config, agent_name, sink, _staging_bytes=0):
        def opened(regions, epochs, serving):
            heard.append(serving.keys_differ)
            return LoopbackBackend(agent_name, regions, epochs)

        return ThreadedTransport("loopback", {"loopback": opened}, sink, StagingMemory(0))

    environment = msgspec.structs.replace(PRODUCTION, open_transport=open_transport)
    async with asyncio.timeout(PATIENCE_S), open_worker(config(**keys), cache_of(), environment=environment):
        assert heard == [bool(keys)]


async def test_what_a_peer_can_make_long_is_done_beside_the_loop_and_once(monkeypatch):
    done = []

    def noted(owner, name):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            done.append((name, threading.get_ident()))
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    noted(dialer, "decode")
    noted(plan, "plan_transfer")
    noted(prepared, "assign_sources")
    noted(prepared, "bind_plan")
    async with (
        asyncio.timeout(PATIENCE_S),
        open_worker(config(), cache_of()) as producer,
        open_worker(config("decode-0"), cache_of()) as consumer,
    ):
        tickets = [producer.offer(f"request-{number}", [[number]], 4) for number in range(4)]
        await asyncio.gather(*(consumer.pull(ticket, [[4 + at]]) for at, ticket in enumerate(tickets)))
    assert sorted(name for name, _ in done) == ["assign_sources", "bind_plan", "decode", "plan_transfer"]
    assert threading.get_ident() not in {thread for _, thread in done}


async def test_a_block_stands_for_tokens_of_all_ranks_that_divide_them():
    """Blocks of four tokens on each of two ranks: eight tokens are one block, and nine are two."""
    shard = Shard(dcp_rank=1, dcp_size=2, dcp_interleave=2)
    async with open_worker(config(), cache_of(shard=shard)) as worker:
        worker.offer("request-1", [[3, 4]], 9)
        with pytest.raises(BlockIdsInvalid, match="2 blocks for 8 tokens, which at most 1 can hold"):
            worker.offer("request-2", [[3, 4]], 8)


async def test_hooks_hear_everything_and_a_failing_one_stops_nobody(caplog):
    heard = []

    def failing(event):
        raise ValueError("a defect of the observer")

    with caplog.at_level(logging.ERROR, "kvflow"):
        async with open_worker(config(), cache_of(), hooks=[failing, heard.append]) as worker:
            worker.offer("r", [[1]], 4)
    assert [type(event) for event in heard][:2] == [events.WorkerOpened, events.OfferAdmitted]
    assert heard[0] == events.WorkerOpened(worker.endpoint, "loopback", 8, cache_of().bytes_per_block)
    assert heard[-1] == events.WorkerStopped(leases_revoked=1, pulls_cancelled=0)
    assert "a hook failed" in caplog.text
    assert "a defect of the observer" in caplog.text


@pytest.mark.parametrize(("settings", "buffers"), [({}, 8), ({"staging_bytes": 0}, 0)])
async def test_a_cache_in_host_memory_has_staging_memory(settings, buffers):
    async with open_worker(config(**settings), cache_of()) as worker:
        assert worker.snapshot().staging.buffers == buffers


@pytest.mark.parametrize(
    ("held", "nbytes"),
    [(["VRAM"], 0), (["VRAM", "VRAM"], 0), (["VRAM", "DRAM"], 4096), (["DRAM"], 4096)],
    ids=str,
)
def test_staging_memory_is_for_caches_in_host_memory(held, nbytes):
    regions = tuple(Region(1 << 20, 4096, memory) for memory in held)
    manifest = msgspec.structs.replace(cache_of().manifest(), regions=regions)
    assert staging_of(config(staging_bytes=4096), manifest) == nbytes


def missing(*_given):
    raise TransportUnavailable("NIXL is not installed")


class OverTcp(LoopbackBackend):
    """A data plane that stands for TCP: the loopback under that name."""

    data_endpoint = "tcp://localhost:5700"

    def add(self, address):
        assert address.data_endpoint == "tcp://127.0.0.1:5700"
        assert len(address.credentials.pass_) == 32
        return super().add(PeerAddress(address.peer, {"loopback": address.planes["tcp"]}, address.epochs))


def open_auto(config, agent_name, sink, staging_bytes=0):
    def over_tcp(regions, epochs, *_):
        return OverTcp(agent_name, regions, epochs)

    factories = {"nixl": missing, "tcp": over_tcp}
    return ThreadedTransport(config.transport, factories, sink, StagingMemory(staging_bytes))


WITHOUT_NIXL = msgspec.structs.replace(PRODUCTION, open_transport=open_auto)


async def test_without_nixl_a_worker_goes_on_over_tcp_and_says_so():
    heard = []
    async with (
        asyncio.timeout(PATIENCE_S),
        open_worker(config(transport="auto"), cache_of(), environment=WITHOUT_NIXL, hooks=[heard.append]) as producer,
        open_worker(
            config("decode-0", transport="auto"), cache_of(), environment=WITHOUT_NIXL, hooks=[heard.append]
        ) as consumer,
    ):
        report = await consumer.pull(producer.offer("request-1", [[3]], 4), [[5]])
    assert (report.plane, report.transport) == ("tcp", "loopback")
    told = [(event.plane, event.code, event.detail) for event in heard if isinstance(event, events.PlaneOmitted)]
    assert told == [("nixl", "transport_unavailable", "NIXL is not installed")] * 2
    assert {event.transport for event in heard if isinstance(event, events.WorkerOpened)} == {"tcp"}
    assert [event.plane for event in heard if isinstance(event, events.PeerConnected)] == ["tcp"]


async def test_the_address_is_what_a_mint_elsewhere_needs():
    settings = {"rank": 1, "num_ranks": 2, "lease_slots": 5, "advertise": "tcp://node-7:4000"}
    async with open_worker(config(**settings), cache_of()) as worker:
        address = worker.rank_address
    assert (address.rank, address.slots, address.endpoint) == (1, 5, "tcp://node-7:4000")
    assert worker.endpoint == "tcp://node-7:4000"
    assert address.incarnation == worker.incarnation
    assert address.epoch_base < 2**62


async def test_a_new_mint_learns_what_was_held_before():
    async with open_worker(config(), cache_of()) as worker:
        before = worker.rank_address.epoch_base
        epoch = worker.offer("r", [[1]], 4).grants[0].epoch
        assert before < worker.rank_address.epoch_base == epoch
        worker.revoke("r")
        assert worker.rank_address.epoch_base == epoch + 1


async def test_every_start_is_another_life():
    lives = set()
    for _ in range(3):
        async with open_worker(config(), cache_of()) as worker:
            lives.add((worker.incarnation, worker.rank_address.epoch_base))
    assert len(lives) == 3


async def test_what_is_raised_inside_comes_out_as_it_is():
    with pytest.raises(KeyError, match="of the caller"):
        async with open_worker(config(), cache_of()):
            raise KeyError("of the caller")


async def test_a_worker_refuses_more_in_each_stage_and_never_goes_back():
    """A draining worker takes nothing new and still releases; a closed one does neither, and cannot drain."""
    async with open_worker(config(), cache_of()) as producer:
        tickets = [producer.offer(f"request-{number}", [[number]], 4) for number in range(3)]
        async with asyncio.timeout(PATIENCE_S), open_worker(config("decode-0"), cache_of()) as worker:
            started = {
                "takes no offers": lambda: worker.offer("r", [[1]], 4),
                "pulls nothing": lambda: worker.start_pull(tickets[0], [[1]]).result(),
                "holds nothing": lambda: worker.hold(tickets[0]),
            }
            worker.hold(tickets[0])
            worker.offer("held", [[1]], 4)
            for _ in range(2):
                assert (await worker.drain(0.0)).leases == ("held",)
                for refusal, start in started.items():
                    with pytest.raises(WorkerDraining, match=f"is draining and {refusal}"):
                        start()
            await worker.release(tickets[1])
            assert await producer.wait_offer("request-1") == "released"
        await patiently(worker.drain(0.0))
        for refusal, start in started.items():
            with pytest.raises(WorkerClosed, match=f"is closing and {refusal}"):
                start()
        with pytest.raises(WorkerClosed, match="is closing and releases nothing"):
            await worker.release(tickets[2])


@pytest.mark.parametrize(
    ("settings", "error"), [({"rank": 5}, ConfigInvalid), ({"cluster_secret": "short"}, ConfigInvalid)]
)
async def test_wrong_settings_start_nothing(settings, error):
    with pytest.raises(error):
        async with open_worker(config(**settings), cache_of()):
            pytest.fail("it runs")


async def test_a_cache_that_contradicts_itself_starts_nothing():
    cache = cache_of()
    sound = cache.manifest()

    class Lying:
        bytes_per_block = cache.bytes_per_block

        def manifest(self):
            region = sound.regions[0]
            return Manifest(sound.num_blocks, (Region(region.address, region.nbytes - 1),), sound.groups)

    with pytest.raises(SpecInvalid, match="reaches byte"):
        async with open_worker(config(), Lying()):
            pytest.fail("it runs")


async def test_a_worker_orders_its_stores_around_every_change_of_an_epoch(monkeypatch):
    ordered = []
    monkeypatch.setattr(runtime, "order_memory", lambda: ordered.append(order_memory()))
    async with open_worker(config(), cache_of()) as worker:
        worker.offer("r", [[1]], 4)
        assert len(ordered) == 2
        worker.revoke("r")
        assert len(ordered) == 4
