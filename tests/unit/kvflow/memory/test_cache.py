"""A cache in memory: views as a backend takes them, components as kvflow names them, and the same bytes in both."""

import json

import pytest
import torch

from kvflow.errors import SpecInvalid
from kvflow.layout.shards import ALL_TOKENS, Shard, Stripe
from kvflow.layout.specs import ITEM_BYTES, MLA, FullAttention, Mamba, SlidingWindow, State
from kvflow.memory.adopt import adopt
from kvflow.memory.cache import allocate
from tests.helpers.loops import looped

LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC")
FIGURES = (
    ("gemma-2-2b", "one group, hybrid manager off", 26, {"layout": "BLNHC", "kv": "split"}),
    ("gemma-2-2b", "two groups", 13, {"layout": "BLNHC", "kv": "split"}),
    ("gpt-oss-20b", "TP 1, tokens before heads", 12, {"layout": "BLNHC", "kv": "split"}),
    ("gpt-oss-20b", "TP 2, heads before layers", 12, {"layout": "BHLNC", "kv": "split"}),
)


def specs_of(full, sliding=0, **fields):
    fields = {"block_size": 16, "num_kv_heads": 4, "head_size": 8, "dtype": "float16"} | fields
    return {f"full.{index}": FullAttention(**fields) for index in range(full)} | {
        f"sliding.{index}": SlidingWindow(**fields, window=128) for index in range(sliding)
    }


@pytest.mark.parametrize(("name", "case", "positions", "how"), FIGURES)
def test_published_allocations(name, case, positions, how, repository):
    """On torch's ``meta`` device, where fifty gigabytes cost nothing."""
    rows = json.loads((repository / "tests/data/figures.json").read_text())["packed_allocations"]
    figure = next(row for row in rows if (row["model"], row["case"]) == (name, case))
    block_size, heads, size = figure.get("shape", [0, 0, 0, 16, 4, 256])[3:]
    heads, size = figure.get("num_kv_heads", heads), figure.get("head_size", size)
    specs = specs_of(
        positions, 0 if "one group" in case else positions, num_kv_heads=heads, head_size=size, dtype="bfloat16"
    )
    cache = allocate(specs, num_blocks=figure["num_blocks"], device="meta", **how)
    view = cache.views["full.1"]
    two, block, token, head, element = view.stride()
    if "shape" in figure:
        assert [cache.num_blocks, positions, *view.shape[:1], *view.shape[2:]] == figure["shape"]
        page = 2 * block_size * heads * size
        assert (block, view.storage_offset()) == (positions * page, page)
    else:
        assert sorted(view.shape) == sorted(figure["layer_view"])
        assert cache.backing.nbytes == figure["int8_shape"][0] * figure["strides"][0]
        assert block * 2 == figure["strides"][0] == cache.bytes_per_block
        assert view.storage_offset() * 2 == figure["strides"][-2]
        assert cache.bytes_per_block // positions == figure["page_bytes"]
        if "heads before layers" in case:
            assert head * 2 == figure["strides"][1]
            assert (two, token, element) == (block_size * size, size, 1)


@looped("layout", LAYOUTS)
@looped("kv", ["content", "split", "block_split"])
def test_views_and_components_are_the_same_bytes(layout, kv):
    cache = allocate(specs_of(2, 2), num_blocks=3, layout=layout, kv=kv)
    for name, view in cache.views.items():
        view.copy_(torch.arange(view.numel(), dtype=torch.float16).reshape(view.shape))
        keys, values = cache.component(name, "k"), cache.component(name, "v")
        if kv == "content":
            assert torch.equal(keys, view[..., :8])
            assert torch.equal(values, view[..., 8:])
        else:
            pair = view if kv == "split" else view.transpose(0, 1)
            assert torch.equal(keys, pair[0].transpose(1, 2))
            assert torch.equal(values, pair[1].transpose(1, 2))
        assert keys.shape == (3, 4, 16, 8)


@pytest.mark.parametrize(
    ("kv", "shape"),
    [("content", (3, 2, 16, 16)), ("split", (2, 3, 16, 2, 8)), ("block_split", (3, 2, 16, 2, 8))],
)
def test_the_shape_of_a_view_does_not_depend_on_the_layout(kv, shape):
    shard = Shard(tp_rank=1, tp_size=2)
    for layout in LAYOUTS:
        cache = allocate(specs_of(2), num_blocks=3, layout=layout, kv=kv, shard=shard)
        assert {view.shape for view in cache.views.values()} == {torch.Size(shape)}
        assert cache.held("full.0", "v") == (2, 2, 4)


@looped("dtype", sorted(ITEM_BYTES))
def test_every_dtype_can_be_viewed(dtype):
    cache = allocate(specs_of(1, dtype=dtype), num_blocks=2)
    assert cache.views["full.0"].dtype == getattr(torch, dtype)
    assert cache.backing.nbytes == 2 * cache.bytes_per_block == 2 * 2 * 16 * 4 * 8 * ITEM_BYTES[dtype]


