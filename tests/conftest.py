"""What every test relies on."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anybody loads torch: the copies of tests are small, and torch's threads, which spin, would take the cores of
# the processes that run other tests. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shared machine may stall at any moment: that an example took long says nothing of it.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

MEASURED = ("contract", "demo", "proxy", "unit")
"""Folders whose tests count for the coverage. Tests of whole processes and generated ones run the same lines many times
over: to measure them takes minutes, and adds half a percent."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Measure the coverage of those tests alone; fixtures of the others count as well."""
    root = Path(__file__).parent
    for item in items:
        if item.path.relative_to(root).parts[0] not in MEASURED:
            item.add_marker("no_cover")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).parents[1]


@pytest.fixture
def few_words() -> Iterator[None]:
    """Keep kvflow's log quiet, for tests in which thousands of things go wrong as they should."""
    log = logging.getLogger("kvflow")
    before = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(before)
