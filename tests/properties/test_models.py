"""Generated models of every kind: live blocks never share a byte, and every byte of a view belongs to its layer."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

from kvflow.errors import SpecInvalid
from kvflow.layout.placement import KV_FORMS, LAYOUTS
from kvflow.layout.shards import Shard
from kvflow.layout.specs import (
    MLA,
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    Mamba,
    Opaque,
    SlidingWindow,
    State,
)
from kvflow.memory.cache import allocate

from .caches import thoroughly

many = thoroughly(250)
NUM_BLOCKS = 3
CELLS = {  # quantization -> dtypes it goes with
    None: ("float16", "bfloat16", "float32", "float8_e4m3fn"),
    "fp8_per_token_head": ("float8_e4m3fn", "int8"),
    "nvfp4": ("uint8",),
}


@st.composite
def attention(draw, block_size):
    kind, more = draw(
        st.sampled_from(
            [
                (FullAttention, {}),
                (CrossAttention, {}),
                (SlidingWindow, {"window": 40}),
                (ChunkedLocal, {"chunk": 64}),
            ]
        )
    )
    quantization = draw(st.sampled_from([None, None, *CELLS]))
    sizes = (16, 32) if quantization == "nvfp4" else (1, 3, 8, 16)
    return kind(
        block_size=block_size,
        kernel_block_size=draw(st.sampled_from([0, 0, block_size, block_size // 2])),
        num_kv_heads=draw(st.integers(1, 5)),
        head_size=draw(st.sampled_from(sizes)),
        head_size_v=draw(st.sampled_from([0, 0, *sizes])),
        dtype=draw(st.sampled_from(CELLS[quantization])),
        quantization=quantization,
        **more,
    )


@st.composite
def latent(draw, block_size):
    return MLA(
        block_size=block_size,
        kernel_block_size=draw(st.sampled_from([0, 0, block_size, block_size // 2])),
        head_size=draw(st.integers(1, 20)),
        dtype=draw(st.sampled_from(CELLS[None])),
        rope_size=draw(st.sampled_from([0, 4])),
        rope_dtype=draw(st.sampled_from([None, "bfloat16"])),
        scale_bytes=draw(st.sampled_from([0, 8])),
        sliding_window=draw(st.sampled_from([0, 24])),
    )


@st.composite
def recurrent(draw, block_size):
    states = [
        State(
            name,
            tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))),
            draw(st.sampled_from(["float32", "bfloat16", "int8"])),
            shard_axis=draw(st.sampled_from([0, None])),
        )
        for name in ("conv_x", "conv_B", "ssm")[: draw(st.integers(1, 3))]
    ]
    return Mamba(block_size=block_size, states=tuple(states))


@st.composite
def models(draw):
    """Up to three kinds of layers, each up to four times, in a random order; some pages are padded."""
    block_size = draw(st.sampled_from([2, 4, 16]))
    kinds = [attention(block_size), latent(block_size), recurrent(block_size)]
    specs = [draw(st.one_of(kinds)) for _ in range(draw(st.integers(1, 3)))]
    if draw(st.booleans()):
        specs.append(Opaque(block_size=block_size, nbytes=draw(st.integers(1, 100))))
    repeated = [spec for spec in specs for _ in range(draw(st.integers(1, 4)))]
    return {f"layers.{index}": spec for index, spec in enumerate(draw(st.permutations(repeated)))}


@st.composite
def caches(draw):
    """A model as one rank keeps it; those that cannot be grouped are left out."""
    specs = draw(models())
    tp_size = draw(st.integers(1, 6))
    options = {
        "num_blocks": NUM_BLOCKS,
        "layout": draw(st.sampled_from(LAYOUTS)),
        "kv": draw(st.sampled_from(KV_FORMS)),
        "shard": Shard(tp_rank=draw(st.integers(0, tp_size - 1)), tp_size=tp_size),
        "apart": tuple(draw(st.sets(st.sampled_from(sorted(specs)), max_size=1))),
        "alignment": draw(st.sampled_from([1, 1, 64])),
    }
    try:
        return allocate(specs, **options)
    except SpecInvalid:
        reject()


def bytes_of(component, kernel_blocks):
    """Byte numbers of one component, shape (blocks, bytes of a page), element by element."""
    inside = np.zeros(1, np.int64)
    axes = [(kernel_blocks, component.kernel_stride), *zip(component.extents, component.strides, strict=True)]
    for extent, stride in [*axes, (component.item_bytes, 1)]:
        inside = (inside[:, None] + np.arange(extent) * stride).ravel()
    blocks = np.arange(NUM_BLOCKS) * component.block_stride
    return component.offset + blocks[:, None] + inside


@many
@given(caches())
def test_pages_of_live_blocks_are_disjoint_and_inside(cache):
    nbytes = cache.backing.nbytes
    assert nbytes == NUM_BLOCKS * cache.bytes_per_block
    owners = []
    for group in cache.manifest().groups:
        owner = np.full(nbytes, -1)
        for layer in group.layers:
            for component in layer.components:
                numbers = bytes_of(component, group.kernel_blocks)
                assert 0 <= numbers.min() <= numbers.max() < nbytes
                assert numbers.size == NUM_BLOCKS * group.kernel_blocks * component.nbytes
                assert (owner[numbers] == -1).all(), "two components of one group share a byte"
                owner[numbers] = np.arange(NUM_BLOCKS)[:, None]
        owners.append(owner)
    for one, other in pairwise(owners):
        both = (one >= 0) & (other >= 0)
        assert (one[both] == other[both]).all(), "a byte belongs to different blocks of two groups"


@many
@given(caches(), st.integers(0, 255))
def test_views_and_components_are_the_same_bytes(cache, seed):
    """Write noise through the views, layer by layer: it is found in the components, and nowhere else."""
    rng = np.random.default_rng(seed)
    for group in cache.manifest().groups:
        cache.backing.zero_()
        free = np.ones(cache.backing.nbytes, bool)
        for layer in group.layers:
            for component in layer.components:
                free[bytes_of(component, group.kernel_blocks)] = False
            views = cache.views[layer.name]
            for view in views if isinstance(views, list) else [views]:
                noise = rng.integers(1, 256, (*view.shape[:-1], view.shape[-1] * view.element_size()), np.uint8)
                view.copy_(torch.from_numpy(noise).view(view.dtype))
        written = cache.backing.numpy() != 0
        # Only the gap that aligns the cells of unequal dtypes may be written by a view of bytes, and by nothing else.
        assert written[~free].all()
        for layer in group.layers:
            for component in layer.components:
                tensor = cache.component(layer.name, component.role)
                assert tensor.numel() * tensor.element_size() == NUM_BLOCKS * group.kernel_blocks * component.nbytes
                assert list(tensor.shape[-len(component.extents) :]) == list(component.extents)


@many
@given(models(), st.integers(1, 9))
def test_ranks_together_hold_every_head(specs, tp_size):
    for spec in specs.values():
        for part in spec.components:
            if part.shard_axis < 0:
                continue
            total = part.shape[part.shard_axis]
            ranges = [Shard(tp_rank=rank, tp_size=tp_size).heads(total) for rank in range(tp_size)]
            holders = defaultdict(list)
            for rank, held in enumerate(ranges):
                assert 0 <= held.first <= held.first + held.count <= held.total == total
                for head in range(held.first, held.first + held.count):
                    holders[head].append(rank)
            assert holders.keys() == set(range(total))
            if total >= tp_size:
                assert all(len(ranks) == 1 for ranks in holders.values())
                assert max(held.count for held in ranges) - min(held.count for held in ranges) <= 1
            else:
                assert all(held.count == 1 for held in ranges)
