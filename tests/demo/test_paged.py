"""The adapter between model and views: what is written is where the canonical view says, in every layout."""

import pytest
import torch

import kvflow
from kvflow.tools.demo.model import PagedKV

LAYOUTS = [("LBNHC", "split"), ("LBNHC", "content"), ("LBHNC", "content"), ("BLHNC", "content"), ("BHLNC", "content")]
COMMON = {"block_size": 4, "num_kv_heads": 2, "head_size": 8, "dtype": "bfloat16"}
SPECS = {"full": kvflow.FullAttention(**COMMON), "sliding": kvflow.SlidingWindow(**COMMON, window=6)}


@pytest.fixture(params=LAYOUTS, ids="-".join)
def cache(request):
    layout, kv = request.param
    return kvflow.allocate(SPECS, num_blocks=8, layout=layout, kv=kv)


def random_tokens(count):
    """Keys and values that bfloat16 holds exactly."""
    values = torch.randint(-128, 128, (2, count, 2, 8), generator=torch.Generator().manual_seed(count))
    return values.to(torch.float32)


@pytest.mark.parametrize("layer", SPECS)
def test_written_tokens_are_in_their_blocks(cache, layer):
    k, v = random_tokens(7)
    PagedKV(cache.views[layer], 8).write(torch.tensor([5, 2, 6]), 3, k, v)
    for role, written in (("k", k), ("v", v)):
        pages = cache.component(layer, role)
        assert pages[5, :, 3].equal(written[0].bfloat16())
        assert pages[2].equal(written[1:5].transpose(0, 1).bfloat16())
        assert pages[6, :, :2].equal(written[5:].transpose(0, 1).bfloat16())
        assert pages.count_nonzero() == written.count_nonzero()


def test_gathered_tokens_are_what_was_written(cache):
    pages = PagedKV(cache.views["full"], 8)
    k, v = random_tokens(12)
    pages.write(torch.tensor([7, 0, 3]), 0, k, v)
    gathered_k, gathered_v = pages.gather(torch.tensor([0, 3]))
    assert gathered_k.equal(k[4:].transpose(0, 1))
    assert gathered_v.equal(v[4:].transpose(0, 1))
    assert gathered_k.is_contiguous()


def test_layers_do_not_share_blocks(cache):
    k, v = random_tokens(4)
    full, sliding = (PagedKV(cache.views[layer], 8) for layer in SPECS)
    full.write(torch.tensor([1]), 0, k, v)
    sliding.write(torch.tensor([2]), 0, v, k)
    assert full.gather(torch.tensor([1]))[0].equal(k.transpose(0, 1))
    assert sliding.gather(torch.tensor([2]))[0].equal(v.transpose(0, 1))
