"""Configs of any size, family by family: each layer keeps what the authors of its family say, and an oracle counts it.

The oracle knows a config and the sizes of elements. It shares no code with ``kvflow.models``.
"""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import SpecInvalid
from kvflow.layout.placement import content_bytes, page_bytes
from kvflow.layout.shards import Shard
from kvflow.models import align_states, from_hf_config

from .caches import thorough

BLOCK = 16
ITEM = 2
"""Bytes of an element of bfloat16, which each config has where it says nothing."""
SIZES = st.sampled_from((8, 16, 64))
COUNTS = st.integers(1, 12)
FULL, SLIDING = "full_attention", "sliding_attention"
TYPES = st.lists(st.sampled_from((FULL, SLIDING)), min_size=1, max_size=12)
HYBRID_KEYS = ("n_heads", "d_head", "d_state", "n_groups", "d_conv")


def of_heads(layers, heads=8, **keys):
    return {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 2, "head_dim": 16, **keys}


def windows(config):
    return [spec.window for spec in from_hf_config(config).values()]


@thorough
@given(layers=COUNTS, first=st.integers(0, 13), window=COUNTS, used=st.booleans())
def test_windows_of_qwen_begin_at_the_layer_that_is_named(layers, first, window, used):
    keys = {"sliding_window": window, "use_sliding_window": used, "max_window_layers": first}
    config = of_heads(layers, model_type="qwen2", **keys)
    full = min(first, layers) if used else layers
    assert windows(config) == [0] * full + [window] * (layers - full)


@thorough
@given(
    types=st.lists(st.sampled_from((FULL, SLIDING)), min_size=1, max_size=12), draft=st.integers(0, 3), window=COUNTS
)
def test_listed_types_are_those_of_the_layers_and_of_no_draft_head(types, draft, window):
    config = of_heads(len(types), model_type="gemma3_text", layer_types=types + [FULL] * draft, sliding_window=window)
    assert windows(config) == [window if kind == SLIDING else 0 for kind in types]


@thorough
@given(layers=st.integers(2, 20), shared=st.integers(0, 19))
def test_layers_that_read_what_others_keep_have_no_cache(layers, shared):
    config = of_heads(layers, model_type="gemma3n_text", num_kv_shared_layers=shared)
    if shared >= layers:
        with pytest.raises(SpecInvalid, match="num_kv_shared_layers"):
            from_hf_config(config)
    else:
        assert [bool(each) for each in windows(config)] == [(at + 1) % 5 > 0 for at in range(layers - shared)]


@thorough
@given(types=TYPES, heads=COUNTS, of_full=COUNTS, equal=st.booleans())
def test_full_layers_of_gemma4_have_own_heads_where_keys_are_values(types, heads, of_full, equal):
    keys = {"num_global_key_value_heads": of_full, "attention_k_eq_v": equal, "global_head_dim": 32}
    config = of_heads(len(types), model_type="gemma4_text", layer_types=types, **keys) | {"num_key_value_heads": heads}
    found = [(spec.num_kv_heads, spec.head_size) for spec in from_hf_config(config).values()]
    assert found == [(heads, 16) if kind == SLIDING else (of_full if equal else heads, 32) for kind in types]


@thorough
@given(layers=COUNTS, rank=SIZES, rope=SIZES)
def test_a_latent_is_kept_with_its_position(layers, rank, rope):
    config = of_heads(layers, model_type="deepseek_v3", kv_lora_rank=rank, qk_rope_head_dim=rope)
    specs = from_hf_config(config).values()
    assert [page_bytes(spec) for spec in specs] == [BLOCK * (rank + rope) * ITEM] * layers


