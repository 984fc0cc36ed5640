"""Read the keys of a ``config.json``. Errors name a missing or invalid key, and its purpose."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from kvflow.errors import SpecInvalid
from kvflow.layout.specs import DType, Positive

FILE_NAME = "config.json"

CONFIG_REMEDY = "Give the config.json that belongs to the model's weights."
PATH_REMEDY = "Give a model's folder or its config.json."

DTYPE_KEYS = ("dtype", "torch_dtype")  # the newer name first
DTYPE_ASSUMED = "bfloat16"  # what engines choose on current accelerators
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
FP8 = "float8_e4m3fn"
STATE_DTYPE_KEYS = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
STATE_DTYPE_ASSUMED = "float32"  # states accumulate over the whole prompt


class Options(Struct, frozen=True):
    """What the caller chooses: ``dtype`` is that of the model and of convolution states."""

    block_size: Positive
    dtype: DType
    cache_dtype: DType
    state_dtype: DType


UNSET: tuple[object, ...] = (None, False, 0, "", [], {})
"""Values that mean that the model does not have what the key names."""

Entry = TypeVar("Entry", str, int)

LAYERS_MAX = 4096  # far more than any model has, so that a broken config does not exhaust memory

GEOMETRY = frozenset((
    # heads
    "num_key_value_heads", "num_kv_heads", "n_head_kv", "num_query_groups", "num_attention_groups", "multi_query",
    "multi_query_attention", "multi_query_group_num", "num_key_value_heads_per_layer", "num_global_key_value_heads",
    "swa_num_key_value_heads", "attention_other_setting", "attention_k_eq_v",
    # their sizes, and what stands instead of heads
    "head_dim", "head_size", "kv_channels", "attention_head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim",
    "global_head_dim", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "index_head_dim", "indexer_types",
    "index_topk_freq", "index_topk_pattern", "compress_ratios",
    # windows
    "sliding_window", "sliding_window_size", "sliding_window_pattern", "sliding_windows", "use_sliding_window",
    "max_window_layers", "window_size", "window_sizes", "attention_window", "attn_window_size", "attention_chunk_size",
    "local_attention", "attention_types", "attention_layers", "global_attn_every_n_layers",
    "order_of_interleaved_layers",
    # layers
    "layer_types", "layers_block_type", "block_types", "block_configs", "hybrid_layer_pattern",
    "hybrid_override_pattern", "attn_type_list", "attn_layer_indices", "attn_layer_period", "attn_layer_offset",
    "full_attention_interval", "full_attn_idxs", "num_kv_shared_layers", "cross_attention_layers", "cla_share_factor",
    "use_cla", "is_encoder_decoder", "linear_attn_config", "total_ut_steps", "num_loops",
    # states
    "mamba_n_heads", "mamba_num_heads", "mamba_d_state", "mamba_n_groups", "mamba_d_conv", "mamba_d_head",
    "mamba_head_dim", "mamba_expand", "ssm_state_size", "ssm_cfg", "state_size", "n_groups", "conv_kernel",
    "conv_L_cache", "linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "use_short_conv",
))  # fmt: skip
"""Keys of published configs that can change what is kept for a token. A family reads those that it understands."""

HINT = re.compile(
    r"(^|_)(kv|mla|latent|swa|ssm|mamba|rnn|recurrent|state|conv|linear|hybrid|window|windows|sliding|chunk|chunked|local"
    r"|global|cross|compress|share|shared|sharing|index|pattern)(_|$)"
)
"""Parts of keys that may change the cache of a family that was not reviewed."""

HARMLESS = frozenset((
    "chunk_size_feed_forward", "pad_token_index", "image_token_index", "num_shared_experts", "n_shared_experts",
    "shared_expert_intermediate_size", "moe_num_shared_experts", "add_cross_attention", "cross_attention_hidden_size",
))  # fmt: skip
"""Keys with such a word that change nothing."""

WRAPPERS = frozenset((
    "exaone4_5", "gemma3", "gemma3n", "gemma4", "kimi_k25", "llama4", "mistral3", "qwen3_5", "qwen3_5_moe", "qwen3_vl",
    "qwen3_vl_moe",
))  # fmt: skip
"""``model_type`` of models around a text model whose layers vLLM 0.32 names ``language_model.`` and so on."""


class ModelConfig:
    """The text model's part of a config: ``text_config``, where there is one, inside a ``wrapper`` type.

    ``prefix`` is that of its layer names, with a dot at the end; empty unless the text model is nested.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        nested = config.get("text_config")
        self._outer = config
        self._understood: set[str] = set()
        self.keys: Mapping[str, Any] = config
        self.prefix = ""
        self.wrapper = ""
        if isinstance(nested, Mapping):
            # What the text model leaves out is transformers' default for it, not what stands outside.
            self.keys = nested
            self.prefix = "language_model."
            self.wrapper = self._type_of(config)
        self.model_type = self._type_of(self.keys) or self.wrapper

    @staticmethod
    def _type_of(keys: Mapping[str, Any]) -> str:
        found = keys.get("model_type")
        if found is not None and not isinstance(found, str):
            raise SpecInvalid(f"config: model_type is {found!r}, not a string", remedy=CONFIG_REMEDY)
        return found or ""

    def get(self, key: str, default: object = None) -> Any:
        """Return the value of a key, which counts as understood; null is not a missing key."""
        self._understood.add(key)
        return self.keys.get(key, default)

    def ignore(self, *names: str) -> None:
        """Count keys as understood that change nothing in this family."""
        self._understood.update(names)

    def not_understood(self, *, guessed: bool = False) -> list[str]:
        """Return the keys that may change what is kept and were not read, in the order of the file.

        ``guessed`` adds keys whose names only suggest it, because the family is unknown.
        """
        return [
            key
            for key, value in self.keys.items()
            if value not in UNSET
            and key not in self._understood
            and (key in GEOMETRY or (guessed and key not in HARMLESS and HINT.search(key)))
        ]

    def layer_name(self, index: int, suffix: str) -> str:
        """Return the name of one layer's cache, as vLLM registers it."""
        return f"{self.prefix}model.layers.{index}.{suffix}"

    def num_layers(self, keys: Sequence[str] = ("num_hidden_layers",)) -> int:
        """Return the number of layers; SpecInvalid if it is missing or above ``LAYERS_MAX``."""
        count = self.first_whole(keys, "number of layers")
        if count > LAYERS_MAX:
            raise self.odd(keys[0], count, f"at most {LAYERS_MAX}")
        return count

    def first_whole(
        self, keys: Sequence[str], purpose: str, defaults: Mapping[str, int] = {}, *, otherwise: int | None = None
    ) -> int:
        """Return a whole number of 1 or more, of the first of these keys that has one.

        Otherwise return the default of the first key that has one, or else ``otherwise``. ``purpose`` says what the
        number is.

        Raises:
            SpecInvalid: all are missing without a default, or one is not such a number.
        """
        given = (value for value in map(self.optional, keys) if value is not None)
        known = (defaults[key] for key in keys if key in defaults)
        found = next(given, next(known, otherwise))
        if found is None:
            names = " or ".join(map(repr, keys))
            raise SpecInvalid(
                f"config of model type {self.model_type!r} has no {names}: {purpose}", remedy=CONFIG_REMEDY
            )
        return found

    def whole(self, key: str, purpose: str, default: int | None = None) -> int:
        """Return a whole number of 1 or more; SpecInvalid if it is missing without a default, or something else."""
        return self.first_whole((key,), purpose, otherwise=default)

    def optional(self, key: str) -> int | None:
        """Return a whole number of 1 or more, or None if the key is missing or null; SpecInvalid for anything else."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.odd(key, value, "a whole number of 1 or more")
        return value

    def sequence(self, key: str, num_layers: int, kind: type[Entry]) -> list[Entry] | None:
        """Return a list with one entry of ``kind`` per layer, or None if the key is missing, null or empty.

        Entries past the last layer belong to draft heads and are left out.

        Raises:
            SpecInvalid: it is no such list, or too short.
        """
        value = self.get(key)
        if value is None or value == []:
            return None
        if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
            raise self.odd(key, value, f"a list of {kind.__name__}, one per layer")
        if len(value) < num_layers:
            raise self.odd(key, value, f"{num_layers} entries, one per layer, not {len(value)}")
        return value[:num_layers]

    def dtype(self) -> str:
        """Return the model's element type, as torch names it."""
        return self._first(DTYPE_KEYS) or DTYPE_ASSUMED

    def state_dtype(self) -> str:
        """Return the element type of recurrent states."""
        return self._first(STATE_DTYPE_KEYS) or STATE_DTYPE_ASSUMED

    def cache_dtype(self) -> str:
        """Return the element type of a quantized cache, empty if it is none; SpecInvalid if the scheme is unknown."""
        stated: list[tuple[str, str, object]] = []
        for name in QUANTIZATION_KEYS:
            whole = self.keys.get(name) or self._outer.get(name)
            parts = [whole, *whole.values()] if isinstance(whole, Mapping) else []
            items = [item for part in parts if isinstance(part, Mapping) for item in part.items()]
            stated += [(name, key, value) for key, value in items if key.startswith("kv_cache") and value not in UNSET]
        for name, key, value in stated:
            # With an indexer, vLLM keeps rows of another format, with scales inside.
            if not _is_fp8(value) or self.keys.get("index_head_dim"):
                raise SpecInvalid(
                    f"config of model type {self.model_type!r}: {name} has {key} {repr(value)[:80]}: an unknown cache",
                    remedy="Pass the element type of the engine's cache: cache_dtype, or dtype= of kvflow explain.",
                )
        return FP8 if stated else ""

    def _first(self, names: Sequence[str]) -> str:
        """Return the first of these that is not null, here or outside, without torch's prefix; empty if none is."""
        everywhere = [keys.get(name) for keys in (self.keys, self._outer) for name in names]
        found = next((value for value in everywhere if value is not None), "")
        if not isinstance(found, str):
            raise self.odd(names[0], found, "the name of a dtype")
        return found.removeprefix("torch.")

    def odd(self, key: str, found: object, expected: str) -> SpecInvalid:
        """Return the error for a key with an unusable value, which may be of any length."""
        return SpecInvalid(
            f"config of model type {self.model_type!r}: {key} is {repr(found)[:80]}, expected {expected}",
            remedy=CONFIG_REMEDY,
        )


