"""The extra configuration of a connector: every setting of a worker by its own name, and nothing else."""

import re
import socket
from types import SimpleNamespace

import pytest

from kvflow.config import SECRET_VARIABLE
from kvflow.errors import ConfigInvalid
from kvflow.integrations.vllm import settings as vllm_settings
from kvflow.integrations.vllm.engine import require_awake, require_parallelism
from kvflow.integrations.vllm.settings import (
    KEYS,
    RENAMED,
    REPLACED,
    EngineFacts,
    model_name,
    read_own,
    read_settings,
)
from tests.helpers.loops import looped

from .vllm_like import SECRET


def facts(**changes):
    return EngineFacts(**{"engine_id": "engine", "kv_role": "kv_producer"} | changes)


def test_settings_of_the_worker_keep_their_names():
    settings = read_settings({"cluster_secret": SECRET, "lease_s": 5, "fence_s": "2.5"}, facts(model="m"))
    worker = settings.worker
    assert (worker.engine_id, worker.model) == ("engine", "m")
    assert (worker.lease_s, worker.tuning.fence_s, worker.security.secret) == (5.0, 2.5, SECRET)


def test_parameters_of_nixl_are_passed_to_the_worker():
    params = {"engine_config": "IB_GID_INDEX=3"}
    settings = read_settings({"cluster_secret": SECRET, "nixl_backend_params": params}, facts())
    assert settings.worker.tuning.nixl_backend_params == params
    with pytest.raises(ConfigInvalid, match="kvflow decides"):
        read_settings({"cluster_secret": SECRET, "nixl_backend_params": {"num_threads": "4"}}, facts())


def test_the_secret_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    assert read_settings({}, facts()).worker.security.secret == SECRET


@looped(
    "role, produces, consumes",
    [("kv_producer", True, False), ("kv_consumer", False, True), ("kv_both", True, True)],
)
def test_the_role_says_who_hands_out_tickets_and_who_reads(role, produces, consumes):
    settings = read_settings({"cluster_secret": SECRET}, facts(kv_role=role))
    assert (settings.produces, settings.consumes) == (produces, consumes)
    assert f"kv_{settings.worker.role}" == role


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_worker_knows_that_its_engine_may_sleep(sleeps):
    assert read_settings({"cluster_secret": SECRET}, facts(sleep_mode=sleeps)).worker.tuning.sleep_mode is sleeps


def test_an_unknown_key_is_refused_with_the_one_that_is_meant():
    with pytest.raises(ConfigInvalid, match="unknown setting: leese_s") as caught:
        read_settings({"cluster_secret": SECRET, "leese_s": 5}, facts())
    assert caught.value.remedy == "leese_s: Did you mean lease_s?"


@pytest.mark.proves("several NIXL backends (`backends`)", engine="stand-in")
@looped("key", [*REPLACED, "lmcache.mp.port", "lmcache_rpc_port"])
def test_a_key_of_another_connector_is_refused_with_what_replaces_it(key):
    with pytest.raises(ConfigInvalid, match=f"unknown setting: {re.escape(key)}, zz") as caught:
        read_settings({"cluster_secret": SECRET, "zz": 1, key: 1}, facts())
    assert caught.value.remedy.startswith(f"{key}: ")
    assert " zz: Remove it: " in caught.value.remedy


def test_what_replaces_a_key_of_another_connector_is_a_setting():
    assert not REPLACED.keys() & KEYS
    assert set(RENAMED.values()) <= KEYS
    named = {word for remedy in REPLACED.values() for word in re.findall(r"[a-z]+(?:_[a-z]+)+|bind|transport", remedy)}
    assert named - {"ucx_devices"} <= KEYS


@looped("key", ["engine_id", "rank", "num_ranks", "role", "sleep_mode"])
def test_what_the_engine_decides_cannot_be_set(key):
    with pytest.raises(ConfigInvalid, match=key):
        read_settings({"cluster_secret": SECRET, key: "x"}, facts())


