# ruff: noqa: T201 - a command prints
"""``python -m tests.simulation``: real workers on virtual time, with everything that can go wrong, from seeds."""

import argparse
import os
import sys
from collections.abc import Sequence

from kvflow.tools.cli.arguments import ProgressLine, at_least
from tests.simulation.runner import Summary, run_seeds
from tests.simulation.scenario import simulate

SHOWN_MAX = 10
"""Broken seeds that are printed; the others are only counted."""

SCENARIOS_PER_LINE = 1000
"""How often a log is told how far we are; a terminal is told all the time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scenarios; 0 if all were run and no promise was broken, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=at_least(1), default=100, help="number of scenarios (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (default: %(default)s)")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one seed and print every event of it")
    parser.add_argument(
        "--jobs", type=at_least(0), default=0, help="processes; 0 for one per core (default: %(default)s)"
    )
    parser.add_argument("--calm", action="store_true", help="inject no faults; only callers cancel, release and revoke")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        outcome = simulate(options.replay, calm=options.calm, recording=True)
        print(*outcome.record, sep="\n")
        print(f"seed {outcome.seed}: {outcome.violation or 'every promise was kept'}", file=sys.stderr)
        return 1 if outcome.violation else 0
    jobs, progress = options.jobs or os.cpu_count() or 1, _Progress()
    summary = run_seeds(options.first, options.seeds, jobs=jobs, calm=options.calm, on_progress=progress)
    progress.end()
    _print(summary, calm=options.calm)
    return 1 if summary.broken or summary.interrupted else 0


def _print(summary: Summary, *, calm: bool) -> None:
    kept = summary.scenarios - len(summary.broken)
    if summary.interrupted:
        print("interrupted; so far:")
    print(f"{summary.scenarios} scenarios, {'all calm' if calm else 'one in five calm'}: {kept} kept every promise")
    print(f"{summary.requests} requests, at least {summary.requests_min} in each; their pulls:")
    for ending, count in summary.outcomes.items():
        print(f"  {count:>9} {ending}")
    print(
        f"{summary.virtual_s:.0f} virtual seconds in {summary.elapsed_s:.1f} s: "
        f"{summary.scenarios_per_s:.1f} scenarios per second"
    )
    for outcome in summary.broken[:SHOWN_MAX]:
        print(f"seed {outcome.seed}: {outcome.violation}")
    if summary.broken:
        print(f"{len(summary.broken)} seeds broke a promise; see each with: python -m tests.simulation --replay SEED")


class _Progress:
    """Tells how far a series is: a terminal in one line, a log now and then. A broken seed is told at once."""

    def __init__(self) -> None:
        self._line = ProgressLine()
        self._lines = 0
        self._told: set[int] = set()

    def __call__(self, summary: Summary) -> None:
        for outcome in summary.broken:
            if outcome.seed not in self._told and len(self._told) < SHOWN_MAX:
                self._told.add(outcome.seed)
                self._line("")
                print(f"seed {outcome.seed}: {outcome.violation}", file=sys.stderr, flush=True)
        text = f"{summary.scenarios} scenarios, {summary.scenarios_per_s:.1f} per second, {len(summary.broken)} broken"
        if self._line.is_shown:
            self._line(text)
        elif summary.scenarios // SCENARIOS_PER_LINE > self._lines:
            self._lines = summary.scenarios // SCENARIOS_PER_LINE
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line."""
        self._line("")


if __name__ == "__main__":
    sys.exit(main())
