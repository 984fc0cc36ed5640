"""A worker that keeps the prompts of ``test_prefixes_found``, beside a thread that computes in Python, or alone."""

import threading
from contextlib import contextmanager

from kvflow.layout.specs import FullAttention
from kvflow.memory.cache import allocate
from kvflow.worker.threaded import run_worker
from tests.helpers.settings import flat_config
from tests.unit.kvflow.integrations.vllm_like import SECRET, new_contents, new_request

SIZE = 16
PROMPTS = (2_000, 32_000, 128_000)
"""Tokens of the prompts that are kept; each begins with the number of its tokens, so that no two share a block."""


def prompt(num_tokens):
    """Return the tokens of a prompt."""
    return range(num_tokens, 2 * num_tokens)


@contextmanager
def keeping_prompts(is_busy):
    """Open one."""
    spec = FullAttention(block_size=SIZE, num_kv_heads=1, head_size=8, dtype="float16")
    cache = allocate({"layers.0": spec}, num_blocks=1 + sum(PROMPTS) // SIZE, layout="BLHNC")
    config = flat_config(engine_id="decode-0", cluster_secret=SECRET, transport="tcp", bind="tcp://127.0.0.1:0")
    with run_worker(config, cache) as worker:
        first = 1
        for num_tokens in PROMPTS:
            blocks, request = range(num_tokens // SIZE), new_request(None, prompt(num_tokens))
            digests = new_contents().digests(request, (blocks,), (SIZE,), num_tokens)
            worker.keep(f"kept:{num_tokens}", [[first + block for block in blocks]], num_tokens, digests)
            first += len(blocks)
        if is_busy:
            threading.Thread(target=_compute, daemon=True).start()
        yield worker


def _compute():
    while True:
        sum(range(1000))
