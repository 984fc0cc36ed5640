import asyncio
import socket
from contextlib import asynccontextmanager

import pytest
import zmq
from msgspec import structs

from handshake.codec import decode
from handshake.errors import AddressInvalid, Closed, LocalProtocolError
from handshake.limits import Limits
from handshake.messages import (
    Bye,
    ConnectionClosed,
    ConnectionFailed,
    Hello,
    PeerReady,
    Publication,
    Publish,
    Refuse,
    Released,
    ReleaseReceived,
    Welcome,
)
from handshake.security import AllowedKeys
from handshake.server import HELLO_BYTES_MAX, WAITING_MAX, HandshakeServer, open_server
from handshake.sockets import Channel, Delivery
from tests.helpers.waiting import patiently

from .helpers import (
    ANSWERS,
    CONSUMED,
    CONSUMER,
    EXAMPLES,
    LEASES,
    LIMITS,
    PATIENCE_S,
    PRODUCED,
    PRODUCER,
    SECURITY,
    Recorder,
    connected,
    frames_of,
    ignore,
    raw_dealer,
    serving,
)

HELLO = frames_of(EXAMPLES["hello"])
PUBLISH = frames_of(Publish(publication=CONSUMED))


class Switchboard(Channel):
    """A channel without a socket: what the server sends is kept, by peer."""

    def __init__(self):
        self.endpoint = "tcp://127.0.0.1:1"
        self.sent = {}
        self.gone = set()

    def send(self, frames):
        routing_id, *body = frames
        if routing_id in self.gone:
            return Delivery.GONE
        self.sent.setdefault(routing_id, []).append(decode(body, LIMITS.frame_bytes_max))
        return Delivery.QUEUED

    def kinds_to(self, routing_id):
        return [type(message) for message in self.sent.get(routing_id, [])]


NO_GRACE_S = 1e-12
"""Shorter than one turn of anything: whoever is older gives way."""


class Hall:
    """A server on a switchboard: everything happens within the calls, in one order."""

    def __init__(self, limits=LIMITS, **more):
        self.board = Switchboard()
        self.recorder = Recorder()
        self.server = HandshakeServer(self.board, PRODUCER, PRODUCED, self.recorder, limits, **more)

    def hear(self, routing_id, frames, key=""):
        self.server.receive([routing_id, *frames], key)

    def make_ready(self, routing_id, key=""):
        self.hear(routing_id, HELLO, key)
        self.hear(routing_id, PUBLISH, key)

    def codes(self):
        return [failed.code for failed in self.recorder.of(ConnectionFailed)]


@pytest.fixture
async def hall():
    hall = Hall(Limits(closing_s=0.01))
    yield hall
    await hall.server.leave()


async def test_each_connection_is_a_peer_of_its_own(hall):
    hall.make_ready(b"one")
    hall.make_ready(b"two")
    assert [peer.identity for peer in hall.server.peers] == [CONSUMER, CONSUMER]
    one, two = (peer.key for peer in hall.server.peers)
    hall.hear(b"two", frames_of(EXAMPLES["release"]))
    assert hall.recorder.seen[-1] == (two, ReleaseReceived(read=True, leases=LEASES))
    hall.server.send(two, Released(leases=ANSWERS))
    assert hall.board.kinds_to(b"two") == [Welcome, Publish, Released]
    hall.hear(b"one", frames_of(Bye(reason="done")))
    assert [peer.key for peer in hall.server.peers] == [two]
    assert hall.recorder.seen[-1] == (one, ConnectionClosed(reason="done"))
    with pytest.raises(Closed):
        hall.server.send(one, Released(leases=ANSWERS))


async def test_every_client_is_given_the_pass_of_its_key_and_name():
    hall = Hall(Limits(closing_s=0.01), make_pass=lambda key, identity: f"{key}/{identity.engine_id}".encode())
    for routing_id, key in ((b"one", "aa"), (b"two", "bb")):
        hall.server.receive([routing_id, *HELLO], key)
    passes = [message.pass_ for sent in hall.board.sent.values() for message in sent if isinstance(message, Publish)]
    assert passes == [b"aa/decode-0", b"bb/decode-0"]
    await hall.server.leave()


