"""What the files around the code name exists: a pattern that matches nothing checks, packs and ignores nothing."""

import re
from pathlib import Path

from tests.conftest import SLOW, parts_of, pytest_collection_modifyitems
from tests.helpers.loops import looped

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"(?<![\w./-])(?:kvflow|handshake|tests|docs|docker)(?:[./](?:[\w*%-]+|\$\$\w+))*")
"""Paths and modules of this repository. Make writes ``%`` for any text, and ``$$page`` for a variable of a loop."""


def named(text: str) -> set[str]:
    """Return the paths and modules that a text names."""
    return set(NAMED.findall(text))


def exists(name: str) -> bool:
    """Return whether a path, a pattern, a module or a variable of a module is there; ``module:name`` is its module."""
    pattern = re.sub(r"%|\$\$\w+|\*\*", "*", name)
    module = pattern.replace(".", "/")
    owner = ROOT / f"{module.rpartition('/')[0]}.py"
    return any(any(ROOT.glob(each)) for each in (pattern, module, f"{module}.py")) or (
        owner.is_file() and f"\n{module.rpartition('/')[2]} = " in owner.read_text()
    )


@looped("path", ["pyproject.toml", "Makefile", ".dockerignore", ".ci/run", "docker/Dockerfile"])
def test_every_path_and_module_that_a_file_names_exists(path):
    found = named((ROOT / path).read_text())
    assert found
    assert {name for name in found if not exists(name)} == set()


def test_paths_that_are_gone_are_found():
    text = '"tests/**" = 1\n!docker/gone.sh\npython -m tests.docs.$$page\n"kvflow.transfer.bind", "kvflow:main"\n'
    assert named(text) == {"tests/**", "docker/gone.sh", "tests.docs.$$page", "kvflow.transfer.bind", "kvflow"}
    assert {name for name in named(text) if not exists(name)} == {"docker/gone.sh", "kvflow.transfer.bind"}


def test_every_slow_test_and_each_of_its_cases_that_make_test_runs_exists(request):
    """The cases: of the files that this run has collected. ``make test`` and ``make test-full`` collect all."""
    collected = {}
    for item in request.session.items:
        collected.setdefault(str(item.path.relative_to(ROOT / "tests")), set()).add(parts_of(item))
    for test, cases in SLOW.items():
        path, _, name = test.partition("::")
        assert (ROOT / "tests" / path).exists(), test
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(), test
        if path in collected:
            assert {(name, case) for case in cases} <= collected[path], test


class Item:
    """A test, as pytest collects it."""

    def __init__(self, path, name):
        self.path, self.name, self.marks = ROOT / "tests" / path, name, []
        self.add_marker = self.marks.append


def test_make_test_runs_each_new_test_and_each_case_that_is_named():
    places = [(*test.split("::"), cases) for test, cases in SLOW.items()]
    quick = [Item(path, "test_that_is_new") for path, _, _ in places]
    quick += [Item(path, f"{name}[{case}]") for path, name, cases in places for case in cases]
    slow = [Item(path, f"{name}[{case}]" if case else name) for path, name, _ in places for case in ("", "new")]
    pytest_collection_modifyitems([*quick, *slow])
    assert [each.name for each in quick if "slow" in each.marks] == []
    assert [each.name for each in slow if "slow" not in each.marks] == []
