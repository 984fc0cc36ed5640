"""Turn a staged group plan into the rows that fetch and the copies that scatter, and pairs of units into chunks.

A chunk is whole pairs of units, as many as one staging buffer has slots for. Which buffer it gets, and with it the
descriptors of the slots, is decided when it is posted.
"""

from collections.abc import Sequence

import numpy as np

from kvflow.errors import CapacityExceeded, PlanUnsound
from kvflow.layout.region import Region
from kvflow.transfer.bind import DESCRIPTORS_MAX, Bound, Rows
from kvflow.transfer.boxes import FIXED, Scatter, room_left
from kvflow.transfer.chunks import neighbors
from kvflow.transfer.pairs import UnitPairs
from kvflow.transfer.plan import GroupPlan
from kvflow.transfer.runs import Int64s


class StagedBinding:
    """A staged group plan with the sizes of two pools; to be used as a ``Binding``.

    Attributes:
        group: the group plan.
        source: the producer's rows.
        target: rows of one staging buffer, addressed from its start.
        scatter: the copies from there to our cache.
        unit_bytes: bytes that one pair of units fills.
        read_bytes: bytes that are read for it.
        unit_descriptors: descriptors that fetch one pair of units, before merging.
    """

    def __init__(
        self,
        group: GroupPlan,
        *,
        source_regions: Sequence[Region],
        source_blocks: int,
        target_regions: Sequence[Region],
        target_blocks: int,
    ) -> None:
        staged = group.staged
        assert staged is not None
        fetch = staged.fetch
        buffer = [Region(0, staged.buffer_bytes)]
        if target_blocks * group.target_units > DESCRIPTORS_MAX:
            raise CapacityExceeded("units in one pool", DESCRIPTORS_MAX, remedy="Use fewer blocks.")
        self.group = group
        self.source = Rows(
            fetch.source, fetch.nbytes, units=group.source, num_blocks=source_blocks, regions=source_regions
        )
        self.target = Rows(fetch.target, fetch.nbytes, units=staged.units, num_blocks=staged.slots, regions=buffer)
        units = (target_blocks, group.target.kernel_blocks, group.target.per_kernel_block)
        table = _addressed(staged.boxes.table, staged.boxes.region, units, target_regions)
        self.scatter = Scatter(table, staged.slots, units)
        self.unit_bytes = staged.scatter.unit_bytes
        self.read_bytes = staged.slot_bytes
        self.unit_descriptors = len(fetch)
        # On the side of the slots every run is dense.
        self._num_dense = int(np.count_nonzero(self.source.stride == fetch.nbytes))

    def bind(self, pairs: UnitPairs, *, chunk_bytes: int, chunk_descriptors: int) -> Bound:
        """Return the unit numbers of these pairs, cut into chunks.

        Args:
            pairs: at least one; ascending by source, those of one request.
            chunk_bytes: most bytes that one chunk reads; a single larger unit is a chunk of its own.
            chunk_descriptors: most merged descriptors that one chunk reads; likewise.

        Returns:
            Numbers of units instead of descriptors: of the source, how each run numbers its descriptors.
        """
        source = np.asarray(self.source.local(pairs.source), np.int64)
        units_max = min(self.scatter.slots, max(1, chunk_bytes // self.read_bytes))
        return Bound(
            source_index=source.astype(np.int32),
            target_index=np.array(pairs.target, np.int32),
            cuts=self._cuts(source, units_max, chunk_descriptors),
            nbytes=len(source) * self.unit_bytes,
        )

    def merged(self, pairs: UnitPairs) -> int:
        """Return how many descriptors fetch these pairs once neighbors have merged; chunks not counted."""
        follows = np.count_nonzero(np.diff(self.source.local(pairs.source)) == 1)
        return len(pairs.source) * self.unit_descriptors - int(follows) * self._num_dense

    def _cuts(self, source: Int64s, units_max: int, chunk_descriptors: int) -> Int64s:
        """Return where chunks begin, and the end of the last."""
        count = len(source)
        if min(units_max, count) * self.unit_descriptors <= chunk_descriptors or units_max == 1:
            cuts = np.arange(0, count + units_max, units_max, dtype=np.int64)
            cuts[-1] = count
            return cuts
        slots = np.arange(count)
        saved = neighbors(source, slots).astype(np.int64) * self._num_dense
        found, descriptors = [0], 0
        for pair, less in enumerate(saved.tolist()):
            added = self.unit_descriptors - less
            if pair and (pair - found[-1] == units_max or descriptors + added > chunk_descriptors):
                found.append(pair)
                descriptors, added = 0, self.unit_descriptors
            descriptors += added
        return np.array([*found, count], np.int64)


def _addressed(table: Int64s, region: Int64s, units: tuple[int, int, int], regions: Sequence[Region]) -> Int64s:
    """Return the boxes with addresses instead of offsets, each within its region.

    Raises:
        PlanUnsound: one is not.
    """
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