@looped("extra", [{"lease_s": "soon"}, {"lease_s": -1}, {"bind": "tcp://0.0.0.0:5000"}])
def test_values_are_checked(extra):
    with pytest.raises(ConfigInvalid):
        read_settings({"cluster_secret": SECRET, **extra}, facts())


def test_an_error_does_not_show_the_secret():
    with pytest.raises(ConfigInvalid) as caught:
        read_settings({"cluster_secret": [SECRET]}, facts())
    assert SECRET not in str(caught.value)


@pytest.mark.proves("data parallelism", engine="stand-in")
def test_ranks_of_one_host_listen_on_different_ports():
    extra = {"cluster_secret": SECRET, "bind": "tcp://0.0.0.0:5000", "advertise": "tcp://node:6000"}
    extra |= {"tcp_bind": "tcp://0.0.0.0:5100", "tcp_advertise": "tcp://node:6100", "transport": "tcp"}
    worker = read_settings(extra, facts(rank=1, num_ranks=2, port_offset=3)).worker
    assert (worker.bind, worker.advertise) == ("tcp://0.0.0.0:5003", "tcp://node:6003")
    assert (worker.tuning.tcp_bind, worker.tuning.tcp_advertise) == ("tcp://0.0.0.0:5103", "tcp://node:6103")
    free = read_settings({"cluster_secret": SECRET}, facts(port_offset=3)).worker
    assert (free.bind, free.tuning.tcp_bind, free.http) == ("tcp://127.0.0.1:0", None, None)


def test_each_rank_serves_its_pages_at_a_port_of_its_own():
    for given, moved in (("127.0.0.1:9400", "127.0.0.1:9403"), ("127.0.0.1:0", "127.0.0.1:0")):
        extra = {"cluster_secret": SECRET, "http": given}
        assert read_settings(extra, facts(rank=1, num_ranks=2, port_offset=3)).worker.http == moved


def test_a_port_that_is_too_high_with_the_ranks_is_refused():
    with pytest.raises(ConfigInvalid, match="65537"):
        read_settings({"cluster_secret": SECRET, "bind": "tcp://127.0.0.1:65535"}, facts(port_offset=2))


@looped("value, wanted", [(True, True), ("true", True), ("1", True), (False, False), ("False", False), (0, False)])
def test_a_switch_may_be_text(value, wanted):
    assert read_own({"enable_cross_layers_blocks": value}).enable_cross_layers_blocks is wanted


def test_a_log_file_that_cannot_be_written_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing" / "decode.jsonl"):
        with pytest.raises(ConfigInvalid, match=f"log_file {re.escape(str(path))} cannot be written"):
            read_settings({"cluster_secret": SECRET, "log_file": str(path)}, facts())
    assert not list(tmp_path.iterdir())  # a check creates no file


WRONG = {
    "log_file": ("text", ["", 7, ["a"]]),
    "log_level": ("one of 'debug', 'info', 'warning'", ["DEBUG", "", 10, None, ["debug"]]),
    "enable_cross_layers_blocks": ("true or false", ["perhaps", None]),
    "offer": ("one of 'always', 'asked'", ["", "never", True, None, ["always"]]),
    "rebuild_layers": ("one of 'auto', 'never'", ["all", True]),
    "keep": ("true or false", ["perhaps"]),
    "sources": (
        "tcp://HOST:PORT",
        [
            "tcp://decode-0:5600",
            ["decode-0:5600"],
            ["tcp://decode-0"],
            ["tcp://decode-0:5600/x"],
            ["tcp://decode-0:5600#key"],
            ["tcp://a b:5600"],
            [7],
            ["tcp://decode-0:5600"] * 257,
        ],
    ),
    "rendezvous_from": ("tcp://HOST:PORT", [["prefill-0:5600"]]),
    "find_s": ("a number above 0 and of at most 1", [0, 2, float("nan")]),
    "fetch_tokens_min": ("an integer from 1 to", [0, 1.5]),
    "rendezvous_s": ("a number above 0 and of at most 600", [0, 601]),
    "dispatch": ("one of 'concurrent', 'serial'", ["parallel"]),
}
"""Setting of the connector -> what it must be, and values that it must not have."""


