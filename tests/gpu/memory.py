"""Caches of these tests, and a write that is still queued when its blocks are offered."""

import threading

import msgspec
import torch

from kvflow.tools.doctor.probe import Geometry

SECRET = "a secret of the tests on GPUs"
PACKED = Geometry(layers=4, num_kv_heads=4, head_size=64, num_blocks=64, layout="BLHNC", kv="content")
"""A block is one row of 64 KiB."""

SPIN_CYCLES = 2_000_000_000
"""A second or more of any GPU."""


def build(geometry, device):
    return msgspec.structs.replace(geometry, device=device).build()


def rows(cache):
    """The blocks of a packed cache, one row of bytes for each."""
    return cache.backing.view(cache.num_blocks, -1)


def settle(cache):
    """Wait until what was queued on the device of a cache has ended."""
    if cache.backing.is_cuda:
        torch.cuda.synchronize(cache.backing.device)


def placed(cache, blocks):
    """Return the numbers of blocks on the device of a cache. The copy waits for the current stream."""
    index = torch.tensor(blocks, device=cache.backing.device)
    settle(cache)
    return index


def write(cache, index, value):
    """Queue a write of blocks, without a copy that would wait for what is queued before it."""
    rows(cache).index_fill_(0, index, value)


def fill(cache, blocks, value):
    """Write blocks, and wait until they are written."""
    write(cache, placed(cache, blocks), value)
    settle(cache)


def pattern(nbytes):
    """Bytes that differ from their neighbors, and from those a page further."""
    return (torch.arange(nbytes, dtype=torch.int64) * 2654435761 >> 7).to(torch.uint8)


class LateWrite:
    """A write to blocks that is queued: behind a kernel that spins, or until it is released.

    Args:
        cache: packed.
        blocks: that it writes.
        value: of each byte.
    """

    def __init__(self, cache, blocks, value):
        self._cache, self._blocks, self._value = cache, blocks, value
        self._written = threading.Event()
        self._event = None
        if cache.backing.is_cuda:
            index = placed(cache, blocks)
            with torch.cuda.stream(torch.cuda.Stream(cache.backing.device)):
                torch.cuda._sleep(SPIN_CYCLES)
                write(cache, index, value)
                self._event = torch.cuda.Event()
                self._event.record()

    def release(self):
        """Write what is queued on the host. A GPU needs no leave."""
        if self._event is None:
            fill(self._cache, self._blocks, self._value)
            self._written.set()

    def is_over(self):
        return self._written.is_set() if self._event is None else self._event.query()
