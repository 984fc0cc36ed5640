"""The command that plants bugs tells what it found, and fails if a bug survives or cannot be planted or tried."""

import ast
import json
import re
import shutil
import time
from pathlib import Path

import pytest

from .__main__ import BUGS, ROOT, Bug, copied, main, python, read_bugs
from .suites import (
    EVERY_PART,
    PYTEST,
    RESULTS,
    TABLE,
    Reached,
    Suite,
    changed_lines,
    killed_by,
    measure,
    parts_reaching,
    run_parts,
    run_suite,
)

SUMS = "def add(a, b):\n    return a + b\n"
TESTS = """
from kvflow.sums import add
def test_nothing(): pass
def test_add(): assert add(2, 3) == 5
def test_more(): assert add(1, 1) == 2
def test_always_fails(): assert add(2, 2) == 5
"""
BUG = """
[{name}]
file = "kvflow/sums.py"
breaks = "Sums are wrong."
test = "tests/test_sums.py::{test}"
old = '''
    return a + b
'''
new = '''
    return a - b
'''
"""


@pytest.fixture
def tree(tmp_path):
    """A checkout in small, with a file of bugs."""
    for file, text in (
        ("kvflow/__init__.py", ""),
        ("kvflow/sums.py", SUMS),
        ("handshake/__init__.py", ""),
        ("tests/conftest.py", "import hypothesis\nhypothesis.settings.register_profile('unshrunk')\n"),
        ("tests/test_sums.py", TESTS),
        ("pyproject.toml", (ROOT / "pyproject.toml").read_text()),
    ):
        path = tmp_path / "tree" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "tree"


def told(tree, capsys, bugs, *arguments, **options):
    """Run the command with these bugs; return its exit status, what became of each bug, and all of its output."""
    file = tree.parent / "bugs.toml"
    file.write_text(bugs)
    status = main(["--jobs=1", *arguments], root=tree, bugs=file, **options)
    output = capsys.readouterr().out
    return status, re.findall(r"^(\w+) +(.+) \(\d+ s\)$", output, re.MULTILINE), output


def test_a_bug_is_found_by_the_test_that_is_named(tree, capsys):
    status, words, output = told(tree, capsys, BUG.format(name="A1", test="test_add"))
    assert (status, words) == (0, [("A1", "found")])
    assert "Sums are wrong." in output
    assert "tests/test_sums.py::test_add" in output
    assert (tree / "kvflow/sums.py").read_text() == SUMS


def test_bugs_that_survive_and_tests_that_fail_anyway_are_told(tree, capsys):
    bugs = BUG.format(name="A1", test="test_nothing") + BUG.format(name="A2", test="test_always_fails")
    status, words, output = told(tree, capsys, bugs)
    assert status == 1
    assert words == [("A1", "SURVIVED"), ("A2", "found"), ("A2", "TEST FAILS WITHOUT THE BUG")]
    assert "2 bugs: 1 found, 1 SURVIVED, 1 TEST FAILS WITHOUT THE BUG" in output


def test_bugs_whose_lines_or_tests_are_gone_are_told(tree, capsys):
    gone, twice = (BUG.format(name=name, test="test_add") for name in ("A1", "A2"))
    bugs = gone.replace("a + b", "a * b") + twice + BUG.format(name="A3", test="test_gone")
    (tree / "kvflow/sums.py").write_text(2 * SUMS)
    status, words, output = told(tree, capsys, bugs.replace("a - b", "a"), "A1", "A2")
    assert (status, words) == (1, [("A1", "CANNOT BE PLANTED"), ("A2", "CANNOT BE PLANTED")])
    assert "kvflow/sums.py has its lines 0 times" in output
    assert "kvflow/sums.py has its lines 2 times" in output
    (tree / "kvflow/sums.py").write_text(SUMS)
    assert told(tree, capsys, bugs, "A3")[:2] == (1, [("A3", "TEST IS GONE")])


