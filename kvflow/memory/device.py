"""Copy between a GPU and host memory, order what a GPU does, and stage reads on it, with torch.

**Not yet run on a GPU.** The arithmetic is tested on the host. The calls of torch and CUDA are not;
tests/integration/test_tcp_device.py runs them with ``KVFLOW_TEST_MEMORY=VRAM``.

Each thread has one stream per device. The stream does not synchronize with others: a lease guarantees that its blocks
are written, and the end of a read that they may be used. Each thread also has one pinned buffer, because a copy from or
to other host memory is slow and may end after the call that starts it.

All copies out of a staging buffer run on one stream, which waits for no stream of the engine: the bytes have arrived in
the buffer, and the target blocks belong to the read. One kernel copies all units of one strided copy, because a launch
takes the interpreter for about 10 us. An event shows that they have ended.
"""

import ctypes
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
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


Copy = tuple[tuple[int, ...], tuple[tuple[int, int, int], ...]]
"""One strided copy of a unit: bytes of a piece, offset in the buffer, stride of the buffer's places, address in the
target, and its strides of blocks, kernel blocks and units; then count, stride here and stride there of each axis."""

_WIDTHS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # bytes that one thread of a kernel copies


class TorchStage:
    """Staging buffers on the device of a cache. ``memory`` and the ``targets``, the cache, are flat bytes on it."""

    def __init__(self, memory: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        self._memory = memory
        self._targets = list(targets)
        self._stream: torch.cuda.Stream | None = None
        self._order: TorchDeviceOrder | None = None
        self._rows: dict[int, torch.Tensor] = {}  # address of a buffer -> pinned unit numbers of its one chunk
        if memory.is_cuda:
            self._stream = torch.cuda.Stream(memory.device, priority=-1)  # type: ignore[no-untyped-call]
            self._order = TorchDeviceOrder(memory.device.index)
            self._order.enter()
        kind, device = ("VRAM", memory.device.index) if memory.is_cuda else ("DRAM", 0)
        self.region = Region(memory.data_ptr(), memory.nbytes, kind, device)  # type: ignore[arg-type]

    def content(self, first: int, nbytes: int) -> torch.Tensor:
        """Return bytes of the buffers."""
        return self._memory.narrow(0, first, nbytes)

    def scatterer(self, copies: Sequence[Copy], units: tuple[int, int, int]) -> "TorchScatterer":
        """Return what runs checked copies."""
        boxes = [_TensorCopy(copy, units, self._targets) for copy in copies]
        return TorchScatterer(boxes, units, self._place, self._stream, self._order)

    def _place(self, content: torch.Tensor, numbers: npt.NDArray[np.int32]) -> torch.Tensor:
        """Return the numbers of a buffer's chunk on the device. From memory that is not pinned, copies would wait."""
        if self._stream is None:
            return torch.from_numpy(numbers.astype(np.int64))
        row = self._rows.get(content.data_ptr())
        if row is None or len(row) < len(numbers):
            row = self._rows[content.data_ptr()] = _pinned(numbers.nbytes).view(torch.int32)
        row = row[: len(numbers)]
        row.numpy()[:] = numbers
        return row.to(self._memory.device, non_blocking=True).to(torch.int64)

    def settle(self) -> None:
        """Return when every copy that was started has ended."""
        if self._stream is not None:
            self._stream.synchronize()


class TorchScatterer:
    """Runs the copies of one prepared list."""

    def __init__(
        self,
        boxes: Sequence["_TensorCopy"],
        units: tuple[int, int, int],
        place: Callable[[torch.Tensor, npt.NDArray[np.int32]], torch.Tensor],
        stream: "torch.cuda.Stream | None",
        order: TorchDeviceOrder | None,
    ) -> None:
        self._boxes, self._place, self._stream, self._order = boxes, place, stream, order
        self._per_block, self._per_kernel_block = units[1] * units[2], units[2]

    def start(self, content: torch.Tensor, numbers: npt.NDArray[np.int32]) -> "TorchScattering | None":
        """Start to copy the places of one buffer to units of the target."""
        if self._order is not None:
            self._order.make_visible()  # the stream reads what a network card may just have written
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                unit = self._place(content, numbers)
                rest = unit % self._per_block
                index = (unit // self._per_block, rest // self._per_kernel_block, rest % self._per_kernel_block)
                for box in self._boxes:
                    box.copy(content, index, len(numbers))
                if self._stream is None:
                    return None
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._stream)
        except BaseException:
            if self._stream is not None:
                self._stream.synchronize()  # some copies may have been started
            raise
        return TorchScattering(event)


class TorchScattering:
    """Copies that have not ended."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def poll(self) -> bool:
        """Return whether all of them have ended."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class _TensorCopy:
    """One strided copy of each unit."""

    def __init__(self, copy: Copy, units: tuple[int, int, int], targets: Sequence[torch.Tensor]) -> None:
        (nbytes, offset, slot_stride, address, *steps), axes = copy
        target = next(each for each in targets if each.data_ptr() <= address < each.data_ptr() + each.nbytes)
        place = address - target.data_ptr()
        # Strides of axes with one element count for nothing.
        wide = [step if count > 1 else 0 for step, count in zip(steps, units, strict=True)]
        here, there = [step for _, step, _ in axes], [step for _, _, step in axes]
        numbers = (nbytes, offset, slot_stride, place, target.data_ptr(), *wide, *here, *there)
        width = next(width for width in _WIDTHS if all(number % width == 0 for number in numbers))
        self._dtype = _WIDTHS[width]
        shape = (*(count for count, _, _ in axes), nbytes // width)
        self._shape, self._offset = shape, offset // width
        self._strides = tuple(step // width for step in (slot_stride, *here, width))
        whole = target.narrow(0, 0, target.nbytes // width * width).view(self._dtype)
        first = whole.storage_offset() + place // width
        strides = tuple(step // width for step in (*wide, *there, width))
        # torch refuses what leaves the storage.
        self._target = whole.as_strided((*units, *shape), strides, first)

    def copy(self, content: torch.Tensor, index: tuple[torch.Tensor, ...], count: int) -> None:
        """Copy the first places of a buffer to units of the target, which are numbered by three indices."""
        content = content.view(self._dtype)
        first = content.storage_offset() + self._offset
        self._target.index_put_(index, content.as_strided((count, *self._shape), self._strides, first))


def torch_stage_of(regions: Sequence[Region], nbytes: int) -> TorchStage:
    """Return staging buffers on the one device of regions in VRAM; TransportUnavailable if there is no room on it."""
    device = torch.device("cuda", regions[0].device)
    try:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    except (AssertionError, RuntimeError) as error:  # a build without CUDA fails an assertion
        remedy = "Lower staging_bytes, or leave more memory of the GPU free; 0 never stages."
        raise TransportUnavailable(
            f"{nbytes:,} bytes of staging memory cannot be allocated on {device}: {error}", remedy=remedy
        ) from error
    return TorchStage(memory, [wrapped(region) for region in regions])


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
