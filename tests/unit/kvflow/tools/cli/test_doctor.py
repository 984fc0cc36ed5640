"""``kvflow doctor`` on the command line: settings and secrets, exit statuses, and what is printed."""

import argparse
import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from kvflow.config import ACCEPTED_VARIABLE, KEY_VARIABLE, SECRET_VARIABLE, WorkerConfig
from kvflow.tools.cli import doctor, main
from kvflow.tools.doctor import path
from kvflow.worker.runtime import open_worker
from tests.helpers.loops import looped
from tests.ports import free_port
from tests.unit.kvflow.worker.helpers import PATIENCE_S, SECRET, cache_of

pytestmark = pytest.mark.usefixtures("cluster_member")


@asynccontextmanager
async def working():
    config = WorkerConfig(engine_id="prefill-0", cluster_secret=SECRET, transport="tcp")
    async with asyncio.timeout(PATIENCE_S), open_worker(config, cache_of()) as worker:
        yield worker


@looped(
    "arguments",
    [
        ["127.0.0.1:port"],
        ["127.0.0.1:0"],
        ["--listen", "7000"],
        ["--bind", "tcp://127.0.0.1:70000"],
        ["--advertise", "prefill-0:port"],
        ["--transport", "loopback"],
    ],
)
def test_a_malformed_command_line_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    assert ended.value.code == 2
    assert "usage: kvflow doctor" in capsys.readouterr().err


@pytest.mark.parametrize("other", [["--listen"], ["--live", *["http://127.0.0.1:1"] * 3]])
def test_one_way_to_examine_is_given_at_a_time(other, capsys):
    assert main(["doctor", "127.0.0.1:7000", *other]) == 2
    assert "one of ENDPOINT, --listen and --live" in capsys.readouterr().err


def test_without_a_secret_no_worker_is_dialed(monkeypatch, capsys):
    monkeypatch.delenv(SECRET_VARIABLE)
    assert main(["doctor", "127.0.0.1:7000", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "config_invalid"


async def test_a_worker_is_examined(capsys):
    async with working() as worker:
        status = await asyncio.to_thread(main, ["doctor", worker.endpoint])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert any(line.startswith("ok       worker: 'prefill-0' rank 0 of 1 has our secret") for line in lines)
    assert any(line.startswith("note     reads: an ordinary worker") for line in lines)
    assert lines[-1].endswith("findings: 0 failed, 0 warnings")


async def test_findings_are_printed_as_json(capsys):
    async with working() as worker:
        status = await asyncio.to_thread(main, ["doctor", worker.endpoint.removeprefix("tcp://"), "--json", "--strict"])
    figures = json.loads(capsys.readouterr().out)
    assert (status, figures["failed"], figures["warnings"]) == (0, 0, 0)
    assert [(each["code"], each["subject"]) for each in figures["findings"]][:2] == [("", "address"), ("", "worker")]
    assert set(figures["findings"][0]) == {"code", "status", "subject", "evidence", "remedy"}


def test_what_failed_decides_the_exit_status(capsys):
    assert main(["doctor", f"127.0.0.1:{free_port()}"]) == 1
    printed = capsys.readouterr().out
    assert "[connection_refused]" in printed
    assert printed.splitlines()[-1] == "1 finding: 1 failed, 0 warnings"


def test_valid_settings_are_said_to_be_valid():
    (found,) = doctor.check_settings()
    assert (found.code, found.status) == ("", "ok")


@pytest.mark.parametrize(
    ("name", "value", "code", "status"),
    [
        (KEY_VARIABLE, "not a key", "config_invalid", "failed"),
        ("KVFLOW_CALIBRATION", "/etc/kvflow.json", "setting_doubtful", "warning"),
        ("KVFLOW_CLUSTER_SECRETS", "x", "setting_doubtful", "warning"),
    ],
)
def test_a_setting_that_is_wrong_is_named(monkeypatch, name, value, code, status):
    monkeypatch.setenv(name, value)
    (found,) = doctor.check_settings()
    assert (found.code, found.status) == (code, status)
    assert found.remedy


@pytest.mark.parametrize(
    ("secret", "code"),
    [
        ("", "secret_missing"),
        ("hunter2-short", "secret_malformed"),
        ("'hunter2 and some more'", "secret_suspicious"),
        ("hunter2 and some more\n", "secret_suspicious"),
        ("hunter2 and some more", ""),
    ],
    ids=["missing", "short", "quoted", "with a newline", "good"],
)
def test_a_secret_is_judged_and_never_printed(monkeypatch, secret, code):
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    (found,) = path.check_secret()
    assert found.code == code
    assert "hunter2" not in doctor.line_of(found)
    assert [each.status for each in doctor.check_settings()] == ["ok"]  # no fault is told twice


def test_a_second_secret_is_judged_too(monkeypatch):
    monkeypatch.setenv(ACCEPTED_VARIABLE, "short")
    first, second = path.check_secret()
    assert (first.code, second.code, second.subject) == ("", "secret_malformed", ACCEPTED_VARIABLE)


def listener(**given):
    usual = {"listen": "", "advertise": None, "tcp_bind": None, "key": None, "transport": "auto"}
    return doctor._listener_config(argparse.Namespace(**usual | given))


@looped(
    "given, bind, advertise",
    [
        ({"listen": "127.0.0.1:7400"}, "tcp://127.0.0.1:7400", None),
        ({"listen": "127.0.0.1:7400", "advertise": "prefill-0"}, "tcp://127.0.0.1:7400", "tcp://prefill-0:7400"),
        ({"listen": "0.0.0.0:7400", "advertise": "prefill-0:7500"}, "tcp://0.0.0.0:7400", "tcp://prefill-0:7500"),
        ({"listen": "0.0.0.0:7400"}, "tcp://0.0.0.0:7400", "tcp://192.0.2.7:7400"),
        ({}, "tcp://192.0.2.7:0", None),
    ],
)
def test_the_listener_advertises_what_others_can_dial(monkeypatch, given, bind, advertise):
    monkeypatch.setattr(doctor, "own_address", lambda: "192.0.2.7")
    config = listener(**given)
    assert (config.bind, config.advertise) == (bind, advertise)


def test_a_listener_without_a_network_listens_on_loopback(monkeypatch):
    monkeypatch.setattr(doctor, "own_address", lambda: "0.0.0.0")
    assert listener().bind == "tcp://127.0.0.1:0"
    assert listener(listen="127.0.0.1:0", tcp_bind="127.0.0.1:7401").tuning.tcp_bind == "tcp://127.0.0.1:7401"
