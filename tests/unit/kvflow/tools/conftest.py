"""Logs of real workers, as files."""

import logging

import pytest

from kvflow.observability.logs import configure_logging


@pytest.fixture
def log(tmp_path):
    """A file that takes every record of this process."""
    path = tmp_path / "workers.jsonl"
    configure_logging(path, level=logging.DEBUG)
    return path
