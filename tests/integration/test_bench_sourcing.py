"""A source process that ends is an error that says so, whatever it had been asked."""

import asyncio
import sys

import msgspec
import pytest

from kvflow.errors import PeerLost
from kvflow.tools.bench.source import OfferBlocks, OpenCache, SourceProcess, SourceRequest
from kvflow.tools.doctor.probe import Geometry

GEOMETRY = Geometry(layers=1, num_kv_heads=1, head_size=32, num_blocks=16, layout="BLHNC", kv="content")


@pytest.mark.parametrize(
    "script",
    [
        "pass",
        "import sys; sys.stdin.readline()",
        "import sys; sys.stdin.readline(); print('{', end='')",
    ],
    ids=["before it was asked", "instead of answering", "in the middle of its answer"],
)
async def test_a_source_that_ends_is_named(script):
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdin=pipe, stdout=pipe)
    with pytest.raises(PeerLost, match="ended before it had answered CloseCaches") as caught:
        await SourceProcess(process.stdout, process.stdin).close_caches()
    assert caught.value.remedy == "Read what the source process itself has printed."
    await process.wait()


@pytest.mark.parametrize(
    "request_of_bounds",
    [
        OfferBlocks("a", [[0]], 1, 0),
        OfferBlocks("a", [[0]], 1, 1 << 40),
        OfferBlocks("a", [[1 << 31]], 1, 1),
        OfferBlocks("a", [[0]], -1, 1),
        OfferBlocks("", [[0]], 1, 1),
        OpenCache("a", msgspec.structs.replace(GEOMETRY, num_blocks=1 << 40)),
        OpenCache("a", msgspec.structs.replace(GEOMETRY, layers=0)),
    ],
    ids=str,
)
def test_numbers_that_no_benchmark_needs_are_refused(request_of_bounds):
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(request_of_bounds), type=SourceRequest)
