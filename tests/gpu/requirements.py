# ruff: noqa: T201 - standard output is its answer
"""Print which packages ``make test-gpu`` must install: those of kvflow and its tests that this Python does not have.

Of NIXL it needs one variant only, that of torch's CUDA: ``nixl`` requires both, which are 118 MB.
"""

import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
ASKED = [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["test"]]


def variant() -> str:
    """Return the package of NIXL for the torch that is installed."""
    from torch import version

    if version.hip:
        return "nixl-rocm"
    return "nixl-cu12" if (version.cuda or "").startswith("12.") else "nixl-cu13"


def missing(asked: list[str], folder: Path) -> Iterator[str]:
    """Yield what is not installed, or too old. Only packages in ``folder`` may lack what they require themselves."""
    for requirement in map(Requirement, asked):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name == "nixl":
            requirement.name = variant()
        try:
            found = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            yield f"{requirement.name}{requirement.specifier}"
            continue
        if not requirement.specifier.contains(found.version, prereleases=True):
            yield f"{requirement.name}{requirement.specifier}"
        elif Path(str(found.locate_file(""))).resolve() == folder.resolve():
            yield from missing(found.requires or [], folder)


if __name__ == "__main__":
    print(*dict.fromkeys(missing(ASKED, Path(sys.argv[1]))), sep="\n", end="")
