"""Proof that a plan writes every byte it should exactly once, and nothing else.

The proof does not trust the merging: it walks the coordinates of every target component, finds the one run that
covers their bytes, and checks that the run reads the bytes of the same coordinates.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from kvflow.errors import PlanUnsound
from kvflow.layout.manifest import Manifest
from kvflow.transfer.match import ComponentPair, GroupPair
from kvflow.transfer.runs import Int64s, RunTable, Units


class Missing(Struct, frozen=True):
    """Heads, or other indices of the sharded axis, of one component of the target that this source does not hold."""

    layer: str
    role: str
    first: int
    count: int


class Certificate(Struct, frozen=True):
    """What a plan was proven to do.

    Attributes:
        page_bytes: bytes that the target's layers keep in one block of each group, all groups added up.
        written_bytes: how many of them the plan writes, each exactly once.
        missing: what it does not write, by name.
    """

    page_bytes: int
    written_bytes: int
    missing: tuple[Missing, ...]

    @property
    def complete(self) -> bool:
        """Whether the source alone fills the target."""
        return not self.missing


def certify(target: Manifest, planned: Sequence[tuple[GroupPair, RunTable, Units, Units]]) -> Certificate:
    """Prove every group's runs against the manifests' geometry.

    Args:
        target: the consumer's manifest.
        planned: group pair, its runs, and how both sides' blocks are cut.

    Raises:
        PlanUnsound: a byte is written twice, not at all, from elsewhere, or outside the components.
    """
    covered: dict[tuple[str, str], ComponentPair] = {}
    written = 0
    for group, runs, source_units, target_units in planned:
        cover = _Cover(runs, target_units)
        expected = sum(_prove(cover, pair, source_units, target_units) for pair in group.pairs)
        if expected != runs.unit_bytes * target_units.per_block:
            raise PlanUnsound(
                f"runs write {runs.unit_bytes * target_units.per_block} bytes, the components have {expected}"
            )
        written += expected
        covered |= {(pair.layer, pair.target.role): pair for pair in group.pairs}
    return Certificate(_page_bytes(target), written, _missing(target, covered))


class _Cover:
    """Runs of all units of one target block, sorted by region and offset, disjoint."""

    def __init__(self, runs: RunTable, units: Units) -> None:
        self.run = np.tile(np.arange(len(runs), dtype=np.int64), units.per_block)
        self.start = (runs.target[1] + units.offsets(runs.target[3], runs.target[4])).ravel()
        self.nbytes = runs.nbytes[self.run]
        self.region = runs.target[0, self.run]
        order = np.lexsort((self.start, self.region))
        self.run, self.start = self.run[order], self.start[order]
        self.nbytes, self.region = self.nbytes[order], self.region[order]
        same = self.region[1:] == self.region[:-1]
        if np.any(same & (self.start[:-1] + self.nbytes[:-1] > self.start[1:])):
            raise PlanUnsound("two runs write the same byte")
        self.runs = runs

    def find(self, region: int, starts: Int64s, nbytes: int) -> tuple[Int64s, Int64s]:
        """Return for each byte range the run that covers it, and how far inside the run it starts."""
        low, high = np.searchsorted(self.region, (region, region + 1))
        at = low + np.searchsorted(self.start[low:high], starts, side="right") - 1
        if np.any(at < low):
            raise PlanUnsound("a byte of the target is not written")
        inside = starts - self.start[at]
        if np.any(inside + nbytes > self.nbytes[at]):
            raise PlanUnsound("a byte of the target is not written")
        return self.run[at], inside


def _prove(cover: _Cover, pair: ComponentPair, source_units: Units, target_units: Units) -> int:
    """Check one component of one target block; return its bytes."""
    source, target = pair.source, pair.target
    walked, nbytes = pair.walk
    # Every coordinate of the whole block: its tokens run through its kernel blocks.
    tokens = target.num_tokens * target_units.kernel_blocks
    index = np.indices(pair.extents(tokens)[:walked], np.int64).reshape(walked, -1 if walked else 1)
    within, first = index.copy(), index.copy()
    kernel_block = np.zeros(index.shape[1], np.int64)
    if tokens:
        kernel_block, within[target.token_axis] = np.divmod(index[target.token_axis], target.num_tokens)
        # Where unit 0 of the source must be read for this token, whatever unit it is paired with.
        first[target.token_axis] %= target_units.tokens
    wanted = pair.start(target) + np.array(target.strides[:walked], np.int64) @ within
    run, inside = cover.find(target.region, wanted + kernel_block * target.kernel_stride, nbytes)
    right = pair.start(source) + np.array(source.strides[:walked], np.int64) @ first
    runs = cover.runs
    if np.any(runs.source[1, run] + inside != right) or np.any(runs.source[0, run] != source.region):
        raise PlanUnsound(f"{pair.layer}.{target.role}: a byte is read from elsewhere")
    for side, part, units in ((runs.source, source, source_units), (runs.target, target, target_units)):
        if np.any(side[2, run] != part.block_stride):
            raise PlanUnsound(f"{pair.layer}.{target.role}: block strides differ")
        if units.kernel_blocks > 1 and np.any(side[3, run] != part.kernel_stride):
            raise PlanUnsound(f"{pair.layer}.{target.role}: kernel block strides differ")
        if units.per_kernel_block > 1 and np.any(side[4, run] != units.tokens * part.strides[part.token_axis]):
            raise PlanUnsound(f"{pair.layer}.{target.role}: unit strides differ")
    return len(wanted) * nbytes


def _page_bytes(target: Manifest) -> int:
    return sum(
        part.nbytes * group.kernel_blocks
        for group in target.groups
        for layer in group.layers
        for part in layer.components
    )


def _missing(target: Manifest, covered: dict[tuple[str, str], ComponentPair]) -> tuple[Missing, ...]:
    missing = []
    for group in target.groups:
        for layer in group.layers:
            for part in layer.components:
                pair = covered.get((layer.name, part.role))
                first = pair.first if pair else part.first
                count = pair.count if pair else 0
                spans = ((part.first, first), (first + count, part.first + part.held.count))
                missing += [Missing(layer.name, part.role, low, high - low) for low, high in spans if high > low]
    return tuple(missing)
