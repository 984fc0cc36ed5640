"""A client asks how a server is: the answer, its bounds, and how often it may ask."""

import pytest
from msgspec import UNSET

from handshake.connection import Giving
from handshake.errors import Closed, LocalProtocolError
from handshake.limits import Limits
from handshake.messages import REPORT_BYTES_MAX, ConnectionFailed, PingAnswered
from handshake.server import _made
from tests.helpers.waiting import patiently

from .helpers import Pair, connected, serving


def answered(pair):
    while pair.deliver():
        pass
    return [event for event in pair.client_events if isinstance(event, PingAnswered)]


def test_a_client_that_asks_gets_the_report_and_the_round_trip():
    pair = Pair(giving=Giving(make_report=lambda: b"all is well")).make_ready()
    pair.client.ask(pair.now, report=True)
    assert answered(pair) == [PingAnswered(rtt_s=0.0, report=b"all is well")]


def test_a_plain_ping_gets_no_report():
    pair = Pair(giving=Giving(make_report=lambda: 1 / 0)).make_ready()
    pair.client.ask(pair.now, report=False)
    assert answered(pair) == [PingAnswered(rtt_s=0.0, report=UNSET)]


def test_a_server_that_reports_nothing_answers_all_the_same():
    pair = Pair().make_ready()
    for _ in range(100):
        pair.client.ask(pair.now, report=True)
        assert answered(pair)[-1].report is UNSET


def test_a_client_that_asks_too_often_is_refused():
    made = []
    pair = Pair(limits=Limits(reports_per_s_max=2.0), giving=Giving(make_report=lambda: made.append(1) or b"x"))
    pair.make_ready()
    for _ in range(3):
        pair.client.ask(pair.now, report=True)
        pair.settle()
    assert len(answered(pair)) == len(made) == 2
    (failed,) = [event for event in pair.server_events if isinstance(event, ConnectionFailed)]
    assert failed.code == "rate_exceeded"
    assert "2 questions for a report per second" in failed.reason


def test_what_a_report_takes_comes_back_with_time():
    pair = Pair(limits=Limits(reports_per_s_max=2.0), giving=Giving(make_report=lambda: b"x")).make_ready()
    for _ in range(6):
        pair.client.ask(pair.now, report=True)
        answered(pair)
        pair.now += 0.5
    assert len(answered(pair)) == 6


def test_nobody_asks_before_the_connection_is_ready_or_after_its_end():
    pair = Pair()
    with pytest.raises(LocalProtocolError):
        pair.client.ask(pair.now, report=True)
    pair.make_ready()
    pair.client.close("done", pair.now)
    with pytest.raises(Closed):
        pair.client.ask(pair.now, report=True)


@pytest.mark.parametrize("broken", [lambda: 1 / 0, lambda: bytes(REPORT_BYTES_MAX + 1), lambda: None])
def test_a_report_that_cannot_be_made_is_logged_and_the_client_gets_none(broken, caplog):
    assert _made("report", REPORT_BYTES_MAX, broken) == b""
    assert "making a report failed" in caplog.text


async def test_a_report_travels_between_real_sockets():
    async with serving(make_report=lambda: bytes(REPORT_BYTES_MAX)) as server, connected(server.endpoint) as client:
        answer = await patiently(client.ask(report=True))
        assert answer.report == bytes(REPORT_BYTES_MAX)
        assert answer.rtt_s > 0
        assert (await patiently(client.ask(report=False))).report is UNSET


async def test_a_question_ends_with_the_connection():
    seldom = Limits(reports_per_s_max=0.1)
    async with serving(make_report=bytes, limits=seldom) as server, connected(server.endpoint) as client:
        with pytest.raises(Closed):
            await patiently(client.ask(report=True))
