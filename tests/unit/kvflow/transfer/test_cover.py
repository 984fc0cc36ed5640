"""Which source rank gives what: one that has everything, or several, and no byte twice."""

import msgspec
import pytest

from kvflow.errors import LayoutMismatch
from kvflow.layout.specs import MLA
from kvflow.transfer.cover import Share, share_out
from kvflow.transfer.plan import plan_transfer

from .helpers import full, manifest_of

SPECS = {"a": full(num_kv_heads=4), "b": full(num_kv_heads=4)}


def shared(sources, target=(0, 1), specs=SPECS, turn=0):
    return share_out(manifest_of(specs, tp=target), [manifest_of(specs, tp=source) for source in sources], turn=turn)


@pytest.mark.parametrize(
    ("sources", "target", "expected"),
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
    assert shares == tuple(Share(index, None) for index in expected)


def test_pipeline_stages_complete_each_other():
    stages = [manifest_of({name: SPECS[name]}) for name in ("b", "a")]
    assert share_out(manifest_of(SPECS), stages) == (Share(0, None), Share(1, None))


@pytest.mark.parametrize(("sources", "head"), [([(0, 2)], 2), ([(1, 2)], 0), ([], 0)])
def test_what_no_rank_has_is_named(sources, head):
    with pytest.raises(LayoutMismatch, match=rf"a\.k differs: source has 'absent', target has 'head {head} is needed'"):
        shared(sources)


def test_stages_without_any_layer_of_ours_are_named():
    stages = [manifest_of({name: SPECS["a"]}) for name in ("x", "y")]
    with pytest.raises(LayoutMismatch, match=r"layers differs: source has \['x'\], target has \['a', 'b'\]"):
        share_out(manifest_of(SPECS), stages)
    assert share_out(manifest_of({"x": SPECS["a"]}), stages) == (Share(0, None),)


def test_replicated_heads_are_read_once_and_from_the_rank_in_turn():
    few = {"a": full(num_kv_heads=2)}
    ranks = [(rank, 4) for rank in range(4)]
    assert [[share.source for share in shared(ranks, specs=few, turn=turn)] for turn in range(3)] == [
        [0, 2],
        [1, 3],
        [0, 2],
    ]


def test_ranks_that_hold_everything_are_taken_in_turn():
    latents = {"a": MLA(block_size=16, head_size=8, dtype="float16")}
    ranks = [(rank, 3) for rank in range(3)]
    assert [shared(ranks, specs=latents, turn=turn) for turn in range(4)] == [
        (Share(0, None),),
        (Share(1, None),),
        (Share(2, None),),
        (Share(0, None),),
    ]


def test_ranks_that_overlap_give_each_head_once():
    many = {"a": full(num_kv_heads=6)}
    shares = shared([(0, 2), (1, 3), (2, 3)], specs=many)
    assert shares == (
        Share(0, None),
        Share(1, {("a", "k"): (3, 1), ("a", "v"): (3, 1)}),
        Share(2, None),
    )


def test_what_every_rank_holds_is_taken_of_one_of_them_beside_heads_of_all():
    specs = {"a": full(num_kv_heads=2), "m": MLA(block_size=16, head_size=8, dtype="float16")}
    shares = shared([(0, 2), (1, 2)], specs=specs, turn=1)
    assert shares == (Share(0, {("a", "k"): (0, 1), ("a", "v"): (0, 1)}), Share(1, None))


@pytest.mark.parametrize("source_size", range(1, 9))
@pytest.mark.parametrize("target_size", range(1, 9))
@pytest.mark.parametrize("heads", [1, 2, 5, 8])
def test_plans_of_all_shares_write_every_byte_of_every_rank_once(source_size, target_size, heads):
    specs = {"a": full(block_size=2, num_kv_heads=heads), "m": MLA(block_size=2, head_size=8, dtype="float16")}
    sources = [manifest_of(specs, tp=(rank, source_size)) for rank in range(source_size)]
    for rank in range(target_size):
        target = manifest_of(specs, tp=(rank, target_size))
        plans = [
            plan_transfer(sources[share.source], target, pieces=share.pieces)
            for share in share_out(target, sources, turn=rank)
        ]
        written = [plan.certificate.written_bytes for plan in plans]
        assert all(written), "a rank is asked for nothing"
        assert sum(written) == plans[0].certificate.page_bytes
        missing = [
            {
                (gap.layer, gap.role, head)
                for gap in plan.certificate.missing
                for head in range(gap.first, gap.first + gap.count)
            }
            for plan in plans
        ]
        assert not set.intersection(*missing)


def test_a_layer_that_differs_is_told_by_the_plan():
    other = msgspec.structs.replace(SPECS["b"], head_size=16)
    source, target = manifest_of(SPECS | {"b": other}), manifest_of(SPECS)
    (share,) = share_out(target, [source])
    with pytest.raises(LayoutMismatch, match="head_size"):
        plan_transfer(source, target, pieces=share.pieces)
