# ruff: noqa: T201 - a benchmark prints its tables
"""Pipeline stages, and states that ranks divide: how long other numbers of ranks take than equal ones.

    python -m tests.benchmarks.ranks [--rounds 20] [--transport nixl] [--only stages states]

A source process has all prefill engines, a worker for each rank, and this process all decode engines. A round reads
each pair once, in rotated order; the ratios are of one round. Every byte is compared in the first.
"""

import argparse
import asyncio
import json
import os
import secrets
import statistics
import sys
import time
import zlib
from contextlib import AsyncExitStack

import numpy as np
import torch

import kvflow
from kvflow.config import SECRET_VARIABLE

LAYERS, BLOCK_TOKENS, PROMPT_BLOCKS = 16, 16, 512
"""A prompt of 8,192 tokens."""
POOL_BLOCKS = 2 * PROMPT_BLOCKS
STATE_BLOCKS = 4

ATTENTION = kvflow.FullAttention(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=128, dtype="float16")
"""128 MiB for the prompt."""

STATES = (
    kvflow.State("conv_x", (8192, 3), "float16", shard_axis=0),
    kvflow.State("conv_B", (128, 3), "float16", shard_axis=None),
    kvflow.State("conv_C", (128, 3), "float16", shard_axis=None),
    kvflow.State("ssm", (128, 64, 128), "float32", shard_axis=0),
)
"""Of granite 4: 4 MiB for each layer."""
RECURRENT = kvflow.Mamba(block_size=1024, states=STATES)

PAIRS = [(1, 1), (2, 1), (1, 2), (2, 2)]
KINDS = {
    "stages LBHNC": ("stages", "LBHNC", {(2, 1): (1, 1), (1, 2): (1, 1)}, 1.1),
    "stages BLHNC": ("stages", "BLHNC", {(2, 1): (1, 1), (1, 2): (1, 1)}, 1.1),
    "states": ("states", "LBHNC", {(2, 1): (1, 1), (1, 2): (2, 2)}, 1.2),
}
"""What ranks divide, the layout, each pair of numbers with the equal one that moves the same bytes, and the goal."""


def caches_of(kind, ranks):
    """Allocate the cache of each rank of an engine."""
    divided, layout, *_ = KINDS[kind]
    names = [f"layers.{layer}" for layer in range(LAYERS)]
    if divided == "states":
        specs, blocks = dict.fromkeys(names, RECURRENT), STATE_BLOCKS
        shards = [(specs, kvflow.Shard(tp_rank=rank, tp_size=ranks)) for rank in range(ranks)]
    else:
        blocks, share = POOL_BLOCKS, LAYERS // ranks
        shards = [(dict.fromkeys(names[at : at + share], ATTENTION), None) for at in range(0, LAYERS, share)]
    return [kvflow.allocate(specs, num_blocks=blocks, layout=layout, shard=shard) for specs, shard in shards]


def parts_of(cache):
    """Yield each component of a cache, and what a request's first block holds there; every next one has one more."""
    for layer in (name for group in cache.groups for name in group.layers):
        states = STATES if isinstance(cache.views[layer], list) else ()
        for role in [state.name for state in states] or ["k", "v"]:
            part = cache.component(layer, role)
            first = cache.held(layer, role)[0]
            row = (torch.arange(part.shape[1]) + first) * 7 + zlib.crc32(f"{layer}.{role}".encode()) % 997
            yield part, row.view(-1, *[1] * (part.dim() - 2))


def write(cache, ids):
    for part, row in parts_of(cache):
        for at, block in enumerate(ids):
            part[block] = ((row + at) % 1024).to(part.dtype)


def check(cache, ids):
    for part, row in parts_of(cache):
        for at, block in enumerate(ids):
            assert bool((part[block] == ((row + at) % 1024)).all()), "wrong bytes"


