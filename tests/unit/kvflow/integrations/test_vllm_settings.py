"""The extra configuration of a connector: every setting of a worker by its own name, and nothing else."""

from types import SimpleNamespace

import pytest

from kvflow.config import SECRET_VARIABLE
from kvflow.errors import ConfigInvalid
from kvflow.integrations.vllm.engine import require_awake, require_parallelism
from kvflow.integrations.vllm.settings import EngineFacts, model_name, read_settings, wants_packed
from kvflow.integrations.vllm.versions import check_release

from .vllm_like import SECRET


def facts(**changes):
    return EngineFacts(**{"engine_id": "engine", "kv_role": "kv_producer"} | changes)


def test_settings_of_the_worker_keep_their_names():
    settings = read_settings({"cluster_secret": SECRET, "lease_s": 5, "fence_s": "2.5"}, facts(model="m"))
    worker = settings.worker
    assert (worker.engine_id, worker.role, worker.model) == ("engine", "prefill", "m")
    assert (worker.lease_s, worker.fence_s, worker.secret()) == (5.0, 2.5, SECRET)


def test_the_secret_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    assert read_settings({}, facts()).worker.secret() == SECRET


@pytest.mark.parametrize(
    ("role", "produces", "consumes"),
    [("kv_producer", True, False), ("kv_consumer", False, True), ("kv_both", True, True)],
)
def test_the_role_says_who_hands_out_tickets_and_who_reads(role, produces, consumes):
    settings = read_settings({"cluster_secret": SECRET}, facts(kv_role=role))
    assert (settings.produces, settings.consumes) == (produces, consumes)


def test_an_unknown_key_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigInvalid, match="unknown leese_s") as caught:
        read_settings({"cluster_secret": SECRET, "leese_s": 5}, facts())
    assert "enable_cross_layers_blocks" in caught.value.remedy
    assert "lease_s" in caught.value.remedy


@pytest.mark.parametrize("key", ["engine_id", "rank", "num_ranks", "role"])
def test_what_the_engine_decides_cannot_be_set(key):
    with pytest.raises(ConfigInvalid, match=key):
        read_settings({"cluster_secret": SECRET, key: "x"}, facts())


@pytest.mark.parametrize("extra", [{"lease_s": "soon"}, {"lease_s": -1}, {"bind": "tcp://0.0.0.0:5000"}])
def test_values_are_checked(extra):
    with pytest.raises(ConfigInvalid):
        read_settings({"cluster_secret": SECRET, **extra}, facts())


def test_an_error_does_not_show_the_secret():
    with pytest.raises(ConfigInvalid) as caught:
        read_settings({"cluster_secret": [SECRET]}, facts())
    assert SECRET not in str(caught.value)


def test_ranks_of_one_host_listen_on_different_ports():
    extra = {"cluster_secret": SECRET, "bind": "tcp://0.0.0.0:5000", "advertise": "tcp://node:6000"}
    extra |= {"tcp_bind": "tcp://0.0.0.0:5100", "tcp_advertise": "tcp://node:6100", "transport": "tcp"}
    worker = read_settings(extra, facts(rank=1, num_ranks=2, port_offset=3)).worker
    assert (worker.bind, worker.advertise) == ("tcp://0.0.0.0:5003", "tcp://node:6003")
    assert (worker.tcp_bind, worker.tcp_advertise) == ("tcp://0.0.0.0:5103", "tcp://node:6103")
    free = read_settings({"cluster_secret": SECRET}, facts(port_offset=3)).worker
    assert (free.bind, free.tcp_bind) == ("tcp://127.0.0.1:0", None)


def test_a_port_that_is_too_high_with_the_ranks_is_refused():
    with pytest.raises(ConfigInvalid, match="65537"):
        read_settings({"cluster_secret": SECRET, "bind": "tcp://127.0.0.1:65535"}, facts(port_offset=2))


@pytest.mark.parametrize(
    ("value", "wanted"), [(True, True), ("true", True), ("1", True), (False, False), ("False", False), (0, False)]
)
def test_a_switch_may_be_text(value, wanted):
    assert wants_packed({"enable_cross_layers_blocks": value}) is wanted


@pytest.mark.parametrize("path", ["", 7, ["a"]])
def test_a_log_file_that_is_no_path_is_refused(path):
    with pytest.raises(ConfigInvalid, match="log_file"):
        read_settings({"cluster_secret": SECRET, "log_file": path}, facts())


def test_a_switch_that_is_none_is_refused():
    with pytest.raises(ConfigInvalid, match="enable_cross_layers_blocks"):
        wants_packed({"enable_cross_layers_blocks": "perhaps"})


@pytest.mark.parametrize(
    ("model", "name"),
    [("org/model-8b", "org/model-8b"), ("/mnt/a/model-8b/", "model-8b"), ("./model-8b", "model-8b")],
)
def test_a_model_in_a_folder_has_the_name_of_the_folder(model, name):
    assert model_name(model) == name


@pytest.mark.parametrize("release", ["0.32.0", "0.32.0+cpu", "0.33.1", "0.33.0rc1"])
def test_supported_releases(release):
    check_release(release)


@pytest.mark.parametrize("release", ["", "0.31.9", "0.34.0", "1.0.0", "dev"])
def test_other_releases_are_refused_with_the_range(release):
    with pytest.raises(ConfigInvalid, match=r"0\.32 to 0\.33"):
        check_release(release)


@pytest.mark.parametrize(
    "name", ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"]
)
def test_parallelism_that_is_not_described_is_refused(name):
    require_parallelism(SimpleNamespace(tensor_parallel_size=8))
    with pytest.raises(ConfigInvalid, match=name):
        require_parallelism(SimpleNamespace(**{name: 2}))


def test_an_engine_that_can_sleep_is_refused_where_nobody_tells_of_it():
    require_awake(SimpleNamespace(enable_sleep_mode=False))
    with pytest.raises(ConfigInvalid, match="enable_sleep_mode"):
        require_awake(SimpleNamespace(enable_sleep_mode=True))
