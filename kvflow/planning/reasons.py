"""Explain why a plan has its number of runs, and what it does not transfer."""

from collections.abc import Iterator, Sequence

import numpy as np

from kvflow.layout.shards import Stripe
from kvflow.planning.certificate import Certificate, Missing
from kvflow.planning.match import ComponentPair
from kvflow.planning.runs import Int64s, Run, RunTable, group_by_shape

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
