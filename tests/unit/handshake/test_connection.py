import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handshake.codec import FORMAT, decode, encode
from handshake.connection import Conversation, Giving, check_introduction
from handshake.errors import CloseCode, Closed, LocalProtocolError
from handshake.limits import LEASES_MAX, Limits
from handshake.messages import (
    WIRE_VERSION,
    Bye,
    ConnectionClosed,
    ConnectionFailed,
    Ending,
    Hello,
    LeaseRef,
    PeerReady,
    Ping,
    Pong,
    Publication,
    Publish,
    Refuse,
    Release,
    ReleaseAnswered,
    ReleaseReceived,
    Renew,
    RenewAnswered,
    RenewReceived,
    VersionRange,
    Welcome,
)
from handshake.rates import Allowance, ClockOffset
from handshake.states import Progress, Role
from tests.helpers.loops import looped

from .helpers import (
    CONSUMED,
    CONSUMER,
    EXAMPLES,
    LIMITS,
    PRODUCED,
    PRODUCER,
    REACHABLE,
    Pair,
    connection_in,
    frames_of,
)

NOW = 100.0


def said(connection):
    return [decode(frames, LIMITS.frame_bytes_max) for frames in connection.take_outgoing()]


def test_two_ends_become_ready_and_know_each_other():
    pair = Pair().make_ready()
    assert pair.client_events == [PeerReady(identity=PRODUCER, publication=PRODUCED, version=WIRE_VERSION)]
    assert pair.server_events == [PeerReady(identity=CONSUMER, publication=CONSUMED, version=WIRE_VERSION)]


def test_a_server_gives_its_client_a_pass_and_takes_none():
    asked = []
    pair = Pair(giving=Giving(lambda identity: asked.append(identity) or b"for you alone")).make_ready()
    assert asked == [CONSUMER]
    assert [event.pass_ for event in pair.client_events] == [b"for you alone"]
    client = connection_in(Role.CLIENT, Progress.PUBLISHED)
    server = connection_in(Role.SERVER, Progress.PUBLISHED)
    for connection in (client, server):
        connection.receive(frames_of(EXAMPLES["publish_with_pass"]), NOW)
    assert [event.pass_ for event in client.take_events()] == [bytes(range(32))]
    assert [event.pass_ for event in server.take_events()] == [b""]


def test_no_repr_shows_a_pass():
    secret = b"of nobody else"
    ready = PeerReady(identity=PRODUCER, publication=PRODUCED, version=1, pass_=secret)
    publish = Publish(publication=PRODUCED, pass_=secret)
    for each in (ready, publish):
        shown = repr(each) + str(each) + f"{each}" + repr(each.__rich_repr__())
        assert "prefill-0" in shown or "publication" in shown
        assert secret.decode() not in shown


def test_the_version_is_agreed_before_anything_is_published():
    pair = Pair()
    pair.client.greet(pair.now)
    assert [type(message) for message in said(pair.client)] == [Hello]
    pair.server.receive(frames_of(EXAMPLES["hello"]), pair.now)
    assert [type(message) for message in said(pair.server)] == [Welcome, Publish]


def test_the_highest_common_version_is_chosen():
    pair = Pair(client_versions=VersionRange(1, 3), server_versions=VersionRange(2, 9)).make_ready()
    assert pair.client_events[0].version == pair.server_events[0].version == 3


@pytest.mark.parametrize("version", [1, 99])
def test_a_peer_of_another_version_is_told_both_ranges(version):
    pair = Pair(client_versions=VersionRange(version, version))
    pair.client.greet(pair.now)
    pair.settle()
    (told,) = pair.client_events
    assert (told.code, told.refused) == ("version_unsupported", True)
    assert told.reason == f"no common version: this side speaks 2..2, the peer {version}..{version}"
    assert told.remedy == "Run releases whose wire versions overlap."
    (kept,) = pair.server_events
    assert (kept.code, kept.refused) == ("version_unsupported", False)
    assert (pair.client.state, pair.server.state) == (Progress.CLOSED, Progress.CLOSED)


