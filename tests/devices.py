"""Device memory for tests: a stand-in that needs no GPU, and a GPU where ``KVFLOW_TEST_MEMORY=VRAM``."""

import os

import msgspec
import numpy as np

from kvflow.layout.component import Region
from kvflow.reads.device import PORTION_BYTES, device_memory_of

REAL = os.environ.get("KVFLOW_TEST_MEMORY") == "VRAM"

FAR = 1 << 61
"""Set in every address of the stand-in: no process has memory there, so that only a copy of the device reaches it."""


class Host:
    """A cache in host memory."""

    device_memory = None

    def __init__(self, content, *, copy=True):
        self._content = content.copy() if copy else content
        self.region = Region(self._content.ctypes.data, content.nbytes)

    def bytes(self):
        return self._content.copy()

    def write(self, at, content):
        self._content[at : at + len(content)] = content


class StandIn(Host):
    """A cache in the memory of a device that does not exist."""

    def __init__(self, content, *, copy=True, device=3):
        super().__init__(content, copy=copy)
        self._first = self.region.address
        self.region = Region(self._first ^ FAR, content.nbytes, "VRAM", device)
        self.device_memory = self

    def fetch(self, device, parts, into):
        for place, count in self._places(device, parts, into):
            into[place : place + len(count)] = count

    def store(self, device, parts, content):
        for place, there in self._places(device, parts, content):
            there[:] = content[place : place + len(there)]

    def _places(self, device, parts, buffer):
        assert device == self.region.device
        assert 0 < len(buffer) <= PORTION_BYTES
        assert len(buffer) == sum(nbytes for _, nbytes in parts)
        place = 0
        for address, nbytes in parts:
            assert address & FAR
            at = (address ^ FAR) - self._first
            assert 0 <= at < at + nbytes <= len(self._content)
            yield place, self._content.data[at : at + nbytes]
            place += nbytes


class StandInCache:
    """A cache of kvflow whose memory is said to be that of the stand-in."""

    def __init__(self, cache, device=3):
        self._cache = cache
        self.bytes_per_block = cache.bytes_per_block
        self.content = cache.backing.numpy()
        self.device = StandIn(self.content, copy=False, device=device)

    def manifest(self):
        return msgspec.structs.replace(self._cache.manifest(), regions=(self.device.region,))


class Gpu:
    """A cache in the memory of the first GPU, moved by torch."""

    def __init__(self, content):
        import torch

        self._torch = torch
        self._content = torch.from_numpy(content).cuda()
        torch.cuda.synchronize()
        self.region = Region(self._content.data_ptr(), content.nbytes, "VRAM", self._content.device.index)
        self.device_memory = device_memory_of([self.region])

    def bytes(self):
        return self._content.cpu().numpy()

    def write(self, at, content):
        self._content[at : at + len(content)] = self._torch.from_numpy(np.ascontiguousarray(content)).cuda()
        self._torch.cuda.synchronize()


def cache_of(memory, content):
    """Return a cache in ``DRAM`` or ``VRAM`` with this content."""
    if memory == "DRAM":
        return Host(content)
    return Gpu(content) if REAL else StandIn(content)


class Watched:
    """Device memory that counts its calls, and calls a function before each.

    Attributes:
        fetches: calls that have ended.
        stores: calls that have ended.
        on_fetch: called with the number of the fetch, from 1.
        on_store: called with the number of the store, from 1.
    """

    def __init__(self, memory):
        self._memory = memory
        self.fetches = self.stores = 0
        self.on_fetch = self.on_store = lambda number: None

    def fetch(self, device, parts, into):
        self.on_fetch(self.fetches + 1)
        self._memory.fetch(device, parts, into)
        self.fetches += 1

    def store(self, device, parts, content):
        self.on_store(self.stores + 1)
        self._memory.store(device, parts, content)
        self.stores += 1
