"""Real workers on virtual time, with every fault: no promise is broken, and a seed is the same run every time."""

import hashlib
import multiprocessing
import os
import re
import subprocess
import sys
from collections import Counter

import pytest

from kvflow.reads.core import ReadCore
from kvflow.reads.staging import Scatterer
from kvflow.worker.answers import Answers
from kvflow.worker.producer import LeaseManager
from kvflow.worker.renewals import LeaseRenewer
from kvflow.worker.threaded import ThreadedWorker
from kvflow.worker.worker import Worker
from tests.fakes import Process
from tests.fakes.fabric import SimulatedBackend
from tests.simulation.__main__ import main
from tests.simulation.runner import run_seeds
from tests.simulation.scenario import REQUESTS_MIN, simulate

from . import planted, runner

SEEDS = 5

PROGRAM = """
import hashlib
from tests.simulation.scenario import simulate
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


def test_without_faults_a_pull_fails_only_by_what_callers_do():
    summary = run_seeds(0, 5, jobs=1, calm=True)
    assert summary.broken == ()
    assert summary.outcomes["completed"] > summary.requests * 2 / 3
    # Cancelled, revoked or released by another reader, changed on the way, or into a block that is on offer. Or what is
    # asked for is not kept yet, or no more.
    undone = {"cancelled", "stale_lease", "ticket_invalid", "block_ids_invalid", "not held", "another is held"}
    undone.add("deadline_exceeded")  # of an offer that is never sealed
    assert {*summary.outcomes} <= {"completed", "given back", "refused"} | undone


USED = (
    (LeaseRenewer, "hold_ticket"),
    (Scatterer, "start"),
    (ThreadedWorker, "pull"),
    (LeaseManager, "offer_when_possible"),
    (Worker, "drain"),
    (SimulatedBackend, "reset"),
    (ReadCore, "post_inline"),
    (Process, "hang"),
    (Answers, "_answer_one"),
)
"""What scenarios must come to: kept tickets, staged reads, threads, waiting offers, drains, hosts that hang, posts on
the caller's thread, and questions that wait."""


def test_scenarios_use_all_that_a_worker_does(monkeypatch):
    used = Counter()

    def count(kind, name):
        call = getattr(kind, name)

        def counted(*args, **options):
            used[kind] += 1
            return call(*args, **options)

        monkeypatch.setattr(kind, name, counted)

    for kind, name in USED:
        count(kind, name)
    assert not run_seeds(39, 12, jobs=1).broken
    assert set(used) == {kind for kind, _ in USED}


def test_calm_reads_last_for_several_leases():
    record = "\n".join(simulate(3, calm=True, recording=True).record)
    (lease_s,) = map(float, {*re.findall(r"lease_s=([0-9.]+)", record)})
    held_s = [float(found) for found in re.findall(r"outcome='released', held_s=([0-9.]+)", record)]
    assert max(held_s) > 3 * lease_s


@pytest.mark.parametrize("seed", [3, 14])
def test_a_seed_is_the_same_run_in_every_process_and_under_every_hash_seed(seed):
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


def test_several_processes_find_what_one_finds(monkeypatch):
    alone = run_seeds(40, 2, jobs=1)
    monkeypatch.setattr(runner, "SEEDS_AT_ONCE", 1)
    together = run_seeds(40, 2, jobs=2)
    assert together.outcomes == alone.outcomes
    assert (together.scenarios, together.requests) == (alone.scenarios, alone.requests)
    assert together.requests_min == alone.requests_min
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
    assert main(["--seeds", "1", "--jobs", "1"]) == 0
    told = capsys.readouterr().out
    assert "1 scenarios, one in five calm: 1 kept every promise" in told
    assert "scenarios per second" in told


def test_the_command_replays_a_seed(capsys):
    assert main(["--replay", "5"]) == 0
    told = capsys.readouterr()
    assert "event WorkerOpened" in told.out
    assert told.err == "seed 5: every promise was kept\n"


def test_the_command_names_broken_seeds(capsys, monkeypatch):
    planted.release_is_forgotten(monkeypatch)
    assert main(["--seeds", "3", "--jobs", "1"]) == 1
    told, at_once = capsys.readouterr()
    assert "has given it back" in told
    assert "has given it back" in at_once
    assert "broke a promise; see each with: python -m tests.simulation --replay SEED" in told
