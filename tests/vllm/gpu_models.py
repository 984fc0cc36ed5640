"""Published models whose GPU caches are compared, and the attention backends that serve them."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPECS = ROOT / "tests" / "data" / "vllm_specs.json"
BACKEND = "vllm.v1.attention.backends"


@dataclass(frozen=True)
class Variant:
    """One way to keep a cache on a GPU.

    Attributes:
        backend: path of vLLM's class.
        layout: that is asked for; vLLM takes another where a backend or the model does not allow it.
        block_size: as ``--block-size``; 0 leaves it to vLLM.
        cache_dtype: as ``--kv-cache-dtype``.
    """

    backend: str
    layout: str
    block_size: int = 0
    cache_dtype: str = "auto"

    @property
    def name(self):
        return self.backend.rpartition(".")[2].removesuffix("Backend")


@dataclass(frozen=True)
class Published:
    """One config, cut to a few layers of each kind.

    Attributes:
        kind: of its backends.
        layers: that are kept, from the first one.
        overrides: of the config that is recorded.
    """

    kind: str
    layers: int = 3
    overrides: tuple = ()


FLASH_ATTENTION = f"{BACKEND}.flash_attn.FlashAttentionBackend"
FLASH_INFER = f"{BACKEND}.flashinfer.FlashInferBackend"
TRITON = f"{BACKEND}.triton_attn.TritonAttentionBackend"
FLASH_DIFFERING = f"{BACKEND}.flash_attn_diffkv.FlashAttentionDiffKVBackend"
TRITON_DIFFERING = f"{BACKEND}.triton_attn_diffkv.TritonAttentionDiffKVBackend"
FLASH_MLA = f"{BACKEND}.mla.flashmla.FlashMLABackend"
TRITON_MLA = f"{BACKEND}.mla.triton_mla.TritonMLABackend"
FLASH_SPARSE = f"{BACKEND}.mla.flashmla_sparse.FlashMLASparseBackend"


def ways(*variants, formats):
    """Return the same variants for each cache dtype. One is backend, layout and, if vLLM is told it, block size."""
    return {each: tuple(Variant(*variant, cache_dtype=each) for variant in variants) for each in formats}


BACKENDS = {
    "heads": {
        **ways((FLASH_ATTENTION, "LBNHC"), (FLASH_INFER, "LBHNC"), (TRITON, "BHLNC", 64), formats=("auto", "fp8_e4m3")),
        **ways((FLASH_INFER, "LBNHC"), (FLASH_INFER, "BHLNC", 64), formats=("fp8_e5m2",)),
        **ways(
            (TRITON, "LBNHC"), (TRITON, "BLNHC"), (TRITON, "LBHNC"), (TRITON, "LBHNC", 64),
            formats=("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"),
        ),
        **ways((FLASH_INFER, "LBNHC"), (FLASH_INFER, "LBHNC"), (FLASH_INFER, "BLHNC"), formats=("nvfp4",)),
    },
    "differing": ways((FLASH_DIFFERING, "LBNHC"), (TRITON_DIFFERING, "LBHNC"), formats=("auto", "fp8")),
    "hybrid": ways((FLASH_ATTENTION, "LBNHC"), (FLASH_INFER, "BLHNC"), formats=("auto", "fp8")),
    "latent": ways((FLASH_MLA, "LBNHC"), (TRITON_MLA, "BLHNC", 16), formats=("auto", "fp8")),
    "sparse": ways(
        (FLASH_SPARSE, "LBNHC"), (FLASH_SPARSE, "BLHNC"), (FLASH_SPARSE, "LBNHC", 128),
        formats=("auto", "fp8_ds_mla", "nvfp4_ds_mla"),
    ),
    "compressed": ways(("", "BLHNC"), ("", "BLNHC"), formats=("fp8_ds_mla",)),  # its layers name their backends
}  # fmt: skip
"""Kind of a model -> cache dtype -> the ways in which backends of GPUs keep its cache."""

OPAQUE = ("int8_per_token_head", "int4_per_token_head", "nvfp4")
"""Formats whose pages move whole: the keys and values of one token cannot be told apart in them."""

MODELS = {
    "meta-llama/Meta-Llama-3.1-8B": Published("heads"),
    "Qwen/Qwen3-30B-A3B": Published("heads"),
    "openai/gpt-oss-20b": Published("heads", 4),
    "gemma3_text": Published("heads", 7),
    "zai-org/GLM-4.7-FP8": Published("heads", 4),
    "MiniMaxAI/MiniMax-M2.5": Published("heads"),
    "XiaomiMiMo/MiMo-V2-Flash": Published("differing", 7),
    "deepseek-ai/DeepSeek-V3": Published("latent"),
    "moonshotai/Kimi-K2-Instruct": Published("latent"),
    "deepseek-ai/DeepSeek-V3.2": Published("sparse"),
    "zai-org/GLM-5.2": Published("sparse", 5),
    "deepseek-ai/DeepSeek-V4-Flash": Published("compressed", 4),
    "qwen3_next": Published("hybrid", 4),
    "granitemoehybrid": Published("hybrid", 7, ("granite-4-hybrid",)),
    "nvidia/Nemotron-H-56B-Base-8K": Published("hybrid", 8),
}
"""Models of ``vllm_specs.json``. Names without an owner are the config that transformers has for the family."""


@cache
def _recorded():
    return {row["model"]: row["config"] for row in json.loads(SPECS.read_text())["models"]}


def config_of(model):
    """Return a model's published config, cut to a few layers."""
    chosen = MODELS[model]
    config = dict(_recorded()[model])
    for bundled in chosen.overrides:
        config |= json.loads((ROOT / "kvflow" / "models" / "configs" / f"{bundled}.json").read_text())
    whole = config["num_hidden_layers"]
    if "compress_ratios" in config:
        config["compress_ratios"] = config["compress_ratios"][:whole]  # those of drafts stand behind
    cut = {
        key: value[: chosen.layers]
        for key, value in config.items()
        if isinstance(value, list | str) and len(value) == whole
    }
    return config | cut | {"num_hidden_layers": chosen.layers}
