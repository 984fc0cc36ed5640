"""Turn a plan into prepared descriptor rows, and pairs of units into descriptor indices.

Rows are made once per peer and plan: one strided row per run, for any size of the pool. Indices are made per batch by
vectorized sums, run by run, so that consecutive blocks are neighbors in a row, and merge.

A staged plan has two halves: rows that fetch into a staging buffer, and copies that scatter from it. A chunk then has
at most as many pairs of units as a buffer has places, and gets its buffer when it is posted.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from kvflow.errors import CapacityExceeded, LayoutMismatch, PlanUnsound
from kvflow.ids import Ids, Int32s, Int64s
from kvflow.layout.component import Region
from kvflow.layout.manifest import Manifest
from kvflow.planning.chunks import Cutter, neighbors, num_neighbors, one_chunk
from kvflow.planning.pairs import UnitPairs
from kvflow.planning.plan import GroupPlan, TransferPlan
from kvflow.planning.runs import Units
from kvflow.planning.staging import FIXED, Scatter, room_left

DESCRIPTORS_MAX = (1 << 31) - 1  # their indices are int32
ROWS_MAX = 1 << 20  # 40 MiB: only blocks that are far larger than those of any engine, and not dense, need more


class Bound(Struct, frozen=True, eq=False, gc=False):
    """One batch in the form that NIXL expects: int32 indices of shape (n,), and int64 cuts between chunks."""

    source_index: Int32s
    target_index: Int32s
    cuts: Int64s
    nbytes: int


class Rows:
    """Descriptor rows of one side of one group plan, in one kind of memory.

    Attributes:
        linear: whether all units of the pool lie at one stride. Then they share a row, and merge across blocks.
            Otherwise each unit of a block has a separate row.
        table: int64, shape (rows, 5): address, nbytes, device, stride, count.
        per_run: descriptors of one run.
        stride: int64, shape (runs,): bytes between neighboring descriptors of a run.
    """

    def __init__(
        self, side: Int64s, nbytes: Int64s, *, units: Units, num_blocks: int, regions: Sequence[Region]
    ) -> None:
        region, offset, block_stride, kernel_stride, unit_stride = side
        per_block = units.per_block
        self.per_run = per_block * num_blocks
        if len(nbytes) * self.per_run > DESCRIPTORS_MAX:
            raise CapacityExceeded("descriptors in one prepared list", DESCRIPTORS_MAX, remedy="Use fewer blocks.")
        self._per_block = per_block
        self._num_blocks = num_blocks
        step, even = units.step(side)
        self.linear = bool(even.all())
        rows_per_run = 1 if self.linear else per_block
        if len(nbytes) * rows_per_run > ROWS_MAX:
            raise CapacityExceeded("rows in one prepared list", ROWS_MAX, remedy="Use block sizes that divide.")
        # A row that all units share begins with the first unit. Listing the others would let a huge block take memory.
        first = np.zeros(len(nbytes), np.int64) if self.linear else units.offsets(kernel_stride, unit_stride).T.ravel()
        run = np.repeat(np.arange(len(nbytes)), rows_per_run)
        self.stride = step if self.linear else block_stride
        address = np.array([entry.address for entry in regions], np.int64)
        device = np.array([entry.device for entry in regions], np.int64)
        self.table = np.stack(
            [
                address[region[run]] + offset[run] + first,
                nbytes[run],
                device[region[run]],
                self.stride[run],
                np.full(len(run), self.per_run // rows_per_run, np.int64),
            ],
            axis=1,
        )
        _require_inside(self.table, regions, region[run])
        self.memory = regions[int(region[0])].memory

    def local(self, units: Ids) -> Ids:
        """Return the descriptor number of each unit; it is the same in every run."""
        if self.linear:
            return units
        per_block, num_blocks = self._per_block, self._num_blocks
        if isinstance(units, tuple):
            return tuple([unit % per_block * num_blocks + unit // per_block for unit in units])
        found: Int64s = units % per_block * num_blocks + units // per_block
        return found


def _require_one_memory(group: GroupPlan, source_regions: Sequence[Region], target_regions: Sequence[Region]) -> None:
    """Refuse a group with several kinds of memory on one side, because a descriptor list has one kind."""
    source, target = (
        sorted({regions[index].memory for index in np.unique(side[0]).tolist()})
        for side, regions in ((group.runs.source, source_regions), (group.runs.target, target_regions))
    )
    if len(source) > 1 or len(target) > 1:
        raise LayoutMismatch(
            f"memory of source group {group.source_group} and target group {group.target_group}",
            source,
            target,
            remedy="Keep all layers of a group in memory of one kind, or give them groups of their own.",
        )


class Binding:
    """A group plan with the sizes of both pools: everything that ``bind`` needs, computed once. See ``PairBinder``."""

    scatter: None = None  # reads write directly into the target

    def __init__(self, group: GroupPlan, source: Manifest, target: Manifest) -> None:
        runs = group.runs
        _require_one_memory(group, source.regions, target.regions)
        self.group = group
        self.source, self.target = (
            Rows(side, runs.nbytes, units=units, num_blocks=manifest.num_blocks, regions=manifest.regions)
            for side, units, manifest in ((runs.source, group.source, source), (runs.target, group.target, target))
        )
        self.unit_bytes = self.read_bytes = runs.unit_bytes
        self.unit_descriptors = len(runs)
        dense = (self.source.stride == runs.nbytes) & (self.target.stride == runs.nbytes)
        self._cutter = Cutter(runs.nbytes, dense)
        self._linear = self.source.linear and self.target.linear
        self.number = self._number if self._linear else None
        run = np.arange(len(runs), dtype=np.int32)[:, None]
        # The number of each run's first descriptor, on both sides.
        self._first = np.stack([run * np.int32(side.per_run) for side in (self.source, self.target)])

    def bind(self, pairs: UnitPairs, *, chunk_bytes: int, chunk_descriptors: int) -> Bound:
        """Return the indices of these pairs, cut into chunks.

        Args:
            pairs: at least one; the pairs of each request ascend by source.
            chunk_bytes: most bytes of one chunk. A larger descriptor is a chunk alone.
            chunk_descriptors: most merged descriptors of one chunk.
        """
        source, target = pairs.source, pairs.target
        if not self._linear:
            source, target = self.source.local(source), self.target.local(target)
        count = len(source)
        nbytes, descriptors = count * self.unit_bytes, count * self.unit_descriptors
        if nbytes <= chunk_bytes and descriptors <= chunk_descriptors:
            cuts = one_chunk(descriptors)
        else:
            cuts = self._cutter.cuts(source, target, chunk_bytes, chunk_descriptors)
        return Bound(*self._number(source, target), cuts, nbytes)

    def _number(self, source: Ids, target: Ids) -> tuple[Int32s, Int32s]:
        """Return the indices of pairs, by the numbers of ``Rows.local``."""
        if self.unit_descriptors == 1:
            return np.array(source, np.int32), np.array(target, np.int32)
        units = np.empty((2, 1, len(source)), np.int32)
        units[0], units[1] = source, target
        # One array for both sides: NumPy asks for huge pages from 4 MiB on, and page faults of small pages take longer
        # than the sums.
        index = self._first + units
        return index[0].ravel(), index[1].ravel()

    def count_merged(self, pairs: UnitPairs) -> int:
        """Return the number of descriptors of these pairs after neighbors merge, before they are cut."""
        source, target = pairs.source, pairs.target
        if not self._linear:
            source, target = self.source.local(source), self.target.local(target)
        return len(source) * self.unit_descriptors - num_neighbors(source, target) * self._cutter.num_dense


class StagedBinding:
    """A staged group plan with the sizes of two pools; use it like a ``Binding``.

    ``target`` has the rows of one staging buffer, addressed from its start, and ``scatter`` copies from there.
    """

    number: None = None

    def __init__(self, group: GroupPlan, source: Manifest, target: Manifest) -> None:
        staged = group.staged
        assert staged is not None
        fetch = staged.fetch
        buffer = [Region(0, staged.buffer_bytes)]
        if target.num_blocks * group.target_units > DESCRIPTORS_MAX:
            raise CapacityExceeded("units in one pool", DESCRIPTORS_MAX, remedy="Use fewer blocks.")
        self.group = group
        self.source = Rows(
            fetch.source, fetch.nbytes, units=group.source, num_blocks=source.num_blocks, regions=source.regions
        )
        self.target = Rows(fetch.target, fetch.nbytes, units=staged.units, num_blocks=staged.places, regions=buffer)
        units = (target.num_blocks, group.target.kernel_blocks, group.target.per_kernel_block)
        table = _addressed(staged.copies.table, staged.copies.region, units, target.regions)
        self.scatter = Scatter(table, staged.places, units)
        self.unit_bytes = staged.scatter.unit_bytes
        self.read_bytes = staged.place_bytes
        self.unit_descriptors = len(fetch)
        # On the side of the places, every run is dense.
        self._num_dense = int(np.count_nonzero(self.source.stride == fetch.nbytes))

    def bind(self, pairs: UnitPairs, *, chunk_bytes: int, chunk_descriptors: int) -> Bound:
        """Return the unit numbers of these pairs, cut into chunks by what they read; a larger unit is a chunk alone.

        Those of the source are the numbers that each run gives its descriptors.
        """
        source = np.asarray(self.source.local(pairs.source), np.int64)
        units_max = min(self.scatter.places, max(1, chunk_bytes // self.read_bytes))
        return Bound(
            source_index=source.astype(np.int32),
            target_index=np.array(pairs.target, np.int32),
            cuts=self._cuts(source, units_max, chunk_descriptors),
            nbytes=len(source) * self.unit_bytes,
        )

    def count_merged(self, pairs: UnitPairs) -> int:
        """Return the number of descriptors that fetch these pairs after neighbors merge, without cuts into chunks."""
        follows = np.count_nonzero(np.diff(self.source.local(pairs.source)) == 1)
        return len(pairs.source) * self.unit_descriptors - int(follows) * self._num_dense

    def _cuts(self, source: Int64s, units_max: int, chunk_descriptors: int) -> Int64s:
        count = len(source)
        if min(units_max, count) * self.unit_descriptors <= chunk_descriptors or units_max == 1:
            cuts = np.arange(0, count + units_max, units_max, dtype=np.int64)
            cuts[-1] = count
            return cuts
        places = np.arange(count)
        saved = neighbors(source, places).astype(np.int64) * self._num_dense
        found, descriptors = [0], 0
        for pair, less in enumerate(saved.tolist()):
            added = self.unit_descriptors - less
            if pair and (pair - found[-1] == units_max or descriptors + added > chunk_descriptors):
                found.append(pair)
                descriptors, added = 0, self.unit_descriptors
            descriptors += added
        return np.array([*found, count], np.int64)


AnyBinding = Binding | StagedBinding


def bind_plan(plan: TransferPlan, source: Manifest, target: Manifest) -> tuple[AnyBinding, ...]:
    """Bind every group of a plan, once for each peer. Binding a batch then needs no checks.

    The proof is valid only for the planned geometry. So this function compares the digests, counts the bytes again, and
    checks that every row lies in its registered region.

    Raises:
        PlanUnsound: the plan was made for other caches, or a row leaves its region.
        LayoutMismatch: a group of one side lies in both VRAM and DRAM.
        CapacityExceeded: a prepared list would be too long.
    """
    if plan.geometry != (source.geometry_digest(), target.geometry_digest()):
        raise PlanUnsound("the plan was made, and proven, for other caches")
    if sum(map(_written_bytes, plan.groups)) != plan.certificate.written_bytes:
        raise PlanUnsound("the plan's runs are not the ones that were proven")
    return tuple((Binding if group.staged is None else StagedBinding)(group, source, target) for group in plan.groups)


def _written_bytes(group: GroupPlan) -> int:
    """Count the bytes that a group's runs write into one block, as the certificate does."""
    share = group.source.stripe.share_of(group.target.stripe)
    return int(group.runs.unit_bytes * group.target_units * share)


