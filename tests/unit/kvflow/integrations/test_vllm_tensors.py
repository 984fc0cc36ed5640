"""vLLM's tensors, as kvflow is given them."""

import pytest
import torch

from kvflow import plan_transfer
from kvflow.integrations.vllm.cpu_attention import CELLS_MAX, keys_and_values, marker, strided
from kvflow.integrations.vllm.specs import EngineShape
from kvflow.integrations.vllm.tensors import adopt_caches, states_of

from .vllm_like import FullAttentionSpec, MambaSpec, group

HEADS, SIZE = 2, 8


def attention(block_size, num_blocks=4):
    return torch.zeros(num_blocks, HEADS, block_size, 2 * SIZE, dtype=torch.bfloat16)


def spec_of(block_size):
    return FullAttentionSpec(block_size=block_size, head_size=SIZE, head_size_v=SIZE, dtype=torch.bfloat16)


def adopted(block_size, kernels):
    tensors = {"a": attention(block_size)}
    return adopt_caches(tensors, [group(spec_of(block_size), "a")], EngineShape(), tp_rank=0, kernels=kernels)


def test_layers_that_use_the_cache_of_another_are_left_out():
    tensors = {"a": attention(16), "shared": attention(16)}
    cache = adopt_caches(tensors, [group(spec_of(16), "a")], EngineShape(), tp_rank=0)
    assert list(cache.views) == ["a"]


def test_kernel_blocks_are_read_from_the_tensor():
    cache = adopt_caches({"a": attention(16, 8)}, [group(spec_of(32), "a")], EngineShape(), tp_rank=0)
    assert (cache.num_blocks, cache.manifest().groups[0].kernel_tokens) == (4, 16)


def test_states_are_views_of_their_page():
    page = torch.zeros(3, 1, 1, 200, dtype=torch.int8)
    spec = MambaSpec(shapes=((4, 3), (2, 5)), dtypes=(torch.bfloat16, torch.float32))
    conv, ssm = states_of(page, spec)
    assert (conv.shape, ssm.shape) == ((3, 4, 3), (3, 2, 5))
    ssm[1] = 1.0
    assert page[1, 0, 0, 24:64].view(torch.float32).tolist() == [1.0] * 10
    assert not page[1, 0, 0, :24].any()


def test_on_cpus_keys_have_their_tokens_innermost():
    tensor = attention(4)
    keys, values = keys_and_values(tensor)
    keys[1, 0, 2, 5] = 1.0
    values[1, 0, 2, 5] = 2.0
    page = tensor[1, 0].flatten()
    assert page[5 * 4 + 2] == 1.0
    assert page[SIZE * 4 + 2 * SIZE + 5] == 2.0


def test_blocks_of_different_sizes_are_cut_where_strides_say_how():
    small, large = adopted(2, {"a": "vec"}), adopted(4, {"a": "vec"})
    plan = plan_transfer(small.manifest(), large.manifest())
    # Values of two tokens lie together; of keys, two tokens of each element do.
    assert plan.descriptors(num_blocks=1, consecutive=False) == 2 * HEADS * (SIZE + 1)


def test_equal_blocks_move_whole():
    plan = plan_transfer(adopted(4, {"a": "vec"}).manifest(), adopted(4, {"a": "vec"}).manifest())
    assert plan.descriptors(num_blocks=3, consecutive=True) == 1


@pytest.mark.parametrize(
    ("kernels", "tensor", "said"),
    [
        ({}, attention(4), ""),
        ({"a": "vec"}, attention(4), ""),
        ({"a": "amx"}, attention(4), "+amx/4"),
        ({"a": "unknown"}, attention(4), "+unknown/4"),
        ({"a": "vec"}, attention(4).view(torch.uint8), "+vec/4"),
        ({"a": "vec"}, torch.zeros(1, 1, 4, 1).expand(1, CELLS_MAX, 4, 1), "+vec/4"),
    ],
)
def test_engines_whose_blocks_no_strides_describe_must_be_alike(kernels, tensor, said):
    assert marker(kernels, {"a": tensor}) == said
    assert strided(kernels, {"a": tensor}) is (said == "")