def test_a_version_that_was_not_offered_is_a_violation():
    client = connection_in(Role.CLIENT, Progress.GREETED)
    client.receive(frames_of(Welcome(clock_s=1.5, version=WIRE_VERSION + 1, identity=PRODUCER)), NOW)
    (refusal,) = said(client)
    assert refusal.code == "protocol_violation"
    assert client.take_events()[0].code == "protocol_violation"


def test_leases_are_renewed_and_released():
    pair = Pair().make_ready()
    for name in ("release", "renew"):
        pair.client.send(EXAMPLES[name])
    pair.settle()
    leases = EXAMPLES["release"].leases
    assert pair.server_events[1:] == [ReleaseReceived(read=True, leases=leases), RenewReceived(leases=leases)]
    for name in ("released", "renewed"):
        pair.server.send(EXAMPLES[name])
    pair.settle()
    answers = EXAMPLES["released"].leases
    assert pair.client_events[1:] == [ReleaseAnswered(leases=answers), RenewAnswered(leases=answers, lease_s=30.0)]


@pytest.mark.parametrize(("role", "wrong"), [(Role.CLIENT, "released"), (Role.SERVER, "release")])
def test_what_is_not_ours_to_say_is_our_error_and_changes_nothing(role, wrong):
    connection = connection_in(role, Progress.READY)
    with pytest.raises(LocalProtocolError):
        connection.send(EXAMPLES[wrong])
    with pytest.raises(LocalProtocolError):
        connection.send(EXAMPLES["hello"])
    assert (connection.state, connection.take_outgoing(), connection.ending) == (Progress.READY, [], None)


def test_a_message_out_of_bounds_is_our_error_and_changes_nothing():
    connection = connection_in(Role.CLIENT, Progress.READY)
    with pytest.raises(LocalProtocolError):
        connection.send(Release(read=True, leases=()))
    assert (connection.state, connection.take_outgoing(), connection.ending) == (Progress.READY, [], None)


@pytest.mark.parametrize("state", [Progress.FRESH, Progress.GREETED, Progress.PUBLISHED])
def test_nothing_is_sent_before_ready(state):
    with pytest.raises(LocalProtocolError, match=str(state)):
        connection_in(Role.CLIENT, state).send(EXAMPLES["release"])


@pytest.mark.parametrize("state", [Progress.CLOSING, Progress.CLOSED])
def test_nothing_is_sent_after_the_end(state):
    with pytest.raises(Closed, match="done"):
        connection_in(Role.CLIENT, state).send(EXAMPLES["release"])


def test_a_goodbye_is_answered_and_ends_both():
    pair = Pair().make_ready()
    pair.client.close("enough", pair.now)
    assert pair.client.state is Progress.CLOSING
    pair.settle()
    assert (pair.client.state, pair.server.state) == (Progress.CLOSED, Progress.CLOSED)
    assert pair.client_events[1:] == pair.server_events[1:] == [ConnectionClosed(reason="enough")]


def test_two_goodbyes_that_cross_end_both():
    pair = Pair().make_ready()
    pair.client.close("mine", pair.now)
    pair.server.close("also mine", pair.now)
    pair.settle()
    assert (pair.client.state, pair.server.state) == (Progress.CLOSED, Progress.CLOSED)
    assert pair.client_events[1:] == [ConnectionClosed(reason="mine")]


def test_what_the_peer_said_before_it_heard_our_goodbye_is_let_pass():
    pair = Pair().make_ready()
    pair.server.close("leaving", pair.now)
    pair.client.send(EXAMPLES["release"])
    pair.server.receive([b"garbage"], pair.now)
    pair.settle()
    assert pair.server_events[1:] == [ConnectionClosed(reason="leaving")]
    assert pair.client_events[1:] == [ConnectionClosed(reason="leaving")]


def test_a_refusal_is_told_with_its_remedy():
    pair = Pair().make_ready()
    pair.client.refuse("publication_refused", "r" * 5000, pair.now, remedy="Publish less.")
    pair.settle()
    (told,) = pair.server_events[1:]
    assert told == ConnectionFailed(code="publication_refused", reason="r" * 256, remedy="Publish less.", refused=True)
    assert pair.client_events[1:] == [
        ConnectionFailed(code="publication_refused", reason="r" * 5000, remedy="Publish less.")
    ]


