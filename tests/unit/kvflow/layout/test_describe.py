"""From specs to a plan of one backing allocation: who shares bytes, how much there is, and what cannot be."""

import msgspec
import numpy as np
import pytest

from kvflow.errors import SpecInvalid
from kvflow.layout.component import Region
from kvflow.layout.describe import fitted_specs, plan_cache
from kvflow.layout.groups import Group, plan_groups
from kvflow.layout.shards import Shard
from tests.helpers.loops import looped

from .helpers import full, mamba, model, sliding


def planned(specs, *, layout="BLHNC", kv="content", shard=None, **budget):
    return plan_cache(specs, plan_groups(specs), layout=layout, kv=kv, shard=shard or Shard(), **budget)


def offset_of(plan, name):
    """Where the first byte of a layer lies in block 0."""
    return min(part.offset for part in plan.layers[name].components)


def test_layers_of_different_groups_at_one_position_alias():
    specs = model(layers=4, full_every=2)
    plan = planned(specs, num_blocks=3)
    first, second = plan.groups
    assert [offset_of(plan, name) for name in first.layers] == [offset_of(plan, name) for name in second.layers]
    assert plan.bytes_per_block == 2 * 2048
    assert plan.nbytes == 3 * plan.bytes_per_block
    assert plan.manifest(Region(4096, plan.nbytes)).aliases == (0, 0)


def test_a_shorter_group_leaves_the_last_positions_to_the_others():
    specs = {"a": full(), "b": full(), "s": sliding()}
    groups = (Group(("a", "b"), "full", 16), Group(("s",), "sliding", 16, 64))
    plan = plan_cache(specs, groups, layout="BLHNC", kv="content", shard=Shard(), num_blocks=3)
    assert plan.bytes_per_block == 2 * 2048
    assert offset_of(plan, "s") == offset_of(plan, "a")


@pytest.mark.parametrize(("memory_bytes", "num_blocks"), [(4096, 1), (8191, 1), (8192, 2)])
def test_a_budget_is_filled_and_never_exceeded(memory_bytes, num_blocks):
    assert planned(model(layers=2, full_every=1), memory_bytes=memory_bytes).num_blocks == num_blocks


@looped(
    "budget, words",
    [
        ({}, "exactly one"),
        ({"num_blocks": 1, "memory_bytes": 1 << 20}, "exactly one"),
        ({"memory_bytes": 4095}, "one block needs 4096 bytes"),
        ({"num_blocks": 0}, "num_blocks is 0: expected at least 1"),
        ({"num_blocks": -1}, "num_blocks is -1: expected at least 1"),
        ({"num_blocks": 2.5}, "num_blocks is 2.5: expected an integer"),
        ({"memory_bytes": 1e6}, "memory_bytes is 1000000.0: expected an integer"),
    ],
)
def test_a_budget_that_holds_nothing_is_refused(budget, words):
    with pytest.raises(SpecInvalid, match=words):
        planned(model(layers=2, full_every=1), **budget)


@pytest.mark.parametrize("budget", [{"num_blocks": 3}, {"memory_bytes": 3 * 2048}])
def test_whole_numbers_of_numpy_make_the_plan_that_pythons_make(budget):
    specs = model(layers=1, full_every=1)
    options = {"shard": Shard(tp_size=1), "alignment": 64}
    plan = planned(specs, **budget, **options)
    given = {name: np.int64(value) for name, value in (budget | {"alignment": 64}).items()}
    numpys = planned(specs, shard=Shard(tp_size=np.int64(1)), **given)
    assert numpys == plan
    assert msgspec.msgpack.encode(numpys) == msgspec.msgpack.encode(plan), "a manifest must go over the wire"


@pytest.mark.parametrize(("alignment", "words"), [(0, "is 0: expected at least 1"), (2.0, "expected an integer")])
def test_an_alignment_that_is_none_is_refused(alignment, words):
    with pytest.raises(SpecInvalid, match=words):
        planned(model(layers=2, full_every=1), num_blocks=1, alignment=alignment)


@pytest.mark.parametrize(("layout", "bytes_per_block"), [("BLHNC", 1536), ("LBNHC", 2048)])
def test_a_shard_that_makes_pages_unequal_gets_room_for_the_largest(layout, bytes_per_block):
    """Two heads of 8 and one of 16 fill equal pages, but rank 0 of 2 holds half of one and all of the other.

    A row is as long as the longest group's pages; a tensor that groups share takes the largest page at its position.
    """
    small, large = {"num_kv_heads": 2, "head_size": 8}, {"num_kv_heads": 1, "head_size": 16}
    specs = {"a": full(**small), "b": full(**large), "c": sliding(**large), "d": sliding(**small)}
    groups = (Group(("a", "b"), "full", 16), Group(("c", "d"), "sliding", 16, 64))
    how = {"layout": layout, "kv": "content", "num_blocks": 2}
    assert plan_cache(specs, groups, shard=Shard(), **how).bytes_per_block == 2048
    plan = plan_cache(specs, groups, shard=Shard(tp_rank=0, tp_size=2), **how)
    assert plan.bytes_per_block == bytes_per_block
    plan.manifest(Region(4096, plan.nbytes)).check()
    with pytest.raises(SpecInvalid, match="reaches byte"):
        plan.manifest(Region(4096, plan.nbytes - 1)).check()


def test_the_manifest_is_sound_in_every_layout():
    specs = model(layers=5, full_every=2)
    for layout in ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC"):
        for kv in ("content", "split"):
            plan = planned(specs, layout=layout, kv=kv, num_blocks=3)
            manifest = plan.manifest(Region(4096, plan.nbytes))
            manifest.check()
            assert [group.kind for group in manifest.groups] == [group.kind for group in plan.groups]
            with pytest.raises(SpecInvalid, match="reaches byte"):
                plan.manifest(Region(4096, plan.nbytes - 1)).check()


