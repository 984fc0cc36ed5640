"""These tests need Docker, Compose and minutes: ``make test-compose`` runs them, ``make test`` leaves them out."""

import os

import pytest

from .containers import Project, running

if "KVFLOW_TEST_COMPOSE" not in os.environ:
    collect_ignore_glob = ["test_*.py"]

BUILD_S = 900


@pytest.fixture(scope="session")
def image():
    """The image, built from this checkout."""
    build = Project("kvflow-test-build", "tcp")
    build.compose("build", "--quiet", build.driver, timeout=BUILD_S)
    return "kvflow:local"


@pytest.fixture(scope="module", params=["tcp", "shm"])
def project(request, image):
    """Both engines of a profile, healthy; afterwards nothing is left of them."""
    with running(request.param) as project:
        yield project
