"""A client asks something opaque: the answer may come late, in any order, or never; and what either may not say."""

import pytest

from handshake.codec import decode
from handshake.connection import Giving
from handshake.errors import LocalProtocolError
from handshake.limits import Limits
from handshake.messages import (
    ANSWER_BYTES_MAX,
    QUESTION_BYTES_MAX,
    Answer,
    Answered,
    Ask,
    Asked,
    ConnectionFailed,
    LeaseAnswer,
    Ping,
    Pong,
    Released,
    Renewed,
)
from handshake.states import Progress, Role

from .helpers import EXAMPLES, LIMITS, Pair, Recorder, connected, connection_in, frames_of, serving

NOW = 100.0


def ask(nonce, question=b"?"):
    return Ask(nonce=nonce, question=question)


def answer(nonce, said=b"!"):
    return Answer(nonce=nonce, answer=said)


def failure_of(connection):
    (failed,) = [event for event in connection.take_events() if isinstance(event, ConnectionFailed)]
    return failed.code


def test_answers_come_when_the_server_has_them():
    pair = Pair().make_ready()
    for nonce in (7, 8, 0):
        pair.client.send(ask(nonce, b"about %d" % nonce))
    pair.settle()
    assert pair.server_events[1:] == [Asked(nonce=nonce, question=b"about %d" % nonce) for nonce in (7, 8, 0)]
    for nonce in (8, 7):
        pair.server.send(answer(nonce, b"%d" % nonce))
        pair.settle()
        pair.now += 20.0
    assert pair.client_events[1:] == [Answered(nonce=8, answer=b"8"), Answered(nonce=7, answer=b"7")]
    pair.client.send(ask(7))  # which is no longer open
    pair.settle()
    assert pair.server_events[-1] == Asked(nonce=7, question=b"?")


@pytest.mark.parametrize("wrong", [ask(7), ask(8, bytes(QUESTION_BYTES_MAX + 1)), answer(7), ask(-1)])
def test_what_the_client_may_not_say_is_our_error_and_changes_nothing(wrong):
    client = connection_in(Role.CLIENT, Progress.READY)
    client.send(ask(7))
    client.take_outgoing()
    with pytest.raises(LocalProtocolError):
        client.send(wrong)
    assert (client.state, client.take_outgoing()) == (Progress.READY, [])
    client.receive(frames_of(answer(7)), NOW)
    assert client.take_events() == [Answered(nonce=7, answer=b"!")]


@pytest.mark.parametrize("wrong", [answer(8), answer(7, bytes(ANSWER_BYTES_MAX + 1)), ask(9)])
def test_what_the_server_may_not_say_is_our_error_and_changes_nothing(wrong):
    server = connection_in(Role.SERVER, Progress.READY)
    server.receive(frames_of(ask(7)), NOW)
    with pytest.raises(LocalProtocolError):
        server.send(wrong)
    assert (server.state, server.take_outgoing()) == (Progress.READY, [])
    server.send(answer(7))
    with pytest.raises(LocalProtocolError):
        server.send(answer(7))
    assert len(server.take_outgoing()) == 1


@pytest.mark.parametrize("said", [[answer(8)], [ask(8)], [answer(7), answer(7)]])
def test_an_answer_to_nothing_or_a_question_of_the_server_is_a_violation(said):
    client = connection_in(Role.CLIENT, Progress.READY)
    client.send(ask(7))
    for each in said:
        client.receive(frames_of(each), NOW)
    assert failure_of(client) == "protocol_violation"


@pytest.mark.parametrize("said", [ask(7), answer(7)])
def test_a_nonce_that_is_open_and_an_answer_of_a_client_are_violations(said):
    server = connection_in(Role.SERVER, Progress.READY)
    server.receive(frames_of(ask(7)), NOW)
    server.receive(frames_of(said), NOW)
    assert failure_of(server) == "protocol_violation"


def test_a_client_that_asks_too_often_is_refused():
    pair = Pair(limits=Limits(questions_per_s_max=2.0)).make_ready()
    for nonce in range(3):
        pair.client.send(ask(nonce))
        pair.settle()
        if nonce < 2:
            pair.server.send(answer(nonce))
    assert sum(isinstance(event, Asked) for event in pair.server_events) == 2
    assert pair.server_events[-1].code == "rate_exceeded"
    assert "2 questions per second" in pair.server_events[-1].reason


FEW = Limits(outgoing_bytes_max=4000)
"""Bytes that a client may leave unread: of four answers."""


REPORTING = Giving(make_report=lambda: bytes(900))
PING = Ping(nonce=1, report=True)
MANY = tuple(LeaseAnswer(slot=slot, epoch=1, outcome="held") for slot in range(40))


@pytest.mark.parametrize(
    ("heard", "said"),
    [
        (ask(1), answer(1, bytes(900))),
        (EXAMPLES["renew"], Renewed(leases=MANY, lease_s=1.0)),
        (EXAMPLES["release"], Released(leases=MANY)),
        (PING, None),
    ],
)
def test_a_client_that_reads_no_answers_is_refused(heard, said):
    server = Pair(limits=Limits(outgoing_bytes_max=4000, reports_per_s_max=1e6), giving=REPORTING).make_ready().server
    nbytes = 0
    while server.ending is None:
        server.receive(frames_of(heard), NOW)
        if said is not None and server.ending is None:
            server.send(said)
        nbytes += sum(len(frame) for frames in server.take_outgoing() for frame in frames)
        assert nbytes < 6000
    assert server.ending.code == "congested"
    assert nbytes > 4000


def test_an_answer_to_an_earlier_ping_shows_nothing_of_later_answers():
    pair = Pair(limits=FEW).make_ready()
    server, said = pair.server, []
    for nonce in range(4):
        server.receive(frames_of(ask(nonce)), NOW)
        said += [decode(frames, LIMITS.frame_bytes_max) for frames in server.take_outgoing()]
        server.send(answer(nonce, bytes(900)))
    (ping,) = [each for each in said if isinstance(each, Ping)]  # one that is not answered is enough
    server.receive(frames_of(Pong(clock_s=1.5, nonce=ping.nonce)), NOW)
    server.receive(frames_of(Pong(clock_s=1.5, nonce=ping.nonce)), NOW)
    for nonce in (4, 5):  # the first of the four answers is read
        assert server.ending is None
        server.receive(frames_of(ask(nonce)), NOW)
        server.send(answer(nonce, bytes(900)))
    assert server.ending.code == "congested"


async def test_the_longest_question_and_answer_travel_between_real_sockets():
    heard, asked = Recorder(), Recorder()
    async with (
        serving(on_event=asked, limits=LIMITS) as server,
        connected(server.endpoint, on_event=heard) as client,
    ):
        client.send(ask(1, bytes(QUESTION_BYTES_MAX)))
        assert await asked.wait_of(Asked) == [Asked(nonce=1, question=bytes(QUESTION_BYTES_MAX))]
        (key,) = [seen[0] for seen in asked.seen if isinstance(seen[1], Asked)]
        server.send(key, answer(1, bytes(ANSWER_BYTES_MAX)))
        assert await heard.wait_of(Answered) == [Answered(nonce=1, answer=bytes(ANSWER_BYTES_MAX))]
