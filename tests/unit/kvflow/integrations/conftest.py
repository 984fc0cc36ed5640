"""Close what a test has opened."""

import pytest

from .vllm_like import SIDES


@pytest.fixture(autouse=True)
def closed_sides():
    """Close every scheduler's side that a test has made, and with it its thread."""
    yield
    while SIDES:
        SIDES.pop().close()
