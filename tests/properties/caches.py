"""Random pairs of caches, and an oracle that knows only what an attention backend knows: ``cache.views``.

The oracle computes head ranges, token coverage and byte positions by itself. It shares no code with
``component()``, ``held()``, the manifest or the planner.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from kvflow.layout.groups import Group
from kvflow.layout.shards import Shard
from kvflow.layout.specs import ITEM_BYTES, FullAttention, SlidingWindow
from kvflow.leases.blocks import check_block_ids
from kvflow.memory.cache import KVCache, allocate
from kvflow.planning.bind import Binding
from kvflow.planning.pairs import pair_units

LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC")
BLOCK_SIZES = (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64)
ROLES = ("k", "v")
ABSENT = -1


def thoroughly(examples, *, least=1, **more):
    """What a property runs with: so many examples, or a quarter where Hypothesis has the profile of ``make test``.

    ``least``: of a state machine that finds planted bugs with a quarter only now and then.
    """
    return settings(
        max_examples=max(least, -(-examples * settings.default.max_examples // 100)),
        print_blob=True,
        phases=[each for each in settings.default.phases if each != Phase.explain],  # that takes minutes
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        **more,
    )


thorough = thoroughly(100)


@dataclass(frozen=True)
class Model:
    """What both engines serve: heads and head sizes, and which layers slide."""

    sliding: tuple[bool, ...]
    heads: int
    head_size: int
    dtype: str
    sliding_heads: int
    sliding_head_size: int
    sliding_blocks_by: int

    @property
    def layers(self):
        return tuple(f"model.layers.{index}.attn" for index in range(len(self.sliding)))

    def spec(self, layer, block_size):
        if not self.sliding[self.layers.index(layer)]:
            return FullAttention(
                block_size=block_size, num_kv_heads=self.heads, head_size=self.head_size, dtype=self.dtype
            )
        return SlidingWindow(
            block_size=block_size * self.sliding_blocks_by,
            num_kv_heads=self.sliding_heads,
            head_size=self.sliding_head_size,
            dtype=self.dtype,
            window=100,
        )


@dataclass(frozen=True)
class Side:
    """How one rank keeps the model, or some layers of it."""

    specs: dict
    groups: tuple[Group, ...] | None
    layout: str
    kv: str
    tp_rank: int
    tp_size: int

    def cache(self, num_blocks) -> KVCache:
        shard = Shard(tp_rank=self.tp_rank, tp_size=self.tp_size)
        return allocate(
            self.specs, num_blocks=num_blocks, layout=self.layout, kv=self.kv, groups=self.groups, shard=shard
        )

    def heads(self, layer):
        """Global numbers of the heads held here, by the written rule."""
        total = self.specs[layer].num_kv_heads
        if total < self.tp_size:
            return [self.tp_rank * total // self.tp_size]
        return [int(head) for head in np.array_split(np.arange(total), self.tp_size)[self.tp_rank]]

    def cells(self, cache, layer, role, block):
        """One block of one role as bytes, ``[head held here, token, byte]``, aliasing the cache."""
        view, size = cache.views[layer], self.specs[layer].head_size
        index = ROLES.index(role)
        if self.kv == "content":
            cells = view[block, :, :, index * size : (index + 1) * size]
        else:
            cells = view[index, block].transpose(0, 1)
        return cells.view(torch.uint8)


@st.composite
def models(draw, *, mixed_heads=True):
    """One to eight layers; sliding ones may differ in everything that leaves the page's size alone."""
    sliding = tuple(draw(st.lists(st.booleans(), min_size=1, max_size=8)))
    heads, half = draw(st.integers(1, 6)), draw(st.integers(4, 32))
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    variants = [(heads, 2 * half, 1), (heads, half, 2)] + ([(2 * heads, half, 1)] if mixed_heads else [])
    return Model(sliding, heads, 2 * half, dtype, *draw(st.sampled_from(variants)))


@st.composite
def sides(draw, model, *, layers=None, tp_sizes=(1, 2, 3, 4)):
    """One rank of one engine that serves the model."""
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    specs = {name: model.spec(name, block_size) for name in layers or model.layers}
    tp_size = draw(st.sampled_from(tp_sizes))
    return Side(
        specs,
        draw(st.none() | _shuffled_groups(specs)),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(("content", "split"))),
        draw(st.integers(0, tp_size - 1)),
        tp_size,
    )


@st.composite
def _shuffled_groups(draw, specs):
    """Any partition into groups of like layers, in any order."""
    groups = []
    for spec in dict.fromkeys(specs.values()):
        names = draw(st.permutations([name for name in specs if specs[name] == spec]))
        size = draw(st.integers(1, len(names)))
        groups += [
            Group(tuple(names[first : first + size]), spec.kind, spec.block_size, spec.window)
            for first in range(0, len(names), size)
        ]
    return tuple(draw(st.permutations(groups)))


