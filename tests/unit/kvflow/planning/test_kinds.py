"""Every kind of cache between unlike engines, with real bytes, against a copy by coordinates.

The oracle knows what an attention backend knows: the views, and which heads a rank holds. It writes the bytes of a
whole model into one cache, and what a copy of them should have made of the other into a third.
"""

import ctypes
import zlib
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from kvflow.layout.groups import Group
from kvflow.layout.shards import Shard
from kvflow.layout.specs import ITEM_BYTES, MLA, Mamba, State
from kvflow.memory.cache import allocate
from kvflow.planning.certificate import Missing
from kvflow.planning.pairs import pair_units
from kvflow.planning.plan import plan_transfer
from tests.helpers.loops import looped

from .helpers import binding_of, full, ids, sliding

NUM_TOKENS = 192
"""A multiple of every block size here, so that every byte of a block means something."""

STATES = (
    State("conv_x", (6, 3), "float16"),
    State("conv_B", (5, 3), "float16", shard_axis=None),
    State("conv_C", (3, 8), "bfloat16", shard_axis=1),
    State("ssm", (4, 3, 2), "float32"),
)


def mamba(states=STATES, **fields):
    return Mamba(**{"block_size": 16, "states": states} | fields)


@dataclass(frozen=True)
class Side:
    """How one rank keeps its cache.

    ``cells`` names, for layers with tokens, the bytes of one head of one token: of K and V, or of a latent.
    """

    specs: dict
    cells: dict
    layout: str = "BLHNC"
    kv: str = "content"
    tp: tuple[int, int] = (0, 1)
    groups: tuple[Group, ...] | None = None
    options: dict = field(default_factory=dict)

    def cache(self, num_blocks=16):
        shard = Shard(tp_rank=self.tp[0], tp_size=self.tp[1])
        return allocate(
            self.specs,
            num_blocks=num_blocks,
            layout=self.layout,
            kv=self.kv,
            groups=self.groups,
            shard=shard,
            **self.options,
        )

    def held(self, total):
        """Indices held of an axis that ranks divide, by the written rule."""
        rank, size = self.tp
        if total < size:
            return [rank * total // size]
        return [int(index) for index in np.array_split(np.arange(total), size)[rank]]


def model_bytes(layer, role, *shape):
    """What the whole model keeps of a request: bytes that depend on nothing but names and coordinates."""
    seed = zlib.crc32(f"{layer}.{role}".encode())
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def write(side, cache, block_ids, shared):
    """Write the request's bytes of what ``shared(total)`` names through the views."""
    for group, blocks in zip(cache.groups, block_ids, strict=True):
        for layer in group.layers:
            views, spec = cache.views[layer], side.specs[layer]
            if isinstance(spec, Mamba):
                for state, view in zip(spec.states, views, strict=True):
                    write_state(side, f"{layer}", state, view[blocks[-1]], shared)
                continue
            for role, cells in cells_of(side, cache, group, layer):
                heads = [0] if len(side.cells[layer]) == 1 else side.held(spec.num_kv_heads)
                total = 1 if len(side.cells[layer]) == 1 else spec.num_kv_heads
                wanted = [(at, head) for at, head in enumerate(heads) if head in shared(total)]
                content = model_bytes(layer, role, NUM_TOKENS, total, cells.shape[-1])
                for position, block in enumerate(blocks):
                    for kernel in range(cells.shape[1]):
                        tokens = cells.shape[3]
                        first = position * group.block_size + kernel * tokens
                        for at, head in wanted:
                            cells[block, kernel, at] = content[first : first + tokens, head]


def write_state(side, layer, state, block, shared):
    """Write one state of one block: ``block`` is ``[*shape held here]``."""
    item = ITEM_BYTES[state.dtype]
    content = model_bytes(layer, state.name, *state.shape, item)
    cells = block.view(torch.uint8).unflatten(-1, (-1, item))
    if state.shard_axis is None:
        cells.copy_(content)
        return
    total = state.shape[state.shard_axis]
    for at, index in enumerate(side.held(total)):
        if index in shared(total):
            cells.select(state.shard_axis, at).copy_(content.select(state.shard_axis, index))


def cells_of(side, cache, group, layer):
    """Yield each role with its bytes, ``[block, kernel block, head, token, byte]``, aliasing the cache."""
    view, sizes = cache.views[layer], side.cells[layer]
    spec = side.specs[layer]
    kernel_blocks = group.block_size // (spec.kernel_block_size or group.block_size)

    def by_kernel_block(tensor, *, dims):
        tensor = tensor.view(torch.uint8)
        return tensor if tensor.dim() == dims + 1 else tensor.unflatten(0, (-1, kernel_blocks))

    if len(sizes) == 1:
        yield "latent", by_kernel_block(view, dims=3).unsqueeze(2)
        return
    if side.kv == "content":
        whole = by_kernel_block(view, dims=4)
        keys = sizes["k"]
        yield "k", whole[..., :keys]
        yield "v", whole[..., keys:]
        return
    for role, tensor in zip("kv", view, strict=True):
        yield role, by_kernel_block(tensor, dims=4).transpose(2, 3)


def execute(plan, source, target, source_ids, target_ids):
    """Carry a plan out, one ``memmove`` per descriptor."""
    theirs, ours = source.manifest(), target.manifest()
    for index, group in enumerate(plan.groups):
        binding = binding_of(plan, theirs, ours, index)
        pairs = pair_units(
            group, ids(*source_ids[group.source_group]), ids(*target_ids[group.target_group]), num_tokens=NUM_TOKENS
        )
        bound = binding.bind(pairs, chunk_bytes=1 << 30, chunk_descriptors=1 << 20)
        there, here = spelled_out(binding.source.table), spelled_out(binding.target.table)
        for source_index, target_index in zip(bound.source_index, bound.target_index, strict=True):
            (at, nbytes), (to, length) = there[source_index], here[target_index]
            assert nbytes == length
            assert 0 <= at - source.backing.data_ptr() <= source.backing.nbytes - nbytes
            assert 0 <= to - target.backing.data_ptr() <= target.backing.nbytes - nbytes
            ctypes.memmove(to, at, nbytes)


def spelled_out(table):
    """Address and length of every descriptor, in order."""
    return [
        (address + number * stride, nbytes)
        for address, nbytes, _, stride, count in table.tolist()
        for number in range(count)
    ]


def listed(cache, seed):
    """Block ids at random places, one list per group; none is used twice."""
    counts = [1 if group.kind == "mamba" else -(-NUM_TOKENS // group.block_size) for group in cache.groups]
    order = np.random.default_rng(seed).permutation(cache.num_blocks)
    return [order[sum(counts[:index]) :][:count].tolist() for index, count in enumerate(counts)]


def require_right_bytes(sources, target_side):
    """Pull from every source into one target, and compare the whole allocation with what it should be."""
    target, expected = target_side.cache(40), target_side.cache(40)
    noise = np.random.default_rng(7).integers(0, 256, target.backing.nbytes, np.uint8)
    for cache in (target, expected):
        cache.backing.copy_(torch.from_numpy(noise))
    target_ids = listed(target, 1)
    plans = []
    for seed, side in enumerate(sources, start=2):
        source = side.cache(40)
        source_ids = listed(source, seed)
        write(side, source, source_ids, range)
        before = source.backing.clone()
        plans.append(plan_transfer(source.manifest(), target.manifest()))
        execute(plans[-1], source, target, source_ids, target_ids)
        assert torch.equal(source.backing, before)
        write(target_side, expected, target_ids, lambda total, side=side: set(side.held(total)))
    assert not torch.equal(target.backing, torch.from_numpy(noise))
    assert torch.equal(target.backing, expected.backing)
    return plans


ATTENTION = {"k": 16, "v": 16}


def attention(block_size=16, *, layers=2, cells=None, heads=4, **fields):
    """Specs and cells of a model of full attention."""
    specs = {f"a{index}": full(block_size, num_kv_heads=heads, **fields) for index in range(layers)}
    return specs, dict.fromkeys(specs, cells or ATTENTION)


def hybrid(block_size=16, **fields):
    """Two layers of attention, a window and two states."""
    specs = {
        "a0": full(block_size, num_kv_heads=4),
        "m0": mamba(block_size=block_size),
        "s0": sliding(block_size, num_kv_heads=4),
        "m1": mamba(block_size=block_size),
        "a1": full(block_size, num_kv_heads=4),
    }
    return specs, dict.fromkeys(("a0", "s0", "a1"), ATTENTION)


def latents(block_size, **fields):
    spec = MLA(block_size=block_size, head_size=16, dtype="uint8", rope_size=4, rope_dtype="bfloat16", **fields)
    return {"l0": spec, "l1": spec}, {"l0": {"latent": 24}, "l1": {"latent": 24}}


KERNELS = {"kernel_block_size": 16}
FP8 = {"dtype": "float8_e4m3fn", "quantization": "fp8_per_token_head", "cells": {"k": 12, "v": 12}}
NVFP4 = {
    "dtype": "uint8", "quantization": "nvfp4", "head_size": 32, "head_size_v": 64, "cells": {"k": 18, "v": 36}
}  # fmt: skip
UNEQUAL = {"head_size_v": 4, "cells": {"k": 16, "v": 8}}
SCALED = {"scale_bytes": 4}

PAIRS = {
    "kernel blocks of 16 in 64, alone, to blocks of 16": (
        Side(*attention(64, **KERNELS), layout="LBNHC"), Side(*attention(16), layout="LBNHC")
    ),
    "kernel blocks of 16 in 64, in rows, to blocks of 16": (
        Side(*attention(64, **KERNELS)), Side(*attention(16), layout="BHLNC")
    ),
    "blocks of 16 to kernel blocks of 16 in 64": (
        Side(*attention(16), layout="LBHNC", kv="split"), Side(*attention(64, **KERNELS))
    ),
    "kernel blocks of 16 in 64 to blocks of 48": (
        Side(*attention(64, **KERNELS)), Side(*attention(48), layout="BLNHC")
    ),
    "blocks of 48 to kernel blocks of 16 in 64, apart": (
        Side(*attention(48), kv="split"), Side(*attention(64, **KERNELS), layout="LBNHC", kv="split")
    ),
    "kernel blocks of 16 in 64 to kernel blocks of 24 in 48": (
        Side(*attention(64, **KERNELS), layout="LBNHC"), Side(*attention(48, kernel_block_size=24))
    ),
    "kernel blocks of 24 in 48 to kernel blocks of 16 in 32": (
        Side(*attention(48, kernel_block_size=24)), Side(*attention(32, **KERNELS), kv="split")
    ),
    "pages that are padded to pages that are not": (
        Side(*attention(16, page_bytes=4000)), Side(*attention(16), layout="LBNHC")
    ),
    "pages that are not padded to pages that are": (
        Side(*attention(32), layout="BHLNC"), Side(*attention(16, page_bytes=2200), layout="LBHNC", kv="split")
    ),
    "padded kernel blocks to others": (
        Side(*attention(64, page_bytes=9000, **KERNELS), layout="LBNHC"),
        Side(*attention(32, page_bytes=5000, **KERNELS)),
    ),
    "a layer apart and aligned rows to neither": (
        Side(*attention(16, layers=3), options={"apart": ["a1"], "alignment": 512}),
        Side(*attention(48, layers=3), layout="BLNHC"),
    ),
    "neither to two layers apart": (
        Side(*attention(16, layers=3)),
        Side(*attention(16, layers=3), options={"apart": ["a2", "a0"], "alignment": 4096}),
    ),
    "scales per head and token": (
        Side(*attention(16, **FP8)), Side(*attention(64, **FP8, **KERNELS), layout="LBNHC", kv="split")
    ),
    "scales per head and token of other ranks": (
        Side(*attention(16, **FP8), kv="split"), Side(*attention(32, **FP8), tp=(1, 2))
    ),
    "two elements in a byte": (
        Side(*attention(16, **NVFP4), kv="split"), Side(*attention(16, **NVFP4), layout="LBNHC")
    ),
    "two elements in a byte of other ranks": (
        Side(*attention(16, **NVFP4), layout="LBNHC"),
        Side(*attention(48, **NVFP4), layout="BLNHC", kv="split", tp=(2, 3)),
    ),
    "values of another size, beside to apart": (
        Side(*attention(16, **UNEQUAL), layout="LBNHC"), Side(*attention(16, **UNEQUAL), layout="LBHNC", kv="split")
    ),
    "values of another size, apart to beside": (
        Side(*attention(64, **UNEQUAL), layout="BHLNC", kv="split"), Side(*attention(16, **UNEQUAL), tp=(0, 2))
    ),
    "latents of other blocks": (
        Side(*latents(64, **SCALED, **KERNELS)), Side(*latents(48, **SCALED), layout="LBNHC")
    ),
    "latents of other ranks": (
        Side(*latents(16, **SCALED), tp=(1, 2)), Side(*latents(64, **SCALED), tp=(0, 4), layout="LBNHC", kv="split")
    ),
    "states of all ranks to the first of two": (Side(*hybrid()), Side(*hybrid(), tp=(0, 2))),
    "states of all ranks to the second of two": (
        Side(*hybrid(), layout="LBNHC"), Side(*hybrid(), layout="BLNHC", tp=(1, 2))
    ),
    "states in rows to states in tensors": (Side(*hybrid()), Side(*hybrid(64), layout="LBNHC", kv="split")),
    "states in tensors to states in rows": (Side(*hybrid(32), layout="LBHNC"), Side(*hybrid(16), layout="BHLNC")),
    "the second of two to the third of four": (Side(*hybrid(), tp=(1, 2)), Side(*hybrid(), tp=(2, 4))),
}  # fmt: skip


@looped("name", PAIRS)
def test_one_source_fills_the_target(name):
    source, target = PAIRS[name]
    (plan,) = require_right_bytes([source], target)
    assert plan.certificate.complete
    assert plan.certificate.written_bytes == plan.certificate.page_bytes


DIVIDED = tuple(state for state in STATES if state.shard_axis is not None)


def divided(block_size=16):
    """A window and two layers of states, of which no rank holds what another one has as well."""
    specs = {
        "s0": sliding(block_size, num_kv_heads=4),
        "m0": mamba(DIVIDED, block_size=block_size),
        "m1": mamba(DIVIDED, block_size=block_size),
    }
    return specs, {"s0": ATTENTION}


@pytest.mark.parametrize(
    ("ranks", "needed", "target"),
    [
        (2, (0, 1), Side(*divided(), layout="LBNHC")),
        (3, (0, 1, 2), Side(*divided(48))),
        (4, (1, 2, 3), Side(*divided(), tp=(1, 2))),  # of conv_x, rank 1 of 4 holds rows 2 and 3 of six
    ],
)
def test_several_ranks_fill_the_states_of_one(ranks, needed, target):
    """Each writes its own slice, along whatever axis: together everything, and nothing twice."""
    sources = [Side(*divided(), tp=(rank, ranks)) for rank in range(ranks)]
    plans = require_right_bytes([sources[rank] for rank in needed], target)
    assert sum(plan.certificate.written_bytes for plan in plans) == plans[0].certificate.page_bytes
    assert not any(plan.certificate.complete for plan in plans)


def test_a_certificate_names_the_slices_of_states_that_a_rank_lacks():
    source, target = (Side(*hybrid(), tp=tp).cache().manifest() for tp in ((1, 2), (0, 1)))
    missing = plan_transfer(source, target).certificate.missing
    assert [gap for gap in missing if gap.layer == "m0"] == [
        Missing("m0", "conv_x", 0, 3, "slices"),  # conv_B is whole on every rank
        Missing("m0", "conv_C", 0, 4, "slices"),
        Missing("m0", "ssm", 0, 2, "slices"),
    ]


@looped(
    "source, target, runs, consecutive",
    [
        # Alone, kernel blocks are blocks of 16: whatever the block tables say, neighbors merge.
        (Side(*attention(64, **KERNELS), layout="LBNHC"), Side(*attention(16), layout="LBNHC"), 2, 2),
        (Side(*attention(16), layout="LBNHC"), Side(*attention(64, **KERNELS), layout="LBNHC"), 2, 2),
        # In rows another layer lies between one block's last kernel block and the next one's first.
        (Side(*attention(64, **KERNELS)), Side(*attention(64, **KERNELS)), 2, 24),
        (Side(*attention(64, layers=1, **KERNELS)), Side(*attention(64, layers=1, **KERNELS)), 1, 1),
        # Padding stands between blocks, or nothing does.
        (Side(*attention(16, page_bytes=4096)), Side(*attention(16)), 2, 24),
        # States of one layer touch where no padding aligns them.
        (Side({"m": mamba()}, {}), Side({"m": mamba()}, {}), 2, 2),
    ],
)
def test_runs_merge_as_far_as_both_sides_are_dense(source, target, runs, consecutive):
    plan = plan_transfer(source.cache().manifest(), target.cache().manifest())
    (group,) = plan.groups
    blocks = 12 * 16 // (group.unit_tokens * group.target_units) if group.unit_tokens else 1
    assert len(group.runs) == runs
    assert plan.descriptors(blocks, consecutive=True) == consecutive
