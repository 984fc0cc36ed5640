"""What tools find: logs of real workers as files, and the secret of a cluster."""

import logging

import pytest

from kvflow.config import ACCEPTED_VARIABLE, KEY_VARIABLE, SECRET_VARIABLE
from kvflow.observability.logs import configure_logging
from tests.unit.kvflow.worker.helpers import SECRET


@pytest.fixture
def cluster_member(monkeypatch):
    """A cluster secret in the environment, and no key."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    for name in (KEY_VARIABLE, ACCEPTED_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def log(tmp_path):
    """A file that takes every record of this process."""
    path = tmp_path / "workers.jsonl"
    configure_logging(path, level=logging.DEBUG)
    return path