@pytest.mark.parametrize("broken", [lambda *_: 1 / 0, lambda *_: bytes(65), lambda *_: None])
async def test_a_pass_that_cannot_be_made_is_logged_and_the_client_gets_none(broken, caplog):
    hall = Hall(Limits(closing_s=0.01), make_pass=broken)
    hall.make_ready(b"one")
    assert [message.pass_ for message in hall.board.sent[b"one"] if isinstance(message, Publish)] == [b""]
    assert len(hall.server.peers) == 1
    assert "making a pass failed" in caplog.text
    await hall.server.leave()


async def test_what_is_remembered_of_dismissed_connections_is_bounded():
    hall = Hall(Limits(peers_max=8))
    for number in range(100):
        hall.hear(b"rude%d" % number, [b"garbage"])
    assert len(hall.server._dismissed) == 8
    assert hall.server._drivers == {}
    hall.hear(b"rude99", [b"garbage"])
    assert hall.board.kinds_to(b"rude99") == [Refuse]


async def test_handshakes_under_way_are_bounded():
    hall = Hall(Limits(pending_handshakes_max=2, handshake_grace_s=NO_GRACE_S, closing_s=0.01))
    for routing_id in (b"one", b"two", b"three"):
        hall.hear(routing_id, HELLO)
    assert hall.board.kinds_to(b"two") == hall.board.kinds_to(b"three") == [Welcome, Publish]
    assert hall.board.kinds_to(b"one") == [Welcome, Publish, Refuse]
    assert hall.board.sent[b"one"][-1].code == "busy"
    hall.hear(b"two", PUBLISH)
    hall.make_ready(b"four")
    assert len(hall.server.peers) == 2
    await hall.server.leave()


async def test_a_handshake_has_time_to_end_before_a_newcomer_replaces_it():
    hall = Hall(Limits(pending_handshakes_max=2, handshake_grace_s=3600, closing_s=0.01))
    for routing_id in (b"one", b"two", b"three"):
        hall.hear(routing_id, HELLO)
    assert hall.board.kinds_to(b"three") == [Refuse]
    assert hall.board.sent[b"three"][-1].code == "busy"
    hall.hear(b"one", PUBLISH)
    hall.make_ready(b"four")
    assert len(hall.server.peers) == 2
    await hall.server.leave()


GREEDY, MODEST = "a" * 64, "b" * 64


@asynccontextmanager
async def members_hall(**limits):
    """A hall of members that are told apart by their keys."""
    allowed = AllowedKeys([GREEDY, MODEST])
    limits = Limits(**{"closing_s": 0.01, "handshake_s": 4 * PATIENCE_S} | limits)
    hall = Hall(limits, security=SECURITY.with_own_key(bytes(31) + b"k", allowed))
    hall.allowed = allowed
    try:
        yield hall
    finally:
        await hall.server.leave()


