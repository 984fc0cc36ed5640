"""Staged plans: the same bytes as the oracle's, whatever the engines; and a defect in either half is caught."""

import random
from collections import Counter
from itertools import cycle

import numpy as np
import pytest
from hypothesis import given
from msgspec.structs import replace

from kvflow.errors import LayoutMismatch, PlanUnsound
from kvflow.planning.certificate import PlannedGroup, certify
from kvflow.planning.staging import prove
from tests.fakes.staging import plan_at

from .caches import thoroughly
from .engines import generate_case
from .moves import require_right_bytes
from .pools import open_cache
from .staged import TERMS
from .test_byte_copy import cases
from .test_certificate import KINDS, Planned

DEFECTS = 1000


@thoroughly(60)
@given(cases())
def test_staged_or_direct_every_wanted_byte_arrives_once_and_no_other(case):
    require_right_bytes(case, **TERMS)


def test_many_generated_plans_are_staged_and_some_are_not():
    """Otherwise the property above shows nothing of either."""
    choose, staged = random.Random(0), Counter()
    for seed in range(60):
        for plan in require_right_bytes(generate_case(choose.choice, seed), **TERMS):
            staged.update(group.staged is not None for group in plan.groups)
    assert staged[True] > 50, staged
    assert staged[False] > 10, staged


@pytest.fixture(scope="module")
def staged_groups():
    """(target manifest, group plan) of generated engines, all of them staged."""
    choose, found = random.Random(1), []
    for seed in range(80):
        case = generate_case(choose.choice, seed)
        rng = np.random.default_rng(seed)
        source, *_ = (open_cache(stage, rank, 3, rng)[0].manifest() for stage, rank in case.sources)
        for stage, rank in case.targets:
            target = open_cache(stage, rank, 3, rng)[0].manifest()
            try:
                plan = plan_at(source, target, **TERMS)
            except LayoutMismatch:  # another stage, with nothing in common
                continue
            found += [(target, group) for group in plan.groups if group.staged is not None]
    assert len(found) > 30
    return found


@pytest.mark.parametrize("half", ["fetch", "scatter"])
def test_each_defect_in_either_half_of_a_staged_read_fails_its_proof(staged_groups, half):
    rng = np.random.default_rng(0)
    caught, missed = Counter(), []
    turns = cycle((name, entry) for entry in staged_groups for name in KINDS)
    while caught.total() + len(missed) < DEFECTS:
        name, (target, group) = next(turns)
        staged = group.staged
        table = getattr(staged, half)
        sides = (group.source, staged.units) if half == "fetch" else (staged.units, group.target)
        pair = staged.fetching if half == "fetch" else staged.landing
        plan = replace(group, runs=table, source=sides[0], target=sides[1])
        runs = KINDS[name](Planned(target, pair, plan), int(rng.integers(len(table))))
        if runs is None:
            continue
        try:
            if half == "fetch":
                prove(replace(staged, fetch=runs), group.source)
            else:
                certify(target, [PlannedGroup(pair, runs, *sides)])
        except PlanUnsound:
            caught[name] += 1
        else:
            missed.append(name)
    assert Counter(missed) == Counter()
    assert len(caught) > len(KINDS) // 2


def test_each_defect_in_the_boxes_is_caught(staged_groups):
    """They are what is carried out; the certificate knows only of the runs that they were folded from."""
    rng = np.random.default_rng(0)
    for _, group in staged_groups:
        boxes, scatter = group.staged.copies, group.staged.scatter
        boxes.prove(scatter)
        row, column = int(rng.integers(len(boxes))), int(rng.integers(7))
        for at, by in ((column, 1), (7, 1), (7, -1)):
            boxes.table[row, at] += by
            with pytest.raises(PlanUnsound):
                boxes.prove(scatter)
            boxes.table[row, at] -= by
        boxes.prove(scatter)
