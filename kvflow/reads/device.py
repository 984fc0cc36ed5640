"""Move device memory over a data plane that moves host memory, in portions through a host buffer; order a device.

A portion has at most ``PORTION_BYTES``. Each answer that is being sent or received has one buffer of that size, for any
length of the answer. So a slow reader or exporter holds only its buffer, and the number of connections bounds host
memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvflow.errors import TransportUnavailable
from kvflow.layout.component import Region
from kvflow.reads.contract import DeviceMemory, Piece

PORTION_BYTES = 1 << 20
"""Most bytes of a portion. Each portion takes one synchronization with the device; a connection of 3 GB/s takes 0.35 ms
for 1 MiB. Not measured on a GPU yet."""


class DeviceOrder(Protocol):
    """Order the work of a cache's device, for a data plane that reads into it directly. Thread: the read thread."""

    def enter(self) -> None:
        """Make the device current on the calling thread."""
        ...

    def settle(self) -> None:
        """Wait until everything that is queued on the device has ended."""
        ...

    def make_visible(self) -> None:
        """Make the bytes that have arrived visible to work that the device starts from now on."""
        ...


Copy = tuple[tuple[int, ...], tuple[tuple[int, int, int], ...]]
"""See ``kvflow.memory.device.Copy``."""


class Scattering(Protocol):
    """Copies out of a buffer that have not ended. Thread: the read thread."""

    def poll(self) -> bool:
        """Return whether all of them have ended."""
        ...


class Scatters(Protocol):
    """What runs the copies of one prepared list. Thread: the read thread."""

    def start(self, content: Any, numbers: npt.NDArray[np.int32]) -> Scattering | None:
        """Start to copy the places of one buffer, from the first on, to these units of the target.

        Args:
            content: bytes of the buffer: an array, or a tensor.
            numbers: int32, shape (n,), at most as many as the buffer has places.

        Returns:
            What shows when the copies have ended; None: they have.
        """
        ...


class DeviceStage(Protocol):
    """Staging buffers on the device of a cache; ``region`` has all of them. Thread: the read thread."""

    region: Region

    def content(self, first: int, nbytes: int) -> Any:
        """Return bytes of the buffers, for ``Scatters.start``."""
        ...

    def scatterer(self, copies: Sequence[Copy], units: tuple[int, int, int]) -> Scatters:
        """Return what runs checked copies to a target of these blocks, kernel blocks and units."""
        ...

    def settle(self) -> None:
        """Return when every copy that was started has ended."""
        ...


def device_stage_of(regions: Sequence[Region], nbytes: int) -> DeviceStage:
    """Return ``nbytes`` of staging buffers on the one device that a cache lies on."""
    from kvflow.memory.device import torch_stage_of  # noqa: PLC0415

    return torch_stage_of(regions, nbytes)


def device_order_of(regions: Sequence[Region]) -> DeviceOrder:
    """Return the ``DeviceOrder`` of the one device that regions lie on.

    Raises:
        TransportUnavailable: they lie on several devices.
    """
    devices = sorted({region.device for region in regions if region.memory == "VRAM"})
    if len(devices) != 1:
        raise TransportUnavailable(
            f"the cache lies on devices {devices}, and NIXL needs it on one",
            remedy="Give each device its own rank and worker.",
        )
    from kvflow.memory.device import TorchDeviceOrder  # noqa: PLC0415

    return TorchDeviceOrder(devices[0])


def device_memory_of(regions: Sequence[Region]) -> DeviceMemory | None:
    """Return copies for the devices that a cache lies on; None, without loading torch, if it is in host memory."""
    if all(region.memory == "DRAM" for region in regions):
        return None
    from kvflow.memory.device import TorchDeviceMemory  # noqa: PLC0415

    return TorchDeviceMemory(regions, PORTION_BYTES)


def portions(parts: Iterable[Piece], nbytes_max: int = PORTION_BYTES) -> Iterator[tuple[list[Piece], list[int]]]:
    """Divide parts into portions of ``nbytes_max`` bytes; the last may have fewer. A part may be cut.

    Yields:
        The parts of a portion, and for each the number of the given part that it belongs to.
    """
    portion: list[Piece] = []
    numbers: list[int] = []
    room = nbytes_max
    for number, (start, nbytes) in enumerate(parts):
        done = 0
        while done < nbytes:
            taken = min(nbytes - done, room)
            portion.append((start + done, taken))
            numbers.append(number)
            done += taken
            room -= taken
            if not room:
                yield portion, numbers
                portion, numbers, room = [], [], nbytes_max
    if portion:
        yield portion, numbers


def landing(store: Callable[[Sequence[Piece], memoryview], None], parts: Sequence[Piece]) -> Iterator[memoryview]:
    """Yield buffers to fill, one after the other. The next step stores the contents of the last one to ``parts``."""
    buffer = memoryview(bytearray(min(PORTION_BYTES, sum(nbytes for _, nbytes in parts))))
    for portion, _ in portions(parts):
        content = buffer[: sum(nbytes for _, nbytes in portion)]
        yield content
        store(portion, content)
