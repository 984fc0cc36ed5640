"""When a peer counts as closed, and what is remembered. TestReachability (tests/properties) has what is dialed."""

from random import Random

import msgspec
import pytest

from kvflow import errors
from kvflow.rendezvous.dialer import Restarted
from kvflow.rendezvous.endpoint import NotDialed
from kvflow.worker.connections import (
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


def test_what_never_left_this_process_is_no_answer_and_no_silence(world):
    for error in (NotDialed("open files", 1024), errors.ConfigInvalid("malformed")):
        world.fail(member(), error, times=10)
        assert world.refused(member()) is None, "the address was not even tried"


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


def test_a_ticket_that_was_read_from_is_no_sign_of_life_later(world):
    assert world.refused(member(issued_ms=1000)) is None
    world.record.saw(member().peer, 5000)
    world.fail(member(issued_ms=1000), RESTARTED)
    assert isinstance(world.refused(member(issued_ms=5000)), errors.StaleLease)


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


def test_an_address_remembers_a_bounded_number_of_peers():
    record = AddressRecord()
    for index in range(3 * TRIED_MAX):
        record.failed(f"peer {index}", 0.0, 0.0)
    assert len(record.tried) == TRIED_MAX
    assert not record.ask(f"peer {3 * TRIED_MAX - 1}", 0.0)
