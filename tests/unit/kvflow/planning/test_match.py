"""Where two caches must agree they are compared; ``tests/integration/misconfigurations.py`` has what users are told."""

import pytest
from msgspec.structs import replace

from kvflow.errors import LayoutMismatch
from kvflow.layout.groups import Group
from kvflow.layout.manifest import Provenance
from kvflow.layout.specs import MLA, Mamba, State
from kvflow.planning.match import count_unread_layers, match_groups, omitted_layers
from kvflow.planning.plan import plan_transfer
from tests.helpers.loops import looped

from .helpers import full, manifest_of, sliding


def state(shape, **fields):
    return Mamba(block_size=16, states=(State("ssm", shape, "float32", **fields),))


def latent(**fields):
    return MLA(block_size=16, head_size=8, dtype="float16", **fields)


def match(source, target):
    return match_groups(manifest_of(source), manifest_of(target))


@pytest.mark.parametrize("changed", [{"model": "qwen"}, {"model": "llama", "revision": "2"}])
def test_models_must_be_equal_where_both_sides_name_one(changed):
    cache = manifest_of({"a": full()})
    source, unnamed, other = (
        replace(cache, identity=Provenance(**names)) for names in ({"model": "llama", "revision": "1"}, {}, changed)
    )
    assert plan_transfer(source, unnamed).certificate.complete
    with pytest.raises(LayoutMismatch, match="Serve the same"):
        plan_transfer(source, other)


def test_layers_that_the_target_does_not_have_are_counted():
    ours, theirs = manifest_of({"a": full()}), manifest_of({"a": full(), "b": full(), "c": sliding()})
    assert count_unread_layers(theirs, ours) == 2
    assert count_unread_layers(ours, theirs) == 0


def test_many_layers_without_a_common_name_are_abbreviated():
    with pytest.raises(LayoutMismatch) as caught:
        match({f"x{index}": full() for index in range(40)}, {"y": full()})
    assert caught.value.source == ["x0", "x1", "x2", "x3", "... 40 in all"]


def test_layers_match_by_name_whatever_group_they_are_in():
    specs = {"a": full(), "b": full(), "c": full()}
    source = manifest_of(specs, groups=(Group(("c", "a"), "full", 16), Group(("b",), "full", 16)))
    target = manifest_of(specs, groups=(Group(("b", "a", "c"), "full", 16),))
    found = {
        (pair.source_group, pair.target_group): {part.layer for part in pair.pairs}
        for pair in match_groups(source, target)
    }
    assert found == {(0, 0): {"a", "c"}, (1, 0): {"b"}}


def test_only_the_heads_of_both_ranks_are_paired():
    specs = {"a": full(num_kv_heads=8)}
    source, target = manifest_of(specs, tp=(1, 4)), manifest_of(specs, tp=(0, 2))
    (pair,) = match_groups(source, target)
    assert {(part.first, part.count) for part in pair.pairs} == {(2, 2)}


def test_only_the_heads_that_one_rank_gives_are_paired():
    cache = manifest_of({"a": full(num_kv_heads=4)})
    ((part,),) = (pair.pairs for pair in match_groups(cache, cache, {("a", "k"): (1, 2)}))
    assert (part.source.role, part.first, part.count) == ("k", 1, 2)


def test_ranks_without_a_common_head_have_nothing_to_pair():
    specs = {"a": full(num_kv_heads=8)}
    assert match_groups(manifest_of(specs, tp=(0, 2)), manifest_of(specs, tp=(1, 2))) == ()


def test_what_no_rank_divides_is_paired_whole_whatever_the_ranks():
    specs = {"a": state((5, 3), shard_axis=None), "l": latent()}
    pairs = match_groups(manifest_of(specs, tp=(1, 2)), manifest_of(specs, tp=(0, 4)))
    parts = {part.layer: part for pair in pairs for part in pair.pairs}
    assert {name: (part.first, part.count, part.extents(0)) for name, part in parts.items()} == {
        "a": (0, 1, (5, 3)),
        "l": (0, 1, (1, 0, 8)),
    }


def test_what_both_hold_starts_at_the_first_index_of_both():
    """Rank 1 of 4 holds rows 2 and 3 of a state of eight, rank 0 of 2 the first four: 12 bytes each."""
    specs = {"a": state((8, 3))}
    ((pair,),) = (group.pairs for group in match_groups(manifest_of(specs, tp=(1, 4)), manifest_of(specs, tp=(0, 2))))
    assert (pair.first, pair.count, pair.extents(0)) == (2, 2, (2, 3))
    assert (pair.start(pair.source), pair.start(pair.target)) == (0, 24)


def drafting(*drafts, names="ab"):
    """The manifest of an engine, with draft layers that it can rebuild."""
    specs = {name: full() for name in (*names, *drafts)}
    return replace(manifest_of(specs), rebuilt=drafts)


@looped(
    "sources, target, told",
    [
        ([drafting()], drafting("x"), [("target", "x")]),
        ([drafting("x")], drafting(), [("source", "x")]),
        ([drafting("x")], drafting("y"), [("target", "y"), ("source", "x")]),
        ([drafting()], drafting(*"vwxyz"), [("target", "v, w, x, y, ... 5 in all")]),
        ([drafting("x")], drafting("x"), []),
        ([drafting(names="a"), drafting("x", names="b")], drafting("x"), []),  # stages
        ([drafting("x")], drafting(names="b"), []),  # another stage of ours may have it
        ([drafting("x")], drafting("x", names="b"), []),
    ],
)
def test_layers_of_one_side_that_it_can_rebuild_are_told(sources, target, told):
    found = list(omitted_layers("prefill-0", sources, target))
    assert [(event.side, event.layers) for event in found] == told
    assert all(
        event.remote_engine_id == "prefill-0" and event.detail and "draft model" in event.remedy for event in found
    )
