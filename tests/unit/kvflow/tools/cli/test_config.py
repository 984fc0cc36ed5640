"""``kvflow config``: sources of values, everything that is wrong at once, and never a secret."""

import json

import pytest

from kvflow.config import KEY_VARIABLE, SECRET_VARIABLE, SETTINGS, VARIABLES
from kvflow.integrations.vllm.settings import OWN_KEYS
from kvflow.tools.cli import main
from tests.helpers.loops import looped

SECRET = "the secret of the test cluster"
OTHER = "the secret of another cluster"
KEY = "ab" * 32


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in VARIABLES.values():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)


@pytest.fixture
def shown(capsys, tmp_path):
    """Run the command with a file of settings; return its status, the settings by name, and the rest."""

    def run(flag=None, given=None):
        arguments = ["config", "--json"]
        if flag:
            path = tmp_path / "settings.json"
            path.write_text(given if isinstance(given, str) else json.dumps(given))
            arguments += [flag, str(path)]
        status = main(arguments)
        figures = json.loads(capsys.readouterr().out)
        return status, {each["name"]: (each["value"], each["source"]) for each in figures["settings"]}, figures

    return run


def messages(figures):
    return [finding["message"] for finding in figures["findings"]]


def test_every_setting_is_shown_with_its_source(shown, tmp_path):
    status, settings, figures = shown("--file", {"engine_id": "decode-0", "lease_s": 12})
    assert (status, figures["findings"]) == (0, [])
    assert list(settings) == list(SETTINGS)
    path = str(tmp_path / "settings.json")
    assert settings["engine_id"] == ("decode-0", path)
    assert settings["lease_s"] == (12.0, path)
    assert settings["cluster_secret"] == ("set", SECRET_VARIABLE)
    assert settings["queue_s"] == (30.0, "default")
    assert settings["tcp_bind"] == ("tcp://127.0.0.1:0", "from bind and advertise")
    assert settings["private_key"] == ("not set", "default")


def test_the_environment_alone_is_enough(shown):
    status, settings, _ = shown()
    assert status == 0
    assert settings["engine_id"] == (None, "decided by the engine")
    assert settings["rank"] == (0, "default")


def test_the_settings_of_vllm_are_those_of_the_connector(shown):
    given = {
        "kv_connector": "KVFlowConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "bind": "tcp://0.0.0.0:7000",
            "advertise": "tcp://127.0.0.1:7000",
            "offer": "always",
        },
    }
    for flag_value in (given, given["kv_connector_extra_config"]):
        status, settings, figures = shown("--vllm", flag_value)
        assert settings["rank"] == settings["model"] == (None, "decided by the engine")
        assert settings["bind"][0] == "tcp://0.0.0.0:7000"
        assert settings["offer"][0] == "always"
        assert settings["enable_cross_layers_blocks"] == (False, "default")
        assert settings.keys() >= OWN_KEYS
        assert status == 1
    (told,) = messages(figures)  # the role is not known of the settings alone
    assert told.startswith("offer is always, but kv_role is kv_both")


WHOLE = {"kv_connector": "KVFlowConnector", "kv_role": "kv_producer"}


@looped(
    "change, message, remedy",
    [
        ({"kv_role": None}, "kv_role is missing", "Set it to kv_both, kv_consumer or kv_producer."),
        ({"kv_role": "kv_prefill"}, "kv_role is 'kv_prefill', not kv_both", ""),
        ({"kv_role": ["kv_both"]}, "kv_role is ['kv_both'], not kv_both", ""),
        ({"kv_connector": None}, "kv_connector is missing", ""),
        (
            {"kv_connector": "KvflowConnector"},
            "kv_connector is 'KvflowConnector', not",
            "Did you mean KVFlowConnector?",
        ),
        ({"kv_connector": "MultiConnector"}, "kv_connector is 'MultiConnector', not", ""),
        ({"kv_connector": "NixlConnector"}, "kv_connector is NixlConnector, which is vLLM's own", "Set it to KVFlow"),
        ({"kv_load_failure_policy": "ignore"}, "kv_load_failure_policy is 'ignore', not fail or recompute", ""),
        ({"bind": "tcp://127.0.0.1:1"}, "vLLM knows no bind in --kv-transfer-config", "Move bind into kv_connector_"),
        (
            {"kv_rank": 0, "kv_ip": "::1"},
            "vLLM 0.32 refuses kv_ip and kv_rank, which releases before it take",
            "Remove",
        ),
        ({"kv_rolle": 1, "x": 2}, "vLLM knows no kv_rolle and x in --kv-transfer-config", "Remove kv_rolle and x."),
    ],
)
def test_what_vllm_would_refuse_around_the_settings_is_named(shown, change, message, remedy):
    given = {name: value for name, value in (WHOLE | change).items() if value is not None}
    status, _, figures = shown("--vllm", given)
    assert status == 1
    (found,) = figures["findings"]
    assert (found["message"].startswith(message), found["code"]) == (True, "config_invalid")
    assert found["remedy"].startswith(remedy)
    assert found["remedy"]


