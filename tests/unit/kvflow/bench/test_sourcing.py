"""A source process that ends is an error that says so, whatever it had been asked."""

import asyncio
import sys

import pytest

from kvflow.bench.sourcing import SourceProcess
from kvflow.errors import PeerLost


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
