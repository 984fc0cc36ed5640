"""Close what a test has opened."""

import threading

import pytest

from .vllm_like import SIDES


@pytest.fixture(autouse=True)
def closed_sides():
    """Close every scheduler's side that a test has made, and with it its thread. No rank's thread is left, either."""
    yield
    while SIDES:
        SIDES.pop().close()
    assert "kvflow-marks" not in {each.name for each in threading.enumerate()}