def _require_inside(table: Int64s, regions: Sequence[Region], region: Int64s) -> None:
    """Check that every row lies in its region."""
    address, nbytes, _, stride, count = table.T
    first = np.array([entry.address for entry in regions], np.int64)[region]
    length = np.array([entry.nbytes for entry in regions], np.int64)[region]
    room = length - (address - first) - nbytes  # no term overflows: all are in [0, 2**63)
    if np.any((address < first) | (room_left(room, count[:, None], stride[:, None]) < 0)):
        raise PlanUnsound("a row leaves its region")


def _addressed(table: Int64s, region: Int64s, units: tuple[int, int, int], regions: Sequence[Region]) -> Int64s:
    """Return the copies with addresses instead of offsets, each within its region."""
    length = np.array([entry.nbytes for entry in regions], np.int64)[region]
    address = np.array([entry.address for entry in regions], np.int64)[region]
    numbers = np.broadcast_to(np.array(units, np.int64), (len(table), 3))
    counts = np.concatenate([numbers, table[:, FIXED::3]], axis=1)
    strides = np.concatenate([table[:, 4:FIXED], table[:, FIXED + 2 :: 3]], axis=1)
    if np.any(room_left(length - table[:, 3] - table[:, 0], counts, strides) < 0):
        raise PlanUnsound("a staged copy leaves its region")
    addressed = table.copy()
    addressed[:, 3] += address
    return addressed