def test_a_connection_ends_once():
    connection = connection_in(Role.SERVER, Progress.READY)
    connection.refuse("busy", "later", NOW)
    connection.close("never mind", NOW)
    connection.refuse("closing", "too late", NOW)
    connection.lost("gone")
    connection.lost("gone again")
    assert [type(message) for message in said(connection)] == []
    assert connection.take_events() == [ConnectionFailed(code="busy", reason="later")]


@looped("role, state", [pair for pair in REACHABLE if pair[1] is not Progress.CLOSED])
def test_a_lost_transport_ends_every_state(role, state):
    connection = connection_in(role, state)
    connection.lost("the cable", code="connection_lost")
    assert connection.state is Progress.CLOSED
    assert connection.next_deadline() is None
    expected = [] if state is Progress.CLOSING else [ConnectionFailed(code="connection_lost", reason="the cable")]
    assert connection.take_events() == expected


WELCOME_THERE = {(Role.SERVER, Progress.FRESH, "hello"), (Role.CLIENT, Progress.GREETED, "welcome")}
VIOLATIONS = [
    (role, state, name)
    for role, state in REACHABLE
    for name in ("garbage", "nothing", "hello", "welcome", "ping", "release", "released")
    if state not in (Progress.READY, Progress.CLOSING, Progress.CLOSED) and (role, state, name) not in WELCOME_THERE
]
VIOLATIONS += [(role, Progress.READY, name) for role in Role for name in ("garbage", "hello", "welcome", "publish")]
VIOLATIONS += [(Role.CLIENT, Progress.READY, "release"), (Role.SERVER, Progress.READY, "released")]


@looped("role, state, name", VIOLATIONS)
def test_the_first_violation_ends_the_connection(role, state, name):
    nonsense = {"garbage": [b"garbage"], "nothing": []}
    frames = nonsense[name] if name in nonsense else frames_of(EXAMPLES[name])
    connection = connection_in(role, state)
    connection.receive(frames, NOW)
    (event,) = connection.take_events()
    assert (event.code, event.refused) == ("protocol_violation", False)
    (refusal,) = said(connection)
    assert (type(refusal), refusal.code) == (Refuse, "protocol_violation")
    connection.receive(frames, NOW)
    assert connection.take_outgoing() == connection.take_events() == []


def test_a_tampered_publication_is_never_reported():
    connection = connection_in(Role.SERVER, Progress.PUBLISHED)
    tampered = msgspec.structs.replace(CONSUMED, payload=b"tampered with")
    connection.receive([FORMAT + msgspec.msgpack.encode(Publish(publication=tampered))], NOW)
    (event,) = connection.take_events()
    assert event.code == "protocol_violation"
    assert "digest" in event.reason


@pytest.mark.parametrize(
    ("role", "state"),
    [(Role.CLIENT, Progress.FRESH), (Role.CLIENT, Progress.GREETED), (Role.SERVER, Progress.PUBLISHED)],
)
def test_a_handshake_has_one_budget_that_no_message_extends(role, state):
    connection = connection_in(role, state)
    assert connection.next_deadline() == NOW + LIMITS.handshake_s
    connection.handle_deadline(NOW + LIMITS.handshake_s - 0.001)
    assert connection.state is state
    connection.handle_deadline(NOW + LIMITS.handshake_s)
    (refusal,) = said(connection)
    assert refusal.code == "handshake_timeout"
    assert connection.take_events()[0].code == "handshake_timeout"


def test_silence_is_met_with_pings_and_then_ends_the_connection():
    connection = connection_in(Role.CLIENT, Progress.READY)
    pings, now = 0, NOW
    while connection.state is Progress.READY and pings <= 3:
        now = connection.next_deadline()
        connection.handle_deadline(now)
        pings += sum(isinstance(message, Ping) for message in said(connection))
    assert now == NOW + LIMITS.silence_s_max
    assert pings == 3
    assert connection.take_events()[0].code == "silent"


