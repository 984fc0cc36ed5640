"""Two manifests field by field, and the one verdict that follows."""

import msgspec
import pytest

from kvflow.errors import LayoutMismatch
from kvflow.layout.compare import compare_manifests
from kvflow.layout.manifest import Identity
from kvflow.layout.shards import Shard
from kvflow.layout.specs import Opaque
from kvflow.memory.cache import allocate
from kvflow.planning.plan import plan_transfer

from .helpers import full, model, sliding

SPECS = model(layers=4, full_every=2)


def manifest_of(specs=SPECS, **options):
    return allocate(specs, **{"num_blocks": 3, "layout": "BLHNC", "device": "meta"} | options).manifest()


def named(**identity):
    return msgspec.structs.replace(manifest_of(), identity=Identity(**identity))


def differing(comparison):
    return {field.name: field.verdict for field in comparison.fields if field.verdict != "same"}


def test_a_cache_is_the_same_as_itself():
    comparison = compare_manifests(manifest_of(), manifest_of())
    assert comparison.verdict == "same"
    assert differing(comparison) == {}
    assert {"num_blocks", "layers", "kind", "block_size", "k.dtype", "v.held", "k.strides"} <= {
        field.name for field in comparison.fields
    }


@pytest.mark.parametrize(
    ("target", "fields"),
    [
        ({"num_blocks": 5}, {"num_blocks"}),
        ({"layout": "BLNHC"}, {"k.strides", "v.strides"}),
        ({"shard": Shard(tp_rank=1, tp_size=2)}, {"k.held", "v.held", "k.strides", "v.strides"}),
        (
            {"specs": model(layers=4, full_every=2, block_size=32)},
            {"block_size", "kernel_block_size", "k.strides", "v.strides"},
        ),
        ({"specs": {name: spec for name, spec in SPECS.items() if name != "layers.0"}}, {"layers"}),
    ],
)
def test_what_a_plan_converts_is_said_to_be_convertible_and_why(target, fields):
    comparison = compare_manifests(manifest_of(), manifest_of(**target))
    assert comparison.verdict == "convertible"
    found = differing(comparison)
    assert fields <= found.keys() <= fields | {"groups", "group", "k.strides", "v.strides"}
    assert set(found.values()) == {"convertible"}
    assert all(field.why for field in comparison.fields if field.verdict == "convertible")
    plan_transfer(manifest_of(), manifest_of(**target))


@pytest.mark.parametrize(
    ("target", "field"),
    [
        ({"a": full(dtype="bfloat16")}, "k.dtype"),
        ({"a": full(head_size=16)}, "k.head_size"),
        ({"a": full(num_kv_heads=2)}, "k.num_kv_heads"),
        ({"a": sliding()}, "kind"),
        ({"b": full()}, "layers"),
    ],
)
def test_the_planner_agrees_on_what_is_incompatible(target, field):
    refused_by_both({"a": full()}, target, field)


def test_opaque_pages_of_unlike_blocks_are_incompatible_even_at_equal_size():
    refused_by_both({"a": Opaque(block_size=16, nbytes=64)}, {"a": Opaque(block_size=32, nbytes=64)}, "block_size")


def refused_by_both(source, target, field):
    source, target = manifest_of(source), manifest_of(target)
    comparison = compare_manifests(source, target)
    assert comparison.verdict == "incompatible"
    (worst,) = [found for found in comparison.fields if found.verdict == "incompatible"]
    assert worst.name == field
    with pytest.raises(LayoutMismatch) as caught:
        plan_transfer(source, target)
    assert caught.value.field.endswith(field)
    if field != "layers":
        assert (caught.value.source, caught.value.target) == (worst.source, worst.target)


def test_models_are_compared_where_both_sides_name_one():
    assert compare_manifests(named(model="llama"), named()).verdict == "same"
    assert compare_manifests(named(model="llama", revision="1"), named(model="llama", revision="1")).verdict == "same"
    for changed in ({"model": "qwen"}, {"model": "llama", "revision": "2"}):
        source, target = named(model="llama", revision="1"), named(**changed)
        assert compare_manifests(source, target).verdict == "incompatible"
        with pytest.raises(LayoutMismatch, match="Serve the same"):
            plan_transfer(source, target)


def test_layers_that_differ_in_the_same_way_stand_in_one_line():
    lines = str(compare_manifests(manifest_of(), manifest_of(layout="BLNHC"))).splitlines()
    (line,) = [line for line in lines if "k.strides" in line]
    assert line.startswith(" convertible  k.strides (layers.0, layers.2, layers.1 and 1 more): (")
    assert line.endswith("): a run has its own on each side")
