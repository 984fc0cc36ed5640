"""The changelog has the form of Keep a Changelog."""

import re

import kvflow

from .pages import ROOT

LINES = (ROOT / "CHANGELOG.md").read_text().splitlines()
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def test_releases_have_versions_and_dates_newest_first():
    first, *releases = [line.removeprefix("## ") for line in LINES if line.startswith("## ")]
    assert first == "[Unreleased]"
    found = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d\d-\d\d", release) for release in releases]
    assert all(found)
    versions = [tuple(map(int, match.groups())) for match in found]
    assert versions == sorted(versions, reverse=True)
    assert releases[0].startswith(f"[{kvflow.__version__}] ")


def test_sections_have_the_names_of_the_format_in_its_order():
    release = []
    for line in [*LINES, "## end"]:
        if line.startswith("## "):
            assert release == sorted(release, key=KINDS.index)
            assert len(release) == len(set(release))
            release = []
        elif line.startswith("### "):
            release.append(line.removeprefix("### "))
