"""What several tests of workers open."""

import pytest

from .helpers import Reports
from .pulling import opened


@pytest.fixture
def reports():
    return Reports()


@pytest.fixture
async def world():
    """A consumer and a producer of one rank. Tests that need others have a fixture of this name themselves."""
    async with opened() as world:
        yield world
