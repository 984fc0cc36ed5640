"""The demo from start to end: one process alone, then two that share the work, once per layout."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from kvflow.observability.logs import record_logger
from kvflow.tools.demo.channel import EngineFailed, wait_until_reachable
from kvflow.tools.demo.processes import EngineCommand, engine_environment, open_process
from kvflow.tools.demo.results import Scenario, ScenarioResult
from kvflow.tools.demo.router import drain, send_all, through_one, through_two

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
    expected = await _run_alone(prompts, logs, progress)
    if engines is not None:
        return [await _run_elsewhere(engines, prompts, expected, progress)]
    return [await _run_scenario(scenario, prompts, expected, logs, progress) for scenario in (PER_LAYER, PACKED)]


async def _run_alone(prompts: Sequence[bytes], logs: Path, progress: Progress) -> list[list[int]]:
    progress.begin("monolithic")
    command = EngineCommand(name="monolithic", role="monolithic", layout=PER_LAYER.layout, kv=PER_LAYER.kv)
    async with open_process(command, logs, engine_environment()) as address:
        answers = await send_all("monolithic", prompts, through_one(address), progress.advance)
    tokens = []
    for answer in answers:
        if answer.generated is None:
            raise EngineFailed(f"the monolithic run failed: {answer.failure}")
        tokens.append(answer.generated.tokens)
    return tokens


async def _run_scenario(
    scenario: Scenario, prompts: Sequence[bytes], expected: Sequence[Sequence[int]], logs: Path, progress: Progress
) -> ScenarioResult:
    commands = [
        EngineCommand(name=f"{scenario.name}-{role}", role=role, layout=scenario.layout, kv=scenario.kv)
        for role in ("prefill", "decode")
    ]
    environment = engine_environment()
    async with (
        open_process(commands[0], logs, environment) as prefill,
        open_process(commands[1], logs, environment) as decode,
    ):
        return await _send_through(Engines(prefill=prefill, decode=decode), scenario, prompts, expected, progress)


async def _run_elsewhere(
    engines: Engines, prompts: Sequence[bytes], expected: Sequence[Sequence[int]], progress: Progress
) -> ScenarioResult:
    await wait_until_reachable(engines.prefill, START_S)
    await wait_until_reachable(engines.decode, START_S)
    scenario = Scenario(name=f"{engines.prefill} to {engines.decode}")
    return await _send_through(engines, scenario, prompts, expected, progress)


async def _send_through(
    engines: Engines,
    scenario: Scenario,
    prompts: Sequence[bytes],
    expected: Sequence[Sequence[int]],
    progress: Progress,
) -> ScenarioResult:
    progress.begin(scenario.name)
    answers = await send_all(
        scenario.name.replace(" ", "-"), prompts, through_two(engines.prefill, engines.decode), progress.advance
    )
    left = {"decode": await drain(engines.decode), "prefill": await drain(engines.prefill)}
    result = ScenarioResult(scenario=scenario, answers=answers, expected=expected, left=left)
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
