"""Which of the suites that are called the specification finds a planted bug alone, and what they execute of kvflow.

A suite has parts: tests, or seeds of the simulator. Of a suite only those parts run against a bug that execute lines
which it changes, the shortest first: a part that does not execute them cannot see the bug. Lines that run while modules
are imported, or while tests make what they share, count for all parts. What a test leaves in a cache of the process
counts for that test only.

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

from .parts import PARTS

if TYPE_CHECKING:
    from .__main__ import Bug

RESULTS = Path(__file__).with_name("suites.jsonl")
TABLE = Path(__file__).with_name("killed-by.md")
SUITE_S_MAX = 90
"""Seconds of processor time that a suite gets for a bug, if no fewer: what else the machine does changes no result."""

WAITING_S_MAX = 900
"""Seconds after which a suite that needs no processor is ended. It has found nothing."""

PRODUCT = ("kvflow", "handshake")
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
NOT_REACHED, NOT_FOUND = "not reached", "not found"

PYTEST = (
    *("-m", "pytest", "-p", "tests.planted.parts", "-x", "--quiet", "--tb=no", "-p", "no:cacheprovider"),
    *("--hypothesis-seed=0", "--hypothesis-profile=unshrunk", "-ofaulthandler_timeout=0", "-otimeout=300"),
    *("--durations=0", "--durations-min=0"),
)
TOOK = re.compile(r"^ *([\d.]+)s (?:(?:setup|call|teardown) +)?(tests/.+::.+|seed \d+)$", re.MULTILINE)
"""How long a part took, in the output of a suite."""

EVERY_PART = ""
"""Stands for all parts of a suite, among the parts that execute a line."""


class Suite(NamedTuple):
    """A suite: its name, what Python is told to run it, its environment, and seconds of processor time for a bug."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = {}
    most_s: float = SUITE_S_MAX


SUITES = (
    Suite("contract", (*PYTEST, "-m", "not slow", "tests/contract")),
    Suite("properties", (*PYTEST, "tests/properties")),
    Suite("exhaustive", (*PYTEST, "tests/exhaustive"), {"KVFLOW_TEST_EXHAUSTIVE": "0.02"}),
    Suite("simulation", ("-m", "tests.planted.parts"), most_s=15),
)
COVERAGE = """
[run]
source = kvflow, handshake
parallel = true
concurrency = thread, multiprocessing
patch = fork, _exit
sigterm = true
data_file = {folder}/lines
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected, module-not-imported, module-not-measured
"""


class Reached(NamedTuple):
    """Seconds of each part of a suite, and which of them execute a line: numbers of parts by file and line."""

    took_s: dict[str, float]
    lines: dict[str, dict[str, list[int]]]

    def parts(self, file: str) -> dict[int, set[str]]:
        """Return the parts that execute each line of a file."""
        names = list(self.took_s)
        return {int(line): {names[each] for each in parts} for line, parts in self.lines.get(file, {}).items()}

    def in_order(self, parts: set[str]) -> list[str]:
        """Return these parts, or all if every part is among them, the shortest first."""
        chosen = self.took_s.keys() - {EVERY_PART} if EVERY_PART in parts else parts
        return sorted(chosen, key=lambda part: (self.took_s[part], part))


class Ran(NamedTuple):
    """How a suite ended: its exit status, or None if its time was over; its output; seconds of processor time."""

    status: int | None
    output: str
    took_s: float


def environment(copy: Path) -> dict[str, str]:
    """Return the environment in which Python and its children import a copy."""
    return {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "", "PYTEST_CURRENT_TEST": ""}


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
    arguments = [*wrapper, *suite.arguments]
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
    if found := re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$|^(seed \d+): ", ran.output, re.MULTILINE):
        return found[1] or found[2]
    assert ran.status not in (4, 5), ran.output  # pytest was told wrongly, or has no tests
    return f"exit status {ran.status}"