async def turns():
    """Let the loop do what is due."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_member_that_left_while_it_waited_keeps_no_place():
    async with members_hall(peers_max=1) as hall:
        hall.make_ready(b"one", MODEST)
        for routing_id in (b"two", b"three"):
            hall.hear(routing_id, HELLO, MODEST)
        timers = [each.timer for each in hall.server._waiting.values()]
        hall.board.gone = {b"two"}  # it has left without a word
        hall.hear(b"one", frames_of(Bye()))
        await turns()
        assert [each.cancelled() for each in timers] == [True, True], "nobody waits any longer"
        assert hall.board.kinds_to(b"three") == [Welcome, Publish]
        assert hall.codes() == ["connection_lost"]


def let_pass(monkeypatch, seconds):
    """Have the clock of the loop jump: what is due meanwhile comes in its next turn, behind what has arrived."""
    loop = asyncio.get_running_loop()
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + seconds)


async def test_a_place_that_is_free_when_the_wait_ends_is_given(monkeypatch):
    async with members_hall(peers_max=1) as hall:
        hall.make_ready(b"one", MODEST)
        hall.hear(b"two", HELLO, MODEST)
        let_pass(monkeypatch, 2 * PATIENCE_S)
        asyncio.get_running_loop().call_soon(hall.hear, b"one", frames_of(Bye()))
        await turns()
        assert hall.board.kinds_to(b"two") == [Welcome, Publish]


async def test_what_waits_is_bounded():
    async with members_hall(peers_max=2, connections_per_key_max=10_000) as hall:
        for number in range(2 + WAITING_MAX + 3):
            hall.hear(b"member%d" % number, HELLO, MODEST)
        await turns()
        assert hall.codes() == ["too_many_peers"] * 3
        hall.hear(b"member0", frames_of(Bye()))
        await turns()
        hall.hear(b"long", [bytes(HELLO_BYTES_MAX + 1)], MODEST)
        await turns()
        assert hall.codes() == ["too_many_peers"] * 4
        assert hall.board.kinds_to(b"member2") == [Welcome, Publish]


async def test_the_longest_hello_may_wait():
    longest = structs.replace(CONSUMER, engine_id="\U0001f600" * 256, software="\U0001f600" * 64)
    (frame,) = frames_of(Hello(version_min=65535, version_max=65535, identity=longest))
    assert len(frame) < HELLO_BYTES_MAX / 2


async def test_members_that_wait_hear_that_the_server_leaves():
    async with members_hall(peers_max=1) as hall:
        hall.make_ready(b"one", MODEST)
        hall.hear(b"two", HELLO, MODEST)
        await hall.server.leave()
        assert [message.code for message in hall.board.sent[b"two"]] == ["closing"]
        hall.hear(b"three", HELLO, MODEST)
        assert [message.code for message in hall.board.sent[b"three"]] == ["closing"]


async def test_the_program_may_refuse_a_publication(hall):
    hall.make_ready(b"odd")
    (peer,) = hall.server.peers
    with pytest.raises(LocalProtocolError):
        hall.server.disconnect(peer.key, "No Such Code!", "")
    hall.server.disconnect(peer.key, "publication_refused", "no manifest of this model", "Serve the same model.")
    hall.server.disconnect(peer.key, "publication_refused", "again")
    (failed,) = await hall.recorder.wait_of(ConnectionFailed)
    assert (failed.code, failed.remedy) == ("publication_refused", "Serve the same model.")
    assert hall.board.kinds_to(b"odd") == [Welcome, Publish, Refuse]
    hall.server.disconnect(peer.key, "publication_refused", "and again")
    assert hall.server.peers == ()


async def test_leaving_is_answered_by_all_or_ends_at_its_deadline():
    hall = Hall(Limits(closing_s=0.05))
    for routing_id in (b"one", b"two"):
        hall.make_ready(routing_id)
    leaving = asyncio.ensure_future(hall.server.leave())
    await asyncio.sleep(0)
    hall.hear(b"one", frames_of(Bye()))
    hall.hear(b"late", HELLO)
    assert [message.code for message in hall.board.sent[b"late"]] == ["closing"]
    await patiently(leaving)
    assert hall.board.kinds_to(b"two") == [Welcome, Publish, Bye]
    assert [event.reason for event in hall.recorder.of(ConnectionClosed)] == ["the server is leaving"] * 2
    await hall.server.leave()  # leaving again changes nothing


async def test_leaving_waits_for_those_that_are_there_now():
    hall = Hall(Limits(closing_s=PATIENCE_S))
    hall.make_ready(b"earlier")
    hall.hear(b"earlier", frames_of(Bye()))
    hall.make_ready(b"present")
    leaving = asyncio.ensure_future(hall.server.leave())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not leaving.done()
    hall.hear(b"present", frames_of(Bye()))
    await patiently(leaving)


async def test_nobody_is_waited_for_when_nobody_is_there():
    hall = Hall(Limits(closing_s=10 * PATIENCE_S))
    await patiently(hall.server.leave())


async def test_a_peer_that_goes_on_talking_after_a_refusal_is_cut_off():
    async with serving() as server, raw_dealer(server.endpoint) as rude, connected(server.endpoint) as witness:
        monitor = rude.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        cut = asyncio.ensure_future(monitor.recv_multipart())
        while not cut.done():
            await rude.send(bytes(60_000))  # each is no message
            await asyncio.sleep(0)
        rude.disable_monitor()
        assert server.failures["overflowed"] >= 1  # ZeroMQ dials again by itself
        witness.send(EXAMPLES["release"])
        assert server.peers[0].identity == CONSUMER


async def test_a_tcp_client_that_sends_rubbish_harms_nobody():
    recorder = Recorder()
    async with serving(on_event=recorder) as server:
        host, port = server.endpoint.removeprefix("tcp://").split(":")
        rude = []
        for rubbish in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 10_000, b"\xff" + bytes(8) + b"\x7f\x03", b""):
            rude.append(socket.create_connection((host, int(port))))
            rude[-1].sendall(rubbish)
        async with connected(server.endpoint) as client:
            assert client.identity == PRODUCER
        for connection in rude:
            connection.close()
        assert recorder.of(ConnectionFailed) == []


async def test_a_member_that_never_says_hello_costs_nothing():
    async with serving() as server, raw_dealer(server.endpoint) as mute:
        async with connected(server.endpoint):
            assert len(server._drivers) == 1
        await mute.send_multipart(HELLO)
        assert isinstance(decode(await patiently(mute.recv_multipart()), LIMITS.frame_bytes_max), Welcome)


async def test_a_peer_that_vanished_is_noticed_by_the_next_ping():
    recorder = Recorder()
    limits = Limits(ping_interval_s=0.1, silence_s_max=1000)
    async with serving(on_event=recorder, limits=limits) as server:
        async with raw_dealer(server.endpoint) as vanishing:
            await vanishing.send_multipart(HELLO)
            await vanishing.send_multipart(PUBLISH)
            await recorder.wait_of(PeerReady)
        (failed,) = await recorder.wait_of(ConnectionFailed)
        assert failed.code == "connection_lost"
        assert server.peers == ()


async def test_a_program_that_fails_harms_only_that_peer(caplog):
    def on_event(_key, event):
        if isinstance(event, ReleaseReceived):
            raise RuntimeError("a defect of the program")

    recorder = Recorder()
    async with serving(on_event=on_event) as server, connected(server.endpoint, on_event=recorder) as client:
        client.send(EXAMPLES["release"])
        (failed,) = await recorder.wait_of(ConnectionFailed)
        assert (failed.code, failed.refused) == ("internal_error", True)
        async with connected(server.endpoint) as newcomer:
            assert newcomer.identity == PRODUCER
    assert "a defect of the program" in caplog.text


async def test_what_would_be_unsafe_or_invalid_is_not_opened():
    arguments = {"identity": PRODUCER, "publication": PRODUCED, "on_event": ignore}
    with pytest.raises(AddressInvalid, match="without a cluster secret"):
        async with open_server(bind="tcp://0.0.0.0:0", security=None, **arguments):
            raise AssertionError("unreachable")
    broken = Publication(schema=1, digest=bytes(32), payload=b"")
    with pytest.raises(LocalProtocolError, match="digest"):
        async with open_server(bind="tcp://127.0.0.1:0", security=SECURITY, **{**arguments, "publication": broken}):
            raise AssertionError("unreachable")
    async with open_server(bind="tcp://0.0.0.0:0", security=None, insecure_allowed=True, **arguments) as server:
        assert server.endpoint.startswith("tcp://0.0.0.0:")


async def test_the_error_of_the_block_passes_unchanged():
    with pytest.raises(KeyError, match="mine"):
        async with serving():
            raise KeyError("mine")
