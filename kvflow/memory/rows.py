"""Copies between a cache on a device and rows of pinned host memory, by torch.

**Not yet run on a GPU.** The copies are tested on tensors of the host; streams and events are not.

A kernel gathers the pieces of many blocks in a buffer on the device, and one copy of contiguous bytes takes the buffer
to the host; the other way it is the reverse. So a block of many small pieces costs as few calls as a large one. All of
it runs on one stream, in order, so that the buffer needs no events of its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch

from kvflow.errors import ConfigInvalid, TransportUnavailable
from kvflow.memory.device import TorchDeviceOrder
from kvflow.memory.mapping import map_bytes
from kvflow.memory.scatter import Copy, TorchStage

BUFFER_BYTES = 32 << 20
"""Bytes of the buffer on the device. Copying them takes 0.6 to 1.3 ms over PCIe 4 or 5, and giving the device the work
for them about 0.1 ms of the interpreter."""

Numbers = npt.NDArray[np.int32]


class RowCopies:
    """Copies blocks of a cache to rows of host memory, or back.

    Args:
        storages: the memory of the cache.
        num_blocks: of the cache.
        rows: uint8, shape (rows, bytes of a row), in host memory.
        copies: for each group of the cache, the copies from a buffer of rows to its blocks.

    Raises:
        TransportUnavailable: the device has no memory for the buffer.

    Thread: one at a time.
    """

    def __init__(
        self, storages: Sequence[torch.Tensor], num_blocks: int, rows: torch.Tensor, copies: Sequence[Sequence[Copy]]
    ) -> None:
        self._device = device = storages[0].device
        self._rows = rows
        self._buffer_rows = max(1, BUFFER_BYTES // rows.shape[1])
        nbytes = self._buffer_rows * rows.shape[1]
        try:
            self._buffer = torch.zeros((self._buffer_rows, rows.shape[1]), dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise TransportUnavailable(
                f"{nbytes:,} bytes for copies to host memory cannot be allocated on {device}: {error}",
                remedy="Leave more memory of the GPU free (gpu_memory_utilization), or leave kv_buffer_device out.",
            ) from error
        self._stage = TorchStage(self._buffer.flatten(), storages)
        self._scatterers = [self._stage.scatterer(each, (num_blocks, 1, 1), local=True) for each in copies]
        if self._buffer.is_cuda:
            TorchDeviceOrder(device.index).settle()  # the zeros are written before another stream copies them

    def enter(self) -> None:
        """Make the device current on the calling thread. Call it once on each thread that copies."""
        if self._buffer.is_cuda:
            TorchDeviceOrder(self._device.index).enter()

    def save(self, group: int, blocks: Numbers, rows: Numbers) -> None:
        """Copy blocks of a group to rows, and return when they have arrived. Nothing may write the blocks meanwhile."""
        with self._until_done():
            for blocks_now, rows_now in self._portions(blocks, rows):
                self._scatterers[group].gather(self._buffer.flatten(), blocks_now)
                with self._on_stream():
                    for place, row, count in _stretches(rows_now):
                        self._rows[row : row + count].copy_(self._buffer[place : place + count], non_blocking=True)

    def load(self, group: int, rows: Numbers, blocks: Numbers) -> None:
        """Copy rows to blocks of a group, and return when they have arrived: nothing writes into the blocks then.

        Kernels that are launched after the return see the bytes.
        """
        with self._until_done():
            for blocks_now, rows_now in self._portions(blocks, rows):
                with self._on_stream():
                    for place, row, count in _stretches(rows_now):
                        self._buffer[place : place + count].copy_(self._rows[row : row + count], non_blocking=True)
                self._scatterers[group].start(self._buffer.flatten(), blocks_now)

    def _portions(self, blocks: Numbers, rows: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
        for first in range(0, len(blocks), self._buffer_rows):
            yield blocks[first : first + self._buffer_rows], rows[first : first + self._buffer_rows]

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stage.stream is None else torch.cuda.stream(self._stage.stream)

    def _until_done(self) -> "_UntilDone":
        return _UntilDone(self._stage.stream)


class _UntilDone:
    """Waits at its end for a stream, whether the block was left by an exception or not. The thread sleeps meanwhile."""

    def __init__(self, stream: "torch.cuda.Stream | None") -> None:
        self._stream = stream

    def __enter__(self) -> None: ...

    def __exit__(self, *failure: object) -> None:
        if self._stream is not None:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
            event.synchronize()


def _stretches(rows: Numbers) -> Iterator[tuple[int, int, int]]:
    """Yield the first place, the first row and the length of each stretch of consecutive rows."""
    starts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist()]
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        yield start, int(rows[start]), stop - start


class HostRows:
    """Host memory for rows: zeroed, in a mapping of its own, and pinned for a device.

    torch's own pinned memory takes the next power of two of its size.

    Args:
        num_rows: 1 or more.
        row_bytes: bytes of a row.
        device: of the cache; memory for a cache in host memory is not pinned.

    Raises:
        ConfigInvalid: there is not so much memory, or it cannot be pinned.

    Attributes:
        memory: flat bytes.
    """

    def __init__(self, num_rows: int, row_bytes: int, device: torch.device) -> None:
        nbytes = num_rows * row_bytes
        remedy = "Lower host_buffer_bytes, or raise the memory limit of the container and `ulimit -l`."
        try:
            self.memory = torch.from_numpy(map_bytes(nbytes, huge=True)).zero_()
        except (OSError, RuntimeError) as error:
            raise ConfigInvalid(
                f"{nbytes:,} bytes of host memory cannot be allocated: {error}", remedy=remedy
            ) from error
        self.rows = self.memory.view(num_rows, row_bytes)
        self._pinned = device.type == "cuda"
        if self._pinned:
            with torch.cuda.device(device):
                failed = torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), nbytes, 0)  # type: ignore[no-untyped-call]
            if failed.value:
                raise ConfigInvalid(f"{nbytes:,} bytes of host memory cannot be pinned: {failed}", remedy=remedy)

    def close(self) -> None:
        """Unpin the memory. No copy may be under way, and no data plane may use it. A second call does nothing."""
        if self._pinned:
            self._pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())  # type: ignore[no-untyped-call]