def test_the_name_for_routers_that_know_no_other_is_right_with_its_module(shown):
    given = WHOLE | {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvflow.integrations.vllm"}
    assert shown("--vllm", given)[0] == 0


def test_each_unknown_key_has_its_own_suggestion(shown):
    _, _, figures = shown("--vllm", WHOLE | {"kv_connector_extra_config": {"leese_s": 1, "ziel": 2, "num_threads": 3}})
    (found,) = figures["findings"]
    assert found["message"].endswith("an unknown setting: leese_s, num_threads, ziel")
    assert "leese_s: Did you mean lease_s?" in found["remedy"]
    assert "num_threads: Remove it: kvflow posts reads" in found["remedy"]
    assert "ziel: Remove it: it is none of" in found["remedy"]


def test_sources_are_checked_with_the_policy_beside_them(shown):
    extra = {"sources": ["tcp://decode-0:5600"]}
    given = {"kv_connector": "KVFlowConnector", "kv_role": "kv_producer", "kv_connector_extra_config": extra}
    status, settings, figures = shown("--vllm", given)  # vLLM's default is fail
    assert (status, settings["sources"][0]) == (1, ["tcp://decode-0:5600"])
    (told,) = messages(figures)
    assert told.startswith("sources is set, but kv_load_failure_policy is fail")
    assert shown("--vllm", given | {"kv_load_failure_policy": "recompute"})[0] == 0
    assert shown("--vllm", extra)[0] == 0  # the policy is not known of the settings alone


def test_an_address_that_only_this_host_reaches_is_a_warning(shown):
    status, _, figures = shown("--vllm", {"bind": "tcp://0.0.0.0:7000", "advertise": "tcp://127.0.0.1:7000"})
    assert status == 1
    assert {finding["severity"] for finding in figures["findings"]} == {"warning"}
    assert "advertise is tcp://127.0.0.1:7000, which only this host can reach" in messages(figures)[0]


def test_the_host_is_filled_in_as_the_connector_does(shown, monkeypatch):
    monkeypatch.setenv("KVFLOW_ADVERTISE_HOST", "prefill-0.example")
    _, settings, _ = shown("--vllm", {"bind": "tcp://0.0.0.0:7000", "advertise": "tcp://{host}:7000"})
    assert settings["advertise"][0] == "tcp://prefill-0.example:7000"


def test_all_errors_are_told_at_once_and_each_with_a_remedy(shown):
    status, settings, figures = shown("--file", {"engine_id": "", "lease_s": -1, "bindd": 1, "rank": "x"})
    assert status == 1
    assert [words.split()[0] for words in messages(figures)] == ["engine_id", "lease_s", "bindd", "rank"]
    assert all(finding["code"] == "config_invalid" and finding["remedy"] for finding in figures["findings"])
    assert settings["lease_s"][0] == -1
    assert figures["cluster"] is None


@looped(
    "given, word",
    [
        ({"engine_id": "e", "rank": 1}, "rank is 1, but num_ranks is 1"),
        ({"engine_id": "e", "bind": "tcp://0.0.0.0:7000"}, "which no peer can dial"),
        ({}, "engine_id is required"),
    ],
)
def test_what_settings_are_together_is_checked(shown, given, word):
    status, _, figures = shown("--file", given)
    assert status == 1
    assert word in messages(figures)[0]


@pytest.mark.parametrize("flag", ["--file", "--vllm"])
@pytest.mark.parametrize("bad", [False, True])
def test_no_secret_is_printed(capsys, monkeypatch, tmp_path, flag, bad):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    given = {"cluster_secret": OTHER, "cluster_secret_accepted": OTHER, "private_key": KEY, "allowed_keys": ["cd" * 32]}
    if bad:
        given |= {"private_key": [KEY], "cluster_secret": {"x": OTHER}, "lease_s": "no"}
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(given | ({"engine_id": "e"} if flag == "--file" else {})))
    for more in ([], ["--json"]):
        assert main(["config", flag, str(path), *more]) == 1
        printed = capsys.readouterr()
        for secret in (SECRET, OTHER, KEY):
            assert secret not in printed.out + printed.err
    if not bad:
        assert f"Set {SECRET_VARIABLE}, " in printed.out  # a secret in a file is a warning


