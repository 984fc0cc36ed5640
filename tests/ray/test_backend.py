"""Ray's own configuration of an engine finds kvflow's backend, alone and inside MultiConnector; no cluster runs."""

import copy

import pytest
import ray
from ray.serve.llm import LLMConfig

from kvflow.errors import ConfigInvalid
from kvflow.integrations.ray import KVFlowConnectorBackend, register_backend

KVFLOW = {"kv_connector": "KVFlowConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {}}
MULTI = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {"connectors": [KVFLOW, {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}]},
}


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("KVFLOW_CLUSTER_SECRET", "x" * 32)


def config_of(connector):
    """Return the configuration of a replica that Ray has given a rank, whose own number is asked of a cluster."""
    register_backend()
    kwargs = {"kv_transfer_config": copy.deepcopy(connector), "data_parallel_rank": 0}
    return LLMConfig(model_loading_config={"model_id": "tiny"}, engine_kwargs=kwargs)


def test_a_replica_listens_at_the_address_of_its_node():
    config = config_of(KVFLOW)
    config.setup_engine_backend()
    assert isinstance(config.kv_connector_backend, KVFlowConnectorBackend)
    told = config.get_engine_config().engine_kwargs["kv_transfer_config"]
    assert told["kv_connector_extra_config"]["bind"] == f"tcp://{ray.util.get_node_ip_address()}:0"


def test_it_does_so_as_a_child_of_a_multi_connector():
    config = config_of(MULTI)
    config.setup_engine_backend()
    [child, _] = config.engine_kwargs["kv_transfer_config"]["kv_connector_extra_config"]["connectors"]
    assert child["kv_connector_extra_config"]["bind"] == f"tcp://{ray.util.get_node_ip_address()}:0"


def test_without_the_secret_the_engine_is_not_started(monkeypatch):
    monkeypatch.delenv("KVFLOW_CLUSTER_SECRET")
    with pytest.raises(ConfigInvalid, match="KVFLOW_CLUSTER_SECRET is not set"):
        config_of(KVFLOW).setup_engine_backend()
