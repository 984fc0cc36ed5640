"""docs/howto/gpus.md has people carry the wheels that a machine with a GPU, and without a network, lacks."""

import re
from importlib import metadata
from pathlib import Path

import pytest
from pip._vendor.packaging.requirements import Requirement

from tests.gpu import requirements

from .pages import section

FOLDER = Path("/gpu-site")
REAL = metadata.distribution
ROUNDS = 5
"""The Makefile asks so often what is missing: what it has installed may lack something."""


def plain(name):
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


SECTION = section("docs/howto/gpus.md", "Test")


def carried():
    """The packages of the command that fetches wheels, without their pins."""
    command = re.search(r"^pip download .*?--dest wheels (.*?)$(?<!\\)", SECTION, re.MULTILINE | re.DOTALL)
    return {plain(word.partition("==")[0]) for word in command[1].split() if word != "\\"}


def there():
    """The packages that the machine has, as the page says, with all that they require."""
    (names,) = re.findall(r"for a machine\s+that has (.*?):", SECTION, re.DOTALL)
    left, found = re.findall(r"`([\w-]+)`", names), set()
    while left:
        if (name := plain(left.pop())) not in found:
            found.add(name)
            needed = map(Requirement, metadata.requires(name) or [])
            left += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


class Installed:
    """A package of the machine, or of the folder into which the wheels go."""

    def __init__(self, name, folder):
        real = REAL(name)
        self.version, self.requires, self._folder = real.version, real.requires, folder

    def locate_file(self, _path):
        return self._folder


def install(monkeypatch, wheels):
    """Install as ``make test-gpu`` does, from these wheels; return what was installed.

    Raises:
        AssertionError: something is missing for which there is no wheel.
    """
    machine, installed = there(), set()

    def distribution(name):
        if plain(name) in machine:
            return Installed(name, Path("/machine"))
        if plain(name) in installed:
            return Installed(name, FOLDER)
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(requirements.metadata, "distribution", distribution)
    monkeypatch.setattr(requirements, "variant", lambda: "nixl-cu13")
    for _ in range(ROUNDS):
        lacking = {plain(Requirement(each).name) for each in requirements.missing(requirements.ASKED, FOLDER)}
        assert lacking <= wheels, f"docs/howto/gpus.md names no wheel of {sorted(lacking - wheels)}"
        if not lacking:
            return installed
        installed |= lacking
    raise AssertionError("the Makefile asks no more often")


def test_the_wheels_are_what_the_machine_lacks(monkeypatch):
    assert install(monkeypatch, carried()) == carried(), "the page names a wheel too many"


@pytest.mark.parametrize("name", ["cryptography", "cffi", "pycparser"])
def test_a_wheel_that_the_page_lacks_is_named(monkeypatch, name):
    with pytest.raises(AssertionError, match=rf"names no wheel of \['{name}'\]"):
        install(monkeypatch, carried() - {name})
