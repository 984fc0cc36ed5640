"""The certificate catches a wrong plan: whatever is done to the runs, the proof fails.

Ten thousand defects, each in one run of one plan, in turns. No defect leaves the copy as it was: a stride that no unit
is reached by is left alone, and runs are only exchanged with others that read elsewhere.
"""

import random
from collections import Counter
from dataclasses import dataclass
from itertools import cycle, product

import numpy as np
import pytest
from msgspec.structs import replace

from kvflow.errors import PlanUnsound
from kvflow.layout.manifest import Manifest
from kvflow.layout.shards import Shard
from kvflow.layout.specs import FullAttention
from kvflow.memory.cache import allocate
from kvflow.planning.assignment import assign_sources
from kvflow.planning.certificate import PlannedGroup, certify
from kvflow.planning.match import GroupPair, match_groups
from kvflow.planning.plan import GroupPlan, plan_transfer
from kvflow.planning.runs import RunTable, cut_fragments

from .engines import generate_case
from .pools import open_cache

CASES = 120
DEFECTS = 10_000
REGION, OFFSET, BLOCK, KERNEL, UNIT = range(5)


@dataclass(frozen=True)
class Planned:
    """One pair of groups of a plan."""

    target: Manifest
    pair: GroupPair
    plan: GroupPlan

    def certified(self, *, runs=None, source=None, target=None):
        """Certify the plan, or what a defect made of its runs or of how blocks are cut."""
        plan = self.plan
        runs = plan.runs if runs is None else runs  # a table without runs is false
        return certify(self.target, [PlannedGroup(self.pair, runs, source or plan.source, target or plan.target)])


@pytest.fixture(scope="module")
def plans():
    """Everything that generated engines take of each other, one entry per pair of groups."""
    return [planned for seed in range(CASES) for planned in planned_pairs(seed)]


def planned_pairs(seed):
    case = generate_case(random.Random(seed).choice, seed)
    rng = np.random.default_rng(seed)
    sources = [open_cache(stage, rank, 3, rng)[0].manifest() for stage, rank in case.sources]
    for stage, rank in case.targets:
        target = open_cache(stage, rank, 3, rng)[0].manifest()
        if case.whole:
            taken = [
                (sources[share.source], share.head_ranges)
                for share in assign_sources(target, sources, rotation=case.turn or 0)
            ]
        else:
            taken = [(sources[0], None)]
        for source, pieces in taken:
            groups = plan_transfer(source, target, head_ranges=pieces).groups
            for pair, plan in zip(match_groups(source, target, pieces), groups, strict=True):
                yield Planned(target, pair, plan)


def changed(runs, **columns):
    """Return a table of its own, with some columns replaced."""
    kept = {"nbytes": runs.nbytes.copy(), "source": runs.source.copy(), "target": runs.target.copy()}
    return RunTable(**kept | columns)


def selected(runs, index):
    return RunTable(runs.nbytes[index], runs.source[:, index], runs.target[:, index])


def shifted(side, row, by):
    """Change one number that says where a run lies on one side; ``by`` of None doubles it."""

    def defect(planned, at):
        units = getattr(planned.plan, side)
        if (row == KERNEL and units.kernel_blocks == 1) or (row == UNIT and units.per_kernel_block == 1):
            return None  # a stride that nothing is reached by
        runs = changed(planned.plan.runs)
        column = getattr(runs, side)
        column[row, at] += column[row, at] if by is None else by
        return runs

    return defect


def both_shifted(by):
    def defect(planned, at):
        runs = changed(planned.plan.runs)
        runs.source[OFFSET, at] += by
        runs.target[OFFSET, at] += by
        return runs

    return defect


def resized(by):
    def defect(planned, at):
        runs = changed(planned.plan.runs)
        runs.nbytes[at] += by
        return runs

    return defect


def grown_at_the_front(planned, at):
    runs = both_shifted(-1)(planned, at)
    runs.nbytes[at] += 1
    return runs


def dropped(planned, at):
    runs = planned.plan.runs
    return selected(runs, np.delete(np.arange(len(runs)), at))


def duplicated(planned, at):
    runs = planned.plan.runs
    return selected(runs, np.insert(np.arange(len(runs)), at, at))


def replaced_by_another(planned, at):
    """One run stands twice, and another one not at all."""
    other = another(planned, at)
    if other is None:
        return None
    index = np.arange(len(planned.plan.runs))
    index[at] = other
    return selected(planned.plan.runs, index)


def exchanged(side):
    def defect(planned, at):
        other = another(planned, at)
        if other is None:
            return None
        runs = changed(planned.plan.runs)
        column = getattr(runs, side)
        column[:, [at, other]] = column[:, [other, at]]
        return runs

    return defect


def another(planned, at):
    """A run that reads elsewhere; None if there is but one."""
    runs = planned.plan.runs
    other = (at + 1) % len(runs)
    return None if np.array_equal(runs.source[:, at], runs.source[:, other]) else other


