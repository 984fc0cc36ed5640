"""The published packed allocations, to the number: shapes and strides of vLLM's pull request 34373."""

import json
from math import prod
from pathlib import Path

import pytest
import torch

from kvflow.layout.groups import Group
from kvflow.layout.shards import Shard
from kvflow.layout.specs import FullAttention, Mamba, SlidingWindow, State
from kvflow.memory.cache import allocate

FIGURES = json.loads((Path(__file__).parents[4] / "tests/data/figures.json").read_text())["packed_allocations"]
BY_CASE = {figure["case"]: figure for figure in FIGURES}
GEMMA = {"num_kv_heads": 4, "head_size": 256, "dtype": "bfloat16", "block_size": 16}
GPT_OSS = {"num_kv_heads": 8, "head_size": 64, "dtype": "bfloat16", "block_size": 16}


def alternating(layers, window, fields):
    return {
        f"layers.{index}": FullAttention(**fields) if index % 2 else SlidingWindow(window=window, **fields)
        for index in range(layers)
    }


def allocated(specs, figure, **options):
    return allocate(specs, num_blocks=figure["num_blocks"], device="meta", **options)


def strides_of(shape):
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


@pytest.mark.parametrize("case", ["one group, hybrid manager off", "two groups"])
def test_gemma_2_2b_is_one_tensor_of_blocks_layers_and_split_pages(case):
    figure = BY_CASE[case]
    specs = alternating(26, 4096, GEMMA)
    if case.startswith("one"):
        specs = dict.fromkeys(specs, FullAttention(**GEMMA))
    cache = allocated(specs, figure, layout="BLNHC", kv="block_split")
    blocks, positions, pair, tokens, heads, head_size = figure["shape"]
    assert cache.backing.nbytes == 2 * prod(figure["shape"])
    assert len(cache.manifest().regions) == 1
    assert [len(group.layers) for group in cache.groups] == [positions] * (26 // positions)
    block, layer, *inner = strides_of(figure["shape"])
    for group in cache.groups:
        for position, name in enumerate(group.layers):
            view = cache.views[name]
            assert view.dtype == getattr(torch, figure["dtype"])
            assert view.shape == (blocks, pair, tokens, heads, head_size)
            assert view.stride() == (block, *inner)
            assert view.storage_offset() == position * layer


@pytest.mark.parametrize(
    ("case", "tp_size", "layout", "kv", "axes"),
    [
        ("TP 1, tokens before heads", 1, "BLNHC", "split", "BL"),
        ("TP 2, heads before layers", 2, "BHLNC", "block_split", "BHL"),
    ],
)
def test_gpt_oss_20b_has_the_published_rows(case, tp_size, layout, kv, axes):
    figure = BY_CASE[case]
    cache = allocated(
        alternating(24, 128, GPT_OSS), figure, layout=layout, kv=kv, shard=Shard(tp_rank=1 % tp_size, tp_size=tp_size)
    )
    shape, strides = figure["int8_shape"], figure["strides"]
    assert (cache.backing.nbytes, cache.bytes_per_block) == (prod(shape), prod(shape[1:]))
    assert len(cache.manifest().regions) == 1
    stride_of = dict(zip(axes, strides, strict=False))
    for group in cache.groups:
        for position, name in enumerate(group.layers):
            assert list(cache.views[name].shape) == figure["layer_view"]
            keys = cache.component(name, "k")
            assert keys.storage_offset() * 2 == position * stride_of["L"]
            assert keys.stride()[0] * 2 == stride_of["B"]
            if "H" in axes:
                assert keys.stride()[1] * 2 == stride_of["H"]
            assert cache.held(name, "k")[1:] == (figure["num_kv_heads"], 8)
    page = figure["num_kv_heads"] * figure["head_size"] * figure["block_size"] * 2 * 2
    assert page == figure["page_bytes"]


def test_two_page_sizes_stand_in_one_allocation():
    """4 attention and 2 Mamba layers of two page sizes: two sets of layers, one backing allocation."""
    assert BY_CASE.keys() >= {next(figure["case"] for figure in FIGURES if figure["model"] == "mixed")}
    specs = {f"attn.{index}": FullAttention(**GPT_OSS) for index in range(4)}
    states = (State("conv", (100, 3), "bfloat16"), State("ssm", (8, 64, 16), "float32"))
    specs |= {f"mamba.{index}": Mamba(block_size=16, states=states) for index in range(2)}
    groups = (Group(tuple(specs)[:4], "full", 16), Group(tuple(specs)[4:], "mamba", 16))
    cache = allocate(specs, num_blocks=5, layout="BLNHC", groups=groups)
    page = 2 * 8 * 64 * 16 * 2
    state = 2 * 100 * 3 + 4 * 8 * 64 * 16
    assert cache.bytes_per_block == max(4 * page, 2 * state) == 4 * page
    assert len(cache.manifest().regions) == 1
    offsets = {
        name: cache.component(name, role).storage_offset() * cache.component(name, role).element_size()
        for name, role in (("attn.3", "k"), ("mamba.1", "conv"))
    }
    assert offsets == {"attn.3": 3 * page, "mamba.1": state}
