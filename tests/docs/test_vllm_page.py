"""The commands of docs/howto/vllm.md are understood; with vLLM, tests/vllm/test_serve.py runs them."""

import json
import shlex

import pytest

from kvflow.cli.entry import build_parser
from kvflow.demo.completions import OFFER
from kvflow.errors import ConfigInvalid
from kvflow.integrations.vllm import alias
from kvflow.integrations.vllm.hosts import HOST_VARIABLES
from kvflow.integrations.vllm.plugin import NAME
from kvflow.integrations.vllm.settings import EngineFacts, read_settings

from .test_examples import ROOT, blocks

PAGE = "docs/howto/vllm.md"
OFFLOADING = "docs/howto/offloading.md"


def commands(page=PAGE):
    """Return the commands of a page, as words."""
    return [shlex.split(command) for block in blocks(page, "sh") for command in joined(block)]


def transfer_configs(page):
    """Return what a page's servers are started with."""
    started = [words for words in commands(page) if words[:2] == ["vllm", "serve"]]
    return [json.loads(words[words.index("--kv-transfer-config") + 1]) for words in started]


def settings_of(config):
    """Return what the connector reads of a configuration."""
    facts = EngineFacts(engine_id="engine", kv_role=config["kv_role"])
    return read_settings({**config["kv_connector_extra_config"], "cluster_secret": "x" * 32}, facts)


def joined(block):
    """Yield the commands of a block; one whose quotes are open goes on in the next line."""
    command = ""
    for line in block.splitlines():
        command += line + "\n"
        if command.count("'") % 2 == 0:
            yield command
            command = ""


def test_servers_are_started_with_settings_that_the_connector_knows():
    configs = transfer_configs(PAGE)
    assert all(settings_of(config).log_file for config in configs)
    assert [config["kv_role"] for config in configs] == ["kv_producer", "kv_consumer"]
    assert {config["kv_connector"] for config in configs} == {NAME}


def test_servers_that_offload_have_a_child_with_settings_that_the_connector_knows():
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
        assert worker.tcp().advertise == "tcp://10.0.0.7:5709"


def test_the_variables_that_tell_the_host_are_named_in_their_order():
    for page in (PAGE, "docs/reference/config.md"):
        text = (ROOT / page).read_text()
        places = [text.index(f"`{name}`") for name in HOST_VARIABLES[1:]]
        assert places == sorted(places), page
        assert HOST_VARIABLES[0] in text[: places[0]], page


def test_the_alias_that_the_page_names_is_there():
    [config] = [json.loads(block) for block in blocks(PAGE, "json") if "kv_connector_module_path" in block]
    assert config["kv_connector_module_path"] == alias.__name__
    with pytest.raises(ConfigInvalid, match="vLLM is not installed"):
        getattr(alias, config["kv_connector"])


def test_programs_of_ours_understand_their_arguments():
    ours = [words[1:] for words in commands() if words[0] == "kvflow"]
    assert [words[0] for words in ours] == ["proxy"]
    for words in ours:
        build_parser().parse_args(words)
    [secret] = [words for words in commands() if words[0] == "export"]
    assert secret == ["export", "$(kvflow", "keys", "secret)"]
    build_parser().parse_args(["keys", "secret"])


def test_what_a_router_asks_is_what_the_proxy_asks():
    [asked] = [json.loads(block) for block in blocks(PAGE, "json") if '"model"' in block]
    assert asked["kv_transfer_params"] == OFFER
    assert asked["max_tokens"] == 1
