"""Turn a plan into prepared descriptor rows, and pairs of units into descriptor indices.

Rows are made once per peer and plan: one strided row per run, whatever the pool's size. Indices are made for
every batch, vectorised: run by run, so that consecutive blocks are neighbours in a row and merge there.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvflow.cache.blocks import Ids
from kvflow.errors import CapacityExceeded, LayoutMismatch, PlanUnsound
from kvflow.layout.region import Region
from kvflow.transfer.chunks import Cutter, num_neighbors, one_chunk
from kvflow.transfer.pairs import UnitPairs
from kvflow.transfer.plan import GroupPlan
from kvflow.transfer.runs import Int64s, Units

Int32s = npt.NDArray[np.int32]
DESCRIPTORS_MAX = (1 << 31) - 1
"""Descriptor indices are int32."""
ROWS_MAX = 1 << 20
"""40 MiB of rows. Only a peer with absurdly large blocks, none of them dense, asks for more."""


class Bound(Struct, frozen=True, eq=False, gc=False):
    """One batch as NIXL takes it.

    Attributes:
        source_index: int32, shape (n,).
        target_index: int32, shape (n,).
        cuts: int64: chunk ``c`` is ``[cuts[c], cuts[c + 1])``.
        nbytes: total bytes.
    """

    source_index: Int32s
    target_index: Int32s
    cuts: Int64s
    nbytes: int


class Rows:
    """Descriptor rows of one side of one group plan.

    Attributes:
        linear: whether all units lie at one stride throughout the pool. Then they share a row, so that they merge
            across blocks; otherwise each unit of a block has a row of its own.
        table: int64, shape (rows, 5): address, nbytes, device, stride, count.
        memory: memory kind of all rows, which ``Binding`` has checked: a prepared list has but one.
        per_run: descriptors of one run.
        stride: int64, shape (runs,): bytes between neighbouring descriptors of a run.
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
        # A row that all units share begins with the first; listing the others would let a huge block cost memory.
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
        """Return the descriptor number of each unit within any run."""
        if self.linear:
            return units
        per_block, num_blocks = self._per_block, self._num_blocks
        if isinstance(units, list):
            return [unit % per_block * num_blocks + unit // per_block for unit in units]
        found: Int64s = units % per_block * num_blocks + units // per_block
        return found


def _require_one_memory(group: GroupPlan, source_regions: Sequence[Region], target_regions: Sequence[Region]) -> None:
    """Refuse a group that lies in memory of several kinds on one side: one list of descriptors has one kind."""
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
    """A group plan with the sizes of two pools: everything ``bind`` needs, computed once.

    Attributes:
        group: the group plan.
        source: the producer's rows.
        target: our rows.
        scatter: None: what is read lands where it belongs.
        unit_bytes: bytes of one pair of units.
        read_bytes: bytes that are read for it, the same.
        unit_descriptors: descriptors of one pair of units before merging.
    """

    scatter: None = None

    def __init__(
        self,
        group: GroupPlan,
        *,
        source_regions: Sequence[Region],
        source_blocks: int,
        target_regions: Sequence[Region],
        target_blocks: int,
    ) -> None:
        runs = group.runs
        _require_one_memory(group, source_regions, target_regions)
        self.group = group
        self.source = Rows(
            runs.source,
            runs.nbytes,
            units=group.source,
            num_blocks=source_blocks,
            regions=source_regions,
        )
        self.target = Rows(
            runs.target,
            runs.nbytes,
            units=group.target,
            num_blocks=target_blocks,
            regions=target_regions,
        )
        self.unit_bytes = self.read_bytes = runs.unit_bytes
        self.unit_descriptors = len(runs)
        dense = (self.source.stride == runs.nbytes) & (self.target.stride == runs.nbytes)
        self._cutter = Cutter(runs.nbytes, dense)
        self._linear = self.source.linear and self.target.linear
        run = np.arange(len(runs), dtype=np.int32)[:, None]
        # The number of each run's first descriptor, of both sides.
        self._first = np.stack([run * np.int32(side.per_run) for side in (self.source, self.target)])

    def bind(self, pairs: UnitPairs, *, chunk_bytes: int, chunk_descriptors: int) -> Bound:
        """Return the indices of these pairs, cut into chunks.

        Args:
            pairs: at least one; ascending by source, those of one request.
            chunk_bytes: most bytes of one chunk; a single larger descriptor is a chunk of its own.
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
        if self.unit_descriptors == 1:
            return Bound(np.array(source, np.int32), np.array(target, np.int32), cuts, nbytes)
        units = np.empty((2, 1, count), np.int32)
        units[0], units[1] = source, target
        # One array for both sides: NumPy asks for huge pages from 4 MiB on; small pages take longer than the sums.
        index = self._first + units
        return Bound(index[0].ravel(), index[1].ravel(), cuts, nbytes)

    def merged(self, pairs: UnitPairs) -> int:
        """Return how many descriptors these pairs are once neighbours have merged; batches and chunks not counted."""
        source, target = pairs.source, pairs.target
        if not self._linear:
            source, target = self.source.local(source), self.target.local(target)
        return len(source) * self.unit_descriptors - num_neighbors(source, target) * self._cutter.num_dense


def _require_inside(table: Int64s, regions: Sequence[Region], region: Int64s) -> None:
    """Check that every row lies in the region that it is meant to lie in: what was proven is what is bound.

    Raises:
        PlanUnsound: one does not.
    """
    address, nbytes, _, stride, count = table.T
    first = np.array([entry.address for entry in regions], np.int64)[region]
    length = np.array([entry.nbytes for entry in regions], np.int64)[region]
    room = length - (address - first) - nbytes  # no term overflows: all are in [0, 2**63)
    if np.any((address < first) | (room < 0) | ((count > 1) & (stride > room // np.maximum(count - 1, 1)))):
        raise PlanUnsound("a row leaves its region")
