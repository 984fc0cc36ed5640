"""Staging memory, and the copies from there to where the bytes belong.

NIXL fills a staging buffer with dense pieces of a source; the owner thread scatters it with strided copies. The memory
is registered with the reader only, and published to nobody.
"""

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvflow.errors import ConfigInvalid
from kvflow.ids import PeerId
from kvflow.layout.region import Region
from kvflow.transfer.boxes import FIXED
from kvflow.transfer.staging import STAGING_BUFFERS, buffer_bytes_of
from kvflow.transport.base import StagingUse
from kvflow.transport.bounds import CheckedScatter, Rows, check_rows

Bytes = npt.NDArray[np.uint8]


class StagingMemory:
    """The staging buffers of one transport.

    Attributes:
        buffers: one region each; none if nothing may be staged.
        use: how many are taken, as of the owner's last step. Thread: read by any, written by the owner's.

    Args:
        staging_bytes: of all buffers together; 0 for none.

    Raises:
        ConfigInvalid: there is not so much memory.
    """

    def __init__(self, staging_bytes: int) -> None:
        nbytes = buffer_bytes_of(staging_bytes)
        try:
            # Not touched before the first staged read: where registering pins no pages, as over shared memory and TCP,
            # memory which nobody needs costs addresses only. Over RDMA all of it is pinned at once.
            self._memory = np.empty(STAGING_BUFFERS * nbytes, np.uint8)
        except MemoryError as error:
            raise ConfigInvalid(
                f"staging_bytes is {staging_bytes:,}, and this process cannot get so much memory",
                remedy="Lower staging_bytes; the default is 64 MiB, and 0 never stages.",
            ) from error
        first = self._memory.ctypes.data
        self.buffers = tuple(Region(first + at * nbytes, nbytes) for at in range(STAGING_BUFFERS if nbytes else 0))
        self.use = StagingUse(buffers=len(self.buffers), buffer_bytes=nbytes)

    def note(self, in_use: int, quarantined: int, waiting: frozenset[PeerId]) -> None:
        """Publish how many buffers are taken, and who waits for one."""
        use = self.use
        if (in_use, quarantined, waiting) != (use.in_use, use.quarantined, use.waiting):
            self.use = replace(use, in_use=in_use, quarantined=quarantined, waiting=waiting)

    @property
    def regions(self) -> tuple[Region, ...]:
        """What the reader registers: one region, or none."""
        return (Region(self._memory.ctypes.data, self._memory.nbytes),) if self.buffers else ()

    def content(self, buffer: int) -> Bytes:
        """Return the bytes of one buffer."""
        nbytes = self.use.buffer_bytes
        return self._memory[buffer * nbytes : (buffer + 1) * nbytes]

    def scatterer(self, scatter: CheckedScatter) -> "Scatterer":
        """Return what carries out the copies of one program."""
        return Scatterer(scatter, self.target)

    def target(self, address: int, nbytes: int) -> Bytes:
        """Return the bytes of the cache at an address, which was checked."""
        return memory_at(address, nbytes)

    def rows(self, relative: Rows) -> Rows:
        """Return the rows of one buffer for all buffers, one buffer after the other."""
        tables = []
        for buffer in self.buffers:
            table = relative.table.copy()
            table[:, 0] += buffer.address
            tables.append(table)
        return check_rows(np.concatenate(tables))


class Scatterer:
    """Carry out the copies of one program.

    Args:
        scatter: checked.
        target: returns the bytes at an address of the cache; those of this process if None.
    """

    def __init__(self, scatter: CheckedScatter, target: Callable[[int, int], Bytes] | None = None) -> None:
        target = target or memory_at
        _, kernel_blocks, units = scatter.units
        self._per_block, self._per_kernel_block = kernel_blocks * units, units
        self._boxes = [_Box(*box, target) for box in zip(scatter.table.tolist(), scatter.reach.tolist(), strict=True)]

    def run(self, content: Bytes, numbers: npt.NDArray[np.int32]) -> None:
        """Copy the slots of one buffer, from the first on, to these units of the target.

        Args:
            content: of the buffer.
            numbers: int32, shape (n,), at most as many as the buffer has slots.
        """
        block, rest = np.divmod(numbers.astype(np.int64), self._per_block)
        kernel_block, unit = np.divmod(rest, self._per_kernel_block)
        segments: dict[tuple[int, ...], list[tuple[int, int, int, int]]] = {}
        for box in self._boxes:
            if box.strides not in segments:
                places = block * box.strides[0] + kernel_block * box.strides[1] + unit * box.strides[2]
                segments[box.strides] = list(evenly_spaced(places.tolist()))
            for slot, count, place, step in segments[box.strides]:
                shape = (count, *box.shape)
                there = (step, *box.target_strides)
                here = (box.slot_stride, *box.source_strides)
                target = np.ndarray(shape, box.dtype, box.memory, place, there)
                # NumPy checks both arrays against their memory once more.
                np.copyto(target, np.ndarray(shape, box.dtype, content, box.offset + slot * box.slot_stride, here))


class _Box:
    """One strided copy, see ``Scatter.table``.

    Attributes:
        memory: all bytes of the target that it reaches.
    """

    def __init__(self, row: list[int], reach: int, target: Callable[[int, int], Bytes]) -> None:
        nbytes, self.offset, self.slot_stride, address, *strides = row[:FIXED]
        axes = [row[at : at + 3] for at in range(FIXED, len(row), 3) if row[at] > 1]
        self.strides = tuple(strides)
        self.shape = tuple(count for count, _, _ in axes)
        self.source_strides = tuple(step for _, step, _ in axes)
        self.target_strides = tuple(step for _, _, step in axes)
        # One element for each contiguous piece: NumPy then moves it with one memmove.
        self.dtype = np.dtype(f"V{nbytes}")
        self.memory = target(address, reach)


def memory_at(address: int, nbytes: int) -> Bytes:
    """Return the bytes of this process at an address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def evenly_spaced(places: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """Divide places into stretches of equal steps; yield index of the first, count, first place and step."""
    at = 0
    while at < len(places):
        end = at + 1
        step = places[end] - places[at] if end < len(places) else 0
        while end < len(places) and places[end] - places[end - 1] == step:
            end += 1
        yield at, end - at, places[at], step if end - at > 1 else 0
        at = end
