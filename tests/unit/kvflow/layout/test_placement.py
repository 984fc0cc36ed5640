"""Strides of every layout against a table written by hand.

Five blocks of four tokens, two heads, three layers; one head of one token has 16 bytes of K and 16 of V.
"""

import pytest

from kvflow.errors import SpecInvalid
from kvflow.layout.placement import (
    KV_FORMS,
    LAYOUTS,
    Pool,
    axes_of,
    page_bytes,
    place_column,
    place_row,
    row_bytes,
)
from kvflow.layout.shards import Shard
from kvflow.layout.specs import MLA, State
from tests.helpers.loops import looped

from .helpers import full, mamba, opaque, quantized

SPEC = full(block_size=4, num_kv_heads=2, head_size=8, dtype="float16")

# fmt: off
STRIDES = {  # layer, block, head, token, from K to V
    ("LBNHC", "content"):     (1280, 256,  32, 64,  16),
    ("LBHNC", "content"):     (1280, 256, 128, 32,  16),
    ("BLNHC", "content"):     ( 256, 768,  32, 64,  16),
    ("BLHNC", "content"):     ( 256, 768, 128, 32,  16),
    ("BHLNC", "content"):     ( 128, 768, 384, 32,  16),
    ("LBNHC", "split"):       (1280, 128,  16, 32, 640),
    ("LBHNC", "split"):       (1280, 128,  64, 16, 640),
    ("BLNHC", "split"):       ( 256, 768,  16, 32, 128),
    ("BLHNC", "split"):       ( 256, 768,  64, 16, 128),
    ("BHLNC", "split"):       ( 128, 768, 384, 16,  64),
    ("LBNHC", "block_split"): (1280, 256,  16, 32, 128),
    ("LBHNC", "block_split"): (1280, 256,  64, 16, 128),
    ("BLNHC", "block_split"): ( 256, 768,  16, 32, 128),
    ("BLHNC", "block_split"): ( 256, 768,  64, 16, 128),
    ("BHLNC", "block_split"): ( 128, 768, 384, 16,  64),
}
# fmt: on


def placed(layout, kv, shard=None):
    """Place three layers as one group: in rows, or each in a tensor behind the one before it."""
    shard = shard or Shard()
    pool, names = Pool(5, shard, layout, kv), ("a", "b", "c")
    if pool.packed:
        specs = dict.fromkeys(names, SPEC)
        return list(place_row(specs, names, pool, row_bytes(specs, names, pool)).values())
    page = page_bytes(SPEC, shard)
    return [
        place_column({name: SPEC}, [name], pool, position * 5 * page, page)[name] for position, name in enumerate(names)
    ]


def test_the_table_is_complete():
    assert STRIDES.keys() == {(layout, kv) for layout in LAYOUTS for kv in KV_FORMS}


@looped("layout, kv", STRIDES)
def test_strides(layout, kv):
    layer, block, head, token, k_to_v = STRIDES[layout, kv]
    for position, place in enumerate(placed(layout, kv)):
        keys, values = place.components
        for part in (keys, values):
            assert (part.block_stride, part.strides) == (block, (head, token, 2))
            assert (part.extents, part.kernel_stride) == ((2, 4, 8), 0)
        assert (keys.role, keys.offset) == ("k", position * layer)
        assert (values.role, values.offset) == ("v", position * layer + k_to_v)


@looped("layout, kv", STRIDES)
def test_components_end_within_the_allocation_and_the_last_one_at_its_end(layout, kv):
    ends = [part.end(5) for place in placed(layout, kv) for part in place.components]
    assert max(ends) == 5 * 3 * page_bytes(SPEC)


def test_a_shard_keeps_its_heads_only():
    shard = Shard(tp_rank=1, tp_size=2)
    keys, values = placed("BLHNC", "content", shard)[0].components
    assert (keys.first, keys.held.count, keys.total, keys.extents) == (1, 1, 2, (1, 4, 8))
    assert (keys.block_stride, values.offset) == (384, 16)
    assert page_bytes(SPEC, shard) == 128


@pytest.mark.parametrize(
    ("layout", "kv"), [("LBCHN", "content"), ("LBNHC", "both"), ("", "split"), ("auto", "content")]
)
def test_an_unknown_layout_is_refused_with_the_known_ones(layout, kv):
    with pytest.raises(SpecInvalid, match="BHLNC") as caught:
        axes_of(layout, kv)
    assert repr(layout) in caught.value.message


