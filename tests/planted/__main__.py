# ruff: noqa: T201 - a command prints
"""Plant bugs in a copy of kvflow, one at a time, and tell which test finds each.

    python -m tests.planted [ID ...] [--list] [--jobs 2] [--no-clean] [--all-tests PATH ...] [--suites [SUITE ...]]

``bugs.toml`` has the bugs. The exit status is 1 if one survives, or cannot be planted because its lines are gone, or
its test is gone or fails without the bug. ``--all-tests`` searches folders for the tests that find a bug.

``--suites`` runs contract, properties, exhaustive and simulation alone against each bug that has not run so, one bug
after the other. It goes on where it was ended, and writes ``killed-by.md``.

``tests/simulation/planted.py`` is something else: it has bugs that the simulator must find.
"""

import argparse
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from .suites import (
    NOT_REACHED,
    RESULTS,
    SUITES,
    Reached,
    Suite,
    environment,
    finding,
    measure,
    parts_reaching,
    read_results,
    run_parts,
    write_results,
)

ROOT = Path(__file__).parents[2]
BUGS = Path(__file__).with_name("bugs.toml")
TEST_S_MAX = 30
"""Seconds after which a test has found a bug, because it hangs."""

RUN_S_MAX = 900
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", re.MULTILINE)
WORDS = {0: "SURVIVED", 1: "found", 4: "TEST IS GONE", 5: "TEST IS GONE"}
"""Exit status of pytest -> what has become of a bug."""


class Bug(NamedTuple):
    """One bug: see ``bugs.toml``."""

    name: str
    file: str
    breaks: str
    test: str
    old: str
    new: str = ""


class Outcome(NamedTuple):
    """What has become of one bug.

    Attributes:
        bug: the bug.
        word: ``found``, or what is wrong.
        detail: the tests that have found it, or why nothing was run.
        took_s: seconds.
    """

    bug: Bug
    word: str
    detail: str = ""
    took_s: float = 0.0

    def __str__(self) -> str:
        """Return the line that is printed."""
        return f"{self.bug.name:4} {self.word} ({self.took_s:.0f} s)\n     {self.bug.breaks}\n     {self.detail}"


def read_bugs(path: Path) -> dict[str, Bug]:
    """Return the bugs of a file by id."""
    return {name: Bug(name, **fields) for name, fields in tomllib.loads(path.read_text()).items()}


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """Copy a checkout into a temporary folder, and make sure that tests there import the copy."""
    with TemporaryDirectory(prefix="kvflow-planted-") as folder:
        copy = Path(folder).resolve() / "copy"
        shutil.copytree(
            root, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__", "out", "dist", "build")
        )
        program = "import kvflow, handshake; print(kvflow.__file__, handshake.__file__)"
        found = python(copy, "-c", program).stdout.split()
        assert found == [f"{copy}/{package}/__init__.py" for package in ("kvflow", "handshake")], found
        yield copy


