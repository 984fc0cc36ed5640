"""The demo from start to end: one process alone, then two that share the work, once per layout."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from kvflow.observability.logs import record_logger
from kvflow.tools.demo.processes import EngineCommand, engine_environment, open_process
from kvflow.tools.demo.results import Scenario, ScenarioResult
from kvflow.tools.demo.router import Client, EngineFailed, open_client, send_all
from kvflow.tools.proxy import ProxyConfig
from kvflow.tools.proxy.server import open_proxy

PER_LAYER = Scenario(name="per-layer", layout="LBNHC", kv="split")
PACKED = Scenario(name="packed", layout="BHLNC", kv="content")

START_S = 60.0
"""Engines elsewhere may have been started together with us, and import torch from a cold disk."""

_log = record_logger("kvflow.demo")


class Engines(Struct, frozen=True, kw_only=True):
    """Two engines that run already, in other containers or on other machines.

    Attributes:
        prefill: ``host:port`` of its requests.
        decode: like ``prefill``.
    """

    prefill: str
    decode: str


class Progress(Protocol):
    """Shows how far the demo is."""

    def begin(self, stage: str) -> None:
        """Say that a stage begins; the one before is over."""
        ...

    def advance(self) -> None:
        """Count one prompt of this stage."""
        ...


async def run_demo(
    prompts: Sequence[bytes], logs: Path, progress: Progress, engines: Engines | None = None
) -> list[ScenarioResult]:
    """Run the model alone, then in two engines: those given, or per layout in two processes; one result for each.

    Args:
        prompts: tokens are bytes.
        logs: folder for the logs of all processes that are started; exists.
        progress: is told what happens.
        engines: that run already, or will soon.

    Raises:
        EngineFailed: an engine did not start, or the monolithic run, which nothing is moved in, failed.
    """
    async with open_client() as client:
        expected = await _run_alone(client, prompts, logs, progress)
        run = DemoRun(client, prompts, expected, progress)
        if engines is not None:
            return [await run.elsewhere(engines)]
        return [await run.here(scenario, logs) for scenario in (PER_LAYER, PACKED)]


async def _run_alone(client: Client, prompts: Sequence[bytes], logs: Path, progress: Progress) -> list[list[int]]:
    progress.begin("monolithic")
    command = EngineCommand(name="monolithic", role="monolithic", layout=PER_LAYER.layout, kv=PER_LAYER.kv)
    async with open_process(command, logs, engine_environment()) as address:
        answers = await send_all(client, address, "monolithic", prompts, progress.advance, pulled=False)
    for answer in answers:
        if answer.failure:
            raise EngineFailed(f"the monolithic run failed: {answer.failure}")
    return [answer.tokens for answer in answers]


class DemoRun:
    """The prompts, and what one process makes of them."""

    def __init__(
        self, client: Client, prompts: Sequence[bytes], expected: Sequence[Sequence[int]], progress: Progress
    ) -> None:
        self._client = client
        self._prompts = prompts
        self._expected = expected
        self._progress = progress

    async def here(self, scenario: Scenario, logs: Path) -> ScenarioResult:
        """Run with two processes of this machine."""
        commands = [
            EngineCommand(name=f"{scenario.name}-{role}", role=role, layout=scenario.layout, kv=scenario.kv)
            for role in ("prefill", "decode")
        ]
        environment = engine_environment()
        async with (
            open_process(commands[0], logs, environment) as prefill,
            open_process(commands[1], logs, environment) as decode,
        ):
            return await self.send(Engines(prefill=prefill, decode=decode), scenario)

    async def elsewhere(self, engines: Engines) -> ScenarioResult:
        """Run with engines that were started elsewhere."""
        await self._client.wait_until_healthy(engines.prefill, START_S)
        await self._client.wait_until_healthy(engines.decode, START_S)
        return await self.send(engines, Scenario(name=f"{engines.prefill} to {engines.decode}"))

    async def send(self, engines: Engines, scenario: Scenario) -> ScenarioResult:
        """Send the prompts through a router before both engines."""
        self._progress.begin(scenario.name)
        client, name = self._client, scenario.name.replace(" ", "-")
        config = ProxyConfig(prefill=(f"http://{engines.prefill}",), decode=(f"http://{engines.decode}",))
        async with open_proxy(config, "127.0.0.1", 0) as router:
            answers = await send_all(client, router, name, self._prompts, self._progress.advance, pulled=True)
        left = {"decode": await client.drain(engines.decode), "prefill": await client.drain(engines.prefill)}
        result = ScenarioResult(scenario=scenario, answers=answers, expected=self._expected, left=left)
        _log.info(
            "scenario.completed",
            scenario=scenario.name,
            passed=result.passed,
            tokens_equal=result.tokens_equal,
            tokens_total=result.tokens_total,
            nbytes=result.nbytes,
            descriptors=result.descriptors,
        )
        return result
