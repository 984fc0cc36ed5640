"""Groups are those that vLLM answered with, layer for layer, and keep their properties where it has no answer."""

import json
from pathlib import Path

import msgspec
import pytest

from kvflow.errors import SpecInvalid
from kvflow.layout.groups import Group, check_groups, plan_groups
from kvflow.layout.placement import has_tokens, page_bytes
from kvflow.layout.shards import Shard
from kvflow.layout.specs import MLA, CacheSpec, ChunkedLocal, CrossAttention, Mamba, Opaque, State
from tests.helpers.loops import looped

from .helpers import full, model, sliding

ANSWERS = json.loads((Path(__file__).parents[4] / "tests/data/vllm_groups.json").read_text())
MODELS = {row["model"]: row for row in ANSWERS["models"]}

REFUSED = "NotImplementedError"
"""What vLLM says on purpose. Its other errors are crashes, and some of its groups miss layers; ours must not."""


def specs_of(name):
    distinct = [msgspec.convert(spec, CacheSpec) for spec in MODELS[name]["specs"]]
    return {layer: distinct[index] for layer, index in MODELS[name]["layers"].items()}


def answers(keep):
    return [pytest.param(case, id=f"{case['model']}-{case['layout']}") for case in ANSWERS["cases"] if keep(case)]


def pages(group, specs, shard):
    """The pages of a group as whoever places them sees them."""
    fitted = [
        msgspec.structs.replace(
            specs[name],
            block_size=group.block_size if has_tokens(specs[name]) else specs[name].block_size,
            page_bytes=group.page_bytes or specs[name].page_bytes,
        )
        for name in group.layers
    ]
    return [page_bytes(spec, shard) for spec in fitted]


def ours(case):
    """Our groups, in the words of the file."""
    specs, shard = specs_of(case["model"]), Shard(tp_size=MODELS[case["model"]]["tp_size"])
    groups = plan_groups(specs, layout=case["layout"], shard=shard)
    check_groups(specs, groups)
    return [
        {
            "layers": list(group.layers),
            "kind": group.kind,
            "block_size": group.block_size,
            "window": group.window,
            "page_bytes": sizes[0] if len(set(sizes)) == 1 else sizes,
        }
        for group in groups
        for sizes in [pages(group, specs, shard)]
    ]


def shown(groups):
    """How many layers each group has, and in which block size."""
    return [(group.kind, len(group.layers), group.block_size, group.page_bytes) for group in groups]


@looped("case", answers(lambda case: case.get("complete")))
def test_groups_are_those_of_vllm(case):
    assert ours(case) == case["groups"]


@looped("case", answers(lambda case: case.get("complete")))
def test_a_block_has_as_many_bytes_as_in_vllm(case):
    rows = [
        group["page_bytes"] if isinstance(group["page_bytes"], list) else [group["page_bytes"]] * len(group["layers"])
        for group in ours(case)
    ]
    assert max(map(sum, rows)) == case["bytes_per_block"]


@pytest.mark.parametrize("case", answers(lambda case: case.get("error", "").startswith(REFUSED)))
def test_what_vllm_refuses_is_refused(case):
    with pytest.raises(SpecInvalid, match="a page of MLA cannot be padded"):
        ours(case)


def test_the_file_has_every_kind_of_answer():
    # The tests above are parametrized by the file: without this one, an empty file would pass them.
    answered = {case["model"] for case in ANSWERS["cases"] if case.get("complete")}
    published = {name for name in answered if not name.startswith("random")}
    assert len(published) >= 30
    assert {case["layout"] for case in ANSWERS["cases"]} == {"LBNHC", "BLHNC"}
    assert any(case.get("error", "").startswith(REFUSED) for case in ANSWERS["cases"])
    assert any(not case.get("complete", True) for case in ANSWERS["cases"])


