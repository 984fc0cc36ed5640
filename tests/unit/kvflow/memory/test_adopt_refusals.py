"""What cannot be adopted is refused by name: layer, field, what was found, what was expected."""

import math

import pytest
import torch

import kvflow
from kvflow.errors import ArgumentInvalid, SpecInvalid
from kvflow.layout.groups import Group
from tests.helpers.loops import looped

from .test_adopt import B, D, H, N, full, two_states

PAGE = H * N * 2 * D


def sliding(**fields):
    return kvflow.SlidingWindow(block_size=N, num_kv_heads=H, head_size=D, dtype="float32", window=9, **fields)


def pages(*, blocks=B, dtype=torch.float32):
    return torch.zeros(blocks, H, N, 2 * D, dtype=dtype)


def refused(tensors, specs=None, groups=None, **how):
    """Adopt in vain, and return what was said."""
    with pytest.raises(SpecInvalid) as caught:
        kvflow.adopt(tensors, specs or dict.fromkeys(tensors, full()), groups, **how)
    assert caught.value.remedy
    return caught.value.message


def test_good_tensors_are_not_refused():
    assert kvflow.adopt({"a": pages(), "b": pages()}, {"a": full(), "b": full()}).num_blocks == B


LATENT = kvflow.MLA(block_size=N, head_size=D, dtype="float32")
KERNELS = full(kernel_block_size=2)
WIDE = torch.zeros(B, H, N, 2 * D * 4 * 2, dtype=torch.int8)[..., ::2]
TWICE = dict.fromkeys("ab", torch.zeros(2, B, N, H, D))
TURNED = torch.zeros(64, 16, 16, B).permute(3, 0, 1, 2)
MANY_HEADS = kvflow.FullAttention(block_size=16, num_kv_heads=64, head_size=8, dtype="float32")
SMALL = {"groups": [Group(("a",), "full", N, page_bytes=10)]}
ANOTHER = {"groups": [Group(("b",), "full", N)]}


def apart(*shapes):
    """Keys and values in tensors of their own."""
    return [torch.zeros(shape) for shape in shapes]


@looped(
    "value, spec, how, said",
    [
        (None, full(), {}, "a: found NoneType; expected a torch tensor"),
        (pages().numpy(), full(), {}, "a: found ndarray; expected a torch tensor"),
        ([pages(), 3], full(), {}, "a[1]: found int; expected a torch tensor"),
        ([], full(), {}, "a: found an empty list; expected a tensor, or one per state"),
        (pages().to("meta"), full(), {}, "a: found a meta tensor; expected a strided one in memory"),
        (pages().to_sparse(), full(), {}, "a: found a torch.sparse_coo tensor; expected a strided one in memory"),
        (pages()[:0], full(), {}, "a: shape is [0, 3, 4, 10]; expected axes of at least one element each"),
        (pages(dtype=torch.float64), full(), {}, "a: dtype is float64; expected one of float32, float16"),
        (pages(dtype=torch.bfloat16), full(), {}, "a: dtype is bfloat16; expected float32 or uint8 or int8"),
        ([pages()] * 3, full(), {}, "a: found a list of 3 tensors; expected one, or 2 if keys and values are apart"),
        (apart((B, N, D), (B, N, D)), LATENT, {}, "a: found a list of 2 tensors; expected one"),
        # Forms are described in elements of the tensor, and kernel blocks are whole blocks.
        (torch.zeros(B, H, N, D, dtype=torch.int8), KERNELS, {}, "BHNC = [2 * B, 3, 2, 40], BRHNC = [B, 2, 3, 2, 40]"),
        (torch.zeros(5, H, 2, 2 * D), KERNELS, {}, "a: shape is [5, 3, 2, 10]; tried BHNC = [2 * B, 3, 2, 10]"),
        (apart((B, N, H, D), (B, H, N, D)), full(), {}, "tried BNHC = [B, 4, 3, 5] and [B, 4, 3, 5], BHNC"),
        (apart((B, N, H, D), (B - 1, N, H, D)), full(), {}, "tried BNHC = [B, 4, 3, 5] and [B, 4, 3, 5], BHNC"),
        (WIDE, full(), {}, "a: stride of the last axis is 2 bytes; expected 1"),
        (TURNED, MANY_HEADS, {}, "expected at most 4096 pieces"),
        (pages(), full(), {"axes": {"b": "BHNC"}}, "axes names layer 'b', which has no spec"),
        (pages(), full(), {"axes": {"a": "BHN"}}, "a: axes is 'BHN'; expected each of B, H, N, C once"),
        (pages(), full(), {"axes": {"a": "BHNCX"}}, "a: axes is 'BHNCX'"),
        (pages(), full(), {"axes": {"a": "BHNNC"}}, "a: axes is 'BHNNC'"),
        (pages(), full(), {"axes": {"a": "BHCN"}}, "a: axes is 'BHCN'"),
        (pages(), full(), {"axes": {"a": "KBHNC"}}, "a: shape is [6, 3, 4, 10]; tried KBHNC = [2, B, 3, 4, 5]"),
        (pages(), full(), SMALL, "a: page_bytes is 10, but a page of tp_rank 0 of 1 holds"),
        (pages(), full(), ANOTHER, "groups and specs"),
        (pages(), full(head_size=math.pi), {}, "head_size"),
    ],
)
def test_what_is_no_layer_is_refused_by_name(value, spec, how, said):
    assert said in refused({"a": value}, {"a": spec}, **how)


