"""Every setting is checked by name before anything starts, and the secret is never shown."""

import pickle
from contextlib import nullcontext

import pytest

from kvflow.config import (
    ACCEPTED_VARIABLE,
    KEY_VARIABLE,
    SECRET_LENGTH_MIN,
    SECRET_VARIABLE,
    TcpSettings,
    WorkerConfig,
    _warn_of_ends,
)
from kvflow.errors import ConfigInvalid
from tests.helpers.loops import looped
from tests.helpers.settings import flat_config

SECRET = "a secret of the tests, long enough"

PORTS = {"bind": "tcp://0.0.0.0:5600", "advertise": "tcp://10.0.0.7:5600", "tcp_bind": "tcp://0.0.0.0:5700"}
PRIVATE = "0123456789abcdef" * 4


def config(**settings):
    return flat_config(**{"engine_id": "prefill-0", "cluster_secret": SECRET} | settings)


def test_the_defaults_are_valid():
    config().check()


@looped(
    "settings",
    [
        {"rank": 3, "num_ranks": 4},
        {"bind": "tcp://[::1]:0"},
        {"bind": "tcp://0.0.0.0:5000", "advertise": "tcp://node-7:5000"},
        {"bind": "tcp://[::]:5000", "advertise": "tcp://[fd00::1]:65535"},
        {"bind": "tcp://*:0", "advertise": "tcp://10.0.0.7:31000"},
        {"lease_s": 30, "fence_s": 0.001},
        {"transport": "loopback"},
        {"transport": "nixl"},
        {"transport": "tcp", "tcp_bind": "tcp://0.0.0.0:5700", "tcp_connections": 16, "tcp_encryption": "tls"},
        {"require_encryption": True},
        {"require_encryption": True, "bind": "tcp://10.0.0.7:5600", "transport": "nixl"},
        {"require_encryption": True, "bind": "tcp://10.0.0.7:5600", "tcp_encryption": "tls"},
        {"bind": "tcp://0.0.0.0:5600", "advertise": "tcp://node-7:5600", "tcp_bind": "tcp://*:5700"},
        {"tcp_bind": "tcp://10.1.0.7:0", "tcp_advertise": "tcp://node-7:31700"},
        {"staging_bytes": 0},
        {"cluster_secret_accepted": "the secret that comes next"},
        {"private_key": PRIVATE, "allowed_keys": ()},
        {"private_key": PRIVATE, "allowed_keys": ("a" * 64, "0" * 64)},
    ],
)
def test_valid_settings(settings):
    config(**settings).check()


