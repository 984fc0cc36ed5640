"""What a config says of a model is what its layers and its ranks keep: heads by layer, and shares of states."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvflow import models
from kvflow.layout.specs import FullAttention, Mamba, SlidingWindow, State

from .caches import thorough

COUNTS = st.sampled_from((1, 2, 4, 8))


def llama(layers, heads, **more):
    counts = {"num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": heads}
    return {"model_type": "llama", "hidden_size": 512, **counts, **more}


@thorough
@given(st.integers(1, 5), COUNTS, st.integers(0, 3), COUNTS)
def test_layers_of_a_draft_model_have_its_heads_and_no_others(layers, heads, drafts, draft_heads):
    """Engines number the layers of a draft model behind those of the model."""
    config, draft = llama(layers, heads), llama(max(1, drafts), draft_heads)
    names = [f"model.layers.{number}.self_attn.attn" for number in range(layers + drafts)]
    found = models.kv_heads(names, config, (config, heads), (draft, draft_heads) if drafts else None)
    assert list(found.values()) == [heads] * layers + [draft_heads] * drafts


@thorough
@given(st.integers(1, 12), st.integers(2, 6), st.booleans(), st.integers(1, 4096))
def test_layers_with_a_window_stand_where_the_family_says(layers, period, has_window, window):
    """Gemma 3 has a full layer behind so many others; a Cohere layer also sees the token before its window."""
    named = {"sliding_window": window if has_window else None, "head_dim": 64, "sliding_window_pattern": period}
    for family, beyond in (("gemma3_text", 0), ("cohere2", 1)):
        specs = models.from_hf_config(llama(layers, 2, model_type=family, **named))
        assert len(specs) == layers
        for number, spec in enumerate(specs.values(), 1):
            slides = has_window and number % period != 0
            assert type(spec) is (SlidingWindow if slides else FullAttention)
            assert not slides or spec.window == window + beyond


@st.composite
def states_of_a_model(draw, ranks):
    """Parts of a convolution state, some of which every rank has, and the state behind them."""
    history, dtype = draw(st.integers(1, 4)), "bfloat16"
    divided = {"conv_x": True, "conv_B": draw(st.booleans()), "conv_C": draw(st.booleans())}
    parts = [
        State(name, ((ranks if each else 1) * draw(st.integers(1, 6)), history), dtype, shard_axis=0 if each else None)
        for name, each in divided.items()
    ]
    heads = ranks * draw(st.integers(1, 4))
    return Mamba(block_size=16, states=(*parts, State("ssm", (heads, 4, 8), "float32", shard_axis=0)))


@thorough
@given(st.data(), st.integers(1, 4), st.integers(-2, 2))
def test_the_states_of_a_model_are_told_from_the_share_of_any_rank(data, ranks, odd):
    """If the share is another one than the parts of the model give, only engines of as many ranks may read it."""
    model = data.draw(states_of_a_model(ranks))
    *parts, last = model.states
    *_, channels = accumulate(part.shape[0] // (1 if part.shard_axis is None else ranks) for part in parts)
    channels = max(1, channels + odd)
    is_odd = channels != sum(part.shape[0] // (1 if part.shard_axis is None else ranks) for part in parts)
    history = data.draw(st.integers(1, 4))
    held = (
        State("conv", (channels, history), "float16"),
        replace(last, name="state", shape=(last.shape[0] // ranks, *last.shape[1:])),
    )
    found = models.whole_states(held, model, ranks=ranks, one_part=False)
    if is_odd:
        shapes = [(ranks, *each.shape) if ranks > 1 else each.shape for each in held]
        assert [each.shape for each in found] == shapes
    else:
        assert [each.name for each in found] == [each.name for each in model.states]
        assert [each.shape for each in found[:-1]] == [(part.shape[0], history) for part in parts]
        assert [each.shard_axis for each in found] == [each.shard_axis for each in model.states]
        assert (found[-1].shape, {each.dtype for each in found[:-1]}) == (last.shape, {"float16"})
    assert models.whole_states(held, model, ranks=0, one_part=False) == held