def python(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a copy. Its children import the copy, too."""
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        cwd=copy,
        env=environment(copy),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S_MAX,
    )


def run_tests(copy: Path, tests: Sequence[str], *options: str) -> tuple[int, list[str], str]:
    """Run tests in a copy; return the exit status, the tests that failed, and the output."""
    always = ("--quiet", "--tb=no", "-p", "no:cacheprovider", "-ofaulthandler_timeout=0")
    drawn = ("--hypothesis-seed=0", "--hypothesis-profile=unshrunk")  # shrinking takes as long as a hang
    done = python(copy, "-m", "pytest", *always, *drawn, f"-otimeout={TEST_S_MAX}", *options, *tests)
    return done.returncode, FAILED.findall(done.stdout), done.stdout


@contextmanager
def planted(bug: Bug, copy: Path, number: int) -> Iterator[None]:
    """Plant a bug in a copy, and remove it again.

    Raises:
        ValueError: the lines that it replaces are not there once.
    """
    path = copy / bug.file
    if not path.is_file():
        raise ValueError(f"{bug.file} is gone")
    text, status = path.read_text(), path.stat()
    count = f"\n{text}".count(f"\n{bug.old}")
    if count != 1:
        raise ValueError(f"{bug.file} has its lines {count} times, not once")
    path.write_text(f"\n{text}".replace(f"\n{bug.old}", f"\n{bug.new}")[1:])
    os.utime(path, (number, number))  # so that no compiled file of another bug is taken for this one
    try:
        yield
    finally:
        path.write_text(text)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def try_bug(bug: Bug, copy: Path, number: int, folders: Sequence[str] = ()) -> Outcome:
    """Plant a bug in a copy and run its test, or all tests of some folders."""
    started = time.monotonic()
    try:
        with planted(bug, copy, number):
            status, failed, output = run_tests(copy, folders or [bug.test], *(() if folders else ("-x",)))
    except ValueError as error:
        return Outcome(bug, "CANNOT BE PLANTED", str(error))
    except subprocess.TimeoutExpired:
        return Outcome(bug, "DID NOT END", bug.test, time.monotonic() - started)
    word = WORDS.get(status, "BROKE THE TESTS")
    detail = "\n     ".join(failed) if failed else bug.test if word in WORDS.values() else output[-2000:]
    return Outcome(bug, word, detail, time.monotonic() - started)


def try_all(
    root: Path, bugs: Sequence[Bug], *, jobs: int = 1, clean: bool = True, folders: Sequence[str] = ()
) -> Iterator[Outcome]:
    """Try bugs, each in a copy of the checkout; then run the tests that found them without a bug."""
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    tests = set()

    def try_one(numbered: tuple[int, Bug]) -> Outcome:
        copy = copies.get()
        try:
            return try_bug(numbered[1], copy, numbered[0], folders)
        finally:
            copies.put(copy)

    with copied(root) as first, TemporaryDirectory() as others, ThreadPoolExecutor(jobs) as threads:
        copies.put(first)
        for number in range(1, jobs):
            copies.put(Path(shutil.copytree(first, Path(others).resolve() / str(number), symlinks=True)))
        for outcome in threads.map(try_one, enumerate(bugs, 1)):
            tests |= {outcome.bug.test} if outcome.word == "found" else set()
            yield outcome
        if clean and tests and not folders:
            status, failed, output = run_tests(first, sorted(tests), f"--numprocesses={jobs if jobs > 1 else 0}")
            assert status in (0, 1), output
            for bug in bugs:
                if any(re.fullmatch(re.escape(bug.test) + r"(\[.*|::.*)?", each) for each in failed):
                    yield Outcome(bug, "TEST FAILS WITHOUT THE BUG", bug.test)


def reached_by(root: Path, copy: Path, suite: Suite) -> Reached:
    """Return what a suite executes without a bug; ``out/planted`` keeps it until a file changes.

    Raises:
        ValueError: the suite fails without a bug.
    """
    tree = hashlib.sha256(repr(suite[:3]).encode())
    for path in sorted(each for part in ("kvflow", "handshake", "tests") for each in copy.glob(f"{part}/**/*.py")):
        if path.parent.name != "planted":
            tree.update(path.read_bytes())
    file = root / "out" / "planted" / f"{suite.name}.json"
    if file.is_file() and (kept := json.loads(file.read_text()))["tree"] == tree.hexdigest():
        return Reached(kept["took_s"], kept["lines"])
    reached, ran = measure(copy, suite)
    print(f"{suite.name} without a bug: {ran.took_s:.0f} s with coverage, {finding(ran)}", flush=True)
    if ran.status != 0:
        raise ValueError(f"{suite.name} fails without a bug:\n{ran.output[-3000:]}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"tree": tree.hexdigest(), **reached._asdict()}))
    return reached


def run_suites(
    root: Path,
    bugs: Mapping[str, Bug],
    chosen: Sequence[Bug],
    suites: Sequence[Suite],
    path: Path,
    *,
    names: Sequence[str],
) -> None:
    """Run the suites of these names, or all, that have not run yet against the chosen bugs, and write the results."""
    results = read_results(path, bugs)
    write_results(path, results, suites)
    with copied(root) as copy:
        wanted = [suite for suite in suites if suite.name in (names or suite.name)]
        reached = {suite.name: reached_by(root, copy, suite) for suite in wanted}
        for number, bug in enumerate(chosen, 1):
            line = results[bug.name]
            for suite in wanted:
                if suite.name in line:
                    continue
                text, lines = (copy / bug.file).read_text(), reached[suite.name].parts(bug.file)
                if parts := reached[suite.name].in_order(parts_reaching(bug, text, lines)):
                    shutil.rmtree(copy / ".hypothesis", ignore_errors=True)  # examples of another bug
                    with planted(bug, copy, number):
                        ran = run_parts(copy, suite, parts)
                    line[suite.name] = finding(ran)
                    ran_s = f"{len(parts)} parts, {ran.took_s:.0f} s"
                    print(f"{bug.name:6} {suite.name}: {line[suite.name]} ({ran_s})", flush=True)
                else:
                    line[suite.name] = NOT_REACHED
            write_results(path, results, suites)


def main(
    arguments: Sequence[str] | None = None, *, root: Path = ROOT, bugs: Path = BUGS, suites: Sequence[Suite] = SUITES
) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "ids", nargs="*", metavar="ID", help="of the bugs to plant, or a part of their files' paths (default: all)"
    )
    parser.add_argument("--list", action="store_true", help="print the bugs and plant none")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="bugs at a time (default: %(default)s)")
    parser.add_argument("--no-clean", action="store_true", help="do not run the tests without a bug, too")
    parser.add_argument(
        "--all-tests", nargs="+", default=(), metavar="PATH", help="run all tests of these, not its own"
    )
    parser.add_argument(
        "--suites", nargs="*", choices=[suite.name for suite in suites], help="run these alone (default: all four)"
    )
    options = parser.parse_args(arguments)
    known = read_bugs(bugs)
    found = {
        each: [each] if each in known else [name for name in known if each in known[name].file] for each in options.ids
    }
    if unknown := sorted(each for each, names in found.items() if not names):
        parser.error(f"no bug is called {', '.join(unknown)}")
    chosen = [known[name] for name in dict.fromkeys(name for names in found.values() for name in names) or known]
    if options.list:
        print("\n".join(f"{bug.name:4} {bug.file}: {bug.breaks}" for bug in chosen))
        return 0
    if options.suites is not None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what runs is ended, too
        run_suites(root, known, chosen, suites, bugs.with_name(RESULTS.name), names=options.suites)
        return 0
    words = []
    for outcome in try_all(root, chosen, jobs=options.jobs, clean=not options.no_clean, folders=options.all_tests):
        print(outcome, flush=True)
        words.append(outcome.word)
    found_count = words.count("found")
    others = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words) if word != "found")
    print(f"{len(chosen)} bugs: {found_count} found{others and ', '}{others}")
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