def tags(layer, role, heads, tokens, nbytes):
    """Bytes that name their own coordinates, ``[head, token, byte]``; eight neighboring bytes tell them apart."""
    number = np.uint64(hash_of(layer, role)) + np.uint64(1 << 20) * np.asarray(heads, np.uint64)[:, None]
    number = (number + np.asarray(tokens, np.uint64)[None, :]) * np.uint64(0x9E3779B97F4A7C15)
    words = np.arange(-(-nbytes // 8), dtype=np.uint64)
    number = (number[:, :, None] ^ (words * np.uint64(0xD1B54A32D192ED03))).astype("<u8")
    return number.view(np.uint8)[:, :, :nbytes]


def hash_of(layer, role):
    return (int(layer.split(".")[2]) * 2 + ROLES.index(role)) << 32


def fill_with_noise(cache, seed):
    """Put something recognisably foreign everywhere."""
    noise = np.random.default_rng(seed).integers(0, 256, cache.backing.nbytes, np.uint8)
    cache.backing.copy_(torch.from_numpy(noise))


def write_tags(side, cache, block_ids, num_tokens, wanted):
    """Write what belongs into each listed block; ``wanted(layer)`` names the global heads to write."""
    for group, ids in zip(cache.groups, block_ids, strict=True):
        for block, first, count in spans(ids, group.block_size, num_tokens):
            for layer in group.layers:
                mine = side.heads(layer)
                heads = [head for head in mine if head in wanted(layer)]
                at = [mine.index(head) for head in heads]
                for role in ROLES:
                    cells = side.cells(cache, layer, role, block)
                    values = tags(layer, role, heads, range(first, first + count), cells.shape[-1])
                    cells[at, :count] = torch.from_numpy(values.copy())


def mark_free(side, cache, block_ids, num_tokens):
    """Write 255 where a listed block holds no token: what lands there means nothing."""
    for group, ids in zip(cache.groups, block_ids, strict=True):
        for block, _, count in spans(ids, group.block_size, num_tokens):
            for layer in group.layers:
                for role in ROLES:
                    side.cells(cache, layer, role, block)[:, count:] = 255


def spans(ids, block_size, num_tokens):
    """Yield block id, first token and number of tokens of each block that is there."""
    in_all = -(-num_tokens // block_size)
    for position, block in enumerate(ids, start=in_all - len(ids)):
        if block != ABSENT:
            yield block, position * block_size, min(block_size, num_tokens - position * block_size)


def execute(plan, source, target, *, source_ids, target_ids, num_tokens):
    """Carry a plan out, one ``memmove`` per descriptor."""
    theirs, ours = source.manifest(), target.manifest()
    for group, binding in zip(plan.groups, bindings(plan, theirs, ours), strict=True):
        sources = check_block_ids(
            source_ids, num_blocks=theirs.num_blocks, aliases=range(len(theirs.groups)), unique=False
        )
        targets = check_block_ids(target_ids, num_blocks=ours.num_blocks, aliases=range(len(ours.groups)), unique=True)
        pairs = pair_units(group, sources[group.source_group], targets[group.target_group], num_tokens=num_tokens)
        if not len(pairs.source):
            continue
        source_at, target_at, lengths = places(binding, pairs, theirs, ours)
        for to, at, nbytes in zip(target_at.tolist(), source_at.tolist(), lengths.tolist(), strict=True):
            ctypes.memmove(to, at, nbytes)


def places(binding, pairs, theirs, ours):
    """Return where the descriptors of these pairs lie in both caches, within what is registered, and their lengths."""
    bound = binding.bind(pairs, chunk_bytes=1 << 23, chunk_descriptors=256)
    assert bound.source_index.dtype == bound.target_index.dtype == np.int32
    source_at, lengths = descriptors(binding.source.table, bound.source_index)
    target_at, target_lengths = descriptors(binding.target.table, bound.target_index)
    assert np.array_equal(lengths, target_lengths)
    assert lengths.sum() == bound.nbytes
    require_inside(source_at, lengths, theirs.regions)
    require_inside(target_at, lengths, ours.regions)
    return source_at, target_at, lengths


def bindings(plan, source, target):
    """Bind every group of a plan to the addresses of two manifests."""
    return [Binding(group, source, target) for group in plan.groups]


def descriptors(table, index):
    """Address and length of each numbered descriptor: numbers run through the rows in order."""
    firsts = np.cumsum(table[:, 4]) - table[:, 4]
    row = np.searchsorted(firsts, index, side="right") - 1
    within = index - firsts[row]
    assert np.all(within < table[row, 4]), "an index that no descriptor has"
    return table[row, 0] + within * table[row, 3], table[row, 1]


def require_inside(addresses, lengths, regions):
    """Each descriptor lies in one region; regions are sorted by address."""
    starts = np.array([region.address for region in regions])
    ends = np.array([region.address + region.nbytes for region in regions])
    assert np.all(addresses >= starts[0])
    assert np.all(addresses + lengths <= ends[np.searchsorted(starts, addresses, side="right") - 1])
