"""docs/howto/deploy.md: a worker with the settings of the page can be reached at the address that it advertises."""

import asyncio

import pytest

import kvflow
from tests.ports import free_port

from .pages import blocks

PAGE = "docs/howto/deploy.md"
ADDRESS = "10.0.0.11"
"""The address of the prefill host; here it is one of this host."""


@pytest.mark.nixl
@pytest.mark.processes
async def test_a_worker_with_the_settings_of_the_page_is_reachable(tmp_path):
    [program], [output] = (blocks(PAGE, language) for language in ("python", "text"))
    [command] = [block for block in blocks(PAGE, "sh") if block.startswith("timeout")]
    for written, meant in {ADDRESS: "127.0.0.1", "7100": str(free_port()), "7101": str(free_port())}.items():
        assert written in program
        program, command = program.replace(written, meant), command.replace(written, meant)
    names = {}
    exec(program, names)
    spec = kvflow.FullAttention(block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16")
    cache = kvflow.allocate({"layers.0": spec}, num_blocks=8)
    async with kvflow.open_worker(names["config"], cache) as worker:
        assert worker.rank_address.endpoint == names["config"].advertise
        assert await printed(command) == output
    assert await printed(command) == ""


async def printed(command):
    """Run a command of the page in a shell."""
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    out, _ = await process.communicate()
    return out.decode()
