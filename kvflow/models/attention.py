"""Families whose layers all keep keys and values per head: full, sliding and chunked attention."""

from collections.abc import Callable, Sequence
from typing import Any

from kvflow.layout.specs import CacheSpec, ChunkedLocal, FullAttention, SlidingWindow
from kvflow.models.config import ModelConfig, Options

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
"""Entries of ``layer_types``, as transformers writes them."""

SELF_ATTENTION = "self_attn.attn"

GEMMA3_DEFAULTS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}
"""What transformers takes where a Gemma 3 config leaves a key out, as the published ones of 4b and 12b do."""

LLAMA4_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192}
"""The same for Llama 4."""


def gpt2(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe GPT-2: as many KV heads as heads, and names of its own."""
    heads = config.whole("n_head", "attention heads")
    spec = FullAttention(
        block_size=options.block_size,
        num_kv_heads=heads,
        head_size=config.whole("n_embd", "width of the model, divided among the heads") // heads,
        dtype=options.cache_dtype,
    )
    return {f"{config.prefix}transformer.h.{index}.attn.attn": spec for index in range(config.num_layers("n_layer"))}


def plain(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe Llama and all that keeps the same cache: full attention unless ``layer_types`` says otherwise."""
    num_layers = config.num_layers()
    return attention_layers(config, options, config.sequence("layer_types", num_layers, str) or [FULL] * num_layers)


def mistral(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe Mistral: every layer has the window, if there is one."""
    num_layers = config.num_layers()
    # A missing key is not null: transformers takes 4096 for it.
    windowed = config.keys.get("sliding_window", 4096) is not None
    types = config.sequence("layer_types", num_layers, str) or [SLIDING if windowed else FULL] * num_layers
    return attention_layers(config, options, types, {"sliding_window": 4096})


def qwen2(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe Qwen 2 and 2.5: a window only where ``use_sliding_window`` is set, from ``max_window_layers`` on."""
    num_layers = config.num_layers()
    if config.keys.get("use_sliding_window"):
        first = config.whole("max_window_layers", "first layer with a sliding window", 28)
        types: Sequence[str] = [SLIDING if index >= first else FULL for index in range(num_layers)]
    else:
        types = [FULL] * num_layers
    return attention_layers(config, options, config.sequence("layer_types", num_layers, str) or types)


def gemma2(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe Gemma 2: sliding and full in turn."""
    return _interleaved(config, options, 2, {"head_dim": 256, "sliding_window": 4096})


def gemma3(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe Gemma 3: every sixth layer is full."""
    period = config.whole("sliding_window_pattern", "layers from one full one to the next", 6)
    return _interleaved(config, options, period, GEMMA3_DEFAULTS)


def gpt_oss(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe gpt-oss: sliding and full in turn, and ``attn`` instead of ``self_attn`` in the names."""
    return _interleaved(config, options, 2, {"head_dim": 64, "sliding_window": 128}, suffix="attn.attn")


def llama4(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe Llama 4: layers with rotary positions are chunked, the others are full."""
    num_layers = config.num_layers()
    interval = config.whole("no_rope_layer_interval", "layers from one without positions to the next", 4)
    rotary = config.sequence("no_rope_layers", num_layers, int) or [
        int((index + 1) % interval != 0) for index in range(num_layers)
    ]
    # Null, unlike a missing key, switches chunks off.
    chunked = config.keys.get("attention_chunk_size", LLAMA4_DEFAULTS["attention_chunk_size"]) is not None
    types = [CHUNKED if chunked and has_positions else FULL for has_positions in rotary]
    return attention_layers(config, options, types, LLAMA4_DEFAULTS)


def _interleaved(
    config: ModelConfig, options: Options, period: int, defaults: dict[str, int], suffix: str = SELF_ATTENTION
) -> dict[str, CacheSpec]:
    num_layers = config.num_layers()
    types = [FULL if (index + 1) % period == 0 else SLIDING for index in range(num_layers)]
    return attention_layers(config, options, config.sequence("layer_types", num_layers, str) or types, defaults, suffix)


def attention_layers(
    config: ModelConfig,
    options: Options,
    types: Sequence[str],
    defaults: dict[str, int] | None = None,
    suffix: str = SELF_ATTENTION,
) -> dict[str, CacheSpec]:
    """Describe one layer with keys and values for each entry of ``types``, in order.

    Raises:
        SpecInvalid: a key is missing, or a type is none of full, sliding and chunked.
    """
    return {
        config.layer_name(index, suffix): attention(config, options, kind, defaults) for index, kind in enumerate(types)
    }


def attention(config: ModelConfig, options: Options, kind: str, defaults: dict[str, int] | None = None) -> CacheSpec:
    """Describe one layer with keys and values per head.

    Args:
        config: the model.
        options: the caller's.
        kind: an entry of ``layer_types``.
        defaults: what transformers takes for keys that this family leaves out.

    Raises:
        SpecInvalid: a key is missing, or the kind is unknown.
    """
    known = defaults or {}
    if kind not in _MAKERS:
        raise config.odd("layer_types", kind, f"one of {', '.join(_MAKERS)}")
    heads = config.whole("num_attention_heads", "attention heads", known.get("num_attention_heads"))
    head_size = config.optional("head_dim") or known.get("head_dim")
    if head_size is None:
        head_size = config.whole("hidden_size", "width of the model, divided among the heads") // heads
    common = {
        "block_size": options.block_size,
        "num_kv_heads": config.whole("num_key_value_heads", "KV heads", known.get("num_key_value_heads", heads)),
        "head_size": head_size,
        "dtype": options.cache_dtype,
    }
    return _MAKERS[kind](config, known, common)


def _full(config: ModelConfig, known: dict[str, int], common: dict[str, Any]) -> CacheSpec:
    return FullAttention(**common)


def _sliding(config: ModelConfig, known: dict[str, int], common: dict[str, Any]) -> CacheSpec:
    window = config.whole("sliding_window", "tokens that a sliding layer sees", known.get("sliding_window"))
    return SlidingWindow(**common, window=window)


def _chunked(config: ModelConfig, known: dict[str, int], common: dict[str, Any]) -> CacheSpec:
    chunk = config.whole("attention_chunk_size", "tokens of a chunk", known.get("attention_chunk_size"))
    return ChunkedLocal(**common, chunk=chunk)


_MAKERS: dict[str, Callable[[ModelConfig, dict[str, int], dict[str, Any]], CacheSpec]] = {
    FULL: _full,
    SLIDING: _sliding,
    CHUNKED: _chunked,
}
