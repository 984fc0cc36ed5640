"""``HostMirror``: blocks of a cache on a GPU pass through pinned host memory, which data planes read and write instead.

For GPUs whose memory network cards cannot reach. A worker serves the mirror and never touches the cache. A block that
is offered is copied to the mirror first; a block that is pulled is copied to the cache afterwards. The mirror has fewer
blocks than the cache: each block that is offered or pulled uses one block of the mirror for as long.

**Not yet run on a GPU.**
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from kvflow.errors import CapacityExceeded, KvflowError, SpecInvalid, WorkerClosed, WorkerSuspended
from kvflow.layout.manifest import Manifest
from kvflow.layout.rows import rows_of
from kvflow.memory.cache import KVCache, region_of
from kvflow.memory.rows import HostRows, RowCopies
from kvflow.memory.scatter import Copy
from kvflow.planning.plan import GroupPlan, plan_transfer
from kvflow.planning.runs import RunTable, merge_runs
from kvflow.planning.strided_copies import AXES_MAX, FIXED, StridedCopies, TooManyCopies

BlockLists = Sequence[Sequence[int]]
"""One list of block ids for each group, with -1 for a block that is absent."""


class HostMirror:
    """A cache in host memory with fewer blocks than a cache on a GPU, and the copies between the two.

    Open the worker with ``mirror.cache``. Copies run on two threads of the mirror's own, one for each direction, in the
    order of the calls.

    Args:
        cache: on a GPU; on a CPU the copies work as well.
        memory_bytes: of host memory. The mirror has at most as many blocks as the cache.

    Attributes:
        cache: the mirror.

    Raises:
        CapacityExceeded: the memory holds no block.
        ConfigInvalid: there is not so much host memory, or it cannot be pinned.
        SpecInvalid: the cache's layout has no mirror.
        TransportUnavailable: the GPU has no memory for the buffers of the copies.

    Thread: any.
    """

    def __init__(self, cache: KVCache, *, memory_bytes: int) -> None:
        groups, row_bytes = rows_of(cache.manifest())
        num_rows = min(cache.num_blocks, memory_bytes // row_bytes)
        if not num_rows:
            raise CapacityExceeded(
                "bytes of host memory for the mirror of a cache",
                memory_bytes,
                remedy=f"Raise host_buffer_bytes: one block needs {row_bytes:,} bytes.",
            )
        self._host = HostRows(num_rows, row_bytes, cache.backing.device)
        manifest = Manifest(num_rows, (region_of(self._host.memory),), groups)
        self.cache = KVCache(cache.groups, manifest, [self._host.memory], {}, row_bytes)
        copies = _copies(manifest, cache.manifest())
        make = partial(RowCopies, cache.storages, cache.num_blocks, self._host.rows, copies)
        self._saving = _Lane("kvflow-save", make())
        self._loading = _Lane("kvflow-load", make())

    def save(self, block_ids: BlockLists, host_ids: BlockLists) -> "Future[None]":
        """Copy blocks of the cache to blocks of the mirror.

        Args:
            block_ids: of the cache. They are written (``KVCache.write_marker``), and nothing writes them meanwhile.
            host_ids: of the mirror, as many.

        Returns:
            Done when the copies have ended, with their error if they failed. Offer the blocks of the mirror then.
        """

        def copy(copies: RowCopies) -> None:
            for group, blocks, rows in _pairs(block_ids, host_ids):
                copies.save(group, blocks, rows)

        return self._saving.put(copy)

    def load(
        self, host_ids: BlockLists, block_ids: BlockLists, *, after: "Future[Any] | None" = None
    ) -> "Future[None]":
        """Copy blocks of the mirror to blocks of the cache.

        Args:
            host_ids: of the mirror.
            block_ids: of the cache, as many. Nothing else uses them meanwhile.
            after: the pull of the blocks: the copies start when it has succeeded. If it fails or is cancelled, there
                are none, and the returned future is cancelled.

        Returns:
            Done when the copies have ended: nothing writes into the blocks then. Cancelling works until the first copy
            starts.
        """

        def copy(copies: RowCopies) -> None:
            for group, blocks, rows in _pairs(block_ids, host_ids):
                copies.load(group, rows, blocks)

        return self._loading.put(copy, after=after)

    def suspend(self) -> None:
        """Refuse further copies, and wait for those that were asked for. The GPU's memory may be unmapped on return.

        Call it after ``ThreadedWorker.suspend``, which ends every pull. Until ``resume``, a copy ends at once with
        ``WorkerSuspended``.
        """
        for lane in (self._saving, self._loading):
            lane.refuse(WorkerSuspended("the mirror is suspended: the memory of its cache may be gone"))
        self.settle()

    def resume(self) -> None:
        """Copy again. The memory of the cache must have its old address."""
        for lane in (self._saving, self._loading):
            lane.refuse(None)

    def settle(self) -> None:
        """Return when all copies have ended that wait for no pull."""
        for lane in (self._saving, self._loading):
            lane.settle()

    def close(self) -> None:
        """Wait for the copies, end the threads and unpin the memory. A second call does nothing.

        Close the worker first.
        """
        self._saving.close()
        self._loading.close()
        self._host.close()


class _Lane:
    """One direction: a thread, and the copies that it makes one after the other."""

    def __init__(self, name: str, copies: RowCopies) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[RowCopies], None], Future[None]] | None] = SimpleQueue()
        self._changing = threading.Lock()
        self._refusal: KvflowError | None = None
        self._is_closed = False
        # A daemon: an engine that exits without closing its mirror must not wait for it.
        self._thread = threading.Thread(target=self._run, args=(copies,), name=name, daemon=True)
        self._thread.start()

    def put(self, copy: Callable[[RowCopies], None], after: "Future[Any] | None" = None) -> "Future[None]":
        done: Future[None] = Future()

        def start(before: "Future[Any] | None") -> None:
            if before is not None and (before.cancelled() or before.exception() is not None):
                done.cancel()
                done.set_running_or_notify_cancel()
                return
            with self._changing:
                refusal = self._refusal
                if refusal is None:
                    self._jobs.put((copy, done))
            if refusal is not None and done.set_running_or_notify_cancel():
                done.set_exception(refusal)

        if after is None:
            start(None)
        else:
            after.add_done_callback(start)
        return done

    def refuse(self, refusal: KvflowError | None) -> None:
        """Let later copies fail with an error; None: no longer. A closed lane stays closed."""
        with self._changing:
            if not self._is_closed:
                self._refusal = refusal

    def settle(self) -> None:
        done: Future[None] = Future()
        with self._changing:
            if self._is_closed:
                return
            self._jobs.put((lambda _: None, done))
        done.result()

    def close(self) -> None:
        with self._changing:
            if not self._is_closed:
                self._is_closed = True
                self._refusal = WorkerClosed("the mirror is closed")
                self._jobs.put(None)
        self._thread.join()

    def _run(self, copies: RowCopies) -> None:
        failure: Exception | None = None
        try:
            copies.enter()
        except Exception as error:  # noqa: BLE001 - every copy fails with it
            failure = error
        while (job := self._jobs.get()) is not None:
            copy, done = job
            if not done.set_running_or_notify_cancel():
                continue
            try:
                if failure is not None:
                    raise failure
                copy(copies)
            except Exception as error:  # noqa: BLE001 - the caller gets it from the future
                done.set_exception(error)
            else:
                done.set_result(None)


def _pairs(
    block_ids: BlockLists, host_ids: BlockLists
) -> list[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int32]]]:
    """Return the numbers of each group that has blocks, in the order of the mirror."""
    found = []
    for group, (ids, others) in enumerate(zip(block_ids, host_ids, strict=True)):
        blocks, rows = np.array(ids, np.int32), np.array(others, np.int32)
        there = (blocks >= 0) & (rows >= 0)
        order = np.argsort(rows[there])
        if len(order):
            found.append((group, blocks[there][order], rows[there][order]))
    return found


def _copies(rows: Manifest, cache: Manifest) -> list[list[Copy]]:
    """Return the copies from rows to blocks of a cache, for each group.

    A plan says which bytes they are, and proves it: exactly those that the model reads.

    Raises:
        SpecInvalid: a block has too many pieces.
    """
    plan = plan_transfer(rows, cache)
    copies: list[list[Copy]] = [[] for _ in cache.groups]
    for group in plan.groups:
        table = _whole_blocks(group)
        try:
            strided = StridedCopies(table)
        except TooManyCopies as error:
            raise SpecInvalid(
                f"a block of group {group.target_group} has too many pieces to be copied to host memory: {error}",
                remedy="Use another VLLM_KV_CACHE_LAYOUT, such as LBHNC, or leave kv_buffer_device out.",
            ) from error
        strided.prove(table)
        for row, region in zip(strided.table.tolist(), strided.region.tolist(), strict=True):
            row[3] += cache.regions[region].address
            axes = [tuple(row[at : at + 3]) for at in range(FIXED, FIXED + 3 * AXES_MAX, 3)]
            copies[group.target_group].append((tuple(row[:FIXED]), tuple(axis for axis in axes if axis[0] > 1)))
    return copies


def _whole_blocks(group: GroupPlan) -> RunTable:
    """Return the runs of a group for whole blocks instead of units: each unit of a block has runs of its own."""
    sides = []
    for table, units in ((group.runs.source, group.source), (group.runs.target, group.target)):
        offsets = table[1] + units.offsets(table[3], table[4])
        columns = np.zeros((len(table), *offsets.shape), np.int64)
        columns[0], columns[1], columns[2] = table[0], offsets, table[2]
        sides.append(columns.reshape(len(table), -1))
    nbytes = np.broadcast_to(group.runs.nbytes, (group.target.per_block, len(group.runs))).ravel()
    return merge_runs([RunTable(nbytes, *sides)])
