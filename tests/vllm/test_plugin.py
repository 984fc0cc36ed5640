"""vLLM finds the connector by its name, by others and by its module; dashboards find the metrics that they know."""

import json
import re

import pytest

from kvflow.tools.cli.config import OF_TRANSFER

from .clients import BLOCK_BYTES, BLOCK_TOKENS, RELEASED, tokens_of
from .engines import free_port, run_with_vllm
from .howto import DECODE_PORT
from .pairs import FULL, model_folder
from .prompts import prompt_of
from .servers import Deployment, fetch

OURS = "kvflow.integrations.vllm.connector.KVFlowConnector"
LEFT_OUT = ("vllm:nixl_num_failed_notifications", "vllm:nixl_num_notifications_after_expiry")
"""Metrics of vLLM's own connector with which kvflow has nothing in common."""


@pytest.fixture(scope="module")
def said():
    return json.loads(run_with_vllm("-m", "tests.vllm.registry_process").splitlines()[-1])


def test_the_check_of_settings_knows_the_keys_of_vllms_configuration(said):
    assert set(said["keys"]) == OF_TRANSFER


def test_the_plugin_registers_the_connector_and_imports_it_on_demand(said):
    assert not said["imported by the plugin"]
    assert said["by name"] == OURS


def test_a_list_of_other_plugins_leaves_the_connector_out(said):
    assert said["not allowed"] == "Unsupported connector type: KVFlowConnector"


def test_the_path_of_the_module_still_names_the_connector(said):
    assert said["by module path"] == OURS


def test_the_alias_is_the_same_class_and_not_a_subclass(said):
    assert said["alias"] == OURS


def nixl(lines):
    """Return the lines of vLLM's own metrics that kvflow has as well."""
    return [line for line in lines if line.startswith("vllm:nixl_") and not line.startswith(LEFT_OUT)]


@pytest.mark.parametrize("when", ["at the start", "counted"])
def test_metrics_have_the_names_buckets_and_labels_of_vllms_own_connector(said, when):
    ours, theirs = said[when]
    assert nixl(ours) == nixl(theirs)
    assert len(nixl(ours)) > 100
    assert not [line for line in ours if line.startswith(LEFT_OUT)]


def test_beside_the_engines_own_connector_its_metrics_are_its_own(said):
    _, theirs = said["counted"]
    assert nixl(said["beside"]) == nixl(theirs)
    assert [line for line in said["beside"] if line.startswith("vllm:kvflow_transfer_bytes_sum")]


class TwoRanks(Deployment):
    """The servers of docs/howto/vllm.md with two ranks each, all of them processes of their own."""

    has_alone = False
    flags = "--tensor-parallel-size 2 --dtype float32"


@pytest.mark.skipif(not FULL, reason="four workers take minutes to start")
def test_api_server_engine_core_and_workers_find_the_connector(pairs, tmp_path):
    pairs.stop()
    prompt = prompt_of(300, "ranks")
    with TwoRanks(model_folder("llama"), tmp_path) as servers:
        alone = tokens_of(servers, servers.prefill, prompt)
        assert tokens_of(servers, servers.proxy, prompt) == alone
        servers.decode.wait_metric(2, "vllm:kvflow_transfer_bytes_count")
        # In float32 an element has twice the bytes.
        nbytes = -(-len(prompt) // BLOCK_TOKENS) * BLOCK_BYTES * 2
        assert servers.decode.metric("vllm:kvflow_transfer_bytes_sum") == nbytes
        servers.prefill.wait_metric(2, "vllm:kvflow_leases_ended_total", **RELEASED)
        for server in (servers.prefill, servers.decode):
            log = server.log.read_text()
            workers = dict(re.findall(r"\((\w+ pid=\d+)\).*kvflow: (rank \d of 2)", log))
            assert sorted(workers.values()) == ["rank 0 of 2", "rank 1 of 2"]
            core = re.findall(r"\((EngineCore\w* pid=\d+)\)", log)
            assert core
            assert not set(core) & set(workers)


class BesideNixl(Deployment):
    """One server in which vLLM's own connector is another child, before ours."""

    def start(self):
        children = [
            {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"},
            {
                "kv_connector": "KVFlowConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"bind": "tcp://127.0.0.1:0"},
            },
        ]
        config = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": children},
        }
        self._environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
        self._environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        shell = f"vllm serve MODEL --port {DECODE_PORT} --kv-transfer-config '{json.dumps(config)}'"
        self.decode = self._start("beside", shell, DECODE_PORT)
        return [self.decode]


@pytest.mark.skipif(not FULL, reason="a server for a rare case")
def test_a_server_starts_where_the_engines_own_connector_is_another_child(pairs, tmp_path):
    pairs.stop()
    with BesideNixl(model_folder("llama"), tmp_path) as server:
        assert len(tokens_of(server, server.decode, prompt_of(300, "beside"))) > 0
        assert "kvflow: this engine offers nothing" in server.decode.log.read_text()
        text = fetch(f"{server.decode.url}/metrics").decode()
    for name in (
        "vllm:nixl_xfer_time_seconds",
        "vllm:nixl_num_failed_notifications",
        "vllm:kvflow_transfer_seconds",
    ):
        assert len(re.findall(rf"^# TYPE {name}(?:_total)? ", text, re.MULTILINE)) == 1
