"""Families whose layers all keep something per token.

Most keep keys and values per head: full, sliding and chunked attention. DeepSeek V2 to V4 keep one compressed vector.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct

from kvflow.errors import SpecInvalid
from kvflow.layout.placement import page_bytes
from kvflow.layout.specs import MLA, CacheSpec, ChunkedLocal, FullAttention, SlidingWindow
from kvflow.models.config import ModelConfig, Options

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
"""Entries of ``layer_types``, as transformers writes them."""

WINDOWS = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}
"""The key with the number of tokens that such a layer sees."""

MISSING = object()

SELF_ATTENTION = "self_attn.attn"
LAYER_NAME = f"model.layers.{{}}.{SELF_ATTENTION}"

LLAMA4_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192}
"""What transformers takes where a Llama 4 config leaves a key out."""


class Keys(Struct, frozen=True):
    """The keys of a family, each under the first of its names that is there."""

    name: str = LAYER_NAME  # of a layer's cache in vLLM, with braces for its number
    layers: tuple[str, ...] = ("num_hidden_layers",)
    heads: tuple[str, ...] = ("num_attention_heads",)
    kv_heads: tuple[str, ...] = ("num_key_value_heads",)  # as many as heads where all are missing
    multi_query: bool = False  # all heads share one KV head where ``kv_heads`` are missing
    width: tuple[str, ...] = ("hidden_size",)  # of the model, divided among the heads where ``head_dim`` is missing
    defaults: Mapping[str, int] = {}  # what transformers takes for missing keys
    beyond: int = 0  # tokens that a sliding layer sees beyond ``sliding_window``
    period: int = 0  # layers from one full one to the next, unless the config says it; 0: all layers are alike


PLAIN = Keys()
GPT2 = Keys(
    name="transformer.h.{}.attn.attn",
    layers=("num_hidden_layers", "n_layer"),
    heads=("num_attention_heads", "n_head"),
    kv_heads=(),
    width=("hidden_size", "n_embd"),
)
"""Both the names of GPT-2's time and those of today are published."""
GPT_NEOX = Keys(name="model.layers.{}.attention.attn")
OPT = Keys(name="model.decoder.layers.{}.self_attn.attn")
GEMMA2 = Keys(defaults={"head_dim": 256, "sliding_window": 4096}, period=2)
GEMMA3_DEFAULTS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}
GEMMA3 = Keys(defaults=GEMMA3_DEFAULTS, period=6)  # the published configs of 4b and 12b leave these out
GEMMA3N_DEFAULTS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512}
GEMMA3N = Keys(defaults=GEMMA3N_DEFAULTS, period=5)
GEMMA4 = Keys(defaults={"head_dim": 256, "sliding_window": 512})
COHERE2 = Keys(defaults={"sliding_window": 4096}, beyond=1, period=4)
"""Its window counts the tokens before the current one. Source: vLLM 0.32, ``commandr.py``."""
GPT_OSS = Keys(name="model.layers.{}.attn.attn", defaults={"head_dim": 64, "sliding_window": 128}, period=2)
MISTRAL = Keys(defaults={"sliding_window": 4096})
OLMO3 = Keys(defaults={"sliding_window": 4096}, period=4)


def plain(config: ModelConfig, options: Options, keys: Keys = PLAIN) -> dict[str, CacheSpec]:
    """Describe a family whose layers keep keys and values of one size.

    They are full or sliding as ``layer_types`` says, else in turn if the family has a period, else all sliding if there
    is a window.
    """
    num_layers = config.num_layers(keys.layers)
    types = config.sequence("layer_types", num_layers, str)
    # A missing key is not null: transformers takes the family's default for it.
    windowed = config.get("sliding_window", keys.defaults.get("sliding_window")) not in (None, 0)
    windowed = bool(config.get("use_sliding_window", True)) and windowed
    if keys.period:
        period = config.whole("sliding_window_pattern", "layers from one full one to the next", keys.period)
        rule = [SLIDING if windowed and (index + 1) % period else FULL for index in range(num_layers)]
    else:
        rule = [SLIDING if windowed else FULL] * num_layers
    return attention_layers(config, options, types or rule, keys)


