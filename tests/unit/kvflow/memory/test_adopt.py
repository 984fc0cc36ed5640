"""Adopting tensors: whatever their form, a component has the numbers that the engine sees under its own axes."""

import pytest
import torch

import kvflow
from kvflow.layout.groups import Group
from tests.helpers.loops import looped

B, R, H, N, D = 6, 2, 3, 4, 5
SPLIT = ("KBNHC", "BKNHC", "KBHNC", "BKHNC")
PERMUTED = ("KBNHC", "BKHNC", "HKBNC", "NBKHC", "KHNBC")


def full(**fields):
    fields = {"block_size": N, "num_kv_heads": H, "head_size": D, "dtype": "float32"} | fields
    return kvflow.FullAttention(**fields)


def numbers(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator).to(dtype)


def ordered(tensor, axes, form):
    """Bring the axes of a tensor into the order of a form, in new memory."""
    return tensor.permute([axes.index(letter) for letter in form]).contiguous()


def keys_and_values(*shape):
    return numbers(*shape, seed=1), numbers(*shape, seed=2)


def require(cache, layer, **components):
    for role, expected in components.items():
        found = cache.component(layer, role)
        assert torch.equal(found, expected), f"{layer}.{role}"


def test_keys_and_values_side_by_side():
    k, v = keys_and_values(B, H, N, D)
    tensor = torch.cat([k, v], -1)
    cache = kvflow.adopt({"a": tensor}, {"a": full()})
    require(cache, "a", k=k, v=v)
    assert cache.num_blocks == B
    assert cache.views["a"] is tensor


@pytest.mark.parametrize("form", SPLIT)
def test_split_forms_are_found_by_their_extents(form):
    k, v = keys_and_values(B, H, N, D)
    cache = kvflow.adopt({"a": ordered(torch.stack([k, v]), "KBHNC", form)}, {"a": full()})
    require(cache, "a", k=k, v=v)


@looped("form", PERMUTED)
def test_any_order_of_axes_can_be_named(form):
    k, v = keys_and_values(B, H, N, D)
    tensors = {"a": ordered(torch.stack([k, v]), "KBHNC", form)}
    require(kvflow.adopt(tensors, {"a": full()}, axes={"a": form}), "a", k=k, v=v)


def test_tokens_come_before_heads_unless_axes_say_otherwise():
    spec = full(num_kv_heads=N)
    k, v = keys_and_values(B, N, N, D)
    for form, axes in (("KBNHC", None), ("BKNHC", None), ("KBHNC", {"a": "KBHNC"}), ("BKHNC", {"a": "BKHNC"})):
        tensors = {"a": ordered(torch.stack([k, v]), "KBHNC", form)}
        require(kvflow.adopt(tensors, {"a": spec}, axes=axes), "a", k=k, v=v)


def test_the_pair_comes_before_blocks_where_there_are_two_of_them():
    k, v = keys_and_values(2, H, N, D)
    for form, axes in (("KBNHC", None), ("BKNHC", {"a": "BKNHC"})):
        tensors = {"a": ordered(torch.stack([k, v]), "KBHNC", form)}
        require(kvflow.adopt(tensors, {"a": full()}, axes=axes), "a", k=k, v=v)


@pytest.mark.parametrize("form", ["BNHC", "BHNC"])
@pytest.mark.parametrize("size", [D, D + 2])
def test_keys_and_values_in_two_tensors_may_differ_in_size(form, size):
    k, v = numbers(B, H, N, D, seed=1), numbers(B, H, N, size, seed=2)
    pair = [ordered(each, "BHNC", form) for each in (k, v)]
    cache = kvflow.adopt({"a": pair}, {"a": full(head_size_v=size)})
    require(cache, "a", k=k, v=v)
    assert len(cache.manifest().regions) == len({each.untyped_storage().data_ptr() for each in pair}) == 2


@pytest.mark.parametrize("shape", [(B, N, D), (B, 1, N, D)])
def test_a_latent_has_one_head_or_no_axis_of_heads(shape):
    latent = numbers(*shape)
    cache = kvflow.adopt({"a": latent}, {"a": kvflow.MLA(block_size=N, head_size=D, dtype="float32")})
    require(cache, "a", latent=latent.reshape(B, 1, N, D))
    assert cache.held("a", "latent") == (0, 1, 1)


@looped("kind", [torch.int8, torch.uint8])
@looped("form", ["BHNC", *SPLIT])
def test_bytes_stand_for_elements(kind, form):
    k, v = keys_and_values(B, H, N, D)
    tensor = torch.cat([k, v], -1) if form == "BHNC" else ordered(torch.stack([k, v]), "KBHNC", form)
    require(kvflow.adopt({"a": tensor.view(kind)}, {"a": full()}), "a", k=k, v=v)


def test_content_need_not_be_dense():
    k, v = keys_and_values(B, H, N, D)
    wide = torch.zeros(B, H, N, 3 * 2 * D)
    wide[..., ::3] = torch.cat([k, v], -1)
    require(kvflow.adopt({"a": wide[..., ::3]}, {"a": full()}), "a", k=k, v=v)


