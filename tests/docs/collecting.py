# ruff: noqa: T201 - standard output is its answer
"""Which tests of real engines a run starts, as pytest collects them; vLLM need not be installed.

    python -m tests.docs.collecting usual|full FILE ...

prints JSON: test -> the pairs of engines that it starts, or an empty text where it takes none.
"""

import importlib.abc
import importlib.machinery
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RUNS = ("usual", "full")
"""Values of ``KVFLOW_TEST_VLLM``: those of ``make test-vllm`` and ``make test-vllm-full``."""

ABSENT = ("openai", "tokenizers", "transformers", "vllm")
"""Packages of the engines' environment, which tests name at their top and use when they run."""


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is not installed; each name of it is an empty class."""

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find it, if nobody else has."""
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Make up its names."""
        module.__getattr__ = lambda name: type(name, (), {})  # type: ignore[method-assign]


class Started:
    """Notes what would run: what is skipped from the start, as with an empty list of pairs, would not."""

    def __init__(self) -> None:
        self.tests: dict[str, list[str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note every test."""
        for item in session.items:
            assert isinstance(item, pytest.Function)
            if item.get_closest_marker("skip") or any(mark.args[0] for mark in item.iter_markers("skipif")):
                continue
            params = item.callspec.params if hasattr(item, "callspec") else {}
            name = f"{item.path.relative_to(ROOT / 'tests')}::{item.originalname}"
            self.tests.setdefault(name, []).append(params.get("pair", ""))


@cache
def started(run: str, files: Iterable[str]) -> dict[str, list[str]]:
    """Return what a run starts of files of ``tests``, ``vllm/FILE``: ``vllm/FILE::TEST`` -> pairs of engines."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.collecting", run, *files],
        cwd=ROOT,
        env={**os.environ, "KVFLOW_TEST_VLLM": run, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    tests: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return tests


def main(run: str, files: Sequence[str]) -> int:
    """Collect, and print what was found. The exit status is that of pytest."""
    assert os.environ.get("KVFLOW_TEST_VLLM") == run in RUNS
    sys.meta_path.append(Absent())
    found, folder = Started(), ROOT / "tests" / "vllm"
    # The folder is collected, and not these files: what a run leaves out would come with its name.
    others = [f"--ignore={path}" for path in folder.glob("test_*.py") if f"vllm/{path.name}" not in files]
    status = pytest.main(["--collect-only", "--quiet", "-p", "no:cacheprovider", str(folder), *others], plugins=[found])
    print(json.dumps(found.tests))
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
