"""Readers are who they said they are in their first words; each release and renewal is answered lease by lease."""

import pytest
from msgspec import UNSET

from handshake import (
    ConnectionClosed,
    ConnectionFailed,
    Identity,
    LeaseAnswer,
    LeaseRef,
    PeerReady,
    Publication,
    Released,
    ReleaseReceived,
    Renewed,
    RenewReceived,
)
from kvflow.cache.leases import Reader
from kvflow.errors import ConfigInvalid
from kvflow.observability.events import ReaderRejected
from kvflow.rendezvous.listener import Listener, open_listener
from kvflow.rendezvous.publication import READER

from .helpers import INCARNATION, side

REFS = (LeaseRef(slot=1, epoch=11), LeaseRef(slot=2, epoch=2**63 - 1))


class Keeper:
    """Counts what it is told, and answers the same each time."""

    def __init__(self):
        self.releases = []
        self.renewals = []
        self.ends = {}

    def on_release(self, leases, reader, *, read=False):
        self.releases.append((list(leases), reader))
        self.read = read
        return ["ended", "unknown"]

    def on_renew(self, leases):
        self.renewals.append(list(leases))
        return ["held", "ended"], 12.5

    def past(self, lease):
        return self.ends.get(lease)


class Server:
    """Keeps what is sent."""

    def __init__(self):
        self.sent = []

    def send(self, key, message):
        self.sent.append((key, message))


@pytest.fixture
def keeper():
    return Keeper()


@pytest.fixture
def reported():
    return []


@pytest.fixture
def listener(keeper, reported):
    return Listener(keeper, reported.append)


def ready(engine_id="decode-0", rank=1, num_ranks=2, publication=READER):
    identity = Identity(engine_id=engine_id, rank=rank, num_ranks=num_ranks, incarnation=INCARNATION, role="decode")
    return PeerReady(identity=identity, publication=publication, version=1)


def answers(*outcomes):
    return tuple(
        LeaseAnswer(slot=ref.slot, epoch=ref.epoch, outcome=outcome)
        for ref, outcome in zip(REFS, outcomes, strict=True)
    )


def test_a_release_is_counted_for_the_rank_that_said_hello(listener, keeper):
    server = Server()
    listener.on_event(server, "key", ready())
    listener.on_event(server, "key", ReleaseReceived(leases=REFS))
    assert keeper.releases == [([(1, 11), (2, 2**63 - 1)], Reader("decode-0", 1, 2))]
    assert server.sent == [("key", Released(leases=answers("ended", "unknown")[1:]))]


def test_a_release_that_ends_every_lease_needs_no_answer(listener, keeper, monkeypatch):
    server = Server()
    listener.on_event(server, "key", ready())
    monkeypatch.setattr(keeper, "on_release", lambda leases, reader, *, read: ["ended"] * len(leases))
    listener.on_event(server, "key", ReleaseReceived(leases=REFS))
    assert server.sent == []


def test_a_renewal_is_answered_with_how_long_it_holds(listener, keeper):
    server = Server()
    listener.on_event(server, "key", ready())
    listener.on_event(server, "key", RenewReceived(leases=REFS))
    assert keeper.renewals == [[(1, 11), (2, 2**63 - 1)]]
    assert server.sent == [("key", Renewed(leases=answers("held", "ended"), lease_s=12.5))]


def test_a_reader_that_renews_what_has_ended_is_told_how_and_when(listener, keeper):
    server = Server()
    keeper.ends = {(2, 2**63 - 1): ("expired", 12.5), (1, 11): ("used", 1.0)}
    listener.on_event(server, "key", ready())
    listener.on_event(server, "key", RenewReceived(leases=REFS))
    held, ended = server.sent[0][1].leases
    assert (held.outcome, held.ended_by) == ("held", UNSET)
    assert (ended.outcome, ended.ended_by, ended.ended_s) == ("ended", "expired", 12.5)


@pytest.mark.parametrize("said", [True, False, UNSET])
def test_whether_it_was_read_is_believed_of_a_reader_that_says_so(listener, keeper, said):
    listener.on_event(Server(), "key", ready())
    listener.on_event(Server(), "key", ReleaseReceived(leases=REFS, read=said))
    assert keeper.read is (said is True)


def test_readers_are_kept_apart(listener, keeper):
    for key, rank in (("a", 0), ("b", 1)):
        listener.on_event(Server(), key, ready(rank=rank))
    for key in ("b", "a"):
        listener.on_event(Server(), key, ReleaseReceived(leases=REFS))
    assert [reader.rank for _, reader in keeper.releases] == [1, 0]


def test_a_reader_of_another_release_is_reported_and_heard(listener, keeper, reported):
    listener.on_event(Server(), "key", ready())
    assert reported == []
    listener.on_event(Server(), "key", ready(publication=Publication.of(b"")))  # as older releases say it
    assert [(each.peer, each.code) for each in reported] == [(f"decode-0/1/{INCARNATION}", "release_mismatch")]
    listener.on_event(Server(), "key", ReleaseReceived(leases=REFS))
    assert len(keeper.releases) == 1


def test_a_reader_that_breaks_the_protocol_is_reported_by_name(listener, reported):
    listener.on_event(Server(), "key", ready())
    listener.on_event(Server(), "key", ConnectionFailed(code="protocol_violation", reason="not a message"))
    assert reported == [ReaderRejected(f"decode-0/1/{INCARNATION}", "protocol_violation", "not a message")]


def test_a_stranger_is_reported_by_its_connection(listener, reported):
    listener.on_event(Server(), "key", ConnectionFailed(code="handshake_timeout", reason="silent"))
    assert [event.peer for event in reported] == ["key"]


def test_a_reader_that_leaves_in_peace_is_forgotten(listener, reported):
    listener.on_event(Server(), "key", ready())
    listener.on_event(Server(), "key", ConnectionClosed(reason="done"))
    assert reported == []
    with pytest.raises(KeyError):
        listener.on_event(Server(), "key", ReleaseReceived(leases=REFS))


@pytest.mark.parametrize("bind", ["tcp://nowhere.invalid:5000", "tcp://203.0.113.7:5000"])
async def test_an_address_that_cannot_be_bound_is_a_matter_of_configuration(bind, keeper, reported):
    with pytest.raises(ConfigInvalid):
        async with open_listener(bind=bind, ours=side(), keeper=keeper, report=reported.append):
            pytest.fail("it listens")
