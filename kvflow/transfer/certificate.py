"""Proof that a plan writes every byte it should exactly once, and nothing else.

The proof does not trust the merging: it walks the coordinates (head, token) of every target component, finds
the one run that covers their bytes, and checks that the run reads the bytes of the same coordinates.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from kvflow.errors import PlanUnsound
from kvflow.layout.manifest import Manifest
from kvflow.transfer.match import ComponentPair, GroupPair
from kvflow.transfer.runs import Int64s, RunTable


class Missing(Struct, frozen=True):
    """Heads of one component of the target that this source does not hold."""

    layer: str
    role: str
    first_head: int
    num_heads: int


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


def certify(target: Manifest, planned: Sequence[tuple[GroupPair, RunTable, int]]) -> Certificate:
    """Prove every group's runs against the manifests' geometry.

    Args:
        target: the consumer's manifest.
        planned: group pair, its runs, and tokens of one unit.

    Raises:
        PlanUnsound: a byte is written twice, not at all, from elsewhere, or outside the components.
    """
    covered: dict[tuple[str, str], ComponentPair] = {}
    written = 0
    for group, runs, unit_tokens in planned:
        units = group.target_block_size // unit_tokens
        cover = _Cover(runs, units)
        expected = sum(_prove(cover, pair, unit_tokens, units) for pair in group.pairs)
        if expected != runs.unit_bytes * units:
            raise PlanUnsound(f"runs write {runs.unit_bytes * units} bytes, the components have {expected}")
        written += expected
        covered |= {(pair.layer, pair.target.role): pair for pair in group.pairs}
    return Certificate(_page_bytes(target), written, _missing(target, covered))


class _Cover:
    """Runs of all units of one target block, sorted by region and offset, disjoint."""

    def __init__(self, runs: RunTable, units: int) -> None:
        unit = np.repeat(np.arange(units, dtype=np.int64), len(runs))
        self.run = np.tile(np.arange(len(runs), dtype=np.int64), units)
        self.start = runs.target[1, self.run] + unit * runs.target[3, self.run]
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


def _prove(cover: _Cover, pair: ComponentPair, unit_tokens: int, units: int) -> int:
    """Check one component of one target block; return its bytes."""
    source, target = pair.source, pair.target
    heads = np.repeat(pair.first_head + np.arange(pair.num_heads, dtype=np.int64), units * unit_tokens)
    tokens = np.tile(np.arange(units * unit_tokens, dtype=np.int64), pair.num_heads)
    wanted = target.offset + (heads - target.first_head) * target.head_stride + tokens * target.token_stride
    run, inside = cover.find(target.region, wanted, target.content_bytes)
    # Where unit 0 of the source must be read for this token, whatever unit it is paired with.
    right = source.offset + (heads - source.first_head) * source.head_stride
    right += tokens % unit_tokens * source.token_stride
    runs = cover.runs
    if np.any(runs.source[1, run] + inside != right) or np.any(runs.source[0, run] != source.region):
        raise PlanUnsound(f"{pair.layer}.{target.role}: a byte is read from elsewhere")
    for side, part in ((runs.source, source), (runs.target, target)):
        if np.any(side[2, run] != part.block_stride):
            raise PlanUnsound(f"{pair.layer}.{target.role}: block strides differ")
        if np.any(side[3, run] != unit_tokens * part.token_stride):
            raise PlanUnsound(f"{pair.layer}.{target.role}: unit strides differ")
    return len(wanted) * target.content_bytes


def _page_bytes(target: Manifest) -> int:
    return sum(
        part.num_heads * part.num_tokens * part.content_bytes
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
                first = pair.first_head if pair else part.first_head
                count = pair.num_heads if pair else 0
                end = part.first_head + part.num_heads
                spans = ((part.first_head, first), (first + count, end))
                missing += [Missing(layer.name, part.role, low, high - low) for low, high in spans if high > low]
    return tuple(missing)