@looped("name, expected, value", [(name, told, value) for name, (told, values) in WRONG.items() for value in values])
def test_a_setting_of_the_connector_that_is_wrong_is_refused_by_name(name, expected, value):
    given = {"cluster_secret": SECRET, "log_file": "decode.jsonl", name: value}
    with pytest.raises(ConfigInvalid, match=rf"{name}(\[0\])? must be .*{re.escape(expected)}"):
        read_settings(given, facts())


@looped("name", ["sources", "rendezvous_from"])
@looped("port", [0, 65536])
def test_an_engine_at_a_port_that_is_none_is_refused(name, port):
    with pytest.raises(ConfigInvalid, match=f"{name} has tcp://decode-0:{port}"):
        read_settings({"cluster_secret": SECRET, name: [f"tcp://decode-0:{port}"]}, facts())


def test_a_level_without_a_log_file_is_refused():
    with pytest.raises(ConfigInvalid, match="log_level has no effect without log_file"):
        read_settings({"cluster_secret": SECRET, "log_level": "debug"}, facts())


SHARING = {"keep": True, "sources": ["tcp://decode-0:5600", "tcp://[fd00::7]:5601"], "find_s": 0.01}


@looped(
    "name, default, value",
    [
        ("log_level", "info", "debug"),
        ("rebuild_layers", "auto", "never"),
        ("dispatch", "serial", "concurrent"),
        ("keep", False, True),
        ("sources", (), tuple(SHARING["sources"])),
        ("find_s", 0.25, 0.01),
        ("fetch_tokens_min", 256, 64),
    ],
)
def test_a_setting_of_the_connector_has_a_default_and_may_be_text(name, default, value):
    given = {"cluster_secret": SECRET, "log_file": "decode.jsonl"}
    told = list(value) if isinstance(value, tuple) else str(value)
    assert getattr(read_settings(given, facts()), name) == default
    assert getattr(read_settings({**given, name: told}, facts()), name) == value


@looped("kv_role", ["kv_producer", "kv_consumer", "kv_both"])
def test_a_worker_that_shares_prefixes_reads_and_is_read_from(kv_role):
    own = kv_role.removeprefix("kv_")
    for given, reader in (({"keep": True}, "consumer"), ({"sources": SHARING["sources"]}, "producer")):
        settings = read_settings({"cluster_secret": SECRET, **given}, facts(kv_role=kv_role))
        assert settings.worker.role == ("both" if own == reader else own)
        assert (settings.produces, settings.consumes) == (own != "consumer", own != "producer")  # of tickets


def test_sources_need_an_engine_that_computes_what_it_cannot_load():
    extra = {"cluster_secret": SECRET, **SHARING}
    with pytest.raises(ConfigInvalid, match="sources is set, but kv_load_failure_policy is fail") as caught:
        read_settings(extra, facts(load_failure_policy="fail"))
    assert '"kv_load_failure_policy": "recompute"' in caught.value.remedy
    assert read_settings(extra, facts()).sources  # vLLM checks its arguments before it knows the policy


@looped(
    "model, name",
    [("org/model-8b", "org/model-8b"), ("/mnt/a/model-8b/", "model-8b"), ("./model-8b", "model-8b")],
)
def test_a_model_in_a_folder_has_the_name_of_the_folder(model, name):
    assert model_name(model) == name


@pytest.mark.proves("context parallelism", engine="stand-in")
@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_parallelism_that_is_not_described_is_refused(name):
    require_parallelism(SimpleNamespace(tensor_parallel_size=8, pipeline_parallel_size=2))
    with pytest.raises(ConfigInvalid, match=name):
        require_parallelism(SimpleNamespace(**{name: 2}))


def test_an_engine_that_can_sleep_is_refused_where_nobody_tells_of_it():
    require_awake(SimpleNamespace(enable_sleep_mode=False))
    with pytest.raises(ConfigInvalid, match="enable_sleep_mode"):
        require_awake(SimpleNamespace(enable_sleep_mode=True))


