"""The demo over engines that somebody else started, as in containers and on several machines."""

import re
from contextlib import AsyncExitStack

import pytest

from kvflow.tools.cli import main
from kvflow.tools.demo.results import Scenario
from kvflow.tools.demo.run import (
    EngineFailed,
    Engines,
    engine_environment,
    open_client,
    open_process,
    run_demo,
)

NOBODY = "127.0.0.1:9"
"""The discard service, which nobody runs."""


class Silent:
    """Progress that is not shown."""

    def __init__(self):
        self.stages, self.shown = [], []

    def begin(self, stage):
        self.stages.append(stage)

    def advance(self):
        pass

    def show(self, result):
        self.shown.append(result)


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.usefixtures("measured_processes")
@pytest.mark.timeout(300)  # three engines start one after the other, and every one imports torch
async def test_engines_that_run_already_serve_the_demo_and_go_on(tmp_path):
    environment, progress = engine_environment(), Silent()
    async with AsyncExitStack() as stack:
        engines = {
            role: await stack.enter_async_context(
                open_process(role, role, Scenario(name=role, layout="BLHNC", kv="content"), tmp_path, environment)
            )
            for role in ("prefill", "decode")
        }
        (result,) = await run_demo([b"one prompt", b"another one" * 40], tmp_path, progress, Engines(**engines))
        async with open_client() as client:
            for address in engines.values():
                await client.wait_until_healthy(address, 5.0)
    assert result.passed
    assert progress.shown == [result]
    assert len(result.reports) == 2
    assert progress.stages == ["monolithic", f"{engines['prefill']} to {engines['decode']}"]


async def test_an_engine_that_never_comes_is_named():
    async with open_client() as client:
        with pytest.raises(EngineFailed, match=f"{NOBODY} cannot be reached within 0 s: Cannot connect"):
            await client.wait_until_healthy(NOBODY, 0.3)


def test_one_engine_of_two_is_refused(capsys, tmp_path):
    assert main(["demo", "--prefill", NOBODY, "--out", str(tmp_path / "out")]) == 2
    assert "give both" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("address", ["prefill", "prefill:", ":8000", "prefill:http"])
def test_an_address_needs_host_and_port(address, capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--prefill", address, "--decode", NOBODY])
    assert re.search(r"--prefill: .*is not HOST:PORT", capsys.readouterr().err)


def test_engines_can_be_named_by_variables(monkeypatch, capsys):
    monkeypatch.setenv("KVFLOW_DEMO_DECODE", "decode")
    with pytest.raises(SystemExit):
        main(["demo"])
    assert "--decode: 'decode' is not HOST:PORT" in capsys.readouterr().err


def test_a_layout_is_told_where_it_is_known():
    assert Scenario(name="packed", layout="BHLNC", kv="content").title == "packed: BHLNC, kv=content"
    assert Scenario(name="a:1 to b:2").title == "a:1 to b:2"
