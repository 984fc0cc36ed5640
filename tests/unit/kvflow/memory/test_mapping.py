"""Memory in mappings of its own, and huge pages under it."""

import gc
import math
import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvflow.errors import SpecInvalid
from kvflow.layout.specs import FullAttention
from kvflow.memory import mapping
from kvflow.memory.adopt import adopt
from kvflow.memory.cache import allocate
from kvflow.memory.mapping import bytes_in_huge_pages, huge_page_size, map_bytes

SPECS = {"layer": FullAttention(block_size=16, num_kv_heads=4, head_size=64, dtype="float16")}
LARGE = 1024
"""Blocks: 16 MiB."""


def mapped_at(address):
    """Return the first line and the flags of an address in ``smaps``; None if nothing is mapped there."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    found = None
    for line in lines:
        first = line.split()[0]
        if "-" in first:
            start, end = (int(each, 16) for each in first.split("-"))
            found = line if start <= address < end else None
        elif found and line.startswith("VmFlags:"):
            return found, line.split()[1:]
    return None


def asked_for(address):
    return "hg" in mapped_at(address)[1]


@pytest.fixture
def advised(monkeypatch):
    """What the kernel is asked for. Flags tell nothing: a cache may lie in a heap that an earlier one has asked for."""
    asked = []
    monkeypatch.setattr(mapping, "_libc", SimpleNamespace(madvise=lambda *arguments: asked.append(arguments)))
    return asked


@pytest.fixture
def no_huge_pages(monkeypatch):
    monkeypatch.setattr(mapping, "_SIZE", Path("/nowhere"))
    huge_page_size.cache_clear()
    yield
    huge_page_size.cache_clear()


def test_mapped_memory_is_zeroed_and_has_its_pages_for_itself():
    first, second = map_bytes(100), map_bytes(100)
    assert not first.any()
    assert first.flags.writeable
    assert first.nbytes == 100
    addresses = [array.ctypes.data for array in (first, second)]
    assert [address % mmap.PAGESIZE for address in addresses] == [0, 0]
    assert abs(addresses[0] - addresses[1]) >= mmap.PAGESIZE


def test_mapped_memory_is_freed_with_the_last_view_of_it():
    array = map_bytes(64 << 20)
    address, view = array.ctypes.data, array[100:]
    del array
    assert mapped_at(address)
    del view
    assert mapped_at(address + (32 << 20)) is None


def test_a_cache_asks_for_huge_pages_before_it_is_touched():
    cache = allocate(SPECS, num_blocks=LARGE)
    address = cache.backing.data_ptr()
    assert not cache.backing.any()
    assert asked_for(address) == bool(huge_page_size())
    assert address % (huge_page_size() or 1) == 0
    assert 0 <= cache.huge_page_bytes <= cache.backing.nbytes
    before = address + cache.backing.nbytes // 2
    del cache
    gc.collect()
    assert mapped_at(before) is None


def test_a_cache_can_be_told_not_to_ask(advised):
    allocate(SPECS, num_blocks=LARGE, huge_pages="never")
    assert advised == []
    allocate(SPECS, num_blocks=LARGE)
    assert len(advised) == bool(huge_page_size())
    with pytest.raises(SpecInvalid, match="huge_pages is 'always'"):
        allocate(SPECS, num_blocks=1, huge_pages="always")


def test_a_platform_without_huge_pages_is_no_error(no_huge_pages, advised):
    cache = allocate(SPECS, num_blocks=LARGE)
    assert advised == []
    assert map_bytes(100, huge=True).nbytes == 100
    assert cache.ask_for_huge_pages() == cache.huge_page_bytes


def test_adopted_memory_can_ask_and_keeps_its_bytes():
    shape = (2 * LARGE, 4, 16, 128)
    # In pages of their own: the heap may have memory that an earlier cache has asked for.
    tensor = torch.frombuffer(mmap.mmap(-1, 2 * math.prod(shape)), dtype=torch.float16).view(shape).fill_(1)
    middle = tensor.data_ptr() + tensor.nbytes // 2
    cache = adopt({"layer": tensor}, SPECS)
    assert not asked_for(middle)
    assert cache.ask_for_huge_pages() <= tensor.nbytes
    assert asked_for(middle) == bool(huge_page_size())
    assert bool((tensor == 1).all())


def test_memory_of_a_device_is_not_asked_for():
    cache = allocate(SPECS, num_blocks=LARGE, device="meta")
    assert cache.ask_for_huge_pages() == 0


def test_huge_pages_are_counted_by_mapping(tmp_path, monkeypatch):
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "10000000-10400000 rw-p 00000000 00:00 0\nSize: 4096 kB\nAnonHugePages:      2048 kB\nVmFlags: rd wr hg\n"
        "10400000-10800000 rw-p 00000000 00:00 0\nSize: 4096 kB\nAnonHugePages:         0 kB\nVmFlags: rd wr\n"
        "10800000-11000000 rw-p 00000000 00:00 0 [heap]\nSize: 8192 kB\nAnonHugePages:      8192 kB\nVmFlags: rd wr\n"
    )
    monkeypatch.setattr(mapping, "_MAPS", smaps)
    assert bytes_in_huge_pages([(0x10000000, 16 << 20)]) == (2 + 8) << 20
    assert bytes_in_huge_pages([(0x10000000, 1 << 20), (0x10A00000, 4096)]) == (1 << 20) + 4096
    assert bytes_in_huge_pages([(0x10400000, 4 << 20)]) == 0
    monkeypatch.setattr(mapping, "_MAPS", tmp_path / "nowhere")
    assert bytes_in_huge_pages([(0x10000000, 16 << 20)]) == 0
