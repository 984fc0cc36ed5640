# ruff: noqa: T201 - a script prints its answer
"""Pull DeepSeek-V4's caches, as vLLM specifies, groups and allocates them, between two workers over NIXL.

The blocks are those that the connector offers and loads: of windows only the last. One group is marked as not
transferred, as vLLM marks scratch. Afterwards the whole memory of the target is compared with what vLLM's layers would
have written into the blocks of the request; the source must be as it was. Prints one line of JSON.
"""

import asyncio
import json
import tempfile
from pathlib import Path

import numpy as np

import kvflow
from kvflow.integrations.vllm.blocks import loaded_blocks, offered_blocks
from tests.vllm import specs_oracle
from tests.vllm.gpu_caches import Engine, Side, heads_of
from tests.vllm.gpu_models import BACKENDS

MODEL = "deepseek-ai/DeepSeek-V4-Flash"
SECRET = "a secret of the tests, long enough"
SCRATCH = "model.layers.3.attn.compressor.state_cache"  # alone in its group


def open_worker(engine_id, rank):
    config = kvflow.WorkerConfig(
        engine_id=engine_id, rank=0, num_ranks=1, bind="tcp://127.0.0.1:0", cluster_secret=SECRET, transport="nixl"
    )
    return kvflow.open_worker(config, rank.cache)


def needed(rank, num_tokens):
    """Return the blocks of a request that the connector offers, and loads into."""
    offered = offered_blocks(rank.transferred, rank.listed, num_tokens)
    loaded = loaded_blocks(rank.transferred, rank.listed, end=num_tokens, num_tokens=num_tokens)
    assert offered == loaded
    return offered


async def pulled(source, target, num_tokens):
    """Pull a request from one rank into another, and return the report."""
    async with open_worker("prefill", source) as producer, open_worker("decode", target) as consumer:
        ticket = producer.offer("request", block_ids=needed(source, num_tokens), num_tokens=num_tokens)
        return await consumer.pull(ticket, block_ids=needed(target, num_tokens))


def main():
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(specs_oracle.Oracle(Path(folder)), MODEL, 1, BACKENDS["compressed"]["fp8_ds_mla"][0])
        engine.scratch = frozenset([SCRATCH])
        num_tokens = engine.num_tokens
        # Both sides are of one engine: vLLM's layers are the same in a second one.
        (source,), (target,) = (Side(engine, num_tokens, heads_of(engine), seed).ranks for seed in (1, 2))
        source.write()
        before, noise = source.memory.copy(), target.memory.copy()
        target.write()
        expected, rows = target.memory.copy(), (target.cache.num_blocks, -1)
        moved = np.zeros(rows[0], bool)
        moved[np.concatenate(needed(target, num_tokens))] = True
        expected.reshape(rows)[~moved] = noise.reshape(rows)[~moved]
        target.memory[:] = noise
        report = asyncio.run(pulled(source, target, num_tokens))
    lists = zip(target.cache.groups, needed(target, num_tokens), target.block_ids, strict=True)
    answer = {
        "groups": sorted([group.kind, len(some), len(all_ids), *group.layers] for group, some, all_ids in lists),
        "transport": report.transport,
        "nbytes": report.nbytes,
        "changed": int((expected != noise).sum()),
        "wrong": int((target.memory != expected).sum()),
        "source": int((source.memory != before).sum()),
    }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
