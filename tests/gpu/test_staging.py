"""Staging memory on the device of the caches: torch's copies against NumPy's, and staged pulls between processes."""

from functools import partial

import msgspec
import numpy as np
import pytest
import torch

from kvflow.layout.component import Region
from kvflow.memory.device import TorchStage
from kvflow.planning.staging import AXES_MAX
from kvflow.reads.bounds import CheckedScatter
from kvflow.reads.staging import StagingMemory
from kvflow.worker.environment import PRODUCTION
from tests.fakes.staging import STAGE_ALL, PlansAt

from .memory import SPIN_CYCLES, build, pattern
from .reading import PATIENCE_S, reading
from .test_pulls import LAYOUTS, SOURCES, TARGETS

UNITS, SLOTS = 512, 128
PIECES, PIECE = 16, 256
BUFFER = SLOTS * PIECES * PIECE


def one_copy(address):
    """The pieces of a unit touch in the target, and lie apart in the buffer: all first ones, then all second ones."""
    axes = [PIECES, SLOTS * PIECE, PIECE, *[1, 0, 0] * (AXES_MAX - 1)]
    row = [PIECE, 0, PIECE, address, PIECES * PIECE, 0, 0, *axes]
    reach = np.array([UNITS * PIECES * PIECE], np.int64)
    return CheckedScatter(np.array([row], np.int64), SLOTS, (UNITS, 1, 1), reach, 0, 1, SLOTS)


def test_torch_scatters_many_buffers_without_a_wait_between_them(device):
    draw = np.random.default_rng(0)
    arrived = draw.integers(0, 256, 8 * BUFFER, dtype=np.uint8)
    target = torch.zeros(UNITS * PIECES * PIECE, dtype=torch.uint8, device=device)
    staging = StagingMemory(8 * BUFFER)
    staging._move(TorchStage(torch.from_numpy(arrived).to(device), [target]))
    assert staging.memory == ("VRAM" if device == "cuda" else "DRAM")
    if device == "cuda":
        torch.cuda.synchronize()
    expected = np.zeros((UNITS, PIECES, PIECE), np.uint8)
    scatterer = staging.scatterer(one_copy(target.data_ptr()))
    started = []
    if device == "cuda":
        with torch.cuda.stream(staging._stage._stream):
            torch.cuda._sleep(SPIN_CYCLES)  # copies end behind it
    for buffer in range(8):
        units = draw.permutation(UNITS)[:SLOTS].astype(np.int32)
        places = arrived.reshape(8, PIECES, SLOTS, PIECE)[buffer].transpose(1, 0, 2)
        expected[units] = places
        started.append(scatterer.start(staging.content(buffer), units))
    if device == "cuda":
        assert not any(scattering.poll() for scattering in started), "a start has waited for the stream of copies"
    for scattering in started:
        while scattering is not None and not scattering.poll():
            pass
    assert np.array_equal(target.cpu().numpy(), expected.ravel())


@pytest.mark.nixl
@pytest.mark.processes
def test_half_of_the_heads_is_read_through_staging_memory(device, request):
    costs = msgspec.structs.replace(STAGE_ALL, staged_memory="VRAM" if device == "cuda" else "DRAM")
    parts = {"staging": lambda config, _: config.tuning.staging_bytes, "make_plans": lambda: PlansAt(costs)}
    for name, part in parts.items():
        request.addfinalizer(partial(msgspec.structs.force_setattr, PRODUCTION, name, getattr(PRODUCTION, name)))
        msgspec.structs.force_setattr(PRODUCTION, name, part)
    theirs, ours = LAYOUTS["half of the heads"]
    settings = {"theirs": theirs, "ours": ours}
    with reading([device, device], **settings) as (source, worker, cache):
        source.do("pattern")
        report = worker.pull(source.offer("request", SOURCES), [TARGETS]).result(PATIENCE_S)
        assert report.timings_s["scatter"] > 0
        expected = build(theirs, "cpu")
        expected.backing.copy_(pattern(expected.backing.numel()))
        for layer in expected.views:
            for role in ("k", "v"):
                there, here = expected.component(layer, role), cache.component(layer, role).cpu()
                assert torch.equal(here[TARGETS].view(torch.int16), there[SOURCES][:, :2].view(torch.int16))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
def test_staging_memory_moves_to_the_device_of_the_cache():
    cache = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    staging = StagingMemory(8 << 12)
    staging.place([Region(cache.data_ptr(), cache.nbytes, "VRAM", cache.device.index)])
    (region,) = staging.regions
    assert (region.memory, region.nbytes) == ("VRAM", 8 << 12)