def run_parts(copy: Path, suite: Suite, parts: Sequence[str]) -> Ran:
    """Run some parts of a suite in a copy, in this order."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(parts, file)
        file.flush()
        arguments = list(suite.arguments)
        if files := sorted({part.partition("::")[0] for part in parts if "::" in part}):
            arguments[-1:] = files
        told = Suite(suite.name, tuple(arguments), {**suite.environment, PARTS: file.name})
        return run_suite(copy, told, most_s=suite.most_s)


def measure(copy: Path, suite: Suite) -> tuple[Reached, Ran]:
    """Run a whole suite with coverage; return which parts execute the lines of each file."""
    from coverage import CoverageData  # only who runs suites needs it

    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "coverage.ini")
        settings.write_text(COVERAGE.format(folder=folder))
        measured = suite._replace(environment={**suite.environment, "COVERAGE_PROCESS_START": str(settings)})
        wrapper = ["-m", "coverage", "run", f"--rcfile={settings}"]
        ran = run_suite(copy, measured, wrapper=wrapper, most_s=1e9)
        took: dict[str, float] = {}
        for seconds, part in TOOK.findall(ran.output):
            took[part] = took.get(part, 0.0) + float(seconds)
        numbers = {part: number for number, part in enumerate((EVERY_PART, *took))}
        lines: dict[str, dict[int, set[int]]] = {}
        for path in Path(folder).glob("lines*"):
            data = CoverageData(str(path))
            data.read()
            for file in data.measured_files():
                reached = lines.setdefault(str(Path(file).relative_to(copy)), {})
                for line, contexts in data.contexts_by_lineno(file).items():
                    # A child of a test has the name of the test and its phase.
                    parts = {re.sub(r" \((setup|call|teardown)\)$", "", context) for context in contexts}
                    reached.setdefault(line, set()).update(numbers.setdefault(part, len(numbers)) for part in parts)
    by_file = {file: {str(line): sorted(parts) for line, parts in each.items()} for file, each in lines.items()}
    return Reached({part: took.get(part, 0.0) for part in numbers}, by_file), ran


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


def parts_reaching(bug: "Bug", text: str, lines: Mapping[int, set[str]]) -> set[str]:
    """Return the parts that execute a statement which a bug changes, of the parts that execute each line.

    A definition counts as executed if its module was imported. What is imported counts for every part.
    """
    if not bug.file.startswith(PRODUCT):
        return set()  # no suite imports what checks pages
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt | ast.excepthandler)]
    found: set[str] = set()
    for changed in changed_lines(text, bug.old, bug.new):
        around = [node for node in nodes if node.lineno <= changed <= (node.end_lineno or 0)]
        if not around:
            return {EVERY_PART}  # between the statements of the module
        inmost = max(around, key=lambda node: node.lineno)
        first, last = inmost.lineno, inmost.end_lineno or 0
        if (body := getattr(inmost, "body", None)) and changed < body[0].lineno:
            last = body[0].lineno - 1
        reaching = set().union(*(lines.get(line, set()) for line in range(first, max(first, last) + 1)))
        in_function = any(isinstance(node, FUNCTIONS) and node is not inmost for node in around)
        found |= {EVERY_PART} if reaching and not in_function else reaching
    return found


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
    seconds = ", ".join(f"{suite.name} {suite.most_s:g}" for suite in suites)
    cells = {NOT_REACHED: "not reached", NOT_FOUND: "no", "": ""}
    rows = [
        f"| {line['bug']} | {line['file']} | {' | '.join(cells.get(line.get(n, ''), 'yes') for n in names)} |"
        for line in begun
    ]
    return f"""# Which suite finds a planted bug alone

`python -m tests.planted --suites` writes this page from `{path.name}`. Each suite ends at its
first failure, and has so many seconds of processor time for a bug: {seconds}.
Of a suite, those tests or seeds run that execute lines which the bug changes, the shortest first. *Not reached*: none
does. *No*: of those that there was time for, none fails. Nothing in a cell: not run yet. Entries that have been added
or changed since have not run.

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
