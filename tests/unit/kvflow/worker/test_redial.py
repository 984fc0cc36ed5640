"""A lost peer is met again in the background, some times and no more, and an answer ends it whatever it is."""

import asyncio

import pytest

from kvflow import errors
from kvflow.worker.redial import REDIALS_MAX, redial


class Meeting:
    """Meets as it is told to, attempt by attempt."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.asked = 0

    async def __call__(self, member):
        assert member == "the peer"
        self.asked += 1
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if outcome is not None:
            raise outcome


@pytest.fixture
def pauses(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return slept


LOST = errors.PeerLost("nobody listens")


@pytest.mark.parametrize(
    ("outcomes", "asked"),
    [
        ([None], 1),
        ([LOST, errors.DeadlineExceeded("silence"), None], 3),
        ([LOST], REDIALS_MAX),
        ([errors.StaleLease("another incarnation answers")], 1),
        ([LOST, errors.PeerRefused("version_unsupported", "too old")], 2),
        ([errors.WorkerClosed("we are leaving")], 1),
    ],
)
async def test_how_often(pauses, outcomes, asked):
    meeting = Meeting(*outcomes)
    await redial(meeting, "the peer", lambda: 0.0)
    assert meeting.asked == asked
    assert pauses == sorted(pauses)
    assert len(pauses) == asked


async def test_an_address_that_is_left_alone_is_left_alone(pauses):
    meeting = Meeting(errors.PeerUnavailable("not yet", retry_after_s=7.0), None)
    await redial(meeting, "the peer", lambda: 0.0)
    assert meeting.asked == 2
    assert pauses[1] == 7.0
