"""Tensors as vLLM 0.32 registers them: shapes, strides (in elements) and offsets (in bytes) of real engines.

They were read from CPU engines of small models; the numbers of blocks are smaller here.
"""

from dataclasses import dataclass

import pytest
import torch

import kvflow
from kvflow.layout.groups import Group


@dataclass(frozen=True)
class Registered:
    """One layer's tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    dtype: torch.dtype = torch.bfloat16

    def over(self, backing):
        """View the backing, which is a flat int8 tensor."""
        typed = backing.view(self.dtype)
        return typed.as_strided(self.shape, self.strides, self.offset // self.dtype.itemsize)


def attention(kind=kvflow.FullAttention, block_size=128, **fields):
    return kind(block_size=block_size, num_kv_heads=2, head_size=64, dtype="bfloat16", **fields)


def sliding(window, block_size=128):
    return attention(kvflow.SlidingWindow, block_size, window=window)


def recurrent(conv, ssm, padded):
    states = (kvflow.State("conv", conv, "bfloat16", shard_axis=0), kvflow.State("ssm", ssm, "float32"))
    return kvflow.Mamba(block_size=16, states=states, page_bytes=padded)


def raw(blocks, nbytes, stride):
    return Registered((blocks, 1, 1, nbytes), (stride, nbytes, nbytes, 1), dtype=torch.int8)


PAGE = 2 * 128 * 128 * 2
"""Bytes of a page of 128 tokens with two heads of 64 elements of keys and as many of values."""

LLAMA = {f"layers.{index}": attention() for index in range(4)}
GEMMA = {f"layers.{index}": attention() if index == 5 else sliding(64) for index in range(6)}
GEMMA_GROUPS = [
    Group((name,), spec.kind, 128, spec.window) for name, spec in sorted(GEMMA.items(), key=lambda item: item[1].kind)
]
GPT_OSS = {f"layers.{index}": attention() if index % 2 else sliding(128) for index in range(4)}
GPT_OSS_GROUPS = [
    Group(("layers.0", "layers.2"), "sliding", 128, 128),
    Group(("layers.1", "layers.3"), "full", 128),
]
QWEN = {f"layers.{index}": recurrent((512, 3), (4, 64, 64), 131072) for index in range(3)} | {
    "layers.3": attention(block_size=256)
}
GRANITE = {f"layers.{index}": recurrent((640, 3), (8, 64, 64), 196608) for index in range(3)} | {
    "layers.3": attention(block_size=384)
}


def one_by_one(specs):
    return [Group((name,), spec.kind, spec.block_size, spec.window) for name, spec in specs.items()]


def tensors_of(specs, block_stride, head_stride, offsets):
    """Attention of two heads and 128 tokens, each layer at its offset."""
    strides = (block_stride, head_stride, 128, 1)
    return {name: Registered((8, 2, 128, 128), strides, offset) for name, offset in zip(specs, offsets, strict=True)}


def states_and_attention(specs, page, attention_page):
    *recurrent_names, name = specs
    return dict.fromkeys(recurrent_names, page) | {name: attention_page}


# Name -> specs, groups, tensors, bytes of the backing per block. There are 8 blocks.
TABLE = {
    "llama LBHNC": (LLAMA, None, tensors_of(LLAMA, 32768, 16384, [at * 8 * PAGE for at in range(4)]), 4 * PAGE),
    "llama BLHNC": (LLAMA, None, tensors_of(LLAMA, 131072, 16384, [at * 65536 for at in range(4)]), 4 * PAGE),
    "llama BHLNC": (LLAMA, None, tensors_of(LLAMA, 131072, 65536, [at * 32768 for at in range(4)]), 4 * PAGE),
    "gemma3": (GEMMA, GEMMA_GROUPS, tensors_of(GEMMA, 32768, 16384, [0] * 6), PAGE),
    "gptoss": (GPT_OSS, GPT_OSS_GROUPS, tensors_of(GPT_OSS, 32768, 16384, [0, 0, 8 * PAGE, 8 * PAGE]), 2 * PAGE),
    "gptoss BLHNC": (GPT_OSS, GPT_OSS_GROUPS, tensors_of(GPT_OSS, 65536, 16384, [0, 0, 65536, 65536]), 2 * PAGE),
    "qwen3next": (
        QWEN,
        one_by_one(QWEN),
        states_and_attention(QWEN, raw(8, 68608, 131072), Registered((8, 2, 256, 128), (65536, 32768, 128, 1))),
        131072,
    ),
    "granitehyb": (
        GRANITE,
        one_by_one(GRANITE),
        states_and_attention(GRANITE, raw(8, 134912, 196608), Registered((8, 2, 384, 128), (98304, 49152, 128, 1))),
        196608,
    ),
}


@pytest.fixture(params=TABLE)
def engine(request):
    """A cache that was adopted as one engine registers it, its specs, and the backing."""
    specs, groups, tensors, bytes_per_block = TABLE[request.param]
    backing = torch.zeros(8 * bytes_per_block, dtype=torch.int8)
    cache = kvflow.adopt({name: tensor.over(backing) for name, tensor in tensors.items()}, specs, groups)
    return cache, specs, backing


def test_the_backing_is_one_region(engine):
    """Padding behind the last page is nobody's, unless a layer without padding has the same bytes."""
    cache, _, backing = engine
    (region,) = cache.manifest().regions
    assert (region.address, region.nbytes) == (backing.data_ptr(), backing.nbytes)
    assert cache.num_blocks == 8
    assert cache.bytes_per_block == backing.nbytes // 8