@looped("case", answers(lambda case: not case.get("error", "").startswith(REFUSED)))
def test_every_layer_stands_in_one_group_and_buckets_are_dealt_out_in_turn(case):
    specs, shard = specs_of(case["model"]), Shard(tp_size=MODELS[case["model"]]["tp_size"])
    groups = plan_groups(specs, layout=case["layout"], shard=shard)
    assert groups == plan_groups(dict(specs), layout=case["layout"], shard=shard)
    assert sorted(layer for group in groups for layer in group.layers) == sorted(specs)
    assert "groups" not in case or len(groups) == len(case["groups"])
    alike = {}
    for group in groups:
        alike.setdefault(tuple(dict.fromkeys(specs[layer] for layer in group.layers)), []).append(group.layers)
    order = list(specs)
    for parts in alike.values():
        first = [part[0] for part in parts]
        assert first == sorted(first, key=order.index)
        if len({specs[layer] for part in parts for layer in part}) == 1:
            bucket = sorted((layer for part in parts for layer in part), key=order.index)
            assert [bucket[index :: len(parts)] for index in range(len(parts))] == [list(part) for part in parts]


@pytest.mark.parametrize(("layout", "like"), [("LBHNC", "LBNHC"), ("BLNHC", "BLHNC"), ("BHLNC", "BLHNC")])
def test_layouts_differ_only_in_whether_blocks_are_outermost(layout, like):
    specs = specs_of("two-head-sizes")
    assert plan_groups(specs, layout=layout) == plan_groups(specs, layout=like)
    assert plan_groups(specs, layout="LBNHC") != plan_groups(specs, layout="BLHNC")


@pytest.mark.parametrize("name", ["gemma-3-27b", "qwen3-next-80b", "deepseek-v4-flash"])
def test_every_rank_of_an_engine_forms_the_same_groups(name):
    specs = specs_of(name)
    plans = {plan_groups(specs, layout="BLHNC", shard=Shard(tp_rank=rank, tp_size=3)) for rank in range(3)}
    assert len(plans) == 1


@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC"])
def test_a_rank_with_fewer_heads_forms_the_groups_of_the_first(layout):
    specs = {"f": full(num_kv_heads=4), "s": sliding(num_kv_heads=3), "t": sliding(num_kv_heads=3)}
    first, second = (plan_groups(specs, layout=layout, shard=Shard(tp_rank=rank, tp_size=2)) for rank in range(2))
    assert first == second


@looped(
    "heads, tp_size, padded",
    [
        ((4, 4), 2, False),
        ((3, 3), 2, False),  # unequal ranks, but equal layers on each
        ((4, 3), 2, True),  # two heads each on rank 0; two and one on rank 1
        ((6, 5), 4, True),  # only rank 1 differs: two heads and one
        ((2, 1), 4, False),  # one head each, replicated
        ((1, 1), 1, False),
    ],
)
def test_pages_that_differ_on_some_rank_only_are_padded_on_all(heads, tp_size, padded):
    specs = {"f": full(num_kv_heads=heads[0]), "s": sliding(num_kv_heads=heads[1])}
    groups = plan_groups(specs, layout="LBNHC", shard=Shard(tp_size=tp_size))
    assert [group.page_bytes > 0 for group in groups] == [padded, padded]
    for rank in range(tp_size):
        shard = Shard(tp_rank=rank, tp_size=tp_size)
        assert len({size for group in groups for size in pages(group, specs, shard)}) == 1


def test_a_page_that_is_largest_on_one_rank_is_padded_like_the_others():
    specs = {"f": full(num_kv_heads=3), "s": sliding(num_kv_heads=3, head_size=6)}  # 1024 and 768 bytes; then 512
    groups = plan_groups(specs, layout="LBNHC", shard=Shard(tp_size=2))
    assert [group.page_bytes for group in groups] == [1024, 1024]


@looped(
    "num_full, num_sliding, sizes",
    [
        (4, 5, [4, 5]),  # 5 < 1.5 * 4: padding is cheaper than cutting
        (4, 6, [4, 3, 3]),  # 6 is not: buckets are cut at the shorter one's length
        (3, 7, [3, 3, 2, 2]),
        (1, 3, [1, 1, 1, 1]),
        (5, 0, [5]),
    ],
)
def test_buckets_are_cut_when_they_are_much_longer(num_full, num_sliding, sizes):
    specs = {f"f{index}": full() for index in range(num_full)}
    specs |= {f"s{index}": sliding() for index in range(num_sliding)}
    assert [len(group.layers) for group in plan_groups(specs)] == sizes


