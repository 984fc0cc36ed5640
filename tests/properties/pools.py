"""Pools of blocks as ``oracle.Pool`` has them: allocated by kvflow, adopted, or in tensors of an engine's own."""

import math

import numpy as np
import torch

from kvflow.memory.adopt import adopt
from kvflow.memory.cache import allocate

from .oracle import ABSENT, Pool, keeps_every_token

ALIGNMENT = 4
"""Where an engine's tensors begin: as much as any element needs."""


def open_pool(stage, rank, model, rng, *, thinning):
    """Make a cache with room for one request in every group and some blocks more, full of noise, and list blocks.

    Args:
        stage: what the rank has in common with others.
        rank: its number.
        model: the request.
        rng: of places and noise.
        thinning: seed of which blocks are left out, which the ranks of an engine have in common; None: none are.
    """
    counts = [
        1
        if stage.layers[group.layers[0]].recurrent
        else math.ceil(
            model.tokens_of(group.layers[0]) / (group.block_size * (stage.dcp_size if keeps_every_token(group) else 1))
        )
        for group in stage.groups
    ]
    num_blocks = sum(counts) + int(rng.integers(0, 3))
    cache, memory = open_cache(stage, rank, num_blocks, rng)
    order = rng.permutation(num_blocks)
    if rng.random() < 0.3:
        order = np.sort(order)
    ids = [order[sum(counts[:index]) :][:count].tolist() for index, count in enumerate(counts)]
    if thinning is not None:
        leaving = np.random.default_rng(thinning)
        ids = [_thinned(blocks, leaving) for blocks in ids]
    memory[:] = rng.integers(0, 256, memory.shape, np.uint8)
    return Pool(stage, rank, cache, memory, ids)


def _thinned(blocks, rng):
    """Keep all, or the last few, and let some be absent; what is before token 0 is always absent."""
    if rng.random() < 0.35:
        blocks = blocks[rng.integers(0, len(blocks) + 1) :]
    if rng.random() < 0.25:
        blocks = [ABSENT if rng.random() < 0.3 else block for block in blocks]
    if rng.random() < 0.1:
        blocks = [ABSENT] * int(rng.integers(1, 3)) + blocks
    return blocks


def open_cache(stage, rank, num_blocks, rng):
    """Return a cache, and all its bytes as one flat array."""
    shard = stage.shard(rank)
    cache = allocate(
        stage.specs,
        num_blocks=num_blocks,
        layout=stage.layout,
        kv=stage.kv,
        groups=stage.groups,
        shard=shard,
        **stage.options,
    )
    if stage.memory == "allocated":
        return cache, cache.backing.numpy()
    views, memory = cache.views, cache.backing
    if stage.memory == "own":
        views, memory = _own_tensors(views, rng)
    forms = {name: form_of(stage, name, view) for name, view in views.items() if stage.layers[name].tokens}
    return adopt(views, stage.specs, stage.groups, shard=shard, axes=forms), memory.numpy()


def form_of(stage, layer, view):
    """Name the axes of a view, as ``adopt`` wants it."""
    dims = view[0].dim() if isinstance(view, list) else view.dim()
    if len(stage.layers[layer].planes) == 1:
        return "BNC" if dims == 3 else "BRNC"
    if stage.kv == "content":
        return "BHNC" if dims == 4 else "BRHNC"
    if isinstance(view, list):
        return "BNHC" if dims == 4 else "BRNHC"
    blocks = "B" if dims == 5 else "BR"
    return f"K{blocks}NHC" if stage.kv == "split" else f"{blocks}KNHC"


def _own_tensors(views, rng):
    """Return tensors of the same shapes, each dense in an order of axes of its own, with gaps between them."""
    flat = [tensor for view in views.values() for tensor in (view if isinstance(view, list) else [view])]
    sizes = [math.ceil(tensor.numel() * tensor.element_size() / ALIGNMENT) * ALIGNMENT for tensor in flat]
    gaps = rng.choice((0, 0, ALIGNMENT), len(flat))
    memory = torch.zeros(sum(sizes) + int(gaps.sum()), dtype=torch.uint8)
    made, at = [], 0
    for tensor, size, gap in zip(flat, sizes, gaps.tolist(), strict=True):
        order = [*rng.permutation(tensor.dim() - 1).tolist(), tensor.dim() - 1]
        strides, step = [0] * tensor.dim(), 1
        for axis in reversed(order):
            strides[axis] = step
            step *= tensor.shape[axis]
        there = memory[at + gap : at + gap + tensor.numel() * tensor.element_size()].view(tensor.dtype)
        made.append(there.as_strided(tensor.shape, strides))
        at += gap + size
    rest = iter(made)
    own = {name: [next(rest) for _ in view] if isinstance(view, list) else next(rest) for name, view in views.items()}
    return own, memory
