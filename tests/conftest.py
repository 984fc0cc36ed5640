"""What every test relies on."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).parents[1]
