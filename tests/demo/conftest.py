"""The demo is several processes: the coverage of some of them counts as well."""

import pytest


@pytest.fixture
def measured_processes(monkeypatch, pytestconfig, repository):
    """Measure the coverage of the processes that a test starts, if its own is measured."""
    if pytestconfig.pluginmanager.hasplugin("_cov"):
        monkeypatch.setenv("COVERAGE_PROCESS_START", str(repository / "pyproject.toml"))
        monkeypatch.setenv("COVERAGE_FILE", str(repository / ".coverage"))