@looped(
    "tensors, specs, said",
    [
        ({"a": pages()}, dict.fromkeys("ab", full()), "['b'] have no tensor"),
        (dict.fromkeys("abc", pages()), dict.fromkeys("ab", full()), "['c'] have no spec"),
        (TWICE, None, "a: shape is [2, 6, 4, 3, 5], given for several layers of its group; tried LBHNC = [2, B, 3, 4,"),
    ],
)
def test_layers_and_tensors_belong_together(tensors, specs, said):
    assert said in refused(tensors, specs)


@pytest.mark.parametrize(
    ("tensor", "mismatch"),
    [
        (torch.zeros(B, 7, N, 2 * D), "BHNC: axis H (heads on this rank) is 7, expected 3."),
        (torch.zeros(2, B, N, 7, D), "KBNHC: axis H (heads on this rank) is 7, expected 3."),
        (torch.zeros(B, H, N, D), "BHNC: axis C (content of one head and token) is 5, expected 10."),
    ],
)
def test_the_only_axis_that_does_not_fit_is_named(tensor, mismatch):
    with pytest.raises(SpecInvalid) as caught:
        kvflow.adopt({"a": tensor}, {"a": full()})
    assert caught.value.remedy.startswith(f"Only one axis differs from {mismatch}")


def test_no_axis_is_named_where_several_do_not_fit():
    with pytest.raises(SpecInvalid) as caught:
        kvflow.adopt({"a": torch.zeros(B, 7, 9, 2 * D)}, {"a": full()})
    assert "Only one axis" not in caught.value.remedy


@pytest.mark.parametrize("tensors", [None, [1], "a"])
def test_tensors_are_a_mapping(tensors):
    with pytest.raises(ArgumentInvalid, match="tensors must be a mapping"):
        kvflow.adopt(tensors, {"a": full()})


@looped(
    "shape",
    [
        (B, H, N, D),  # only K
        (B, H + 1, N, 2 * D),
        (B, N, H, 2 * D),  # tokens before heads
        (3, B, N, H, D),
        (2, B, N + 1, H, D),
        (B, H * N * 2 * D),
        (2, 2, B, N, H, D),  # an axis of two layers, but one layer
    ],
)
def test_a_shape_that_no_form_has_is_refused_with_those_that_were_tried(shape):
    message = refused({"a": torch.zeros(shape)})
    assert f"a: shape is {list(shape)}; tried BHNC = [B, 3, 4, 10], KBNHC = [2, B, 4, 3, 5], " in message


def test_values_of_another_size_do_not_fit_an_axis_of_pairs():
    assert "KBNHC" not in refused({"a": torch.zeros(2, B, N, H, D)}, {"a": full(head_size_v=2)})


@pytest.mark.parametrize("blocks", [[6, 6, 5], [5, 6, 6], [6, 7, 6]])
def test_all_layers_have_as_many_blocks(blocks):
    odd = next(index for index, count in enumerate(blocks) if count != 6)
    tensors = {f"layers.{index}": pages(blocks=count) for index, count in enumerate(blocks)}
    said = f"layers.{odd}: num_blocks is {blocks[odd]}; expected 6, as layers.{0 if odd else 1} has"
    assert said in refused(tensors)


@pytest.mark.parametrize("axes", ["BHNC", {"a": 4}])
def test_axes_are_strings_by_layer(axes):
    with pytest.raises(ArgumentInvalid, match="axes"):
        kvflow.adopt({"a": pages()}, {"a": full()}, axes=axes)


@pytest.mark.parametrize("axis", range(4))
def test_an_expanded_tensor_is_refused(axis):
    shape = [B, H, N, 2 * D]
    shape[axis] = 1
    expanded = torch.zeros(shape).expand(B, H, N, 2 * D)
    assert "bytes, but 4 bytes lie below it: expected at least 4" in refused({"a": expanded})


@pytest.mark.parametrize("strides", [(PAGE - 1, N * 2 * D, 2 * D, 1), (PAGE, 2 * D, 2 * D, 1), (PAGE, 40, 9, 1)])
def test_elements_that_meet_are_refused(strides):
    message = refused({"a": torch.zeros(2 * B * PAGE).as_strided((B, H, N, 2 * D), strides)})
    assert message.startswith("a: stride of ")
    assert "lie below it: expected at least" in message


def test_a_storage_that_ends_too_early_is_refused():
    tensor = pages()
    tensor.untyped_storage().resize_(100)
    assert f"a: storage has 100 bytes; the tensor needs {4 * B * PAGE} of them" in refused({"a": tensor})


