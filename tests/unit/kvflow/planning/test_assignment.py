"""Which source rank gives what: one that has everything, or several, and no byte twice."""

import msgspec
import pytest

from kvflow.errors import LayoutMismatch
from kvflow.layout.specs import MLA, Opaque
from kvflow.planning.assignment import Assignment, assign_sources
from kvflow.planning.plan import plan_transfer
from tests.helpers.loops import looped

from .helpers import full, manifest_of

SPECS = {"a": full(num_kv_heads=4), "b": full(num_kv_heads=4)}


def shared(sources, target=(0, 1), specs=SPECS, rotation=0):
    return assign_sources(
        manifest_of(specs, tp=target), [manifest_of(specs, tp=source) for source in sources], rotation=rotation
    )


@looped(
    "sources, target, expected",
    [
        ([(0, 1)], (0, 1), (0,)),
        ([(0, 2), (1, 2)], (0, 2), (0,)),
        ([(0, 2), (1, 2)], (1, 2), (1,)),
        ([(0, 2), (1, 2)], (0, 1), (0, 1)),
        ([(1, 2), (0, 2)], (0, 1), (0, 1)),
        ([(0, 2), (1, 2)], (3, 4), (1,)),
        ([(0, 4), (1, 4), (2, 4), (3, 4)], (1, 2), (2, 3)),
        ([(0, 4), (0, 1)], (0, 1), (1,)),
        ([(0, 2), (0, 3), (1, 2)], (0, 1), (0, 2)),  # the second has nothing that the first has not
    ],
)
def test_sources(sources, target, expected):
    shares = shared(sources, target)
    assert shares == tuple(Assignment(index, None) for index in expected)


def test_pipeline_stages_complete_each_other():
    stages = [manifest_of({name: SPECS[name]}) for name in ("b", "a")]
    assert assign_sources(manifest_of(SPECS), stages) == (Assignment(0, None), Assignment(1, None))


def page(arrangement, ranks=1):
    return {"a": Opaque(block_size=16, nbytes=24, arrangement=arrangement, ranks=ranks)}


@pytest.mark.parametrize(
    ("source", "target", "differs"),
    [
        (SPECS, {"a": full(num_kv_heads=4, quantization="fp8_per_token_head", dtype="float8_e4m3fn")}, "a.components"),
        (page("nvfp4_hn"), page("nvfp4_nh"), "a.components differs: source has ['nvfp4_hn'], target has ['nvfp4_nh']"),
        (SPECS, page("nvfp4_hn"), "a.kind differs: source has 'full', target has 'opaque'"),
    ],
)
def test_caches_of_two_formats_are_told_apart_and_no_rank_is_missed(source, target, differs):
    with pytest.raises(LayoutMismatch) as caught:
        assign_sources(manifest_of(target), [manifest_of(source, layout="LBHNC")])
    assert caught.value.message.startswith(differs)
    assert "same cache dtype on both sides" in caught.value.remedy
    assert ("same attention backend" in caught.value.remedy) == (target.keys() == {"a"} and "nvfp4" in str(target))


@pytest.mark.parametrize(
    ("sources", "held"),
    [
        ([(0, 2)], "heads 0-1 of 4"),
        ([(1, 2), (1, 2)], "heads 2-3 of 4"),
        ([(0, 4), (2, 4)], "heads 0, 2 of 4"),
        ([(3, 4)], "head 3 of 4"),
    ],
)
def test_heads_that_no_rank_holds_are_named(sources, held):
    with pytest.raises(LayoutMismatch) as caught:
        shared(sources)
    assert caught.value.message == f"a.k differs: source has {held!r}, target has 'heads 0-3 of 4'"
    assert "join_tickets" in caught.value.remedy


def test_stages_without_any_layer_of_ours_are_named():
    stages = [manifest_of({name: SPECS["a"]}) for name in ("x", "y")]
    with pytest.raises(LayoutMismatch, match=r"layers differs: source has \['x'\], target has \['a', 'b'\]"):
        assign_sources(manifest_of(SPECS), stages)
    assert assign_sources(manifest_of({"x": SPECS["a"]}), stages) == (Assignment(0, None),)