STATE = Mamba(block_size=16, states=(State("ssm", (1000,), "float16", None),))
OPAQUE = Opaque(block_size=16, nbytes=1000)
LATENT = MLA(block_size=16, head_size=32, dtype="float16")  # a page of 1024 bytes
CHUNKED = ChunkedLocal(block_size=16, num_kv_heads=4, head_size=8, dtype="float16", chunk=64)
CROSS = CrossAttention(block_size=16, num_kv_heads=4, head_size=8, dtype="float16")


@looped(
    "specs, expected",
    [
        # full() and the others have pages of 2048 bytes.
        ([full(head_size=4), sliding()], [("full", 1, 32, 0), ("sliding", 1, 16, 0)]),
        ([full(head_size=6), sliding()], [("full", 1, 16, 2048), ("sliding", 1, 16, 0)]),
        ([STATE, full()], [("mamba", 1, 16, 2048), ("full", 1, 16, 0)]),
        ([OPAQUE, full()], [("opaque", 1, 16, 2048), ("full", 1, 16, 0)]),
        ([OPAQUE, STATE], [("opaque", 1, 16, 2000), ("mamba", 1, 16, 0)]),
        ([LATENT, sliding()], [("mla", 1, 32, 0), ("sliding", 1, 16, 0)]),
        ([CHUNKED, CROSS, full()], [("chunked", 1, 16, 0), ("cross", 1, 16, 0), ("full", 1, 16, 0)]),
        ([full(), full(head_size=6)], [("full", 2, 16, 0)]),  # one table, two pages
        ([full(), LATENT], [("mixed", 2, 16, 0)]),
        ([sliding(window=7), sliding(window=8)], [("sliding", 1, 16, 0), ("sliding", 1, 16, 0)]),
        ([full(block_size=32, head_size=4), full()], [("full", 1, 32, 0), ("full", 1, 16, 0)]),
    ],
)
def test_pages_are_made_equal_by_longer_blocks_or_by_padding(specs, expected):
    groups = plan_groups({f"layers.{index}": spec for index, spec in enumerate(specs)}, layout="LBNHC")
    assert shown(groups) == expected


def test_a_padded_page_stays_what_it_is_and_grows_by_padding():
    specs = {"a": full(head_size=16), "b": msgspec.structs.replace(sliding(head_size=4), page_bytes=2048)}
    assert shown(plan_groups(specs)) == [("full", 1, 16, 0), ("sliding", 1, 16, 4096)]


def test_kernel_blocks_that_all_layers_have_make_no_difference_to_groups():
    specs = model(layers=4, full_every=2, block_size=32)
    kernels = {name: msgspec.structs.replace(spec, kernel_block_size=16) for name, spec in specs.items()}
    assert plan_groups(kernels) == plan_groups(specs)


def test_a_draft_beside_mla_keeps_all_blocks_if_pages_stay_unequal():
    specs = {"a": LATENT, "b": sliding(head_size=6), "c": LATENT}
    assert plan_groups(specs, layout="LBNHC") == (Group(("a", "b", "c"), "mixed", 16),)


@pytest.mark.parametrize(
    "draft",
    [
        msgspec.structs.replace(sliding(head_size=6), page_bytes=2000),  # of unknown size for twice the tokens
        sliding(head_size=6, block_size=64),
        sliding(head_size=6, block_size=24),
    ],
)
def test_a_draft_whose_blocks_cannot_become_those_of_mla_is_refused(draft):
    with pytest.raises(SpecInvalid, match="a page of MLA cannot be padded"):
        plan_groups({"a": msgspec.structs.replace(LATENT, block_size=32, head_size=15), "b": draft}, layout="LBNHC")


@pytest.mark.parametrize("other", [STATE, CHUNKED, full(block_size=32, head_size=6)])
def test_mla_that_does_not_divide_is_refused_by_name(other):
    specs = {"a": msgspec.structs.replace(LATENT, head_size=31), "b": sliding(), "c": other}
    with pytest.raises(SpecInvalid, match="a: the page of 992 bytes does not divide the largest"):
        plan_groups(specs, layout="LBNHC")