HERE = "192.0.2.7"
"""Source: RFC 5737, addresses for examples. No host of a test has it."""
OPEN = {"cluster_secret": SECRET, "bind": "tcp://0.0.0.0:5600", "advertise": "tcp://{host}:5600"}


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    """Start without the variables that say where a host is."""
    for name in vllm_settings.HOST_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def found(extra=OPEN, host=HERE, **changes):
    return read_settings(extra, facts(**changes), lambda: host).worker


def test_the_host_of_an_address_is_the_first_that_is_told(monkeypatch):
    assert found().advertise == f"tcp://{HERE}:5600"
    told = {"POD_IP": "10.0.0.4", "VLLM_HOST_IP": "10.0.0.3", "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.2"}
    for name, value in (told | {"KVFLOW_ADVERTISE_HOST": "10.0.0.1"}).items():
        monkeypatch.setenv(name, value)
        assert found().advertise == f"tcp://{value}:5600", name


def test_a_variable_that_is_empty_tells_nothing(monkeypatch):
    monkeypatch.setenv("KVFLOW_ADVERTISE_HOST", " ")
    monkeypatch.setenv("POD_IP", "10.0.0.4")
    assert found().advertise == "tcp://10.0.0.4:5600"


def test_settings_without_a_host_ask_nobody_for_it(monkeypatch):
    monkeypatch.setenv("KVFLOW_ADVERTISE_HOST", "no address at all")
    assert found(OPEN | {"advertise": "tcp://node-7:5600"}).advertise == "tcp://node-7:5600"


def test_each_address_may_name_the_host(monkeypatch):
    monkeypatch.setenv("KVFLOW_ADVERTISE_HOST", "127.0.0.1")
    told = {name: f"tcp://{{host}}:{port}" for port, name in enumerate(vllm_settings.ENDPOINTS, 5600)}
    worker = found({"cluster_secret": SECRET, **told}, rank=1, num_ranks=2, port_offset=10)
    addresses = [worker.settings()[name] for name in vllm_settings.ENDPOINTS]
    assert addresses == [f"tcp://127.0.0.1:{port}" for port in range(5610, 5614)]


@looped("value", ["fd00::7", "[fd00::7]", "FD00:0::7"])
def test_an_address_of_version_six_gets_its_brackets(monkeypatch, value):
    monkeypatch.setenv("KVFLOW_ADVERTISE_HOST", value)
    assert found(OPEN | {"bind": "tcp://[::]:5600"}).advertise == "tcp://[fd00::7]:5600"


@looped("value", ["node-7", "prefill-0.prefill.llm.svc.cluster.local", "localhost", "node-7.", "7.node", "7a"])
def test_a_name_stays_a_name(monkeypatch, value):
    monkeypatch.setenv("KVFLOW_ADVERTISE_HOST", value)
    assert found().advertise == f"tcp://{value}:5600"


@looped(
    "value",
    [
        "10.0.0.7:5600",
        "tcp://10.0.0.7",
        "10.0.0.7,10.0.0.8",
        "10.0.0.300",
        "7",
        "node..7",
        "a b",
        "{host}",
        "[node-7]",
        "10.0.0.7/24",
    ],
)
def test_a_host_that_is_no_host_is_refused_with_its_variable(monkeypatch, value):
    monkeypatch.setenv("VLLM_HOST_IP", value)
    with pytest.raises(ConfigInvalid, match="VLLM_HOST_IP must be ") as caught:
        found()
    assert "without a port" in caught.value.message


@looped("value", ["0.0.0.0", "::", "[::]", "fe80::1%eth0"])
def test_a_host_that_nobody_can_dial_is_refused(monkeypatch, value):
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", value)
    with pytest.raises(ConfigInvalid, match=r"VLLM_NIXL_SIDE_CHANNEL_HOST is .* no peer can connect") as caught:
        found()
    assert "KVFLOW_ADVERTISE_HOST" in caught.value.remedy


