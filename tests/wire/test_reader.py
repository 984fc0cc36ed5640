"""A client that was written from docs/reference/wire.md alone reads from real producers, or says why it does not."""

import ast
import asyncio
import json
import os
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import kvflow
from tests.helpers.waiting import PATIENCE_S
from tests.integration.producing import SECRET, configured, producing
from tests.integration.shapes import Shape, whole, write
from tests.wire.vectors import MODELS

ROOT = Path(__file__).parents[2]
READER = ROOT / "docs" / "examples" / "reader" / "reader.py"

BLOCKS, TOKENS = [[3, 4, 9], [17, 2]], 11
ALLOWED = {"msgpack", "numpy", "zmq"} | sys.stdlib_module_names
OVER_TCP = {"transport": "tcp"}


class Reading:
    """One process of the client."""

    def __init__(self, process, out):
        self._process = process
        self._out = out

    async def say(self, line=""):
        """Write one line to it."""
        self._process.stdin.write(f"{line}\n".encode())
        await self._process.stdin.drain()

    async def line(self):
        """Return the next thing that it says."""
        return json.loads(await self._process.stdout.readline())

    async def end(self):
        """Return the last thing that it says."""
        said, complaints = await self._process.communicate()
        assert complaints == b""
        return json.loads(said.splitlines()[-1])

    def found(self):
        """Return what it has written."""
        with np.load(self._out) as arrays:
            return dict(arrays)

    def wrong(self, cache):
        """Name what it should have found in a cache, by layer and role, and has not; it has nothing else."""
        expected, found = held_by(cache), self.found()
        assert found.keys() == expected.keys()
        return [name for name in found if not np.array_equal(found[name], expected[name])]


@asynccontextmanager
async def reading(folder, *arguments, params=None, secret=SECRET):
    """Run the client; give it parameters."""
    out = folder / "read.npz"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, READER, *arguments, "--out", out),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"KVFLOW_CLUSTER_SECRET": secret},
    )
    reader = Reading(process, out)
    try:
        if params is not None:
            await reader.say(json.dumps(params))
        async with asyncio.timeout(PATIENCE_S):
            yield reader
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def held_by(cache):
    """Return what the reader should have found in a cache, by layer and role."""
    return {
        f"{layer}.{role}": np.ascontiguousarray(cache.component(layer, role)[ids].view(torch.uint8).numpy())
        for group, ids in zip(cache.groups, BLOCKS, strict=True)
        for layer in group.layers
        for role in "kv"
    }


def test_the_client_imports_nothing_of_kvflow_and_is_short():
    text = READER.read_text()
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= ALLOWED
    assert text.count("\n") <= 430


@pytest.mark.processes
@pytest.mark.parametrize(
    ("layout", "kv"), [("BLHNC", "content"), ("LBNHC", "content"), ("LBHNC", "split"), ("BHLNC", "content")]
)
async def test_it_reads_any_layout(layout, kv, tmp_path):
    async with producing(Shape(layout=layout, kv=kv), **OVER_TCP) as producer:
        params = await producer.offer("request", BLOCKS, TOKENS)
        async with reading(tmp_path, "read", params=params) as reader:
            said = [await reader.line() for _ in range(3)]
            assert said[0]["met"] == "prefill-0"
            assert said[1:] == [{"asked": TOKENS, "sealed": True, "ended": ""}, {"released": "request"}]
            assert "read" in await reader.end()
        assert await producer.outcome("request") == "released"
        assert reader.wrong(producer.cache) == []


def of_blocks(cache, group, layer, part, ids):
    """Return what an engine sees of a component in some blocks: kernel blocks one after the other along the tokens."""
    view, kernel_blocks = cache.component(layer, part.role), group.kernel_blocks
    apart = view.dim() > len(part.extents) + 1  # kernel blocks are an axis, or count as blocks
    found = [
        [view[block, each] if apart else view[block * kernel_blocks + each] for each in range(kernel_blocks)]
        for block in ids
    ]
    whole = torch.stack([torch.cat(each, dim=max(0, part.token_axis)) for each in found])
    return whole.contiguous().view(torch.uint8).numpy()


@pytest.mark.processes
@pytest.mark.parametrize("model", [model for model in MODELS if "tokens of rank" not in model])
async def test_it_reads_each_model_of_the_vectors(model, tmp_path):
    cache = kvflow.allocate(num_blocks=6, **MODELS[model])
    cache.backing.view(torch.uint8).random_(generator=torch.Generator().manual_seed(7))
    manifest, num_tokens, free = cache.manifest(), cache.groups[0].block_size + 3, iter(range(1, 6))
    counts = [1 if group.kind == "mamba" else kvflow.window_blocks(group, num_tokens) for group in cache.groups]
    block_ids = [[next(free) for _ in range(count)] for count in counts]
    async with kvflow.open_worker(configured("prefill-0", **OVER_TCP), cache) as worker:
        params = worker.offer("request", block_ids, num_tokens).to_params()
        async with reading(tmp_path, "read", params=params) as reader:
            assert "read" in await reader.end()
    found = reader.found()
    for group, ids in zip(manifest.groups, block_ids, strict=True):
        for layer, part in group.components:
            expected = of_blocks(cache, group, layer, part, ids)
            assert np.array_equal(found.pop(f"{layer}.{part.role}"), expected), (layer, part.role)
    assert not found


