"""What a certificate says, and each way in which a plan can be unsound. Properties test many more."""

import numpy as np
import pytest

from kvflow.errors import PlanUnsound
from kvflow.layout.specs import Mamba, State
from kvflow.planning import certificate
from kvflow.planning.certificate import Missing, PlannedGroup, certify
from kvflow.planning.match import match_groups
from kvflow.planning.plan import plan_transfer
from kvflow.planning.runs import RunTable, Units, cut_fragments, group_by_shape
from tests.helpers.loops import looped

from .helpers import full, manifest_of, sliding

SPECS = {"a": full(num_kv_heads=4)}
CACHE = manifest_of({"a": full(num_kv_heads=4, kernel_block_size=8)})
(PAIR,) = match_groups(CACHE, CACHE)
CUT = Units(tokens=4, per_kernel_block=2, kernel_blocks=2)
"""Blocks of 16 tokens, cut so that every stride is in use."""


def runs_of():
    tables = [cut_fragments([part], CUT, CUT) for part in PAIR.pairs]
    return RunTable(
        *(
            np.concatenate([getattr(table, name) for table in tables], axis=-1)
            for name in ("nbytes", "source", "target")
        )
    )


def test_a_complete_plan_writes_the_page():
    proven = certify(CACHE, [PlannedGroup(PAIR, runs_of(), CUT, CUT)])
    assert proven.written_bytes == proven.page_bytes == 2 * 16 * 4 * 8 * 2
    assert proven.complete


def test_the_slices_of_states_that_a_rank_lacks_are_named():
    states = (
        State("conv_x", (6, 3), "float16"),
        State("conv_B", (5, 3), "float16", shard_axis=None),  # whole on every rank
        State("conv_C", (3, 8), "bfloat16", shard_axis=1),
        State("ssm", (4, 3, 2), "float32"),
    )
    specs = {"m": Mamba(block_size=16, states=states)}
    assert plan_transfer(manifest_of(specs, tp=(1, 2)), manifest_of(specs)).certificate.missing == (
        Missing("m", "conv_x", 0, 3, "slices"),
        Missing("m", "conv_C", 0, 4, "slices"),
        Missing("m", "ssm", 0, 2, "slices"),
    )


@pytest.mark.parametrize("proven_at_once", [1, 100, 1 << 18])
def test_of_many_layers_of_one_shape_the_wrong_one_is_named(monkeypatch, proven_at_once):
    """They are checked together, or some at a time."""
    monkeypatch.setattr(certificate, "PROVEN_AT_ONCE", proven_at_once)
    cache = manifest_of({name: full(num_kv_heads=4) for name in ("a", "b", "c")}, layout="LBNHC", kv="split")
    (pair,) = match_groups(cache, cache)
    assert [len(pairs) for pairs in group_by_shape(pair.pairs)] == [6]
    whole = Units(tokens=16, per_kernel_block=1, kernel_blocks=1)
    runs = cut_fragments(pair.pairs, whole, whole)
    assert certify(cache, [PlannedGroup(pair, runs, whole, whole)]).complete
    (of_v,) = np.flatnonzero(runs.target[1] == pair.pairs[3].target.offset)
    runs.source[1, of_v] += 1
    with pytest.raises(PlanUnsound, match=r"b\.v: a byte is read from elsewhere"):
        certify(cache, [PlannedGroup(pair, runs, whole, whole)])


@looped(
    "side, row, words",
    [
        ("source", 0, "read from elsewhere"),
        ("source", 1, "read from elsewhere"),
        ("source", 2, "block strides differ"),
        ("source", 3, "kernel block strides differ"),
        ("source", 4, "unit strides differ"),
        ("target", 2, "block strides differ"),
        ("target", 3, "write the same byte"),
        ("target", 4, "write the same byte"),
    ],
)
def test_a_wrong_number_says_what_it_would_do(side, row, words):
    runs = runs_of()
    getattr(runs, side)[row, 5] += 1
    with pytest.raises(PlanUnsound, match=words):
        certify(CACHE, [PlannedGroup(PAIR, runs, CUT, CUT)])