@looped(
    "settings, named",
    [
        ({"engine_id": ""}, "engine_id"),
        ({"engine_id": "x" * 257}, "engine_id"),
        ({"engine_id": 7}, "engine_id"),
        ({"engine_id": "half a \ud800"}, "engine_id"),
        ({"model": "half a \udfff"}, "model"),
        ({"rank": -1}, "rank"),
        ({"rank": "0"}, "rank"),
        ({"rank": True}, "rank"),
        ({"rank": 1}, "rank is 1, but num_ranks is 1"),
        ({"num_ranks": 0}, "num_ranks"),
        ({"transport": "ucx"}, "transport"),
        ({"transport": ""}, "transport"),
        ({"tcp_bind": "10.0.0.7:5700"}, "tcp_bind"),
        ({"tcp_bind": "tcp://10.0.0.7:65536"}, "tcp_bind is 'tcp://10.0.0.7:65536', but no port is above"),
        ({"tcp_advertise": "tcp://0.0.0.0:5700"}, "tcp_advertise is 'tcp://0.0.0.0:5700', which no peer can dial"),
        ({"tcp_advertise": "tcp://node-7:0"}, "tcp_advertise"),
        ({"tcp_advertise": "tcp://node..7:5700"}, "tcp_advertise"),
        ({"tcp_connections": 0}, "tcp_connections"),
        ({"tcp_connections": 17}, "tcp_connections"),
        ({"tcp_encryption": "ssl"}, "tcp_encryption"),
        ({"tcp_encryption": True}, "tcp_encryption"),
        ({"bind": "tcp://10.0.0.7:5600", "require_encryption": True}, "TCP would listen at 'tcp://10.0.0.7:0' without"),
        ({"nixl_backend_params": {"num_threads": "4"}}, "num_threads, but kvflow decides"),
        ({"nixl_backend_params": {"ucx_error_handling_mode": "none"}}, "ucx_error_handling_mode"),
        ({"nixl_backend_params": {"engine_config": "TLS=rc"}}, "engine_config sets TLS"),
        ({"nixl_backend_params": {"engine_config": "UCX_IB_GID_INDEX=3"}}, "'UCX_IB_GID_INDEX'"),
        ({"nixl_backend_params": {"engine_config": "IB_GID_INDEX=3,mlx5_1:1"}}, "'mlx5_1:1'"),
        ({"nixl_backend_params": {"engine_config": "IB_GID_INDEX="}}, "'IB_GID_INDEX' with the value ''"),
        ({"nixl_backend_params": {"": "x"}}, "nixl_backend_params"),
        ({"nixl_backend_params": {"ucx_devices": 5}}, "nixl_backend_params"),
        ({"nixl_backend_params": {"ucx_devices": "x" * 1025}}, "nixl_backend_params"),
        ({"nixl_backend_params": {str(number): "" for number in range(33)}}, "nixl_backend_params"),
        ({"staging_bytes": -1}, "staging_bytes"),
        ({"staging_bytes": 1 << 41}, "staging_bytes"),
        ({"bind": "127.0.0.1:0"}, "bind"),
        ({"bind": "ipc:///tmp/x"}, "bind"),
        ({"bind": "tcp://127.0.0.1"}, "bind"),
        ({"bind": "tcp://127.0.0.1:port"}, "bind"),
        ({"bind": "tcp://127.0.0.1:5000\n"}, "bind"),
        ({"bind": "tcp://127.0.0.1:65536"}, "bind"),
        ({"bind": "tcp://127.0.0.1:5000/path"}, "bind"),
        ({"bind": "tcp://[::1:5000"}, "bind"),
        ({"bind": "tcp://::1:5000"}, "bind"),
        ({"bind": None}, "bind"),
        ({"bind": "tcp://0.0.0.0:0"}, "bind is 'tcp://0.0.0.0:0', which no peer can dial"),
        ({"bind": "tcp://*:5000"}, "which no peer can dial"),
        ({"bind": "tcp://[::]:5000"}, "which no peer can dial"),
        ({"advertise": "tcp://0.0.0.0:5000"}, "advertise"),
        ({"advertise": "tcp://[::]:5000"}, "advertise"),
        ({"advertise": "tcp://node-7:0"}, "advertise"),
        ({"advertise": "tcp://node-7:70000"}, "advertise"),
        ({"advertise": "tcp://node..7:5000"}, "advertise"),
        ({"advertise": f"tcp://{'n' * 64}:5000"}, "advertise"),
        ({"advertise": "node-7:5000"}, "advertise"),
        ({"advertise": "tcp://{host}:5000"}, "advertise is 'tcp://{host}:5000', which contains a placeholder"),
        ({"bind": "tcp://{host}:5000"}, "bind is 'tcp://{host}:5000', which contains a placeholder"),
        ({"tcp_bind": "tcp://{host}:0"}, "tcp_bind is"),
        ({"tcp_advertise": "tcp://{host}:5000"}, "tcp_advertise is"),
        ({"cluster_secret": 123456789012345678}, "cluster_secret"),
        ({"cluster_secret_accepted": "fifteen letters"}, "the accepted cluster secret has 15 characters"),
        ({"private_key": PRIVATE}, "private_key and allowed_keys"),
        ({"allowed_keys": ()}, "private_key and allowed_keys"),
        ({"private_key": PRIVATE[1:], "allowed_keys": ()}, "private_key"),
        ({"private_key": PRIVATE.upper(), "allowed_keys": ()}, "private_key"),
        ({"private_key": PRIVATE, "allowed_keys": ("a" * 63,)}, "allowed_keys"),
        ({"private_key": PRIVATE, "allowed_keys": "a" * 64}, "allowed_keys"),
        ({"lease_s": 0}, "lease_s"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"lease_s": float("inf")}, "lease_s"),
        ({"log_every": 0}, "log_every"),
        ({"drain_s": -1.0}, "drain_s"),
        ({"lease_slots": 0}, "lease_slots"),
        ({"lease_slots": (1 << 20) + 1}, "lease_slots"),
        *(({name: -1.0}, name) for name in ("connect_s", "handshake_s", "queue_s", "wire_s", "fence_s")),
    ],
)
def test_what_cannot_be_used_is_named(settings, named):
    with pytest.raises(ConfigInvalid) as caught:
        config(**settings).check()
    assert named in caught.value.message