@pytest.mark.processes
async def test_it_joins_the_heads_of_two_ranks_of_unequal_layouts(tmp_path):
    undivided = Shape().build()
    write(undivided, "request", BLOCKS, TOKENS)
    async with AsyncExitStack() as stack:
        tickets = []
        for rank, layout in enumerate(("BLHNC", "LBNHC")):
            shape = Shape(layout=layout, tp_rank=rank, tp_size=2)
            of_rank = {"rank": rank, "num_ranks": 2, **OVER_TCP}
            producer = await stack.enter_async_context(producing(shape, **of_rank))
            tickets.append(kvflow.Ticket.from_params(await producer.offer("request", BLOCKS, TOKENS)))
        params = kvflow.join_tickets(tickets).to_params()
        async with reading(tmp_path, "read", params=params) as reader:
            assert "read" in await reader.end()
        assert reader.wrong(undivided) == []


@pytest.mark.processes
async def test_it_waits_until_the_lease_is_admitted(tmp_path):
    async with producing(Shape(), **OVER_TCP) as producer:
        mint = kvflow.TicketMint(
            engine_id="prefill-0", ranks=[producer.worker.rank_address], cluster_secret=SECRET, lease_s=PATIENCE_S
        )
        block_ids = whole(producer.cache, BLOCKS, TOKENS)
        ticket, grant = mint.offer("request", block_ids=block_ids, num_tokens=TOKENS)
        async with reading(tmp_path, "read", params=ticket.to_params()) as reader:
            assert "met" in await reader.line()
            assert await reader.line() == {"asked": 0, "sealed": False, "ended": ""}
            write(producer.cache, "request", BLOCKS, TOKENS)
            producer.worker.admit(grant)
            assert "read" in await reader.end()
        assert reader.wrong(producer.cache) == []


@pytest.mark.processes
async def test_a_lease_that_ends_under_it_is_stale(tmp_path):
    async with producing(Shape(), **OVER_TCP) as producer:
        params = await producer.offer("request", BLOCKS, TOKENS)
        async with reading(tmp_path, "read", "--step", params=params) as reader:
            assert [next(iter(await reader.line())) for _ in range(3)] == ["met", "asked", "step"]
            assert await producer.recycle("request")
            await reader.say()
            assert (await reader.end())["error"] == "stale_lease"
        assert not reader._out.exists()


@pytest.mark.processes
async def test_a_ticket_whose_lease_has_ended_is_stale(tmp_path):
    async with producing(Shape(), **OVER_TCP) as producer:
        params = await producer.offer("request", BLOCKS, TOKENS)
        await producer.revoke("request")
        async with reading(tmp_path, "read", params=params) as reader:
            await reader.line()
            assert (await reader.line())["ended"] == "revoked"
            assert (await reader.end())["error"] == "stale_lease"


@pytest.mark.processes
async def test_a_wrong_secret_is_found_in_the_ticket_and_by_the_producer(tmp_path):
    async with producing(Shape(), **OVER_TCP) as producer:
        params = await producer.offer("request", BLOCKS, TOKENS)
        async with reading(tmp_path, "read", params=params, secret="another secret, as long") as reader:
            assert (await reader.end())["error"] == "ticket_invalid"
        asked = "find", producer.endpoint, "00" * 16
        async with reading(tmp_path, *asked, secret="another secret, as long") as reader:
            assert (await reader.end())["error"] == "authentication_failed"


@pytest.mark.processes
async def test_an_unknown_version_is_refused_on_either_side(tmp_path):
    async with producing(Shape(), **OVER_TCP) as producer:
        params = await producer.offer("request", BLOCKS, TOKENS)
        async with reading(tmp_path, "read", "--version", "3", params=params) as reader:
            assert (await reader.end())["error"] == "version_unsupported"
        newer = {"kvflow": params["kvflow"].replace("kvf3", "kvf4", 1)}
        async with reading(tmp_path, "read", params=newer) as reader:
            assert (await reader.end())["error"] == "release_mismatch"


@pytest.mark.processes
async def test_it_finds_and_reads_what_is_kept(tmp_path):
    digests = [bytes([number]) * 16 for number in range(3)]
    async with producing(Shape(), **OVER_TCP) as producer:
        write(producer.cache, "request", BLOCKS, 12)
        producer.worker.keep("request", BLOCKS, 12, digests=[digests, digests[1:]])
        asked = [each.hex() for each in (*digests, b"unknown")]
        async with reading(tmp_path, "find", producer.endpoint, *asked) as reader:
            held = await reader.end()
        assert held["count"] == 3
        async with reading(tmp_path, "read", params=held) as reader:
            assert "read" in await reader.end()
        assert reader.wrong(producer.cache) == []
