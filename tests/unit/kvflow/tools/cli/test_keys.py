"""What ``kvflow keys`` prints can be used as it is."""

import io

import pytest

from kvflow.config import KEY_VARIABLE, SECRET_VARIABLE, WorkerConfig
from kvflow.tools.cli import main


def printed(capsys, *arguments):
    assert main(["keys", *arguments]) == 0
    return capsys.readouterr().out


def variables(text):
    return dict(line.split("=", 1) for line in text.splitlines() if not line.startswith("#"))


def test_a_worker_runs_with_what_is_drawn(capsys, monkeypatch):
    secret, pair = printed(capsys, "secret"), printed(capsys, "pair")
    for name, value in variables(secret + pair).items():
        monkeypatch.setenv(name, value)
    config = WorkerConfig(engine_id="prefill-0", allowed_keys=(pair.splitlines()[0].split()[-1],))
    config.check()
    assert variables(secret) == {SECRET_VARIABLE: config.security.secret}
    assert variables(pair) == {KEY_VARIABLE: config.security.own_key.hex()}


def test_the_public_key_of_a_private_one(capsys, monkeypatch):
    pair = printed(capsys, "pair")
    remark, line = pair.splitlines()
    for given in (pair, line, line.partition("=")[2]):
        monkeypatch.setattr("sys.stdin", io.StringIO(given + "\n"))
        assert printed(capsys, "public").strip() == remark.split()[-1]


@pytest.mark.parametrize("given", ["", "words", "ab" * 31, "ab" * 33, "ab" * 32 + "\n" + "cd" * 32])
def test_what_is_no_private_key_is_not_shown(capsys, monkeypatch, given):
    monkeypatch.setattr("sys.stdin", io.StringIO(given))
    assert main(["keys", "public"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "64 hexadecimal digits" in shown.err
    assert "abab" not in shown.err
