"""``kvflow bench pull --source``: an address that leads nowhere ends with one line that says so."""

import socket
from contextlib import closing

import pytest

from kvflow.cli import bench, main


@pytest.fixture
def bound():
    """A socket with a port of its own on which nobody listens yet."""
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def address_of(bound):
    host, port = bound.getsockname()
    return f"{host}:{port}"


@pytest.mark.parametrize("address", ["source", "source:", ":8300", "source:http", "source:0", "source:65536"])
def test_an_address_needs_host_and_port(address, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "pull", "--source", address])
    assert ended.value.code == 2
    assert f"--source: {address!r} is not host:port" in capsys.readouterr().err


def test_a_source_that_nobody_runs_is_named(bound, capsys):
    assert main(["bench", "pull", "--source", address_of(bound)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"no source at {address_of(bound)}: ")
    assert "refused; start one with python -m kvflow.bench.source" in printed.err
    assert printed.err.count("\n") == 1


def test_a_name_that_no_resolver_takes_is_named(capsys):
    assert main(["bench", "pull", "--source", "a..b:8300"]) == 1
    assert capsys.readouterr().err.startswith("no source at a..b:8300: ")


def test_a_source_that_listens_is_taken(bound):
    assert "refused" in bench._why_unreachable(address_of(bound))
    bound.listen()
    assert bench._why_unreachable(address_of(bound)) == ""


def test_a_calibration_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, capsys):
    path = tmp_path / "no such folder" / "calibration.json"
    assert main(["bench", "descriptors", "--calibrate", "--output", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"{path} cannot be written: ")
