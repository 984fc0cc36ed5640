"""Every tensor parallelism of either side, every layout, every ratio of blocks: one hybrid model between all of them.

All ranks of the target pull, each in a turn of its own, from all ranks of the source.
"""

from functools import cache
from itertools import product

import numpy as np
import pytest

from kvflow.layout.groups import Group
from kvflow.layout.specs import State
from tests.properties.engines import KV_FORMS, LAYOUTS, Case, Stage, spec_of
from tests.properties.moves import require_pulled
from tests.properties.oracle import Kind, Model, Shared, write
from tests.properties.pools import open_pool

TP_SIZES = range(1, 9)
BLOCK_SIZES = (4, 6, 12)
NUM_TOKENS = 21


def kind(name, **fields):
    return Kind(name, tuple(fields.items()))


def attention(name, heads, **fields):
    return kind(name, num_kv_heads=heads, head_size=2, head_size_v=0, dtype="bfloat16", quantization=None, **fields)


FULL = attention("full", 5)  # five heads: uneven over two to four ranks, replicated over six to eight
SLIDING = attention("sliding", 8, window=16)
LATENT = kind("mla", head_size=3, dtype="bfloat16", rope_size=2, rope_dtype=None, scale_bytes=0, sliding_window=0)
RECURRENT = kind(
    "mamba",
    states=(
        State("conv_x", (7, 3), "bfloat16", 0),
        State("conv_B", (4, 2), "bfloat16", None),
        State("ssm", (6, 2, 2), "float32", 0),
    ),
)
LAYERS = {f"layers.{at}": each for at, each in enumerate((FULL, SLIDING, FULL, RECURRENT, LATENT, RECURRENT))}
MODEL = Model(LAYERS, NUM_TOKENS, 1)


def stage(tp_size, layout, kv, block_size):
    """How an engine keeps the model: a group per kind, in blocks of one size."""
    specs = {name: spec_of(each, block_size) for name, each in LAYERS.items()}
    groups = []
    for each in dict.fromkeys(LAYERS.values()):
        names = tuple(name for name in LAYERS if LAYERS[name] == each)
        groups.append(Group(names, each.name, block_size, specs[names[0]].window))
    return Stage(LAYERS, specs, tuple(groups), tp_size, layout, kv)


def open_engine(tp_size, layout, kv, block_size):
    """Return the pools of all ranks, each with blocks for the whole request."""
    rng = np.random.default_rng((tp_size, block_size))
    kept = stage(tp_size, layout, kv, block_size)
    return [open_pool(kept, rank, MODEL, rng, thinning=None) for rank in range(tp_size)]


open_target = cache(open_engine)


def engines(tp_sizes, turn):
    """Every layout and block size of every tensor parallelism; the form of keys and values changes with each turn."""
    return [
        (tp_size, layout, KV_FORMS[(tp_size + number + block_size // 4 + turn) % len(KV_FORMS)], block_size)
        for tp_size, (number, layout), block_size in product(tp_sizes, enumerate(LAYOUTS), BLOCK_SIZES)
    ]


@pytest.mark.timeout(0)
@pytest.mark.parametrize("source_size", TP_SIZES)
def test_every_tensor_parallelism_layout_and_block_size_to_every_other(source_size, share, progress):
    rng = np.random.default_rng(source_size)
    every = round(1 / share)
    sources = engines([source_size], 0)
    done = 0
    for turn, how in enumerate(sources):
        theirs = open_engine(*how)
        for pool in theirs:
            write(pool, MODEL, Shared(lambda _, total, pool=pool: pool.held(total)))
        # A third still has all parallelisms and layouts, with block sizes in turns.
        targets = engines(TP_SIZES, turn)[(turn + turn // len(BLOCK_SIZES)) % every :: every]
        for target in targets:
            for rank, ours in enumerate(open_target(*target)):
                ours.memory[:] = rng.integers(0, 256, ours.memory.shape, np.uint8)
                require_pulled(Case(MODEL, (), (), whole=True, turn=rank, seed=0), theirs, ours)
        done += len(targets)
        if (turn + 1) % len(BLOCK_SIZES) == 0:
            progress(f"{turn + 1} of {len(sources)} source engines, {done:,} pairs of engines")
