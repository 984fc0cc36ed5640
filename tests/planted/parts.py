"""Runs parts of a suite: tests, as a plugin of pytest, or seeds of the simulator, as a program.

``KVFLOW_PLANTED_PARTS`` names a file with the parts to run, in their order; without it all run. Where coverage is
measured, the lines of each part are told apart.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PARTS = "KVFLOW_PLANTED_PARTS"
SEEDS = 200

_running = [""]


@contextmanager
def part(name: str) -> Iterator[None]:
    """Let coverage, if it is measured, count for this part; "" counts for all."""
    coverage = sys.modules["coverage"].Coverage.current() if "coverage" in sys.modules else None
    _running.append(name)
    try:
        if coverage:
            coverage.switch_context(name)
        yield
    finally:
        _running.pop()
        if coverage:
            coverage.switch_context(_running[-1])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    with part(item.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    """Count what tests share for all of them."""
    with part(_running[-1] if fixturedef.scope == "function" else ""):
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    if chosen := _chosen():
        order = {name: number for number, name in enumerate(chosen)}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


def _chosen() -> list[str]:
    if file := os.environ.get(PARTS):
        return json.loads(Path(file).read_text())
    return []


def main() -> None:
    from tests.simulation.scenario import simulate

    for name in _chosen() or [f"seed {seed}" for seed in range(SEEDS)]:
        began_s = time.perf_counter()
        with part(name):
            violation = simulate(int(name.split()[1])).violation
        if violation:
            sys.exit(f"{name}: {violation}")
        print(f"{time.perf_counter() - began_s:.3f}s {name}")  # noqa: T201 - as pytest prints how long tests took


if __name__ == "__main__":
    main()
