"""Configs become the specs that an engine would have for them."""

import json

import pytest

from kvflow.errors import SpecInvalid
from kvflow.layout.specs import MLA, FullAttention
from kvflow.models import GuessWarning, from_hf_config
from tests.helpers.loops import looped

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


@looped(
    "change, field, value",
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


@looped(
    "config, expected",
    [
        ({"model_type": "mistral"}, [4096] * 6),
        ({"model_type": "gemma2"}, [4096, 0] * 3),
        ({"model_type": "gemma3_text"}, [4096] * 5 + [0]),
        ({"model_type": "gpt_oss"}, [128, 0] * 3),
        ({"model_type": "cohere2"}, [4097, 4097, 4097, 0, 4097, 4097]),
        ({"model_type": "smollm3", "sliding_window": 64, "use_sliding_window": False}, [0] * 6),
        ({"model_type": "gemma2", "sliding_window": None, "layer_types": ["sliding_attention"] * 6}, [0] * 6),
        ({"model_type": "llama4_text", "no_rope_layers": [1, 0, 1, 1, 1, 1]}, [8192, 0, 8192, 8192, 8192, 8192]),
        ({"model_type": "exaone4", "sliding_window": 64, "sliding_window_pattern": "LLG"}, [64, 64, 0, 64, 64, 0]),
        ({"model_type": "exaone4", "sliding_window": 64, "sliding_window_pattern": 2}, [64, 0, 64, 0, 64, 0]),
        ({"model_type": "exaone4", "sliding_window": None, "sliding_window_pattern": None}, [0] * 6),
    ],
)
def test_windows_follow_the_family(config, expected):
    """What no config says that vLLM was asked of; ``tests/properties/test_configs.py`` has more."""
    assert windows(from_hf_config({**PLAIN, "num_hidden_layers": 6, **config})) == expected


def test_a_nested_text_model_takes_its_dtype_from_outside():
    specs = from_hf_config({"model_type": "mistral3", "torch_dtype": "float16", "text_config": PLAIN})
    assert {spec.dtype for spec in specs.values()} == {"float16"}


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


@looped(
    "config, missing",
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


@looped(
    "change, said",
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


def test_a_null_in_a_nested_text_model_is_no_missing_key():
    mistral = {**PLAIN, "model_type": "mistral"}
    nested = {"model_type": "mistral3", "sliding_window": 64, "text_config": {**mistral, "sliding_window": None}}
    assert windows(from_hf_config(nested)) == [0, 0]
    missing = {"model_type": "mistral3", "sliding_window": 64, "text_config": mistral}
    assert windows(from_hf_config(missing)) == [4096, 4096]
    llama4 = {**PLAIN, "model_type": "llama4_text", "attention_chunk_size": None}
    assert windows(from_hf_config({"model_type": "llama4", "text_config": llama4})) == [0, 0]


@looped(
    "change, found",
    [
        ({"model_type": "falcon", "multi_query": False}, (8, 64, 0)),
        (
            {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 4, "multi_query": True},
            (4, 64, 0),
        ),
        ({"model_type": "falcon", "new_decoder_architecture": True, "n_head_kv": 2}, (2, 64, 0)),
        ({"model_type": "gpt_bigcode"}, (1, 64, 0)),
        ({"model_type": "gpt_bigcode", "multi_query": False}, (8, 64, 0)),
    ],
)
def test_one_kv_head_for_all_is_described_as_one(change, found):
    config = {key: value for key, value in PLAIN.items() if key != "num_key_value_heads"} | change
    specs = from_hf_config(config).values()
    assert {(spec.num_kv_heads, spec.head_size, spec.window) for spec in specs} == {found}


MIMO = {
    **PLAIN,
    "model_type": "mimo_v2_flash",
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 192,
    "swa_v_head_dim": 64,
    "sliding_window_size": 128,
    "hybrid_layer_pattern": [0, 1],
}


@pytest.mark.parametrize(
    "config",
    [
        {**PLAIN, "model_type": "novel"},
        {**PLAIN, "model_type": None},
        {"model_type": "novel", "text_config": PLAIN},
        {"model_type": "mistral3", "text_config": {**PLAIN, "model_type": "novel"}},
    ],
    ids=["family", "nothing", "around a text model", "in a known one"],
)
def test_what_is_not_known_is_refused_and_guessed_aloud_on_request(config):
    with pytest.raises(SpecInvalid, match="is not known") as refused:
        from_hf_config(config)
    assert "guess=True" in refused.value.remedy
    assert "deepseek_v3, " in refused.value.remedy
    with pytest.warns(
        GuessWarning, match="guessed: 2 full of 2 KV heads of 64; the first is .*model.layers.0.self_attn"
    ):
        guessed = from_hf_config(config, guess=True)
    assert list(guessed.values()) == list(from_hf_config(PLAIN).values())


def test_a_guess_tells_windows_apart():
    types = ["sliding_attention", "full_attention"]
    with pytest.warns(
        GuessWarning, match="1 sliding of 2 KV heads of 64 and a window of 8, 1 full of 2 KV heads of 64"
    ):
        from_hf_config({**PLAIN, "model_type": "novel", "layer_types": types, "sliding_window": 8}, guess=True)


def test_a_known_family_needs_no_guess(recwarn):
    assert from_hf_config(PLAIN, guess=True) == from_hf_config(PLAIN)
    assert not recwarn


FP8_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@looped(
    "quantization",
    [
        {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8_SCHEME}},
        {"quantization_config": {"kv_cache_scheme": {**FP8_SCHEME, "strategy": "attn_head"}}},
        {"compression_config": {"kv_cache_scheme": FP8_SCHEME}},
        {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}},
        {"quantization_config": {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}},
        {"quantization_config": {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}},
    ],
)
@looped("nested", [False, True])
def test_a_cache_that_the_checkpoint_quantizes_is_read(quantization, nested):
    config = {**PLAIN, **quantization}
    if nested:
        config = {"model_type": "mistral3", "text_config": {**PLAIN, "model_type": "mistral"}, **quantization}
    assert {spec.dtype for spec in from_hf_config(config).values()} == {"float8_e4m3fn"}
    assert {spec.dtype for spec in from_hf_config(config, cache_dtype="bfloat16").values()} == {"bfloat16"}


@looped(
    "quantization, key",
    [
        ({"kv_cache_scheme": "static"}, "kv_cache_scheme"),
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo"),
        ({"quantization": {"kv_cache_quant_algo": "INT8"}}, "kv_cache_quant_algo"),
        ({"quant_method": "quark", "export": {"kv_cache_group": ["*k_proj", "*v_proj"]}}, "kv_cache_group"),
    ],
)
def test_a_quantized_cache_that_is_not_known_is_refused_by_its_name(quantization, key):
    config = {**PLAIN, "quantization_config": quantization}
    with pytest.raises(SpecInvalid, match=f"quantization_config has {key} .*: an unknown cache") as refused:
        from_hf_config(config)
    assert "cache_dtype" in refused.value.remedy
    assert {spec.dtype for spec in from_hf_config(config, cache_dtype="int8").values()} == {"int8"}


@looped("says_nothing", [None, {}, "fp8", {"kv_cache_scheme": None}, {"export": {"kv_cache_group": []}}])
def test_quantized_weights_alone_change_nothing(says_nothing):
    assert from_hf_config({**PLAIN, "quantization_config": says_nothing}) == from_hf_config(PLAIN)


def test_a_quantized_cache_beside_an_indexer_is_refused():
    config = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "num_hidden_layers": 1}
    config |= {"model_type": "deepseek_v32", "quantization_config": {"kv_cache_scheme": FP8_SCHEME}}
    with pytest.raises(SpecInvalid, match="kv_cache_scheme"):
        from_hf_config(config)