def padded(nbytes):
    return -(-nbytes // 512) * 512


@thorough
@given(ratios=st.lists(st.sampled_from((0, 4, 128)), min_size=1, max_size=6), width=st.sampled_from((128, 512)))
def test_layers_of_deepseek_v4_keep_entries_and_states_of_compressors(ratios, width):
    config = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": len(ratios),
        "compress_ratios": ratios,
        "head_dim": width,
    }
    expected = {}
    for layer, ratio in enumerate(ratios):
        # An entry of 4 tokens overlaps the next one, so that two are under way; each has its sum and its weights.
        states = {4: (4, 2 * 2), 128: (8, 2)}.get(ratio)
        if states:
            block, vectors = states
            expected[f"{layer}.attn"] = padded(256 // ratio * width * ITEM)
            expected[f"{layer}.attn.compressor.state_cache"] = padded(block * vectors * width * 4)
        if ratio == 4:
            expected[f"{layer}.attn.indexer.k_cache"] = padded(256 // ratio * (128 + 4))
            expected[f"{layer}.attn.indexer.compressor.state_cache"] = padded(block * vectors * 128 * 4)
        expected[f"{layer}.attn.swa_cache"] = padded(64 * width * ITEM)
    specs = from_hf_config(config)
    assert {name.removeprefix("model.layers."): page_bytes(spec) for name, spec in specs.items()} == expected


@st.composite
def hybrids(draw):
    """A Granite hybrid of at least one layer of each kind, and the number of ranks that divide it."""
    ranks = draw(st.sampled_from((1, 2, 4)))
    types = draw(st.permutations(["mamba", "attention"] * draw(st.integers(1, 3))))
    heads = 4 * draw(st.integers(1, 4))
    sizes = {"mamba_n_heads": heads, "mamba_d_head": draw(SIZES), "mamba_d_state": draw(SIZES)}
    sizes |= {"mamba_n_groups": draw(st.sampled_from((1, 4))), "mamba_d_conv": draw(st.integers(2, 5))}
    return of_heads(len(types), model_type="granitemoehybrid", layer_types=types, **sizes), ranks


@thorough
@given(hybrids())
def test_a_rank_keeps_its_share_of_a_state_and_what_all_heads_need(hybrid):
    config, ranks = hybrid
    heads, channels, state, groups, width = (config[f"mamba_{key}"] for key in HYBRID_KEYS)
    shared = 1 if groups == 1 else ranks  # one group serves the heads of all ranks
    history = width - 1  # the last input is being computed
    convolved = heads * channels // ranks + 2 * groups * state // shared
    expected = convolved * history * ITEM + heads // ranks * channels * state * 4
    states = [spec for spec in from_hf_config(config).values() if spec.kind == "mamba"]
    assert states
    assert {content_bytes(spec, Shard(tp_size=ranks)) for spec in states} == {expected}
    assert sum(prod(part.shape) for part in states[0].states[:-1]) == (heads * channels + 2 * groups * state) * history


@thorough
@given(hybrids())
def test_aligned_pages_are_the_smallest_that_hold_a_state(hybrid):
    config, ranks = hybrid
    shard = Shard(tp_size=ranks)
    specs = from_hf_config(config)
    aligned = align_states(specs, shard=shard)
    [page] = {page_bytes(spec, shard) for spec in aligned.values()}
    state = max(content_bytes(spec, shard) for spec in specs.values() if spec.kind == "mamba")
    block = min(page_bytes(spec, shard) for spec in specs.values() if spec.kind == "full")
    assert page - block < state <= page
    assert list(aligned) == list(specs)


@thorough
@given(
    dynamic=st.booleans(),
    symmetric=st.booleans(),
    bits=st.sampled_from((4, 8)),
    kind=st.sampled_from(("float", "int")),
    strategy=st.sampled_from(("tensor", "attn_head", "token")),
)
def test_a_quantized_cache_is_known_where_its_scales_are_weights(dynamic, symmetric, bits, kind, strategy):
    scheme = {"type": kind, "num_bits": bits, "dynamic": dynamic, "symmetric": symmetric, "strategy": strategy}
    config = of_heads(1, model_type="llama", quantization_config={"kv_cache_scheme": scheme})
    if (dynamic, symmetric, bits, kind) == (False, True, 8, "float") and strategy != "token":
        assert [spec.dtype for spec in from_hf_config(config).values()] == ["float8_e4m3fn"]
    else:
        with pytest.raises(SpecInvalid, match="an unknown cache"):
            from_hf_config(config)


@pytest.mark.parametrize("first", [True, -1, 1.0, "4"])
def test_what_is_no_number_of_layers_is_refused_by_its_key(first):
    config = of_heads(2, model_type="qwen2", use_sliding_window=True, max_window_layers=first)
    with pytest.raises(SpecInvalid, match="max_window_layers"):
        from_hf_config(config)
