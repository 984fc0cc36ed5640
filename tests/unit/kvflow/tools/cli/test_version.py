"""``kvflow --version`` tells the commit of a checkout, and the release alone elsewhere."""

import re
import subprocess

import pytest

from kvflow.tools import cli
from kvflow.tools.cli import main
from kvflow.version import __version__


def shown(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert not ended.value.code
    return capsys.readouterr().out


def git(folder, *words):
    who = ("-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True)


def test_a_package_that_is_installed_tells_its_release(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli, "CHECKOUT", tmp_path)
    assert shown(capsys) == f"kvflow {__version__}\n"


def test_a_checkout_tells_its_commit_and_whether_it_has_changed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli, "CHECKOUT", tmp_path)
    file = tmp_path / "file"
    file.write_text("one")
    git(tmp_path, "init")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--message", "one")
    git(tmp_path, "tag", "v9", "--annotate", "--message", "a tag is no release")
    assert re.fullmatch(rf"kvflow {__version__} \(commit [0-9a-f]{{12}}\)\n", clean := shown(capsys))
    file.write_text("two")
    assert shown(capsys) == clean.replace(")", "-dirty)")


def test_a_checkout_that_git_refuses_tells_its_release(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli, "CHECKOUT", tmp_path)
    (tmp_path / ".git").write_text("gitdir: nowhere")
    assert shown(capsys) == f"kvflow {__version__}\n"


def test_a_host_without_git_tells_the_release(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli, "CHECKOUT", tmp_path)
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", "")
    assert shown(capsys) == f"kvflow {__version__}\n"
