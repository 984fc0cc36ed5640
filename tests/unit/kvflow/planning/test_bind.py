"""Rows and indices as NIXL takes them, for cases small enough to write down."""

import tracemalloc

import numpy as np
import pytest
from msgspec.structs import replace

from kvflow.errors import CapacityExceeded, LayoutMismatch
from kvflow.layout.component import Region
from kvflow.planning.bind import DESCRIPTORS_MAX, ROWS_MAX, Rows
from kvflow.planning.plan import plan_transfer
from kvflow.planning.runs import Units
from tests.helpers.loops import looped

from .helpers import binding_of, full, manifest_of, unit_pairs

NO_LIMIT = {"chunk_bytes": 1 << 40, "chunk_descriptors": 1 << 30}


def bound(source, target, pairs, **budgets):
    source, target = manifest_of({"a": full(**source)}), manifest_of({"a": full(**target)})
    binding = binding_of(plan_transfer(source, target), source, target)
    return binding, binding.bind(unit_pairs(*pairs), **NO_LIMIT | budgets)


def test_equal_blocks_are_one_row_and_neighbors_merge():
    binding, batch = bound({}, {}, ([0, 1, 3], [1, 2, 0]))
    page = 2 * 16 * 2 * 8 * 2
    assert binding.source.table.tolist() == [[0, page, 0, page, 4]]
    assert batch.source_index.tolist() == [0, 1, 3]
    assert batch.target_index.tolist() == [1, 2, 0]
    assert binding.count_merged(unit_pairs([0, 1, 3], [1, 2, 0])) == 2
    assert (batch.nbytes, batch.cuts.tolist()) == (3 * page, [0, 3])
    assert batch.source_index.dtype == batch.target_index.dtype == np.int32


def test_tokens_before_heads_let_units_share_a_row():
    """With NHD a unit of 16 tokens is dense, so that four of them fill a block of 64 as one descriptor."""
    source = manifest_of({"a": full(16)}, layout="BLNHC")
    target = manifest_of({"a": full(64)}, layout="BLNHC")
    binding = binding_of(plan_transfer(source, target), source, target)
    assert (len(binding.source.table), len(binding.target.table)) == (1, 1)
    assert binding.count_merged(unit_pairs([0, 1, 2, 3], [4, 5, 6, 7])) == 1


def test_heads_before_tokens_give_each_unit_a_row():
    """With HND the units of a block lie apart, head by head: unit u of block b is number ``u * num_blocks + b``."""
    binding, batch = bound({"block_size": 16}, {"block_size": 32}, ([0, 1, 2], [6, 7, 1]))
    assert (len(binding.source.table), len(binding.target.table)) == (2, 4)
    assert binding.target.table[:, 4].tolist() == [4, 4, 4, 4]
    assert batch.target_index.tolist() == [3, 7, 4, 11, 15, 12]
    assert batch.source_index.tolist() == [0, 1, 2, 4, 5, 6]


def test_a_region_gives_address_memory_and_device():
    source = manifest_of({"a": full()})
    plan = plan_transfer(source, source)
    binding = binding_of(plan, source, source)
    moved = Rows(
        plan.groups[0].runs.source,
        plan.groups[0].runs.nbytes,
        units=Units(16, 1, 1),
        num_blocks=4,
        regions=[Region(5000, 1 << 20, "VRAM", 3)],
    )
    assert moved.memory == "VRAM"
    assert (moved.table - binding.source.table).tolist() == [[5000, 0, 3, 0, 0]]