def in_row(specs, layout="BLHNC", kv="content", shard=None, num_blocks=5):
    """Place layers as one group in a row that is as long as they need; return them and its bytes."""
    pool = Pool(num_blocks, shard or Shard(), layout, kv)
    nbytes = row_bytes(specs, list(specs), pool)
    return place_row(specs, list(specs), pool, nbytes), nbytes


def alone(spec, layout="LBNHC", kv="content", *, column_bytes=None, offset=0, shard=None):
    """Place one layer in a tensor of its own."""
    pool = Pool(5, shard or Shard(), layout, kv)
    return place_column({"a": spec}, ["a"], pool, offset, column_bytes or page_bytes(spec, pool.shard))["a"]


def shapes(placed):
    return [(view.dtype, view.shape, view.strides, view.offset) for view in placed.views]


def geometry(placed):
    return [(part.role, part.offset, part.block_stride, part.kernel_stride, part.strides) for part in placed.components]


@pytest.mark.parametrize(("kv", "k_to_v"), [("content", 16), ("split", 128)])
def test_kernel_blocks_of_a_layer_alone_are_so_many_more_blocks(kv, k_to_v):
    """Four kernel blocks of four tokens, 256 bytes each: one stride reaches them all."""
    placed = alone(full(block_size=16, kernel_block_size=4, num_kv_heads=2), kv=kv)
    head, token = (32, 64) if kv == "content" else (16, 32)
    assert geometry(placed) == [
        ("k", 0, 1024, 256, (head, token, 2)),
        ("v", k_to_v, 1024, 256, (head, token, 2)),
    ]
    assert [part.extents for part in placed.components] == [(2, 4, 8), (2, 4, 8)]
    expected = {
        "content": ("float16", (20, 2, 4, 16), (256, 32, 64, 2), 0),
        "split": ("float16", (2, 20, 4, 2, 8), (128, 256, 32, 16, 2), 0),
    }
    assert shapes(placed) == [expected[kv]]


@pytest.mark.parametrize("layout", ["BLNHC", "BLHNC", "BHLNC"])
def test_kernel_blocks_in_a_row_are_their_own_axis_and_keep_pages_together(layout):
    spec = full(block_size=16, kernel_block_size=4, num_kv_heads=2)
    placed, nbytes = in_row({"a": spec, "b": spec}, layout)
    head, token = (32, 64) if layout == "BLNHC" else (128, 32)
    assert nbytes == 2 * 1024
    for name, offset in (("a", 0), ("b", 1024)):
        assert geometry(placed[name]) == [
            ("k", offset, 2048, 256, (head, token, 2)),
            ("v", offset + 16, 2048, 256, (head, token, 2)),
        ]
        assert shapes(placed[name]) == [("float16", (5, 4, 2, 4, 16), (2048, 256, head, token, 2), offset)]


def test_kernel_blocks_with_padding_behind_them_are_an_axis_of_their_own():
    spec = full(block_size=16, kernel_block_size=4, num_kv_heads=2, page_bytes=1100)
    assert shapes(alone(spec)) == [("float16", (5, 4, 2, 4, 16), (1100, 256, 32, 64, 2), 0)]


def test_states_are_contiguous_one_after_the_other_and_aligned():
    """The slot is larger than the 164 bytes of the three, as beside attention."""
    placed = alone(mamba(), column_bytes=1024, offset=2048)
    assert geometry(placed) == [
        ("conv_x", 2048, 1024, 0, (6, 2)),
        ("conv_B", 2048 + 36, 1024, 0, (6, 2)),
        ("ssm", 2048 + 68, 1024, 0, (24, 8, 4)),
    ]
    assert [(part.extents, part.shard_axis, part.token_axis) for part in placed.components] == [
        ((6, 3), 0, -1),
        ((5, 3), -1, -1),
        ((4, 3, 2), 0, -1),
    ]
    assert shapes(placed) == [
        ("float16", (5, 6, 3), (1024, 6, 2), 2048),
        ("float16", (5, 5, 3), (1024, 6, 2), 2048 + 36),
        ("float32", (5, 4, 3, 2), (1024, 24, 8, 4), 2048 + 68),
    ]