def test_memory_is_zeroed_and_one_region():
    cache = allocate(specs_of(2, 2), num_blocks=5)
    assert not cache.backing.any()
    (region,) = cache.manifest().regions
    assert (region.address, region.nbytes) == (cache.backing.data_ptr(), cache.backing.nbytes)
    assert (region.memory, region.device) == ("DRAM", 0)


def test_layers_of_different_groups_at_one_position_are_overlaid():
    cache = allocate(specs_of(2, 2), num_blocks=2, layout="BLHNC")
    cache.views["full.1"].fill_(1.0)
    assert bool((cache.views["sliding.1"] == 1.0).all())
    assert not cache.views["sliding.0"].any()
    assert cache.bytes_per_block == 2 * 2 * 16 * 4 * 8 * 2


@pytest.mark.parametrize(("across", "layout"), [(False, "LBNHC"), (True, "BLHNC")])
def test_auto_is_a_tensor_per_layer_unless_blocks_cross_layers(across, layout):
    auto = allocate(specs_of(2), num_blocks=3, enable_cross_layers_blocks=across)
    chosen = allocate(specs_of(2), num_blocks=3, layout=layout)
    assert auto.manifest().geometry_digest() == chosen.manifest().geometry_digest()


def test_memory_bytes_is_a_budget():
    specs = specs_of(2)
    per_block = allocate(specs, num_blocks=1).bytes_per_block
    assert allocate(specs, memory_bytes=3 * per_block + 7).num_blocks == 3


MAMBA = Mamba(
    block_size=16,
    states=(
        State("conv_x", (6, 3), "bfloat16"),
        State("conv_B", (5, 3), "bfloat16", shard_axis=None),
        State("ssm", (3, 4, 2), "float32", shard_axis=1),
    ),
)


@looped("layout", LAYOUTS)
def test_states_are_a_list_of_views_each_cut_to_what_is_held(layout):
    shard = Shard(tp_rank=1, tp_size=2)
    cache = allocate(specs_of(1) | {"m": MAMBA}, num_blocks=3, layout=layout, shard=shard)
    views = cache.views["m"]
    assert [(tuple(view.shape), view.dtype) for view in views] == [
        ((3, 3, 3), torch.bfloat16),
        ((3, 5, 3), torch.bfloat16),
        ((3, 3, 2, 2), torch.float32),
    ]
    assert [cache.held("m", role) for role in ("conv_x", "conv_B", "ssm")] == [(3, 3, 6), (0, 1, 1), (2, 2, 4)]
    for number, (role, view) in enumerate(zip(("conv_x", "conv_B", "ssm"), views, strict=True), start=1):
        assert all(block.is_contiguous() for block in view)
        view.fill_(number)
        assert cache.component("m", role).data_ptr() == view.data_ptr()
        assert cache.component("m", role).stride() == view.stride()
    assert [view.unique().tolist() for view in views] == [[1.0], [2.0], [3.0]]


def test_one_state_is_a_list_as_well():
    one = Mamba(block_size=16, states=(State("ssm", (4, 2), "float32"),))
    (view,) = allocate({"m": one}, num_blocks=3).views["m"]
    assert view.shape == (3, 4, 2)


@looped(
    "how, num_layers, view, component",
    [
        ({"layout": "LBNHC"}, 2, (12, 4, 4, 16), (12, 4, 4, 8)),
        ({"layout": "LBHNC", "kv": "split"}, 2, (2, 12, 4, 4, 8), (12, 4, 4, 8)),
        ({"layout": "LBNHC", "kv": "block_split"}, 2, (12, 2, 4, 4, 8), (12, 4, 4, 8)),
        ({"layout": "BLHNC"}, 1, (12, 4, 4, 16), (12, 4, 4, 8)),
        ({"layout": "BLHNC"}, 2, (3, 4, 4, 4, 16), (3, 4, 4, 4, 8)),
        ({"layout": "BHLNC", "kv": "split"}, 2, (2, 3, 4, 4, 4, 8), (3, 4, 4, 4, 8)),
    ],
)
def test_kernel_blocks_count_as_blocks_where_one_stride_reaches_them(how, num_layers, view, component):
    """Three blocks of 16 tokens, each of four kernel blocks of four."""
    cache = allocate(specs_of(num_layers, kernel_block_size=4), num_blocks=3, **how)
    tensor = cache.views["full.0"]
    assert tensor.shape == view
    assert cache.component("full.0", "v").shape == component
    tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float16).reshape(tensor.shape))
    keys = cache.component("full.0", "k").reshape(3, 4, 4, 4, 8)
    match how.get("kv"):
        case "split":
            seen = tensor[0].reshape(3, 4, 4, 4, 8).transpose(2, 3)
        case "block_split":
            seen = tensor[:, 0].reshape(3, 4, 4, 4, 8).transpose(2, 3)
        case _:
            seen = tensor[..., :8].reshape(3, 4, 4, 4, 8)
    assert torch.equal(keys, seen)