@looped(
    "budgets, cuts",
    [
        ({"chunk_bytes": 2048}, [0, 2, 4, 5]),
        ({"chunk_bytes": 2047}, [0, 1, 2, 3, 4, 5]),
        ({"chunk_bytes": 1}, [0, 1, 2, 3, 4, 5]),  # larger than any chunk: alone
        ({"chunk_descriptors": 1}, [0, 2, 3, 5]),
        ({"chunk_descriptors": 2}, [0, 3, 5]),
        ({"chunk_descriptors": 3}, [0, 5]),
        ({"chunk_bytes": 3 * 1024, "chunk_descriptors": 2}, [0, 3, 5]),
        ({"chunk_bytes": 4 * 1024, "chunk_descriptors": 1}, [0, 2, 3, 5]),
    ],
)
def test_cuts(budgets, cuts):
    """Five pages of 1024 bytes: two neighbors, one alone, two neighbors."""
    specs = {"a": full()}
    cache = manifest_of(specs, num_blocks=10)
    binding = binding_of(plan_transfer(cache, cache), cache, cache)
    pairs = unit_pairs([0, 1, 3, 5, 6], [0, 1, 7, 3, 4])
    assert binding.bind(pairs, **NO_LIMIT | budgets).cuts.tolist() == cuts
    assert binding.count_merged(pairs) == 3  # whatever the cuts


def rows(*, num_runs, units, num_blocks, linear):
    stride = np.full(num_runs, 64, np.int64)
    block_stride = stride * units if linear else stride
    none = np.zeros(num_runs)
    side = np.array([none, np.arange(num_runs) * 64, block_stride, none, stride], np.int64)
    return Rows(
        side,
        np.full(num_runs, 64),
        units=Units(1, units, 1),
        num_blocks=num_blocks,
        regions=[Region(0, 1 << 40)],
    )


def test_lists_longer_than_int32_can_number_are_refused():
    with pytest.raises(CapacityExceeded, match="descriptors in one prepared list"):
        rows(num_runs=2, units=1, num_blocks=DESCRIPTORS_MAX // 2 + 1, linear=True)
    assert rows(num_runs=1, units=1, num_blocks=DESCRIPTORS_MAX, linear=True).per_run == DESCRIPTORS_MAX


def test_blocks_of_a_million_units_are_refused_before_they_cost_memory():
    with pytest.raises(CapacityExceeded, match="rows in one prepared list"):
        rows(num_runs=2, units=ROWS_MAX // 2 + 1, num_blocks=1, linear=False)
    assert len(rows(num_runs=2, units=ROWS_MAX // 2 + 1, num_blocks=1, linear=True).table) == 2


def test_a_row_that_all_units_share_costs_nothing_for_each_of_them():
    tracemalloc.start()
    try:
        rows(num_runs=8, units=1 << 18, num_blocks=1, linear=True)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20  # a number per unit and run would take 16 MiB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (["DRAM", "VRAM"], ["DRAM", "DRAM"]),
        (["DRAM", "DRAM"], ["VRAM", "DRAM"]),
        (["VRAM", "DRAM"], ["DRAM", "VRAM"]),
    ],
)
def test_a_group_in_memory_of_two_kinds_is_refused(source, target):
    """One prepared list has one kind: the first region's would have been taken for all."""
    sides = [apart(kinds) for kinds in (source, target)]
    plan = plan_transfer(*sides)
    with pytest.raises(LayoutMismatch, match="memory of source group 0 and target group 0") as caught:
        binding_of(plan, *sides)
    assert (caught.value.source, caught.value.target) == (sorted({*source}), sorted({*target}))


@pytest.mark.parametrize(("source", "target"), [("DRAM", "VRAM"), ("VRAM", "VRAM"), ("VRAM", "DRAM")])
def test_each_side_may_have_memory_of_its_own_kind(source, target):
    sides = [apart([kind] * 2) for kind in (source, target)]
    binding = binding_of(plan_transfer(*sides), *sides)
    assert (binding.source.memory, binding.target.memory) == (source, target)


def apart(kinds):
    """Two layers of one group, each in a region of its own."""
    layers = [manifest_of({name: full()}) for name in "ab"]
    parts = [
        replace(layer, components=tuple(replace(part, region=index) for part in layer.components))
        for index, each in enumerate(layers)
        for layer in each.groups[0].layers
    ]
    regions = [
        replace(each.regions[0], address=(index + 1) << 40, memory=kind)
        for index, (each, kind) in enumerate(zip(layers, kinds, strict=True))
    ]
    return replace(layers[0], regions=tuple(regions), groups=(replace(layers[0].groups[0], layers=tuple(parts)),))
