"""Which function describes which ``model_type``: one table, and what happens outside it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvflow.errors import SpecInvalid
from kvflow.layout.specs import CacheSpec, validate_specs
from kvflow.models import attention, latent, recurrent
from kvflow.models.config import ModelConfig, Options, read_config

Describe = Callable[[ModelConfig, Options], dict[str, CacheSpec]]

FAMILIES: dict[str, Describe] = {
    "bamba": recurrent.bamba,
    "deepseek_v2": latent.deepseek_v3,
    "deepseek_v3": latent.deepseek_v3,
    "deepseek_v32": latent.deepseek_v32,
    "deepseek_v4": latent.deepseek_v4,
    "gemma2": attention.gemma2,
    "gemma3": attention.gemma3,
    "gemma3_text": attention.gemma3,
    "gpt2": attention.gpt2,
    "gpt_oss": attention.gpt_oss,
    "granitemoehybrid": recurrent.granite_hybrid,
    "kimi_k2": latent.deepseek_v3,
    "llama": attention.plain,
    "llama4": attention.llama4,
    "llama4_text": attention.llama4,
    "mistral": attention.mistral,
    "mixtral": attention.mistral,
    "qwen2": attention.qwen2,
    "qwen2_moe": attention.qwen2,
    "qwen3": attention.qwen2,
    "qwen3_moe": attention.qwen2,
    "qwen3_next": recurrent.qwen3_next,
}
"""``model_type`` of the text model -> what describes it."""

BLOCK_SIZE = 16
"""Tokens in one block unless the caller says otherwise, as vLLM's."""

BLOCK_SIZES = {"deepseek_v4": 256}
"""The same for families that 16 does not fit: a block of DeepSeek V4 holds whole entries of 128 tokens."""

PLAIN_KEYS = ("num_hidden_layers", "num_attention_heads")
PLAIN_SIZE_KEYS = ("head_dim", "hidden_size")
"""What a config needs, all of the first and one of the second, to be described without its family being known."""

PECULIAR = (
    "kv_lora_rank", "compress_ratios", "linear_num_value_heads", "linear_attn_config", "layers_block_type",
    "hybrid_override_pattern", "attn_layer_indices", "attn_type_list", "mamba_d_state", "ssm_state_size", "state_size",
    "num_kv_shared_layers", "global_head_dim",
)  # fmt: skip
"""Keys that say that a cache is not keys and values of one size per head in every layer. Guessing would be wrong."""


def from_hf_config(
    config: Mapping[str, Any] | str | Path,
    *,
    block_size: int | None = None,
    dtype: str | None = None,
    cache_dtype: str | None = None,
    state_dtype: str | None = None,
) -> dict[str, CacheSpec]:
    """Describe the cache of a model by its Hugging Face ``config.json``.

    An unknown ``model_type`` with the plain keys (layers, heads, their size) is taken for attention with keys and
    values in every layer, full unless ``layer_types`` says otherwise. A draft head of the checkpoint is not described.

    Args:
        config: the decoded JSON, the path to it, or to its folder.
        block_size: tokens in one block; None: 16, or 256 for DeepSeek V4.
        dtype: of the model; None: what the config says, else bfloat16.
        cache_dtype: of keys, values and latents; None: the model's.
        state_dtype: of recurrent states; None: what the config says, else float32.

    Returns:
        Layer name, as vLLM registers it -> spec, in model order. Head counts are the model's, not a rank's.

    Raises:
        SpecInvalid: the config cannot be read, its family is not known, or a key is missing or odd.
    """
    model = ModelConfig(read_config(config))
    describe = FAMILIES.get(model.model_type) or _generic(model)
    model_dtype = dtype or model.dtype()
    chosen = {
        "block_size": BLOCK_SIZES.get(model.model_type, BLOCK_SIZE) if block_size is None else block_size,
        "dtype": model_dtype,
        "cache_dtype": cache_dtype or model_dtype,
        "state_dtype": state_dtype or model.state_dtype(),
    }
    try:
        options = msgspec.convert(chosen, type=Options)
    except msgspec.ValidationError as error:
        raise SpecInvalid(f"config of model type {model.model_type!r}: {error}") from error
    specs = describe(model, options)
    validate_specs(specs)
    return specs


def _generic(model: ModelConfig) -> Describe:
    """Return the plain description if the keys are those of plain attention.

    Raises:
        SpecInvalid: they are not; lists the families that are known.
    """
    peculiar = [key for key in PECULIAR if model.keys.get(key) is not None]
    missing = [key for key in PLAIN_KEYS if model.keys.get(key) is None]
    if not any(model.keys.get(key) is not None for key in PLAIN_SIZE_KEYS):
        missing.append(" or ".join(PLAIN_SIZE_KEYS))
    if not peculiar and not missing:
        return attention.plain
    reason = f"it has {', '.join(peculiar)}" if peculiar else f"it has no {', '.join(missing)}"
    raise SpecInvalid(
        f"config: model type {model.model_type!r} is unknown and not plain attention: {reason}",
        remedy=f"Known are {', '.join(FAMILIES)}. Describe others with kvflow's specs, layer by layer.",
    )
