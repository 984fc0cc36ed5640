"""Caches as vLLM's GPU workers lay them out move between all of them, byte by byte: see ``gpu_caches.py``.

What is refused is refused for one of three reasons: states of recurrent layers, between engines of different numbers of
ranks; opaque pages, between engines whose pages differ; and caches of two formats.
"""

import json
import re

import pytest

from .engines import run_with_vllm
from .gpu_models import BACKENDS, MODELS, OPAQUE
from .pairs import FULL

SAMPLE = {
    "XiaomiMiMo/MiMo-V2-Flash": ("auto",),
    "deepseek-ai/DeepSeek-V3.2": ("auto", "fp8_ds_mla"),
    "meta-llama/Meta-Llama-3.1-8B": ("fp8_e4m3", "fp8_e5m2", "int4_per_token_head", "nvfp4"),
}
"""Of the usual run, to stay under a minute: layers with different numbers of heads, latents beside an indexer, and
formats whose elements are all of the same size."""

PAGE = r"\S+\.(components|cpu_\w+_\d+x\d+x\d+(nh|hn)\.shape\[0\]) differs: source has .* Opaque pages also need"
FORMAT = r"\S+ differs: source has .*, target has .*\[layout_mismatch\] Serve the same model with the same cache dtype"


def refusal(row):
    """Return what an error must say, as a pattern; empty if the bytes must move."""
    source, target = row["source"], row["target"]
    kept = target["format"]
    if source["format"] != kept:
        return FORMAT
    if kept in OPAQUE and (row["tp"][0] != row["tp"][1] or page_of(source) != page_of(target)):
        return PAGE
    return ""


def page_of(told):
    """Return what two pages must have in common whose contents are not known; one head has no order."""
    by_head = told["heads"] == 1 or told["layout"].index("H") < told["layout"].index("N")
    return told["backend"], told["heads"], told["blocks"], by_head


def run(module, *arguments):
    """Run a module in vLLM's environment; return its answers."""
    return [json.loads(line) for line in run_with_vllm("-m", module, *arguments).splitlines()]


@pytest.mark.proves("MLA, sparse indexers", "caches of fp8, NVFP4, int8, int4, with scales per head", engine="bytes")
@pytest.mark.parametrize("model", MODELS if FULL else SAMPLE)
def test_every_byte_is_where_the_gpu_backend_looks_for_it(model):
    ranks = (1, 2, 4, 8) if FULL else (1, 8)
    ways = BACKENDS[MODELS[model].kind]
    formats = tuple(ways) if FULL else SAMPLE[model]
    rows = run("tests.vllm.gpu_caches", model, "--tp", *map(str, ranks), "--formats", *formats)
    assert not [row for row in rows if "wrong" in row]
    with_next = sum(min(2, len(ways[kept])) * len(ways[kept]) for kept in formats)  # each with itself and the next one
    assert len(rows) == with_next * len(ranks) ** 2 + len(formats) * (len(formats) - 1)
    for row in rows:
        expected = refusal(row)
        if expected:
            assert re.match(f"LayoutMismatch: {expected}", row.get("refused", "")), row
        else:
            assert row.get("bytes", 0) > 0, row


@pytest.mark.proves("compressed caches (DeepSeek V4)", engine="bytes")
def test_compressed_caches_are_pulled_whole_and_scratch_is_not():
    (told,) = run("tests.vllm.pulled_pages")
    assert (told["wrong"], told["source"], told["transport"]) == (0, 0, "cma")
    assert told["changed"] > 0.99 * told["nbytes"]  # of noise, one byte in 256 is right by chance
    layers = [f"model.layers.{index}.attn" for index in range(4)]
    # Kind of a group, its blocks that are read, those of the 512 tokens. Layer 3's compressor is the scratch.
    assert told["groups"] == [
        ["mla", 2, 128, f"{layers[2]}.indexer.compressor.state_cache", f"{layers[2]}.compressor.state_cache"],
        ["opaque", 2, 2, f"{layers[2]}.indexer.k_cache", layers[2], layers[3]],
        *[["opaque", 2, 8, f"{layer}.swa_cache"] for layer in layers],
    ]
