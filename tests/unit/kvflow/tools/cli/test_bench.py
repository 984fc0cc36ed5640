"""``kvflow bench``: what would be measured in vain ends with one line that says so."""

import socket
from contextlib import closing

import pytest
import torch

from kvflow.errors import PeerLost
from kvflow.tools.cli import arguments, main, small
from tests.helpers.loops import looped


@pytest.fixture
def bound():
    """A socket with a port of its own on which nobody listens yet."""
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def address_of(bound):
    host, port = bound.getsockname()
    return f"{host}:{port}"


@looped("address", ["source", "source:", ":8300", "source:http", "source:0", "source:65536"])
def test_an_address_needs_host_and_port(address, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "pull", "--source", address])
    assert ended.value.code == 2
    assert f"--source: {address!r} is not HOST:PORT" in capsys.readouterr().err


def test_a_source_that_nobody_runs_is_named(bound, capsys, monkeypatch):
    monkeypatch.setattr(small, "SOURCE_START_S", 0)
    assert main(["bench", "pull", "--source", address_of(bound)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"no source at {address_of(bound)}: ")
    assert "refused; start one with python -m kvflow.tools.bench.source" in printed.err
    assert printed.err.count("\n") == 1


def test_a_name_that_no_resolver_takes_is_named(capsys):
    assert main(["bench", "pull", "--source", "a..b:8300"]) == 1
    assert capsys.readouterr().err.startswith("no source at a..b:8300: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("flags", [["--device", "cuda"], ["--device", "cpu", "--source-device", "cuda:1"]])
@pytest.mark.parametrize("name", small.ON_DEVICES)
def test_a_device_that_is_not_there_is_a_typed_error(name, flags, capsys):
    assert main(["bench", name, "--rounds", "1", *flags]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"torch cannot use the device {flags[-1]!r}: " in printed.err
    assert "[config_invalid]" in printed.err


@looped("device", ["npu:0", "meta", "cuda:", "CUDA", ""])
def test_a_device_that_no_data_plane_reads_is_a_typed_error(device, capsys):
    assert main(["bench", "pull", "--rounds", "1", "--device", device]) == 1
    assert f"device is {device!r}: expected cpu, cuda or cuda:NUMBER" in capsys.readouterr().err


def test_a_source_that_listens_is_taken(bound):
    bound.listen()
    assert small._why_unreachable(address_of(bound)) == ""


def test_a_source_that_is_still_starting_is_awaited(bound, monkeypatch):
    monkeypatch.setattr(small, "sleep", lambda _: bound.listen())
    assert small._why_unreachable(address_of(bound)) == ""


def test_a_benchmark_that_the_package_does_not_contain_says_where_it_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(arguments, "CHECKOUT", tmp_path)
    assert main(["bench", "fence"]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "kvflow bench fence needs a checkout of kvflow's repository" in printed.err


def test_every_benchmark_is_in_the_package_or_in_the_checkout(repository):
    assert repository == arguments.CHECKOUT
    for name in small.BENCHMARKS:
        module = small.PACKAGED.get(name, f"tests.benchmarks.{name}")
        assert repository.joinpath(*module.split(".")).with_suffix(".py").exists()


@pytest.fixture
def measuring(monkeypatch):
    """Have something else measured by ``kvflow bench idle``."""

    def instead(run):
        monkeypatch.setattr("tests.benchmarks.idle.run", run)
        return main(["bench", "idle", "--rounds", "1"])

    return instead


def test_a_benchmark_that_fails_says_why_in_a_line(measuring, capsys):
    async def run(*_):
        raise PeerLost("the source process ended", remedy="Look there.")

    assert measuring(run) == 1
    assert capsys.readouterr().err == "kvflow bench idle: the source process ended [peer_lost] Look there.\n"
