"""Plan a transfer: intersect two affine maps, return copies without addresses, and explain them.

A plan contains no address, peer or block id. So it can be made before workers connect, is proven once, and is valid for
every pair of workers with the same geometry.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import force_setattr

from kvflow.errors import CapacityExceeded, LayoutMismatch, PlanUnsound, counted
from kvflow.ids import Int64s, Newest
from kvflow.layout.manifest import Manifest
from kvflow.layout.shards import Stripe
from kvflow.planning.certificate import Certificate, Missing, PlannedGroup, certify
from kvflow.planning.match import ComponentPair, GroupPair, HeadRanges, match_groups
from kvflow.planning.runs import UNITS_MAX, Bools, Run, RunTable, Units, cut_fragments, group_by_shape, merge_runs
from kvflow.planning.staging import DIRECT, Choice, StagedRuns, choose


class PlanLimits(Struct, frozen=True):
    """Limits of a plan, so that a hostile manifest costs little time and memory before it is refused.

    Attributes:
        fragments_max: contiguous pieces of all components, before merging. 128 layers of 8 heads and 128-token blocks
            have 262,144, and 80 layers of 8 heads and 512-token blocks, between HND and NHD, 655,360.
        runs_max: runs after merging.
        bytes_max: bytes that the plan copies into one target block of every group together.
    """

    fragments_max: int = 1 << 20
    runs_max: int = 1 << 17
    bytes_max: int = 1 << 41


DEFAULT_LIMITS = PlanLimits()


class GroupPlan(Struct, frozen=True, eq=False):
    """The copies of one pair of groups.

    Attributes:
        source_group: index of the group whose source block ids are read.
        target_group: index of the group whose target block ids are written.
        source: how source blocks are cut into units.
        target: how target blocks are cut into units.
        runs: what one pair of units copies if it is read directly.
        pairs: all components of these groups that are copied.
        choice: whether the group is read directly or staged.
        window: tokens of a sliding window; 0 for other kinds.
        aligned: whether both sides hold the same tokens of a request, so their units correspond in order. It follows
            from the other fields, as does ``whole``.
        whole: whether blocks correspond: each block is one unit, and both sides hold all tokens.
    """

    source_group: int
    target_group: int
    source: Units
    target: Units
    runs: RunTable
    pairs: tuple[ComponentPair, ...]
    choice: Choice = DIRECT
    window: int = 0
    aligned: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        sides = (self.source, self.target)
        force_setattr(self, "aligned", self.source.stripe.aligned(self.target.stripe))
        force_setattr(self, "whole", all(side.tokens and side.per_block == side.stripe.size == 1 for side in sides))

    def __repr__(self) -> str:
        """Return the groups and the amount of copies."""
        way = "directly" if self.staged is None else "through staging buffers"
        runs = counted(len(self.runs), "run")
        return f"<GroupPlan: source group {self.source_group} to target group {self.target_group}, {runs}, read {way}>"

    @property
    def staged(self) -> StagedRuns | None:
        """The runs of a staged read; None if the group is read directly."""
        return self.choice.staged

    @property
    def unit_tokens(self) -> int:
        """Tokens of one unit: the greatest common divisor of what is contiguous on either side; 0 for states."""
        return self.target.tokens

    def shared_units(self, first: int, count: int) -> tuple[Bools, Int64s]:
        """Return which target units the source holds, and the numbers of its units. Units count from token 0.

        Args:
            first: number of the first target unit.
            count: number of target units.

        Returns:
            Whether the source's stripe has each unit, and its number there, which is undefined if it does not.
        """
        tokens = self.target.stripe.token(np.arange(first, first + count, dtype=np.int64) * self.unit_tokens)
        stripe = self.source.stripe
        return stripe.holds(tokens), stripe.position(tokens) // self.unit_tokens

    def moved(self, num_blocks: int) -> tuple[int, int]:
        """Count the units that the first ``num_blocks`` target blocks take, and their stretches of consecutive units.

        Raises:
            CapacityExceeded: the blocks are larger than any engine's by orders of magnitude.
        """
        units = num_blocks * self.target_units
        if self.aligned or not units:
            return units, min(units, 1)
        if units > UNITS_MAX:
            raise CapacityExceeded("units of one request", UNITS_MAX, remedy="Ask for fewer blocks.")
        here, numbers = self.shared_units(0, units)
        unit = np.flatnonzero(here)
        breaks = (np.diff(unit) != 1) | (np.diff(numbers[unit]) != 1)
        return len(unit), int(np.count_nonzero(breaks)) + min(len(unit), 1)

    @property
    def source_units(self) -> int:
        """Units in one source block."""
        return self.source.per_block

    @property
    def target_units(self) -> int:
        """Units in one target block."""
        return self.target.per_block


class TransferPlan(Struct, frozen=True, eq=False):
    """The copies from one cache to another, without addresses.

    Attributes:
        groups: one entry per pair of groups that share layers.
        certificate: the proof. For a staged group it covers both the direct and the staged runs.
        geometry: digests of both manifests' geometry, source first. ``bind_plan`` refuses other manifests.
    """

    groups: tuple[GroupPlan, ...]
    certificate: Certificate
    geometry: tuple[bytes, bytes]

    def __repr__(self) -> str:
        """Return the amount of copies; ``explain`` gives the reasons."""
        runs = counted(sum(len(group.runs) for group in self.groups), "run")
        missing = f", {counted(len(self.certificate.missing), 'component')} missing" if self.certificate.missing else ""
        return f"<TransferPlan: {runs} in {counted(len(self.groups), 'pair')} of groups{missing}>"

    def descriptors(self, num_blocks: int | Sequence[int], *, consecutive: bool = False) -> int:
        """Count the descriptors of the first ``num_blocks`` target blocks of every group (or one number per group).

        For a staged group, count the descriptors that fetch. Cuts into chunks are not counted.

        Args:
            num_blocks: target blocks.
            consecutive: whether block ids ascend by one on both sides.
        """
        total = 0
        for group in self.groups:
            blocks = num_blocks if isinstance(num_blocks, int) else num_blocks[group.target_group]
            units, stretches = group.moved(blocks)
            runs, units_there = posted(group)
            dense = dense_runs(runs, group.source, units_there) if consecutive else 0
            total += dense * stretches + (len(runs) - dense) * units
        return total

    def explain(self) -> str:
        """Explain in a few lines why the plan has this many descriptors: name the runs and what ends them."""
        lines = []
        for group in self.groups:
            runs = group.runs
            low, high = int(runs.nbytes.min()), int(runs.nbytes.max())
            size = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            unit = f"unit of {group.unit_tokens} tokens" if group.unit_tokens else "state"
            lines.append(
                f"source group {group.source_group} -> target group {group.target_group}: "
                f"{counted(len(runs), 'run')} of {size} bytes for each {unit} "
                f"({group.source_units} per source block, {group.target_units} per target block)"
            )
            merging = f"{dense_runs(runs, group.source, group.target):,} of {len(runs):,} merge over consecutive blocks"
            lines.append(f"  {explain_stop(runs, group.pairs, group.unit_tokens)}; {merging}")
            if not group.aligned:
                lines.append(f"  {explain_stripes(group.source.stripe, group.target.stripe)}")
            if group.choice.reason:
                lines.append(f"  for each unit {group.choice.reason}")
        lines += explain_proof(self.certificate)
        return "\n".join(lines)


def plan_transfer(
    source: Manifest,
    target: Manifest,
    *,
    head_ranges: HeadRanges | None = None,
    limits: PlanLimits = DEFAULT_LIMITS,
    staging_bytes: int = 0,
) -> TransferPlan:
    """Plan how to fill the target's blocks from the source's.

    Args:
        source: the producer's manifest.
        target: the consumer's manifest.
        head_ranges: what to read from this source if others give the rest; None: everything that both sides hold.
        limits: the plan is refused if it exceeds them.
        staging_bytes: staging memory that the target's worker has. With it, each group is read in the cheaper way; 0:
            all groups are read directly.

    Returns:
        A proven plan. The source may hold only a part of the target (another shard, a pipeline stage);
        ``certificate.missing`` names the rest.

    Raises:
        SpecInvalid: a manifest contradicts itself.
        LayoutMismatch: the two differ in a field that must be equal; names the field and both values.
        CapacityExceeded: the plan would exceed ``limits``.
    """
    source.check()
    target.check()
    pairs = match_groups(source, target, head_ranges)
    _require_few_bytes(limits, pairs)
    _require_few_fragments(limits, pairs)
    planned = [_plan_group(pair) for pair in pairs]
    if sum(len(group.runs) for group in planned) > limits.runs_max:
        raise CapacityExceeded("runs in one plan", limits.runs_max, remedy="Use layouts that merge further.")
    certificate = certify(target, planned)
    choices = [choose(group, (source, target), staging_bytes) if staging_bytes else DIRECT for group in planned]
    _prove_staged(target, planned, choices, certificate)
    groups = tuple(_chosen(group, choice) for group, choice in zip(planned, choices, strict=True))
    return TransferPlan(groups, certificate, (source.geometry_digest(), target.geometry_digest()))


def posted(group: GroupPlan) -> tuple[RunTable, Units]:
    """Return the runs that NIXL reads (direct, or those that fetch), and how the blocks that they write are cut."""
    return (group.runs, group.target) if group.staged is None else (group.staged.fetch, group.staged.units)


def dense_runs(runs: RunTable, source: Units, target: Units) -> int:
    """Count the runs that are dense on both sides, and so merge with those of the next block."""
    dense = np.ones(len(runs), bool)
    for side, units in ((runs.source, source), (runs.target, target)):
        step, even = units.step(side)
        dense &= even & (step == runs.nbytes)
    return int(dense.sum())


def _prove_staged(
    target: Manifest, planned: Sequence[PlannedGroup], choices: Sequence[Choice], certificate: Certificate
) -> None:
    """Prove that the staged copies fill the target as the direct runs do."""
    staged = [choice.staged for choice in choices]
    if not any(staged):
        return
    chosen = [
        group if way is None else PlannedGroup(way.landing, way.scatter, way.units, group.target)
        for group, way in zip(planned, staged, strict=True)
    ]
    if certify(target, chosen) != certificate:
        raise PlanUnsound("staged runs fill other bytes of the target than direct ones")


def _require_few_fragments(limits: PlanLimits, pairs: Sequence[GroupPair]) -> None:
    """Refuse more fragments than any model has. Count them without making them."""
    total = sum(
        math.prod(parts[0].extents(_units(pair)[1].tokens)[: parts[0].walk[0]]) * len(parts)
        for pair in pairs
        for parts in group_by_shape(pair.pairs)
    )
    if total > limits.fragments_max:
        raise CapacityExceeded("fragments in one plan", limits.fragments_max, remedy="Use smaller blocks.")


def _require_few_bytes(limits: PlanLimits, pairs: Sequence[GroupPair]) -> None:
    """Refuse blocks that are larger than any machine's memory."""
    nbytes = sum(
        math.prod(part.extents(pair.target.block_size)) * part.target.item_bytes
        for pair in pairs
        for part in pair.pairs
    )
    if nbytes > limits.bytes_max:
        raise CapacityExceeded("bytes in one block of a plan", limits.bytes_max, remedy="Use smaller blocks.")