def _is_fp8(scheme: object) -> bool:
    """Return whether a cache holds FP8 elements, and its scales are weights. Source: vLLM 0.32."""
    if isinstance(scheme, Mapping):
        static = not scheme.get("dynamic") and scheme.get("symmetric", True)
        scales = scheme.get("strategy", "tensor") in ("tensor", "attn_head")
        return bool(static and scales and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8))
    return isinstance(scheme, str) and scheme.lower() == "fp8"


def read_config(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """Return the config of a mapping, a file, or the folder of a model; SpecInvalid if it holds no JSON object."""
    if isinstance(config, Mapping):
        return config
    path = Path(config)
    if path.is_dir():
        path /= FILE_NAME
    try:
        decoded = json.loads(path.read_bytes())
    except OSError as error:
        raise SpecInvalid(f"{path} cannot be read: {error.strerror or error}", remedy=PATH_REMEDY) from error
    except ValueError as error:
        raise SpecInvalid(f"{path} is not JSON: {error}", remedy=PATH_REMEDY) from error
    if not isinstance(decoded, dict):
        raise SpecInvalid(f"{path} holds a JSON {type(decoded).__name__}, expected an object", remedy=PATH_REMEDY)
    beside = path.with_name("hf_quant_config.json")  # of ModelOpt
    if path.name == FILE_NAME and QUANTIZATION_KEYS[0] not in decoded and beside.is_file():
        decoded[QUANTIZATION_KEYS[0]] = read_config(beside)
    return decoded
