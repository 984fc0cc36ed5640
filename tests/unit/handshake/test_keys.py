"""A key for each worker, a list of whom they trust, and two secrets for the time of a change."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from zmq.utils import z85

from handshake.errors import AddressInvalid, Unauthenticated
from handshake.limits import LEASES_MAX, Limits
from handshake.messages import ConnectionClosed, ConnectionFailed, LeaseRef, PeerReady, Release, ReleaseReceived
from handshake.security import AllowedKeys, ClusterSecurity, CurveKeys, draw_secret, sign
from handshake.sockets import ZeroMqNetwork
from tests.helpers.loops import looped
from tests.helpers.waiting import patiently, until

from .helpers import (
    EXAMPLES,
    OTHER_SECURITY,
    PATIENCE_S,
    PRODUCER,
    SECURITY,
    Recorder,
    connected,
    frames_of,
    raw_dealer,
    serving,
)

SECRET, OTHER_SECRET = "a secret of the tests", "another secret, as long"


class Member:
    """One worker's keys."""

    def __init__(self, *trusted):
        keys = CurveKeys.draw()
        self.public_key = keys.public_key
        self.allowed = AllowedKeys(other.public_key for other in trusted)
        self.security = SECURITY.with_own_key(z85.decode(keys.private), self.allowed)

    def trust(self, *others):
        self.allowed.replace(other.public_key for other in others)
        return self


def two_that_trust_each_other():
    producer = Member()
    consumer = Member(producer)
    return producer.trust(consumer), consumer


async def refused(endpoint, security, **settings):
    with pytest.raises(Unauthenticated) as caught:
        async with connected(endpoint, security=security, **settings):
            pytest.fail("it was let in")
    return caught.value


async def test_who_is_on_both_lists_is_met_and_known_by_its_key():
    producer, consumer = two_that_trust_each_other()
    heard = Recorder()
    async with (
        serving(security=producer.security, on_event=heard) as server,
        connected(server.endpoint, security=consumer.security, server_key=producer.public_key) as client,
    ):
        await heard.wait_of(PeerReady)
        assert client.identity == PRODUCER
        (peer,) = server.peers
        assert peer.public_key == consumer.public_key
        # Both have the clocks of this machine, which it read one after the other, perhaps with a stall between.
        for offset in (peer.clock_offset, client.clock_offset):
            assert abs(offset.ahead_s) <= offset.error_s + PATIENCE_S


async def test_a_client_that_is_not_on_the_list_is_turned_away_and_counted():
    producer, consumer = two_that_trust_each_other()
    stranger = Member(producer)
    async with serving(security=producer.security) as server:
        await refused(server.endpoint, stranger.security, server_key=producer.public_key)
        await refused(server.endpoint, SECURITY)  # the secret opens no door where each worker has a key
        async with connected(server.endpoint, security=consumer.security, server_key=producer.public_key):
            await until(lambda: server.failures.keys() == {"key_unknown", "unauthenticated"})  # once, or dialed again


async def test_a_server_that_is_not_on_our_list_is_not_dialed():
    producer, consumer = two_that_trust_each_other()
    consumer.trust()
    for key in (producer.public_key, ""):
        error = await refused("tcp://127.0.0.1:9", consumer.security, server_key=key)
        assert "allowed keys" in error.message


async def test_nobody_else_is_taken_for_the_server_that_is_named():
    producer, consumer = two_that_trust_each_other()
    another = Member(consumer)
    consumer.trust(producer, another)
    async with serving(security=another.security) as server:
        await refused(server.endpoint, consumer.security, server_key=producer.public_key)


async def test_a_new_list_admits_new_keys_at_once_and_drops_those_that_are_gone():
    producer, old = two_that_trust_each_other()
    new = Member(producer)
    ended, heard = Recorder(), Recorder()
    key = {"server_key": producer.public_key}
    async with serving(security=producer.security, on_event=heard) as server:
        async with connected(server.endpoint, security=old.security, on_event=ended, **key):
            await refused(server.endpoint, new.security, **key)
            producer.trust(old, new)
            server.recheck_keys()
            async with connected(server.endpoint, security=new.security, **key) as client:
                await heard.wait_of(PeerReady, 2)
                assert len(server.peers) == 2
                producer.trust(new)
                server.recheck_keys()
                (failed,) = await ended.wait_of(ConnectionFailed)
                assert (failed.code, failed.refused) == ("key_removed", True)
                assert failed.remedy
                assert [peer.public_key for peer in server.peers] == [new.public_key]
                assert set(server._allowances) == {new.public_key}, "what is kept is bounded by the list"
                await refused(server.endpoint, old.security, **key)
                client.send(EXAMPLES["release"])
                await heard.wait_of(ReleaseReceived)
        assert server.failures["key_removed"] == 1


async def test_who_was_removed_before_it_spoke_is_refused():
    """It has passed the door, and holds a connection on which nobody has said anything yet."""
    producer, consumer = two_that_trust_each_other()
    recorder = Recorder()
    async with (
        serving(security=producer.security, on_event=recorder) as server,
        raw_dealer(server.endpoint, consumer.security.towards(producer.public_key)) as dealer,
    ):
        await dealer.send_multipart(frames_of(EXAMPLES["ping"]))  # rubbish: its connection is forgotten
        await patiently(dealer.recv_multipart())
        producer.trust()
        server._dismissed.clear()
        await dealer.send_multipart(frames_of(EXAMPLES["hello"]))
        await recorder.wait_for(lambda seen: [e.code for e in seen.of(ConnectionFailed)][1:] == ["key_removed"])


