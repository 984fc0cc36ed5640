"""The rate of a peer: measured on real pulls over a link of 1 GB/s, and told with its likely cause if it is low."""

import asyncio
import logging

import msgspec
import pytest

from kvflow.config import WorkerConfig
from kvflow.events import PeerMeasured, PeerSlow
from kvflow.layout.specs import FullAttention
from kvflow.memory.cache import allocate
from kvflow.reads import contract
from kvflow.reads.contract import Carrier
from kvflow.reads.pacing import MEASURED_BYTES
from kvflow.reads.reach import judge_rate
from kvflow.worker.environment import PRODUCTION
from kvflow.worker.runtime import open_worker
from tests.helpers.async_backend import AsyncTransport, LinkModel
from tests.helpers.loops import looped
from tests.unit.kvflow.worker.helpers import PATIENCE_S, SECRET

SPECS = {name: FullAttention(block_size=256, num_kv_heads=8, head_size=128, dtype="float16") for name in "abcd"}
BLOCK_BYTES = 4 << 20
BLOCKS = MEASURED_BYTES // BLOCK_BYTES


class SaidToBeVram:
    """A cache in host memory whose manifest calls it VRAM. The modeled link takes any address."""

    def __init__(self, cache):
        self._cache = cache
        self.bytes_per_block = cache.bytes_per_block

    def manifest(self):
        manifest = self._cache.manifest()
        regions = [msgspec.structs.replace(region, memory="VRAM", device=0) for region in manifest.regions]
        return msgspec.structs.replace(manifest, regions=tuple(regions))


async def pull_twice(*, vram, bytes_per_s=1e9):
    """Pull a little, so that the peer is met, and 64 MiB twice; return what was told of the rate."""
    link = LinkModel(bytes_per_s=bytes_per_s, progress=True, any_memory=vram)

    def open_transport(_config, agent_name, sink, staging_bytes=0):
        return AsyncTransport(agent_name, sink, staging_bytes, model=link)

    environment = msgspec.structs.replace(PRODUCTION, open_transport=open_transport)
    events = []
    caches = [allocate(SPECS, num_blocks=BLOCKS) for _ in range(2)]
    assert caches[0].bytes_per_block == BLOCK_BYTES
    if vram:
        caches = [SaidToBeVram(cache) for cache in caches]
    configs = [WorkerConfig(engine_id=name, cluster_secret=SECRET) for name in ("prefill-0", "decode-0")]
    async with (
        open_worker(configs[0], caches[0], environment=environment) as source,
        open_worker(configs[1], caches[1], environment=environment, hooks=[events.append]) as target,
        asyncio.timeout(PATIENCE_S),
    ):
        for number, count in enumerate((1, BLOCKS, BLOCKS)):
            ids = [list(range(count))]
            await target.pull(source.offer(f"request-{number}", ids, 256 * count), ids)
    return [event for event in events if isinstance(event, PeerMeasured | PeerSlow)]


async def test_gpus_that_are_read_slowly_are_told_once_with_cause_and_remedy(caplog):
    caplog.set_level(logging.INFO, "kvflow")
    rate, slow = await pull_twice(vram=True)
    assert (rate.source_memory, rate.target_memory, rate.transport, rate.plane) == ("VRAM", "VRAM", "rc_mlx5", "async")
    assert rate.nbytes >= MEASURED_BYTES
    assert 0 < rate.gb_per_s == slow.gb_per_s <= 1.05, "the link carries no more"
    assert "network card" in slow.detail
    assert "nvidia-peermem" in slow.remedy
    (line,) = [record for record in caplog.records if record.getMessage().startswith("peer.slow")]
    assert line.levelname == "WARNING"
    assert "remedy=" in line.getMessage()


async def test_host_memory_is_measured_and_never_called_slow():
    (rate,) = await pull_twice(vram=False)
    assert isinstance(rate, PeerMeasured)
    assert (rate.source_memory, rate.target_memory) == ("DRAM", "DRAM")
    assert 0 < rate.gb_per_s <= 1.05


def told(carrier, gb_per_s, memories=("VRAM", "VRAM")):
    rate = contract.RateLearned("p", MEASURED_BYTES, MEASURED_BYTES / gb_per_s / 1e9, *memories)
    return list(judge_rate(rate, carrier))


@looped(
    "carrier, word",
    [
        (Carrier("tcp", "kind", "tcp"), "TCP"),
        (Carrier("cuda_ipc", "addresses", "nixl"), "NVLink"),
        (Carrier("cuda_ipc|rc_mlx5", "candidates", "nixl"), "NVLink"),
        (Carrier("rc_mlx5", "addresses", "nixl"), "network card"),
        (Carrier("unknown", "nothing", "nixl"), "network card"),
    ],
)
def test_the_cause_follows_from_what_carries_the_bytes(carrier, word):
    rate, slow = told(carrier, 1.99)
    assert (rate.gb_per_s, slow.gb_per_s, slow.transport) == (1.99, 1.99, carrier.name)
    assert word in slow.detail
    assert "docs/howto/gpus.md" in slow.remedy


def test_two_gigabytes_per_second_are_not_slow():
    (rate,) = told(Carrier("cuda_ipc", "addresses", "nixl"), 2.01)
    assert rate.gb_per_s == 2.01


@pytest.mark.parametrize("memories", [("DRAM", "VRAM"), ("VRAM", "DRAM"), ("DRAM", "DRAM")])
def test_host_memory_on_one_side_is_not_called_slow(memories):
    assert len(told(Carrier("rc_mlx5", "addresses", "nixl"), 0.5, memories)) == 1