def ids_of(kind, seed):
    """Return the blocks of a prompt, scattered over the pool; or the block of a state."""
    if KINDS[kind][0] == "states":
        return [seed % STATE_BLOCKS]
    return np.random.default_rng(seed).permutation(POOL_BLOCKS)[:PROMPT_BLOCKS].tolist()


async def open_engine(stack, name, kind, ranks, transport):
    """Open a worker for each rank."""
    found = []
    for rank, cache in enumerate(caches_of(kind, ranks)):
        config = kvflow.WorkerConfig(engine_id=name, rank=rank, num_ranks=ranks, transport=transport)
        found.append((await stack.enter_async_context(kvflow.open_worker(config, cache)), cache))
    return found


async def source(kinds, transport):
    """Offer what each line of the standard input asks for."""
    async with AsyncExitStack() as stack:
        engines = {}
        for kind in kinds:
            for ranks in (1, 2):
                engine = await open_engine(stack, f"{kind} {ranks}", kind, ranks, transport)
                for _, cache in engine:
                    write(cache, ids_of(kind, 1))
                engines[kind, ranks] = engine
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        print("ready", flush=True)
        while line := await reader.readline():
            kind, ranks, name = json.loads(line)
            ids = ids_of(kind, 1)
            offers = [worker.offer(name, [ids], len(ids) * BLOCK_TOKENS) for worker, _ in engines[kind, ranks]]
            print(json.dumps(kvflow.join_tickets(offers).to_params()), flush=True)


async def measure(process, kind, sources, target, name):
    """Read a prompt into all ranks of an engine at once; return the seconds, and the descriptors together."""
    process.stdin.write(json.dumps([kind, sources, name]).encode() + b"\n")
    ticket = kvflow.Ticket.from_params(json.loads(await process.stdout.readline()))
    ids = ids_of(kind, 2)
    started = time.perf_counter()
    reports = await asyncio.gather(*(worker.pull(ticket, [ids]) for worker, _ in target))
    return time.perf_counter() - started, sum(report.descriptors for report in reports)


async def main(rounds, transport, kinds):
    """Print a table for each kind."""
    os.environ.setdefault(SECRET_VARIABLE, secrets.token_hex(32))
    command = [sys.executable, "-m", "tests.benchmarks.ranks", "--source", "--transport", transport, "--only", *kinds]
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*command, **pipes)
    await process.stdout.readline()
    for kind in kinds:
        async with AsyncExitStack() as stack:
            targets = {ranks: await open_engine(stack, "target", kind, ranks, transport) for ranks in (1, 2)}
            await compare(process, kind, targets, rounds)
    process.stdin.close()
    await process.wait()


async def compare(process, kind, targets, rounds):
    """Measure one kind, and print its table."""
    _, _, equals, goal = KINDS[kind]
    found = {pair: [] for pair in PAIRS}
    descriptors = {}
    for turn in range(rounds + 2):
        for pair in (*PAIRS[turn % 4 :], *PAIRS[: turn % 4]):
            seconds, descriptors[pair] = await measure(
                process, kind, pair[0], targets[pair[1]], f"{kind} {pair} {turn}"
            )
            if not turn:
                for _, cache in targets[pair[1]]:
                    check(cache, ids_of(kind, 2))
                    cache.backing.zero_()
            if turn > 1:
                found[pair].append(seconds)
    print(f"{kind}: {rounds} rounds; ratios to the pair of equal numbers, median (p10 to p90), goal {goal}")
    for pair, seconds in found.items():
        line = (
            f"  {pair[0]} -> {pair[1]}  {statistics.median(seconds) * 1e3:7.2f} ms {descriptors[pair]:6d} descriptors"
        )
        if pair in equals:
            ratios = np.array(seconds) / np.array(found[equals[pair]])
            low, middle, high = np.percentile(ratios, [10, 50, 90])
            line += f"  {middle:.2f} of {equals[pair][0]} -> {equals[pair][1]} ({low:.2f} to {high:.2f})"
        print(line, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--only", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--source", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(
        source(given.only, given.transport) if given.source else main(given.rounds, given.transport, given.only)
    )