def gpt_bigcode(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe GPT BigCode (StarCoder): as GPT-2, with one KV head unless ``multi_query`` is off."""
    keys = {"name": "model.h.{}.attn.attn", "kv_heads": ("num_key_value_heads",)}
    return plain(config, options, _multi_query(config, **keys))


def falcon(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe Falcon: one KV head in the 7B, ``num_kv_heads`` of them in models of the newer architecture."""
    config.ignore("multi_query", "num_kv_heads", "n_head_kv")
    name = "transformer.h.{}.self_attention.attn"
    if config.get("new_decoder_architecture"):
        kv_heads = ("num_kv_heads", "n_head_kv")
        return plain(config, options, msgspec.structs.replace(GPT2, name=name, kv_heads=kv_heads))
    return plain(config, options, _multi_query(config, name=name))


def _multi_query(config: ModelConfig, **keys: Any) -> Keys:
    return msgspec.structs.replace(GPT2, multi_query=bool(config.get("multi_query", True)), **keys)


def qwen2(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe Qwen 2, 2.5 and 3: a window only where ``use_sliding_window`` is set, from ``max_window_layers`` on."""
    num_layers = config.num_layers()
    first = config.get("max_window_layers")
    first = 28 if first is None else first
    if type(first) is not int or first < 0:
        raise config.odd("max_window_layers", first, "a number of layers, 0 or more")
    types = [FULL] * num_layers
    if config.get("use_sliding_window") and config.get("sliding_window", 4096):
        types = [SLIDING if index >= first else FULL for index in range(num_layers)]
    config.ignore("sliding_window")
    keys = Keys(defaults={"sliding_window": 4096})
    return attention_layers(config, options, config.sequence("layer_types", num_layers, str) or types, keys)


def exaone4(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe EXAONE 4: as ``layer_types`` or ``sliding_window_pattern`` says, and full where there is no window."""
    num_layers = config.num_layers()
    windowed = config.get("sliding_window", 4096) is not None
    pattern = config.get("sliding_window_pattern", 4) if windowed else 1
    types = config.sequence("layer_types", num_layers, str)
    if types is None:
        period = len(pattern) if isinstance(pattern, str) else pattern
        if not isinstance(period, int) or period < 1:
            raise config.odd("sliding_window_pattern", pattern, "a word such as LLLG, or its length")
        types = [SLIDING if (index + 1) % period else FULL for index in range(num_layers)]
    config.ignore("sliding_window_pattern")
    return attention_layers(config, options, types, Keys(defaults={"sliding_window": 4096}))


def minimax_m2(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe MiniMax M2: full attention, which the list of its layers' types must say."""
    types = config.sequence("attn_type_list", config.num_layers(), int)
    if types is not None and set(types) != {1}:
        raise config.odd("attn_type_list", types, "1 for every layer: full attention")
    return plain(config, options)


def llama4(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe Llama 4: layers with rotary positions are chunked, the others are full."""
    num_layers = config.num_layers()
    interval = config.whole("no_rope_layer_interval", "layers from one without positions to the next", 4)
    rotary = config.sequence("no_rope_layers", num_layers, int) or [
        int((index + 1) % interval != 0) for index in range(num_layers)
    ]
    types = [CHUNKED if has_positions else FULL for has_positions in rotary]
    config.ignore("layer_types")  # says the same, where it is there
    return attention_layers(config, options, types, Keys(defaults=LLAMA4_DEFAULTS))


def gemma3n(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe Gemma 3n: four sliding, one full; the last layers keep nothing."""
    return _with_own_cache(config, plain(config, options, GEMMA3N), 15)


def _with_own_cache(config: ModelConfig, specs: dict[str, CacheSpec], default: int) -> dict[str, CacheSpec]:
    """Leave out the last layers, which read what earlier ones keep."""
    shared = config.get("num_kv_shared_layers", default) or 0  # a null is none
    if not isinstance(shared, int) or not 0 <= shared < len(specs):
        raise config.odd("num_kv_shared_layers", shared, f"a number below that of the layers, {len(specs)}")
    return dict(islice(specs.items(), len(specs) - shared))


def gemma4(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe Gemma 4: full layers have heads of another size, and another number of them where K is V."""
    num_layers = config.num_layers()
    types = config.sequence("layer_types", num_layers, str)
    if types is None:
        raise config.odd("layer_types", None, "a list that says which layers are sliding")
    heads = config.whole("num_key_value_heads", "KV heads of sliding layers")
    global_heads = config.whole("num_global_key_value_heads", "KV heads of full layers", heads)
    full = FullAttention(
        block_size=options.block_size,
        num_kv_heads=global_heads if config.get("attention_k_eq_v") else heads,
        head_size=config.whole("global_head_dim", "elements of a head of full layers", 512),
        dtype=options.cache_dtype,
    )
    sliding = attention(config, options, SLIDING, GEMMA4)
    specs: dict[str, CacheSpec] = {
        config.layer_name(index, SELF_ATTENTION): full if kind == FULL else sliding for index, kind in enumerate(types)
    }
    return _with_own_cache(config, specs, 0)


def mimo_v2(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe MiMo V2: values are narrower than keys, and sliding layers have other heads."""
    num_layers = config.num_layers()
    pattern = config.sequence("hybrid_layer_pattern", num_layers, int)
    if pattern is None:
        raise config.odd("hybrid_layer_pattern", None, "a list with 1 for each sliding layer")
    config.ignore("sliding_window", "attention_chunk_size", "layer_types")
    full, sliding = (_mimo_heads(config, options, prefix) for prefix in ("", "swa_"))
    window = config.whole("sliding_window_size", "tokens that a sliding layer sees")
    specs = (FullAttention(**full), SlidingWindow(**sliding, window=window))
    return {config.layer_name(index, SELF_ATTENTION): specs[bool(kind)] for index, kind in enumerate(pattern)}


def _mimo_heads(config: ModelConfig, options: Options, prefix: str) -> dict[str, Any]:
    return {
        "block_size": options.block_size,
        "num_kv_heads": config.whole(f"{prefix}num_key_value_heads", "KV heads"),
        "head_size": config.whole(f"{prefix}head_dim", "elements of a key"),
        "head_size_v": config.whole(f"{prefix}v_head_dim", "elements of a value"),
        "dtype": options.cache_dtype,
    }


def attention_layers(
    config: ModelConfig, options: Options, types: Sequence[str], keys: Keys = PLAIN
) -> dict[str, CacheSpec]:
    """Describe one layer with keys and values for each entry of ``types``, in order."""
    return {
        config.prefix + keys.name.format(index): attention(config, options, kind, keys)
        for index, kind in enumerate(types)
    }


def attention(config: ModelConfig, options: Options, kind: str, keys: Keys = PLAIN) -> CacheSpec:
    """Describe one layer with keys and values per head; ``kind`` is an entry of ``layer_types``."""
    if kind not in (FULL, SLIDING, CHUNKED):
        raise config.odd("layer_types", kind, f"one of {FULL}, {SLIDING}, {CHUNKED}")
    if kind in WINDOWS and config.get(WINDOWS[kind], MISSING) in (None, 0):
        kind = FULL  # a null, unlike a missing key, switches windows and chunks off
    heads = config.first_whole(keys.heads, "attention heads", keys.defaults)
    head_size = config.optional("head_dim") or keys.defaults.get("head_dim")
    if head_size is None:
        width = config.first_whole(keys.width, "width of the model, divided among the heads", keys.defaults)
        head_size = width // heads
    common: dict[str, Any] = {
        "block_size": options.block_size,
        "num_kv_heads": config.first_whole(
            keys.kv_heads, "KV heads", keys.defaults, otherwise=1 if keys.multi_query else heads
        ),
        "head_size": head_size,
        "dtype": options.cache_dtype,
    }
    if kind == FULL:
        return FullAttention(**common)
    tokens = config.first_whole((WINDOWS[kind],), f"tokens that a layer of {kind} sees", keys.defaults)
    if kind == SLIDING:
        return SlidingWindow(**common, window=tokens + keys.beyond)
    return ChunkedLocal(**common, chunk=tokens)


INDEX_SCALE_BYTES = 4  # one float32 scale per vector of 128 indexer elements, which are one byte each
OWN_INDEXER, SHARED_INDEXER = "full", "shared"  # entries of ``indexer_types``

WINDOW_BLOCK_SIZE = 64
"""DeepSeek V4: tokens in one block of a sliding-window cache, for any other block size. Source: vLLM 0.32."""

STATE_BLOCK_SIZES = {4: 4, 128: 8}
"""DeepSeek V4: compression -> tokens in one block of its compressor's state. Source: vLLM 0.32."""

OVERLAPPING = 4  # DeepSeek V4: the compression whose entries overlap, and which alone has an indexer
PAGE_ALIGNMENT = 512  # DeepSeek V4: bytes, for kernels that read plain rows (vLLM 0.32)


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
