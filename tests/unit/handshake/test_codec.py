import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from handshake.codec import FORMAT, decode, encode
from handshake.errors import LocalProtocolError, RemoteProtocolError
from handshake.limits import PUBLICATION_BYTES_MAX
from handshake.messages import LeaseAnswer, LeaseRef, Ping, Publication, Publish, Refuse, Release, Renewed
from tests.helpers.loops import looped

from .helpers import ANSWERS, EXAMPLES, LIMITS, PRODUCED, frames_of

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "handshake_v2.json").read_text())


def violation_of(frames):
    """Return the kind of violation, or None for a message. Any other exception fails the test."""
    try:
        decode(frames, LIMITS.frame_bytes_max)
    except RemoteProtocolError as error:
        return error.violation
    return None


def test_there_is_a_golden_frame_of_every_message():
    assert GOLDEN.keys() == EXAMPLES.keys()


@looped("name", EXAMPLES)
def test_the_bytes_of_version_2_never_change(name):
    frames = [bytes.fromhex(GOLDEN[name])]
    assert encode(EXAMPLES[name], LIMITS.frame_bytes_max) == frames
    assert decode(frames, LIMITS.frame_bytes_max) == EXAMPLES[name]


ENDED = LeaseAnswer(slot=3, epoch=33, outcome="ended", ended_by="of_a_newer_release", ended_s=2.5)


@pytest.mark.parametrize(
    "message", [Publish(publication=PRODUCED, clock_s=1.5), Renewed(leases=(ENDED,), lease_s=30.0)]
)
def test_fields_added_to_a_version_arrive_and_older_peers_skip_them(message):
    frames = encode(message, LIMITS.frame_bytes_max)
    assert decode(frames, LIMITS.frame_bytes_max) == message
    body = msgspec.msgpack.decode(frames[0][len(FORMAT) :])
    body["added"] = {"of a still newer release": 1}
    assert decode([FORMAT + msgspec.msgpack.encode(body)], LIMITS.frame_bytes_max) == message


def test_a_pass_is_bounded():
    publication = {"schema": 1, "digest": Publication.of(b"").digest, "payload": b""}
    body = {"type": "publish", "publication": publication, "pass": bytes(64)}
    (frame,) = frames_of(Publish(publication=Publication.of(b""), pass_=bytes(64)))
    assert msgspec.msgpack.decode(frame[len(FORMAT) :]) == body
    for bad in (bytes(65), "text", None, 7):
        assert violation_of([FORMAT + msgspec.msgpack.encode(body | {"pass": bad})]) == "malformed"


@pytest.mark.parametrize(
    "bad", [{"ended_by": "Expired!"}, {"ended_by": "x" * 40}, {"ended_s": -1.0}, {"ended_s": 1e300}]
)
def test_how_a_lease_has_ended_is_bounded(bad):
    answer = {"slot": 1, "epoch": 2, "outcome": "ended"} | bad
    body = {"type": "renewed", "leases": [answer], "lease_s": 1.0}
    assert violation_of([FORMAT + msgspec.msgpack.encode(body)]) == "malformed"


@looped(
    "frames, violation",
    [
        ([], "frame_count"),
        ([FORMAT, b""], "frame_count"),
        ([b""], "format"),
        ([b"\xc0" + frames_of(EXAMPLES["bye"])[0][1:]], "format"),
        ([b"GET / HTTP/1.1\r\n"], "format"),
        ([FORMAT], "malformed"),
        ([frames_of(EXAMPLES["bye"])[0] + b"\0"], "malformed"),
        ([FORMAT + msgspec.msgpack.encode({"type": "bribe"})], "malformed"),
        ([FORMAT + msgspec.msgpack.encode({"type": "ping", "nonce": 2**63})], "malformed"),
        ([FORMAT + msgspec.msgpack.encode({"type": "ping", "nonce": -1})], "malformed"),
        ([FORMAT + b"\x82\xa4type\xa3bye\xa6reason\xa2\xff\xfe"], "malformed"),  # invalid UTF-8
        ([FORMAT + b"\x82\xa4type\xa3bye\xa5added" + b"\x91" * 100_000], "malformed"),  # deep nesting
        ([FORMAT + b"\x82\xa4type\xa7release\xa6leases\xdd\xff\xff\xff\xff"], "malformed"),  # 2**32 - 1 leases
        ([bytes(LIMITS.frame_bytes_max + 1)], "frame_size"),
    ],
)
def test_each_violation_is_named(frames, violation):
    assert violation_of(frames) == violation