def test_the_cluster_is_known_by_its_secret(shown, monkeypatch):
    ours = shown()[2]["cluster"]
    assert ours == shown()[2]["cluster"]
    monkeypatch.setenv(SECRET_VARIABLE, OTHER)
    assert shown()[2]["cluster"] != ours
    monkeypatch.delenv(SECRET_VARIABLE)
    status, _, figures = shown()
    assert (status, figures["cluster"]) == (1, None)
    assert messages(figures) == ["the cluster secret is not set"]


@pytest.mark.parametrize(("name", "reads"), [("CLUSTER_SECRTE", "does not read"), ("CALIBRATION", "no longer reads")])
def test_a_variable_that_is_misspelled_or_was_read_once_is_named(shown, monkeypatch, name, reads):
    monkeypatch.setenv(f"KVFLOW_{name}", "x")
    monkeypatch.setenv("KVFLOW_OF_ANOTHER_PROGRAM", "x")
    _, _, figures = shown()
    assert messages(figures) == [f"the variable KVFLOW_{name} is set, which kvflow {reads}"]


@looped("text", ["", "[]", "{", '{"a": ' * 100_000, "\x00", '"text"'])
def test_what_is_no_json_object_is_refused(capsys, tmp_path, text):
    path = tmp_path / "settings.json"
    path.write_text(text)
    assert main(["config", "--file", str(path)]) == 2
    assert f"{path} is no JSON object" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(capsys, tmp_path):
    for flag in ("--file", "--vllm"):
        assert main(["config", flag, str(tmp_path / "nothing")]) == 2
        assert "nothing cannot be read: No such file" in capsys.readouterr().err


# What replaces NixlConnector.


def test_a_configuration_of_nixl_connector_is_converted(capsys, monkeypatch):
    monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_HOST", raising=False)
    extra = {"kv_lease_duration": 60, "enable_cross_layers_blocks": True, "num_threads": 8, "backends": ["UCX"], "x": 1}
    given = {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": extra}
    assert main(["config", "--from-nixl", json.dumps(given)]) == 1
    printed, told = capsys.readouterr()
    kept = {"lease_s": 60, "enable_cross_layers_blocks": True}
    assert json.loads(printed) == given | {"kv_connector": "KVFlowConnector", "kv_connector_extra_config": kept}
    assert [line.partition(" is dropped. ")[0] for line in told.splitlines()] == ["backends", "num_threads", "x"]
    assert main(["config", "--vllm", printed]) == 0


@pytest.mark.parametrize(("port", "expected"), [(None, 5600), ("7000", 7000)])
def test_the_variables_of_nixl_connector_become_addresses(capsys, monkeypatch, port, expected):
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_PORT", raising=False)
    if port:
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", port)
    assert main(["config", "--from-nixl", "{}"]) == 0
    converted = json.loads(capsys.readouterr().out)["kv_connector_extra_config"]
    assert converted == {"bind": f"tcp://0.0.0.0:{expected}", "advertise": f"tcp://{{host}}:{expected}"}


def test_a_configuration_is_converted_whole_or_the_status_says_so(capsys):
    given = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    for extra, status in (({}, 0), ({"kv_lease_duration": 9}, 0), ({"backend": ["UCX"]}, 1)):
        assert main(["config", "--from-nixl", json.dumps(given | {"kv_connector_extra_config": extra})]) == status
    assert capsys.readouterr().err.startswith("backend is dropped. ")
    assert main(["config", "--from-nixl", json.dumps(given | {"kv_role": "kv_prefill"})]) == 1
    assert "kv_role is 'kv_prefill', not kv_both, kv_consumer or kv_producer" in capsys.readouterr().err


def test_a_configuration_of_another_connector_is_not_converted(capsys):
    assert main(["config", "--from-nixl", '{"kv_connector": "MultiConnector"}']) == 2
    assert "MultiConnector" in capsys.readouterr().err
