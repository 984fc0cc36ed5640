"""Device memory over a data plane that moves bytes of host memory: they pass through a host buffer in portions.

A portion has at most ``PORTION_BYTES``, and each answer that is being sent or received has one buffer of that size,
whatever the length of the answer. So a reader or an exporter that is slow holds its own portion, and no buffer that
others need, and host memory is bounded by the number of connections.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from kvflow.layout.region import Region

PORTION_BYTES = 1 << 20
"""Each portion costs one synchronisation with the device, and a connection of 3 GB/s takes 0.35 ms for 1 MiB. The
kernel buffers several times as much for each connection. Not measured on a GPU yet."""

Part = tuple[int, int]
"""Address and length of bytes that are contiguous in device memory."""


class DeviceMemory(Protocol):
    """Copies between host memory and the registered memory of devices. Thread: any; each call blocks until it is done.

    What a call raises says that the device cannot be used: the caller must not use the bytes.
    """

    def fetch(self, device: int, parts: Sequence[Part], into: memoryview) -> None:
        """Copy parts of device memory to host memory, one after the other. On return all bytes are there.

        Args:
            device: index.
            parts: not empty, each within one registered region.
            into: as long as the parts together, at most ``PORTION_BYTES``.
        """
        ...

    def store(self, device: int, parts: Sequence[Part], content: memoryview) -> None:
        """Copy host memory to parts of device memory. On return whatever the device starts sees the bytes.

        Args:
            device: index.
            parts: not empty, each within one registered region.
            content: as long as the parts together, at most ``PORTION_BYTES``.
        """
        ...


def device_memory_of(regions: Sequence[Region]) -> DeviceMemory | None:
    """Return what copies to and from the devices that a cache lies on; None: all of it is host memory.

    Only a cache on a device loads torch.
    """
    if all(region.memory == "DRAM" for region in regions):
        return None
    from kvflow.memory.device import TorchDeviceMemory  # noqa: PLC0415

    return TorchDeviceMemory(regions, PORTION_BYTES)


def portions(parts: Iterable[Part], nbytes_max: int = PORTION_BYTES) -> Iterator[tuple[list[Part], list[int]]]:
    """Divide parts into portions of so many bytes, of which only the last may have fewer. A part may be cut.

    Yields:
        The parts of a portion, and the number of the given part that each is of.
    """
    portion: list[Part] = []
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


def landing(store: Callable[[Sequence[Part], memoryview], None], parts: Sequence[Part]) -> Iterator[memoryview]:
    """Yield buffers to fill, one after the other. To ask for the next one stores what the last was filled with.

    Who stops asking stores nothing more.

    Args:
        store: copies a buffer to parts of device memory.
        parts: where all bytes go, in order.
    """
    buffer = memoryview(bytearray(min(PORTION_BYTES, sum(nbytes for _, nbytes in parts))))
    for portion, _ in portions(parts):
        content = buffer[: sum(nbytes for _, nbytes in portion)]
        yield content
        store(portion, content)
