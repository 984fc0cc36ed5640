"""vLLM's description of a cache, read as kvflow's."""

from types import SimpleNamespace

import pytest

from kvflow import MLA, ChunkedLocal, FullAttention, Mamba, SlidingWindow, State, allocate, plan_transfer
from kvflow.errors import LayoutMismatch, SpecInvalid
from kvflow.integrations.vllm.caches import EngineShape, byte_format, read_groups, read_spec
from kvflow.models import load
from tests.helpers.loops import looped

from .vllm_like import (
    BFLOAT16,
    UINT8,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    group,
)

ATTENTION = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"}
STATES = (State("state_0", (640, 3), "bfloat16"), State("state_1", (8, 64, 64), "float32"))


def quantized(mode):
    return SimpleNamespace(name=mode)


@looped(
    "theirs, ours",
    [
        (FullAttentionSpec(), FullAttention(**ATTENTION)),
        (FullAttentionSpec(page_size_padded=16384), FullAttention(**ATTENTION, page_bytes=16384)),
        (FullAttentionSpec(head_size_v=128), FullAttention(**ATTENTION, head_size_v=128)),
        (SlidingWindowSpec(), SlidingWindow(**ATTENTION, window=64)),
        (ChunkedLocalAttentionSpec(), ChunkedLocal(**ATTENTION, chunk=64)),
        (
            FullAttentionSpec(dtype=UINT8, kv_quant_mode=quantized("FP8_PER_TOKEN_HEAD"), content=136),
            FullAttention(**ATTENTION | {"dtype": "float8_e4m3fn"}, quantization="fp8_per_token_head"),
        ),
        (
            MLAAttentionSpec(head_size=576, head_size_v=0, num_kv_heads=1),
            MLA(block_size=16, head_size=576, dtype="bfloat16"),
        ),
        (
            MLAAttentionSpec(head_size=576, head_size_v=0, dtype=UINT8, content=656),
            MLA(block_size=16, head_size=656, dtype="float8_e4m3fn"),
        ),
        (MambaSpec(page_size_padded=196608), Mamba(block_size=1024, page_bytes=196608, states=STATES)),
    ],
)
def test_every_kind_of_layer(theirs, ours):
    assert read_spec("layer", theirs, EngineShape(element_types={"layer": "float8_e4m3fn"})) == ours


@looped(
    "cache_dtype, backend, kept",
    [
        ("fp8", "FLASH_ATTN", "float8_e4m3fnuz"),
        ("fp8_e4m3", "FLASHINFER", "float8_e4m3fnuz"),
        ("fp8_ds_mla", "FLASHMLA_SPARSE", "float8_e4m3fnuz"),
        ("fp8_per_token_head", "TRITON_ATTN", "float8_e4m3fnuz"),
        ("fp8_e5m2", "FLASHINFER", "float8_e5m2"),
        ("fp8_e5m2", "", "float8_e5m2"),
        ("fp8_e5m2", "TRITON_ATTN", "float8_e4m3fnuz"),
        ("fp8_e5m2", "ROCM_ATTN", "float8_e4m3fnuz"),
        ("nvfp4_ds_mla", "", "uint8"),
        ("fp8_of_tomorrow", "", ""),
        ("auto", "", ""),
    ],
)
def test_bytes_are_named_by_what_vllm_keeps_in_them(cache_dtype, backend, kept):
    assert byte_format(cache_dtype, platform_fp8="float8_e4m3fnuz", backend=backend) == kept


@looped("kind", [FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MLAAttentionSpec])
@looped("other", ["float8_e5m2", "float8_e4m3fnuz"])
def test_caches_of_another_float8_format_are_refused_by_name(kind, other):
    def manifest(element_type):
        spec = kind(dtype=UINT8, kv_quant_mode=quantized("FP8_PER_TENSOR"))
        ours = read_spec("layer", spec, EngineShape(element_types={"layer": element_type}))
        return allocate({"layer": ours}, num_blocks=2).manifest()

    source, target = manifest("float8_e4m3fn"), manifest(other)
    assert plan_transfer(source, manifest("float8_e4m3fn")).groups
    with pytest.raises(LayoutMismatch, match=rf"dtype.*float8_e4m3fn.*{other}"):
        plan_transfer(source, target)


def test_bytes_that_nobody_can_name_are_refused():
    with pytest.raises(SpecInvalid, match="what they are is not known"):
        read_spec("layer", FullAttentionSpec(dtype=UINT8), EngineShape())


def test_channels_are_outermost_in_a_convolution_state_however_it_lies():
    turned = read_spec("layer", MambaSpec(shapes=((3, 640), (8, 64, 64))), EngineShape(conv_channels_first=False))
    assert turned.states == STATES


def states(name, tp_size, shapes, **named):
    """Return how the states of a bundled model are read, by one of so many ranks that hold these shapes."""
    model = {} if name is None else {"layer": next(each for each in load(name).values() if isinstance(each, Mamba))}
    return read_spec("layer", MambaSpec(shapes=shapes, **named), EngineShape(tp_size=tp_size, states=model)).states


