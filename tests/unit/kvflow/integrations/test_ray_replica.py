"""The settings of replicas of Ray Serve; tests/ray runs them."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvflow.errors import ConfigInvalid
from kvflow.integrations import ray as integration
from kvflow.integrations.ray import complete
from kvflow.integrations.vllm.settings import EngineFacts, read_settings

NODE = "10.0.0.7"


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("KVFLOW_CLUSTER_SECRET", "x" * 32)


def completed(extra, *, host=NODE, port_offset=0):
    extra = dict(extra)
    complete(extra, host=host, port_offset=port_offset)
    worker = read_settings(extra, EngineFacts(engine_id="a", kv_role="kv_both")).worker
    return worker.bind, worker.advertise, worker.tcp


def test_a_replica_listens_at_a_free_port_of_its_node_and_nowhere_else():
    bind, advertise, tcp = completed({}, port_offset=3)
    assert (bind, advertise) == ("tcp://10.0.0.7:0", None)
    assert tcp.bind == tcp.advertise == "tcp://10.0.0.7:0"


def test_a_node_may_have_an_address_of_ipv6():
    assert completed({}, host="fd00::7")[0] == "tcp://[fd00::7]:0"


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "*", "[::]"])
def test_what_listens_everywhere_is_reached_at_its_node(everywhere):
    bind, advertise, tcp = completed({"bind": f"tcp://{everywhere}:5600", "tcp_bind": "tcp://0.0.0.0:5700"})
    assert (bind, advertise) == (f"tcp://{everywhere}:5600", "tcp://10.0.0.7:5600")
    assert (tcp.bind, tcp.advertise) == ("tcp://0.0.0.0:5700", "tcp://10.0.0.7:5700")


def test_replicas_on_one_node_have_ports_of_their_own():
    extra = {"bind": "tcp://0.0.0.0:5600", "tcp_bind": "tcp://0.0.0.0:5700", "tcp_advertise": "tcp://gate:7700"}
    bind, advertise, tcp = completed(extra, port_offset=2)
    assert (bind, advertise) == ("tcp://0.0.0.0:5602", "tcp://10.0.0.7:5602")
    assert (tcp.bind, tcp.advertise) == ("tcp://0.0.0.0:5702", "tcp://gate:7702")


def test_an_address_that_is_given_stays():
    extra = {"bind": "tcp://192.168.0.1:0", "advertise": "tcp://gate:7000"}
    assert completed(extra)[:2] == ("tcp://192.168.0.1:0", "tcp://gate:7000")


def test_a_port_above_the_last_one_is_refused():
    with pytest.raises(ConfigInvalid, match="65536"):
        completed({"bind": "tcp://0.0.0.0:65535"}, port_offset=1)


@pytest.mark.parametrize("bind", ["0.0.0.0:5600", "tcp://0.0.0.0", 5600, None])
def test_an_address_that_is_none_is_refused_by_its_name(bind):
    with pytest.raises(ConfigInvalid, match=r"bind must be tcp://HOST:PORT, not "):
        completed({"bind": bind})


def test_a_replica_without_the_secret_says_where_ray_takes_it_from(monkeypatch):
    monkeypatch.delenv("KVFLOW_CLUSTER_SECRET")
    with pytest.raises(ConfigInvalid, match="KVFLOW_CLUSTER_SECRET is not set") as refused:
        completed({})
    assert "ray start" in refused.value.remedy
    assert "runtime_env" in refused.value.remedy
    assert completed({"cluster_secret": "x" * 32})


def test_the_package_needs_ray_only_when_it_is_used():
    program = "import sys, kvflow.integrations.ray\nassert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_replica_is_set_up_with_the_address_of_its_node(monkeypatch):
    """Ray is not installed here: ``tests/ray`` runs the backend with it."""
    base = SimpleNamespace(
        BaseConnectorBackend=type("Base", (), {"_compute_port_offset": lambda _: 1}),
        DefaultPDProtocolMixin=type("Mixin", (), {}),
    )
    ray = SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "192.0.2.1"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    for path in ("llm", "llm._internal", "llm._internal.serve", "llm._internal.serve.engines"):
        monkeypatch.setitem(sys.modules, f"ray.{path}", SimpleNamespace(__path__=[]))
    for path in ("vllm", "vllm.kv_transfer", "vllm.kv_transfer.base"):
        monkeypatch.setitem(sys.modules, f"ray.llm._internal.serve.engines.{path}", base)
    backend = integration.KVFlowConnectorBackend()
    integration._backend_class.cache_clear()
    backend.kv_transfer_config = {"kv_connector_extra_config": {"bind": "tcp://0.0.0.0:5600"}}
    backend.setup()
    assert backend.kv_transfer_config["kv_connector_extra_config"] == {
        "bind": "tcp://0.0.0.0:5601",
        "advertise": "tcp://192.0.2.1:5601",
    }
    with pytest.raises(AttributeError, match="AnotherBackend"):
        _ = integration.AnotherBackend
