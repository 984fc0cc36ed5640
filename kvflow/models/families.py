"""From a ``config.json``, or the name of a bundled one, to specs; one function describes each ``model_type``."""

import math
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import msgspec

from kvflow.errors import SpecInvalid
from kvflow.layout.placement import page_bytes
from kvflow.layout.shards import Shard
from kvflow.layout.specs import CacheSpec, ChunkedLocal, FullAttention, Mamba, SlidingWindow, validate_specs
from kvflow.models import attention, recurrent
from kvflow.models.config import WRAPPERS, ModelConfig, Options, read_config
from kvflow.validation import describe_refusal

Describe = Callable[[ModelConfig, Options], dict[str, CacheSpec]]

_PLAIN = (
    "arcee", "cohere", "cwm", "ernie4_5", "ernie4_5_moe", "flex_olmo", "gemma", "glm", "glm4", "glm4_moe",
    "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "hyperclovax", "jais2", "laguna",
    "llama", "mellum", "ministral3", "mixtral", "olmo", "olmo2", "olmoe", "phi", "phi3", "seed_oss", "smollm3",
    "stablelm", "starcoder2", "vaultgemma",
)  # fmt: skip
"""Model types with keys and values of one size in every layer."""

FAMILIES: dict[str, Describe] = {
    **dict.fromkeys(_PLAIN, attention.plain),
    **dict.fromkeys(
        ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "mistral4"), attention.deepseek_v3
    ),
    "bamba": recurrent.bamba,
    **dict.fromkeys(("cohere2", "cohere2_moe"), partial(attention.plain, keys=attention.COHERE2)),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), attention.deepseek_v32),
    "deepseek_v4": attention.deepseek_v4,
    **dict.fromkeys(("exaone4", "exaone4_5_text", "exaone_moe"), attention.exaone4),
    "falcon": attention.falcon,
    "gemma2": partial(attention.plain, keys=attention.GEMMA2),
    **dict.fromkeys(("gemma3", "gemma3_text"), partial(attention.plain, keys=attention.GEMMA3)),
    "gemma3n_text": attention.gemma3n,
    "gemma4_text": attention.gemma4,
    **dict.fromkeys(("gpt2", "gptj"), partial(attention.plain, keys=attention.GPT2)),
    "gpt_bigcode": attention.gpt_bigcode,
    "gpt_neox": partial(attention.plain, keys=attention.GPT_NEOX),
    "gpt_oss": partial(attention.plain, keys=attention.GPT_OSS),
    "granitemoehybrid": recurrent.granite_hybrid,
    **dict.fromkeys(("llama4", "llama4_text"), attention.llama4),
    **dict.fromkeys(("mimo_v2", "mimo_v2_flash"), attention.mimo_v2),
    "minimax_m2": attention.minimax_m2,
    "mistral": partial(attention.plain, keys=attention.MISTRAL),
    "nemotron_h": recurrent.nemotron_h,
    "olmo3": partial(attention.plain, keys=attention.OLMO3),
    "opt": partial(attention.plain, keys=attention.OPT),
    **dict.fromkeys(
        ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_vl_text"), attention.qwen2
    ),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), recurrent.qwen3_next),
}
"""``model_type`` of the text model -> its function. ``tests/data/vllm_specs.json`` has vLLM's answers."""

BLOCK_SIZE = 16  # as in vLLM
BLOCK_SIZES = {"deepseek_v4": 256}  # a block of DeepSeek V4 holds whole entries of 128 tokens

HEAD_COUNT = re.compile(r"key_value_heads|kv_head|head_kv|query_group|attention_groups")
"""Part of each key under which a published config says how many KV heads some layers have."""

WITH_HEADS = (FullAttention, SlidingWindow, ChunkedLocal)

GUESS_REMEDY = (
    "Describe it with kvflow's specs, layer by layer, or pass guess=True (kvflow layout --guess) to have it taken for "
    "plain attention."
)


class GuessWarning(UserWarning):
    """A cache was described by a guess, which the message states. Two engines with one guess can both be wrong."""


