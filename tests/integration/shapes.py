"""Caches of many shapes for one small model, and bytes that say whose they are.

Every content byte is a function of (request, layer, role, head, token, byte), whatever the layout, the block size or
the shard, so that a byte from another request, block or token is seen to be wrong.
"""

import zlib
from functools import lru_cache

import numpy as np
import torch
from msgspec import Struct

import kvflow

torch.set_num_threads(1)  # the copies are small, and threads that spin for more take the cores of those who move bytes

UNTOUCHED = 0xEE
"""What a consumer's cache is filled with before anything is pulled."""


def whole(cache, block_ids, num_tokens):
    """Name the absent blocks of groups of which a request lists none: an offer lists all that the next token needs."""
    absent = [[-1] * kvflow.window_blocks(group, num_tokens) for group in cache.groups]
    return [ids or blank for ids, blank in zip(block_ids, absent, strict=True)]


class Shape(Struct, frozen=True, kw_only=True):
    """A model and how one rank keeps its cache: half of the layers attend to everything, half to a window."""

    layout: str = "BLHNC"
    kv: str = "content"
    num_blocks: int = 32
    block_size: int = 4
    heads: int = 4
    head_size: int = 8
    dtype: str = "bfloat16"
    layers: int = 4
    window: int = 8
    prefix: str = "layers"
    window_first: bool = False
    tp_rank: int = 0
    tp_size: int = 1

    def build(self):
        """Allocate it, every byte ``UNTOUCHED``."""
        cache = self.allocate()
        cache.backing.fill_(UNTOUCHED)
        return cache

    def allocate(self):
        """Allocate it, every byte 0."""
        common = {
            "block_size": self.block_size,
            "num_kv_heads": self.heads,
            "head_size": self.head_size,
            "dtype": self.dtype,
        }
        kinds = [kvflow.FullAttention(**common), kvflow.SlidingWindow(**common, window=self.window)]
        order = sorted(range(self.layers), key=lambda layer: (layer + self.window_first) % 2)
        specs = {f"{self.prefix}.{layer}": kinds[layer % 2] for layer in order}
        return kvflow.allocate(
            specs,
            num_blocks=self.num_blocks,
            layout=self.layout,
            kv=self.kv,
            shard=kvflow.Shard(tp_rank=self.tp_rank, tp_size=self.tp_size),
        )


def write(cache, request, block_ids, num_tokens):
    """Fill the blocks of a request with its tags."""
    for _, content, ids, tags, _ in _parts(cache, request, block_ids, num_tokens):
        content[ids] = tags


def wrong(cache, request, block_ids, num_tokens):
    """List the components in which a block of a request holds another byte than its tag; past its end anything goes."""
    names = []
    for name, content, ids, tags, past_the_end in _parts(cache, request, block_ids, num_tokens):
        differ = content[ids] != tags
        if past_the_end:
            differ[-1, :, -past_the_end:] = False
        if differ.any():
            names.append(name)
    return names


def touched(cache, *, but=()):
    """List blocks with a byte that somebody has written, except those named in the lists ``but``."""
    named = {block for ids in but for block in ids}
    blocks = set()
    for group in cache.groups:
        for layer in group.layers:
            for role in "kv":
                content = cache.component(layer, role).view(torch.uint8)
                blocks |= set(torch.nonzero((content != UNTOUCHED).flatten(1).any(1)).flatten().tolist())
    return sorted(blocks - named)


def _parts(cache, request, block_ids, num_tokens):
    """Yield every component's name, bytes, present ids, their tags, and how many tokens of the last are not real."""
    for group, ids in zip(cache.groups, block_ids, strict=True):
        last = -(-num_tokens // group.block_size)
        listed = torch.tensor(ids, dtype=torch.int64)
        present = listed >= 0
        past_the_end = -num_tokens % group.block_size if len(ids) and present[-1] else 0
        for layer in group.layers:
            for role in "kv":
                content = cache.component(layer, role).view(torch.uint8)
                heads = cache.held(layer, role)[:2]
                extents = (group.block_size, content.shape[-1])
                tags = _tags(f"{request}/{layer}/{role}", heads, (last - len(ids), len(ids)), extents)
                yield f"{layer}.{role}", content, listed[present], tags[present], past_the_end


@lru_cache(maxsize=256)
def _tags(name, heads, blocks, extents):
    """Mix the coordinates so that neighbors differ in every byte: uint8, [block, head, token, byte]."""
    (first_head, num_heads), (first_block, num_blocks), (block_size, nbytes) = heads, blocks, extents
    block, head, token, byte = np.ogrid[
        first_block : first_block + num_blocks, first_head : first_head + num_heads, :block_size, :nbytes
    ]
    token = block * block_size + token
    mixed = zlib.crc32(name.encode()) + head * 0x9E3779B1 + token * 0x85EBCA6B + byte * 0xC2B2AE35
    mixed &= 0xFFFFFFFF
    mixed ^= mixed >> 15
    mixed = (mixed * 0x2C1B3C6D) & 0xFFFFFFFF
    return torch.from_numpy(((mixed >> 16) & 0xFF).astype(np.uint8))
