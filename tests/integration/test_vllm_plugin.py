"""The entry point and the alias, where vLLM is absent: nothing is loaded, and nothing raises."""

import logging
import subprocess
import sys
from importlib import metadata

import pytest

from kvflow.errors import ConfigInvalid
from kvflow.integrations import vllm
from kvflow.integrations.vllm import register

GROUP = "vllm.general_plugins"


def test_an_installed_kvflow_has_the_entry_point():
    [entry] = [entry for entry in metadata.entry_points(group=GROUP) if entry.name == "kvflow"]
    assert entry.load() is register


def test_registering_without_vllm_says_so_and_goes_on(caplog):
    with caplog.at_level(logging.WARNING, logger="vllm.kvflow"):
        register()
        register()
    assert len(caplog.records) == 2
    assert "vllm" in caplog.text


@pytest.mark.parametrize(
    "statement",
    [
        "import kvflow",
        "import kvflow.integrations.vllm",
        "from kvflow.tools.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
    ],
    ids=["package", "plugin", "command"],
)
def test_vllm_is_never_asked_for_where_nobody_wants_it(statement):
    program = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "torch", "nixl"):
            sys.exit(f"{{name}} is imported")
sys.meta_path.insert(0, Refuse())
{statement}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_the_alias_checks_the_release_of_vllm():
    with pytest.raises(ConfigInvalid, match="vLLM is not installed"):
        _ = vllm.NixlConnector
    with pytest.raises(AttributeError, match="AnotherConnector"):
        _ = vllm.AnotherConnector