def from_hf_config(
    config: Mapping[str, Any] | str | Path,
    *,
    block_size: int | None = None,
    dtype: str | None = None,
    cache_dtype: str | None = None,
    state_dtype: str | None = None,
    guess: bool = False,
) -> dict[str, CacheSpec]:
    """Describe the cache of a model by its Hugging Face ``config.json``.

    It refuses an unknown ``model_type``, and a key that may change the cache and is not understood, because a wrong
    description loses cache without an error. It does not describe a draft head of the checkpoint.

    Args:
        config: the decoded JSON, the path to it, or to its folder.
        block_size: tokens in one block; None: 16, or 256 for DeepSeek V4.
        dtype: element type of the model; None: that of the config, or bfloat16.
        cache_dtype: element type of keys, values and latents; None: that of the checkpoint's quantized cache, or of the
            model.
        state_dtype: element type of recurrent states; None: that of the config, or float32.
        guess: describe an unknown ``model_type`` as attention with keys and values in every layer, full unless
            ``layer_types`` or ``sliding_window`` says otherwise, and warn with what was guessed (``GuessWarning``).

    Returns:
        Layer name, as vLLM registers it -> spec, in model order. Head counts are the model's, not a rank's.

    Raises:
        SpecInvalid: the config cannot be read, its family is unknown, or a key is missing, invalid or not understood.
    """
    model = ModelConfig(read_config(config))
    unknown = _unknown(model)
    if unknown and not guess:
        raise SpecInvalid(
            f"config: {unknown} is not known", remedy=f"{GUESS_REMEDY} Known are {', '.join(sorted(FAMILIES))}."
        )
    describe = FAMILIES.get(model.model_type, attention.plain)
    model_dtype = dtype or model.dtype()
    chosen = {
        "block_size": BLOCK_SIZES.get(model.model_type, BLOCK_SIZE) if block_size is None else block_size,
        "dtype": model_dtype,
        "cache_dtype": cache_dtype or model.cache_dtype() or model_dtype,
        "state_dtype": state_dtype or model.state_dtype(),
    }
    try:
        options = msgspec.convert(chosen, type=Options)
    except msgspec.ValidationError as error:
        fault = describe_refusal(error, chosen, Options)
        raise SpecInvalid(
            f"config of model type {model.model_type!r}: {fault}",
            remedy="Pass the argument of this name, or correct config.json.",
        ) from error
    specs = describe(model, options)
    strange = model.not_understood(guessed=model.model_type not in FAMILIES)
    if strange:
        raise SpecInvalid(
            f"config of model type {model.model_type!r}: {', '.join(strange)} may change what is kept for a token, and "
            f"{'is' if len(strange) == 1 else 'are'} not understood in this family",
            remedy="Describe it with kvflow's specs, layer by layer; if a key changes nothing, leave it out.",
        )
    validate_specs(specs)
    if unknown:
        warnings.warn(f"{unknown} is not known; guessed: {_in_words(specs)}", GuessWarning, stacklevel=2)
    return specs


def _unknown(model: ModelConfig) -> str:
    """Return what is unknown about a model; empty if nothing is."""
    if model.model_type not in FAMILIES:
        return f"model type {model.model_type!r}"
    if model.wrapper and model.wrapper not in WRAPPERS:
        return f"model type {model.wrapper!r} around {model.model_type!r}"
    return ""


def _in_words(specs: Mapping[str, CacheSpec]) -> str:
    """Return how many layers keep what, and the name of the first."""
    kinds = []
    for spec, count in Counter(specs.values()).items():
        heads = f" of {spec.num_kv_heads} KV heads of {spec.head_size}" if isinstance(spec, WITH_HEADS) else ""
        kinds.append(f"{count} {spec.kind}{heads}{f' and a window of {spec.window}' if spec.window else ''}")
    return f"{', '.join(kinds)}; the first is {next(iter(specs))}"