def test_replicated_heads_are_read_once_and_from_the_rank_in_turn():
    few = {"a": full(num_kv_heads=2)}
    ranks = [(rank, 4) for rank in range(4)]
    assert [[share.source for share in shared(ranks, specs=few, rotation=rotation)] for rotation in range(3)] == [
        [0, 2],
        [1, 3],
        [0, 2],
    ]


def test_ranks_that_hold_everything_are_taken_in_turn():
    latents = {"a": MLA(block_size=16, head_size=8, dtype="float16")}
    ranks = [(rank, 3) for rank in range(3)]
    assert [shared(ranks, specs=latents, rotation=rotation) for rotation in range(4)] == [
        (Assignment(0, None),),
        (Assignment(1, None),),
        (Assignment(2, None),),
        (Assignment(0, None),),
    ]


def test_ranks_that_overlap_give_each_head_once():
    many = {"a": full(num_kv_heads=6)}
    shares = shared([(0, 2), (1, 3), (2, 3)], specs=many)
    assert shares == (
        Assignment(0, None),
        Assignment(1, {("a", "k"): (3, 1), ("a", "v"): (3, 1)}),
        Assignment(2, None),
    )


def test_what_every_rank_holds_is_taken_of_one_of_them_beside_heads_of_all():
    specs = {"a": full(num_kv_heads=2), "m": MLA(block_size=16, head_size=8, dtype="float16")}
    shares = shared([(0, 2), (1, 2)], specs=specs, rotation=1)
    assert shares == (Assignment(0, {("a", "k"): (0, 1), ("a", "v"): (0, 1)}), Assignment(1, None))


def test_a_layer_that_differs_is_told_by_the_plan():
    other = msgspec.structs.replace(SPECS["b"], head_size=16)
    source, target = manifest_of(SPECS | {"b": other}), manifest_of(SPECS)
    (share,) = assign_sources(target, [source])
    with pytest.raises(LayoutMismatch, match="head_size"):
        plan_transfer(source, target, head_ranges=share.head_ranges)


def test_layers_of_no_source_are_left_unread_if_they_can_be_rebuilt():
    specs = SPECS | {"draft": full(num_kv_heads=4)}
    target = msgspec.structs.replace(manifest_of(specs), rebuilt=("draft",))
    ranks = [manifest_of(SPECS, tp=(rank, 2)) for rank in range(2)]
    stages = [manifest_of({name: SPECS[name]}) for name in SPECS]
    assert assign_sources(target, [manifest_of(SPECS)]) == (Assignment(0, None),)
    for sources in (ranks, stages):
        assert assign_sources(target, sources) == (Assignment(0, None), Assignment(1, None))
    drafting = [manifest_of({"a": SPECS["a"]}), manifest_of({"b": SPECS["b"], "draft": specs["draft"]})]
    assert assign_sources(target, drafting) == (Assignment(0, None), Assignment(1, None))
    plans = [plan_transfer(source, target) for source in drafting]
    assert sum(plan.certificate.written_bytes for plan in plans) == plans[0].certificate.page_bytes


@pytest.mark.parametrize("missing", ["a", "b"])
def test_a_layer_that_cannot_be_rebuilt_is_needed_beside_one_that_can(missing):
    specs = SPECS | {"draft": full(num_kv_heads=4)}
    target = msgspec.structs.replace(manifest_of(specs), rebuilt=("draft",))
    with pytest.raises(LayoutMismatch) as caught:
        assign_sources(target, [manifest_of({name: SPECS[name] for name in SPECS if name != missing})])
    assert (caught.value.field, caught.value.target) == ("layers", [missing])


def test_a_layer_to_rebuild_is_read_whole_if_some_source_has_a_part():
    specs = SPECS | {"draft": full(num_kv_heads=4)}
    target = msgspec.structs.replace(manifest_of(specs), rebuilt=("draft",))
    with pytest.raises(LayoutMismatch, match=r"draft\.k differs: source has 'heads 0-1 of 4'"):
        assign_sources(target, [manifest_of(SPECS), manifest_of(specs, tp=(0, 2))])
