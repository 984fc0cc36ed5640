"""A cache in memory: views as a backend takes them, components as kvflow names them, and the same bytes in both."""

import json

import pytest
import torch

from kvflow.errors import SpecInvalid
from kvflow.layout.shards import Shard
from kvflow.layout.specs import ITEM_BYTES, FullAttention, SlidingWindow
from kvflow.memory.cache import allocate

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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv", ["content", "split"])
def test_views_and_components_are_the_same_bytes(layout, kv):
    cache = allocate(specs_of(2, 2), num_blocks=3, layout=layout, kv=kv)
    for name, view in cache.views.items():
        view.copy_(torch.arange(view.numel(), dtype=torch.float16).reshape(view.shape))
        keys, values = cache.component(name, "k"), cache.component(name, "v")
        if kv == "content":
            assert torch.equal(keys, view[..., :8])
            assert torch.equal(values, view[..., 8:])
        else:
            assert torch.equal(keys, view[0].transpose(1, 2))
            assert torch.equal(values, view[1].transpose(1, 2))
        assert keys.shape == (3, 4, 16, 8)


@pytest.mark.parametrize(("kv", "shape"), [("content", (3, 2, 16, 16)), ("split", (2, 3, 16, 2, 8))])
def test_the_shape_of_a_view_does_not_depend_on_the_layout(kv, shape):
    shard = Shard(tp_rank=1, tp_size=2)
    for layout in LAYOUTS:
        cache = allocate(specs_of(2), num_blocks=3, layout=layout, kv=kv, shard=shard)
        assert {view.shape for view in cache.views.values()} == {torch.Size(shape)}
        assert cache.held("full.0", "v") == (2, 2, 4)


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
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