def spans_of(plan):
    """First byte, and first byte behind the last, of each layer in the whole allocation."""
    return {
        name: (
            min(part.offset for part in layer.components),
            max(part.end(plan.num_blocks) for part in layer.components),
        )
        for name, layer in plan.layers.items()
    }


@looped("layout", ["BLHNC", "BHLNC", "LBNHC"])
@looped("kv", ["content", "split"])
def test_a_layer_apart_has_a_tensor_of_its_own_behind_what_is_shared(layout, kv):
    specs = model(layers=4, full_every=2)
    groups = plan_groups(specs, layout=layout)
    plan = plan_cache(specs, groups, layout=layout, kv=kv, shard=Shard(), num_blocks=3, apart=("layers.1", "layers.2"))
    assert plan.bytes_per_block == 3 * 2048  # one that the two groups share, and two apart
    spans = spans_of(plan)
    shared = max(spans.pop(name)[1] for name in ("layers.0", "layers.3"))
    assert shared == 3 * 2048
    assert spans == {"layers.1": (3 * 2048, 6 * 2048), "layers.2": (6 * 2048, 9 * 2048)}
    assert {part.block_stride for part in plan.layers["layers.1"].components} == {2048 if kv == "content" else 1024}
    plan.manifest(Region(4096, plan.nbytes)).check()


def test_a_layer_apart_must_be_there():
    specs = model(layers=2)
    with pytest.raises(SpecInvalid, match=r"apart names layers that are not in specs: \['layers.2'\]"):
        plan_cache(
            specs, plan_groups(specs), layout="BLHNC", kv="content", shard=Shard(), num_blocks=1, apart=["layers.2"]
        )


@looped(
    "layout, alignment, bytes_per_block",
    [
        ("BLHNC", 1, 3 * 768),
        ("BLHNC", 512, 2560),
        ("BLHNC", 2304, 2304),
        ("LBNHC", 1, 3 * 768),
        ("LBNHC", 512, 3 * 1024),
        ("LBNHC", 768, 3 * 768),
    ],
)
def test_rows_and_the_blocks_of_tensors_are_aligned(layout, alignment, bytes_per_block):
    specs = model(layers=3, full_every=1, num_kv_heads=3, head_size=4)
    plan = plan_cache(
        specs, plan_groups(specs), layout=layout, kv="content", shard=Shard(), num_blocks=5, alignment=alignment
    )
    assert plan.bytes_per_block == bytes_per_block
    for layer in plan.layers.values():
        assert all(part.block_stride % alignment == 0 for part in layer.components)
    plan.manifest(Region(4096, plan.nbytes)).check()


def test_a_layer_apart_is_aligned_too():
    specs = model(layers=2, full_every=1, num_kv_heads=3, head_size=4)
    plan = plan_cache(
        specs,
        plan_groups(specs),
        layout="BLNHC",
        kv="content",
        shard=Shard(),
        num_blocks=5,
        apart=["layers.1"],
        alignment=512,
    )
    assert plan.bytes_per_block == 2 * 1024
    assert spans_of(plan)["layers.1"] == (5 * 1024, 10 * 1024 - 256)


@pytest.mark.parametrize(("layout", "second"), [("BLHNC", 164), ("LBNHC", 3 * 1024)])
def test_states_share_memory_with_attention(layout, second):
    """In rows the two states of one group follow each other; in tensors each lies over one layer's page."""
    specs = {"a": full(num_kv_heads=2), "m": mamba(), "b": full(num_kv_heads=2), "n": mamba()}
    plan = plan_cache(
        specs, plan_groups(specs, layout=layout), layout=layout, kv="content", shard=Shard(), num_blocks=3
    )
    assert [group.kind for group in plan.groups] == ["full", "mamba"]
    assert plan.bytes_per_block == 2 * 1024
    assert [offset_of(plan, name) for name in "amn"] == [0, 0, second]
    assert plan.manifest(Region(4096, plan.nbytes)).aliases == (0, 0)


@looped(
    "spec, group, fitted",
    [
        (full(block_size=16), Group(("a",), "full", 64), (64, None)),
        (full(block_size=16, kernel_block_size=16), Group(("a",), "full", 64), (64, None)),
        (full(block_size=16), Group(("a",), "full", 16, page_bytes=4096), (16, 4096)),
        (full(block_size=16, page_bytes=3000), Group(("a",), "full", 16), (16, 3000)),
        (mamba(), Group(("a",), "mamba", 64, page_bytes=4096), (16, 4096)),  # a state has no tokens to count
    ],
)
def test_a_group_says_how_large_its_blocks_and_pages_are(spec, group, fitted):
    chosen = fitted_specs({"a": spec}, (group,))["a"]
    assert (chosen.block_size, chosen.page_bytes) == fitted
    assert chosen.kernel_block_size == spec.kernel_block_size


@pytest.mark.parametrize(
    ("other", "tokens"),
    [(full(kernel_block_size=8), 8), (full(block_size=8, kernel_block_size=4), 4), (mamba(), 0)],
)
def test_layers_of_one_group_that_are_cut_differently_are_refused(other, tokens):
    groups = (Group(("a", "b"), "full" if tokens else "mixed", 16),)
    words = f"group 0: kernel blocks of 'a' have 16 tokens, those of 'b' have {tokens}"
    with pytest.raises(SpecInvalid, match=words):
        plan_cache({"a": full(), "b": other}, groups, layout="BLHNC", kv="content", shard=Shard(), num_blocks=1)
