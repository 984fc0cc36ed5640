"""The certificate catches a wrong plan: whatever is done to the runs, the proof fails.

What leaves the copy the same (swapping a run with itself, for example) is not a defect.
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import PlanUnsound
from kvflow.transfer.certificate import certify
from kvflow.transfer.match import match_groups
from kvflow.transfer.plan import plan_transfer
from kvflow.transfer.runs import RunTable, fragments

from .caches import models, sides, thorough

SIDE_ROWS = ("region", "offset", "block stride", "kernel stride", "unit stride")


@st.composite
def planned_pairs(draw):
    """Two manifests, and for each pair of groups what ``certify`` takes."""
    model = draw(models())
    source, target = (draw(sides(model, tp_sizes=(1,))).cache(3).manifest() for _ in range(2))
    groups = plan_transfer(source, target).groups
    pairs = match_groups(source, target)
    return target, [(pair, group.runs, group.source, group.target) for pair, group in zip(pairs, groups, strict=True)]


def rows_in_use(units):
    """Rows of a side that say where its units lie: a stride that nothing is reached by means nothing."""
    return [0, 1, 2, *([3] if units.kernel_blocks > 1 else []), *([4] if units.per_kernel_block > 1 else [])]


def mutations(runs, source_units, target_units, rng):
    """Yield a name and a table for every kind of defect, each at a random place."""
    for side, units in (("source", source_units), ("target", target_units)):
        for row in rows_in_use(units):
            name = SIDE_ROWS[row]
            columns = {"source": runs.source.copy(), "target": runs.target.copy()}
            columns[side][row, rng.integers(len(runs))] += rng.choice((-1, 1))
            yield f"{side} {name} shifted", RunTable(runs.nbytes, **columns)
    for by in (-1, 1):
        nbytes = runs.nbytes.copy()
        nbytes[rng.integers(len(runs))] += by
        yield f"length {by:+}", RunTable(nbytes, runs.source, runs.target)
    at = rng.integers(len(runs))
    yield "dropped", selected(runs, np.delete(np.arange(len(runs)), at))
    yield "duplicated", selected(runs, np.insert(np.arange(len(runs)), at, at))
    other = rng.integers(len(runs))
    if not np.array_equal(runs.source[:, at], runs.source[:, other]):
        swapped = runs.source.copy()
        swapped[:, [at, other]] = swapped[:, [other, at]]
        yield "sources swapped", RunTable(runs.nbytes, swapped, runs.target)
    half = int(runs.nbytes[at]) // 2
    if half:
        cut = selected(runs, np.insert(np.arange(len(runs)), at, at))
        cut.nbytes[at : at + 2] = half, runs.nbytes[at] - half
        cut.target[1, at + 1] += half
        cut.source[1, at] += cut.nbytes[at + 1]
        yield "halves exchanged", cut


def selected(runs, index):
    return RunTable(runs.nbytes[index], runs.source[:, index], runs.target[:, index])


def outcome_of(target, planned):
    try:
        certify(target, planned)
    except PlanUnsound:
        return "refused"
    return "certified"


@thorough
@given(planned_pairs(), st.integers(0, 2**32))
def test_a_wrong_run_fails_the_proof(case, seed):
    target, planned = case
    assert certify(target, planned).complete
    rng = np.random.default_rng(seed)
    at = int(rng.integers(len(planned)))
    pair, runs, *units = planned[at]
    for defect, wrong in mutations(runs, *units, rng):
        plan = [*planned[:at], (pair, wrong, *units), *planned[at + 1 :]]
        assert (defect, outcome_of(target, plan)) == (defect, "refused")


@thorough
@given(planned_pairs())
def test_merging_changes_no_byte(case):
    """Merged or not, a plan is proven: the proof stands on coordinates, not on how runs were cut."""
    target, planned = case
    finest = []
    for pair, _, *units in planned:
        tables = [fragments([part], *units) for part in pair.pairs]
        columns = zip(*((table.nbytes, table.source, table.target) for table in tables), strict=True)
        finest.append((pair, RunTable(*(np.concatenate(column, axis=-1) for column in columns)), *units))
    assert certify(target, finest) == certify(target, planned)
