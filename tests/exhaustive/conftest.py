"""These tests take most of an hour: ``make test-exhaustive`` runs them, ``make test`` leaves them out.

``KVFLOW_TEST_EXHAUSTIVE`` says how much of them: ``1`` for all, ``0.02`` for every fiftieth.
"""

import os
import sys
import time

import pytest

if "KVFLOW_TEST_EXHAUSTIVE" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def share():
    """How much of everything to run, above 0 and up to 1."""
    return float(os.environ["KVFLOW_TEST_EXHAUSTIVE"])


@pytest.fixture
def progress(request, capsys):
    """Return a function that says how far a test is, past pytest's capturing."""
    started = time.monotonic()

    def show(how_far):
        with capsys.disabled():
            sys.stdout.write(f"\n{request.node.name}: {how_far}, {time.monotonic() - started:.0f} s")
            sys.stdout.flush()

    return show