@looped(
    "settings, bind, advertise",
    [
        ({}, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
        ({"bind": "tcp://10.0.0.7:5600"}, "tcp://10.0.0.7:0", "tcp://10.0.0.7:0"),
        ({"bind": "tcp://*:5600", "advertise": "tcp://node-7:31600"}, "tcp://0.0.0.0:0", "tcp://node-7:0"),
        ({"bind": "tcp://[::1]:0", "tcp_bind": "tcp://[::]:5700"}, "tcp://[::]:5700", "tcp://[::1]:5700"),
        ({"tcp_bind": "tcp://*:5700"}, "tcp://0.0.0.0:5700", "tcp://127.0.0.1:5700"),
        # A network of its own for the data: it is not reached at the address of the control endpoint.
        (
            {"bind": "tcp://*:5600", "advertise": "tcp://node-7:5600", "tcp_bind": "tcp://10.1.0.7:5700"},
            "tcp://10.1.0.7:5700",
            "tcp://10.1.0.7:5700",
        ),
        (
            {"tcp_bind": "tcp://0.0.0.0:5700", "tcp_advertise": "tcp://node-7:31700"},
            "tcp://0.0.0.0:5700",
            "tcp://node-7:31700",
        ),
    ],
)
def test_the_tcp_plane_listens_beside_the_control_endpoint_by_default(settings, bind, advertise):
    told = config(**settings, tcp_connections=3, tcp_encryption="tls")
    told.check()
    assert told.tcp == TcpSettings(bind=bind, advertise=advertise, connections=3, encryption="tls")


@looped(
    "settings, named",
    [
        ({"bind": "tcp://0.0.0.0:5600", "advertise": "tcp://[fd00::1]:5600"}, "bind"),
        ({"bind": "tcp://*:5600", "advertise": "tcp://[::1]:5600"}, "bind"),
        ({"bind": "tcp://[fd00::1]:5600", "advertise": "tcp://10.0.0.7:5600"}, "bind"),
        ({"tcp_bind": "tcp://0.0.0.0:5700", "tcp_advertise": "tcp://[fd00::1]:5700"}, "tcp_bind"),
        ({"bind": "tcp://[::1]:5600", "tcp_bind": "tcp://0.0.0.0:5700"}, "tcp_bind"),
        ({"bind": "tcp://[::]:5600", "advertise": "tcp://10.0.0.7:5600"}, None),
        ({"bind": "tcp://0.0.0.0:5600", "advertise": "tcp://node-7:5600"}, None),
        ({"bind": "tcp://node-7:5600", "advertise": "tcp://[fd00::1]:5600"}, None),
        ({"tcp_bind": "tcp://[::]:5700", "tcp_advertise": "tcp://10.0.0.7:5700"}, None),
    ],
)
def test_addresses_to_listen_at_and_for_peers_are_of_one_family(settings, named):
    if named is None:
        return config(**settings).check()
    with pytest.raises(ConfigInvalid, match=f"^{named} is .* one is IPv4, the other IPv6") as caught:
        config(**settings).check()
    assert caught.value.remedy.startswith(f"Set {named} to tcp://[::] with its port")
    return None


def test_parameters_of_nixl_may_be_given():
    config(nixl_backend_params={"engine_config": "IB_GID_INDEX=3, RC_TIMEOUT=1s,", "ucx_devices": "mlx5_0"}).check()


def test_an_unknown_setting_is_refused():
    with pytest.raises(TypeError, match="lease_ms"):
        config(lease_ms=5)


def test_a_setting_of_tuning_is_not_taken_beside_it():
    with pytest.raises(TypeError, match=r"'wire_s' is a field of tuning: give tuning=Tuning\(wire_s=...\)"):
        WorkerConfig(engine_id="prefill-0", wire_s=5.0)
    with pytest.raises(TypeError, match="Did you mean wire_s"):
        WorkerConfig(engine_id="prefill-0", wires=5.0)
    with pytest.raises(ConfigInvalid, match=r"^wire_s must be a number"):
        WorkerConfig.read({"engine_id": "prefill-0", "wire_s": -1})
    with pytest.raises(ConfigInvalid, match=r"^each value of peer_weights must be an integer"):
        WorkerConfig.read({"engine_id": "prefill-0", "peer_weights": {"a": 65}})
    assert config(fence_s=2.0).replaced(wire_s=5.0, rank=1).settings()["wire_s"] == 5.0


def test_the_secret_comes_from_the_settings_or_the_environment(monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, "the secret of the environment")
    assert config().security.secret == SECRET
    assert config(cluster_secret=None).security.secret == "the secret of the environment"
    config(cluster_secret=None).check()


@pytest.mark.parametrize("secret", [None, "", "x" * (SECRET_LENGTH_MIN - 1)])
def test_a_secret_that_is_none_is_refused_with_the_name_of_the_variable(monkeypatch, secret):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(ConfigInvalid, match="fewer than 16" if secret else "the cluster secret is not set") as caught:
        config(cluster_secret=secret).check()
    assert SECRET_VARIABLE in caught.value.remedy


def test_white_space_at_an_end_of_a_secret_is_named_once(caplog):
    _warn_of_ends.cache_clear()
    for secret in (f"{SECRET}\n", f" {SECRET}", SECRET):
        assert config(cluster_secret=secret).security.secret == secret
    [record] = caplog.records
    assert record.getMessage().startswith("the cluster secret has white space at an end")


def test_the_shortest_secret_will_do(monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, "x" * SECRET_LENGTH_MIN)
    config(cluster_secret=None).check()


def test_the_second_secret_and_the_key_come_from_settings_or_environment(monkeypatch):
    assert (config().security.accepted_secret, config().security.own_key) == (None, None)
    monkeypatch.setenv(ACCEPTED_VARIABLE, "the next secret of the environment")
    monkeypatch.setenv(KEY_VARIABLE, "f" * 64)
    told = config(allowed_keys=()).security
    assert told.accepted_secret == "the next secret of the environment"
    assert told.own_key == bytes.fromhex("f" * 64)
    accepted = "another secret, long enough"
    told = config(cluster_secret_accepted=accepted, private_key=PRIVATE, allowed_keys=()).security
    assert (told.accepted_secret, told.own_key) == (accepted, bytes.fromhex(PRIVATE))


def test_a_key_of_the_environment_is_checked_and_not_shown(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, PRIVATE + "f")
    with pytest.raises(ConfigInvalid, match=KEY_VARIABLE) as caught:
        config(allowed_keys=()).check()
    assert PRIVATE not in str(caught.value)


def test_no_secret_is_ever_shown():
    secrets = {"cluster_secret_accepted": "the secret that comes next", "private_key": PRIVATE}
    shown = config(rank=1, num_ranks=2, allowed_keys=(), **secrets)
    for secret in (SECRET, *secrets.values()):
        assert secret not in repr(shown)
        assert secret not in f"{shown} {[shown]}"
        assert secret not in str(list(shown.__rich_repr__()))
    assert "engine_id='prefill-0', rank=1" in repr(shown)


def test_a_setting_of_a_wrong_type_does_not_show_the_secret():
    with pytest.raises(ConfigInvalid) as caught:
        config(cluster_secret=SECRET.encode()).check()
    assert SECRET not in str(caught.value)


def test_a_configuration_reaches_the_processes_of_an_engine():
    assert pickle.loads(pickle.dumps(config())) == config()


@looped(
    "settings, wrong",
    [
        ({"bind": "tcp://127.0.0.1:5600", "tcp_bind": "tcp://127.0.0.1:5600"}, "bind is .* and tcp_bind is .*one port"),
        ({"bind": "tcp://127.0.0.1:5600", "tcp_bind": "tcp://0.0.0.0:5600"}, "two servers cannot listen at one port"),
        ({"bind": "tcp://127.0.0.1:9400", "http": "127.0.0.1:9400"}, "bind is .* and http is .*one port"),
        ({"bind": "tcp://127.0.0.1:5600", "tcp_bind": "tcp://127.0.0.2:5600"}, ""),
        ({"bind": "tcp://127.0.0.1:0", "tcp_bind": "tcp://127.0.0.1:0"}, ""),
        # What peers are told is the port of the other server.
        ({**PORTS, "advertise": "tcp://10.0.0.7:5700"}, "advertise is .*, but port 5700 is that of the other server"),
        ({**PORTS, "tcp_advertise": "tcp://10.0.0.7:5600"}, "tcp_advertise is .*, but port 5600 is that of the other"),
        (
            {**PORTS, "advertise": "tcp://10.0.0.7:5700", "tcp_advertise": "tcp://10.0.0.7:5600"},
            "advertise is .* other",
        ),
        ({**PORTS, "advertise": "tcp://10.0.0.7:5600", "tcp_advertise": "tcp://10.0.0.7:5600"}, "tcp_advertise is .*"),
        # Addresses are translated.
        ({**PORTS, "advertise": "tcp://10.0.0.7:5700", "tcp_advertise": "tcp://10.0.0.7:5701"}, ""),
        ({**PORTS, "advertise": "tcp://10.0.0.7:7000", "tcp_advertise": "tcp://10.0.0.7:7001"}, ""),
    ],
)
def test_each_server_has_its_own_port_and_peers_are_told_it(settings, wrong):
    read = WorkerConfig.read({"engine_id": "a", "cluster_secret": SECRET, **settings})
    with pytest.raises(ConfigInvalid, match=wrong) if wrong else nullcontext():
        read.check()