def _plan_group(pair: GroupPair) -> PlannedGroup:
    source, target = _units(pair)
    runs = merge_runs([cut_fragments(parts, source, target) for parts in group_by_shape(pair.pairs)])
    return PlannedGroup(pair, runs, source, target)


def _chosen(group: PlannedGroup, choice: Choice) -> GroupPlan:
    pair = group.pair
    windows = {layer.window if layer.kind != "chunked" else 0 for layer in pair.target.layers}
    window = windows.pop() if len(windows) == 1 else 0
    return GroupPlan(
        pair.source_group, pair.target_group, group.source, group.target, group.runs, pair.pairs, choice, window
    )


def _units(pair: GroupPair) -> tuple[Units, Units]:
    """Cut the kernel blocks of both sides into units of one size. A state is one unit, and so is an opaque page."""
    if pair.target.opaque:
        if pair.source.block_size != pair.target.block_size:
            field = f"{pair.target.layers[0].name}.block_size"
            remedy = "Give both sides the same block size for this layer."
            raise LayoutMismatch(field, pair.source.block_size, pair.target.block_size, remedy=remedy)
        whole = Units(pair.target.block_size, 1, 1)
        return whole, whole
    together = [pair.source.kernel_tokens, pair.target.kernel_tokens]
    if not pair.aligned:
        # A unit then lies on one rank of each side. Equal stripes are cut as if tokens were not divided.
        together += [group.stripe.width for group in (pair.source, pair.target) if group.stripe.size > 1]
    tokens = math.gcd(*together)
    source, target = (
        Units(tokens, group.kernel_tokens // tokens if tokens else 1, group.kernel_blocks, group.stripe)
        for group in (pair.source, pair.target)
    )
    return source, target


class PlanCache:
    """The plans of the most recent pairs of geometries."""

    def __init__(self, plans_max: int = 256) -> None:
        self._plans = Newest[object, TransferPlan](plans_max)

    def plan(
        self,
        source: Manifest,
        target: Manifest,
        head_ranges: HeadRanges | None = None,
        *,
        staging_bytes: int = 0,
    ) -> TransferPlan:
        """Return the plan for this pair: a cached one, or a new one. Raises what ``plan_transfer`` raises."""
        taken = None if head_ranges is None else tuple(sorted(head_ranges.items()))
        key = (source.geometry_digest(), target.geometry_digest(), taken, staging_bytes)
        plan = self._plans.get(key)
        if plan is None:
            plan = plan_transfer(source, target, head_ranges=head_ranges, staging_bytes=staging_bytes)
        self._plans[key] = plan  # the newest now
        return plan


GAPS_SHOWN = 4


def explain_stop(runs: RunTable, pairs: Sequence[ComponentPair], unit_tokens: int) -> str:
    """Name the axis, or the gap between components, that ends most runs of a group pair."""
    first_of_shape = [(parts[0], _run_of(runs, parts[0]), len(parts)) for parts in group_by_shape(pairs)]
    pair, run, _ = max(first_of_shape, key=lambda one: one[2] * one[0].target.nbytes // runs[one[1]].nbytes)
    axis = _axis_that_ends(runs[run], pair, unit_tokens)
    if axis is not None:
        source, target = pair.source.strides[axis], pair.target.strides[axis]
        apart = f"{source:,} bytes apart on the source and {target:,} on the target"
        return f"merging stops at {_axis_name(pair, axis)}, which are {apart}"
    if len(runs) == 1:
        return "all that moves lies together on both sides"
    of_layer = {_run_of(runs, each) for each in pairs if each.layer == pair.layer}
    what = "layers" if of_layer == {run} else "the components of a layer"
    sides = (("source", runs.source), ("target", runs.target))
    apart = " and the ".join(name for name, side in sides if not _touching(side, runs.nbytes))
    return f"merging stops at {what}, which " + (f"lie apart on the {apart}" if apart else "have strides of their own")


def explain_stripes(source: Stripe, target: Stripe) -> str:
    """Name the part of the target's tokens that this source gives."""
    part = source.share_of(target)
    share = "all of them" if part == 1 else f"{part.numerator} of {part.denominator} of them"
    return f"tokens are divided among ranks: source has {source}; target has {target}, and {share} from this source"


def explain_proof(proof: Certificate) -> Iterator[str]:
    """Name what was proven and what is not transferred. Missing parts of one kind share a line."""
    yield f"proven: {proof.written_bytes:,} of {proof.page_bytes:,} bytes of the target page are written exactly once"
    gaps: dict[str, list[Missing]] = {}
    for gap in proof.missing:
        gaps.setdefault(gap.part, []).append(gap)
    for part, (gap, *more) in list(gaps.items())[:GAPS_SHOWN]:
        others = f" and of {len(more)} more components" if more else ""
        yield f"not transferred: {part} of {gap.layer}.{gap.role}{others}"
    if len(gaps) > GAPS_SHOWN:
        yield f"not transferred: other parts of {sum(map(len, list(gaps.values())[GAPS_SHOWN:]))} components"


def _run_of(runs: RunTable, pair: ComponentPair) -> int:
    """Return the run that writes the first byte of a pair."""
    region, offset = runs.target[:2]
    inside = pair.start(pair.target) - offset
    return int(np.flatnonzero((region == pair.target.region) & (inside >= 0) & (inside < runs.nbytes))[0])


def _axis_that_ends(run: Run, pair: ComponentPair, unit_tokens: int) -> int | None:
    """Return the innermost axis whose next element is not in the same run; None if there is none."""
    inside = pair.start(pair.target) - run.target.offset
    axes = sorted(range(len(pair.target.extents)), key=lambda axis: pair.target.strides[axis])
    for axis in axes:
        step = pair.target.strides[axis]
        joined = step == pair.source.strides[axis] and inside + step < run.nbytes
        if pair.extents(unit_tokens)[axis] > 1 and not joined:
            return axis
    return None


def _axis_name(pair: ComponentPair, axis: int) -> str:
    if pair.target.token_axis < 0:
        return f"the slices along axis {axis} of {pair.target.role}"
    return "tokens" if axis == pair.target.token_axis else "heads" if axis == pair.target.shard_axis else "elements"


def _touching(side: Int64s, nbytes: Int64s) -> bool:
    """Return whether every run of one side begins where the previous one ends."""
    region, offset = side[:2]
    return bool(np.all((region[1:] == region[:-1]) & (offset[:-1] + nbytes[:-1] == offset[1:])))
