"""A consumer reaches the rank that the ticket names, in the life that it names, or learns why not."""

import asyncio
import socket

import msgspec
import pytest

from handshake import ClusterSecurity, CurveKeys, RenewReceived
from handshake.limits import LEASES_MAX
from kvflow.errors import AuthenticationFailed, DeadlineExceeded, PeerLost, StaleLease
from kvflow.ids import Credentials, agent_name, pass_of
from kvflow.rendezvous.dialer import LeaseEnd, open_link
from kvflow.rendezvous.listener import Listener
from kvflow.worker.environment import PRODUCTION
from kvflow.worker.producer import LeaseManager
from kvflow.worker.runtime import open_worker
from tests.helpers.loops import looped
from tests.helpers.waiting import patiently, until
from tests.unit.kvflow.worker.helpers import lease_of
from tests.unit.kvflow.worker.pulling import FaultyNetwork

from .helpers import (
    OURS,
    PATIENCE_S,
    READER_INCARNATION,
    SECURITY,
    cache_of,
    config,
    linked,
    peer,
    producing,
    side,
)


@pytest.fixture
def questions(monkeypatch):
    """Return the leases of each renewal that a producer was asked for."""
    asked, on_renew = [], LeaseManager.on_renew
    monkeypatch.setattr(
        LeaseManager,
        "on_renew",
        lambda self, leases, reader: (asked.append(list(leases)), on_renew(self, leases, reader))[1],
    )
    return asked


@pytest.fixture
def mute(monkeypatch):
    """Return a function that has producers hear no renewal from then on, and its opposite."""
    on_event = Listener.on_event

    def hear_nothing(self, key, event):
        if not isinstance(event, RenewReceived):
            on_event(self, key, event)

    return lambda muted=True: monkeypatch.setattr(Listener, "on_event", hear_nothing if muted else on_event)


async def test_a_link_knows_its_peer():
    async with producing() as producer, linked(producer) as link:
        assert link.peer == peer(producer.endpoint, incarnation=producer.incarnation)
        assert link.agent == agent_name(f"prefill-0/0/{producer.incarnation}", SECURITY.server.public_key)
        assert link.advertisement.manifest.identity.incarnation == producer.incarnation
        assert link.advertisement.planes.keys() == {"loopback"}


OTHER_SECRET = "the secret that comes next"
KEYS = [CurveKeys.from_private(bytes.fromhex(digits * 32)) for digits in ("12", "34")]


@pytest.mark.parametrize("by", ["the secret", "an accepted secret", "keys of our own"])
async def test_a_reader_has_a_pass_for_the_key_that_it_has_dialed_with(by):
    theirs, ours = KEYS
    settings, accepted, public_key, shown = {
        "the secret": ({}, {}, "", SECURITY.client),
        "an accepted secret": (
            {"cluster_secret": OTHER_SECRET},
            {"cluster_secret_accepted": OTHER_SECRET},
            ClusterSecurity.from_secret(OTHER_SECRET).server.public_key,
            ClusterSecurity.from_secret(OTHER_SECRET).client,
        ),
        "keys of our own": (
            {"private_key": theirs.private_key, "allowed_keys": (ours.public_key,)},
            {"private_key": ours.private_key, "allowed_keys": (theirs.public_key,)},
            theirs.public_key,
            ours,
        ),
    }[by]
    reader = ("decode-0", 0, READER_INCARNATION)
    environment = msgspec.structs.replace(PRODUCTION, draw_bits=lambda _bits: 7)
    async with open_worker(config(**settings), cache_of(), environment=environment) as producer:
        local = side(READER_INCARNATION, engine_id="decode-0", **accepted)
        async with linked(producer, local=local, public_key=public_key) as link:
            pass_ = pass_of((7).to_bytes(32), shown.public_key, *reader)
            assert link.credentials == Credentials(shown.public_key, *reader, pass_)


async def test_each_side_states_its_certificate_before_the_pass_is_made():
    identity = msgspec.structs.replace
    environment = msgspec.structs.replace(PRODUCTION, draw_bits=lambda _bits: 7)
    async with open_worker(config(), cache_of(), environment=environment) as producer:
        local = side(READER_INCARNATION, engine_id="decode-0")
        local = identity(local, identity=identity(local.identity, certificate=b"of the reader"))
        async with linked(producer, local=local) as link:
            who = (SECURITY.client.public_key, "decode-0", 0, READER_INCARNATION)
            assert link.credentials.pass_ == pass_of((7).to_bytes(32), *who, certificate=b"of the reader")
            assert link.credentials.certificate == b""  # the producer does not encrypt


@pytest.mark.parametrize(
    ("expected", "error"),
    [({"engine_id": "prefill-1"}, PeerLost), ({"rank": 1}, PeerLost), ({"incarnation": "c" * 32}, StaleLease)],
)
async def test_a_worker_that_the_ticket_does_not_name_is_not_read_from(expected, error):
    async with producing() as producer:
        with pytest.raises(error) as caught:
            async with linked(producer, **expected):
                pytest.fail("it was taken for another")
        assert caught.value.peer == producer.endpoint


async def test_an_end_is_told_once_with_its_reason():
    ends = asyncio.Queue()
    async with producing() as producer:
        link = linked(producer, on_ended=lambda *end: ends.put_nowait(end))
        opened = await link.__aenter__()
    try:
        code, _ = await patiently(ends.get())
        assert code == "peer_closed"
        opened.release([(1, 1)], read=True)  # nobody hears it, and nothing happens
        opened.renew([(1, 1)])
        assert await opened.ask_end((1, 1), within_s=1000.0) == LeaseEnd("unknown", None)
    finally:
        await link.__aexit__(None, None, None)
    assert ends.empty()


