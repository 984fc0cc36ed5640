"""The output of the doctor in docs/howto/debug.md has codes and remedies as the doctor prints them."""

import re

from kvflow.errors import FailureCode
from kvflow.tools.doctor.codes import CODES

from .pages import blocks

[SHOWN] = blocks("docs/howto/debug.md", "")
MARKS = "ok|note|WARNING|FAILED"


def test_findings_are_shown_with_codes_and_remedies_that_exist():
    lines = [line for line in SHOWN.strip().splitlines() if line]
    assert re.fullmatch(r"\d+ findings?: \d+ failed, \d+ warnings?", lines.pop())
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith(("WARNING", "FAILED")):
            assert re.search(r"\[(\w+)\]$", line)[1] in {*CODES, *map(str, FailureCode)}
            assert re.match(r" {9}\S.*\.$", after), f"{line} has no remedy"
        else:
            assert re.match(rf"({MARKS}) +\S| {{9}}\S", line)
