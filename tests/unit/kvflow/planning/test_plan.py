"""Plans: the descriptor counts that were published, what merges with what, and what is refused."""

import pytest

from kvflow.errors import CapacityExceeded, LayoutMismatch
from kvflow.layout.groups import Group
from kvflow.layout.specs import Mamba, Opaque, State
from kvflow.planning.pairs import pair_units
from kvflow.planning.plan import PlanCache, PlanLimits, plan_transfer
from tests.helpers.loops import looped

from .helpers import full, ids, manifest_of, sliding

LAYERS_28 = {f"layers.{index}": full(num_kv_heads=4, head_size=128, dtype="bfloat16") for index in range(28)}
LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC")


@pytest.mark.parametrize(("blocks", "per_layer", "packed"), [(1, 56, 1), (63, 3528, 63), (607, 33992, 607)])
def test_published_descriptor_counts(blocks, per_layer, packed):
    """28 layers, K and V in regions of their own, against one row per block."""
    split = manifest_of(LAYERS_28, num_blocks=607, layout="LBNHC", kv="split")
    content = manifest_of(LAYERS_28, num_blocks=607, layout="BLHNC", kv="content")
    assert plan_transfer(split, split).descriptors(blocks) == per_layer
    assert plan_transfer(content, content).descriptors(blocks) == packed
    assert plan_transfer(content, content).descriptors(blocks, consecutive=True) == 1
    assert plan_transfer(split, split).descriptors(blocks, consecutive=True) == 56


@looped("layout", LAYOUTS)
@looped("kv", ["content", "split"])
def test_equal_caches_merge_as_far_as_they_are_dense(layout, kv):
    specs = {name: full(num_kv_heads=4) for name in ("a", "b", "c")}
    cache = manifest_of(specs, layout=layout, kv=kv)
    (group,) = plan_transfer(cache, cache).groups
    packed = layout.startswith("B")
    assert len(group.runs) == (1 if packed else 3 if kv == "content" else 6)
    assert group.runs.unit_bytes == 3 * 2 * 16 * 4 * 8 * 2


def test_consecutive_blocks_do_not_merge_where_a_row_has_gaps():
    """The shorter of two overlaid groups does not fill the row of a block."""
    specs = {"a": full(), "b": full(), "s": sliding()}
    cache = manifest_of(specs, groups=(Group(("a", "b"), "full", 16), Group(("s",), "sliding", 16, 64)))
    plan = plan_transfer(cache, cache)
    assert [len(group.runs) for group in plan.groups] == [1, 1]
    assert plan.descriptors([3, 0], consecutive=True) == 1
    assert plan.descriptors([0, 3], consecutive=True) == 3
    assert "; 0 of 1 merge over consecutive blocks" in plan.explain()


KERNELS = {"kernel_block_size": 16}
STATES = (State("conv", (5, 3), "float16", shard_axis=None), State("ssm", (4, 3, 2), "float32"))  # 2 bytes lie between
OF_STATES = manifest_of({"m": Mamba(block_size=16, states=STATES)}, num_blocks=16)


def of_layers(block_size=16, layers=2, layout="BLHNC", **fields):
    """A cache of layers of full attention."""
    return manifest_of({f"a{at}": full(block_size, 4, **fields) for at in range(layers)}, num_blocks=16, layout=layout)


@looped(
    "source, target, runs, consecutive",
    [
        # Alone, kernel blocks are blocks of 16: whatever the block tables say, neighbors merge.
        (of_layers(64, layout="LBNHC", **KERNELS), of_layers(layout="LBNHC"), 2, 2),
        (of_layers(layout="LBNHC"), of_layers(64, layout="LBNHC", **KERNELS), 2, 2),
        # In rows another layer lies between one block's last kernel block and the next one's first.
        (of_layers(64, **KERNELS), of_layers(64, **KERNELS), 2, 24),
        (of_layers(64, 1, **KERNELS), of_layers(64, 1, **KERNELS), 1, 1),
        # Padding stands between blocks, or nothing does.
        (of_layers(page_bytes=4096), of_layers(), 2, 24),
        # States of one layer touch where no padding aligns them.
        (OF_STATES, OF_STATES, 2, 2),
    ],
)
def test_runs_merge_as_far_as_both_sides_are_dense(source, target, runs, consecutive):
    (group,) = (plan := plan_transfer(source, target)).groups
    blocks = 12 * 16 // (group.unit_tokens * group.target_units) if group.unit_tokens else 1
    assert len(group.runs) == runs
    assert plan.descriptors(blocks, consecutive=True) == consecutive


