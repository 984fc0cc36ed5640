"""Every error has a stable code of its own, a remedy, and a text that ends with it."""

import ast
import inspect
from pathlib import Path

import pytest

import kvflow
from kvflow import errors
from kvflow.errors import FailureCode, KvflowError, shown
from tests.helpers.loops import looped

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, KvflowError)]
CODES = {
    "argument_invalid",
    "authentication_failed",
    "block_ids_invalid",
    "block_range_mismatch",
    "capacity_exceeded",
    "config_invalid",
    "content_mismatch",
    "deadline_exceeded",
    "defect_found",
    "forked_process",
    "kvflow_error",
    "layout_mismatch",
    "peer_lost",
    "peer_refused",
    "peer_unavailable",
    "plan_unsound",
    "protocol_violation",
    "release_mismatch",
    "request_unknown",
    "spec_invalid",
    "stale_lease",
    "ticket_invalid",
    "transfer_cancelled",
    "transfer_failed",
    "transport_unavailable",
    "worker_closed",
    "worker_suspended",
    "worker_draining",
    "wrong_event_loop",
}
CAUSES = {
    "bounds",
    "cancelled",
    "closing",
    "key_removed",
    "metadata_invalid",
    "peer_closed",
    "plane_unfit",
    "program_unknown",
    "transport_error",
}
UNIQUE_CAUSES = CAUSES - {"bounds", "cancelled", "closing"}
"""Causes whose text names nothing else, such as a stage of a worker."""
ARGUMENTS = {
    errors.ArgumentInvalid: ("priority", "an integer", None),
    errors.RequestUnknown: ("request-1",),
    errors.ReleaseMismatch: ("the ticket", "ticket format", "kvf2", "kvf3"),
    errors.LayoutMismatch: ("a.k.dtype", "float16", "int8"),
    errors.CapacityExceeded: ("leases", 3),
    errors.PeerRefused: ("version_unsupported", "too old"),
}


def made(kind, **fields):
    return kind(*ARGUMENTS.get(kind, ("what happened",)), **fields)


@looped("kind", ALL)
def test_each_has_a_code_a_remedy_and_a_place_in_the_tree(kind):
    error = made(kind)
    assert issubclass(kind, KvflowError)
    assert kind is KvflowError or error.remedy
    assert f"[{kind.code}]" in str(error)
    assert str(error).endswith(error.remedy or "]")
    assert kind.__name__ in errors.__doc__


def test_codes_are_unique_and_do_not_change():
    """Programs branch on them: one that changes breaks those programs."""
    codes = [kind.code for kind in ALL]
    assert len(set(codes)) == len(codes)
    assert set(codes) == CODES
    assert {*FailureCode} == CODES | CAUSES


def test_a_code_is_shown_as_its_text():
    assert f"{FailureCode.STALE_LEASE} {FailureCode.STALE_LEASE!r}" == "stale_lease 'stale_lease'"


def test_the_package_compares_codes_by_name_and_not_by_text():
    """A literal that is misspelled is a branch that is never taken."""
    found = []
    for path in sorted(Path(kvflow.__file__).parent.rglob("*.py")):
        if path.name == "errors.py":
            continue
        literals = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        found += [f"{path.name}:{node.lineno} {node.value}" for node in literals if node.value in CODES | UNIQUE_CAUSES]
    assert found == []


@looped("kind", [kind for kind in ALL if kind is not errors.RequestUnknown])
def test_a_better_remedy_replaces_the_default(kind):
    assert str(made(kind, remedy="Do this instead.")).endswith("Do this instead.")


@looped("kind", [kind for kind in ALL if issubclass(kind, errors.TransferFailed)])
def test_a_failed_transfer_says_whose_it_was_and_whether_blocks_must_wait(kind):
    error = kind("what happened", request_id="r", peer="p/0/x", quarantined=True)
    assert (error.request_id, error.peer, error.quarantined) == ("r", "p/0/x", True)
    assert not kind("what happened").quarantined


HOSTILE = "\x1b]0;PWNED\x07\x1b[2J\nkvflow: all is well\u202e\u2028\ud800"


@pytest.mark.parametrize("part", ["message", "remedy"])
def test_what_a_peer_says_is_one_printable_line(part):
    error = errors.PeerLost(**{"message": "m", "peer": "p", part: HOSTILE})
    assert str(error).isprintable()
    assert HOSTILE.encode("unicode_escape").decode() in str(error)


def test_what_can_be_printed_stays_as_it_is():
    assert str(errors.PeerLost("é 漢字 \\x1b", peer="p", remedy="r")) == "é 漢字 \\x1b [peer_lost] r"


def test_typed_attributes():
    mismatch = errors.LayoutMismatch("a.k.head_size", 64, 128)
    assert (mismatch.field, mismatch.source, mismatch.target) == ("a.k.head_size", 64, 128)
    assert "source has 64, target has 128" in str(mismatch)
    full = errors.CapacityExceeded("leases", 3)
    assert (full.resource, full.limit) == ("leases", 3)
    assert errors.BlockIdsInvalid("x", group=2).group == errors.BlockRangeMismatch("x", group=2).group == 2
    assert errors.DeadlineExceeded("x", phase="wire").phase == "wire"
    assert errors.PeerRefused("busy", "x").refusal == "busy"
    assert errors.RequestUnknown("r").request_id == "r"


@looped(
    "found, text",
    [
        (-1.0, "-1.0"),
        (1 << 40, "1099511627776"),
        (None, "None"),
        (b"", "empty"),
        (["secret"], "a list of length 1"),
        ("a secret", "str"),
        ({"secret": 1}, "dict"),
    ],
)
def test_an_argument_is_shown_only_if_it_cannot_be_secret(found, text):
    assert errors.ArgumentInvalid("name", "another", found).message == f"name must be another, not {text}"


def test_a_number_of_any_size_is_shown_in_short():
    assert shown(-12) == "-12"
    assert len(shown(10**1000)) <= 40
    assert shown(10**5000) == "<a number of 16,610 bits>"
    assert "[<a number of 16,610 bits>" in shown([10**5000])
