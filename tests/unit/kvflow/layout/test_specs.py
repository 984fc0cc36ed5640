"""Specs are checked when they are used, because a Struct checks its fields only when it is decoded."""

import pytest
import torch

from kvflow.errors import SpecInvalid
from kvflow.layout.specs import ITEM_BYTES, LAYER_NAME_MAX, validate_specs

from .helpers import full, sliding


def test_components_are_keys_then_values_of_the_whole_model():
    keys, values = full(block_size=16, num_kv_heads=4, head_size=8, dtype="float16").components
    assert (keys.role, values.role) == ("k", "v")
    assert (keys.shape, keys.dtype) == (values.shape, values.dtype) == ((4, 16, 8), "float16")
    assert (keys.shard_axis, keys.token_axis) == (0, 1)


def test_kinds_and_windows():
    assert (full().kind, full().window) == ("full", 0)
    assert (sliding(window=9).kind, sliding(window=9).window) == ("sliding", 9)


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_item_bytes_are_those_of_torch(dtype):
    assert ITEM_BYTES[dtype] == getattr(torch, dtype).itemsize


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ({}, "specs is empty"),
        ({"": full()}, "layer name ''"),
        ({"x" * (LAYER_NAME_MAX + 1): full()}, "is not a string of 1 to"),
        ({3: full()}, "layer name 3"),
        ({"a": "full"}, "a: 'full' is not a cache spec"),
        ({"a": full(block_size=0)}, r"a: .*block_size"),
        ({"a": full(block_size=2.0)}, r"a: .*block_size"),
        ({"a": full(num_kv_heads=-1)}, r"a: .*num_kv_heads"),
        ({"a": full(head_size=1 << 25)}, r"a: .*head_size"),
        ({"a": full(dtype="bf16")}, r"a: .*dtype"),
        ({"a": full(), "b": sliding(window=0)}, r"b: .*window"),
        ({"a": sliding(window="8")}, r"a: .*window"),
    ],
)
def test_a_wrong_field_is_named(specs, words):
    with pytest.raises(SpecInvalid, match=words):
        validate_specs(specs)


def test_right_specs_pass():
    validate_specs({"x" * LAYER_NAME_MAX: full(), "b": sliding()})
