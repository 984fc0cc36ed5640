"""Families that keep one compressed vector per token instead of keys and values per head: DeepSeek V2 to V4."""

import msgspec

from kvflow.errors import SpecInvalid
from kvflow.layout.placement import page_bytes
from kvflow.layout.specs import MLA, CacheSpec
from kvflow.models.attention import SELF_ATTENTION
from kvflow.models.config import ModelConfig, Options

INDEX_SCALE_BYTES = 4
"""One float32 scale per vector of 128 indexer elements, which are one byte each."""

OWN_INDEXER, SHARED_INDEXER = "full", "shared"
"""Entries of ``indexer_types``."""

WINDOW_BLOCK_SIZE = 64
"""DeepSeek V4: tokens in one block of a sliding-window cache, for any other block size. Source: vLLM 0.32."""

STATE_BLOCK_SIZES = {4: 4, 128: 8}
"""DeepSeek V4: compression -> tokens in one block of its compressor's state. Source: vLLM 0.32."""

OVERLAPPING = 4
"""DeepSeek V4: the compression whose entries overlap, and which alone has an indexer."""

PAGE_ALIGNMENT = 512
"""DeepSeek V4: bytes, for kernels that read plain rows. Source: vLLM 0.32."""


def deepseek_v3(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe DeepSeek V2 and V3: the latent with the rotary part behind it, as one vector."""
    config.ignore(
        "num_key_value_heads", "head_dim", "v_head_dim", "qk_nope_head_dim"
    )  # of the heads, which are not kept
    rank = config.whole("kv_lora_rank", "elements of the compressed keys and values")
    rope = config.whole("qk_rope_head_dim", "elements of the part with the position")
    spec = MLA(block_size=options.block_size, head_size=rank + rope, dtype=options.cache_dtype)
    return {config.layer_name(index, SELF_ATTENTION): spec for index in range(config.num_layers())}


def deepseek_v32(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe DeepSeek V3.2 and GLM 5: as V3, with the keys of an indexer for each layer that does not share one."""
    keys = MLA(
        block_size=options.block_size,
        head_size=config.whole("index_head_dim", "elements of an indexer key"),
        dtype="uint8",
        scale_bytes=INDEX_SCALE_BYTES,
    )
    specs: dict[str, CacheSpec] = {}
    config.ignore("layer_types")
    types = config.sequence("indexer_types", config.num_layers(), str) or [OWN_INDEXER] * config.num_layers()
    if set(types) - {OWN_INDEXER, SHARED_INDEXER}:
        raise config.odd("indexer_types", types, f"{OWN_INDEXER} or {SHARED_INDEXER} for each layer")
    if SHARED_INDEXER in types:
        config.ignore("index_topk_freq", "index_topk_pattern")  # says the same
    for index, (name, spec) in enumerate(deepseek_v3(config, options).items()):
        specs[name] = spec
        if types[index] == SHARED_INDEXER:
            continue
        specs[config.layer_name(index, "self_attn.indexer.k_cache")] = keys
    return specs


def deepseek_v4(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe DeepSeek V4 and its like: a compound of up to five caches per layer.

    Every layer keeps the last tokens in a sliding-window cache. A layer that compresses ``ratio`` tokens into one entry
    also keeps those entries, and the unfinished one as the state of its compressor. With a ratio of 4, an indexer has
    entries and a state, too. An entry is described as ``ratio`` shares of one token each: the bytes of a block are the
    same, and block sizes keep counting tokens.

    Assumed, as vLLM 0.32 has it with the cache in plain rows: block sizes of 64 for windows, 4 and 8 for states, which
    are float32; indexer keys of one byte per element with a float32 scale per entry; pages rounded up to 512 bytes. The
    form with scales inside the rows (``fp8_ds_mla``) has entries of 584 bytes, which 128 tokens cannot share evenly,
    and is not described.

    Raises:
        SpecInvalid: a key is missing, or the block size holds no whole number of entries.
    """
    # The heads of queries, and the part of a latent that holds the position.
    config.ignore("num_key_value_heads", "qk_rope_head_dim", "o_lora_rank", "layer_types")
    num_layers = config.num_layers()
    width = config.whole("head_dim", "elements of a latent", 512)
    ratios = config.sequence("compress_ratios", num_layers, int)
    if ratios is None:
        raise config.odd("compress_ratios", None, "a list with the tokens per entry of each layer, 0 for none")
    window = _padded(
        MLA(
            block_size=WINDOW_BLOCK_SIZE,
            head_size=width,
            dtype=options.cache_dtype,
            sliding_window=config.whole("sliding_window", "tokens that the window of every layer sees", 128),
        )
    )
    entry = MLA(block_size=options.block_size, head_size=width, dtype=options.cache_dtype)
    specs: dict[str, CacheSpec] = {}
    for index, ratio in enumerate(ratios):
        name = config.layer_name(index, "attn")
        if ratio not in STATE_BLOCK_SIZES and ratio not in {0, 1}:
            raise config.odd("compress_ratios", ratio, f"0 or one of {', '.join(map(str, STATE_BLOCK_SIZES))}")
        if ratio in STATE_BLOCK_SIZES:
            specs |= {name: _share(name, entry, ratio), f"{name}.compressor.state_cache": _state(entry, ratio)}
        if ratio == OVERLAPPING:
            key = MLA(
                block_size=options.block_size,
                head_size=config.whole("index_head_dim", "elements of an indexer key", 128),
                dtype="uint8",
                scale_bytes=INDEX_SCALE_BYTES,
            )
            keys_name = f"{name}.indexer.k_cache"
            specs[keys_name] = _share(keys_name, key, ratio)
            specs[f"{name}.indexer.compressor.state_cache"] = _state(key, ratio)
        specs[f"{name}.swa_cache"] = window
    return specs


def _share(name: str, entry: MLA, ratio: int) -> MLA:
    """Describe entries of ``ratio`` tokens each, given one as if it were a token's."""
    if entry.block_size % ratio or entry.head_size % ratio or entry.scale_bytes % ratio:
        raise SpecInvalid(
            f"{name}: {ratio} tokens share an entry, but block_size is {entry.block_size} and an entry has "
            f"{entry.head_size} elements",
            remedy="Use a block_size that is a multiple of 128, such as 256.",
        )
    share = {"head_size": entry.head_size // ratio, "scale_bytes": entry.scale_bytes // ratio}
    return _padded(msgspec.structs.replace(entry, **share))


def _state(entry: MLA, ratio: int) -> MLA:
    """Describe the state of the compressor that makes these entries."""
    overlap = 2 if ratio == OVERLAPPING else 1
    return _padded(
        MLA(
            block_size=STATE_BLOCK_SIZES[ratio],
            head_size=2 * overlap * entry.head_size,  # a sum, and the weights that went into it
            dtype="float32",
            sliding_window=overlap * ratio,
        )
    )


def _padded(spec: MLA) -> MLA:
    nbytes = page_bytes(spec)
    rounded = -(-nbytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
    return spec if rounded == nbytes else msgspec.structs.replace(spec, page_bytes=rounded)
