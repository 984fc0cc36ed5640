"""Configs become the specs that an engine would have for them."""

import json

import pytest

from kvflow.errors import SpecInvalid
from kvflow.layout.pages import page_bytes
from kvflow.layout.shards import Shard
from kvflow.layout.specs import MLA, ChunkedLocal, FullAttention, SlidingWindow
from kvflow.models import from_hf_config

PLAIN = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
}
GRANITE = {
    **PLAIN,
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 16,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
}
QWEN3_NEXT = {
    **PLAIN,
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
V4 = {"model_type": "deepseek_v4", "num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "head_dim": 512}


def kinds(specs):
    return [spec.kind for spec in specs.values()]


def windows(specs):
    return [spec.window for spec in specs.values()]


def test_plain_attention_is_described_layer_by_layer():
    spec = FullAttention(block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16")
    assert from_hf_config(PLAIN) == {
        "model.layers.0.self_attn.attn": spec,
        "model.layers.1.self_attn.attn": spec,
    }


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"head_dim": 96}, "head_size", 96),
        ({"head_dim": None}, "head_size", 64),
        ({"num_key_value_heads": None}, "num_kv_heads", 8),
        ({"torch_dtype": "float16"}, "dtype", "float16"),
        ({"dtype": "torch.float32", "torch_dtype": "float16"}, "dtype", "float32"),
    ],
)
def test_keys_of_a_config_become_fields(change, field, value):
    assert {getattr(spec, field) for spec in from_hf_config({**PLAIN, **change}).values()} == {value}


def test_options_override_the_config():
    specs = from_hf_config({**GRANITE, "torch_dtype": "float16"}, block_size=32, dtype="bfloat16", cache_dtype="int8")
    mamba, attention = specs.values()
    assert (mamba.block_size, attention.block_size, attention.dtype) == (32, 32, "int8")
    assert [state.dtype for state in mamba.states] == ["bfloat16", "bfloat16", "bfloat16", "float32"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": None}, [0, 0, 0, 0, 0, 0]),
        ({"model_type": "mistral", "sliding_window": 64}, [64] * 6),
        ({"model_type": "mistral"}, [4096] * 6),
        ({"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 4}, [0] * 6),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4},
            [0, 0, 0, 0, 64, 64],
        ),
        ({"model_type": "qwen3"}, [0] * 6),
        ({"model_type": "gemma2"}, [4096, 0, 4096, 0, 4096, 0]),
        ({"model_type": "gemma3_text", "sliding_window": 64}, [64, 64, 64, 64, 64, 0]),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 3}, [4096, 4096, 0, 4096, 4096, 0]),
        ({"model_type": "gpt_oss"}, [128, 0, 128, 0, 128, 0]),
        ({"model_type": "llama4_text", "attention_chunk_size": 64}, [64, 64, 64, 0, 64, 64]),
        ({"model_type": "llama4_text", "no_rope_layers": [1, 0, 1, 1, 1, 1]}, [8192, 0, 8192, 8192, 8192, 8192]),
        ({"model_type": "llama4_text", "attention_chunk_size": None}, [0] * 6),
    ],
)
def test_windows_follow_the_family(config, expected):
    assert windows(from_hf_config({**PLAIN, "num_hidden_layers": 6, **config})) == expected


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3", "gpt_oss", "somebody's"])
def test_layer_types_come_before_the_rule_of_the_family(family):
    types = ["full_attention", "sliding_attention"]
    specs = from_hf_config({**PLAIN, "model_type": family, "layer_types": types, "sliding_window": 64})
    assert [type(spec) for spec in specs.values()] == [FullAttention, SlidingWindow]


def test_a_chunk_is_not_a_window():
    specs = from_hf_config({**PLAIN, "model_type": "llama4_text"})
    assert {type(spec) for spec in specs.values()} == {ChunkedLocal}