async def test_another_secret_is_told_at_once():
    async with producing() as producer:
        stranger = side(engine_id="decode-0", cluster_secret="another secret, long enough")
        with pytest.raises(AuthenticationFailed, match=producer.endpoint):
            async with linked(producer, local=stranger):
                pytest.fail("it was let in")


async def test_nobody_at_all_is_a_lost_peer_or_a_deadline():
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))  # and does not listen
        nobody = peer("tcp://{}:{}".format(*dead.getsockname()))
        with pytest.raises((PeerLost, DeadlineExceeded)):
            async with open_link(nobody, local=side(engine_id="decode-0", connect_s=0.05), on_ended=print):
                pytest.fail("nobody is there")


async def test_many_leases_travel_in_messages_of_bounded_size():
    """A longer message would be a violation of the protocol, and the end of the connection."""
    count = 2 * LEASES_MAX + 1
    async with producing() as producer, linked(producer) as link:
        leases = [lease_of(producer.offer(str(number), [[1]], 4)) for number in range(count)]
        link.renew(leases)
        link.release(leases, read=False)
        assert await patiently(producer.wait_offer(str(count - 1))) == "released"
        assert producer.snapshot().leases == 0


def granted(ticket, *, age_s):
    """Return the grant of a ticket as if it had been signed some time ago, or without the time."""
    (grant,) = ticket.grants
    issued_ms = None if age_s is None else grant.issued_ms - int(1000 * age_s)
    return msgspec.structs.replace(grant, issued_ms=issued_ms)


@pytest.mark.parametrize("ours_ahead_s", [0.0, 3600.0, -3600.0])
@pytest.mark.parametrize("theirs_ahead_s", [0.0, 7200.0])
async def test_an_expired_ticket_seems_over_however_far_the_clocks_are_apart(ours_ahead_s, theirs_ahead_s):
    local = msgspec.structs.replace(OURS, network=FaultyNetwork(ours_ahead_s))
    async with producing(network=FaultyNetwork(theirs_ahead_s)) as producer, linked(producer, local=local) as link:
        assert link.clock_offset.ahead_s == pytest.approx(theirs_ahead_s - ours_ahead_s, abs=1.0)
        ticket = producer.offer("r", [[1]], 4)
        grants = [granted(ticket, age_s=age_s) for age_s in (10.0, 60.0, None)]
        assert [link.may_be_over(grant) for grant in grants] == [False, True, False]


async def test_a_question_without_an_answer_has_a_deadline(mute):
    async with producing() as producer, linked(producer) as link:
        lease = lease_of(producer.offer("r", [[1]], 4))
        producer.revoke("r")
        mute()
        patient = asyncio.ensure_future(link.ask_end(lease, within_s=PATIENCE_S))
        assert await link.ask_end(lease, within_s=0.01) == LeaseEnd("unknown", None)
        assert len(link._awaited._waiting[lease]) == 1, "what nobody awaits is forgotten, and the rest is not"
        mute(False)
        assert (await link.ask_end(lease, within_s=PATIENCE_S)).ended_by == "revoked"
        assert (await patient).ended_by == "revoked"
        assert link._awaited._waiting == {}


async def test_how_a_lease_ended_is_not_hidden_by_an_answer_from_before(questions):
    async with producing() as producer, linked(producer) as link:
        lease = lease_of(producer.offer("r", [[1]], 4))
        asking = asyncio.ensure_future(link.ask_end(lease, within_s=PATIENCE_S))
        await until(lambda: questions)  # and the answer is that it is held
        producer.revoke("r")
        link.renew([lease])
        assert (await asking).ended_by == "revoked"


async def test_questions_of_one_turn_about_a_lease_are_one_message(questions):
    async with producing() as producer, linked(producer) as link:
        ticket = producer.offer("r", [[1]], 4)
        producer.revoke("r")
        ends = await asyncio.gather(*(link.ask_end(lease_of(ticket), within_s=PATIENCE_S) for _ in range(3)))
        assert [end.ended_by for end in ends] == ["revoked"] * 3
        assert ends[0].ended_s >= 0.0
        assert questions == [[lease_of(ticket)]]


async def test_an_older_producer_says_no_more_than_that_a_lease_has_ended(monkeypatch):
    monkeypatch.setattr(Listener, "_explained", lambda self, answer: answer)
    async with producing() as producer, linked(producer) as link:
        ticket = producer.offer("r", [[1]], 4)
        producer.revoke("r")
        end = await link.ask_end(lease_of(ticket), within_s=PATIENCE_S)
        assert (end, end.words) == (LeaseEnd("unknown", None), "it ended, reason unknown")


@looped(
    "ended_by, words",
    [
        ("expired", "it expired 12.500 s ago"),
        ("revoked", "the producer revoked it 12.500 s ago"),
        ("used", "it was used before, and released 12.500 s ago"),
        ("released", "a reader released it 12.500 s ago"),
        ("of_a_newer_release", "of_a_newer_release 12.500 s ago"),
    ],
)
def test_how_a_lease_has_ended_is_said_in_words(ended_by, words):
    assert LeaseEnd(ended_by, 12.5).words == words