def test_scales_lie_behind_the_elements_that_they_scale():
    spec = kvflow.FullAttention(
        block_size=N, num_kv_heads=H, head_size=8, dtype="float8_e4m3fn", quantization="fp8_per_token_head"
    )
    cells = torch.arange(B * H * N * 24).to(torch.uint8).reshape(B, H, N, 24)  # 8 of k, 4 of its scale, the same of v
    cache = kvflow.adopt({"a": cells}, {"a": spec})
    for role, first, last in (("k", 0, 8), ("k_scale", 8, 12), ("v", 12, 20), ("v_scale", 20, 24)):
        assert torch.equal(cache.component("a", role).view(torch.uint8), cells[..., first:last])
    assert cache.component("a", "k_scale").dtype == torch.float32


@looped("form", ["BHNC", *SPLIT])
def test_kernel_blocks_count_as_blocks(form):
    k, v = keys_and_values(B * R, H, N, D)
    tensor = torch.cat([k, v], -1) if form == "BHNC" else ordered(torch.stack([k, v]), "KBHNC", form)
    cache = kvflow.adopt({"a": tensor}, {"a": full(block_size=N * R, kernel_block_size=N)})
    assert cache.num_blocks == B
    assert cache.manifest().groups[0].kernel_blocks == R
    require(cache, "a", k=k, v=v)


@looped("form", ["BRHNC", "BRKNHC", "BRKHNC"])
@looped("padding", [0, 7])
def test_kernel_blocks_may_have_an_axis_of_their_own(form, padding):
    """It stays one unless one stride reaches them all; padding at the end of a block prevents that."""
    k, v = keys_and_values(B, R, H, N, D)
    dense = torch.cat([k, v], -1) if "K" not in form else ordered(torch.stack([k, v]), "KBRHNC", form)
    memory = torch.zeros(B, dense[0].numel() + padding)
    tensor = memory.as_strided(dense.shape, (memory.stride(0), *dense.stride()[1:]))
    tensor.copy_(dense)
    cache = kvflow.adopt({"a": tensor}, {"a": full(block_size=N * R, kernel_block_size=N)})
    if not padding:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    require(cache, "a", k=k, v=v)


def test_a_group_may_have_larger_blocks_than_its_specs():
    k, v = keys_and_values(B, H, 2 * N, D)
    group = Group(("a",), "full", 2 * N)
    cache = kvflow.adopt({"a": torch.cat([k, v], -1)}, {"a": full()}, [group])
    require(cache, "a", k=k, v=v)


CROSS_LAYER = ("LBHNC", "BLHNC", "LKBNHC", "LKBHNC", "BLKNHC", "BLKHNC", "LBKHNC", "KLBNHC")


@looped("form", CROSS_LAYER)
def test_layers_of_one_group_may_share_a_tensor_with_an_axis_for_them(form):
    count = 3
    k, v = keys_and_values(count, B, H, N, D)
    if "K" in form:
        tensor = ordered(torch.stack([k, v]), "KLBHNC", form)
    else:
        tensor = ordered(torch.cat([k, v], -1), "LBHNC", form)
    names = [f"layers.{index}" for index in range(count)]
    cache = kvflow.adopt(dict.fromkeys(names, tensor), dict.fromkeys(names, full()))
    for index, name in enumerate(names):
        require(cache, name, k=k[index], v=v[index])
    assert [region.nbytes for region in cache.manifest().regions] == [tensor.nbytes]


@pytest.mark.parametrize("form", ["BHLNC", "BHLKNC"])
def test_layers_inside_of_heads_must_be_named(form):
    """As many layers as heads could be either."""
    k, v = keys_and_values(H, B, H, N, D)
    whole, axes = (torch.stack([k, v]), "KLBHNC") if "K" in form else (torch.cat([k, v], -1), "LBHNC")
    tensors = dict.fromkeys("abc", ordered(whole, axes, form))
    cache = kvflow.adopt(tensors, dict.fromkeys("abc", full()), axes=dict.fromkeys("abc", form))
    for index, name in enumerate("abc"):
        require(cache, name, k=k[index], v=v[index])


def test_layers_stand_in_the_order_of_their_group():
    k, v = keys_and_values(3, B, H, N, D)
    tensor = torch.stack([k, v], 1)
    names = ("c", "a", "b")
    cache = kvflow.adopt(dict.fromkeys("abc", tensor), dict.fromkeys("abc", full()), [Group(names, "full", N)])
    for index, name in enumerate(names):
        require(cache, name, k=k[index], v=v[index])


@pytest.mark.parametrize(("count", "places"), [(2, (0, 1, 0)), (3, (0, 1, 2))])
def test_groups_share_an_axis_of_layers_or_have_parts_of_it(count, places):
    """An axis as long as the longest group is shared by the groups; one as long as all layers is divided."""
    k, v = keys_and_values(count, B, H, N, D)
    tensor = torch.stack([k, v], 1)
    sliding = kvflow.SlidingWindow(block_size=N, num_kv_heads=H, head_size=D, dtype="float32", window=9)
    groups = [Group(("a", "b"), "full", N), Group(("c",), "sliding", N, 9)]
    specs = {"a": full(), "b": full(), "c": sliding}
    cache = kvflow.adopt(dict.fromkeys(specs, tensor), specs, groups)
    for name, place in zip("abc", places, strict=True):
        require(cache, name, k=k[place], v=v[place])