def test_the_file_of_modelopt_beside_a_config_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    quantization = {"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantization))
    assert {spec.dtype for spec in from_hf_config(tmp_path).values()} == {"float8_e4m3fn"}
    assert {spec.dtype for spec in from_hf_config(tmp_path / "config.json").values()} == {"float8_e4m3fn"}


def test_models_that_differ_from_a_known_one_by_name_are_known():
    """Each was asked of vLLM 0.32 by ``tests/vllm/specs_oracle.py``: it keeps the same."""
    mimo = {
        **PLAIN,
        "hybrid_layer_pattern": [0, 1],
        "sliding_window_size": 128,
        "head_dim": 192,
        "v_head_dim": 128,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
    }
    assert from_hf_config({**mimo, "model_type": "mimo_v2"}) == from_hf_config({**mimo, "model_type": "mimo_v2_flash"})
    text = {"num_hidden_layers": 2, "kv_lora_rank": 256, "qk_rope_head_dim": 64, "num_key_value_heads": 32}
    for config, prefix in (
        ({**text, "model_type": "mistral4"}, ""),
        ({"model_type": "mistral3", "text_config": {**text, "model_type": "mistral4"}}, "language_model."),
    ):
        specs = from_hf_config(config)
        assert specs == dict.fromkeys(
            (f"{prefix}model.layers.{index}.self_attn.attn" for index in range(2)),
            MLA(block_size=16, head_size=320, dtype="bfloat16"),
        )


def test_layers_that_share_the_cache_of_others_keep_nothing():
    text = {"model_type": "gemma3n_text", "num_hidden_layers": 35}
    assert windows(from_hf_config(text)) == ([512] * 4 + [0]) * 4  # as vLLM 0.32 keeps for the defaults of transformers
    wrapped = from_hf_config({"model_type": "gemma3n", "text_config": text})
    assert list(wrapped) == [f"language_model.model.layers.{index}.self_attn.attn" for index in range(20)]
    assert len(from_hf_config({**text, "num_kv_shared_layers": None})) == 35
    for odd in (35, -1, "4"):
        with pytest.raises(SpecInvalid, match="num_kv_shared_layers is"):
            from_hf_config({**text, "num_kv_shared_layers": odd})


@looped(
    "model_type",
    ["kimi_k3", "kimi_linear", "minimax_m3", "minimax_m3_vl", "qwen4_exp", "qwen4_exp_text", "step3p5", "step3p7"],
)
def test_models_of_another_structure_are_refused_by_name(model_type):
    with pytest.raises(SpecInvalid, match=f"'{model_type}' is not known"):
        from_hf_config({**PLAIN, "model_type": model_type})


@looped("guess", [False, True])
@looped(
    "change",
    [
        {"v_head_dim": 128},
        {"num_kv_shared_layers": 1},
        {"kv_lora_rank": 512},
        {"block_configs": [{"attention": {"n_heads_in_group": 8}}]},
        {"sliding_window_pattern": 4},
        {"multi_query": True},
        {"num_kv_heads": 4},
        {"num_attention_groups": 1},
        {"hybrid_layer_pattern": [0, 1]},
        {"mamba_d_state": 16},
    ],
)
def test_a_key_that_is_not_understood_is_refused_by_its_name(change, guess):
    (key,) = change
    for model_type in ("llama", "novel") if guess else ("llama",):
        with pytest.raises(SpecInvalid, match=f"'{model_type}': {key} may change what is kept"):
            from_hf_config({**PLAIN, "model_type": model_type, **change}, guess=guess)


@looped("value", [None, False, 0, [], ""])
def test_a_key_that_says_nothing_is_no_reason_to_refuse(value):
    assert from_hf_config({**PLAIN, "num_kv_shared_layers": value}) == from_hf_config(PLAIN)


def test_a_guess_is_refused_for_keys_that_sound_like_another_cache():
    novel = {**PLAIN, "model_type": "novel"}
    with pytest.raises(SpecInvalid, match="recurrent_block_count, kv_reuse may change"):
        from_hf_config({**novel, "recurrent_block_count": 4, "kv_reuse": 2, "n_shared_experts": 1}, guess=True)
    assert from_hf_config({**PLAIN, "recurrent_block_count": 4}) == from_hf_config(PLAIN)


@pytest.mark.parametrize(
    ("missing", "said"), [("num_attention_heads", "num_attention_heads"), ("hidden_size", "hidden_size")]
)
def test_a_guess_needs_the_plain_keys(missing, said):
    with pytest.raises(SpecInvalid, match=f"'novel' has no '{said}'"):
        from_hf_config({**PLAIN, "model_type": "novel", missing: None}, guess=True)


NEMOTRON = {
    **PLAIN,
    "model_type": "nemotron_h",
    "head_dim": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
}


@pytest.mark.parametrize(
    "said",
    [
        {"hybrid_override_pattern": "M-*E"},
        {"layers_block_type": ["mamba", "mlp", "attention", "moe"]},
        # As transformers writes a config that it has read.
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"], "attention_head_dim": 64},
    ],
)
def test_layers_without_a_cache_are_left_out(said):
    specs = from_hf_config({**NEMOTRON, **said})
    assert {name: spec.kind for name, spec in specs.items()} == {
        "model.layers.0.mixer": "mamba",
        "model.layers.2.mixer.attn": "full",
    }
    assert [state.shape for state in specs["model.layers.0.mixer"].states] == [(32, 3), (32, 3), (32, 3), (4, 8, 16)]


@looped(
    "config, said",
    [
        ({**NEMOTRON, "hybrid_override_pattern": "MX"}, "hybrid_override_pattern is 'MX'"),
        (NEMOTRON, "hybrid_override_pattern is None"),
        ({**NEMOTRON, "layers_block_type": ["mamba", "other"]}, "layers_block_type is 'other'"),
        ({**PLAIN, "model_type": "minimax_m2", "attn_type_list": [0, 1]}, "attn_type_list"),
        ({**PLAIN, "model_type": "exaone4", "sliding_window_pattern": -1}, "sliding_window_pattern is -1"),
        ({**PLAIN, "model_type": "gemma4_text"}, "layer_types is None"),
        ({**MIMO, "hybrid_layer_pattern": None}, "hybrid_layer_pattern is None"),
    ],
)
def test_a_family_refuses_what_it_cannot_mean(config, said):
    with pytest.raises(SpecInvalid, match=said):
        from_hf_config(config)


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