@pytest.mark.parametrize(
    ("config", "first"),
    [
        ({"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8}, "transformer.h.0.attn.attn"),
        ({**PLAIN, "model_type": "gpt_oss"}, "model.layers.0.attn.attn"),
        ({"model_type": "gemma3", "text_config": PLAIN}, "language_model.model.layers.0.self_attn.attn"),
        (GRANITE, "model.layers.0.mixer"),
        (QWEN3_NEXT, "model.layers.0.linear_attn"),
        (V4, "model.layers.0.attn.swa_cache"),
    ],
)
def test_layers_are_named_as_vllm_names_them(config, first):
    assert next(iter(from_hf_config(config))) == first


def test_a_nested_text_model_takes_its_dtype_from_outside():
    specs = from_hf_config({"model_type": "wrapper", "torch_dtype": "float16", "text_config": PLAIN})
    assert {spec.dtype for spec in specs.values()} == {"float16"}


def test_latent_attention_is_one_vector_per_token():
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    spec = MLA(block_size=64, head_size=576, dtype="bfloat16")
    assert list(from_hf_config(config, block_size=64).values()) == [spec, spec]
    sparse = from_hf_config({**config, "model_type": "deepseek_v32", "index_head_dim": 128}, block_size=64)
    assert list(sparse)[1] == "model.layers.0.self_attn.indexer.k_cache"
    assert [page_bytes(spec) for spec in sparse.values()] == [64 * 576 * 2, 64 * 132] * 2


def test_a_compound_keeps_up_to_five_caches_per_layer():
    found = {name.removeprefix("model.layers."): spec for name, spec in from_hf_config(V4).items()}
    entry = 512 * 2
    assert {name: (spec.block_size, spec.window, page_bytes(spec)) for name, spec in found.items()} == {
        "0.attn.swa_cache": (64, 128, 64 * entry),
        "1.attn": (256, 0, 64 * entry),
        "1.attn.compressor.state_cache": (4, 8, 4 * 2048 * 4),
        "1.attn.indexer.k_cache": (256, 0, 8704),  # 64 entries of 132 bytes, rounded up to a multiple of 512
        "1.attn.indexer.compressor.state_cache": (4, 8, 4 * 512 * 4),
        "1.attn.swa_cache": (64, 128, 64 * entry),
        "2.attn": (256, 0, 2 * entry),
        "2.attn.compressor.state_cache": (8, 128, 8 * 1024 * 4),
        "2.attn.swa_cache": (64, 128, 64 * entry),
    }


@pytest.mark.parametrize("block_size", [16, 64, 200])
def test_a_compound_refuses_blocks_that_cut_an_entry(block_size):
    with pytest.raises(SpecInvalid, match=f"block_size is {block_size}.*multiple of 128"):
        from_hf_config(V4, block_size=block_size)


def test_mamba_states_lie_channels_first():
    states = {state.name: state for state in from_hf_config(GRANITE)["model.layers.0.mixer"].states}
    assert {name: (state.shape, state.shard_axis) for name, state in states.items()} == {
        "conv_x": ((1024, 3), 0),
        "conv_B": ((32, 3), None),
        "conv_C": ((32, 3), None),
        "ssm": ((16, 64, 32), 0),
    }


def test_groups_of_mamba_heads_are_divided_when_there_are_several():
    states = from_hf_config({**GRANITE, "mamba_n_groups": 4})["model.layers.0.mixer"].states
    assert [(state.shape[0], state.shard_axis) for state in states[1:3]] == [(128, 0), (128, 0)]


def test_bamba_says_which_layers_attend():
    config = {**GRANITE, "model_type": "bamba", "attn_layer_indices": [1], "layer_types": None}
    assert from_hf_config(config) == from_hf_config(GRANITE)


def test_gated_delta_nets_keep_three_convolutions_and_a_state():
    specs = from_hf_config(QWEN3_NEXT)
    assert kinds(specs) == ["mamba", "mamba", "mamba", "full"]
    states = specs["model.layers.0.linear_attn"].states
    assert [(state.name, state.shape) for state in states] == [
        ("conv_q", (16, 3)),
        ("conv_k", (16, 3)),
        ("conv_v", (64, 3)),
        ("ssm", (4, 16, 8)),
    ]


@pytest.mark.parametrize("key", ["mamba_ssm_dtype", "mamba_ssm_cache_dtype"])
def test_the_config_may_name_the_dtype_of_states(key):
    state = from_hf_config({**QWEN3_NEXT, key: "bfloat16"})["model.layers.0.linear_attn"].states[-1]
    assert state.dtype == "bfloat16"


def test_the_caller_overrides_the_dtype_of_states():
    config = {**QWEN3_NEXT, "mamba_ssm_dtype": "bfloat16"}
    state = from_hf_config(config, state_dtype="float16")["model.layers.0.linear_attn"].states[-1]
    assert state.dtype == "float16"


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (PLAIN, "num_hidden_layers"),
        (PLAIN, "num_attention_heads"),
        (PLAIN, "hidden_size"),
        ({**PLAIN, "layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "sliding_window"),
        ({"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 1}, "n_embd"),
        (
            {"model_type": "deepseek_v3", "num_hidden_layers": 1, "kv_lora_rank": 1, "qk_rope_head_dim": 1},
            "kv_lora_rank",
        ),
        (V4, "compress_ratios"),
        (GRANITE, "mamba_n_heads"),
        (GRANITE, "layer_types"),
        (QWEN3_NEXT, "linear_key_head_dim"),
    ],
)
def test_a_missing_key_is_named_with_the_model_type(config, missing):
    reduced = {key: value for key, value in config.items() if key != missing}
    with pytest.raises(SpecInvalid) as refused:
        from_hf_config(reduced)
    assert missing in refused.value.message
    assert repr(config["model_type"]) in refused.value.message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2', expected a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected at most"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', expected a list"),
        ({"layer_types": ["full_attention"]}, "expected 2 entries, one per layer, not 1"),
        ({"layer_types": ["full_attention", "linear"]}, "layer_types is 'linear', expected one of full_attention"),
        ({"layer_types": ["full_attention", ["linear"]]}, r"\['linear'\]\], expected a list of str"),
        ({"torch_dtype": "float64"}, "float64"),
        ({"torch_dtype": 16}, "16, expected the name of a dtype"),
        ({"model_type": ["llama"]}, "model_type is"),
        ({"head_dim": 1 << 30}, "head_size"),
    ],
)
def test_an_odd_value_is_named(change, said):
    with pytest.raises(SpecInvalid, match=said):
        from_hf_config({**PLAIN, **change})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_lora_rank": 512}, "it has kv_lora_rank"),
        ({"mamba_d_state": 16}, "it has mamba_d_state"),
        ({"num_attention_heads": None}, "it has no num_attention_heads"),
        ({"hidden_size": None}, "it has no head_dim or hidden_size"),
    ],
)
def test_an_unknown_family_that_is_not_plain_is_refused(change, reason):
    with pytest.raises(SpecInvalid, match=reason) as refused:
        from_hf_config({**PLAIN, "model_type": "novel", **change})
    assert "'novel'" in refused.value.message
    assert "deepseek_v3, " in refused.value.remedy


def test_an_unknown_family_with_plain_keys_is_attention():
    assert from_hf_config({**PLAIN, "model_type": "novel"}) == from_hf_config(PLAIN)


@pytest.mark.parametrize("as_text", [False, True])
def test_a_config_may_be_a_file_or_its_folder(tmp_path, as_text):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    for path in (tmp_path, tmp_path / "config.json"):
        assert from_hf_config(str(path) if as_text else path) == from_hf_config(PLAIN)


@pytest.mark.parametrize(
    ("content", "said"), [("{", "is not JSON"), ("[]", "holds a JSON list"), ("\udcff", "is not JSON")]
)
def test_a_file_that_is_no_config_is_refused(tmp_path, content, said):
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(SpecInvalid, match=said):
        from_hf_config(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SpecInvalid, match=r"nothing\.json cannot be read"):
        from_hf_config(tmp_path / "nothing.json")


def test_ranks_share_what_a_family_says_they_share():
    mamba = from_hf_config(GRANITE)["model.layers.0.mixer"]
    shapes = [part.held_shape(Shard(tp_rank=1, tp_size=2)) for part in mamba.components]
    assert shapes == [(512, 3), (32, 3), (32, 3), (8, 64, 32)]
