"""Staged reads of caches on a device, by two workers whose environment asks for them: torch copies later.

The device is memory of the host that manifests call VRAM, over a modeled link which takes any address.
"""

import asyncio

import msgspec
import pytest
import torch

from kvflow.config import WorkerConfig
from kvflow.layout.component import Region
from kvflow.layout.shards import Shard
from kvflow.layout.specs import FullAttention
from kvflow.memory.cache import allocate
from kvflow.reads.thread import ThreadedTransport
from kvflow.worker.environment import PRODUCTION, staging_of
from kvflow.worker.runtime import open_worker
from tests.fakes.staging import STAGE_ALL, PlansAt
from tests.helpers.async_backend import AsyncBackend, LinkModel
from tests.helpers.late_tensors import LateTensors
from tests.helpers.settings import flat_config
from tests.unit.kvflow.observability.test_slow_peers import SaidToBeVram

from .helpers import PATIENCE_S, SECRET

SPECS = {name: FullAttention(block_size=16, num_kv_heads=4, head_size=32, dtype="float16") for name in "ab"}
SOURCES, TARGETS = list(range(0, 60, 2)), list(range(31, 1, -1))


class VramTensors(LateTensors):
    """Staging memory that calls itself VRAM, as the cache does."""

    def _move(self, stage):
        stage.region = Region(stage.region.address, stage.region.nbytes, "VRAM", 0)
        self.stage = stage
        super()._move(stage)


class _Backend(AsyncBackend):
    def add(self, address):
        return super().add(msgspec.structs.replace(address, planes={"async": address.planes["nixl"]}))


STAGED_ON_DEVICES = msgspec.structs.replace(STAGE_ALL, staged_memory="VRAM")


async def test_caches_on_devices_are_staged_by_copies_that_end_later():
    stagings = []

    def open_transport(_config, agent_name, sink, staging_bytes=0):
        stagings.append(VramTensors(staging_bytes))

        def opened(regions, epochs, _serving):
            return _Backend(agent_name, regions, epochs, LinkModel(progress=True, any_memory=True))

        return ThreadedTransport("nixl", {"nixl": opened}, sink, stagings[-1])

    environment = msgspec.structs.replace(
        PRODUCTION,
        open_transport=open_transport,
        make_plans=lambda: PlansAt(STAGED_ON_DEVICES),
        staging=lambda _config, _manifest: 8 << 16,
    )
    there = allocate(SPECS, num_blocks=64, layout="LBNHC", kv="split")
    here = allocate(SPECS, num_blocks=64, layout="LBNHC", kv="split", shard=Shard(tp_size=2))
    there.backing.copy_(torch.arange(there.backing.numel()) * 2654435761 >> 7)
    source = WorkerConfig(engine_id="prefill-0", cluster_secret=SECRET)
    target = WorkerConfig(engine_id="decode-0", cluster_secret=SECRET)
    async with (
        open_worker(source, SaidToBeVram(there), environment=environment) as producer,
        open_worker(target, SaidToBeVram(here), environment=environment) as consumer,
        asyncio.timeout(PATIENCE_S),
    ):
        report = await consumer.pull(producer.offer("request", [SOURCES], 16 * len(SOURCES)), [TARGETS])
        assert consumer.snapshot().staging.in_use == 0
    assert report.timings_s["scatter"] > 0
    phases = {name: seconds for name, seconds in report.timings_s.items() if name != "total"}
    assert sum(phases.values()) == pytest.approx(report.timings_s["total"], rel=0.01), phases
    assert report.read_bytes == 2 * report.nbytes, "whole tokens were read for half of the heads"
    assert stagings[1].buffers
    assert stagings[1].stage.pending == []
    for layer in SPECS:
        for role in ("k", "v"):
            whole, half = (cache.component(layer, role).view(torch.int16) for cache in (there, here))
            assert torch.equal(half[TARGETS], whole[SOURCES][:, :2])


@pytest.mark.parametrize(
    ("held", "nbytes"),
    [(["VRAM"], 0), (["VRAM", "VRAM"], 0), (["VRAM", "DRAM"], 4096), (["DRAM"], 4096)],
    ids=str,
)
def test_staging_memory_is_for_caches_in_host_memory(held, nbytes):
    regions = tuple(Region(1 << 20, 4096, memory) for memory in held)
    manifest = msgspec.structs.replace(allocate(SPECS, num_blocks=2).manifest(), regions=regions)
    config = flat_config(engine_id="decode-0", cluster_secret=SECRET, staging_bytes=4096)
    assert staging_of(config, manifest) == nbytes
