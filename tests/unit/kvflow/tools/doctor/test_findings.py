"""Findings: their codes, what they are printed as, and the exit status that follows."""

import re

from kvflow.errors import AuthenticationFailed, FailureCode
from kvflow.tools.cli.doctor import line_of
from kvflow.tools.doctor.codes import CODES, Finding, exit_status, failure, found, ok, summarized
from tests.helpers.loops import looped


def of(*statuses):
    return summarized(Finding(status=status, subject="memlock", evidence="8 MiB", remedy="") for status in statuses)


@looped("code", CODES.values())
def test_a_code_has_a_remedy(code):
    assert re.fullmatch("[a-z]+(_[a-z]+)*", code.name)
    assert code.meaning
    assert code.remedy
    assert code.status != "ok"


def test_codes_of_errors_are_not_used_for_something_else():
    assert set(CODES) & set(FailureCode) <= {"transfer_failed"}  # of an engine: the error that it reports


@looped(
    "statuses, strict, status",
    [
        ((), False, 0),
        (("ok", "note"), True, 0),
        (("ok", "warning"), False, 0),
        (("ok", "warning"), True, 1),
        (("warning", "failed", "ok"), False, 1),
    ],
)
def test_the_exit_status_follows_from_what_failed(statuses, strict, status):
    figures = of(*statuses)
    assert exit_status(figures, strict=strict) == status
    assert (figures.failed, figures.warnings) == (statuses.count("failed"), statuses.count("warning"))


def test_a_finding_has_status_and_remedy_of_its_code():
    finding = found("memlock_low", "memlock", "8 MiB")
    assert (finding.status, finding.remedy) == ("warning", CODES["memlock_low"].remedy)
    assert found("memlock_low", "memlock", "8 MiB", status="note", remedy="Wait.").remedy == "Wait."


def test_an_error_keeps_its_code_and_remedy():
    finding = failure(AuthenticationFailed("no"), "worker")
    assert (finding.code, finding.status) == ("authentication_failed", "failed")
    assert "KVFLOW_CLUSTER_SECRET" in finding.remedy


def test_what_is_wrong_is_printed_with_code_and_remedy():
    assert line_of(ok("memlock", "unlimited")) == "ok       memlock: unlimited"
    first, second = line_of(found("memlock_low", "memlock", "8 MiB")).splitlines()
    assert first == "WARNING  memlock: 8 MiB [memlock_low]"
    assert second.strip() == CODES["memlock_low"].remedy


def test_what_a_peer_says_moves_no_cursor():
    lines = line_of(found("port_taken", "a\x1b[2Jb", "c\nd")).splitlines()
    assert len(lines) == 2
    assert "\x1b" not in lines[0]
