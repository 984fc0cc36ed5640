"""Prove that a plan writes every byte that it should write exactly once, and nothing else.

The proof does not rely on the merging. It walks the coordinates of every target component, finds the one run that
covers their bytes, and checks that the run reads the same coordinates of the source.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from kvflow.errors import PlanUnsound
from kvflow.ids import Int64s
from kvflow.layout.component import Component
from kvflow.layout.manifest import Manifest
from kvflow.planning.match import ComponentPair, GroupPair
from kvflow.planning.runs import Bools, RunTable, Units, group_by_shape

PROVEN_AT_ONCE = 1 << 18  # pieces that are checked together: about 30 MiB of numbers


class Missing(Struct, frozen=True):
    """A part of one component of the target that this source does not hold.

    Attributes:
        layer: name of the layer.
        role: role of the component.
        first: first missing index along the sharded axis, counted in the whole model.
        count: number of missing indices.
        indices: kind of index: ``heads``, ``slices`` of a state, or ``whole`` if ranks do not divide the component;
            ``tokens`` if only the tokens are missing that the source's rank does not hold.
    """

    layer: str
    role: str
    first: int
    count: int
    indices: str = "heads"

    @property
    def part(self) -> str:
        """Description of the part."""
        if self.indices == "tokens":
            return "tokens of other source ranks"
        return "all" if self.indices == "whole" else f"{self.indices} {self.first} to {self.first + self.count - 1}"


class Certificate(Struct, frozen=True):
    """What the proof of a plan found.

    Attributes:
        page_bytes: bytes that the target's layers keep in one block of each group, all groups added up.
        written_bytes: how many of these bytes the plan writes, each exactly once. If the tokens of a block come from
            several ranks, this rank's average part of a block, rounded down.
        missing: the parts that the plan does not write.
    """

    page_bytes: int
    written_bytes: int
    missing: tuple[Missing, ...]

    @property
    def complete(self) -> bool:
        """Whether the source alone fills the target."""
        return not self.missing


class PlannedGroup(Struct, frozen=True, eq=False):
    """The runs of one pair of groups, and how the blocks of both sides are cut."""

    pair: GroupPair
    runs: RunTable
    source: Units
    target: Units


def certify(target: Manifest, planned: Sequence[PlannedGroup]) -> Certificate:
    """Prove every group's runs against the manifests' geometry.

    Raises:
        PlanUnsound: a byte is written twice, not at all, from the wrong place, or outside the components; or blocks are
            cut so that different tokens would be paired.
    """
    covered: dict[tuple[str, str], tuple[ComponentPair, bool]] = {}
    written = 0
    for group in planned:
        _prove_cut(group)
        cover = _Cover(group.runs, group.target)
        expected = 0
        for pairs in group_by_shape(group.pair.pairs):
            for some in _batches(pairs, group.target):
                expected += _prove(cover, some, group)
        found = group.runs.unit_bytes * group.target.per_block
        if expected != found:
            raise PlanUnsound(f"runs write {found} bytes, the components have {expected}")
        written += int(expected * group.pair.token_share)
        partly = group.pair.token_share < 1
        covered |= {(pair.layer, pair.target.role): (pair, partly) for pair in group.pair.pairs}
    return Certificate(_page_bytes(target), written, _missing(target, covered))


def _prove_cut(planned: PlannedGroup) -> None:
    """Check that equal units fill the blocks of both sides, and that each lies on one rank of each side."""
    pair, source, target = planned.pair, planned.source, planned.target
    for side, group, units in (("source", pair.source, source), ("target", pair.target, target)):
        if units.tokens:
            fills = units.tokens * units.per_block == group.block_size and units.kernel_blocks == group.kernel_blocks
        else:
            fills = units.per_block == 1 and not group.kernel_tokens
        if not fills or source.tokens != target.tokens:
            raise PlanUnsound(
                f"{side} blocks of {group.block_size} tokens are cut into {units.kernel_blocks} times "
                f"{units.per_kernel_block} units of {units.tokens}"
            )
        stripe = group.stripe
        whole = pair.aligned or stripe.size == 1 or stripe.width % units.tokens == 0
        if stripe != units.stripe or not whole:
            raise PlanUnsound(f"{side} tokens ({stripe}) are cut into units of {units.tokens} ({units.stripe})")


class _Cover:
    """The disjoint runs of all units of one target block, sorted by region and offset."""

    def __init__(self, runs: RunTable, units: Units) -> None:
        if np.any(runs.nbytes < 1):
            raise PlanUnsound("a run has no bytes")
        self.run = np.tile(np.arange(len(runs), dtype=np.int64), units.per_block)
        self.start = (runs.target[1] + units.offsets(runs.target[3], runs.target[4])).ravel()
        self.region = runs.target[0, self.run]
        order = np.lexsort((self.start, self.region))
        self.run, self.start, self.region = self.run[order], self.start[order], self.region[order]
        self.nbytes = runs.nbytes[self.run]
        same = self.region[1:] == self.region[:-1]
        if np.any(same & (self.start[:-1] + self.nbytes[:-1] > self.start[1:])):
            raise PlanUnsound("two runs write the same byte")
        # Combine region and rank of the offset into one int64: only the order of offsets matters, not their size.
        self._offsets, rank = np.unique(self.start, return_inverse=True)
        self._place = self.region * len(self._offsets) + rank

    def find(self, region: Int64s, start: Int64s, nbytes: int) -> tuple[Int64s, Int64s]:
        """Return for each byte range the run that covers it, and its offset in the run."""
        rank = np.searchsorted(self._offsets, start, side="right") - 1
        at = np.searchsorted(self._place, region * len(self._offsets) + rank, side="right") - 1
        if np.any(at < 0) or np.any(self.region[at] != region):
            raise PlanUnsound("a byte of the target is not written")
        inside = start - self.start[at]
        if np.any(inside + nbytes > self.nbytes[at]):
            raise PlanUnsound("a byte of the target is not written")
        return self.run[at], inside


def _batches(pairs: Sequence[ComponentPair], units: Units) -> Iterator[Sequence[ComponentPair]]:
    """Divide pairs of one shape into batches whose proof takes bounded memory."""
    walked, _ = pairs[0].walk
    pieces = math.prod(pairs[0].extents(units.tokens * units.per_block)[:walked])
    many = max(1, PROVEN_AT_ONCE // pieces)
    return (pairs[first : first + many] for first in range(0, len(pairs), many))


def _prove(cover: _Cover, pairs: Sequence[ComponentPair], group: PlannedGroup) -> int:
    """Check components of one shape in one target block; return their bytes."""
    walked, nbytes = pairs[0].walk
    part = pairs[0].target
    # Every coordinate of the block. Its tokens continue through its kernel blocks.
    tokens = part.num_tokens * group.target.kernel_blocks
    index = np.indices(pairs[0].extents(tokens)[:walked], np.int64).reshape(walked, -1 if walked else 1)
    within, first = index.copy(), index.copy()
    kernel_block = np.zeros(index.shape[1], np.int64)
    if tokens:
        kernel_block, within[part.token_axis] = np.divmod(index[part.token_axis], part.num_tokens)
        # Where unit 0 of the source has this token. Other units follow by the strides, which are checked below.
        first[part.token_axis] %= group.target.tokens
    source = np.array([_first_bytes(pair, pair.source) for pair in pairs], np.int64).T[:, :, None]
    target = np.array([_first_bytes(pair, pair.target) for pair in pairs], np.int64).T[:, :, None]
    wanted = target[1] + kernel_block * target[3] + np.array(part.strides[:walked], np.int64) @ within
    run, inside = cover.find(target[0], wanted, nbytes)
    right = source[1] + np.array(pairs[0].source.strides[:walked], np.int64) @ first
    runs = group.runs
    elsewhere = (runs.source[1, run] + inside != right) | (runs.source[0, run] != source[0])
    _refuse(pairs, elsewhere, "a byte is read from elsewhere")
    for side, rows, where, units in (
        (runs.source, source, pairs[0].source, group.source),
        (runs.target, target, part, group.target),
    ):
        _refuse(pairs, side[2, run] != rows[2], "block strides differ")
        if units.kernel_blocks > 1:
            _refuse(pairs, side[3, run] != rows[3], "kernel block strides differ")
        if units.per_kernel_block > 1:
            _refuse(pairs, side[4, run] != units.tokens * where.strides[where.token_axis], "unit strides differ")
    return index.shape[1] * len(pairs) * nbytes


def _first_bytes(pair: ComponentPair, part: Component) -> tuple[int, int, int, int]:
    """Return region, offset, block stride and kernel stride of the common part of a pair."""
    return part.region, pair.start(part), part.block_stride, part.kernel_stride


def _refuse(pairs: Sequence[ComponentPair], wrong: Bools, fault: str) -> None:
    """Raise for the first pair that is ``wrong``: bool, shape (pairs, pieces)."""
    if wrong.any():
        pair = pairs[int(wrong.any(axis=1).argmax())]
        raise PlanUnsound(f"{pair.layer}.{pair.target.role}: {fault}")


def _page_bytes(target: Manifest) -> int:
    return sum(part.nbytes * group.kernel_blocks for group in target.groups for _, part in group.components)


def _missing(target: Manifest, covered: dict[tuple[str, str], tuple[ComponentPair, bool]]) -> tuple[Missing, ...]:
    missing = []
    for group in target.groups:
        for layer, part in group.components:
            pair, partly = covered.get((layer, part.role), (None, False))
            first = pair.first if pair else part.first
            count = pair.count if pair else 0
            spans = ((part.first, first), (first + count, part.first + part.held.count))
            indices = "whole" if part.total == 1 else "heads" if part.token_axis >= 0 else "slices"
            missing += [Missing(layer, part.role, low, high - low, indices) for low, high in spans if high > low]
            if partly:
                missing.append(Missing(layer, part.role, first, count, "tokens"))
    return tuple(missing)
