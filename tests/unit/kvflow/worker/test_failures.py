"""Which error a caller gets for which code, and that it knows request, peer and quarantine."""

import pytest

from kvflow import errors, events
from kvflow.worker.connections import ERRORS, connection_error, transfer_error
from tests.helpers.loops import looped


def failed(code, phase="wire", *, quarantined=False):
    return events.PullFailed(7, "request-1", code, phase, "p/0/x", "what happened", quarantined=quarantined)


KINDS = {
    "stale_lease": errors.StaleLease,
    "peer_lost": errors.PeerLost,
    "peer_closed": errors.PeerLost,
    "transfer_cancelled": errors.TransferCancelled,
    "cancelled": errors.TransferCancelled,
    "closing": errors.TransferCancelled,
    "key_removed": errors.PeerLost,
    "metadata_invalid": errors.ProtocolViolation,
    "bounds": errors.ProtocolViolation,
    "protocol_violation": errors.ProtocolViolation,
}
OTHERS = {
    "deadline_exceeded": errors.DeadlineExceeded,
    "transport_error": errors.TransferFailed,
    "a code of a newer transport": errors.TransferFailed,
}


@looped("code, kind", [*KINDS.items(), *OTHERS.items()])
@looped("quarantined", [True, False])
def test_errors(code, kind, quarantined):
    error = transfer_error(failed(code, quarantined=quarantined))
    assert type(error) is kind
    assert (error.request_id, error.peer, error.quarantined) == ("request-1", "p/0/x", quarantined)
    assert error.message == "request 'request-1': what happened"


def test_the_table_is_tested():
    assert ERRORS.keys() == KINDS.keys()


@pytest.mark.parametrize("phase", ["queue", "wire", "fence"])
def test_a_deadline_names_its_phase(phase):
    assert transfer_error(failed("deadline_exceeded", phase)).phase == phase


@looped("code, kind", [*KINDS.items(), *OTHERS.items()])
def test_whoever_waits_for_a_peer_is_told_why_it_does_not_come(code, kind):
    error = connection_error("p/0/x", code, "gone")
    assert type(error) is kind
    assert (error.peer, error.message) == ("p/0/x", "p/0/x cannot be read from: gone")
