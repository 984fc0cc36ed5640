"""Families that mix attention with layers that keep a state instead of tokens.

Convolution states lie in the "DS" layout: channels outermost, so that a rank's share of each is one range. The order of
states in a page is that of vLLM.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from kvflow.layout.specs import CacheSpec, FullAttention, Mamba, State
from kvflow.models.attention import SELF_ATTENTION, attention
from kvflow.models.config import ModelConfig, Options

ATTENTION_TYPES = ("attention", "full_attention")
RECURRENT_TYPES = ("mamba", "linear_attention")  # entries of ``layer_types``, old and new


def granite_hybrid(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe Granite 4 hybrids: Mamba 2, and attention where ``layer_types`` says so."""
    types = _layer_types(config, [])
    return _mixed(config, options, types, _mamba2(config, options), "mixer")


def bamba(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe Bamba: Mamba 2, and attention in the layers of ``attn_layer_indices``."""
    indices = config.get("attn_layer_indices") or []
    if not isinstance(indices, list):
        raise config.odd("attn_layer_indices", indices, "a list of layer numbers")
    types = ["attention" if index in indices else "mamba" for index in range(config.num_layers())]
    return _mixed(config, options, types, _mamba2(config, options), "mixer")


def qwen3_next(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe Qwen3-Next: gated delta nets, and every fourth layer full attention."""
    interval = config.whole("full_attention_interval", "layers from one full one to the next", 4)
    types = ["full_attention" if (index + 1) % interval == 0 else "mamba" for index in range(config.num_layers())]
    return _mixed(config, options, _layer_types(config, types), _gated_delta_net(config, options), "linear_attn")


NEMOTRON_LAYERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of ``hybrid_override_pattern`` -> entries of ``layers_block_type``."""


def nemotron_h(config: ModelConfig, options: Options) -> dict[str, CacheSpec]:
    """Describe Nemotron-H: a layer is Mamba 2, attention, or neither and keeps nothing."""
    pattern = config.get("hybrid_override_pattern")
    if pattern:
        if not isinstance(pattern, str) or not set(pattern) <= set(NEMOTRON_LAYERS):
            raise config.odd(
                "hybrid_override_pattern", pattern, f"letters of {''.join(NEMOTRON_LAYERS)}, one per layer"
            )
        types = [NEMOTRON_LAYERS[letter] for letter in pattern]
        config.ignore("layers_block_type")
    else:
        listed = config.get("layers_block_type")
        types = config.sequence("layers_block_type", len(listed or []), str) or []
    if not types:
        raise config.odd("hybrid_override_pattern", pattern, "a letter for each layer, or layers_block_type")
    config.ignore("layer_types", "mamba_expand", "attention_head_dim")  # beside head_dim, in transformers
    heads = config.whole("mamba_num_heads", "heads of a Mamba layer")
    recurrent = _grouped_states(
        options,
        heads=heads,
        head_size=config.whole("mamba_head_dim", "channels of a Mamba head"),
        state_size=config.whole("ssm_state_size", "state of a Mamba head, per channel"),
        groups=config.whole("n_groups", "groups of Mamba heads that share B and C", 8),
        history=config.whole("conv_kernel", "width of the convolution", 4) - 1,
    )
    head_size = config.first_whole(("head_dim", "attention_head_dim"), "elements of a head")
    full = FullAttention(
        block_size=options.block_size,
        num_kv_heads=config.whole("num_key_value_heads", "KV heads"),
        head_size=head_size,
        dtype=options.cache_dtype,
    )
    specs: dict[str, CacheSpec] = {}
    for index, kind in enumerate(types):
        if kind in RECURRENT_TYPES:
            specs[config.layer_name(index, "mixer")] = recurrent
        elif kind in ATTENTION_TYPES:
            specs[config.layer_name(index, "mixer.attn")] = full
        elif kind not in NEMOTRON_LAYERS.values():
            raise config.odd("layers_block_type", kind, f"one of {', '.join(NEMOTRON_LAYERS.values())}")
    return specs


def _layer_types(config: ModelConfig, otherwise: list[str]) -> list[str]:
    num_layers = config.num_layers()
    types = (
        config.sequence("layer_types", num_layers, str)
        or config.sequence("layers_block_type", num_layers, str)
        or otherwise
    )
    if not types:
        raise config.odd("layer_types", None, "a list that says which layers are recurrent")
    return list(types)


def _mixed(
    config: ModelConfig, options: Options, types: list[str], recurrent: Mamba, recurrent_name: str
) -> dict[str, CacheSpec]:
    config.ignore("num_key_value_heads", "head_dim")  # of attention, which there may be none of
    specs: dict[str, CacheSpec] = {}
    for index, kind in enumerate(types):
        if kind in RECURRENT_TYPES:
            specs[config.layer_name(index, recurrent_name)] = recurrent
        elif kind in ATTENTION_TYPES:
            specs[config.layer_name(index, SELF_ATTENTION)] = attention(config, options, "full_attention")
        else:
            raise config.odd("layer_types", kind, f"one of {', '.join((*ATTENTION_TYPES, *RECURRENT_TYPES))}")
    return specs


def _mamba2(config: ModelConfig, options: Options) -> Mamba:
    heads = config.whole("mamba_n_heads", "heads of a Mamba layer")
    state_size = config.whole("mamba_d_state", "state of a Mamba head, per channel")
    groups = config.whole("mamba_n_groups", "groups of Mamba heads that share B and C", 1)
    kernel = config.whole("mamba_d_conv", "width of the convolution", 4)
    config.ignore("mamba_expand")  # read only where ``mamba_d_head`` is missing
    if config.get("mamba_d_head") in (None, "auto"):
        width = config.whole("hidden_size", "width of the model")
        head_size = config.whole("mamba_expand", "width of a Mamba layer over that of the model", 2) * width // heads
    else:
        head_size = config.whole("mamba_d_head", "channels of a Mamba head")
    return _grouped_states(
        options, heads=heads, head_size=head_size, state_size=state_size, groups=groups, history=kernel - 1
    )


def _grouped_states(
    options: Options, *, heads: int, head_size: int, state_size: int, groups: int, history: int
) -> Mamba:
    """Describe the states of Mamba 2, whose heads share B and C in groups."""
    # Every head needs its group's B and C, so a single group is on every rank.
    axis = None if groups == 1 else 0
    return _states(
        options,
        conv={
            "conv_x": ((heads * head_size, history), 0),
            "conv_B": ((groups * state_size, history), axis),
            "conv_C": ((groups * state_size, history), axis),
        },
        ssm=(heads, head_size, state_size),
    )


def _gated_delta_net(config: ModelConfig, options: Options) -> Mamba:
    key_heads = config.whole("linear_num_key_heads", "key heads of a linear layer")
    value_heads = config.whole("linear_num_value_heads", "value heads of a linear layer")
    key_size = config.whole("linear_key_head_dim", "channels of a key head of a linear layer")
    value_size = config.whole("linear_value_head_dim", "channels of a value head of a linear layer")
    history = config.whole("linear_conv_kernel_dim", "width of the convolution", 4) - 1
    return _states(
        options,
        conv={
            "conv_q": ((key_heads * key_size, history), 0),
            "conv_k": ((key_heads * key_size, history), 0),
            "conv_v": ((value_heads * value_size, history), 0),
        },
        ssm=(value_heads, value_size, key_size),
    )


def _states(
    options: Options,
    conv: dict[str, tuple[tuple[int, int], int | None]],
    ssm: tuple[int, int, int],
) -> Mamba:
    parts = [State(name, shape, options.dtype, axis) for name, (shape, axis) in conv.items()]
    return Mamba(block_size=options.block_size, states=(*parts, State("ssm", ssm, options.state_dtype, shard_axis=0)))


def whole_states(held: Sequence[State], model: Mamba | None, *, ranks: int, one_part: bool) -> tuple[State, ...]:
    """Describe in the whole model the states of which one rank of an engine holds ``held``.

    Ranks divide the parts of a convolution state one by one, as ``model`` has them. Where these are not known, or do
    not add up to what the rank holds, states have an axis of ranks, so that engines with other numbers of them refuse.

    Args:
        held: states of one rank, in the order of its page: shapes in elements, channels first.
        model: the layer in the whole model, as its family describes it; None if that is not known.
        ranks: how many divide the layer; 0 if each holds the whole.
        one_part: the convolution state is one part, as that of Mamba 1.

    Returns:
        States whose shapes are those of the whole model, in the order of the page.
    """
    if not ranks:
        return tuple(held)
    known: tuple[State, ...] = ()
    conv, last = held[0], held[-1]
    ssm = replace(last, name="ssm", shape=(ranks * last.shape[0], *last.shape[1:]), shard_axis=0)
    if one_part:
        known = (State("conv", (ranks * conv.shape[0],), conv.dtype),)
    elif model is not None and model.states[-1].shape == ssm.shape:
        known = model.states[:-1]
    shares = [part.shape[0] / (1 if part.shard_axis is None else ranks) for part in known]
    if len(held) == 2 and sum(shares) == conv.shape[0]:
        return (*(replace(part, shape=(part.shape[0], *conv.shape[1:]), dtype=conv.dtype) for part in known), ssm)
    return tuple(replace(each, shape=(ranks, *each.shape) if ranks > 1 else each.shape, shard_axis=0) for each in held)