def followed_by_nothing(planned, at):
    """A run of no bytes more: no byte is wrong, but no transport takes it."""
    runs = duplicated(planned, at)
    runs.nbytes[at + 1] = 0
    return runs


def halves_exchanged(planned, at):
    if planned.plan.runs.nbytes[at] < 2:
        return None
    runs = duplicated(planned, at)
    half = runs.nbytes[at] // 2
    runs.nbytes[at : at + 2] = half, runs.nbytes[at] - half
    runs.target[OFFSET, at + 1] += half
    runs.source[OFFSET, at] += runs.nbytes[at + 1]
    return runs


KINDS = {
    f"{side} {name} {how}": shifted(side, row, by)
    for side in ("source", "target")
    for name, row, how, by in (
        ("begins", OFFSET, "a byte later", 1),
        ("begins", OFFSET, "a byte earlier", -1),
        ("region", REGION, "is the next", 1),
        ("block stride", BLOCK, "is a byte longer", 1),
        ("block stride", BLOCK, "is a byte shorter", -1),
        ("block stride", BLOCK, "is doubled", None),
        ("kernel stride", KERNEL, "is a byte longer", 1),
        ("kernel stride", KERNEL, "is doubled", None),
        ("unit stride", UNIT, "is a byte shorter", -1),
        ("unit stride", UNIT, "is doubled", None),
    )
} | {
    "both sides begin a byte later": both_shifted(1),
    "both sides begin a byte earlier": both_shifted(-1),
    "a byte longer": resized(1),
    "a byte shorter": resized(-1),
    "a byte longer at the front": grown_at_the_front,
    "dropped": dropped,
    "duplicated": duplicated,
    "replaced by another": replaced_by_another,
    "sources exchanged": exchanged("source"),
    "targets exchanged": exchanged("target"),
    "halves exchanged": halves_exchanged,
    "followed by nothing": followed_by_nothing,
}


def test_each_of_ten_thousand_defects_fails_the_proof(plans):
    rng = np.random.default_rng(0)
    caught, missed = Counter(), []
    turns = cycle((name, planned) for planned in plans for name in KINDS)
    while caught.total() + len(missed) < DEFECTS:
        name, planned = next(turns)
        runs = KINDS[name](planned, int(rng.integers(len(planned.plan.runs))))
        if runs is None:
            continue
        try:
            planned.certified(runs=runs)
        except PlanUnsound:
            caught[name] += 1
        else:
            missed.append((name, planned))
    assert missed == []
    assert min(caught[name] for name in KINDS) > DEFECTS // 500, "some defect hardly ever applied"


def test_blocks_that_are_cut_otherwise_fail_the_proof(plans):
    """How block ids become numbers of units is part of the plan, too."""
    for planned in plans:
        for side, field, by in product(("source", "target"), ("tokens", "per_kernel_block", "kernel_blocks"), (-1, 1)):
            units = getattr(planned.plan, side)
            cut = replace(units, **{field: getattr(units, field) + by})
            with pytest.raises(PlanUnsound):
                planned.certified(**{side: cut})


def test_tokens_of_another_rank_fail_the_proof(plans):
    """And so is which tokens of a request a unit holds."""
    divided = 0
    for planned in plans:
        divided += not planned.plan.aligned
        for side, field, by in product(("source", "target"), ("rank", "size", "width"), (-1, 1)):
            units = getattr(planned.plan, side)
            stripe = replace(units.stripe, **{field: getattr(units.stripe, field) + by})
            with pytest.raises(PlanUnsound):
                planned.certified(**{side: replace(units, stripe=stripe)})
    assert divided > CASES // 10, "tokens are hardly ever divided"


def test_a_unit_that_lies_on_two_ranks_fails_the_proof():
    """One token lies on each rank in turn, so that no unit of four has a place on any."""
    shards = [Shard(dcp_rank=0, dcp_size=2, dcp_interleave=width) for width in (4, 1)]
    spec = FullAttention(block_size=4, num_kv_heads=1, head_size=8, dtype="bfloat16")
    target, finer, whole = (
        allocate({"a": spec}, num_blocks=2, shard=shard, device="meta").manifest() for shard in (*shards, None)
    )
    plan = plan_transfer(whole, target).groups[0]
    assert plan.unit_tokens == 4
    (pair,) = match_groups(whole, finer)
    cut = replace(plan.target, stripe=shards[1].stripe)
    with pytest.raises(PlanUnsound, match="are cut into units of 4"):
        certify(finer, [PlannedGroup(pair, plan.runs, plan.source, cut)])


def test_merging_changes_no_byte(plans):
    """Merged or not, a plan is proven: the proof stands on coordinates, not on how runs were cut."""
    for planned in plans:
        tables = [cut_fragments([part], planned.plan.source, planned.plan.target) for part in planned.pair.pairs]
        columns = zip(*((table.nbytes, table.source, table.target) for table in tables), strict=True)
        finest = RunTable(*(np.concatenate(column, axis=-1) for column in columns))
        assert planned.certified(runs=finest) == planned.certified()
