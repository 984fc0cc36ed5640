"""Combinations of engines that are proven between processes, by name: one for each way in which caches can differ.

``tests/properties/test_byte_copy.py`` and ``tests/exhaustive`` generate all others, and compare every byte in memory.
"""

from itertools import pairwise

import kvflow
from kvflow import models

from .combination import Combination
from .engines import Engine


def full(block_size=16, *, heads=8, layers=2, **fields):
    """Describe a model of full attention."""
    spec = kvflow.FullAttention(**{
        "block_size": block_size, "num_kv_heads": heads, "head_size": 8, "dtype": "bfloat16", **fields
    })  # fmt: skip
    return {f"layers.{index}": spec for index in range(layers)}


def windowed(block_size=16, *, layers=4, window=64, **fields):
    """Describe a model of which every other layer sees a window."""
    specs = full(block_size, layers=layers, **fields)
    first = specs["layers.0"]
    keys = {"num_kv_heads": first.num_kv_heads, "head_size": first.head_size, "dtype": first.dtype}
    sliding = kvflow.SlidingWindow(block_size=block_size, window=window, **keys)
    return {name: sliding if index % 2 else spec for index, (name, spec) in enumerate(specs.items())}


def chunked(block_size=16, *, chunk=128):
    """Describe a model of which every other layer sees a chunk."""
    return {
        name: kvflow.ChunkedLocal(block_size=block_size, num_kv_heads=8, head_size=8, dtype="bfloat16", chunk=chunk)
        if isinstance(spec, kvflow.SlidingWindow)
        else spec
        for name, spec in windowed(block_size).items()
    }


def latent(block_size=16, *, layers=2, **fields):
    """Describe a model that keeps one vector per token."""
    spec = kvflow.MLA(**{"block_size": block_size, "head_size": 24, "dtype": "bfloat16", **fields})
    return {f"layers.{index}": spec for index in range(layers)}


def beside(block_size=16, *, heads=8):
    """Describe a model with latents and with keys and values."""
    return {"layers.0": latent(block_size)["layers.0"], "layers.1": full(block_size, heads=heads)["layers.0"]}


STATES = (
    kvflow.State("conv_x", (12, 3), "bfloat16"),
    kvflow.State("conv_B", (5, 3), "bfloat16", shard_axis=None),
    kvflow.State("conv_C", (3, 8), "bfloat16", shard_axis=1),
    kvflow.State("ssm", (8, 3, 4), "float32"),
)


def hybrid(block_size=16, *, heads=8):
    """Describe a model of two layers of attention and two of Mamba."""
    specs = full(block_size, layers=4, heads=heads)
    state = kvflow.Mamba(block_size=block_size, states=STATES)
    return {name: state if index % 2 else spec for index, (name, spec) in enumerate(specs.items())}


def compound():
    """Describe a small DeepSeek V4: entries, windows, states of compressors, and an indexer."""
    return models.from_hf_config({
        "model_type": "deepseek_v4",
        "num_hidden_layers": 3,
        "head_dim": 128,
        "index_head_dim": 16,
        "sliding_window": 64,
        "compress_ratios": [0, 4, 128],
    })  # fmt: skip


def stages(specs, *cuts):
    """Cut the layers of a model into stages at these positions."""
    names = tuple(specs)
    return tuple(names[first:end] for first, end in pairwise([0, *cuts, len(specs)]))


FOUR = full(layers=4)
KERNEL = {"kernel_block_size": 16}
FP8 = {"dtype": "float8_e4m3fn", "quantization": "fp8_per_token_head"}
NVFP4 = {"dtype": "uint8", "quantization": "nvfp4", "head_size": 32, "head_size_v": 64}
UNEQUAL = {"head_size_v": 4}
PER_LAYER = {"layout": "LBNHC", "kv": "split"}
HEADS_FIRST = {"layout": "BHLNC"}

