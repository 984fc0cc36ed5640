"""What counts against an address, what tells that a peer is gone, and what is forgotten."""

import msgspec
import pytest

from kvflow import errors
from kvflow.cache.mint import Mint
from kvflow.cache.tickets import RankAddress
from kvflow.observability.events import BreakerClosed, BreakerOpened
from kvflow.rendezvous.dialer import Replaced, Restarted
from kvflow.rendezvous.failures import Distrusted, NotDialled
from kvflow.worker.breaker import BACKOFF_S, FAILURES_MAX
from kvflow.worker.dialling import ELSEWHERE_S, DiallingRecord

from .helpers import Clock, Reports

ENDPOINT = "tcp://127.0.0.1:5000"
OTHER_ENDPOINT = "tcp://127.0.0.1:5001"


def member(incarnation="0", endpoint=ENDPOINT):
    mint = Mint(
        "prefill-0", [RankAddress(0, incarnation * 32, endpoint, "0", 4)], sign=lambda payload: bytes(32), lease_s=30.0
    )
    return next(mint.offer("r", block_ids=[[1]], num_tokens=1)[0].members())


class World:
    def __init__(self):
        self.clock, self.reports = Clock(), Reports()
        self.record = DiallingRecord(clock=self.clock, draw=lambda: 0.0, report=self.reports)

    def fail(self, who, error=None, times=1):
        for _ in range(times):
            self.record.on_failed(who, error or errors.PeerLost("nobody listens"))

    def refused(self, who):
        try:
            self.record.require(who)
        except errors.KvflowError as error:
            return error
        return None


@pytest.fixture
def world():
    return World()


def test_an_address_that_fails_is_left_alone_and_the_refusal_says_until_when(world):
    world.fail(member(), times=FAILURES_MAX - 1)
    assert world.refused(member()) is None
    world.fail(member())
    error = world.refused(member())
    assert isinstance(error, errors.PeerUnavailable)
    assert isinstance(error, errors.PeerLost), "whoever handles a lost peer handles this"
    assert error.code == "peer_unavailable"
    assert error.retry_after_s == BACKOFF_S / 2
    assert error.peer == str(member().peer)
    assert "failed 3 times in a row, and is tried in 0.2 s" in error.message
    assert world.refused(member(endpoint=OTHER_ENDPOINT)) is None
    assert world.reports.events == [BreakerOpened(ENDPOINT, 3, BACKOFF_S / 2)]


def test_the_first_that_asks_in_time_probes_for_all(world):
    world.fail(member(), times=FAILURES_MAX)
    world.clock.now += BACKOFF_S
    assert world.refused(member()) is None
    error = world.refused(member())
    assert error.retry_after_s == 0.0
    assert "is being tried right now" in error.message
    world.record.on_answered(ENDPOINT)
    assert world.refused(member()) is None
    assert world.reports.events[1:] == [BreakerClosed(ENDPOINT)]


@pytest.mark.parametrize(
    "error",
    [
        errors.PeerLost("nobody listens"),
        errors.DeadlineExceeded("silence", phase="connect"),
        errors.DeadlineExceeded("silence", phase="handshake"),
        errors.TransferFailed("the data plane cannot connect"),
        ValueError("a defect"),
    ],
    ids=repr,
)
def test_what_counts_against_an_address(world, error):
    world.fail(member(), error, times=FAILURES_MAX)
    assert isinstance(world.refused(member()), errors.PeerUnavailable)


@pytest.mark.parametrize(
    "error",
    [
        errors.AuthenticationFailed("another secret"),
        errors.PeerRefused("version_unsupported", "too old"),
        errors.ProtocolViolation("rubbish"),
        errors.LayoutMismatch("a", 1, 2),
    ],
    ids=repr,
)
def test_an_answer_is_an_answer_whatever_it_says(world, error):
    world.fail(member(), times=FAILURES_MAX)
    world.clock.now += BACKOFF_S
    assert world.refused(member()) is None
    world.fail(member(), error)
    assert world.refused(member()) is None
    assert world.reports.of(BreakerClosed) == [BreakerClosed(ENDPOINT)]
    world.fail(member(), error, times=10)
    assert world.refused(member()) is None


@pytest.mark.parametrize(
    "error",
    [
        Distrusted("a key that is not allowed"),
        NotDialled("open files", 1024),
        errors.ConfigInvalid("malformed"),
        errors.TransferCancelled("the worker is closing"),
    ],
    ids=repr,
)
def test_what_never_left_this_process_is_no_answer_and_no_silence(world, error):
    world.fail(member(), error, times=10)
    assert world.refused(member()) is None, "the address was not even tried"
    world.fail(member(), times=FAILURES_MAX)
    world.clock.now += BACKOFF_S
    assert world.refused(member()) is None
    world.fail(member(), error)
    assert world.reports.of(BreakerClosed) == []
    assert world.refused(member()) is None, "the probe has ended, and another one may be made"
    assert "right now" in world.refused(member()).message


@pytest.mark.parametrize(
    "error",
    [
        Restarted("it was restarted", peer=ENDPOINT, incarnation="1" * 32),
        Replaced("another engine answers", peer=ENDPOINT),
    ],
    ids=repr,
)
def test_a_peer_whose_address_is_another_ones_is_gone_for_a_while(world, error):
    world.fail(member(), error)
    refused = world.refused(member())
    assert isinstance(refused, errors.StaleLease)
    assert error.message in refused.message
    assert world.refused(member("1")) is None, "whoever answers there now is as good as any"
    world.clock.now += ELSEWHERE_S
    assert world.refused(member()) is None, "a name server may have given an old address"
    world.fail(member(), error)
    assert isinstance(world.refused(member()), errors.StaleLease)


def test_a_goodbye_is_for_ever_whoever_answers_there_later(world):
    world.record.on_goodbye(member())
    world.record.on_elsewhere(member(), "another one answers")
    world.clock.now += 1e6
    assert "it said goodbye" in world.refused(member()).message


def test_a_new_incarnation_is_tried_at_once(world):
    world.fail(member(), times=FAILURES_MAX)
    assert world.refused(member("1")) is None
    assert isinstance(world.refused(member()), errors.PeerUnavailable)
    assert world.refused(member("2")) is None


def test_what_is_remembered_is_bounded(world, monkeypatch):
    monkeypatch.setattr("kvflow.worker.dialling.BREAKERS_MAX", 2)
    monkeypatch.setattr("kvflow.worker.dialling.GONE_MAX", 2)
    endpoints = [f"tcp://127.0.0.1:{port}" for port in (5000, 5001, 5002)]
    for endpoint in endpoints:
        world.fail(member(endpoint=endpoint), times=FAILURES_MAX)
    assert [world.refused(member(endpoint=endpoint)) is None for endpoint in endpoints] == [True, False, False]
    for incarnation in "abc":
        world.record.on_goodbye(member(incarnation))
    assert [type(world.refused(member(incarnation))) for incarnation in "bc"] == [errors.StaleLease] * 2


def test_a_member_is_judged_by_its_own_address(world):
    world.fail(member(), times=FAILURES_MAX)
    address = msgspec.structs.replace(member().address, endpoint=OTHER_ENDPOINT)
    assert world.refused(msgspec.structs.replace(member(), address=address)) is None


def test_gone_is_who_was_at_that_address(world):
    """Somebody else may say the same name elsewhere; what he does is not held against it."""
    world.record.on_goodbye(member())
    assert isinstance(world.refused(member()), errors.StaleLease)
    assert world.refused(member(endpoint=OTHER_ENDPOINT)) is None
