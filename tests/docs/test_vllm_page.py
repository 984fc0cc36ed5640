"""The commands of docs/howto/vllm.md are understood; with vLLM, tests/vllm/test_serve.py runs them."""

import json
import shlex

from kvflow.cli.entry import build_parser
from kvflow.demo.completions import OFFER
from kvflow.integrations.vllm.settings import EngineFacts, read_settings

from .test_examples import blocks

PAGE = "docs/howto/vllm.md"


def commands():
    """Return the commands of the page, as words."""
    return [shlex.split(command) for block in blocks(PAGE, "sh") for command in joined(block)]


def joined(block):
    """Yield the commands of a block; one whose quotes are open goes on in the next line."""
    command = ""
    for line in block.splitlines():
        command += line + "\n"
        if command.count("'") % 2 == 0:
            yield command
            command = ""


def test_servers_are_started_with_settings_that_the_connector_knows():
    roles = []
    for _, _, *words in (words for words in commands() if words[:2] == ["vllm", "serve"]):
        config = json.loads(words[words.index("--kv-transfer-config") + 1])
        facts = EngineFacts(engine_id="engine", kv_role=config["kv_role"])
        settings = read_settings({**config["kv_connector_extra_config"], "cluster_secret": "x" * 32}, facts)
        assert settings.log_file
        roles.append(config["kv_role"])
    assert roles == ["kv_producer", "kv_consumer"]


def test_the_settings_for_several_hosts_are_known():
    told = [block for block in blocks(PAGE, "json") if "advertise" in block]
    assert ["tcp_bind" in block for block in told] == [False, True]
    for block in told:
        extra = json.loads(f"{{{block}}}")["kv_connector_extra_config"]
        facts = EngineFacts(engine_id="a", kv_role="kv_producer")
        settings = read_settings({**extra, "cluster_secret": "x" * 32}, facts)
        assert settings.worker.advertise
    assert settings.worker.tcp().advertise == "tcp://10.0.0.7:5700"


def test_programs_of_ours_understand_their_arguments():
    ours = [words[1:] for words in commands() if words[0] == "kvflow"]
    assert [words[0] for words in ours] == ["proxy"]
    for words in ours:
        build_parser().parse_args(words)
    [secret] = [words for words in commands() if words[0] == "export"]
    assert secret == ["export", "$(kvflow", "keys", "secret)"]
    build_parser().parse_args(["keys", "secret"])


def test_what_a_router_asks_is_what_the_proxy_asks():
    [asked] = [json.loads(block) for block in blocks(PAGE, "json") if block.startswith("{")]
    assert asked["kv_transfer_params"] == OFFER
    assert asked["max_tokens"] == 1
