"""Which of the suites that are called the specification finds a planted bug alone, and what they execute of kvflow.

``suites.jsonl`` has a line per bug. ``killed-by.md`` is written from it.
"""

import ast
import difflib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .__main__ import Bug

RESULTS = Path(__file__).with_name("suites.jsonl")
TABLE = Path(__file__).with_name("killed-by.md")
SUITE_S_MAX = 90
"""Seconds of processor time that a suite gets for a bug: what else the machine does changes no result."""

WAITING_S_MAX = 900
"""Seconds after which a suite that needs no processor is ended. It has found nothing."""

PRODUCT = ("kvflow", "handshake")
NOT_REACHED, NOT_FOUND = "not reached", "not found"

PYTEST = (
    *("-m", "pytest", "-x", "--quiet", "--tb=no", "-p", "no:cacheprovider"),
    *("--hypothesis-seed=0", "--hypothesis-profile=unshrunk", "-ofaulthandler_timeout=0", "-otimeout=300"),
)
SCENARIOS = """
import sys
from tests.simulation.scenario import simulate
for seed in range(200):
    if violation := simulate(seed).violation:
        sys.exit(f"seed {seed}: {violation}")
"""


class Suite(NamedTuple):
    """A suite: its name, what Python is told to run it, and its environment."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = {}


SUITES = (
    Suite("contract", (*PYTEST, "-m", "not slow", "tests/contract")),
    Suite("properties", (*PYTEST, "tests/properties")),
    Suite("exhaustive", (*PYTEST, "tests/exhaustive"), {"KVFLOW_TEST_EXHAUSTIVE": "0.02"}),
    Suite("simulation", ("-c", SCENARIOS)),
)
COVERAGE = """
[run]
source = kvflow, handshake
parallel = true
concurrency = thread, multiprocessing
patch = fork, _exit
sigterm = true
data_file = {folder}/lines
disable_warnings = no-data-collected, module-not-imported, module-not-measured
"""


class Ran(NamedTuple):
    """How a suite ended: its exit status, or None if its time was over; its output; seconds of processor time."""

    status: int | None
    output: str
    took_s: float


def environment(copy: Path) -> dict[str, str]:
    """Return the environment in which Python and its children import a copy."""
    return {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": ""}


def processor_s(group: int) -> float:
    """Return the processor time of a group of processes, and of their children that have ended."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def run_suite(copy: Path, suite: Suite, *, wrapper: Sequence[str] = (), most_s: float = SUITE_S_MAX) -> Ran:
    """Run a suite in a copy, until it fails or its time is over. Its group of processes is ended with it."""
    arguments = [*wrapper, *(suite.arguments[1:] if wrapper and suite.arguments[0] == "-c" else suite.arguments)]
    began_s, took_s = time.monotonic(), 0.0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=copy,
            env={**environment(copy), **suite.environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None and took_s < most_s and time.monotonic() - began_s < WAITING_S_MAX:
                time.sleep(0.2)
                took_s = max(took_s, processor_s(process.pid))
            status = process.poll()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return Ran(status, output.read(), took_s)


def finding(ran: Ran) -> str:
    """Return what of a suite has found a bug."""
    if ran.status in (0, None):
        return NOT_FOUND
    if found := re.search(r"^(?:FAILED|ERROR) (\S+?)(?: - .*)?$|^(seed \d+): ", ran.output, re.MULTILINE):
        return found[1] or found[2]
    assert ran.status not in (4, 5), ran.output  # pytest was told wrongly, or has no tests
    return f"exit status {ran.status}"


def lines_reached(copy: Path, suite: Suite) -> tuple[dict[str, list[int]], Ran]:
    """Run a whole suite with coverage; return the lines of each file that it executes."""
    from coverage import CoverageData  # only who runs suites needs it

    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "coverage.ini")
        settings.write_text(COVERAGE.format(folder=folder))
        measured = suite._replace(environment={**suite.environment, "COVERAGE_PROCESS_START": str(settings)})
        wrapper = ["-m", "coverage", "run", f"--rcfile={settings}"]
        if suite.arguments[0] == "-c":
            program = Path(folder, "program.py")
            program.write_text(suite.arguments[1])
            measured = measured._replace(arguments=(str(program),))
        ran = run_suite(copy, measured, wrapper=wrapper, most_s=1e9)
        reached: dict[str, set[int]] = {}
        for path in Path(folder).glob("lines*"):
            data = CoverageData(str(path))
            data.read()
            for file in data.measured_files():
                reached.setdefault(str(Path(file).relative_to(copy)), set()).update(data.lines(file) or ())
    return {file: sorted(lines) for file, lines in reached.items()}, ran