def test_components_are_what_the_engine_calls_so(engine):
    cache, specs, backing = engine
    noise = torch.Generator().manual_seed(1)
    backing.copy_(torch.randint(-128, 128, backing.shape, dtype=torch.int8, generator=noise))
    for name, spec in specs.items():
        view = cache.views[name]
        if spec.kind != "mamba":
            found = torch.cat([cache.component(name, "k"), cache.component(name, "v")], -1)
            assert torch.equal(found.view(torch.int8), view.view(torch.int8))
            continue
        states = [cache.component(name, state.name) for state in spec.states]
        assert [tuple(state.shape) for state in states] == [(8, *state.shape) for state in spec.states]
        found = torch.cat([state.reshape(8, -1).view(torch.int8) for state in states], -1)
        assert torch.equal(found, view.reshape(8, -1))


def test_a_list_of_states_is_the_same_as_their_page():
    """At bind time the engine slices the page into a tensor per state; both are adopted alike."""
    backing = torch.zeros(8 * 131072, dtype=torch.int8)
    specs = {"layers.0": QWEN["layers.0"]}
    page = raw(8, 68608, 131072).over(backing)
    conv = Registered((8, 512, 3), (65536, 3, 1)).over(backing)
    ssm = Registered((8, 4, 64, 64), (32768, 4096, 64, 1), 3072, torch.float32).over(backing)
    by_page, by_list = (kvflow.adopt({"layers.0": given}, specs) for given in (page, [conv, ssm]))
    assert by_page.manifest() == by_list.manifest()
    tokens_first = Registered((8, 3, 512), (65536, 512, 1)).over(backing)  # the engine's default order of the axes
    conv = kvflow.adopt({"layers.0": [tokens_first, ssm]}, specs).component("layers.0", "conv")
    assert conv.stride()[1:] == (1, 512)


def test_of_states_alone_the_padding_behind_the_last_is_nobody_s():
    backing = torch.zeros(8 * 131072, dtype=torch.int8)
    cache = kvflow.adopt({"layers.0": raw(8, 68608, 131072).over(backing)}, {"layers.0": QWEN["layers.0"]})
    assert [region.nbytes for region in cache.manifest().regions] == [7 * 131072 + 68608]
