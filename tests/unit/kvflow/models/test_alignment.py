"""States and attention get pages of one size, with little padding."""

import pytest

from kvflow.layout.placement import content_bytes, page_bytes
from kvflow.layout.shards import Shard
from kvflow.models import align_states, load


def pages(specs, shard):
    return {page_bytes(spec, shard) for spec in specs.values()}


@pytest.mark.parametrize("name", ["granite-4-hybrid", "qwen3-next"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_pages_become_equal_and_hold_the_states(name, tp_size):
    shard = Shard(tp_size=tp_size)
    specs = load(name)
    aligned = align_states(specs, shard=shard)
    [page] = pages(aligned, shard)
    state = max(content_bytes(spec, shard) for spec in specs.values())
    token = next(page_bytes(spec, shard) // 16 for spec in specs.values() if spec.kind == "full")
    assert state <= page < state + 16 * token
    assert list(aligned) == list(specs)


def test_blocks_grow_to_the_smallest_multiple_that_holds_a_state():
    sizes = {tp_size: align_states(load("qwen3-next"), shard=Shard(tp_size=tp_size)) for tp_size in (1, 2, 4)}
    # 2,146,304 bytes of state over 2,048 bytes of a token; with 4 ranks there are fewer KV heads than ranks.
    assert {tp: {spec.block_size for spec in specs.values()} for tp, specs in sizes.items()} == {
        1: {1056},
        2: {1056},
        4: {528},
    }


def test_all_ranks_of_an_engine_agree():
    specs = load("granite-4-hybrid")
    assert align_states(specs, shard=Shard(tp_rank=2, tp_size=3)) == align_states(specs, shard=Shard(tp_size=3))


@pytest.mark.parametrize("name", ["gpt-oss-20b", "deepseek-v3"])
def test_a_model_without_states_stays_as_it_is(name):
    assert align_states(load(name)) == load(name)


def test_states_alone_stay_as_they_are():
    states = {name: spec for name, spec in load("qwen3-next").items() if spec.kind == "mamba"}
    assert align_states(states) == states
