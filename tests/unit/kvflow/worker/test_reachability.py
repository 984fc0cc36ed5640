"""When an address is left alone, and when a peer counts as closed."""

from random import Random

import msgspec
import pytest

from kvflow import errors
from kvflow.events import BreakerClosed, BreakerOpened
from kvflow.rendezvous.dialer import Restarted
from kvflow.rendezvous.endpoint import Distrusted, NotDialed, Replaced
from kvflow.worker.connections import (
    BACKOFF_S,
    BACKOFF_S_MAX,
    FAILURES_MAX,
    SPREAD_S,
    SUPERSEDED_S,
    TRIED_MAX,
    AddressRecord,
    Reachability,
)
from tests.helpers.members import member_of

from .helpers import Clock, Reports

ENDPOINT = "tcp://127.0.0.1:5000"
OTHER_ENDPOINT = "tcp://127.0.0.1:5001"


def member(incarnation="0", endpoint=ENDPOINT, issued_ms=None):
    return member_of((incarnation, endpoint), issued_ms)


class World:
    def __init__(self):
        self.clock, self.reports = Clock(), Reports()
        self.record = Reachability(clock=self.clock, draw=lambda: 0.0, report=self.reports)

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


def test_a_failing_address_is_refused_until_a_stated_time(world):
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


def test_failures_before_an_answer_do_not_count(world):
    for _ in range(2):
        world.fail(member(), times=FAILURES_MAX - 1)
        assert world.refused(member()) is None
        world.record.on_answered(ENDPOINT)


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
        Replaced("another engine answers", peer=ENDPOINT),
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
        NotDialed("open files", 1024),
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


RESTARTED = Restarted("it was restarted", ended_by="gone", peer=ENDPOINT)


def test_a_peer_whose_only_address_is_another_ones_is_closed_for_a_while(world):
    world.fail(member(), RESTARTED)
    refused = world.refused(member())
    assert isinstance(refused, errors.StaleLease)
    assert "is closed: it was restarted" in refused.message
    assert refused.remedy == "Ask the producer for a new ticket, or recompute the prompt."
    assert world.refused(member("1")) is None, "whoever answers there now is as good as any"
    world.clock.now += SUPERSEDED_S
    assert world.refused(member()) is None, "a name server may have given an old address"
    world.fail(member(), RESTARTED)
    assert isinstance(world.refused(member()), errors.StaleLease)


def test_a_ticket_that_was_signed_since_proves_life(world):
    for newest in (2000, 3000):
        assert world.refused(member(issued_ms=newest)) is None
        world.fail(member(issued_ms=newest), RESTARTED)
        for replayed in (None, 1000, newest - 1, newest):
            assert isinstance(world.refused(member(issued_ms=replayed)), errors.StaleLease)
    assert world.refused(member("1", issued_ms=9000)) is None
    assert isinstance(world.refused(member(issued_ms=3000)), errors.StaleLease), "that was another one's"
    assert world.refused(member(issued_ms=3001)) is None
    assert world.refused(member(issued_ms=1000)) is None, "its leases are as good as it is"


def test_a_ticket_that_was_read_from_is_no_sign_of_life_later(world):
    assert world.refused(member(issued_ms=1000)) is None
    world.record.saw(member().peer, 5000)
    world.fail(member(issued_ms=1000), RESTARTED)
    assert isinstance(world.refused(member(issued_ms=5000)), errors.StaleLease)


def test_a_goodbye_is_for_ever_whatever_was_signed_since(world):
    assert world.refused(member(issued_ms=1000)) is None
    world.record.on_goodbye(member())
    assert "it said goodbye" in world.refused(member(issued_ms=2000)).message


def test_where_a_peer_has_answered_last_is_remembered(world):
    assert world.record.last_address(member().peer) == ""
    world.record.saw(member().peer, None, "tcp://10.0.0.1:5600")
    assert world.refused(member(issued_ms=1000)) is None
    assert world.record.last_address(member().peer) == "tcp://10.0.0.1:5600"
    assert world.record.last_address(member("1").peer) == ""


def test_a_goodbye_is_for_ever_whoever_answers_there_later(world):
    world.record.on_goodbye(member())
    world.record.on_superseded(member(), "another one answers")
    world.clock.now += 1e6
    assert "it said goodbye" in world.refused(member()).message