@pytest.mark.parametrize("first", [1, 2])
def test_bytes_that_are_not_aligned_to_elements_are_refused(first):
    memory = torch.zeros(B * PAGE * 4 + 4, dtype=torch.int8)
    shifted = memory[first : first + B * PAGE * 4].view(B, H, N, 2 * D * 4)
    assert f"a.k: lies at byte {first} of its storage" in refused({"a": shifted})


# Two layers in one memory: ``test_adopt_overlap.py`` has more of what is checked.


def laid(*layers):
    """Two layers in the blocks of a flat memory, each from an element on and with a stride."""
    memory = torch.zeros(8 * B * PAGE)
    return {
        name: memory.as_strided((B, H, N, 2 * D), (stride, N * 2 * D, 2 * D, 1), first)
        for name, (first, stride) in zip("ab", layers, strict=True)
    }


OTHER = {"a": full(), "b": sliding()}
SAME = {"a": full(), "b": full()}


@pytest.mark.parametrize("first", [PAGE - 1, 1, 2 * PAGE - 1])
def test_layers_of_one_group_share_no_byte(first):
    assert "a layer of its own group: expected none" in refused(laid((0, 2 * PAGE), (first, 2 * PAGE)), SAME)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (PAGE, "b: block 0 has bytes of block 1 of a, a layer of another group"),
        (PAGE // 2, " of another group: expected those of the same block only"),
        (3 * PAGE, "b: block 0 has bytes of block 3 of a"),
    ],
)
def test_layers_of_different_groups_share_no_byte_across_blocks(first, said):
    assert said in refused(laid((0, PAGE), (first, PAGE)), OTHER)


def test_blocks_of_shared_memory_are_equally_far_apart():
    said = f"b: lies among the bytes of a, but its blocks are {8 * PAGE} bytes apart: expected {4 * PAGE}"
    assert said in refused(laid((0, PAGE), (0, 2 * PAGE)), OTHER)


def test_keys_outside_of_blocks_meet_pages_of_another_group():
    """Both have the same bytes, but block 1 of one has its keys where the other has values of block 0."""
    memory = torch.zeros(B * PAGE)
    split = memory.view(2, B, N, H, D)
    message = refused({"a": memory.view(B, H, N, 2 * D), "b": split}, OTHER)
    assert "lies among the bytes of" in message
    assert kvflow.adopt({"a": split, "b": split}, OTHER).num_blocks == B


# States.


def conv(*shape, dtype=torch.float16):
    return torch.zeros(shape or (B, 6, 3), dtype=dtype)


def ssm(*shape):
    return torch.zeros(shape or (B, 4, 2, 5))


HALVES = torch.zeros(B, 6, 12, dtype=torch.int8)[:, :, ::2]


@looped(
    "value, how, said",
    [
        ([ssm(), conv()], {}, "m[0]: dtype is float32; expected float16, or int8 or uint8 as bytes"),
        ([conv()], {}, "m: found 1 tensors; expected one for each of ['conv', 'ssm']"),
        ([conv(B, 6, 4), ssm()], {}, "m[0]: shape of conv is [6, 6, 4]; tried [B, 6, 3] and its two axes exchanged"),
        ([conv(), ssm(B, 2, 4, 5)], {}, "m[1]: shape of ssm is [6, 2, 4, 5]; tried [B, 4, 2, 5]"),
        ([conv(), ssm(B - 1, 4, 2, 5)], {}, "m[1]: has 5 blocks; expected 6 as m[0]"),
        ([conv(), ssm()[:1].expand(B, 4, 2, 5)], {}, "m.ssm: stride of blocks is 0 bytes"),
        ([HALVES, ssm()], {}, "m[0]: stride of the last axis is 2 bytes; expected 1"),
        ([conv(), ssm()], {"axes": {"m": "BNC"}}, "m: axes is 'BNC'; expected no entry for a layer of kind 'mamba'"),
        (conv(), {}, "m: dtype is float16; expected int8 or uint8 for a page of states"),
        (conv(B, 195, dtype=torch.int8), {}, "m: shape is [6, 195]; tried [B, 196], [B, 1, 1, 196]"),
        (conv(B, 197, dtype=torch.int8), {}, "m: shape is [6, 197]; tried [B, 196]"),
        (conv(B, 2, 1, 196, dtype=torch.int8), {}, "m: shape is [6, 2, 1, 196]; tried"),
        (conv(B, 392, dtype=torch.int8)[:, ::2], {}, "m: stride of the last axis is 2 bytes; expected 1"),
        (conv(B, 198, dtype=torch.int8)[:, :196], {}, "m.ssm: lies at byte 36 of its storage with strides of 198"),
    ],
)
def test_states_are_those_of_the_spec(value, how, said):
    assert said in refused({"m": value}, {"m": two_states()}, **how)


def test_states_of_one_layer_share_no_byte():
    memory = torch.zeros(B, 50)
    states = [memory.view(torch.float16)[:, :18].view(B, 6, 3), memory[:, 8:48].view(B, 4, 2, 5)]
    assert "m.ssm: block 0 has bytes of block 0 of m.conv" in refused({"m": states}, {"m": two_states()})
