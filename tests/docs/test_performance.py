"""The page of figures: its picture and its tables show the run that lies beside them."""

import os
import sys

import msgspec
import pytest

from tests.benchmarks import hot_path
from tests.docs import performance
from tests.docs.performance import PICTURE, picture, run


def test_the_picture_is_current():
    """If it differs: ``python -m tests.docs.reference_tables``."""
    assert PICTURE.read_text() == picture()


def test_the_run_was_long_enough_and_compared_everybody():
    assert int(run().name.rpartition(" ")[2]) >= 15
    assert "Mooncake over TCP" in {row[0] for table in run().tables if "in turns" in table.title for row in table.rows}


@pytest.mark.parametrize(("load", "said"), [(0.5, False), (0.6, True), (3.8, True)])
def test_a_run_that_began_under_load_says_so(monkeypatch, load, said):
    header = msgspec.structs.replace(run().header, load_average=load)
    monkeypatch.setattr(performance, "run", lambda: msgspec.structs.replace(run(), header=header))
    first = performance.figures().splitlines()[0]
    assert f"load average {load}." in first
    assert first.endswith(performance.NOT_IDLE) == said


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Run the benchmark with one scenario that takes no time, under a load, into a file."""
    path = tmp_path / "run.json"

    def scenario(_stack, rounds):
        return [hot_path.table("new", [("64 KiB, ms", rounds, "", "", "")])]

    def measure(load, *arguments, rounds=15):
        monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
        monkeypatch.setattr(hot_path, "SCENARIOS", {"small": scenario})
        monkeypatch.setattr(sys, "argv", ["hot_path", "--json", str(path), "--rounds", str(rounds), *arguments])
        assert hot_path.main() == 0
        return {(each.title, each.rows[0][0]): each.rows[0][1] for each in read(path)}

    measure.path = path
    return measure


def read(path):
    return msgspec.json.decode(path.read_bytes(), type=hot_path.Result).tables


def test_a_run_under_load_is_not_kept_by_mistake(measure, capsys):
    with pytest.raises(SystemExit):
        measure(3.8)
    assert not measure.path.exists()
    assert "the load average is 3.8, and one busy neighbor changes every figure" in capsys.readouterr().err
    assert measure(3.8, "--busy") == measure(0.4) == {("new", "64 KiB, ms"): 15}


def test_a_run_of_some_scenarios_keeps_the_tables_of_others(measure):
    measure(0.0)
    old = hot_path.table("old", [("64 KiB, ms", 1, "", "", "")])
    whole = msgspec.json.decode(measure.path.read_bytes(), type=hot_path.Result)
    measure.path.write_bytes(msgspec.json.encode(msgspec.structs.replace(whole, tables=(*whole.tables, old))))
    found = measure(0.0, "--only", "small", rounds=16)
    assert found == {("new", "64 KiB, ms"): 16, ("old", "64 KiB, ms"): 1}
    assert measure(0.0, rounds=17) == {("new", "64 KiB, ms"): 17}