def test_a_publication_is_seen_only_if_it_is_intact():
    tampered = msgspec.structs.replace(EXAMPLES["publish"].publication, payload=b"another payload")
    frame = FORMAT + msgspec.msgpack.encode(Publish(publication=tampered))
    assert violation_of([frame]) == "digest"


def test_the_largest_publication_passes_and_a_larger_one_does_not():
    largest = Publish(publication=Publication.of(bytes(PUBLICATION_BYTES_MAX)))
    assert decode(encode(largest, LIMITS.frame_bytes_max), LIMITS.frame_bytes_max) == largest
    with pytest.raises(LocalProtocolError, match="payload"):
        encode(Publish(publication=Publication.of(bytes(PUBLICATION_BYTES_MAX + 1))), LIMITS.frame_bytes_max)


@looped(
    "message",
    [
        Release(read=True, leases=()),
        Release(read=True, leases=(LeaseRef(slot=-1, epoch=0),)),
        Release(read=True, leases=(LeaseRef(slot=0, epoch=2**64),)),
        Release(read=True, leases=(LeaseRef(slot=0, epoch=0),) * 1025),
        Renewed(leases=ANSWERS, lease_s=float("nan")),
        Refuse(code="Not stable", reason=""),
        Refuse(code="busy", reason="lone surrogate \udcff"),
        Ping(nonce=object()),
    ],
)
def test_our_own_mistake_is_found_before_it_is_sent(message):
    with pytest.raises(LocalProtocolError, match=type(message).__name__):
        encode(message, LIMITS.frame_bytes_max)


def test_a_frame_that_the_peer_may_not_read_is_not_sent():
    with pytest.raises(LocalProtocolError, match="frame of"):
        encode(EXAMPLES["publish"], 64)


@given(st.lists(st.binary(max_size=200), max_size=3))
def test_any_frames_are_a_message_or_a_violation(frames):
    violation_of(frames)


leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
documents = st.recursive(
    leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 9), inner), max_leaves=20
)


@given(documents)
def test_any_messagepack_is_a_message_or_a_violation(document):
    violation_of([FORMAT + msgspec.msgpack.encode(document)])


@given(st.sampled_from(sorted(EXAMPLES)), st.dictionaries(st.sampled_from(["leases", "nonce", "reason"]), documents))
def test_any_field_of_a_known_message_is_taken_or_refused(name, changes):
    document = msgspec.msgpack.decode(frames_of(EXAMPLES[name])[0][1:]) | changes
    violation_of([FORMAT + msgspec.msgpack.encode(document)])


@given(
    st.sampled_from(sorted(EXAMPLES)),
    st.lists(st.tuples(st.integers(0, 500), st.sampled_from(["set", "cut", "insert"]), st.binary(max_size=4))),
)
@example("publish", [(60, "set", b"\0")])
def test_any_damage_to_a_message_gives_a_message_or_a_violation(name, damages):
    frame = frames_of(EXAMPLES[name])[0]
    for position, kind, data in damages:
        at = position % (len(frame) + 1)
        match kind:
            case "set":
                frame = frame[:at] + data + frame[at + len(data) :]
            case "cut":
                frame = frame[:at]
            case "insert":
                frame = frame[:at] + data + frame[at:]
    violation_of([frame])
