"""Every error of the handshake becomes one of ours, with its words, its remedy and whom it is about."""

from handshake import errors as theirs
from kvflow import errors as ours
from kvflow.rendezvous.endpoint import Distrusted, NotDialed, as_kvflow_error
from tests.helpers.loops import looped

PEER = "tcp://127.0.0.1:5000"


@looped(
    "error, kind",
    [
        (theirs.AddressInvalid("m", remedy="do"), ours.ConfigInvalid),
        (theirs.Unauthenticated("m", remedy="do"), ours.AuthenticationFailed),
        (theirs.RemoteProtocolError("m", violation="malformed", remedy="do"), ours.ProtocolViolation),
        (theirs.TimedOut("m", phase="connect", remedy="do"), ours.DeadlineExceeded),
        (theirs.ConnectionLost("m", remedy="do"), ours.PeerLost),
        (theirs.Closed("m", remedy="do"), ours.PeerLost),
        (theirs.LocalProtocolError("m", remedy="do"), ours.ConfigInvalid),
        (theirs.ConnectionRefused("busy", "m", remedy="do"), ours.PeerRefused),
        (theirs.Unauthenticated("m", remedy="do", local=True), Distrusted),
        (theirs.SocketsExhausted("m", 7, remedy="do"), NotDialed),
    ],
)
def test_each_kind(error, kind):
    mapped = as_kvflow_error(error, peer=PEER)
    assert type(mapped) is kind
    assert mapped.remedy == "do"
    assert "m" in mapped.message.replace(":", "").split()
    if isinstance(mapped, ours.TransferFailed):
        assert mapped.peer == PEER


def test_what_the_peer_said_moves_no_cursor_and_ends_no_line():
    """``kvflow inspect`` prints it, and vLLM's log has it."""
    said = "\x1b]0;PWNED\x07\x1b[2J\nkvflow inspect: all is well"
    for error in (theirs.ConnectionRefused("busy", said, remedy=said), theirs.ConnectionLost(said, remedy=said)):
        text = str(as_kvflow_error(error, peer=PEER))
        assert text.isprintable()
        assert text.count(r"\x1b[2J\nkvflow inspect") == 2


def test_what_the_peer_said_is_kept_and_said_once():
    refused = as_kvflow_error(theirs.ConnectionRefused("busy", "later, please"), peer=PEER)
    assert refused.refusal == "busy"
    assert refused.message == f"the peer refused (busy): {PEER}: later, please"
    assert as_kvflow_error(theirs.TimedOut("m", phase="handshake"), peer=PEER).phase == "handshake"
