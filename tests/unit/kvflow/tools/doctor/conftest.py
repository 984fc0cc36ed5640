"""What the tests of the doctor share."""

import pytest

from kvflow.config import KEY_VARIABLE, SECRET_VARIABLE
from tests.unit.kvflow.worker.helpers import SECRET


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    """A cluster secret in the environment, and no key."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    return SECRET
