"""Copies between a GPU and host memory by torch, for a data plane that moves bytes of host memory only.

**Not yet run on a GPU.** The arithmetic is tested on the host; what torch and CUDA do is not (tests/integration/
test_tcp_device.py runs it with ``KVFLOW_TEST_MEMORY=VRAM``).

Each thread has a stream of its own for each device, which waits for no other stream, and which none waits for: a lease
says that its blocks are written, and a read that has ended that they may be used. Each thread also has one pinned
buffer, because a copy from or to other host memory is slow and may end after the call that orders it.
"""

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from kvflow.layout.region import Region


class TorchDeviceMemory:
    """See ``kvflow.transport.device.DeviceMemory``.

    Args:
        regions: those in VRAM are used; the memory outlives this object.
        staging_bytes: of the pinned buffer of each thread and device, which its first copy allocates.
    """

    def __init__(self, regions: Sequence[Region], staging_bytes: int) -> None:
        self._regions = [region for region in regions if region.memory == "VRAM"]
        self._staging_bytes = staging_bytes
        self._of_thread = threading.local()

    def fetch(self, device: int, parts: Sequence[tuple[int, int]], into: memoryview) -> None:
        """See ``DeviceMemory.fetch``."""
        self._lane(device).fetch(parts, into)

    def store(self, device: int, parts: Sequence[tuple[int, int]], content: memoryview) -> None:
        """See ``DeviceMemory.store``."""
        self._lane(device).store(parts, content)

    def _lane(self, device: int) -> "_Lane":
        lanes = self._of_thread.__dict__.setdefault("lanes", {})
        lane: _Lane | None = lanes.get(device)
        if lane is None:
            regions = [region for region in self._regions if region.device == device]
            lane = lanes[device] = _Lane(regions, device, self._staging_bytes)
        return lane


class _Lane:
    """What one thread needs to copy from and to one device."""

    def __init__(self, regions: Sequence[Region], device: int, staging_bytes: int) -> None:
        regions = sorted(regions, key=lambda region: region.address)
        self._starts = [region.address for region in regions]
        self._memory = [_wrapped(region) for region in regions]
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staging = _pinned(staging_bytes)
        self._host = self._staging.numpy()

    def fetch(self, parts: Sequence[tuple[int, int]], into: memoryview) -> None:
        assert len(into) <= len(self._host)
        with torch.cuda.stream(self._stream):
            for staged, there in self._pairs(parts):
                staged.copy_(there, non_blocking=True)
        self._stream.synchronize()
        np.frombuffer(into, np.uint8)[:] = self._host[: len(into)]

    def store(self, parts: Sequence[tuple[int, int]], content: memoryview) -> None:
        assert len(content) <= len(self._host)
        self._host[: len(content)] = np.frombuffer(content, np.uint8)
        with torch.cuda.stream(self._stream):
            for staged, there in self._pairs(parts):
                there.copy_(staged, non_blocking=True)
        self._stream.synchronize()

    def _pairs(self, parts: Sequence[tuple[int, int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the piece of the pinned buffer, and the piece of device memory, of each part."""
        at = 0
        for address, nbytes in parts:
            number = bisect_right(self._starts, address) - 1
            offset = address - self._starts[number]
            # narrow, unlike a slice, refuses what leaves the tensor.
            yield self._staging.narrow(0, at, nbytes), self._memory[number].narrow(0, offset, nbytes)
            at += nbytes


class _Span:
    """Memory of a device as its CUDA array interface, version 3, describes it."""

    def __init__(self, region: Region) -> None:
        self.__cuda_array_interface__ = {
            "shape": (region.nbytes,),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 3,
        }


def _wrapped(region: Region) -> torch.Tensor:
    """Return a region as a flat tensor of bytes, which does not own it."""
    device = torch.device("cuda", region.device)
    with torch.cuda.device(device):
        tensor = torch.as_tensor(_Span(region), device=device)
    if tensor.data_ptr() != region.address:
        raise RuntimeError(f"torch has copied {region} instead of wrapping it")
    return tensor


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
