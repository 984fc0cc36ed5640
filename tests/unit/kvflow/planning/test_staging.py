"""Direct or staged: which is chosen, what is said of it, and what a staged plan posts."""

import tracemalloc

import numpy as np
import pytest
from msgspec.structs import replace

from kvflow.errors import PlanUnsound
from kvflow.layout.component import Region
from kvflow.planning.bind import StagedBinding, bind_plan
from kvflow.planning.plan import plan_transfer
from kvflow.planning.staging import STAGING_BUFFERS, buffer_bytes_of
from tests.fakes.staging import Costs, PlansAt, plan_at
from tests.helpers.loops import looped

from .helpers import full, manifest_of, unit_pairs

HEADS, SIZE, LAYERS = 8, 128, ("a", "b", "c", "d")
SPECS = {name: full(num_kv_heads=HEADS, head_size=SIZE) for name in LAYERS}
PAGE = 16 * HEADS * SIZE * 2
UNIT = 2 * len(LAYERS) * PAGE
"""Bytes of a source unit: keys and values."""

DEAR = Costs(post_s=0.0, descriptor_s=4e-6, read_byte_s=1e-10, copied_byte_s=1e-10, launch_s=4e-6)
STAGING_BYTES = STAGING_BUFFERS * 4 * UNIT


def token_major(tp=(0, 1), **how):
    return manifest_of(SPECS, **{"layout": "LBNHC", "kv": "split", "tp": tp, "num_blocks": 16, **how})


SOURCE, HALF = token_major(), token_major((1, 2))


def planned(source=SOURCE, target=HALF, costs=DEAR, staging_bytes=STAGING_BYTES, **how):
    return plan_at(source, target, costs=costs, staging_bytes=staging_bytes, **how)


def test_head_slices_of_token_major_pages_are_staged():
    plan, direct = planned(), plan_transfer(SOURCE, HALF)
    (group,) = plan.groups
    assert direct.groups[0].staged is None
    assert len(group.runs) == len(direct.groups[0].runs) == 2 * len(LAYERS) * 16
    assert (len(group.staged.fetch), len(group.staged.copies), group.staged.places) == (2 * len(LAYERS), 1, 4)
    assert group.staged.place_bytes == UNIT
    assert plan.certificate == direct.certificate
    assert (direct.descriptors(16), plan.descriptors(16)) == (2048, 128)
    assert plan.descriptors(16, consecutive=True) == 8


def test_without_staging_memory_a_plan_does_not_compare():
    plan = planned(staging_bytes=0)
    assert plan.groups[0].staged is None
    assert "staged" not in plan.explain()


@looped(
    "layers, heads, target, is_staged",
    [
        # Half of the heads of token-major pages: pieces of 256 B, 512 B, 1 KiB, 2 KiB and 4 KiB.
        (32, 2, {"layout": "LBNHC", "tp": (0, 2)}, True),
        (32, 4, {"layout": "LBNHC", "tp": (0, 2)}, True),
        (32, 8, {"layout": "LBNHC", "tp": (0, 2)}, True),
        (32, 16, {"layout": "LBNHC", "tp": (0, 2)}, False),
        (32, 32, {"layout": "LBNHC", "tp": (0, 2)}, False),
        # A quarter and an eighth of them: most of what is read is not copied.
        (32, 4, {"layout": "LBNHC", "tp": (0, 4)}, True),
        (32, 8, {"layout": "LBNHC", "tp": (0, 8)}, True),
        (32, 32, {"layout": "LBNHC", "tp": (0, 8)}, False),
        # All heads, turned into rows with heads outside of tokens.
        (1, 2, {"layout": "BLHNC"}, False),
        (2, 2, {"layout": "BLHNC"}, True),
        (32, 8, {"layout": "BLHNC"}, True),
        # All heads, and pages that stay whole.
        (32, 8, {"layout": "LBNHC"}, False),
        (32, 8, {"layout": "BLNHC"}, False),
    ],
)
def test_a_worker_stages_small_pieces_and_reads_large_ones_directly(layers, heads, target, is_staged):
    specs = {f"layers.{index}": full(num_kv_heads=heads, head_size=128) for index in range(layers)}
    source, target = (manifest_of(specs, kv="split", **how) for how in ({"layout": "LBNHC"}, target))
    plan = plan_transfer(source, target, staging_bytes=64 << 20)
    assert (plan.groups[0].staged is not None) == is_staged, plan.explain()


def test_small_pieces_in_memory_of_devices_are_read_directly():
    specs = {f"layers.{index}": full(num_kv_heads=2, head_size=128) for index in range(32)}
    source, target = (manifest_of(specs, layout="LBNHC", kv="split", tp=tp) for tp in ((0, 1), (0, 2)))
    source = replace(source, regions=tuple(replace(each, memory="VRAM") for each in source.regions))
    explained = plan_transfer(source, target, staging_bytes=64 << 20).explain()
    assert "not staged, because the source is VRAM" in explained