@pytest.mark.parametrize(
    ("rank", "held"), [(0, [(0, 2, 6), (0, 1, 1), (0, 2, 4)]), (2, [(4, 2, 6), (0, 1, 1), (3, 1, 4)])]
)
def test_a_rank_keeps_its_slice_of_each_state_that_is_divided(rank, held):
    placed = alone(mamba(), shard=Shard(tp_rank=rank, tp_size=3))
    assert [(part.held.first, part.held.count, part.held.total) for part in placed.components] == held
    assert [part.extents for part in placed.components] == [(2, 3), (5, 3), (held[2][1], 3, 2)]
    assert placed.components[2].offset == 44  # 12 + 30 bytes before it, and floats every 4


def test_a_state_may_be_divided_along_any_axis():
    states = (State("conv", (3, 6), "float16", shard_axis=1),)
    (part,) = alone(mamba(states=states), shard=Shard(tp_rank=1, tp_size=2)).components
    assert (part.extents, part.strides, part.shard_axis, part.first, part.total) == ((3, 3), (6, 2), 1, 3, 6)


def test_what_is_opaque_is_bytes_that_every_rank_holds():
    (part,) = (placed := alone(opaque(100), shard=Shard(tp_rank=1, tp_size=2))).components
    assert (part.role, part.extents, part.strides, part.shard_axis, part.token_axis) == ("page", (100,), (1,), -1, -1)
    assert shapes(placed) == [("uint8", (5, 100), (100, 1), 0)]


@looped("layout, strides", [("LBNHC", (64, 16, 2)), ("BLHNC", (64, 16, 2))])
@looped("kv", KV_FORMS)
def test_a_latent_is_viewed_as_block_token_content(layout, strides, kv):
    spec = MLA(block_size=4, head_size=8, dtype="bfloat16")
    placed = alone(spec, kv=kv) if layout == "LBNHC" else in_row({"a": spec}, layout, kv)[0]["a"]
    assert shapes(placed) == [("bfloat16", (5, 4, 8), strides, 0)]
    (part,) = placed.components
    assert (part.role, part.extents, part.strides[1:]) == ("latent", (1, 4, 8), (16, 2))
    assert (part.held.first, part.held.count, part.held.total) == (0, 1, 1)


def test_a_latent_with_its_position_and_scales_is_viewed_as_bytes():
    spec = MLA(
        block_size=8,
        kernel_block_size=4,
        head_size=16,
        dtype="uint8",
        rope_size=2,
        rope_dtype="bfloat16",
        scale_bytes=4,
    )
    placed = alone(spec)
    assert [(part.role, part.dtype, part.offset, part.extents, part.strides[1:]) for part in placed.components] == [
        ("latent", "uint8", 0, (1, 4, 16), (24, 1)),
        ("rope", "bfloat16", 16, (1, 4, 2), (24, 2)),
        ("scale", "uint8", 20, (1, 4, 4), (24, 1)),
    ]
    assert shapes(placed) == [("uint8", (10, 4, 24), (96, 24, 1), 0)]


QUANTIZED = {
    "fp8_per_token_head": (
        quantized("fp8_per_token_head", block_size=4, num_kv_heads=2, head_size=6),
        [("k", "float8_e4m3fn", 6, 0, 1), ("k_scale", "float32", 1, 8, 4)],
        12,
    ),
    "nvfp4": (
        quantized("nvfp4", block_size=4, num_kv_heads=2, head_size=32),
        [("k", "uint8", 16, 0, 1), ("k_scale", "float8_e4m3fn", 2, 16, 1)],
        18,
    ),
}
"""Spec; role, dtype, elements, offset in the cell and bytes of an element of each component; bytes of a cell."""


@looped("how", QUANTIZED)
@looped("kv", KV_FORMS)
def test_scales_lie_behind_their_elements_and_the_view_is_of_bytes(how, kv):
    spec, parts, cell = QUANTIZED[how]
    placed = alone(spec, "LBHNC", kv)
    apart, block, head, token = {  # in cells
        "content": (1, 16, 8, 2),
        "split": (5 * 8, 8, 4, 1),
        "block_split": (8, 16, 4, 1),
    }[kv]
    assert [
        (part.role, part.dtype, part.extents, part.offset, part.block_stride, part.strides)
        for part in placed.components
    ] == [
        (
            role.replace("k", plane, 1),
            dtype,
            (2, 4, count),
            start + inside,
            block * cell,
            (head * cell, token * cell, size),
        )
        for plane, start in (("k", 0), ("v", apart * cell))
        for role, dtype, count, inside, size in parts
    ]
    shape, strides = {
        "content": ((5, 2, 4, 2 * cell), (block, head, token)),
        "split": ((2, 5, 4, 2, cell), (apart, block, token, head)),
        "block_split": ((5, 2, 4, 2, cell), (block, apart, token, head)),
    }[kv]
    assert shapes(placed) == [("uint8", shape, (*(stride * cell for stride in strides), 1), 0)]


