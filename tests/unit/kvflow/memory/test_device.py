"""What torch is told to copy, with host memory in the place of a GPU: the CUDA calls themselves need one."""

import contextlib
import threading
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from kvflow import FullAttention, allocate
from kvflow.layout.component import Region
from kvflow.memory import device as module
from kvflow.memory.device import TorchDeviceMemory


class Stream:
    """Says when the copies of one device are awaited."""

    made: list["Stream"]

    def __init__(self, device):
        self.device, self.awaited, self.thread = device, 0, threading.get_ident()
        self.made.append(self)

    def synchronize(self):
        self.awaited += 1


@pytest.fixture
def caches(monkeypatch):
    """Two regions of device 1 and one of device 2, in host memory."""
    held = [np.arange(at, at + 40, dtype=np.uint8) for at in (0, 50, 100)]
    tensors = {array.ctypes.data: torch.from_numpy(array) for array in held}
    Stream.made = []
    monkeypatch.setattr(module, "wrapped", lambda region: tensors[region.address])
    monkeypatch.setattr(module, "_pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return held


def memory_of(caches):
    kinds = [("VRAM", 1), ("VRAM", 1), ("VRAM", 2)]
    regions = [Region(array.ctypes.data, 40, *kind) for array, kind in zip(caches, kinds, strict=True)]
    return TorchDeviceMemory([*reversed(regions), Region(1, 8)], 64)


def test_parts_of_several_regions_are_fetched_in_order(caches):
    first, second, third = (array.ctypes.data for array in caches)
    memory, into = memory_of(caches), bytearray(7)
    memory.fetch(1, [(second + 38, 2), (first, 4), (second, 1)], memoryview(into))
    assert [*into] == [88, 89, 0, 1, 2, 3, 50]
    memory.fetch(2, [(third + 39, 1)], memoryview(into)[6:])
    assert [*into] == [88, 89, 0, 1, 2, 3, 139]
    assert [(stream.device, stream.awaited) for stream in Stream.made] == [(1, 1), (2, 1)]


def test_parts_of_several_regions_are_stored_and_nothing_else(caches):
    before = [array.copy() for array in caches]
    first, second, _ = (array.ctypes.data for array in caches)
    memory_of(caches).store(1, [(second + 38, 2), (first + 5, 1)], memoryview(b"abc"))
    before[1][38:] = [97, 98]
    before[0][5] = 99
    for array, expected in zip(caches, before, strict=True):
        np.testing.assert_array_equal(array, expected)
    assert [stream.awaited for stream in Stream.made] == [1]


def test_parts_outside_their_region_and_oversized_buffers_are_refused(caches):
    memory, at = memory_of(caches), caches[0].ctypes.data
    with pytest.raises(RuntimeError):
        memory.fetch(1, [(at + 39, 2)], memoryview(bytearray(2)))
    with pytest.raises(AssertionError):
        memory.store(1, [(at, 40), (at, 40)], memoryview(bytes(80)))


def test_each_thread_has_a_stream_and_a_buffer_of_its_own(caches):
    memory, at = memory_of(caches), caches[0].ctypes.data

    def fetch_twice():
        for _ in range(2):
            memory.fetch(1, [(at, 3)], memoryview(bytearray(3)))

    fetch_twice()
    thread = threading.Thread(target=fetch_twice)
    thread.start()
    thread.join()
    assert [stream.awaited for stream in Stream.made] == [2, 2]
    assert Stream.made[0].thread != Stream.made[1].thread


# Where a device is with its work.


class Devices:
    """Stand-ins for the events and streams of torch, on devices that do their work as far as a test says."""

    def __init__(self, monkeypatch):
        self.done = {}
        self.asked_on = []
        self.current = None
        for name in ("Event", "device"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")

    def Event(self):  # noqa: N802
        event = SimpleNamespace()
        event.record = lambda stream: setattr(event, "stream", stream)

        def query():
            self.asked_on.append(self.current)
            return self.done[event.stream]

        event.query = query
        return event

    @contextlib.contextmanager
    def device(self, device):
        self.current = device
        yield
        self.current = None


def on_devices(*devices):
    cache = allocate({"a": FullAttention(block_size=4, num_kv_heads=2, head_size=8, dtype="float16")}, num_blocks=8)
    (region,) = cache.manifest().regions
    regions = [msgspec.structs.replace(region, memory="VRAM", device=device) for device in devices]
    cache._manifest = msgspec.structs.replace(cache.manifest(), regions=tuple(regions))
    return cache


def test_a_cache_in_host_memory_has_no_writes_to_wait_for():
    spec = FullAttention(block_size=4, num_kv_heads=2, head_size=8, dtype="float16")
    assert allocate({"a": spec}, num_blocks=8).write_marker() is None


def test_a_mark_has_passed_when_every_device_has_come_so_far(monkeypatch):
    devices = Devices(monkeypatch)
    is_passed = on_devices(3, 1, 3).write_marker()()
    devices.done = {"stream of 1": True, "stream of 3": False}
    assert not is_passed()
    devices.done["stream of 3"] = True
    assert is_passed()
    assert devices.asked_on == [1, 3, 1, 3], "each on its own device, so that no other thread opens a context elsewhere"
