"""Strides of every layout against a table written by hand.

Five blocks of four tokens, two heads, three layers; one head of one token has 16 bytes of K and 16 of V.
"""

import pytest

from kvflow.errors import SpecInvalid
from kvflow.layout.pages import page_bytes
from kvflow.layout.placement import AXIS_ORDERS, KV_FORMS, LAYOUTS, Pool, axes_of, place_alone, place_row, row_bytes
from kvflow.layout.shards import Shard

from .helpers import full

SPEC = full(block_size=4, num_kv_heads=2, head_size=8, dtype="float16")

# fmt: off
STRIDES = {  # layer, block, head, token, from K to V
    ("LBNHC", "content"): (1280, 256,  32, 64,  16),
    ("LBHNC", "content"): (1280, 256, 128, 32,  16),
    ("BLNHC", "content"): ( 256, 768,  32, 64,  16),
    ("BLHNC", "content"): ( 256, 768, 128, 32,  16),
    ("BHLNC", "content"): ( 128, 768, 384, 32,  16),
    ("LBNHC", "split"):   (1280, 128,  16, 32, 640),
    ("LBHNC", "split"):   (1280, 128,  64, 16, 640),
    ("BLNHC", "split"):   ( 256, 768,  16, 32, 128),
    ("BLHNC", "split"):   ( 256, 768,  64, 16, 128),
    ("BHLNC", "split"):   ( 128, 768, 384, 16,  64),
}
# fmt: on


def placed(layout, kv, shard=None):
    """Place three layers as one group: in rows, or each in a tensor behind the one before it."""
    shard = shard or Shard()
    pool, names = Pool(5, shard, axes_of(layout, kv)), ("a", "b", "c")
    if pool.packed:
        specs = dict.fromkeys(names, SPEC)
        return list(place_row(specs, names, pool, row_bytes(specs, names, pool)).values())
    page = page_bytes(SPEC, shard)
    return [place_alone(SPEC, pool, position * 5 * page, page) for position in range(3)]


def test_the_table_is_complete():
    assert STRIDES.keys() == AXIS_ORDERS.keys() == {(layout, kv) for layout in LAYOUTS for kv in KV_FORMS}


@pytest.mark.parametrize(("layout", "kv"), STRIDES)
def test_strides(layout, kv):
    layer, block, head, token, k_to_v = STRIDES[layout, kv]
    for position, place in enumerate(placed(layout, kv)):
        keys, values = place.components
        for part in (keys, values):
            assert (part.block_stride, part.strides) == (block, (head, token, 2))
            assert (part.extents, part.kernel_stride) == ((2, 4, 8), 0)
        assert (keys.role, keys.offset) == ("k", position * layer)
        assert (values.role, values.offset) == ("v", position * layer + k_to_v)


@pytest.mark.parametrize(("layout", "kv"), STRIDES)
def test_components_end_within_the_allocation_and_the_last_one_at_its_end(layout, kv):
    ends = [part.end(5) for place in placed(layout, kv) for part in place.components]
    assert max(ends) == 5 * 3 * page_bytes(SPEC)


def test_a_shard_keeps_its_heads_only():
    shard = Shard(tp_rank=1, tp_size=2)
    keys, values = placed("BLHNC", "content", shard)[0].components
    assert (keys.first, keys.held.count, keys.total, keys.extents) == (1, 1, 2, (1, 4, 8))
    assert (keys.block_stride, values.offset) == (384, 16)
    assert page_bytes(SPEC, shard) == 128


def test_page_bytes_are_those_of_the_whole_model_without_a_shard():
    assert page_bytes(SPEC) == 256


@pytest.mark.parametrize(
    ("layout", "kv"), [("LBCHN", "content"), ("LBNHC", "both"), ("", "split"), ("auto", "content")]
)
def test_an_unknown_layout_is_refused_with_the_known_ones(layout, kv):
    with pytest.raises(SpecInvalid, match="BHLNC") as caught:
        axes_of(layout, kv)
    assert repr(layout) in caught.value.message
