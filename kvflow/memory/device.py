"""Copy between a GPU and host memory, and order what a GPU does, with torch.

**Not yet run on a GPU.** The arithmetic is tested on the host. The calls of torch and CUDA are not;
tests/integration/test_tcp_device.py runs them with ``KVFLOW_TEST_MEMORY=VRAM``.

Each thread has one stream per device. The stream does not synchronize with others: a lease guarantees that its blocks
are written, and the end of a read that they may be used. Each thread also has one pinned buffer, because a copy from or
to other host memory is slow and may end after the call that starts it.
"""

import ctypes
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from kvflow.errors import ConfigInvalid, TransportUnavailable
from kvflow.layout.component import Region


class TorchDeviceMemory:
    """Copies between host memory and the regions in VRAM, which must outlive this object.

    The first copy of each thread and device allocates a pinned buffer of ``staging_bytes``.
    """

    def __init__(self, regions: Sequence[Region], staging_bytes: int) -> None:
        self._regions = [region for region in regions if region.memory == "VRAM"]
        self._staging_bytes = staging_bytes
        self._of_thread = threading.local()

    def fetch(self, device: int, parts: Sequence[tuple[int, int]], into: memoryview) -> None:
        """Copy parts of device memory to host memory."""
        self._lane(device).fetch(parts, into)

    def store(self, device: int, parts: Sequence[tuple[int, int]], content: memoryview) -> None:
        """Copy host memory to parts of device memory."""
        self._lane(device).store(parts, content)

    def _lane(self, device: int) -> "_Lane":
        lanes = self._of_thread.__dict__.setdefault("lanes", {})
        lane: _Lane | None = lanes.get(device)
        if lane is None:
            regions = [region for region in self._regions if region.device == device]
            lane = lanes[device] = _Lane(regions, device, self._staging_bytes)
        return lane


_WRITES_ORDERING, _TO_OWNER = 118, 100
"""GPU_DIRECT_RDMA_WRITES_ORDERING: from ``_TO_OWNER`` on, the device sees remote writes in order."""


class TorchDeviceOrder:
    """Orders the work of the device with this index."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._make_visible: Callable[[], object] = lambda: None

    def enter(self) -> None:
        """Make the device current on the calling thread, with a context, and try what ``make_visible`` does.

        Raises:
            TransportUnavailable: torch cannot use the device, or its driver refuses one of these.
        """
        try:
            torch.cuda.set_device(self._device)
            # On a new thread device 0 counts as set, and gets no context: without one UCX does not know the device.
            torch.zeros(1, device=torch.device("cuda", self._device))
            self._make_visible = self.settle if torch.version.hip else _flush_of(self._device)
            self._make_visible()
        except (AttributeError, AssertionError, OSError, RuntimeError) as error:  # without CUDA, torch lacks functions
            remedy = "Install a build of torch for this GPU, and check CUDA_VISIBLE_DEVICES, nvidia-smi and the driver."
            reason = str(error).partition("\n")[0]
            raise TransportUnavailable(f"torch cannot use device {self._device}: {reason}", remedy=remedy) from error

    def settle(self) -> None:
        """Wait for every stream of the process, including those of UCX."""
        torch.cuda.synchronize(self._device)

    def mark(self) -> Callable[[], bool]:
        """Return what says whether the work that is queued now has ended."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))

        def is_passed() -> bool:
            with torch.cuda.device(self._device):  # a thread without one may open a context on device 0
                return bool(event.query())  # type: ignore[no-untyped-call]

        return is_passed

    def make_visible(self) -> None:
        """Make the bytes that have arrived visible to later work. Most CUDA devices need nothing for it."""
        self._make_visible()


def _flush_of(device: int) -> Callable[[], object]:
    """Return a function that makes remote writes visible to the current CUDA device, if that needs a call."""
    driver = ctypes.CDLL("libcuda.so.1")
    context, ordering = ctypes.c_void_p(), ctypes.c_int()
    if (failed := driver.cuCtxGetCurrent(ctypes.byref(context))) or not context.value:
        raise RuntimeError(f"no context of CUDA is current on this thread (cuCtxGetCurrent returns {failed})")
    if driver.cuDeviceGetAttribute(ctypes.byref(ordering), _WRITES_ORDERING, device) or ordering.value >= _TO_OWNER:
        return lambda: None

    def flush() -> None:
        if failed := driver.cuFlushGPUDirectRDMAWrites(0, _TO_OWNER):
            raise RuntimeError(f"cuFlushGPUDirectRDMAWrites returns {failed}")

    return flush


class _Lane:
    """The stream and the pinned buffer of one thread and one device."""

    def __init__(self, regions: Sequence[Region], device: int, staging_bytes: int) -> None:
        regions = sorted(regions, key=lambda region: region.address)
        self._starts = [region.address for region in regions]
        self._memory = [wrapped(region) for region in regions]
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
            # Unlike a slice, ``narrow`` refuses a range outside the tensor.
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


def wrapped(region: Region) -> torch.Tensor:
    """Return a region as a flat tensor of bytes, which does not own it."""
    device = torch.device("cuda", region.device)
    with torch.cuda.device(device):
        tensor = torch.as_tensor(_Span(region), device=device)
    if tensor.data_ptr() != region.address:
        raise RuntimeError(f"torch has copied {region} instead of wrapping it")
    return tensor


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def require_device(name: str) -> None:
    """Check that a cache can be allocated on a device; otherwise ConfigInvalid names it."""
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", name):  # torch calls those of ROCm cuda as well
        raise ConfigInvalid(f"device is {name!r}: expected cpu, cuda or cuda:NUMBER", remedy="Use one of these.")
    try:
        torch.empty(1, device=name)
    except (AssertionError, RuntimeError) as error:  # a build without CUDA fails an assertion
        reason = str(error).partition("\n")[0]
        remedy = "Install a build of torch for this GPU, and check CUDA_VISIBLE_DEVICES and nvidia-smi."
        raise ConfigInvalid(f"torch cannot use the device {name!r}: {reason}", remedy=remedy) from error


def visible_devices() -> tuple[tuple[str, ...], str, str]:
    """Return the names of the GPUs that torch can use, what torch was built for, and why it can use none."""
    hip = getattr(torch.version, "hip", None)
    built_for = f"ROCm {hip}" if hip else f"CUDA {torch.version.cuda}" if torch.version.cuda else ""
    refusal = ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # unlike is_available, it says why not
    except (AssertionError, RuntimeError) as error:
        refusal = str(error).partition("\n")[0]
    names = () if refusal else tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return names, built_for, refusal