def test_a_new_incarnation_is_tried_at_once(world):
    world.fail(member(), times=FAILURES_MAX)
    assert world.refused(member("1")) is None
    assert isinstance(world.refused(member()), errors.PeerUnavailable)
    assert world.refused(member("2")) is None


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr("kvflow.worker.connections.ADDRESSES_MAX", 2)
    monkeypatch.setattr("kvflow.worker.connections.CLOSED_MAX", 2)
    world = World()
    endpoints = [f"tcp://127.0.0.1:{port}" for port in (5000, 5001, 5002)]
    for endpoint in endpoints:
        world.fail(member(endpoint=endpoint), times=FAILURES_MAX)
    assert [world.refused(member(endpoint=endpoint)) is None for endpoint in endpoints] == [True, False, False]
    for incarnation in "abc":
        world.record.on_goodbye(member(incarnation))
    assert [type(world.refused(member(incarnation))) for incarnation in "bc"] == [errors.StaleLease] * 2
    assert len(world.record._known) == 2


def test_a_member_is_judged_by_its_own_address(world):
    world.fail(member(), times=FAILURES_MAX)
    address = msgspec.structs.replace(member().address, endpoint=OTHER_ENDPOINT)
    assert world.refused(msgspec.structs.replace(member(), address=address)) is None


def test_gone_is_who_was_at_that_address(world):
    """Somebody else may say the same name elsewhere; what he does is not held against it."""
    world.record.on_goodbye(member())
    assert isinstance(world.refused(member()), errors.StaleLease)
    assert world.refused(member(endpoint=OTHER_ENDPOINT)) is None


@pytest.fixture
def opened():
    """An address that has just failed once too often, at time 0."""
    record = AddressRecord()
    for _ in range(FAILURES_MAX):
        record.failed("p", 0.0, 0.0)
    return record


def test_an_address_is_left_alone_after_several_failures_in_a_row():
    record = AddressRecord()
    for _ in range(FAILURES_MAX):
        assert not record.broken
        assert record.ask("p", 0.0)
        record.failed("p", 0.0, 0.0)
    assert record.broken
    assert not record.ask("p", 0.0)


def test_a_broken_address_allows_one_probe_at_a_time_when_it_is_due(opened):
    due = BACKOFF_S / 2
    assert not opened.ask("p", due - 0.001)
    assert opened.ask("p", due)
    assert opened.probing
    assert not opened.ask("p", due)


def test_a_failed_probe_doubles_the_pause(opened):
    pauses, now = [], 0.0
    for _ in range(8):
        pauses.append(opened.retry_at - now)
        now = opened.retry_at
        assert opened.ask("p", now)
        opened.failed("p", now, 0.0)
        assert not opened.probing
    assert pauses[:3] == [BACKOFF_S / 2, BACKOFF_S, 2 * BACKOFF_S]
    assert pauses[-1] == BACKOFF_S_MAX / 2


def test_a_broken_address_allows_a_peer_that_was_not_tried(opened):
    assert not opened.ask("p", 0.0)
    assert opened.ask("its successor", 0.0)
    assert opened.probing
    assert opened.ask("the successor's successor", 0.0), "an old peer's probe must not hold up a new one"
    assert not opened.ask("p", 0.0)
    opened.failed("its successor", 0.0, 0.0)
    assert not opened.ask("its successor", 0.0)
    assert not opened.ask("p", 0.0)


def test_an_address_remembers_a_bounded_number_of_peers(opened):
    for index in range(3 * TRIED_MAX):
        opened.failed(f"peer {index}", 0.0, 0.0)
    assert len(opened.tried) == TRIED_MAX
    assert not opened.ask(f"peer {3 * TRIED_MAX - 1}", 0.0)


def test_an_attempt_may_fail_after_the_others(opened):
    opened.failed("p", 1.0, 0.0)
    assert opened.broken
    assert opened.retry_at > 1.0


def test_peers_that_lose_one_server_dial_it_again_at_moments_of_their_own():
    clock, moments = Clock(), []
    peers = [Reachability(clock=clock, draw=Random(seed).random, report=Reports()) for seed in range(1100)]
    for each in peers:
        assert each.redial_in_s(ENDPOINT) == 0.0
        each.on_lost(ENDPOINT)
        moments.append(each.redial_in_s(ENDPOINT))
        assert each.redial_in_s(OTHER_ENDPOINT) == 0.0
    tenths = [int(10 * moment / SPREAD_S) for moment in moments]
    assert all(80 <= tenths.count(tenth) <= 140 for tenth in range(10))
    clock.now += SPREAD_S  # a restart has taken longer, and its first pull waits for nothing
    assert not any(each.redial_in_s(ENDPOINT) for each in peers)
    peers[0].on_lost(ENDPOINT)
    peers[0].on_answered(ENDPOINT)
    assert peers[0].redial_in_s(ENDPOINT) == 0.0