def test_one_layer_may_have_an_axis_of_layers():
    k, v = keys_and_values(B, H, N, D)
    require(kvflow.adopt({"a": torch.stack([k, v], 1)[:, None]}, {"a": full()}), "a", k=k, v=v)


def test_latents_may_share_a_tensor():
    latents = numbers(2, B, N, D)
    specs = dict.fromkeys("ab", kvflow.MLA(block_size=N, head_size=D, dtype="float32"))
    for tensor in (latents, latents.transpose(0, 1).contiguous()):
        cache = kvflow.adopt(dict.fromkeys("ab", tensor), specs)
        for index, name in enumerate("ab"):
            require(cache, name, latent=latents[index][:, None])


def two_states(**fields):
    states = (kvflow.State("conv", (6, 3), "float16"), kvflow.State("ssm", (4, 2, 5), "float32"))
    return kvflow.Mamba(block_size=16, states=states, **fields)


def test_states_are_a_list_in_the_order_of_the_spec():
    conv, ssm = numbers(B, 6, 3, dtype=torch.float16), numbers(B, 4, 2, 5)
    cache = kvflow.adopt({"m": [conv, ssm]}, {"m": two_states()})
    require(cache, "m", conv=conv, ssm=ssm)
    assert cache.views["m"] == [conv, ssm]


@pytest.mark.parametrize("exchanged", [False, True])
def test_a_state_may_be_a_slice_with_its_axes_in_either_order(exchanged):
    """Either the strides are exchanged, or the axes themselves, which the extents tell."""
    conv, ssm = numbers(B, 6, 3, dtype=torch.float16), numbers(B, 4, 2, 5)
    whole = torch.zeros(B, 3, 10, dtype=torch.float16)
    given = whole[:, :, 2:8]
    given.copy_(conv.transpose(1, 2))
    cache = kvflow.adopt({"m": [given if exchanged else given.transpose(1, 2), ssm]}, {"m": two_states()})
    require(cache, "m", conv=conv, ssm=ssm)


@pytest.mark.parametrize("shape", [(B, 200), (B, 1, 1, 200)])
@pytest.mark.parametrize("stride", [200, 256])
def test_states_may_lie_in_a_page_of_bytes(shape, stride):
    """36 bytes of conv, then 160 of ssm, padded to 200."""
    memory = torch.randint(-128, 128, (B, stride), dtype=torch.int8)
    page = (
        memory[:, :200].reshape(shape)
        if stride == 200
        else memory.as_strided(shape, (stride, *[200] * (len(shape) - 2), 1))
    )
    cache = kvflow.adopt({"m": page}, {"m": two_states(page_bytes=200)})
    assert torch.equal(cache.component("m", "conv").reshape(B, -1).view(torch.int8), memory[:, :36])
    assert torch.equal(cache.component("m", "ssm").reshape(B, -1).view(torch.int8), memory[:, 36:196])
    assert cache.manifest().groups[0].layers[0].components[1].block_stride == stride


def test_a_state_may_be_given_as_bytes():
    conv, ssm = numbers(B, 6, 3, dtype=torch.float16), numbers(B, 4, 2, 5)
    cache = kvflow.adopt({"m": [conv.view(torch.uint8), ssm.view(torch.int8)]}, {"m": two_states()})
    require(cache, "m", conv=conv, ssm=ssm)


def test_one_state_needs_no_list():
    state = numbers(B, 4, 2, 5)
    spec = kvflow.Mamba(block_size=16, states=(kvflow.State("ssm", (4, 2, 5), "float32"),))
    require(kvflow.adopt({"m": state}, {"m": spec}), "m", ssm=state)


def test_what_is_opaque_is_a_page_of_bytes():
    page = torch.randint(0, 256, (B, 24), dtype=torch.uint8)
    for given in (page, [page], page.reshape(B, 1, 1, 24)):
        require(kvflow.adopt({"o": given}, {"o": kvflow.Opaque(block_size=16, nbytes=24)}), "o", page=page)


def test_what_is_written_through_a_component_is_seen_by_the_engine():
    tensor = torch.zeros(2, B, N, H, D)
    cache = kvflow.adopt({"a": tensor}, {"a": full()})
    cache.component("a", "v")[4, 2, 1] = 7.0
    assert torch.equal(tensor.nonzero()[:, :4].unique(dim=0), torch.tensor([[1, 4, 1, 2]]))


def test_the_memory_lives_as_long_as_the_cache():
    tensor = torch.full((2, B, N, H, D), 3.0)
    cache = kvflow.adopt({"a": tensor}, {"a": full()})
    cache.views.clear()
    del tensor
    assert bool((cache.component("a", "k") == 3.0).all())
