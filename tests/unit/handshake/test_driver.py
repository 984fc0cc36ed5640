import asyncio

import pytest

from handshake.codec import decode
from handshake.connection import Conversation
from handshake.driver import Driver
from handshake.errors import Closed
from handshake.limits import Limits
from handshake.messages import (
    ConnectionFailed,
    PeerReady,
    Ping,
    Refuse,
    Released,
    ReleaseReceived,
)
from handshake.sockets import Delivery
from handshake.states import Progress, Role
from tests.helpers.waiting import until

from .helpers import EXAMPLES, LIMITS, PRODUCED, PRODUCER, Recorder, frames_of


class Wire:
    """A ``transmit`` that remembers what was sent, or says that it cannot."""

    def __init__(self):
        self.sent = []
        self.delivery = Delivery.QUEUED

    def __call__(self, frames):
        if self.delivery is Delivery.QUEUED:
            self.sent.append(decode(frames, LIMITS.frame_bytes_max))
        return self.delivery

    @property
    def kinds(self):
        return [type(message) for message in self.sent]


def make_driver(on_event, wire, *, limits=LIMITS, settled=lambda: None):
    loop = asyncio.get_running_loop()
    connection = Conversation(Role.SERVER, PRODUCER, PRODUCED, limits=limits, now=loop.time())
    return Driver(connection, transmit=wire, on_event=on_event, on_settled=settled)


def make_ready(driver):
    driver.receive(frames_of(EXAMPLES["hello"]))
    driver.receive(frames_of(EXAMPLES["publish"]))
    assert driver.connection.state is Progress.READY


@pytest.fixture
async def recorder():
    return Recorder()


@pytest.fixture
def wire():
    return Wire()


async def test_the_program_may_answer_from_within_an_event(wire):
    seen = []

    def on_event(event):
        seen.append(type(event))
        if isinstance(event, ReleaseReceived):
            driver.send(EXAMPLES["released"])
            driver.refuse("busy", "enough for today")
            assert seen[-1] is ReleaseReceived, "no event is reported within another"

    driver = make_driver(on_event, wire)
    make_ready(driver)
    driver.receive(frames_of(EXAMPLES["release"]))
    assert seen == [PeerReady, ReleaseReceived, ConnectionFailed]
    assert wire.kinds[2:] == [Released, Refuse]
    driver.lost("over")


async def test_an_event_that_a_call_caused_is_reported_in_the_next_turn(recorder, wire):
    driver = make_driver(recorder, wire)
    make_ready(driver)
    driver.refuse("publication_refused", "not for us")
    assert recorder.of(ConnectionFailed) == []
    (failed,) = await recorder.wait_of(ConnectionFailed)
    assert failed.code == "publication_refused"
    with pytest.raises(Closed, match="not for us"):
        driver.send(EXAMPLES["released"])
    driver.lost("over")


@pytest.mark.parametrize(("delivery", "code"), [(Delivery.FULL, "congested"), (Delivery.GONE, "connection_lost")])
async def test_a_peer_that_cannot_be_told_is_lost(recorder, wire, delivery, code):
    driver = make_driver(recorder, wire)
    make_ready(driver)
    wire.delivery = delivery
    driver.send(EXAMPLES["released"])
    assert recorder.of(ConnectionFailed) == [], "the program that sends is not interrupted by an event"
    (failed,) = await recorder.wait_of(ConnectionFailed)
    assert failed.code == code
    assert driver.connection.state is Progress.CLOSED


async def test_a_silent_peer_is_pinged_and_given_up(recorder, wire):
    patient = make_driver(recorder, wire, limits=Limits(ping_interval_s=0.02, silence_s_max=1000))
    make_ready(patient)
    await until(lambda: Ping in wire.kinds)
    patient.lost("over")
    driver = make_driver(recorder, wire, limits=Limits(ping_interval_s=0.02, silence_s_max=0.1))
    make_ready(driver)
    await recorder.wait_of(ConnectionFailed, 2)
    assert [failed.code for failed in recorder.of(ConnectionFailed)] == ["connection_lost", "silent"]
    driver.lost("over")


async def test_a_closed_connection_leaves_no_timer(recorder, wire):
    driver = make_driver(recorder, wire)
    make_ready(driver)
    await asyncio.sleep(0)
    driver.lost("over")
    assert driver._timer.cancelled()
