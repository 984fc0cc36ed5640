"""What lies in one page: which components stay together, where they are aligned to, how many bytes they are."""

import pytest

from kvflow.errors import SpecInvalid
from kvflow.layout.placement import content_bytes, item_alignment, page_bytes, side_by_side
from kvflow.layout.shards import Shard
from kvflow.layout.specs import MLA
from tests.helpers.loops import looped

from .helpers import full, mamba, opaque, quantized

TP2 = Shard(tp_rank=1, tp_size=2)


@looped(
    "sizes, expected",
    [
        ([(16, 2)], ([0], 16)),
        ([(6, 1), (4, 4)], ([0, 8], 12)),
        ([(4, 4), (6, 1)], ([0, 4], 12)),  # padded, so that the next one's floats are aligned
        ([(3, 1), (2, 2), (1, 1)], ([0, 4, 6], 8)),
        ([(3, 1), (5, 1)], ([0, 3], 8)),
    ],
)
def test_pieces_lie_side_by_side_each_aligned(sizes, expected):
    assert side_by_side(sizes) == expected


@looped(
    "spec, shard, nbytes, alignment",
    [
        (full(block_size=4, num_kv_heads=4), Shard(), 4 * 4 * 32, 2),
        (full(block_size=4, num_kv_heads=4), TP2, 4 * 2 * 32, 2),
        (full(block_size=8, num_kv_heads=4, kernel_block_size=4), Shard(), 8 * 4 * 32, 2),
        (full(block_size=4, num_kv_heads=4, page_bytes=600), Shard(), 600, 2),
        (full(block_size=4, num_kv_heads=4, head_size_v=4), Shard(), 4 * 4 * 24, 2),
        (quantized("fp8_per_token_head", head_size=6, block_size=4, num_kv_heads=4), Shard(), 4 * 4 * 24, 4),
        (quantized("nvfp4", head_size=32, block_size=4, num_kv_heads=4), TP2, 4 * 2 * 36, 1),
        (MLA(block_size=4, head_size=8, dtype="bfloat16"), TP2, 64, 2),
        (mamba(), Shard(), 68 + 96, 4),
        (mamba(), TP2, 48 + 48, 4),
        (opaque(100), TP2, 100, 1),
    ],
)
def test_page_bytes(spec, shard, nbytes, alignment):
    assert (page_bytes(spec, shard), item_alignment(spec)) == (nbytes, alignment)


def test_a_page_is_padded_to_what_the_spec_says_and_no_less():
    padded = full(block_size=4, num_kv_heads=2, page_bytes=300)
    assert (page_bytes(padded), content_bytes(padded, Shard())) == (300, 256)
    assert page_bytes(full(block_size=4, num_kv_heads=2, page_bytes=256)) == 256
    with pytest.raises(SpecInvalid, match="page_bytes is 255, but a page of tp_rank 0 of 1 holds 256 bytes"):
        page_bytes(full(block_size=4, num_kv_heads=2, page_bytes=255))
    assert page_bytes(full(block_size=4, num_kv_heads=2, page_bytes=255), TP2) == 255
