"""Real workers on virtual time, with every fault: no promise is broken, and a seed is the same run every time."""

import hashlib
import multiprocessing
import os
import subprocess
import sys

import pytest

from kvflow.cli.entry import main
from kvflow.testing import runner
from kvflow.testing.runner import run_seeds
from kvflow.testing.scenario import REQUESTS_MIN, simulate

from . import planted

SEEDS = 5

PROGRAM = """
import hashlib
from kvflow.testing.scenario import simulate
print(hashlib.sha256("\\n".join(simulate({seed}, recording=True).record).encode()).hexdigest())
"""


def test_no_seed_breaks_a_promise():
    summary = run_seeds(1000, SEEDS, jobs=1)
    assert [(each.seed, each.violation) for each in summary.broken] == []
    assert summary.scenarios == SEEDS
    assert summary.requests_min >= REQUESTS_MIN
    # It is worth something only if much is delivered, and much goes wrong.
    assert summary.outcomes["completed"] > summary.requests / 3
    assert len(summary.outcomes) > 6


def test_without_faults_every_pull_is_delivered():
    summary = run_seeds(0, 2, jobs=1, calm=True)
    assert summary.broken == ()
    assert {*summary.outcomes} == {"completed"}


def test_a_seed_is_the_same_run_in_every_process_and_under_every_hash_seed():
    seed = 3
    here = hashlib.sha256("\n".join(simulate(seed, recording=True).record).encode()).hexdigest()
    for hash_seed in ("0", "4711"):
        there = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(seed=seed)],
            check=True,
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        assert there.stdout.strip() == here


def test_recording_changes_nothing_else():
    recorded, silent = simulate(5, recording=True), simulate(5)
    assert len(recorded.record) > 100
    assert (silent.outcomes, silent.virtual_s, silent.record) == (recorded.outcomes, recorded.virtual_s, ())


def test_several_processes_find_what_one_finds():
    alone, together = run_seeds(40, 2, jobs=1), run_seeds(40, 2, jobs=2)
    assert together.outcomes == alone.outcomes
    assert together.virtual_s == pytest.approx(alone.virtual_s)


def test_a_series_that_is_interrupted_ends_with_what_is_under_way(monkeypatch):
    def interrupt(summary):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "SEEDS_AT_ONCE", 1)
    before = multiprocessing.active_children()
    summary = run_seeds(40, 1000, jobs=2, on_progress=interrupt)
    assert (summary.scenarios, summary.interrupted) == (1, True)
    assert multiprocessing.active_children() == before


def test_the_command_says_how_many_were_kept_and_how_fast(capsys):
    assert main(["simulate", "--seeds", "1", "--jobs", "1"]) == 0
    told = capsys.readouterr().out
    assert "1 scenarios, every fault on: 1 kept every promise" in told
    assert "scenarios per second" in told


def test_the_command_replays_a_seed(capsys):
    assert main(["simulate", "--replay", "5"]) == 0
    told = capsys.readouterr()
    assert "event WorkerOpened" in told.out
    assert told.err == "seed 5: every promise was kept\n"


def test_the_command_names_broken_seeds(capsys, monkeypatch):
    planted.window_not_given_back_on_failure(monkeypatch)
    assert main(["simulate", "--seeds", "3", "--jobs", "1"]) == 1
    told, at_once = capsys.readouterr()
    assert "room in a window was lost" in told
    assert "room in a window was lost" in at_once
    assert "broke a promise; see each with: kvflow simulate --replay SEED" in told