def changed_lines(text: str, old: str, new: str) -> set[int]:
    """Return the lines of a file that a bug changes or deletes, and those beside what it inserts."""
    first = f"\n{text}"[: f"\n{text}".index(f"\n{old}")].count("\n") + 1
    before, after = old.splitlines(), new.splitlines()
    changed = set()
    for kind, start, end, _, _ in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "insert":
            changed |= {first + start - 1, first + start}
        elif kind != "equal":
            changed |= {*range(first + start, first + end)}
    return changed


def is_reached(bug: "Bug", text: str, lines: set[int]) -> bool:
    """Whether one of the statements that a bug changes is among the lines that were executed.

    A definition counts as executed if its module was imported.
    """
    if not bug.file.startswith(PRODUCT):
        return False  # no suite imports what checks pages
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt | ast.excepthandler)]
    for changed in changed_lines(text, bug.old, bug.new):
        around = [node for node in nodes if node.lineno <= changed <= (node.end_lineno or 0)]
        if not around:
            return True  # between the statements of the module
        inmost = max(around, key=lambda node: node.lineno)
        first, last = inmost.lineno, inmost.end_lineno or 0
        if (body := getattr(inmost, "body", None)) and changed < body[0].lineno:
            last = body[0].lineno - 1
        if lines & {*range(first, max(first, last) + 1)}:
            return True
    return False


def text_hash(bug: "Bug") -> str:
    """Return a hash of what a bug changes."""
    return hashlib.sha256("\0".join((bug.file, bug.old, bug.new)).encode()).hexdigest()[:12]


def read_results(path: Path, bugs: Mapping[str, "Bug"]) -> dict[str, dict[str, str]]:
    """Return a line per bug: its id, file and hash, and what each suite that ran has found.

    What was found of an entry that has changed since is left out.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {line["bug"]: line for line in lines}
    results = {}
    for bug in bugs.values():
        fresh = {"bug": bug.name, "file": bug.file, "text": text_hash(bug)}
        kept = known.get(bug.name, fresh)
        results[bug.name] = kept if kept["text"] == fresh["text"] else fresh
    return results


def write_results(path: Path, results: Mapping[str, Mapping[str, str]], suites: Sequence[Suite] = SUITES) -> None:
    """Write the results, and the page that is made from them beside them."""
    path.write_text("".join(f"{json.dumps(line)}\n" for line in results.values()))
    path.with_name(TABLE.name).write_text(killed_by(path, suites))


def killed_by(path: Path, suites: Sequence[Suite] = SUITES) -> str:
    """Return the page that says which suites find a bug alone."""
    names = [suite.name for suite in suites]
    results = sorted(map(json.loads, path.read_text().splitlines()), key=lambda line: line["file"])
    begun = [line for line in results if set(names) & line.keys()]
    found = {
        line["bug"]: [n for n in names if line.get(n, NOT_FOUND) not in (NOT_REACHED, NOT_FOUND)] for line in begun
    }
    missed: dict[str, list[str]] = {}
    for line in begun:
        if line.keys() >= set(names) and not found[line["bug"]]:
            missed.setdefault(line["file"], []).append(line["bug"])
    waiting = [line["bug"] for line in results if not line.keys() >= set(names) and not found.get(line["bug"])]
    total, none = sum(map(bool, found.values())), sum(map(len, missed.values()))
    counts = ", ".join(f"{name} {sum(name in each for each in found.values())}" for name in names)
    cells = {NOT_REACHED: "not reached", NOT_FOUND: "no", "": ""}
    rows = [
        f"| {line['bug']} | {line['file']} | {' | '.join(cells.get(line.get(n, ''), 'yes') for n in names)} |"
        for line in begun
    ]
    return f"""# Which suite finds a planted bug alone

`python -m tests.planted --suites` writes this page from `{path.name}`. Each suite has {SUITE_S_MAX} s of processor
time for a bug, and ends at its first failure. *Not reached*: the whole suite, without a bug, does not execute the lines
that the bug changes. Nothing in a cell: not run yet. Entries that have been added or changed since have not run.

Of {len(results)} bugs the suites find {total} ({counts}), and miss {none}. {len(waiting)} others wait for a suite.

## Found by none of the four

{_listed(f"- {file}: {', '.join(each)}" for file, each in missed.items())}

## Bugs and suites

| bug | file | {" | ".join(names)} |
|---|---|{"---|" * len(names)}
{_listed(rows)}

## Not run yet, or not by all

{", ".join(waiting) or "None."}
"""


def _listed(lines: Iterable[str]) -> str:
    return "\n".join(lines) or "None."
