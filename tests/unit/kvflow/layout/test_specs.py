"""Specs are checked when they are used, because a Struct checks its fields only when it is decoded."""

import numpy as np
import pytest
import torch

from kvflow.errors import SpecInvalid
from kvflow.layout.shards import Shard
from kvflow.layout.specs import (
    ITEM_BYTES,
    LAYER_NAME_MAX,
    MLA,
    ChunkedLocal,
    CrossAttention,
    State,
    validate_specs,
)
from tests.helpers.loops import looped

from .helpers import full, mamba, opaque, quantized, sliding

SSM = State("ssm", (4, 3), "float32")


def test_components_are_keys_then_values_of_the_whole_model():
    keys, values = full(block_size=16, num_kv_heads=4, head_size=8, dtype="float16").components
    assert (keys.role, values.role) == ("k", "v")
    assert (keys.shape, keys.dtype) == (values.shape, values.dtype) == ((4, 16, 8), "float16")
    assert (keys.shard_axis, keys.token_axis) == (0, 1)


def test_kinds_and_windows():
    assert (full().kind, full().window) == ("full", 0)
    assert (sliding(window=9).kind, sliding(window=9).window) == ("sliding", 9)
    fields = {"block_size": 16, "num_kv_heads": 4, "head_size": 8, "dtype": "float16"}
    chunked, cross = ChunkedLocal(**fields, chunk=64), CrossAttention(**fields)
    assert (chunked.kind, chunked.window, cross.kind, cross.window) == ("chunked", 64, "cross", 0)
    latent = MLA(block_size=16, head_size=8, dtype="float16", sliding_window=32)
    assert (latent.kind, latent.window) == ("mla", 32)
    assert (mamba().kind, mamba().window, opaque(7).kind, opaque(7).window) == ("mamba", 0, "opaque", 0)


def test_a_kernel_block_is_what_lies_together():
    parts = full(block_size=64, kernel_block_size=16).components
    assert {part.shape for part in parts} == {(4, 16, 8)}


@pytest.mark.parametrize(
    ("state", "held", "nbytes"),
    [
        (State("conv", (6, 4), "float16"), (2, 4), 16),
        (State("conv", (4, 6), "float16", shard_axis=1), (4, 2), 16),
        (State("conv", (6, 4), "float16", shard_axis=None), (6, 4), 48),
        (State("conv", (2, 4), "float32"), (1, 4), 16),  # fewer than ranks: replicated
    ],
)
def test_ranks_divide_a_state_along_its_axis(state, held, nbytes):
    (part,) = mamba(states=(state,)).components
    shard = Shard(tp_rank=1, tp_size=3)
    assert (part.held_shape(shard), part.nbytes(shard)) == (held, nbytes)


@looped("dtype", sorted(ITEM_BYTES))
def test_a_torch_dtype_stands_for_its_name(dtype):
    given = getattr(torch, dtype)
    assert full(dtype=given) == full(dtype=dtype)
    assert State("ssm", (2, 3), given) == State("ssm", (2, 3), dtype)
    latent = MLA(block_size=16, head_size=8, dtype=given, rope_size=4, rope_dtype=given)
    assert (latent.dtype, latent.rope_dtype) == (dtype, dtype)
    validate_specs({"a": full(dtype=given), "b": latent})


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_torch_dtype_that_no_cache_has_is_refused_by_name(dtype):
    with pytest.raises(SpecInvalid, match=f"a: dtype must be one of .*, not '{str(dtype).removeprefix('torch.')}'"):
        validate_specs({"a": full(dtype=dtype)})


@looped("dtype", sorted(ITEM_BYTES))
def test_item_bytes_are_those_of_torch(dtype):
    assert ITEM_BYTES[dtype] == getattr(torch, dtype).itemsize


@looped(
    "specs, words",
    [
        ({}, "specs is empty"),
        ({"": full()}, "layer name ''"),
        ({"x" * (LAYER_NAME_MAX + 1): full()}, "must be text of 1 to"),
        ({3: full()}, "layer name 3"),
        ({"a": "full"}, "a: 'full' is not a cache spec"),
        ({"a": full(block_size=0)}, r"a: .*block_size"),
        ({"a": full(block_size=2.0)}, r"a: .*block_size"),
        ({"a": full(num_kv_heads=-1)}, r"a: .*num_kv_heads"),
        ({"a": full(head_size=1 << 25)}, r"a: .*head_size"),
        ({"a": full(dtype="bf16")}, r"a: .*dtype"),
        ({"a": full(), "b": sliding(window=0)}, r"b: .*window"),
        ({"a": sliding(window="8")}, r"a: .*window"),
        ({"a": full(kernel_block_size=5)}, "a: kernel_block_size 5 does not divide block_size 16"),
        ({"a": full(kernel_block_size=32)}, "a: kernel_block_size 32 does not divide block_size 16"),
        ({"a": full(page_bytes=0)}, r"a: .*page_bytes"),
        ({"a": full(head_size_v=-1)}, r"a: .*head_size_v"),
        ({"a": full(quantization="int4")}, r"a: .*quantization"),
        (
            {"a": full(quantization="fp8_per_token_head")},
            "a: dtype is float16; fp8_per_token_head needs one of one byte",
        ),
        ({"a": full(quantization="nvfp4")}, "a: dtype is float16; nvfp4 is kept as uint8"),
        ({"a": quantized("nvfp4", head_size=24)}, "a: head_size 24 is not a multiple of 16"),
        ({"a": mamba(kernel_block_size=8)}, "a: kernel_block_size has no meaning for a state"),
        ({"a": mamba(states=())}, r"a: .*states"),
        ({"a": mamba(states=(SSM, SSM))}, r"a: states \['ssm', 'ssm'\] are not all named differently"),
        ({"a": mamba(states=(State("ssm", (4,), "float32", shard_axis=1),))}, "shard_axis 1 is not an axis of"),
        ({"a": mamba(states=(State("ssm", (), "float32"),))}, r"a: .*shape"),
        ({"a": mamba(states=(State("ssm", (1,) * 9, "float32"),))}, r"a: .*shape"),
        ({"a": mamba(states=(State("ssm", (0, 4), "float32"),))}, r"a: .*shape"),
        ({"a": MLA(block_size=16, head_size=8, dtype="float16", rope_dtype="half")}, r"a: .*rope_dtype"),
        ({"a": opaque(0)}, r"a: .*nbytes"),
        (
            {"a": full(block_size=np.int64(16))},
            r"a: block_size must be an integer .*, not np.int64\(16\)",
        ),
    ],
)
def test_a_wrong_field_is_named(specs, words):
    with pytest.raises(SpecInvalid, match=words):
        validate_specs(specs)


def test_right_specs_pass():
    validate_specs({"x" * LAYER_NAME_MAX: full(), "b": sliding(), "m": mamba(), "o": opaque(7)})
    validate_specs({how: quantized(how, head_size=16) for how in ("nvfp4", "fp8_per_token_head")})
    validate_specs({"a": full(kernel_block_size=16), "b": full(kernel_block_size=4, page_bytes=1 << 20)})
