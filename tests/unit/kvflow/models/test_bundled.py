"""The bundled models are the models that they are named after."""

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from kvflow.errors import SpecInvalid
from kvflow.layout.placement import page_bytes
from kvflow.layout.shards import Shard
from kvflow.layout.specs import CacheSpec
from kvflow.models import align_states, load, names
from kvflow.models.families import FAMILIES
from tests.helpers.loops import looped

VLLM = Path(__file__).parents[3] / "data" / "vllm_groups.json"
REFERENCE = Path(__file__).parents[4] / "docs" / "reference" / "models.md"
RECORDED = [
    ("gpt-2", "gpt-2", {}),
    ("llama-3.1-8b", "llama-3.1-8b", {}),
    ("llama-3.1-8b-tp2", "llama-3.1-8b", {}),
    ("qwen2.5-7b", "qwen2.5-7b", {}),
    ("gemma-2-2b", "gemma-2-2b", {}),
    ("gemma-3-4b-it", "gemma-3-4b", {}),
    ("gpt-oss-20b", "gpt-oss-20b", {}),
    ("deepseek-v3", "deepseek-v3", {"block_size": 64}),
    ("deepseek-v4-flash", "deepseek-v4-style", {}),
    ("granite-4-h-small", "granite-4-hybrid", {"state_dtype": "bfloat16"}),
    ("qwen3-next-80b", "qwen3-next", {"state_dtype": "bfloat16"}),
    ("qwen3-next-80b-tp2", "qwen3-next", {"state_dtype": "bfloat16"}),
]
"""Names of vLLM's records and of ours, and what vLLM was told."""


def test_every_bundled_model_is_compared_with_a_record_of_vllm():
    assert {name for _, name, _ in RECORDED} == {*names()}


def test_options_reach_the_specs():
    specs = load("llama-3.1-8b", block_size=32, cache_dtype="float8_e4m3fn")
    assert {(spec.block_size, spec.dtype) for spec in specs.values()} == {(32, "float8_e4m3fn")}


@pytest.mark.parametrize("name", ["gpt-5", "../gpt-2", "gpt-2.json", ""])
def test_an_unknown_name_is_refused_with_those_that_are_known(name):
    with pytest.raises(SpecInvalid) as refused:
        load(name)
    assert "gpt-oss-20b, " in refused.value.remedy


def test_families_and_bundled_models_are_documented():
    text = REFERENCE.read_text()
    assert [name for name in (*FAMILIES, *names()) if f"`{name}`" not in text] == []


@looped("recorded, name, options", RECORDED)
def test_pages_and_blocks_are_those_of_vllm(recorded, name, options):
    [model] = [model for model in json.loads(VLLM.read_text())["models"] if model["model"] == recorded]
    shard = Shard(tp_size=model["tp_size"])
    specs = [msgspec.convert(spec, type=CacheSpec) for spec in model["specs"]]

    def figures(spec):
        return spec.kind, spec.block_size, spec.window, getattr(spec, "num_kv_heads", 1), page_bytes(spec, shard)

    found = align_states(load(name, **options), shard=shard).values()
    # The record names the caches of one layer in another order.
    assert Counter(map(figures, found)) == Counter(figures(specs[index]) for index in model["layers"].values())