COMBINATIONS = {
    # Tensor parallelism.
    "TP 1 to 1, ids that ascend": Combination(
        Engine(full()), Engine(full()), "neighboring blocks are one descriptor", ascending=True
    ),
    "TP 1 to 2, tokens outermost": Combination(
        Engine(full(), **PER_LAYER), Engine(full(), tp=2, **PER_LAYER), "heads lie inside of tokens: a piece per token"
    ),
    "TP 2 to 4": Combination(
        Engine(full(), tp=2, **HEADS_FIRST), Engine(full(), tp=4, **HEADS_FIRST), "heads first: halves stay whole"
    ),
    "TP 3 to 2": Combination(
        Engine(full(), tp=3), Engine(full(), tp=2, layout="LBHNC"), "3, 3 and 2 heads to 4 and 4: a rank is shared"
    ),
    "TP 8 to 4": Combination(Engine(full(), tp=8), Engine(full(), tp=4, **PER_LAYER), "eight ranks of one head"),
    "TP 4 to 1": Combination(
        Engine(full(), tp=4, **PER_LAYER), Engine(full(), **HEADS_FIRST),
        "every rank offers for itself, with block ids of its own", joined=True,
    ),
    # Heads that several ranks hold.
    "2 heads, TP 4 to 3": Combination(
        Engine(full(heads=2), tp=4, **PER_LAYER), Engine(full(heads=2), tp=3), "replicas on both sides, not dividing"
    ),
    # Latents.
    "latents, TP 2 to 2": Combination(
        Engine(latent(), tp=2), Engine(latent(), tp=2), "every rank holds all: each reads another replica"
    ),
    "latents, TP 3 to 2": Combination(
        Engine(latent(), tp=3, layout="LBNHC"), Engine(latent(64), tp=2), "replicas of tensors, to blocks of 64"
    ),
    "latents with scales": Combination(
        Engine(latent(64, dtype="uint8", scale_bytes=4, **KERNEL)),
        Engine(latent(48, dtype="uint8", scale_bytes=4), layout="LBNHC"),
        "one byte per element and scales behind them",
    ),
    "latents with a part of another type": Combination(
        Engine(latent(dtype="uint8", rope_size=4, rope_dtype="bfloat16"), tp=2),
        Engine(latent(64, dtype="uint8", rope_size=4, rope_dtype="bfloat16"), layout="LBNHC"),
        "the part with the position keeps its type beside the rest",
    ),
    "latents beside heads, TP 2 to 4": Combination(
        Engine(beside(), tp=2), Engine(beside(), tp=4), "latents whole, keys and values by heads, in one pull"
    ),
    # Pipeline stages.
    "3 stages to 2, TP 1 to 2": Combination(
        Engine(FOUR, stages=stages(FOUR, 1, 3)),
        Engine(FOUR, stages=stages(FOUR, 2), tp=2),
        "stages cut elsewhere, and heads divided",
    ),
    "2 stages, one without a window, to 1": Combination(
        Engine(windowed(layers=3), stages=stages(windowed(layers=3), 2)), Engine(windowed(layers=3)),
        "a stage with one group, and one with two", joined=True,
    ),
    # Block sizes.
    "blocks of 48 to 32, 181 tokens": Combination(
        Engine(full(48)), Engine(full(32), layout="BLNHC"), "the last blocks are half full", num_tokens=181
    ),
    "blocks of 16 to 64, TP 2 to 1": Combination(
        Engine(full(16), tp=2, **PER_LAYER), Engine(full(64)), "other blocks, other ranks and another layout at once"
    ),
    "kernel blocks of 16 in 64 to kernel blocks of 24 in 48": Combination(
        Engine(full(64, **KERNEL), layout="LBNHC"), Engine(full(48, kernel_block_size=24)), "of two sizes at once"
    ),
    # Layouts.
    "keys beside values to keys before values in a block": Combination(
        Engine(full()), Engine(full(), layout="LBHNC", kv="block_split"), "content against block_split"
    ),
    # Memory that the engine allocated.
    "allocated to adopted": Combination(
        Engine(full()), Engine(full(), form="BKNHC", order="BKHNC"), "rows to tensors with permuted axes"
    ),
    "adopted to adopted, TP 2 to 1": Combination(
        Engine(full(), tp=2, form="KBHNC"), Engine(full(48), form="BHNC"), "tensors on both sides, blocks of 48"
    ),
    "adopted layers in one tensor, TP 1 to 2": Combination(
        Engine(full(), form="BLKNHC"), Engine(full(), tp=2), "one tensor of all layers to rows"
    ),
    "adopted states to allocated": Combination(
        Engine(hybrid(), tp=2, form="KBNHC"), Engine(hybrid()), "states of two ranks, in tensors of their own"
    ),
    # States.
    "hybrid, TP 3 to 2": Combination(
        Engine(hybrid(), tp=3, layout="LBHNC"), Engine(hybrid(), tp=2), "state heads that do not divide"
    ),
    "hybrid, blocks of 48 to 16, TP 1 to 2": Combination(
        Engine(hybrid(48), layout="LBHNC"), Engine(hybrid(16), tp=2), "other blocks and other ranks of states"
    ),
    # Tokens that ranks divide among themselves.
    "latents, DCP 2 to 3": Combination(
        Engine(latent(), tp=2, dcp=2, interleave=16), Engine(latent(48), tp=3, dcp=3, interleave=8, layout="LBNHC"),
        "neither sizes, nor interleaves, nor blocks divide", num_tokens=181,
    ),
    "latents, DCP 2 to 4, of 4 and 8 ranks": Combination(
        Engine(latent(), tp=4, dcp=2, interleave=4), Engine(latent(64, **KERNEL), tp=8, dcp=4, interleave=16),
        "replicas on both sides, and kernel blocks", num_tokens=250,
    ),
    "2 heads, TP 4 DCP 2 to TP 6 DCP 3, adopted": Combination(
        Engine(full(heads=2), tp=4, dcp=2, interleave=4, form="KBNHC"),
        Engine(full(48, heads=2), tp=6, dcp=3, interleave=12, layout="LBHNC"),
        "an engine's tensors to a third as many tokens on each rank", num_tokens=250,
    ),
    "latents beside heads, DCP 2 to 1, a prefix": Combination(
        Engine(beside(heads=2), tp=4, dcp=2), Engine(beside(32, heads=2), tp=2),
        "each rank reads one replica of the latents; the first 64 tokens are not asked for", prefix_tokens=64,
    ),
    "a window, DCP 2 to 1": Combination(
        Engine(windowed(heads=1), tp=2, dcp=2, interleave=16), Engine(windowed(48, heads=1)),
        "every rank has the window whole: it comes from one of them", target_window=True,
    ),
    "hybrid, DCP 1 to 2": Combination(
        Engine(hybrid(heads=1)), Engine(hybrid(64, heads=1), tp=2, dcp=2, interleave=16),
        "states have no tokens to divide: every rank has its share of heads",
    ),
    # Pages.
    "padded to unpadded": Combination(
        Engine(full(page_bytes=8192), note="pages of 8192 bytes"), Engine(full(), **PER_LAYER), "padding is left behind"
    ),
    "aligned rows and a layer apart": Combination(
        Engine(full(layers=3), options={"apart": ("layers.1",), "alignment": 4096}, note="rows of 4096, a layer apart"),
        Engine(full(48, layers=3), layout="BLNHC"),
        "one layer has a tensor of its own beside the rows",
    ),
    "scales per head and token, TP 2 to 1": Combination(
        Engine(full(**FP8), tp=2, **PER_LAYER), Engine(full(64, **FP8, **KERNEL)), "scales go with their heads"
    ),
    "two elements in a byte, TP 1 to 2": Combination(
        Engine(full(**NVFP4), kv="split"), Engine(full(48, **NVFP4), tp=2, layout="BLNHC"), "nvfp4 with its scales"
    ),
    "values of another size": Combination(
        Engine(full(**UNEQUAL), layout="LBNHC"), Engine(full(**UNEQUAL), tp=2, kv="split"), "head_size_v of half"
    ),
    # Lists.
    "a window, blocks of 16 to 48, TP 2 to 1": Combination(
        Engine(windowed(16), tp=2), Engine(windowed(48)), "the source offers all, the target asks for the window",
        target_window=True,
    ),
    "chunks, TP 2 to 1": Combination(
        Engine(chunked(), tp=2), Engine(chunked(), layout="BLNHC"), "the chunk of the next token, on both sides",
        source_window=True, target_window=True,
    ),
    "a prefix, blocks of 16 to 64, TP 1 to 2": Combination(
        Engine(windowed(16)), Engine(windowed(64), tp=2, **HEADS_FIRST), "a shorter list in larger blocks",
        prefix_tokens=64,
    ),
    "absent blocks": Combination(
        Engine(windowed(), **PER_LAYER), Engine(windowed(), tp=2), "-1 is left alone", absent=(0, 3, -1)
    ),
    # Everything at once.
    "compound, TP 1 to 2, a prefix": Combination(
        Engine(compound()), Engine(compound(), tp=2), "a prefix hit in every group", num_tokens=500,
        prefix_tokens=256, source_window=True, target_window=True,
    ),
}  # fmt: skip
