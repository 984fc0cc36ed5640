"""The command that plants bugs tells what it found, and fails if a bug survives or cannot be planted or tried."""

import re
from pathlib import Path

import pytest

from .__main__ import BUGS, ROOT, copied, main, python, read_bugs

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
        ("tests/test_sums.py", TESTS),
        ("pyproject.toml", (ROOT / "pyproject.toml").read_text()),
    ):
        path = tmp_path / "tree" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "tree"


def told(tree, capsys, bugs, *arguments):
    """Run the command with these bugs; return its exit status, what became of each bug, and all of its output."""
    file = tree.parent / "bugs.toml"
    file.write_text(bugs)
    status = main([*arguments, "--jobs=1"], root=tree, bugs=file)
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


def test_each_bug_of_this_repository_can_be_planted():
    for bug in read_bugs(BUGS).values():
        count = f"\n{(ROOT / bug.file).read_text()}".count(f"\n{bug.old}")
        assert count == 1, f"{bug.name} of bugs.toml: its lines are {count} times in {bug.file}: write the new lines"
        file, _, test = bug.test.partition("::")
        there = (ROOT / file).is_file() and f"def {test.partition('[')[0]}(" in (ROOT / file).read_text()
        assert there, f"{bug.name} of bugs.toml: {bug.test} is gone"
        assert bug.old != bug.new