def test_all_tests_that_find_a_bug_are_searched(tree, capsys):
    status, _, output = told(tree, capsys, BUG.format(name="A1", test="test_gone"), "A1", "--all-tests", "tests")
    assert status == 0
    assert re.findall(r"::(\w+)", output) == ["test_add", "test_more", "test_always_fails"]


def test_children_of_a_test_import_the_copy(tree):
    with copied(tree) as copy:
        program = (
            "import subprocess, sys; subprocess.run([sys.executable, '-Pc', 'import kvflow; print(kvflow.__file__)'])"
        )
        assert Path(python(copy, "-c", program).stdout.strip()) == copy / "kvflow" / "__init__.py"
        assert copy != tree


def is_test(name, text):
    """Tell whether a file has a test of this name: a function, or the test case of a state machine."""
    machine, _, method = name.partition("::")
    return f"def {name}(" in text or (method == "runTest" and f"\n{machine} = " in text)


def test_each_bug_of_this_repository_can_be_planted():
    for bug in read_bugs(BUGS).values():
        text = f"\n{(ROOT / bug.file).read_text()}"
        count = text.count(f"\n{bug.old}")
        if bug.file.endswith(".py"):
            ast.parse(text.replace(f"\n{bug.old}", f"\n{bug.new}"), bug.name)  # otherwise any test finds it
        assert count == 1, f"{bug.name} of bugs.toml: its lines are {count} times in {bug.file}: write the new lines"
        file, _, test = bug.test.partition("::")
        there = (ROOT / file).is_file() and is_test(test.partition("[")[0], (ROOT / file).read_text())
        assert there, f"{bug.name} of bugs.toml: {bug.test} is gone"
        assert bug.old != bug.new


def copy_plugin(tree):
    """Copy what tests of suites need."""
    (tree / "tests/planted").mkdir()
    for file in ("tests/conftest.py", "tests/planted/parts.py"):
        shutil.copy(ROOT / file, tree / file)


@pytest.fixture
def told_by_suites(tree, capsys):
    """A function that runs two suites in small; it returns what was printed, the results by bug, and the page."""
    two = [Suite(name, (*PYTEST, f"tests/test_{name}.py")) for name in ("sums", "nothing")]
    copy_plugin(tree)
    (tree / "kvflow/sums.py").write_text(SUMS + "\n\ndef subtract(a, b):\n    return b - a\n")
    (tree / "tests/test_sums.py").write_text("from kvflow.sums import add\ndef test_add(): assert add(2, 3) == 5\n")
    (tree / "tests/test_nothing.py").write_text("import kvflow.sums\ndef test_nothing(): pass\n")

    def run(bugs, *arguments):
        status, _, output = told(tree, capsys, bugs, *arguments, suites=two)
        assert status == 0
        results = map(json.loads, (tree.parent / RESULTS.name).read_text().splitlines())
        return output, {each["bug"]: each for each in results}, (tree.parent / TABLE.name).read_text()

    return run


def test_suites_say_which_bugs_each_finds_alone_and_go_on(told_by_suites):
    bug, other = (BUG.format(name=name, test="test_add") for name in ("A1", "A2"))
    other = other.replace("return a + b", "return b - a").replace("return a - b", "return a - a")
    output, results, page = told_by_suites(bug + other, "A1", "--suites", "sums")
    assert "A1     sums: tests/test_sums.py::test_add" in output
    assert results["A1"]["sums"] == "tests/test_sums.py::test_add"
    assert {"sums", "nothing"} & results["A2"].keys() == set()
    assert "| A1 | kvflow/sums.py | yes |  |" in page

    output, results, page = told_by_suites(bug + other, "--suites")
    assert "A1     sums" not in output  # it has run
    assert results["A1"]["nothing"] == results["A2"]["sums"] == "not reached"
    assert "| A1 | kvflow/sums.py | yes | not reached |" in page
    assert "Of 2 bugs the suites find 1 (sums 1, nothing 0), and miss 1." in page
    assert "- kvflow/sums.py: A2" in page

    results = told_by_suites(bug.replace("a - b", "a * b") + other, "A2", "--suites")[1]
    assert "sums" not in results["A1"]  # an entry that has changed counts as not run