def test_a_sign_of_life_is_as_good_as_an_answer():
    pair = Pair().make_ready()
    for _ in range(10):
        pair.now += LIMITS.ping_interval_s * 0.9
        pair.client.send(EXAMPLES["renew"])
        pair.deliver()
        pair.server.handle_deadline(pair.now)
        assert said(pair.server) == []
    assert pair.server.next_deadline() == pair.now + LIMITS.ping_interval_s


def test_round_trips_are_measured():
    pair = Pair()
    pair.client.greet(pair.now)
    pair.deliver()
    pair.now += 0.25
    pair.settle()
    assert (pair.client.rtt_s, pair.server.rtt_s) == (0.25, 0.25)
    pair.now += LIMITS.ping_interval_s
    pair.client.handle_deadline(pair.now)
    pair.deliver()
    pair.now += 0.125
    pair.settle()
    assert (pair.client.rtt_s, pair.server.rtt_s) == (0.125, 0.25)


@pytest.mark.parametrize("nonce", [1, 12345])
def test_only_the_answer_to_the_last_ping_is_measured(nonce):
    connection = connection_in(Role.CLIENT, Progress.READY)
    before = connection.rtt_s
    for now in (NOW + 1, NOW + 2):
        connection.ask(now, report=False)
    connection.receive(frames_of(Pong(clock_s=1.5, nonce=nonce)), NOW + 3)
    assert connection.rtt_s == before
    assert connection.state is Progress.READY


def test_only_a_client_greets_and_only_once():
    with pytest.raises(LocalProtocolError):
        connection_in(Role.SERVER, Progress.FRESH).greet(NOW)
    client = connection_in(Role.CLIENT, Progress.GREETED)
    with pytest.raises(LocalProtocolError):
        client.greet(NOW)
    assert client.take_outgoing() == []


@pytest.mark.parametrize(
    ("identity", "publication"),
    [
        (msgspec.structs.replace(PRODUCER, engine_id=""), PRODUCED),
        (msgspec.structs.replace(PRODUCER, incarnation="short"), PRODUCED),
        (PRODUCER, Publication(schema=1, digest=bytes(32), payload=b"not its digest")),
        (PRODUCER, Publication.of(b"", schema=-1)),
    ],
)
def test_what_cannot_be_said_of_us_is_found_at_the_start(identity, publication):
    with pytest.raises(LocalProtocolError):
        check_introduction(Role.SERVER, identity, publication, LIMITS)
    check_introduction(Role.SERVER, PRODUCER, PRODUCED, LIMITS)


def test_a_client_publishes_less_than_a_server():
    much = Publication.of(bytes(LIMITS.client_frame_bytes_max))
    check_introduction(Role.SERVER, PRODUCER, much, LIMITS)
    with pytest.raises(LocalProtocolError, match="above 65536"):
        check_introduction(Role.CLIENT, CONSUMER, much, LIMITS)
    server = connection_in(Role.SERVER, Progress.PUBLISHED)
    server.receive(encode(Publish(publication=much), LIMITS.frame_bytes_max), NOW)
    assert server.ending.code == CloseCode.PROTOCOL_VIOLATION
    client = connection_in(Role.CLIENT, Progress.PUBLISHED)
    client.receive(encode(Publish(publication=much), LIMITS.frame_bytes_max), NOW)
    assert client.ending is None


heard = st.lists(
    st.one_of(
        st.sampled_from([frames_of(message) for message in EXAMPLES.values()]),
        st.lists(st.binary(max_size=40), max_size=3),
        st.binary(max_size=40).map(lambda data: [FORMAT + data]),
        st.tuples(st.sampled_from(sorted(EXAMPLES)), st.integers(0, 300), st.binary(min_size=1, max_size=2)).map(
            lambda damage: [_damaged(frames_of(EXAMPLES[damage[0]])[0], damage[1], damage[2])]
        ),
    ),
    max_size=8,
)


def _damaged(frame: bytes, position: int, data: bytes) -> bytes:
    at = position % len(frame)
    return frame[:at] + data + frame[at + len(data) :]


