"""The certificate catches a wrong plan: whatever is done to the runs, the proof fails.

What leaves the copy the same (swapping a run with itself, for example) is not a defect.
"""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import PlanUnsound
from kvflow.transfer.certificate import certify
from kvflow.transfer.match import match_groups
from kvflow.transfer.runs import RunTable, fragments, merged

from .caches import models, sides, thorough

SIDE_ROWS = ("region", "offset", "block stride", "unit stride")


@st.composite
def planned_pairs(draw):
    """Two manifests, and for each pair of groups what ``certify`` takes."""
    model = draw(models())
    source, target = (draw(sides(model, tp_sizes=(1,))).cache(3).manifest() for _ in range(2))
    planned = []
    for pair in match_groups(source, target):
        unit_tokens = math.gcd(pair.source_block_size, pair.target_block_size)
        planned.append((pair, merged([fragments(part, unit_tokens) for part in pair.pairs]), unit_tokens))
    return target, planned


def mutations(runs, rng):
    """Yield a name and a table for every kind of defect, each at a random place."""
    for row, name in enumerate(SIDE_ROWS):
        for side in ("source", "target"):
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
    pair, runs, unit_tokens = planned[at]
    for defect, wrong in mutations(runs, rng):
        plan = [*planned[:at], (pair, wrong, unit_tokens), *planned[at + 1 :]]
        assert (defect, outcome_of(target, plan)) == (defect, "refused")


@thorough
@given(planned_pairs())
def test_merging_changes_no_byte(case):
    """Merged or not, a plan is proven: the proof stands on coordinates, not on how runs were cut."""
    target, planned = case
    finest = []
    for pair, _, unit_tokens in planned:
        tables = [fragments(part, unit_tokens) for part in pair.pairs]
        columns = zip(*((table.nbytes, table.source, table.target) for table in tables), strict=True)
        finest.append((pair, RunTable(*(np.concatenate(column, axis=-1) for column in columns)), unit_tokens))
    assert certify(target, finest) == certify(target, planned)