def test_descriptors_can_be_asked_per_group():
    specs = {"a": full(), "s": sliding()}
    cache = manifest_of(specs, layout="LBNHC", kv="split")
    plan = plan_transfer(cache, cache)
    assert plan.descriptors([3, 0]) == 3 * 2
    assert plan.descriptors([3, 5]) == 8 * 2
    assert plan.descriptors([0, 0], consecutive=True) == 0


@pytest.mark.parametrize(
    ("source", "target", "unit", "units"),
    [(16, 64, 16, (1, 4)), (48, 32, 16, (3, 2)), (7, 5, 1, (7, 5)), (16, 16, 16, (1, 1))],
)
def test_blocks_of_different_sizes_are_cut_into_common_units(source, target, unit, units):
    plan = plan_transfer(manifest_of({"a": full(source)}), manifest_of({"a": full(target)}))
    (group,) = plan.groups
    assert (group.unit_tokens, (group.source_units, group.target_units)) == (unit, units)
    assert plan.descriptors(2) == 2 * units[1] * len(group.runs)


def test_layouts_with_heads_and_tokens_swapped_copy_token_by_token():
    specs = {"a": full(num_kv_heads=4)}
    plan = plan_transfer(manifest_of(specs, layout="LBNHC"), manifest_of(specs, layout="LBHNC"))
    (group,) = plan.groups
    assert len(group.runs) == 4 * 16
    assert set(group.runs.nbytes.tolist()) == {2 * 8 * 2}


def test_a_plan_has_no_address():
    """Two caches of one geometry have one plan, wherever they lie."""
    one, other = (manifest_of({"a": full()}, kv="split") for _ in range(2))
    plans = PlanCache()
    assert plans.plan(one, one) is plans.plan(other, other)


def test_the_plan_cache_keeps_the_last_ones():
    caches = [manifest_of({"a": full()}, num_blocks=blocks) for blocks in (1, 2, 3)]
    plans = PlanCache(plans_max=2)
    first = plans.plan(caches[0], caches[0])
    second = plans.plan(caches[1], caches[1])
    assert plans.plan(caches[0], caches[0]) is first
    plans.plan(caches[2], caches[2])
    assert plans.plan(caches[0], caches[0]) is first
    assert plans.plan(caches[1], caches[1]) is not second


def test_a_mismatch_is_not_kept():
    plans = PlanCache()
    one, other = manifest_of({"a": full()}), manifest_of({"a": full(head_size=16)})
    for _ in range(2):
        with pytest.raises(LayoutMismatch):
            plans.plan(one, other)


@pytest.mark.parametrize(
    ("limits", "resource"),
    [
        (PlanLimits(fragments_max=2 * 2 * 16 - 1), "fragments in one plan"),
        (PlanLimits(runs_max=31), "runs in one plan"),
        (PlanLimits(bytes_max=2 * 2 * 16 * 8 * 2 - 1), "bytes in one block of a plan"),
    ],
)
def test_absurd_plans_are_refused(limits, resource):
    source, target = (manifest_of({"a": full()}, layout=layout) for layout in ("LBNHC", "LBHNC"))
    with pytest.raises(CapacityExceeded) as caught:
        plan_transfer(source, target, limits=limits)
    assert caught.value.resource == resource
    enough = PlanLimits(2 * 2 * 16, 32, bytes_max=2 * 2 * 16 * 8 * 2)
    assert len(plan_transfer(source, target, limits=enough).groups) == 1


def test_opaque_pages_move_whole_between_blocks_of_one_size_only():
    source = manifest_of({"a": Opaque(block_size=16, nbytes=24)}, layout="LBNHC")
    (group,) = plan_transfer(source, manifest_of({"a": Opaque(block_size=16, nbytes=24)})).groups
    pairs = pair_units(group, ids(3, 1, 2), ids(0, 2), num_tokens=40)
    assert (pairs.source, pairs.target) == ((1, 2), (0, 2))
    assert group.runs.nbytes.tolist() == [24]
    with pytest.raises(LayoutMismatch) as caught:
        plan_transfer(source, manifest_of({"a": Opaque(block_size=32, nbytes=24)}))
    assert (caught.value.field, caught.value.source, caught.value.target) == ("a.block_size", 16, 32)