@pytest.mark.parametrize(("role", "state"), REACHABLE)
@given(heard, st.lists(st.floats(0, 30), min_size=8, max_size=8))
@settings(max_examples=40)
def test_no_peer_can_raise_an_exception_or_end_a_connection_twice(role, state, messages, pauses):
    connection: Conversation = connection_in(role, state)
    now, events = NOW, []
    for frames, pause in zip(messages, pauses, strict=False):
        now += pause
        connection.handle_deadline(now)
        connection.receive(frames, now)
        said(connection)  # whatever is said can be read
        events += connection.take_events()
        deadline = connection.next_deadline()
        assert (deadline is None) == (connection.state is Progress.CLOSED)
    endings = [event for event in events if isinstance(event, Ending)]
    assert len(endings) <= 1
    assert not endings or events[-1] is endings[0] is connection.ending


def test_a_last_word_may_be_the_first():
    connection = connection_in(Role.SERVER, Progress.FRESH)
    connection.receive(frames_of(Bye(reason="wrong door")), NOW)
    assert [type(message) for message in said(connection)] == [Bye]
    assert connection.take_events() == [ConnectionClosed(reason="wrong door")]
    assert connection.state is Progress.CLOSED


def test_both_ends_learn_how_far_the_other_clock_is_ahead():
    pair = Pair(client_ahead_s=1000.0, server_ahead_s=1030.0).make_ready()
    assert pair.client.clock_offset == ClockOffset(30.0, 0.0)
    assert pair.server.clock_offset == ClockOffset(-30.0, 0.0)


def test_a_ping_measures_again():
    pair = Pair(client_ahead_s=1000.0, server_ahead_s=1030.0)
    pair.client.greet(pair.now)
    (hello,) = pair.client.take_outgoing()
    pair.now += 4.0  # the way there took long
    pair.server.receive(hello, pair.now)
    pair.settle()
    assert pair.client.clock_offset == ClockOffset(32.0, 2.0)
    pair.now += LIMITS.ping_interval_s
    pair.client.handle_deadline(pair.now)
    pair.settle()
    assert pair.client.clock_offset == ClockOffset(30.0, 0.0)


def test_a_client_that_does_not_tell_the_time_is_met_all_the_same():
    connection = connection_in(Role.SERVER, Progress.READY)
    assert connection.clock_offset is None
    assert connection.rtt_s == 0.0


QUIET = Limits(messages_per_s_max=10.0, leases_per_s_max=float(LEASES_MAX))


@pytest.mark.parametrize("role", Role)
def test_who_says_too_much_is_told_and_dropped(role):
    connection = connection_in(role, Progress.READY, limits=QUIET)
    for _ in range(8):  # of ten; the handshake took two
        connection.receive(frames_of(Ping(nonce=1)), NOW)
    assert connection.ending is None
    connection.receive(frames_of(Ping(nonce=1)), NOW)
    assert connection.ending.code == "rate_exceeded"
    assert "10 messages per second" in connection.ending.reason
    assert said(connection)[-1].code == "rate_exceeded"


def test_who_says_as_much_over_time_is_heard():
    connection = connection_in(Role.SERVER, Progress.READY, limits=QUIET)
    for turn in range(100):
        connection.receive(frames_of(Ping(nonce=1)), NOW + turn * 0.11)
    assert connection.ending is None


def test_who_names_too_many_leases_is_told_and_dropped():
    connection = connection_in(Role.SERVER, Progress.READY, limits=QUIET)
    many = tuple(LeaseRef(slot=0, epoch=epoch) for epoch in range(LEASES_MAX))
    connection.receive(frames_of(Renew(leases=many)), NOW)
    assert connection.take_events() == [RenewReceived(leases=many)]
    connection.receive(frames_of(Release(read=True, leases=many[:1])), NOW)
    assert connection.ending.code == "rate_exceeded"
    assert connection.take_events() == [connection.ending]


def test_connections_of_one_key_share_what_it_may_say():
    allowance = Allowance(QUIET, NOW)
    one, two = (connection_in(Role.SERVER, Progress.READY, limits=QUIET, allowance=allowance) for _ in range(2))
    for _ in range(6):
        one.receive(frames_of(Ping(nonce=1)), NOW)
    two.receive(frames_of(Ping(nonce=1)), NOW)
    assert (one.ending, two.ending.code) == (None, "rate_exceeded")