async def test_connections_of_one_key_are_counted_and_no_others():
    producer, greedy = two_that_trust_each_other()
    modest = Member(producer)
    producer.trust(greedy, modest)
    recorder = Recorder()
    limits = Limits(connections_per_key_max=2)
    async with serving(security=producer.security, limits=limits) as server, asyncio.TaskGroup() as group:
        held = asyncio.Event()

        async def hold(member):
            key = producer.public_key
            async with connected(server.endpoint, security=member.security, on_event=recorder, server_key=key):
                await held.wait()

        group.create_task(hold(greedy))
        group.create_task(hold(greedy))
        await recorder.wait_of(PeerReady, 2)
        async with raw_dealer(server.endpoint, greedy.security.towards(producer.public_key)) as dealer:
            await dealer.send_multipart(frames_of(EXAMPLES["hello"]))
            await patiently(dealer.recv_multipart())
        assert server.failures == {"too_many_connections": 1}
        group.create_task(hold(modest))
        await recorder.wait_of(PeerReady, 3)
        held.set()


class StoppedClock(ZeroMqNetwork):
    """A network where no time passes, so that nothing that was used up comes back."""

    def now(self):
        return 100.0


@pytest.mark.parametrize("beside", [False, True])
async def test_a_key_that_connects_again_has_no_fresh_rate_limit(beside):
    producer, consumer = two_that_trust_each_other()
    heard, ended = Recorder(), Recorder()
    limits = Limits(leases_per_s_max=LEASES_MAX)
    leases = tuple(LeaseRef(slot=slot, epoch=1) for slot in range(LEASES_MAX))
    key = {"security": consumer.security, "server_key": producer.public_key}
    async with (
        serving(security=producer.security, on_event=heard, limits=limits, network=StoppedClock()) as server,
        AsyncExitStack() as stack,
    ):
        earlier = await stack.enter_async_context(connected(server.endpoint, **key))
        earlier.send(Release(read=True, leases=leases))
        await heard.wait_of(ReleaseReceived)
        if not beside:
            await stack.aclose()
            await heard.wait_of(ConnectionClosed)
        async with connected(server.endpoint, on_event=ended, **key) as again:
            again.send(Release(read=True, leases=leases[:1]))
            (failed,) = await ended.wait_of(ConnectionFailed)
            assert failed.code == "rate_exceeded"


STEPS = [
    (SECRET, None),
    (SECRET, OTHER_SECRET),
    (OTHER_SECRET, SECRET),
    (OTHER_SECRET, None),
]
"""What a worker is told, step by step, while a cluster changes its secret: the one it uses, and one it accepts."""


def told(secret, accepted):
    security = ClusterSecurity.from_secret(secret)
    return security if accepted is None else security.accepting(accepted)


@pytest.mark.parametrize("before", range(len(STEPS) - 1))
async def test_workers_of_two_steps_of_a_change_of_secret_meet_either_way(before):
    for ours, theirs in ((before, before + 1), (before + 1, before), (before, before)):
        producer, consumer = told(*STEPS[theirs]), told(*STEPS[ours])
        async with serving(security=producer) as server:
            key = producer.server.public_key  # as the ticket says
            async with connected(server.endpoint, security=consumer, server_key=key) as client:
                assert client.identity == PRODUCER
        assert consumer.verifies(b"ticket", sign(producer.ticket_key, b"ticket"))


def test_a_secret_that_is_no_longer_accepted_opens_nothing():
    assert not SECURITY.admits(OTHER_SECURITY.client.public_key)
    assert not SECURITY.verifies(b"ticket", sign(OTHER_SECURITY.ticket_key, b"ticket"))
    with pytest.raises(Unauthenticated, match="does not follow from our cluster secret") as caught:
        SECURITY.towards(OTHER_SECURITY.server.public_key)
    assert caught.value.local


@looped("key", ["", "0" * 63, "0" * 65, "A" * 64, "0" * 64 + "\n", 7, None])
def test_a_malformed_key_is_refused_unseen_and_the_list_stays(key):
    allowed = AllowedKeys(["a" * 64])
    with pytest.raises(AddressInvalid) as caught:
        allowed.replace(["b" * 64, key])
    assert repr(key) not in str(caught.value)
    assert "a" * 64 in allowed
    assert "b" * 64 not in allowed


def test_what_is_drawn_is_new_each_time_and_good_enough():
    assert draw_secret() != draw_secret()
    ClusterSecurity.from_secret(draw_secret())
    assert CurveKeys.draw().public_key != CurveKeys.draw().public_key


def test_no_repr_shows_a_key_of_ones_own():
    member = Member()
    shown = repr(member.security) + repr(member.security.accepting(OTHER_SECRET)) + repr(member.allowed)
    private = member.security.client.private
    assert private.decode() not in shown
    assert z85.decode(private).hex() not in shown
