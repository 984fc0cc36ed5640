"""vLLM's tensors, as kvflow is given them."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvflow import Mamba, State, plan_transfer
from kvflow.errors import LayoutMismatch, SpecInvalid
from kvflow.integrations.vllm.caches import (
    CELLS_MAX,
    EngineShape,
    adopt_caches,
    keys_and_values,
    marker,
    read_spec,
    states_of,
    strided,
)
from kvflow.planning.assignment import assign_sources
from kvflow.planning.bind import Binding
from kvflow.planning.pairs import pair_units
from tests.helpers.loops import looped

from .vllm_like import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    group,
)

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
    conv, ssm = states_of(page, spec, read_spec("a", spec, EngineShape()), EngineShape())
    assert (conv.shape, ssm.shape) == ((3, 4, 3), (3, 2, 5))
    ssm[1] = 1.0
    assert page[1, 0, 0, 24:64].view(torch.float32).tolist() == [1.0] * 10
    assert not page[1, 0, 0, :24].any()


MODEL = Mamba(
    block_size=1024,
    states=(
        State("conv_x", (8, 3), "float32"),
        State("conv_B", (2, 3), "float32", None),
        State("ssm", (4, 2), "float32"),
    ),
)


def rank_of(rank, tp_size, *, channels_first=True, model=MODEL):
    """Return what one rank holds of a state, adopted, and its page: each number is that of a channel, or of a head."""
    x, ssm = torch.arange(8.0).chunk(tp_size)[rank], torch.arange(100.0, 104.0).chunk(tp_size)[rank]
    conv = torch.cat([x, torch.arange(50.0, 52.0)]).unsqueeze(1).expand(-1, 3)
    conv = conv if channels_first else conv.T
    spec = MambaSpec(shapes=(tuple(conv.shape), (len(ssm), 2)), dtypes=(torch.float32, torch.float32))
    page = torch.cat([conv.flatten(), ssm.unsqueeze(1).expand(-1, 2).flatten()]).repeat(2, 1)
    shape = EngineShape(tp_size=tp_size, states={"a": model} if model else {}, conv_channels_first=channels_first)
    return adopt_caches({"a": page.view(torch.int8)}, [group(spec, "a")], shape, tp_rank=rank), page


def move(source, target, block):
    """Carry out what a plan has for one block, one ``memmove`` per descriptor."""
    theirs, ours = source.manifest(), target.manifest()
    (group_plan,) = plan_transfer(theirs, ours).groups
    pairs = pair_units(group_plan, np.array([block]), np.array([block]), num_tokens=1)
    binding = Binding(group_plan, theirs, ours)
    bound = binding.bind(pairs, chunk_bytes=1 << 20, chunk_descriptors=1 << 10)
    there, here = (
        [(row[0] + number * row[3], row[1]) for row in rows.table.tolist() for number in range(row[4])]
        for rows in (binding.source, binding.target)
    )
    for source_index, target_index in zip(bound.source_index, bound.target_index, strict=True):
        (at, nbytes), (to, _) = there[source_index], here[target_index]
        ctypes.memmove(to, at, nbytes)


@looped("source_first", [True, False])
@looped("target_first", [True, False])
@looped("sources, targets", [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2)])
def test_states_of_any_number_of_ranks_fill_those_of_any_other(sources, targets, source_first, target_first):
    held = [rank_of(rank, sources, channels_first=source_first) for rank in range(sources)]
    for rank in range(targets):
        target, page = rank_of(rank, targets, channels_first=target_first)
        expected = page[1].clone()
        page.zero_()
        for source, _ in held:
            move(source, target, block=1)
        assert page[1].tolist() == expected.tolist()
        assert not page[0].any()


def test_states_of_unknown_parts_move_between_equal_ranks_only():
    source, _ = rank_of(0, 2, model=None)
    target, page = rank_of(0, 2, model=None)
    expected = page[1].clone()
    page.zero_()
    move(source, target, block=1)
    assert page[1].tolist() == expected.tolist()
    for rank, tp_size in ((0, 1), (0, 4)):
        with pytest.raises(LayoutMismatch, match=r"state_0"):
            plan_transfer(source.manifest(), rank_of(rank, tp_size, model=None)[0].manifest())


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


@looped(
    "kernels, tensor, said",
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


def nvfp4(kind=FullAttentionSpec, block_size=16, **named):
    """The spec of a cache whose keys and values stand in slots of their own, each with scales behind it."""
    mode = SimpleNamespace(name="NVFP4")
    fields = {"num_heads": 2 * HEADS, "content": 9, "dtype": torch.uint8, "kv_quant_mode": mode}
    return kind(block_size=block_size, num_kv_heads=HEADS, head_size=16, **fields | named)


def pages(spec, *, kernel_tokens=16, tp_size=1, tp_rank=0, backend="cuda_flashinfer", nhc=False):
    """Adopt three blocks of such a cache."""
    kernel_blocks = spec.block_size // kernel_tokens
    shape = (3 * kernel_blocks, spec.num_heads, kernel_tokens, spec.content)
    tensor = torch.zeros(shape[0], shape[2], shape[1], shape[3], dtype=torch.uint8).transpose(1, 2)
    tensor = tensor if nhc else torch.zeros(shape, dtype=torch.uint8)
    shape = EngineShape(tp_size=tp_size, arrangements={"a": backend})
    return adopt_caches({"a": tensor}, [group(spec, "a")], shape, tp_rank=tp_rank)


def test_pages_that_cannot_be_described_move_whole_between_equals():
    source, target = pages(nvfp4()), pages(nvfp4())
    (part,) = target.manifest().groups[0].layers[0].components
    assert (part.role, part.nbytes) == ("cuda_flashinfer_nvfp4_4x16x9hn", 4 * 16 * 9)
    assert plan_transfer(source.manifest(), target.manifest()).descriptors(num_blocks=3, consecutive=False) == 3


@pytest.mark.parametrize("mode", ["INT8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD", "TURBOQUANT_K8V4", "ULTRAQUANT_4BIT"])
def test_every_quantization_that_is_not_described_moves_as_pages(mode):
    spec = nvfp4(kv_quant_mode=SimpleNamespace(name=mode), num_heads=HEADS)
    plan = plan_transfer(pages(spec).manifest(), pages(spec).manifest())
    assert plan.certificate.complete
    assert mode.lower() in pages(spec).manifest().groups[0].layers[0].components[0].role


@looped(
    "there, here",
    [
        ({"backend": "cuda_b12x"}, {}),
        ({"backend": "rocm_flashinfer"}, {}),
        ({"nhc": True}, {}),
        ({"spec": nvfp4(block_size=32)}, {}),
        ({"spec": nvfp4(block_size=32)}, {"spec": nvfp4(block_size=32), "kernel_tokens": 32}),
        ({"spec": nvfp4(content=10)}, {}),
        ({"tp_size": 2}, {}),
        ({"tp_size": 2}, {"tp_size": 4}),
    ],
    ids=["backend", "platform", "order", "block size", "kernel block", "content", "ranks", "more ranks"],
)
def test_pages_of_another_geometry_are_refused_by_name(there, here):
    source, target = (pages(each.pop("spec", nvfp4()), **each) for each in (dict(there), dict(here)))
    with pytest.raises(LayoutMismatch, match=r"^.*a\."):
        plan_transfer(source.manifest(), target.manifest())


def test_each_rank_has_pages_of_its_own():
    first, second = (pages(nvfp4(), tp_size=2, tp_rank=rank) for rank in range(2))
    assert plan_transfer(second.manifest(), second.manifest()).certificate.complete
    assert not plan_transfer(first.manifest(), second.manifest()).groups


def test_pages_keep_their_window():
    cache = pages(nvfp4(SlidingWindowSpec))
    assert [(group.kind, group.window) for group in cache.groups] == [("opaque", 64)]


def test_pages_of_chunks_are_refused_by_name():
    with pytest.raises(SpecInvalid, match="quantized as NVFP4"):
        pages(nvfp4(ChunkedLocalAttentionSpec))


def test_pages_that_do_not_lie_together_are_refused():
    tensor = torch.zeros(2 * HEADS, 3, 16, 9, dtype=torch.uint8).transpose(0, 1)
    with pytest.raises(SpecInvalid, match="do not lie together"):
        adopt_caches({"a": tensor}, [group(nvfp4(), "a")], EngineShape(arrangements={"a": "cuda_x"}), tp_rank=0)


def test_kernel_blocks_of_a_page_apart_from_each_other_are_refused():
    tensor = torch.zeros(6, 2, 2 * HEADS, 16, 9, dtype=torch.uint8)[:, 0]
    spec, shape = nvfp4(block_size=32), EngineShape(arrangements={"a": "cuda_x"})
    with pytest.raises(SpecInvalid, match="kernel blocks of 16 tokens"):
        adopt_caches({"a": tensor}, [group(spec, "a")], shape, tp_rank=0)


def compressed(kind=MLAAttentionSpec, **fields):
    """The spec of a cache of DeepSeek-V4: four tokens share an entry of 584 bytes, in padded pages."""
    pages = {"block_size": 256, "tokens_per_state": 4, "page_size_padded": 37440, "model_version": "deepseek_v4"}
    mode = SimpleNamespace(name="FP8_PER_TENSOR")
    of_a_vector = {"num_kv_heads": 1, "num_heads": 1, "head_size": 512, "head_size_v": 0, "max_tp_shards": 1}
    pages |= of_a_vector | {"content": 584, "dtype": torch.uint8, "kv_quant_mode": mode}
    return kind(**pages | fields)


def entries(spec, *, kernel_blocks=1, tp_size=1, tp_rank=0, backend="cuda_flashmla_sparse_dsv4"):
    """Adopt three blocks of such a cache."""
    held = spec.block_size // spec.tokens_per_state // kernel_blocks
    content = spec.content // spec.dtype.itemsize
    page = (spec.page_size_padded or spec.unpadded_page_size_bytes) // spec.dtype.itemsize // kernel_blocks
    raw = torch.zeros(3 * kernel_blocks * page, dtype=spec.dtype)
    tensor = raw.as_strided((3 * kernel_blocks, 1, held, content), (page, held * content, content, 1))
    shape = EngineShape(tp_size=tp_size, arrangements={"a": backend})
    return adopt_caches({"a": tensor}, [group(spec, "a")], shape, tp_rank=tp_rank)


def test_pages_of_shared_entries_move_whole_without_their_padding():
    source, target = entries(compressed()), entries(compressed())
    (part,) = target.manifest().groups[0].layers[0].components
    assert (part.role, part.nbytes) == ("cuda_flashmla_sparse_dsv4_fp8_per_tensor_1x64x584hn", 64 * 584)
    plan = plan_transfer(source.manifest(), target.manifest())
    assert plan.descriptors(num_blocks=3, consecutive=False) == 3
    assert plan.certificate.complete


def test_windows_of_deepseek_v4_are_pages_and_its_states_are_not():
    window = {"block_size": 64, "tokens_per_state": 1}
    state = {"block_size": 4, "tokens_per_state": 1, "sliding_window": 8, "model_version": None}
    state |= {"dtype": torch.float32, "head_size": 2048, "content": 8192, "page_size_padded": 32832}
    found = [entries(compressed(SlidingWindowMLASpec, **fields)).groups[0] for fields in (window, state)]
    assert [(each.kind, each.window, each.block_size) for each in found] == [("opaque", 128, 64), ("mla", 8, 4)]


@pytest.mark.proves("compressed caches (DeepSeek V4)", engine="stand-in")
@looped(
    "there, here",
    [
        ({"backend": "rocm_flashmla_sparse_dsv4"}, {}),
        ({"backend": "cuda_flashinfer_mla_sparse_dsv4"}, {}),
        ({"spec": compressed(tokens_per_state=128, page_size_padded=1728)}, {}),
        ({"spec": compressed(content=580)}, {}),
        ({"spec": compressed(kv_quant_mode=SimpleNamespace(name="NVFP4_DS_MLA"))}, {}),
        ({"spec": compressed(block_size=512, tokens_per_state=8)}, {}),
        ({"spec": compressed(page_size_padded=None), "kernel_blocks": 4}, {}),
        (
            {"spec": compressed(dtype=torch.float16, content=1024, page_size_padded=None)},
            {"spec": compressed(dtype=torch.bfloat16, content=1024, page_size_padded=None)},
        ),
        ({"spec": compressed(max_tp_shards=None), "tp_size": 2}, {}),
        (
            {"spec": compressed(max_tp_shards=None), "tp_size": 2},
            {"spec": compressed(max_tp_shards=None), "tp_size": 4},
        ),
    ],
    ids=["platform", "backend", "tokens", "content", "mode", "block", "kernel block", "dtype", "ranks", "more ranks"],
)
def test_pages_of_entries_of_another_geometry_are_refused_by_name(there, here):
    source, target = (entries(each.pop("spec", compressed()), **each) for each in (dict(there), dict(here)))
    with pytest.raises(LayoutMismatch, match=r"^.*a\."):
        plan_transfer(source.manifest(), target.manifest())


def test_pages_that_every_rank_has_are_read_by_any_number_of_ranks():
    source, target = entries(compressed(), tp_size=2, tp_rank=1), entries(compressed(), tp_size=4, tp_rank=3)
    assert plan_transfer(source.manifest(), target.manifest()).certificate.complete


def test_a_tensor_of_other_pages_than_its_spec_is_refused():
    large = torch.zeros(3, 1, 64, 600, dtype=torch.uint8)
    with pytest.raises(SpecInvalid, match="a: "):
        adopt_caches({"a": large}, [group(compressed(), "a")], EngineShape(arrangements={"a": "cuda_x"}), tp_rank=0)


def indexer(block_size, kernel_tokens, arrangement):
    spec = MLAAttentionSpec(block_size=block_size, num_kv_heads=1, num_heads=1, head_size=132, head_size_v=0)
    spec.dtype, spec.content = torch.uint8, 132
    tensor = torch.zeros(4 * block_size // kernel_tokens, 1, kernel_tokens, 132, dtype=torch.uint8)
    shape = EngineShape(element_types={"a": "float8_e4m3fn"}, arrangements={"a": arrangement})
    return adopt_caches({"a": tensor}, [group(spec, "a")], shape, tp_rank=0).manifest()


def test_equal_kernel_blocks_of_the_indexer_move_to_any_block_size():
    plan = plan_transfer(indexer(64, 64, "cuda_indexer"), indexer(128, 64, "cuda_indexer"))
    assert plan.certificate.complete
    assert plan.descriptors(num_blocks=1, consecutive=False) == 2


@pytest.mark.parametrize("theirs", [(64, 32, "rocm_indexer"), (64, 1, "rocm_indexer"), (64, 64, "cuda_indexer")])
def test_the_sparse_indexers_kernel_blocks_are_never_cut(theirs):
    with pytest.raises(LayoutMismatch, match="indexer_by_64"):
        plan_transfer(indexer(*theirs), indexer(64, 64, "rocm_indexer"))


def stage(*layers):
    """Return what a pipeline stage holds of a model with a group of each of the layers ``a`` and ``b``."""
    sizes = {"a": 16, "b": 32}
    groups = [group(spec_of(size), name) for name, size in sizes.items()]
    for each in groups:
        each.layer_names = [name for name in each.layer_names if name in layers]
    return adopt_caches({name: attention(sizes[name]) for name in layers}, groups, EngineShape(), tp_rank=0)


def test_a_stage_keeps_the_groups_whose_layers_others_have():
    first, second = stage("a"), stage("b")
    assert [each.layers for each in second.groups] == [(), ("b",)]
    assert [(each.kind, each.block_size) for each in second.manifest().groups] == [("full", 16), ("full", 32)]
    assert [len(each.layers) for each in first.manifest().groups] == [1, 0]


@pytest.mark.parametrize("layers", ["a", "b", "ab"])
def test_stages_fill_what_others_have_of_the_same_layers(layers):
    target = stage(*layers).manifest()
    for name, index in (("a", 0), ("b", 1)):
        source = stage(name).manifest()
        if name in layers:
            (found,) = plan_transfer(source, target).groups
            assert (found.source_group, found.target_group) == (index, index)
            assert assign_sources(target, [stage("a").manifest(), stage("b").manifest()], rotation=0)
        else:
            with pytest.raises(LayoutMismatch, match="layers"):
                plan_transfer(source, target)
