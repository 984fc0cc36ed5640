"""Move device memory over a data plane that moves host memory, in portions through a host buffer; order a device.

A portion has at most ``PORTION_BYTES``. Each answer that is being sent or received has one buffer of that size, for any
length of the answer. So a slow reader or exporter holds only its buffer, and the number of connections bounds host
memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvflow.errors import TransportUnavailable
from kvflow.layout.component import Region
from kvflow.reads.contract import DeviceMemory, Piece

if TYPE_CHECKING:
    from kvflow.memory.device import TorchDeviceOrder

PORTION_BYTES = 1 << 20
"""Most bytes of a portion. Each portion takes one synchronization with the device; a connection of 3 GB/s takes 0.35 ms
for 1 MiB. Not measured on a GPU yet."""


def device_order_of(regions: Sequence[Region]) -> "TorchDeviceOrder":
    """Return what orders the work of the one device that regions lie on.

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


def portions(parts: Iterable[Piece], nbytes_max: int = PORTION_BYTES) -> Iterator[list[Piece]]:
    """Divide parts into portions of ``nbytes_max`` bytes; the last may have fewer. A part may be cut."""
    portion: list[Piece] = []
    room = nbytes_max
    for start, nbytes in parts:
        done = 0
        while done < nbytes:
            taken = min(nbytes - done, room)
            portion.append((start + done, taken))
            done += taken
            room -= taken
            if not room:
                yield portion
                portion, room = [], nbytes_max
    if portion:
        yield portion


def landing(store: Callable[[Sequence[Piece], memoryview], None], parts: Sequence[Piece]) -> Iterator[memoryview]:
    """Yield buffers to fill, one after the other. The next step stores the contents of the last one to ``parts``."""
    buffer = memoryview(bytearray(min(PORTION_BYTES, sum(nbytes for _, nbytes in parts))))
    for portion in portions(parts):
        content = buffer[: sum(nbytes for _, nbytes in portion)]
        yield content
        store(portion, content)