GRANITE = [((8448, 3), (128, 64, 128)), ((4352, 3), (64, 64, 128)), ((2304, 3), (32, 64, 128))]  # of 1, 2 and 4 ranks
QWEN3_NEXT = [((8192, 3), (32, 128, 128)), ((4096, 3), (16, 128, 128)), ((2048, 3), (8, 128, 128))]


@pytest.mark.parametrize(
    ("name", "held", "parts"),
    [
        ("granite-4-hybrid", GRANITE, {"conv_x": (8192, 0), "conv_B": (128, None), "conv_C": (128, None)}),
        ("qwen3-next", QWEN3_NEXT, {"conv_q": (2048, 0), "conv_k": (2048, 0), "conv_v": (4096, 0)}),
    ],
)
def test_engines_of_any_number_of_ranks_describe_the_same_parts_of_a_state(name, held, parts):
    described = [states(name, tp_size, shapes) for tp_size, shapes in zip((1, 2, 4), held, strict=True)]
    assert described[0] == described[1] == described[2]
    assert {each.name: (each.shape[0], each.shard_axis) for each in described[0][:-1]} == parts
    assert described[0][-1] == State("ssm", held[0][1], "float32")


def test_the_history_of_a_convolution_state_is_that_of_the_engine():
    (channels, _), ssm = GRANITE[1]
    assert {each.shape[1] for each in states("granite-4-hybrid", 2, ((channels, 5), ssm))[:-1]} == {5}


def test_the_convolution_state_of_mamba_1_is_one_part():
    whole, half = (states(None, size, ((64 // size, 3), (64 // size, 16)), mamba_type="MAMBA1") for size in (1, 2))
    assert whole == half == (State("conv", (64, 3), "bfloat16"), State("ssm", (64, 16), "float32"))


@pytest.mark.parametrize("name", [None, "qwen3-next"])
def test_states_of_unknown_parts_have_an_axis_of_ranks(name):
    whole, half, quarter = (states(name, size, ((640 // size, 3), (8 // size, 64, 64))) for size in (1, 2, 4))
    assert whole == STATES
    assert [each.shape for each in half] == [(2, 320, 3), (2, 4, 64, 64)]
    assert [each.shape for each in quarter] == [(4, 160, 3), (4, 2, 64, 64)]


def test_a_replicated_state_is_whole_on_every_rank():
    spec = MambaSpec(shapes=((64, 3),), dtypes=(BFLOAT16,), tp_replicated=True)
    found = read_spec("layer", spec, EngineShape(tp_size=4))
    assert found.states == (State("state_0", (64, 3), "bfloat16", shard_axis=None),)


@looped("held, tp_size, told, total", [(2, 1, 2, 2), (2, 4, 8, 8), (1, 4, 2, 2), (1, 4, 9, 4), (3, 2, 0, 6)])
def test_heads_are_those_of_the_model(held, tp_size, told, total):
    spec = FullAttentionSpec(num_kv_heads=held, num_heads=held)
    assert read_spec("layer", spec, EngineShape(tp_size=tp_size, num_kv_heads={"layer": told})).num_kv_heads == total


@pytest.mark.proves("DeepSeek V4.1, CSA, HiSparse, PLE", engine="stand-in")
@looped(
    "spec, said",
    [
        (SinkFullAttentionSpec(), "SinkFullAttentionSpec"),
        (CircularBufferSpec(), "CircularBufferSpec"),  # of compressors: DeepSeek-V4.1, GLM with pooled indices
        (FullAttentionSpec(content=300), "300 bytes"),
        (FullAttentionSpec(kv_quant_mode=quantized("TURBOQUANT_4BIT_NC")), "TURBOQUANT"),
        (FullAttentionSpec(num_heads=4), "4 slots for 2 heads"),
        (MLAAttentionSpec(tokens_per_state=4), "4 tokens"),
    ],
)
def test_what_cannot_be_described_is_refused_by_name(spec, said):
    with pytest.raises(SpecInvalid, match=said) as caught:
        read_spec("model.layers.7", spec, EngineShape())
    assert "model.layers.7" in str(caught.value)


def test_groups_keep_their_order_and_name_their_kinds():
    one_for_each = SimpleNamespace(block_size=16, kv_cache_specs={"e": FullAttentionSpec(), "f": FullAttentionSpec()})
    found = read_groups(
        [
            group(SlidingWindowSpec(), "a", "b"),
            group(FullAttentionSpec(), "c"),
            group(MambaSpec(), "d"),
            group(one_for_each, "e", "f"),
        ]
    )
    assert [(each.kind, each.layers, each.window) for each in found] == [
        ("sliding", ("a", "b"), 64),
        ("full", ("c",), 0),
        ("mamba", ("d",), 0),
        ("full", ("e", "f"), 0),
    ]