@looped("layout", LAYOUTS)
def test_a_latent_has_no_axis_of_heads_in_its_view(layout):
    specs = {name: MLA(block_size=16, head_size=12, dtype="bfloat16") for name in "ab"}
    cache = allocate(specs, num_blocks=3, layout=layout, shard=Shard(tp_rank=3, tp_size=4))
    view = cache.views["b"].fill_(1.0)
    assert view.shape == (3, 16, 12)
    assert cache.held("b", "latent") == (0, 1, 1)
    assert torch.equal(cache.component("b", "latent"), view[:, None])
    assert not cache.views["a"].any()


@pytest.mark.parametrize("kv", ["content", "split", "block_split"])
def test_scales_have_components_of_their_own_dtype_in_a_view_of_bytes(kv):
    specs = specs_of(1, dtype="float8_e4m3fn", quantization="fp8_per_token_head")
    cache = allocate(specs, num_blocks=3, layout="LBNHC", kv=kv)
    cache.component("full.0", "k_scale").fill_(1.0)
    cache.component("full.0", "v_scale").fill_(2.0)
    view = cache.views["full.0"]
    assert view.dtype == torch.uint8
    if kv == "content":
        assert view.shape == (3, 4, 16, 24)
        pair = view.unflatten(-1, (2, 12)).movedim(-2, 0)
    else:
        pair = view if kv == "split" else view.transpose(0, 1)
        assert pair.shape == (2, 3, 16, 4, 12)
    scales = pair[..., 8:].contiguous().view(torch.float32)
    assert [plane.unique().tolist() for plane in scales] == [[1.0], [2.0]]
    assert not pair[..., :8].any()
    assert cache.component("full.0", "v").dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("kv", ["split", "block_split"])
def test_values_of_another_size_apart_from_keys_are_a_list_of_two(kv):
    cache = allocate(specs_of(2, head_size_v=4), num_blocks=3, layout="BLNHC", kv=kv)
    keys, values = cache.views["full.1"]
    assert (keys.shape, values.shape) == ((3, 16, 4, 8), (3, 16, 4, 4))
    values.fill_(1.0)
    assert bool((cache.component("full.1", "v") == 1.0).all())
    assert not keys.any()
    assert not any(view.any() for view in cache.views["full.0"])


def test_a_layer_apart_shares_no_byte():
    cache = allocate(specs_of(2, 2), num_blocks=3, layout="BLHNC", apart=["full.1"], alignment=4096)
    cache.views["full.1"].fill_(1.0)
    assert not any(view.any() for name, view in cache.views.items() if name != "full.1")
    assert cache.bytes_per_block % 4096 == 0


@pytest.mark.parametrize(("layer", "role"), [("full.0", "latent"), ("full.9", "k")])
def test_what_is_not_there_is_a_key_error(layer, role):
    cache = allocate(specs_of(1), num_blocks=1)
    for call in (cache.component, cache.held):
        with pytest.raises(KeyError):
            call(layer, role)


@pytest.mark.parametrize("wrong", [{"layout": "NHD"}, {"kv": "both"}, {"num_blocks": 0}, {"memory_bytes": 1 << 20}])
def test_what_cannot_be_allocated_is_refused(wrong):
    with pytest.raises(SpecInvalid):
        allocate(specs_of(1), **{"num_blocks": 1} | wrong)


def test_a_rank_that_has_some_of_the_tokens_says_which():
    """Half of the tokens take half of the blocks: what a block holds does not change."""
    shard = Shard(tp_rank=1, tp_size=2, dcp_rank=1, dcp_size=2, dcp_interleave=8)
    cache = allocate(specs_of(1, 1), num_blocks=3, shard=shard)
    whole = allocate(specs_of(1, 1), num_blocks=3, shard=Shard(tp_rank=1, tp_size=2))
    assert cache.groups == whole.groups
    stripes = {group.kind: (group.stripe, group.block_tokens) for group in cache.manifest().groups}
    assert stripes == {"full": (Stripe(1, 2, 8), 32), "sliding": (ALL_TOKENS, 16)}
    assert {group.stripe for group in whole.manifest().groups} == {ALL_TOKENS}
    assert cache.held("full.0", "k") == whole.held("full.0", "k") == (2, 2, 4)
    assert cache.backing.nbytes == whole.backing.nbytes
    adopted = adopt(cache.views, specs_of(1, 1), cache.groups, shard=shard)
    assert [group.stripe for group in adopted.manifest().groups] == [g.stripe for g in cache.manifest().groups]
    with pytest.raises(SpecInvalid, match="dcp_interleave is 3: expected a divisor of the 16 tokens"):
        allocate(specs_of(1), num_blocks=3, shard=Shard(dcp_size=2, dcp_interleave=3))
    with pytest.raises(SpecInvalid, match="dcp_interleave is 3: expected a divisor of the 16 tokens"):
        adopt(cache.views, specs_of(1, 1), shard=Shard(dcp_size=2, dcp_interleave=3))
