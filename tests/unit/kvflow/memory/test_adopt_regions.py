"""Regions are the bytes that the tensors span, once each, by address, and no byte that no tensor spans."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvflow
from kvflow.errors import SpecInvalid
from kvflow.memory.cache import region_of
from tests.helpers.loops import looped

B, NBYTES = 4, 16


def adopted(*tensors):
    specs = {f"layers.{index}": kvflow.Opaque(block_size=16, nbytes=NBYTES) for index in range(len(tensors))}
    return kvflow.adopt(dict(zip(specs, tensors, strict=True)), specs)


def pages(memory, first, stride=NBYTES):
    """Pages of 16 bytes in a flat memory; from the first to the last byte they span ``3 * stride + 16``."""
    return memory.as_strided((B, NBYTES), (stride, 1), memory.storage_offset() + first)


def ranges(cache, memory):
    """The regions as (first byte, bytes) of the memory."""
    return [(region.address - memory.data_ptr(), region.nbytes) for region in cache.manifest().regions]


@looped(
    "layers, expected",
    [
        ([(0, 16)], [(0, 64)]),
        ([(7, 16)], [(7, 64)]),
        ([(0, 16), (64, 16)], [(0, 128)]),  # they touch
        ([(64, 16), (0, 16)], [(0, 128)]),
        ([(0, 16), (65, 16)], [(0, 64), (65, 64)]),  # a byte between them is nobody's
        ([(300, 16), (0, 16), (100, 16)], [(0, 64), (100, 64), (300, 64)]),
        ([(0, 32), (16, 32)], [(0, 128)]),  # interleaved
        ([(0, 100)], [(0, 316)]),  # between the blocks of a layer is the layer's own
        ([(0, 100), (20, 100), (40, 100)], [(0, 356)]),
        ([(0, 100), (50, 100), (512, 16)], [(0, 366), (512, 64)]),
    ],
)
def test_regions_are_the_union_of_what_tensors_span(layers, expected):
    memory = torch.zeros(1024, dtype=torch.uint8)
    cache = adopted(*(pages(memory, first, stride) for first, stride in layers))
    assert ranges(cache, memory) == expected
    assert cache.bytes_per_block == sum(nbytes for _, nbytes in expected) // B


def test_a_storage_per_region_has_its_bytes():
    memory = torch.zeros(512, dtype=torch.uint8)
    cache = adopted(pages(memory, 200), pages(memory, 3))
    assert [storage.dtype for storage in cache.storages] == [torch.uint8] * 2
    for storage, region in zip(cache.storages, cache.manifest().regions, strict=True):
        assert (storage.data_ptr(), storage.shape, storage.nbytes) == (region.address, (64,), region.nbytes)
        storage.fill_(1)
    assert memory.nonzero().flatten().tolist() == [*range(3, 67), *range(200, 264)]


def test_memory_of_its_own_is_a_region_even_if_it_touches():
    first, second = torch.zeros(2, 64, dtype=torch.uint8).numpy()
    tensors = [torch.from_numpy(half).view(B, NBYTES) for half in (first, second)]
    assert tensors[0].untyped_storage().data_ptr() + 64 == tensors[1].untyped_storage().data_ptr()
    assert [region.nbytes for region in adopted(*tensors).manifest().regions] == [64, 64]


@pytest.mark.parametrize("whole", [False, True])
def test_storages_that_overlap_are_one_region_if_one_has_it_all(whole):
    memory = np.zeros(128, np.uint8)
    halves = (memory if whole else memory[:120], memory[16:])
    tensors = [torch.from_numpy(half).as_strided((B, NBYTES), (32, 1)) for half in halves]
    if whole:
        assert [region.nbytes for region in adopted(*tensors).manifest().regions] == [128]
    else:
        with pytest.raises(SpecInvalid, match="belong to several storages that overlap, and to none as a whole"):
            adopted(*tensors)


def test_components_are_seen_through_regions_that_begin_anywhere():
    """A region that begins behind an odd number of elements of another size."""
    memory = torch.zeros(4096, dtype=torch.uint8)
    values = torch.rand(B, 8)
    at = memory[36 : 36 + B * 34 * 4].view(torch.float32).view(B, 34)[:, 1:9]
    at.copy_(values)
    half = memory[2 : 2 + 16].view(torch.float16).view(B, 2)
    specs = {
        "a": kvflow.Mamba(block_size=16, states=(kvflow.State("ssm", (8,), "float32"),)),
        "b": kvflow.Mamba(block_size=16, states=(kvflow.State("conv", (2,), "float16"),)),
    }
    cache = kvflow.adopt({"a": at, "b": half}, specs)
    assert ranges(cache, memory) == [(2, 16), (40, 3 * 136 + 32)]
    assert torch.equal(cache.component("a", "ssm"), values)
    cache.component("b", "conv").fill_(1.0)
    assert torch.equal(half, torch.ones(B, 2, dtype=torch.float16))


def test_memory_is_described_as_host_memory():
    (region,) = adopted(torch.zeros(B, NBYTES, dtype=torch.uint8)).manifest().regions
    assert (region.memory, region.device) == ("DRAM", 0)


@pytest.mark.proves("other devices (TPU, XPU, NPU)", engine="stand-in")
@looped("kind", ["xpu", "hpu", "xla", "mps", "privateuseone"])  # XLA: TPUs; the last one: NPUs
def test_memory_of_another_kind_of_device_is_refused_by_name(kind):
    storage = SimpleNamespace(device=torch.device(kind, 1), data_ptr=lambda: 4096, nbytes=64)
    with pytest.raises(SpecInvalid, match=f"'{kind}:1': expected cpu or cuda"):
        region_of(storage)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_a_gpu_is_described_as_such():
    page = torch.zeros(B, NBYTES, dtype=torch.uint8, device="cuda")
    cache = adopted(page)
    (region,) = cache.manifest().regions
    assert (region.memory, region.device, region.address) == ("VRAM", page.device.index, page.data_ptr())
    assert cache.component("layers.0", "page").device == page.device
    with pytest.raises(SpecInvalid, match="device is cpu; expected cuda"):
        adopted(page, page.cpu())