def test_a_suite_that_fails_without_a_bug_is_told(tree, told_by_suites):
    (tree / "tests/test_sums.py").write_text("import kvflow.sums\ndef test_add(): assert False\n")
    with pytest.raises(ValueError, match=r"sums fails without a bug:[\s\S]*test_add"):
        told_by_suites(BUG.format(name="A1", test="test_add"), "--suites")


def test_a_suite_ends_with_its_children_when_its_time_is_over(tmp_path):
    endless = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print(child.pid, flush=True)
while True: pass
"""
    ran = run_suite(tmp_path, Suite("endless", ("-c", endless)), most_s=0.5)
    assert ran.status is None
    ended = Path(f"/proc/{int(ran.output)}/stat")
    while ended.exists() and ended.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)


def test_lines_that_a_bug_changes_are_reached_if_their_statement_is():
    text = """VALUE = 1


def half(n):
    if n > (
        3
    ):
        return 0
    else:
        return (
            n
            + 1
        )
"""

    def bug(old, new=""):
        return Bug("A1", "kvflow/x.py", "", "", old, new)

    assert changed_lines(text, "    if n > (\n        3\n", "    if n > (\n        4\n") == {6}
    assert changed_lines(text, "        return 0\n", "        n = 1\n        return 0\n") == {7, 8}
    imported = {1: {EVERY_PART}, 4: {EVERY_PART}}

    def reaching(bug, *lines):
        return parts_reaching(bug, text, imported | {line: {"a part"} for line in lines})

    for old, new, lines in (
        ("        3\n", "        4\n", {5}),  # the head of a condition
        ("            + 1\n", "", {10}),  # the last line of a statement
        ("    else:\n", "    elif n:\n", {5}),  # between two branches
    ):
        assert reaching(bug(old, new), *lines) == {"a part"}, old
    assert reaching(bug("VALUE = 1\n", "VALUE = 2\n")) == {EVERY_PART}
    assert reaching(bug("def half(n):\n", "def half(n=1):\n")) == {EVERY_PART}
    assert reaching(bug("        return 0\n"), 5, 10) == set()
    assert reaching(bug("            + 1\n"), 5, 8) == set()


def test_the_shortest_part_that_executes_a_line_is_first(tree):
    copy_plugin(tree)
    (tree / "tests/test_sums.py").write_text("""
import subprocess, sys, time
import pytest
from kvflow.sums import add

@pytest.fixture(scope="module")
def shared(): return add(1, 2)

def test_shared(shared): pass
def test_slow(): time.sleep(0.2), half()
@pytest.mark.parametrize("n", [1, 2])
def test_fast(n): half()
def test_child(): subprocess.run([sys.executable, "-c", "from kvflow.sums import third; third()"], check=True)
def half():
    from kvflow.sums import half
    half()
""")
    (tree / "kvflow/sums.py").write_text(SUMS + "def half():\n    pass\ndef third():\n    pass\n")
    suite = Suite("sums", (*PYTEST, "tests/test_sums.py"))
    reached, ran = measure(tree, suite)
    assert ran.status == 0, ran.output
    lines = reached.parts("kvflow/sums.py")
    assert lines[2] == {EVERY_PART}
    assert lines[6] == {"tests/test_sums.py::test_child"}
    fast = {f"tests/test_sums.py::test_fast[{n}]" for n in (1, 2)}
    assert lines[4] == {"tests/test_sums.py::test_slow", *fast}
    parts = reached.in_order(lines[4])
    assert parts[-1] == "tests/test_sums.py::test_slow"
    assert "3 passed" in run_parts(tree, suite, parts).output
    assert len(reached.in_order({EVERY_PART})) == 5
    assert Reached({}, {}).parts("kvflow/sums.py") == {}


def test_the_page_says_what_the_suites_have_found():
    assert TABLE.read_text() == killed_by(RESULTS), "run python -m tests.planted --suites"
