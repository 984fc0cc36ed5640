"""Staging memory, and the copies from there to the target.

NIXL fills a staging buffer with dense pieces of a source. The read thread scatters it with strided copies. Only the
reader registers the memory, and it is not published.
"""

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvflow.errors import ConfigInvalid
from kvflow.ids import PeerId
from kvflow.layout.component import Region
from kvflow.planning.staging import FIXED, STAGING_BUFFERS, buffer_bytes_of
from kvflow.reads.bounds import CheckedRows, CheckedScatter, check_rows
from kvflow.reads.contract import StagingUse

Bytes = npt.NDArray[np.uint8]


class StagingMemory:
    """The staging buffers of one transport, in host memory.

    ``staging_bytes`` are those of all buffers together; 0 for none. Raises ConfigInvalid if there is not enough memory.

    Attributes:
        buffers: one region for each buffer; empty if nothing may be staged.
        regions: what the reader registers: one region, or none.
        use: how many are taken, after the core's last step. Thread: the core writes, any reads.
    """

    def __init__(self, staging_bytes: int) -> None:
        nbytes = buffer_bytes_of(staging_bytes)
        try:
            # Memory is not touched before the first staged read. Over shared memory and TCP, registering pins no pages,
            # so unused memory takes addresses only. Over RDMA all of it is pinned at once.
            self._memory = np.empty(STAGING_BUFFERS * nbytes, np.uint8)
        except MemoryError as error:
            raise ConfigInvalid(
                f"staging_bytes is {staging_bytes:,}, and this process cannot get so much memory",
                remedy="Lower staging_bytes; the default is 64 MiB, and 0 never stages.",
            ) from error
        first = self._memory.ctypes.data
        self.regions: tuple[Region, ...] = (Region(first, self._memory.nbytes),) if nbytes else ()
        starts = range(first, first + self._memory.nbytes, nbytes or 1)
        self.buffers = tuple([Region(start, nbytes) for start in starts])
        self.use = StagingUse(buffers=len(self.buffers), buffer_bytes=nbytes)

    def note(self, in_use: int, quarantined: int, waiting: frozenset[PeerId]) -> None:
        """Publish how many buffers are taken, and how many peers wait for one."""
        use = self.use
        if (in_use, quarantined, waiting) != (use.in_use, use.quarantined, use.waiting):
            self.use = replace(use, in_use=in_use, quarantined=quarantined, waiting=waiting)

    def content(self, buffer: int) -> Bytes:
        """Return the bytes of one buffer."""
        nbytes = self.use.buffer_bytes
        return self._memory[buffer * nbytes : (buffer + 1) * nbytes]

    def scatterer(self, scatter: CheckedScatter) -> "Scatterer":
        """Return what runs the copies of one prepared list."""
        return Scatterer(scatter)

    def rows(self, relative: CheckedRows) -> CheckedRows:
        """Return the rows of one buffer for all buffers, one buffer after the other."""
        tables = []
        for buffer in self.buffers:
            table = relative.table.copy()
            table[:, 0] += buffer.address
            tables.append(table)
        return check_rows(np.concatenate(tables))


class Buffers:
    """The staging buffers of one transport, by number. Thread: one only.

    A chunk takes a buffer when it is posted. The buffer is free again once the chunk was scattered, has failed or was
    dropped. A chunk of a hung peer never ends, so its buffer stays taken (in quarantine).
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count))
        self._taken: dict[int, int] = {}

    @property
    def has_free(self) -> bool:
        """Whether a buffer is free."""
        return bool(self._free)

    @property
    def taken(self) -> dict[int, int]:
        """Buffer -> the read whose chunk has it."""
        return dict(self._taken)

    def take(self, read_id: int) -> int:
        """Give a free buffer to a chunk of this read: the last one that came back, because a CPU cache may hold it."""
        buffer = self._free.pop()
        self._taken[buffer] = read_id
        return buffer

    def give_back(self, buffer: int) -> None:
        """Take a buffer back that nothing reads or writes."""
        del self._taken[buffer]
        self._free.append(buffer)

    def check(self) -> None:
        """Check that each buffer is either free or taken, and only once."""
        assert sorted([*self._free, *self._taken]) == list(range(self._count)), (
            "a staging buffer is lost, or there twice"
        )


class Scatterer:
    """Run the checked copies of one prepared list in host memory; ``target`` returns the bytes at an address of it.

    NumPy moves each contiguous piece by one memmove, on this thread alone. torch's indexed copies take 3 to 12 times as
    long there, and its strided ones start threads that spin.
    """

    def __init__(self, scatter: CheckedScatter, target: Callable[[int, int], Bytes] | None = None) -> None:
        target = target or memory_at
        _, kernel_blocks, units = scatter.units
        self._per_block, self._per_kernel_block = kernel_blocks * units, units
        self._boxes = [_Box(*box, target) for box in zip(scatter.table.tolist(), scatter.reach.tolist(), strict=True)]

    def start(self, content: Bytes, numbers: npt.NDArray[np.int32]) -> None:
        """Copy the places of one buffer, from the first on, to these units of the target.

        Args:
            content: bytes of the buffer.
            numbers: int32, shape (n,), at most as many as the buffer has places.
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
    """One strided copy. ``memory`` has all bytes of the target that it can write."""

    def __init__(self, row: list[int], reach: int, target: Callable[[int, int], Bytes]) -> None:
        nbytes, self.offset, self.slot_stride, address, *strides = row[:FIXED]
        axes = [(row[at], row[at + 1], row[at + 2]) for at in range(FIXED, len(row), 3) if row[at] > 1]
        self.strides = tuple(strides)
        self.shape = tuple(count for count, _, _ in axes)
        self.source_strides = tuple(step for _, step, _ in axes)
        self.target_strides = tuple(step for _, _, step in axes)
        # One array element per contiguous piece, so that NumPy moves it with one memmove.
        self.dtype = np.dtype(f"V{nbytes}")
        self.memory = target(address, reach)


def memory_at(address: int, nbytes: int) -> Bytes:
    """Return the bytes of this process at an address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def evenly_spaced(places: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """Divide places into stretches of equal steps. Yield index of the first, count, first place and step."""
    at = 0
    while at < len(places):
        end = at + 1
        step = places[end] - places[at] if end < len(places) else 0
        while end < len(places) and places[end] - places[end - 1] == step:
            end += 1
        yield at, end - at, places[at], step if end - at > 1 else 0
        at = end
