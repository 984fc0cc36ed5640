"""What a config becomes here is what vLLM keeps for it: its own answers are in ``tests/data/vllm_specs.json``.

The file says of each config whether it is a published one or transformers' defaults, and ``tests/vllm/specs_oracle.py``
how vLLM was asked.
"""

import json
from pathlib import Path

import pytest

from kvflow.errors import SpecInvalid
from kvflow.layout.specs import MLA, Mamba
from kvflow.models import from_hf_config
from tests.helpers.loops import looped

TABLE = json.loads((Path(__file__).parents[3] / "data" / "vllm_specs.json").read_text())
KINDS = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "sliding",
    "ChunkedLocalAttentionSpec": "chunked",
    "MLAAttentionSpec": "mla",
    "SlidingWindowMLASpec": "mla",
    "MambaSpec": "mamba",
}

REFUSED = {
    "falcon_h1", "falcon_mamba", "hrm_text", "hy_v4", "jamba", "lfm2", "mamba", "mamba2", "minicpm3", "zamba2",
}  # fmt: skip
"""Families of the table that nobody has described: refused by name."""


def text_type(row):
    config = row["config"]
    return config.get("text_config", config).get("model_type", config.get("model_type"))


DESCRIBED = [row for row in TABLE["models"] if text_type(row) not in REFUSED]


def theirs(row):
    """Return what vLLM keeps: layer name -> its spec."""
    return {
        pattern.replace("N", str(index), 1): row["specs"][number]
        for pattern, numbers in row["layers"].items()
        for index, number in enumerate(numbers)
        if number is not None
    }


def of_vllm(spec):
    """Return what must be equal of a spec of vLLM's."""
    if spec["class"] == "MambaSpec":
        history, channels = spec["shapes"][0]
        return "mamba", history, channels, *map(tuple, spec["shapes"][1:])
    size = spec["head_size"]
    value = 0 if KINDS[spec["class"]] == "mla" else spec.get("head_size_v", 0)
    return KINDS[spec["class"]], spec["num_kv_heads"], size, value, spec.get("window", 0)


def of_kvflow(spec, tokens_per_state):
    """Return the same of one of ours; an entry that several tokens share is as many shares here."""
    match spec:
        case Mamba():
            *convolutions, state = spec.states
            (history,) = {part.shape[1] for part in convolutions}
            return "mamba", history, sum(part.shape[0] for part in convolutions), state.shape
        case MLA():
            return "mla", 1, (spec.head_size + spec.scale_bytes) * tokens_per_state, 0, spec.window
    return spec.kind, spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.window


@looped("row", DESCRIBED)
def test_every_layer_is_what_vllm_keeps(row):
    told = theirs(row)
    found = from_hf_config(row["config"], dtype=TABLE["dtype"])
    ours = {name: of_kvflow(spec, told.get(name, {}).get("tokens_per_state", 1)) for name, spec in found.items()}
    assert ours == {name: of_vllm(spec) for name, spec in told.items()}


@looped("family", sorted(REFUSED))
def test_what_is_not_known_is_refused_by_its_name(family):
    rows = [row for row in TABLE["models"] if text_type(row) == family]
    assert rows
    for row in rows:
        with pytest.raises(SpecInvalid, match=family):
            from_hf_config(row["config"])


def test_sixty_published_configs_are_compared():
    published = [row["model"] for row in DESCRIBED if row["origin"] == "published"]
    assert len(published) == len(set(published)) >= 65