def test_a_host_that_vllm_does_not_find_is_refused():
    with pytest.raises(ConfigInvalid, match=r"that vLLM found is '0\.0\.0\.0'") as caught:
        found(host="0.0.0.0")
    assert "KVFLOW_ADVERTISE_HOST" in caught.value.remedy


@looped("value", [HERE, "localhost", "2001:db8::7"])
@looped("key", ["bind", "tcp_bind"])
def test_a_rank_listens_only_at_an_address_of_its_host(monkeypatch, key, value):
    monkeypatch.setenv("KVFLOW_ADVERTISE_HOST", value)
    with pytest.raises(ConfigInvalid, match=f"^{key} is .*not an address of this host") as caught:
        found(OPEN | {key: "tcp://{host}:5700"})
    assert "0.0.0.0" in caught.value.remedy


def test_an_address_for_a_port_that_nobody_knows_is_refused():
    with pytest.raises(ConfigInvalid, match="bind is not set: the rank listens at a free port") as caught:
        found({"cluster_secret": SECRET, "advertise": "tcp://{host}:5600"})
    assert "Set bind" in caught.value.remedy


def test_a_ray_worker_without_the_secret_names_the_copied_variables(monkeypatch):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    extra = {key: value for key, value in OPEN.items() if key != "cluster_secret"}
    with pytest.raises(ConfigInvalid, match="in a worker that Ray has started") as caught:
        found(extra, copied_by_ray=True)
    assert "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY=KVFLOW_" in caught.value.remedy
    with pytest.raises(ConfigInvalid) as caught:
        found(extra)
    assert "Ray" not in str(caught.value)


@looped(
    "endpoint, said",
    [
        *((f"tcp://{host}:1", ", only on this host") for host in ("127.0.0.1", "127.8.8.8", "[::1]", "localhost")),
        (f"tcp://{HERE}:5600", ", which is not an address of this host"),
        ("tcp://node-7:5600", ""),
    ],
)
def test_what_is_said_of_an_address_is_whose_it_is(endpoint, said):
    assert vllm_settings.remark(endpoint) == said


def own_address():
    """Return an address of this host's that others reach; None where there is none but loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((HERE, 9))  # sends nothing
        except OSError:
            return None
        return probe.getsockname()[0]


@looped(
    "changes, doubts",
    [
        ({"bind": "tcp://127.0.0.1:0", "advertise": None}, []),
        ({"advertise": "tcp://node-7:5600"}, []),
        ({"advertise": "tcp://localhost:5600"}, ["advertise"]),
        ({"advertise": f"tcp://{HERE}:5600"}, ["advertise"]),
        ({"advertise": f"tcp://{HERE}:5600", "tcp_advertise": f"tcp://{HERE}:1"}, ["advertise", "tcp_advertise"]),
        ({"advertise": "tcp://node-7:5600", "tcp_bind": "tcp://127.0.0.1:0"}, ["tcp_advertise"]),
        ({"advertise": "tcp://node-7:5600", "tcp_advertise": f"tcp://{HERE}:1"}, ["tcp_advertise"]),
    ],
)
def test_addresses_that_others_may_not_reach_are_doubted(changes, doubts):
    told = {key: value for key, value in (OPEN | changes).items() if value is not None}
    assert [doubt.partition(" is ")[0] for doubt in vllm_settings.doubts(found(told))] == doubts


def test_an_address_of_this_host_is_not_doubted():
    address = own_address()
    if address is not None:
        assert vllm_settings.remark(f"tcp://{address}:5600") == ""
        assert list(vllm_settings.doubts(found(host=address))) == []
    [control] = vllm_settings.doubts(found())
    assert "correct it; or write tcp://{host}:PORT" in control


def test_what_dynamo_reads_is_accepted():
    extra = {"cluster_secret": SECRET, "router_capabilities": ["router_hint"], "control_ports": [5600]}
    read_settings(extra, EngineFacts(engine_id="e", kv_role="kv_both"))
    with pytest.raises(ConfigInvalid):
        read_settings(extra | {"control_ports": [0]}, EngineFacts(engine_id="e", kv_role="kv_both"))