def align_states(specs: Mapping[str, CacheSpec], *, shard: Shard | None = None) -> dict[str, CacheSpec]:
    """Enlarge attention blocks until a page holds a state, and pad the states to that page.

    A state is as large as hundreds of tokens. Without this, attention pages would be mostly padding. The block size
    becomes the smallest multiple whose page holds a state, as in vLLM 0.32. Ranks divide states and tokens differently,
    so the result depends on ``tp_size``.

    Args:
        specs: layer name -> spec.
        shard: the rank. Every rank of an engine gets the same result, that of rank 0, which holds the most.

    Returns:
        The specs, in the same order. A model without states, or without attention, is unchanged.
    """
    largest = Shard(tp_size=shard.tp_size if shard else 1)
    state_bytes = max((page_bytes(spec, largest) for spec in specs.values() if isinstance(spec, Mamba)), default=0)
    attention = [spec for spec in specs.values() if not isinstance(spec, Mamba)]
    if not state_bytes or not attention:
        return dict(specs)
    smallest = min(attention, key=lambda spec: page_bytes(spec, largest))
    factor = -(-state_bytes // page_bytes(smallest, largest))
    block_size = factor * smallest.block_size
    padded = factor * page_bytes(smallest, largest)
    return {
        name: msgspec.structs.replace(spec, block_size=block_size, page_bytes=padded)
        if isinstance(spec, Mamba)
        else msgspec.structs.replace(spec, block_size=factor * spec.block_size)
        for name, spec in specs.items()
    }


def by_layer(layers: Iterable[str], config: Mapping[str, Any]) -> dict[str, list[CacheSpec]]:
    """Return what a model keeps in layers that an engine names in its own way, by the number in their names.

    Args:
        layers: their names.
        config: the decoded ``config.json`` of the model.

    Returns:
        Layer name -> its specs, as ``from_hf_config`` returns them; none where the model or the layer is not known.
    """
    numbered: defaultdict[int, list[CacheSpec]] = defaultdict(list)
    with suppress(SpecInvalid):
        for name, spec in from_hf_config(config).items():
            numbered[layer_number(name)].append(spec)
    return {name: numbered.get(layer_number(name), []) for name in layers}


def kv_heads(
    layers: Iterable[str],
    config: Mapping[str, Any],
    text: tuple[Mapping[str, Any], int],
    draft: tuple[Mapping[str, Any], int] | None = None,
) -> dict[str, int]:
    """Return how many KV heads layers have in the whole model: layer name -> heads, 0 if not known.

    Args:
        layers: their names.
        config: of the model.
        text: the part of the config about the text model, and what the engine takes for the KV heads of every layer,
            which is true if no key says another number.
        draft: the same of a draft model, whose layers have the numbers behind those of the model.
    """
    num_layers = math.inf if draft is None else text[0].get("num_hidden_layers", 0)
    common, drafted = (
        total if set(_head_counts(keys)) <= {0, total} else 0 for keys, total in (text, draft or ({}, 0))
    )
    found = by_layer(layers, config).items()
    described = {name: max((getattr(spec, "num_kv_heads", 0) for spec in specs), default=0) for name, specs in found}
    return {name: drafted if layer_number(name) >= num_layers else heads or common for name, heads in described.items()}


def layer_number(name: str) -> int:
    """Return the number of a layer in its model; -1 if its name has none, or several."""
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    return numbers[0] if len(numbers) == 1 else -1


def _head_counts(config: Any, key: str = "") -> Iterator[int]:
    """Yield each number of KV heads in a config, wherever it stands."""
    match config:
        case Mapping():
            for name, value in config.items():
                yield from _head_counts(value, name)
        case list() | tuple():
            for value in config:
                yield from _head_counts(value, key)
        case int() if HEAD_COUNT.search(key) and not isinstance(config, bool):
            yield config


SUFFIX = ".json"


def names() -> tuple[str, ...]:
    """Return the names of the bundled models, sorted."""
    return tuple(
        sorted(entry.name.removesuffix(SUFFIX) for entry in _folder().iterdir() if entry.name.endswith(SUFFIX))
    )


def load(
    name: str,
    *,
    block_size: int | None = None,
    dtype: str | None = None,
    cache_dtype: str | None = None,
    state_dtype: str | None = None,
) -> dict[str, CacheSpec]:
    """Describe the cache of a bundled model; the options are those of ``from_hf_config``.

    Raises:
        SpecInvalid: there is no such model.
    """
    if name not in names():
        raise SpecInvalid(f"no model {name!r} is bundled", remedy=f"Use one of {', '.join(names())}.")
    config = msgspec.json.decode((_folder() / f"{name}{SUFFIX}").read_bytes())
    return from_hf_config(config, block_size=block_size, dtype=dtype, cache_dtype=cache_dtype, state_dtype=state_dtype)


def _folder() -> Traversable:
    return resources.files("kvflow.models") / "configs"