CHEAP, EVEN = replace(DEAR, descriptor_s=1e-9), replace(DEAR, descriptor_s=2e-7)


@looped(
    "how, words",
    [
        ({}, "direct takes 128 descriptors and about 525 us, staged 8 descriptors, 1 copy and about 75 us; staged"),
        ({}, "staged, because it is 7.0 times cheaper"),
        ({"costs": CHEAP}, "and about 13 us; direct, because staging is not cheaper"),
        ({"costs": EVEN}, "1 copy and about 45 us; direct, because staging is not cheaper"),
        ({"staging_bytes": STAGING_BYTES // 4 - 1}, "because a unit of 262,144 bytes does not fit a staging buffer of"),
        ({"target": SOURCE}, "direct, because staging is not cheaper"),
        (
            {"target": replace(HALF, regions=(Region(0, 1 << 30, "VRAM"),))},
            "not staged, because the target is VRAM",
        ),
        (
            {"source": replace(SOURCE, regions=(Region(0, 1 << 30, "VRAM"),))},
            "not staged, because the source is VRAM",
        ),
    ],
)
def test_a_plan_says_both_costs_and_why_one_was_chosen(how, words):
    assert words in planned(**how).explain()


def test_among_equals_direct_is_chosen():
    free = Costs(post_s=0.0, descriptor_s=0.0, read_byte_s=0.0, copied_byte_s=0.0, launch_s=0.0)
    assert planned(costs=free).groups[0].staged is None


def test_a_unit_that_takes_very_many_copies_is_read_directly(monkeypatch):
    monkeypatch.setattr("kvflow.planning.staging.COPIES_MAX", 0)
    assert "not staged, because a unit takes 1 copies (limit 0)" in planned().explain()


@pytest.mark.parametrize("distance", [0, 2 * SIZE], ids=["the same bytes", "some bytes"])
def test_components_that_share_bytes_on_the_source_are_read_directly(distance):
    group = SOURCE.groups[0]
    first, *others = group.layers
    keys, values = first.components
    first = replace(first, components=(keys, replace(values, offset=keys.offset + distance)))
    shared = replace(SOURCE, groups=(replace(group, layers=(first, *others)),))
    assert "not staged, because components share bytes on the source" in planned(shared).explain()
    assert planned(shared).certificate.complete


def test_a_unit_with_very_many_pieces_is_read_directly():
    """One post fetches a unit, and must not keep others waiting."""
    specs = {f"layers.{index}": full(num_kv_heads=4) for index in range(300)}
    source, target = (manifest_of(specs, layout="LBNHC", kv="split", tp=tp) for tp in ((0, 1), (0, 2)))
    assert "not staged, because the source's unit has 600 pieces, more than 512" in planned(source, target).explain()


def test_components_that_lie_in_pieces_of_unlike_sizes_are_read_directly():
    """Head 0 of the keys touches the values on the source, head 1 touches nothing: no stride leads through a place."""
    (layer, *_), group = SOURCE.groups[0].layers, SOURCE.groups[0]
    keys, values = layer.components
    keys = replace(keys, extents=(2, 1, SIZE), strides=(8192, 4096, 2), total=2)
    values = replace(values, extents=(1, 1, SIZE), strides=(4096, 4096, 2), total=1, shard_axis=-1)

    def manifest(values_offset):
        parts = (keys, replace(values, offset=keys.offset + values_offset))
        return replace(SOURCE, groups=(replace(group, block_size=1, layers=(replace(layer, components=parts),)),))

    assert "lies in pieces of unlike sizes" in planned(manifest(2 * SIZE), manifest(4096)).explain()


def test_a_source_of_absurd_extents_costs_no_memory_to_refuse():
    """Valid, and all that it costs a hostile peer is a message: a direct plan never looks at heads that we lack."""
    group = HALF.groups[0]
    layer = group.layers[0]

    def with_heads(count, stride, token=SIZE * 2, apart=16 * SIZE * 2):
        parts = tuple(
            replace(part, extents=(count, 16, SIZE), strides=(stride, token, 2), total=1 << 40)
            for part in layer.components
        )
        parts = tuple(replace(part, offset=index * apart, block_stride=1 << 60) for index, part in enumerate(parts))
        regions = (Region(0, 1 << 62),)
        return replace(
            HALF, num_blocks=1, regions=regions, groups=(replace(group, layers=(replace(layer, components=parts),)),)
        )

    tracemalloc.start()
    try:
        for count, words in ((1 << 36, "does not fit a staging buffer"), (1 << 15, "fragments, more than")):
            source = with_heads(count, 16 * SIZE * 2 * 8)
            target = with_heads(1, 16 * SIZE * 2 * 3, token=SIZE * 4, apart=SIZE * 2)  # keys beside values
            assert words in planned(source, target, staging_bytes=1 << 40).explain()
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_buffer_has_a_bounded_number_of_places():
    tiny = {"a": full(block_size=2, num_kv_heads=2, head_size=2)}
    source, target = (manifest_of(tiny, layout="LBNHC", kv="split", tp=tp) for tp in ((0, 1), (0, 2)))
    dear = replace(DEAR, launch_s=0.0, descriptor_s=1.0)
    (group,) = planned(source, target, costs=dear, staging_bytes=1 << 40).groups
    assert group.staged.places == 4096


@looped("staging_bytes", [0, 1, 8 * 4096 - 1, 8 * 4096, 8 * 4096 + 1, 1 << 30])
def test_buffers_are_whole_pages_and_no_more_than_was_given(staging_bytes):
    nbytes = buffer_bytes_of(staging_bytes)
    assert nbytes % 4096 == 0
    assert staging_bytes - STAGING_BUFFERS * 4096 < nbytes * STAGING_BUFFERS <= staging_bytes


@looped(
    "pairs, chunk_descriptors, cuts, merged",
    [
        (range(6), 256, [0, 4, 6], 8),
        (range(0, 12, 2), 256, [0, 4, 6], 48),
        (range(0, 12, 2), 17, [0, 2, 4, 6], 48),
        (range(0, 12, 2), 7, [0, 1, 2, 3, 4, 5, 6], 48),
        # 0 to 2 merge into 8 descriptors, 4 and 5 into 8 more
        ([0, 1, 2, 4, 5, 8], 16, [0, 4, 6], 24),
        ([0, 1, 2, 4, 5, 8], 15, [0, 3, 5, 6], 24),
    ],
)
def test_a_chunk_is_as_many_units_as_fit_a_buffer_and_the_budget(pairs, chunk_descriptors, cuts, merged):
    (binding,) = bind_plan(planned(), SOURCE, HALF)
    assert isinstance(binding, StagedBinding)
    pairs = unit_pairs(list(pairs), list(reversed(range(len(pairs)))))
    bound = binding.bind(pairs, chunk_bytes=8 << 20, chunk_descriptors=chunk_descriptors)
    assert bound.cuts.tolist() == cuts
    assert bound.source_index.tolist() == list(pairs.source)
    assert bound.target_index.tolist() == list(pairs.target)
    assert bound.source_index.dtype == bound.target_index.dtype == np.int32
    assert bound.nbytes == len(pairs.source) * UNIT // 2
    assert binding.count_merged(pairs) == merged
    assert binding.read_bytes == 2 * binding.unit_bytes == UNIT


def test_a_chunk_reads_no_more_bytes_than_it_may():
    (binding,) = bind_plan(planned(), SOURCE, HALF)
    pairs = unit_pairs([0, 1, 2], [0, 1, 2])
    assert binding.bind(pairs, chunk_bytes=UNIT, chunk_descriptors=256).cuts.tolist() == [0, 1, 2, 3]
    assert binding.bind(pairs, chunk_bytes=1, chunk_descriptors=256).cuts.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("staging_bytes", [0, STAGING_BYTES])
def test_a_plan_binds_to_no_other_caches(staging_bytes):
    plan = planned(staging_bytes=staging_bytes)
    assert len(bind_plan(plan, SOURCE, HALF)) == 1
    moved = replace(HALF, regions=(replace(HALF.regions[0], address=1 << 20),))
    assert len(bind_plan(plan, SOURCE, moved)) == 1, "addresses are no part of a plan"
    for source, target in ((SOURCE, token_major((0, 2))), (token_major(num_blocks=17), HALF), (HALF, SOURCE)):
        with pytest.raises(PlanUnsound, match="for other caches"):
            bind_plan(plan, source, target)


@pytest.mark.parametrize("staging_bytes", [0, STAGING_BYTES])
@pytest.mark.parametrize("side", [0, 1])
def test_rows_that_leave_the_regions_that_a_side_claims_are_not_bound(side, staging_bytes):
    sides = [SOURCE, HALF]
    region = sides[side].regions[0]
    sides[side] = replace(sides[side], regions=(replace(region, nbytes=region.nbytes - 1),))
    with pytest.raises(PlanUnsound, match="leaves its region"):
        bind_plan(planned(staging_bytes=staging_bytes), *sides)


def test_a_plan_whose_runs_were_changed_is_not_bound():
    plan = planned()
    other = plan_transfer(SOURCE, SOURCE).groups
    with pytest.raises(PlanUnsound, match="not the ones that were proven"):
        bind_plan(replace(plan, groups=other), SOURCE, HALF)


def test_plans_are_kept_for_the_terms_that_they_were_made_on():
    plans = PlansAt(DEAR)
    direct = plans.plan(SOURCE, HALF)
    staged = plans.plan(SOURCE, HALF, staging_bytes=STAGING_BYTES)
    assert direct.groups[0].staged is None
    assert staged.groups[0].staged is not None
    assert plans.plan(SOURCE, HALF) is direct
    assert plans.plan(SOURCE, HALF, staging_bytes=STAGING_BYTES) is staged
