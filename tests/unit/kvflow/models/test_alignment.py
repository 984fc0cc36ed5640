"""What ``align_states`` leaves alone; ``tests/properties/test_configs.py`` says which pages it makes."""

import pytest

from kvflow.layout.shards import Shard
from kvflow.models import align_states, load


def test_all_ranks_of_an_engine_agree():
    specs = load("granite-4-hybrid")
    assert align_states(specs, shard=Shard(tp_rank=2, tp_size=3)) == align_states(specs, shard=Shard(tp_size=3))


@pytest.mark.parametrize("name", ["gpt-oss-20b", "deepseek-v3"])
def test_a_model_without_states_stays_as_it_is(name):
    assert align_states(load(name)) == load(name)


def test_states_alone_stay_as_they_are():
    states = {name: spec for name, spec in load("qwen3-next").items() if spec.kind == "mamba"}
    assert align_states(states) == states
