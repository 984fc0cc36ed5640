"""What the doctor reports: a finding has a stable code, the evidence, and a remedy."""

from collections.abc import Iterable

from msgspec import Struct

from kvflow.errors import KvflowError
from kvflow.tools.doctor.codes import CODES, Status

REFUSED = 1
"""Exit status if something failed; 2 says that the command line is wrong."""


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that was examined.

    Attributes:
        code: stable name of what someone may have to act on: one of ``CODES``, or of ``kvflow.errors.FailureCode``;
            empty for what is as it must be, and for a plain fact.
        status: ``ok``: as it must be. ``note``: a fact that may matter. ``warning``: kvflow runs, and is slower or less
            safe than it could be. ``failed``: kvflow does not run, or does not move bytes.
        subject: what was examined: a package, a limit, an address, a worker.
        evidence: what was seen there.
        remedy: what to do; empty for what is as it must be.
    """

    code: str = ""
    status: Status
    subject: str
    evidence: str
    remedy: str = ""


class Findings(Struct, frozen=True, kw_only=True):
    """What ``kvflow doctor --json`` prints.

    Attributes:
        findings: in the order in which they were examined.
        failed: how many of them failed.
        warnings: how many of them warn.
    """

    findings: tuple[Finding, ...]
    failed: int
    warnings: int


def found(code: str, subject: str, evidence: str, *, remedy: str = "", status: Status | None = None) -> Finding:
    """Return a finding with the status and the remedy that its code has.

    Args:
        code: one of ``CODES``.
        subject: what was examined.
        evidence: what was seen.
        remedy: replaces that of the code, where more is known.
        status: replaces that of the code, where the case decides it.
    """
    known = CODES[code]
    return Finding(
        code=code, status=status or known.status, subject=subject, evidence=evidence, remedy=remedy or known.remedy
    )


def ok(subject: str, evidence: str) -> Finding:
    """Return what is as it must be."""
    return Finding(status="ok", subject=subject, evidence=evidence)


def note(subject: str, evidence: str, *, remedy: str = "") -> Finding:
    """Return a fact that may matter."""
    return Finding(status="note", subject=subject, evidence=evidence, remedy=remedy)


def failure(error: KvflowError, subject: str) -> Finding:
    """Return an error of kvflow as a finding, with the code and the remedy of the error."""
    return Finding(code=str(error.code), status="failed", subject=subject, evidence=error.message, remedy=error.remedy)


def summarized(findings: Iterable[Finding]) -> Findings:
    """Count what was found."""
    listed = tuple(findings)
    counts = {status: sum(each.status == status for each in listed) for status in ("failed", "warning")}
    return Findings(findings=listed, failed=counts["failed"], warnings=counts["warning"])


def exit_status(findings: Findings, *, strict: bool = False) -> int:
    """Return 1 if something failed, or with ``strict`` if something warns; otherwise 0."""
    return REFUSED if findings.failed or (strict and findings.warnings) else 0
