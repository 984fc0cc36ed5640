"""What every test relies on."""

import os
from pathlib import Path

import pytest

# Before anybody loads torch: the copies of tests are small, and torch's threads, which spin, would take the cores of
# the processes that run other tests. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).parents[1]
