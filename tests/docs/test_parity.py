"""The page that compares connectors names the test of each claim: these are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "vllm-parity.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))
VERDICTS = {"has", "lacks", "otherwise"}


def test_every_row_says_has_lacks_or_otherwise():
    capabilities = [line for line in PAGE.splitlines() if line.startswith("| ") and line.count("|") >= 4]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in capabilities]
    verdicts = [row[1] for row in cells if row[0] not in ("capability", "NixlConnector")]
    assert len(verdicts) > 40
    assert set(verdicts) <= VERDICTS


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_test_that_is_named_is_there(path, name):
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), name


def test_what_is_there_is_shown_by_a_test():
    unshown = [line for line in PAGE.splitlines() if re.search(r"\| has \|.*\|\s*\|$", line)]
    assert not unshown