@pytest.mark.parametrize(("layout", "strides"), [("LBNHC", (24, 48)), ("LBHNC", (96, 24))])
def test_values_of_another_size_beside_keys_share_a_view(layout, strides):
    placed = alone(full(block_size=4, num_kv_heads=2, head_size_v=4), layout)
    assert geometry(placed) == [("k", 0, 192, 0, (*strides, 2)), ("v", 16, 192, 0, (*strides, 2))]
    assert [part.extents[2] for part in placed.components] == [8, 4]
    assert shapes(placed) == [("float16", (5, 2, 4, 12), (192, *strides, 2), 0)]


def test_values_of_another_size_apart_from_keys_are_a_view_of_their_own():
    spec = full(block_size=4, num_kv_heads=2, head_size_v=4)
    placed, nbytes = in_row({"a": spec, "b": spec}, "BLNHC", "split")
    assert nbytes == 2 * 192
    assert geometry(placed["b"]) == [("k", 192, 384, 0, (16, 32, 2)), ("v", 192 + 128, 384, 0, (8, 16, 2))]
    assert shapes(placed["b"]) == [
        ("float16", (5, 4, 2, 8), (384, 32, 16, 2), 192),
        ("float16", (5, 4, 2, 4), (384, 16, 8, 2), 320),
    ]


@pytest.mark.parametrize(("kv", "k_to_v", "k_to_v_in_row"), [("content", 16, 16), ("split", 128, 64)])
def test_padding_is_behind_each_page(kv, k_to_v, k_to_v_in_row):
    """Also where heads are outside of layers: a padded page is one piece."""
    spec = full(block_size=4, num_kv_heads=2, page_bytes=300)
    keys, values = alone(spec, kv=kv).components
    assert (keys.offset, keys.block_stride) == (0, 300)
    assert (values.offset, values.block_stride) == (k_to_v, 300)
    row, nbytes = in_row({"a": spec, "b": spec}, "BHLNC", kv)
    assert nbytes == 600
    assert [row[name].components[0].offset for name in "ab"] == [0, 300]
    assert row["b"].components[1].offset == 300 + k_to_v_in_row


def test_layers_of_other_shapes_lie_behind_each_other_in_a_row():
    """Attention, a state and a latent in one row: equal ones are interleaved, each band is aligned."""
    wide = full(block_size=4, num_kv_heads=2)
    specs = {"a": wide, "m": mamba(), "p": opaque(6), "b": wide, "n": mamba()}
    placed, nbytes = in_row(specs, "BHLNC")
    firsts = {name: min(part.offset for part in layer.components) for name, layer in placed.items()}
    assert firsts == {"a": 0, "b": 128, "m": 512, "n": 512 + 164, "p": 512 + 2 * 164}
    assert nbytes == 512 + 2 * 164 + 8  # as long as a multiple of the floats in it
    assert {part.block_stride for layer in placed.values() for part in layer.components} == {nbytes}
    assert placed["a"].components[0].strides == (256, 32, 2)  # heads before layers, within their band


@looped(
    "other, k_to_v",
    [
        (full(block_size=4, num_kv_heads=2), 640),
        (full(block_size=2, num_kv_heads=4), 640),  # other heads and tokens, but cut at the same place
        (full(block_size=4, num_kv_heads=2, head_size=4, head_size_v=12), 128),
        (mamba(page_bytes=256), 128),
        (full(block_size=4, num_kv_heads=2, head_size=4, page_bytes=256), 128),
    ],
)
def test_keys_of_all_blocks_come_first_only_if_all_layers_cut_alike(other, k_to_v):
    """Otherwise a block of one layer would lie on another block of the next."""
    pool = Pool(5, Shard(), "LBNHC", "split")
    keys, values = place_column({"a": SPEC, "b": other}, ["a", "b"], pool, 0, 256)["a"].components
    assert values.offset - keys.offset == k_to_v
    assert keys.block_stride == (128 if k_to_v == 640 else 256)
