# ruff: noqa: T201 - standard output is its answer
"""Print what ``make test-gpu`` installs: the dependencies of kvflow, and those of its tests."""

import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())

if __name__ == "__main__":
    print(*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["test"], sep="\n")
