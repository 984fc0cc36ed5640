"""Buffers on a device, and the copies from there to a cache on it, by torch.

**Not yet run on a GPU.** The copies are tested on tensors of the host; streams and events are not.

All copies of one chunk run on one stream, which waits for no stream of the engine: the bytes have arrived in the
buffer, and the target blocks belong to the read. One kernel copies all units of one strided copy, because a launch
takes the interpreter for about 10 us. Nobody waits for the kernels: an event tells that they have ended.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import torch

from kvflow.errors import TransportUnavailable
from kvflow.layout.component import Region
from kvflow.memory.device import TorchDeviceOrder, wrapped

Copy = tuple[tuple[int, ...], tuple[tuple[int, int, int], ...]]
"""One strided copy of a unit: bytes of a piece, offset in the buffer, stride of the buffer's places, address in the
target, and its strides of blocks, kernel blocks and units; then count, stride here and stride there of each axis."""

_WIDTHS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Bytes that one thread of a kernel copies."""


class TorchStage:
    """See ``kvflow.reads.device.DeviceStage``.

    Args:
        memory: of all buffers, flat bytes.
        targets: the cache, flat bytes on the same device.
    """

    def __init__(self, memory: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        self._memory = memory
        self._targets = list(targets)
        self._stream: torch.cuda.Stream | None = None
        self._order: TorchDeviceOrder | None = None
        if memory.is_cuda:
            self._stream = torch.cuda.Stream(memory.device, priority=-1)  # type: ignore[no-untyped-call]
            self._order = TorchDeviceOrder(memory.device.index)
        kind, device = ("VRAM", memory.device.index) if memory.is_cuda else ("DRAM", 0)
        self.region = Region(memory.data_ptr(), memory.nbytes, kind, device)  # type: ignore[arg-type]

    def content(self, first: int, nbytes: int) -> torch.Tensor:
        """See ``DeviceStage.content``."""
        return self._memory.narrow(0, first, nbytes)

    def scatterer(self, copies: Sequence[Copy], units: tuple[int, int, int]) -> "TorchScatterer":
        """See ``DeviceStage.scatterer``."""
        return TorchScatterer(
            [_TensorCopy(copy, units, self._targets) for copy in copies], units, self._stream, self._order
        )

    def settle(self) -> None:
        """See ``DeviceStage.settle``."""
        if self._stream is not None:
            self._stream.synchronize()


class TorchScatterer:
    """See ``kvflow.reads.staging.Scatters``."""

    def __init__(
        self,
        boxes: Sequence["_TensorCopy"],
        units: tuple[int, int, int],
        stream: "torch.cuda.Stream | None",
        order: TorchDeviceOrder | None,
    ) -> None:
        self._boxes, self._units, self._stream, self._order = boxes, units, stream, order

    def start(self, content: torch.Tensor, numbers: npt.NDArray[np.int32]) -> "TorchScattering | None":
        """See ``Scatters.start``."""
        if self._order is not None:
            self._order.make_visible()  # the stream reads what a network card may just have written
        places = np.unravel_index(numbers.astype(np.int64), self._units)
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                index = tuple(torch.from_numpy(axis).to(content.device) for axis in places)
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
    """See ``kvflow.reads.staging.Scattering``."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def poll(self) -> bool:
        """See ``Scattering.poll``."""
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
    """Return staging buffers on the one device that regions in VRAM lie on.

    Raises:
        TransportUnavailable: torch does not reach the device, or it does not have so much memory.
    """
    device = torch.device("cuda", regions[0].device)
    try:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    except (AssertionError, RuntimeError) as error:  # a build without CUDA fails an assertion
        remedy = "Lower staging_bytes, or leave more memory of the GPU free; 0 never stages."
        raise TransportUnavailable(
            f"{nbytes:,} bytes of staging memory cannot be allocated on {device}: {error}", remedy=remedy
        ) from error
    return TorchStage(memory, [wrapped(region) for region in regions])