@pytest.mark.parametrize(("at", "to", "words"), [(5, 4, "write the same byte"), (0, 1 << 20, "not written")])
def test_a_moved_target_leaves_a_hole_or_an_overlap(at, to, words):
    runs = runs_of()
    runs.target[1, at] = runs.target[1, to] if to < len(runs) else to
    with pytest.raises(PlanUnsound, match=words):
        certify(CACHE, [PlannedGroup(PAIR, runs, CUT, CUT)])


@pytest.mark.parametrize("row", [3, 4])
def test_strides_that_lead_away_from_the_page_leave_a_hole(row):
    runs = runs_of()
    runs.target[row] += 1 << 20
    with pytest.raises(PlanUnsound, match="not written"):
        certify(CACHE, [PlannedGroup(PAIR, runs, CUT, CUT)])


def test_a_run_beside_the_components_is_found():
    runs = runs_of()
    extra = np.append(np.arange(len(runs)), 0)
    wider = RunTable(runs.nbytes[extra], runs.source[:, extra], runs.target[:, extra])
    wider.target[1, -1] = 1 << 20
    with pytest.raises(PlanUnsound, match="runs write"):
        certify(CACHE, [PlannedGroup(PAIR, wider, CUT, CUT)])


def test_a_run_without_bytes_is_refused():
    runs = runs_of()
    runs.nbytes[3] = 0
    with pytest.raises(PlanUnsound, match="no bytes"):
        certify(CACHE, [PlannedGroup(PAIR, runs, CUT, CUT)])


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (Units(4, 2, 1), CUT, "source blocks of 16 tokens are cut into 1 times 2 units of 4"),
        (CUT, Units(4, 4, 1), "target blocks of 16 tokens are cut into 1 times 4 units of 4"),
        (CUT, Units(8, 1, 2), "units of 4"),
        (Units(0, 1, 1), Units(0, 1, 1), "units of 0"),
    ],
)
def test_blocks_that_units_do_not_fill_are_named(source, target, words):
    with pytest.raises(PlanUnsound, match=words):
        certify(CACHE, [PlannedGroup(PAIR, runs_of(), source, target)])


def test_no_plan_at_all_leaves_everything_missing():
    proven = certify(CACHE, [])
    assert proven.written_bytes == 0
    assert proven.missing == (Missing("a", "k", 0, 4), Missing("a", "v", 0, 4))


@pytest.mark.parametrize(
    ("source", "target", "missing"),
    [
        ((0, 1), (1, 2), ()),
        ((0, 2), (0, 1), (Missing("a", "k", 2, 2), Missing("a", "v", 2, 2))),
        (
            (1, 3),
            (0, 1),
            (Missing("a", "k", 0, 2), Missing("a", "k", 3, 1), Missing("a", "v", 0, 2), Missing("a", "v", 3, 1)),
        ),
        ((1, 2), (0, 2), (Missing("a", "k", 0, 2), Missing("a", "v", 0, 2))),
    ],
)
def test_heads_that_the_source_lacks_are_named(source, target, missing):
    proven = plan_transfer(manifest_of(SPECS, tp=source), manifest_of(SPECS, tp=target)).certificate
    assert proven.missing == missing
    assert proven.complete == (not missing)


def test_layers_that_the_source_lacks_are_named():
    specs = {"a": full(), "b": full(), "s": sliding()}
    stage = {"b": full()}
    proven = plan_transfer(manifest_of(stage), manifest_of(specs)).certificate
    assert {(gap.layer, gap.role, gap.count) for gap in proven.missing} == {
        (layer, role, 2) for layer in ("a", "s") for role in ("k", "v")
    }
    assert proven.written_bytes * 3 == proven.page_bytes
    assert plan_transfer(manifest_of(specs), manifest_of(stage)).certificate.complete
