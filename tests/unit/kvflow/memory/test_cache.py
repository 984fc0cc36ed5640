"""A cache in memory: views as a backend takes them, components as kvflow names them, and the same bytes in both."""

import pytest
import torch

from kvflow.errors import SpecInvalid
from kvflow.layout.shards import ALL_TOKENS, Shard, Stripe
from kvflow.layout.specs import ITEM_BYTES, FullAttention, Mamba, SlidingWindow, State
from kvflow.memory.adopt import adopt
from kvflow.memory.cache import allocate
from tests.helpers.loops import looped

LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC")


def specs_of(full, sliding=0, **fields):
    fields = {"block_size": 16, "num_kv_heads": 4, "head_size": 8, "dtype": "float16"} | fields
    return {f"full.{index}": FullAttention(**fields) for index in range(full)} | {
        f"sliding.{index}": SlidingWindow(**fields, window=128) for index in range(sliding)
    }


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


@pytest.mark.parametrize(("across", "layout"), [(False, "LBNHC"), (True, "BLHNC")])
def test_auto_is_a_tensor_per_layer_unless_blocks_cross_layers(across, layout):
    auto = allocate(specs_of(2), num_blocks=3, enable_cross_layers_blocks=across)
    chosen = allocate(specs_of(2), num_blocks=3, layout=layout)
    assert auto.manifest().geometry_digest() == chosen.manifest().geometry_digest()


def test_one_state_is_a_list_as_well():
    one = Mamba(block_size=16, states=(State("ssm", (4, 2), "float32"),))
    (view,) = allocate({"m": one}, num_blocks=3).views["m"]
    assert view.shape == (3, 4, 2)


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
