"""The bundled models are the models that they are named after."""

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from kvflow.errors import SpecInvalid
from kvflow.layout.groups import plan_groups
from kvflow.layout.placement import page_bytes
from kvflow.layout.shards import Shard
from kvflow.layout.specs import CacheSpec
from kvflow.models import align_states, load, names
from kvflow.models.families import FAMILIES
from tests.helpers.loops import looped

VLLM = Path(__file__).parents[3] / "data" / "vllm_groups.json"
REFERENCE = Path(__file__).parents[4] / "docs" / "reference" / "models.md"

# name -> caches, and how many of each kind.
FIGURES = {
    "deepseek-v3": (61, {"mla": 61}),
    "deepseek-v4-style": (167, {"mla": 167}),
    "gemma-2-2b": (26, {"sliding": 13, "full": 13}),
    "gemma-3-4b": (34, {"sliding": 29, "full": 5}),
    "gpt-2": (12, {"full": 12}),
    "gpt-oss-20b": (24, {"sliding": 12, "full": 12}),
    "granite-4-hybrid": (40, {"mamba": 36, "full": 4}),
    "llama-3.1-8b": (32, {"full": 32}),
    "qwen2.5-7b": (28, {"full": 28}),
    "qwen3-next": (48, {"mamba": 36, "full": 12}),
}

HEADS = {
    "gemma-2-2b": (4, 256),
    "gemma-3-4b": (4, 256),
    "gpt-2": (12, 64),
    "gpt-oss-20b": (8, 64),
    "granite-4-hybrid": (8, 128),
    "llama-3.1-8b": (8, 128),
    "qwen2.5-7b": (4, 128),
    "qwen3-next": (2, 256),
}

WINDOWS = {"gemma-2-2b": 4096, "gemma-3-4b": 1024, "gpt-oss-20b": 128}


def test_every_bundled_model_is_checked_here():
    assert names() == tuple(FIGURES)


@looped("name", names())
def test_layers_and_kinds(name):
    specs = load(name)
    assert (len(specs), Counter(spec.kind for spec in specs.values())) == FIGURES[name]


@looped("name", HEADS)
def test_heads(name):
    found = {(spec.num_kv_heads, spec.head_size) for spec in load(name).values() if spec.kind != "mamba"}
    assert found == {HEADS[name]}


@looped("name", names())
def test_windows(name):
    found = {spec.window for spec in load(name).values() if spec.kind == "sliding"}
    assert found == ({WINDOWS[name]} if name in WINDOWS else set())


def test_gpt_oss_alternates_from_a_window_on():
    assert [spec.kind for spec in load("gpt-oss-20b").values()] == ["sliding", "full"] * 12


def test_deepseek_v3_keeps_576_elements_of_a_token():
    assert {(spec.head_size, spec.dtype) for spec in load("deepseek-v3").values()} == {(576, "bfloat16")}


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("granite-4-hybrid", (8192 + 128 + 128) * 3 * 2 + 128 * 64 * 128 * 4),
        ("qwen3-next", (2048 + 2048 + 4096) * 3 * 2 + 32 * 128 * 128 * 4),
    ],
)
def test_bytes_of_a_state(name, nbytes):
    assert {page_bytes(spec) for spec in load(name).values() if spec.kind == "mamba"} == {nbytes}


def test_gemma_3_shares_five_positions_among_seven_groups():
    lengths = [len(group.layers) for group in plan_groups(load("gemma-3-4b"))]
    assert (len(lengths), max(lengths)) == (7, 5)


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


@looped(
    "recorded, name, options",
    [
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
    ],
)
def test_pages_and_blocks_are_those_of_vllm(recorded, name, options):
    [model] = [model for model in json.loads(VLLM.read_text())["models"] if model["model"] == recorded]
    shard = Shard(tp_size=model["tp_size"])
    specs = [msgspec.convert(spec, type=CacheSpec) for spec in model["specs"]]

    def figures(spec):
        return spec.kind, spec.block_size, spec.window, page_bytes(spec, shard)

    found = align_states(load(name, **options), shard=shard).values()
    # The record names the caches of one layer in another order.
    assert Counter(map(figures, found)) == Counter(figures(specs[index]) for index in model["layers"].values())
