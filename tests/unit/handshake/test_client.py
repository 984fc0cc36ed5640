import asyncio
import gc
import socket
import time
from contextlib import ExitStack, contextmanager

import msgspec
import pytest
import uvloop
import zmq

from handshake.codec import decode
from handshake.errors import (
    AddressInvalid,
    Closed,
    ConnectionLost,
    ConnectionRefused,
    LocalProtocolError,
    RemoteProtocolError,
    TimedOut,
    Unauthenticated,
)
from handshake.limits import Limits
from handshake.messages import (
    WIRE_VERSION,
    Bye,
    ConnectionClosed,
    ConnectionFailed,
    Hello,
    PeerReady,
    Ping,
    Publish,
    Refuse,
    ReleaseAnswered,
    Released,
    ReleaseReceived,
    Welcome,
)
from handshake.sockets import DialedChannel, first_open, open_listener, resolve, running
from tests.helpers.waiting import patiently
from tests.ports import free_port

from .helpers import (
    ANSWERS,
    CONSUMER,
    EXAMPLES,
    LIMITS,
    OTHER_SECURITY,
    PATIENT,
    PRODUCED,
    PRODUCER,
    SECURITY,
    Recorder,
    connected,
    frames_of,
    serving,
)

SHORT = Limits(connect_s=2)
"""To be waited for, and still longer than this machine stands still between a refusal and its news."""
UNANSWERED = msgspec.structs.replace(PATIENT, closing_s=0.02)
"""Of a client whose goodbye nobody answers."""


async def fails_to_connect(endpoint, error, **options):
    recorder = Recorder()
    with pytest.raises(error) as caught:
        async with connected(endpoint, on_event=recorder, **options):
            raise AssertionError("unreachable")
    assert recorder.seen == [], "without PeerReady there is no event"
    return caught.value


async def talk():
    """Two servers and two clients of each, in one process and on one loop."""
    served = Recorder()
    async with serving(on_event=served) as one, serving(on_event=served, security=None) as two:
        for server, security in ((one, SECURITY), (two, None)):
            answered = Recorder()
            async with (
                connected(server.endpoint, security=security, on_event=answered) as client,
                connected(server.endpoint, security=security) as idle,
            ):
                assert (client.identity, client.publication, client.version) == (PRODUCER, PRODUCED, WIRE_VERSION)
                assert client.rtt_s >= 0
                client.send(EXAMPLES["release"])
                await served.wait_of(ReleaseReceived)
                key = next(key for key, event in served.seen if isinstance(event, ReleaseReceived))
                server.send(key, Released(leases=ANSWERS))
                assert await answered.wait_of(ReleaseAnswered) == [ReleaseAnswered(leases=ANSWERS)]
                assert [type(event) for (event,) in answered.seen] == [PeerReady, ReleaseAnswered]
                await served.wait_of(PeerReady, 2)  # a client may be ready a moment before its server is
                assert len(server.peers) == 2
                assert all(peer.rtt_s is not None for peer in server.peers)
            assert await client.wait_closed() == ConnectionClosed(reason="the client is leaving")
            assert await idle.wait_closed() == ConnectionClosed(reason="the client is leaving")
            await served.wait_of(ConnectionClosed, 2)
            served.seen.clear()
            with pytest.raises(Closed):
                client.send(EXAMPLES["release"])


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_peers_meet_talk_and_part(loop_factory):
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(talk())


@pytest.mark.parametrize(("ours", "theirs"), [(OTHER_SECURITY, SECURITY), (None, SECURITY), (SECURITY, None)], ids=str)
async def test_without_the_same_secret_the_answer_is_quick(ours, theirs):
    took_s = []
    async with serving(security=theirs) as server:
        for _ in range(3):
            begun_s = time.monotonic()
            await fails_to_connect(server.endpoint, Unauthenticated, security=ours, limits=PATIENT)
            took_s.append(time.monotonic() - begun_s)
        async with connected(server.endpoint, security=theirs) as client:
            assert client.identity == PRODUCER
    assert min(took_s) < PATIENT.connect_s / 6  # milliseconds on an idle machine; without an answer, all of `connect_s`


async def test_a_server_that_dies_in_the_handshake_is_no_wrong_secret():
    async def hang_up(_reader, writer):
        writer.close()
        listener.close()

    listener = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        await fails_to_connect(f"tcp://127.0.0.1:{port}", ConnectionLost, limits=SHORT)


async def test_nobody_listens():
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    error = await fails_to_connect(endpoint, ConnectionLost, limits=SHORT)
    assert endpoint in str(error)


async def test_an_address_that_does_not_answer_runs_into_the_connect_deadline(monkeypatch):
    # An address of TEST-NET-1 answers differently on different networks; a dialer that does not dial, never.
    monkeypatch.setattr(DialedChannel, "dial", lambda _channel: None)
    error = await fails_to_connect("tcp://192.0.2.1:9", TimedOut, limits=Limits(connect_s=0.05))
    assert error.phase == "connect"


@pytest.mark.parametrize("endpoint", ["", "localhost", "ipc:///tmp/x", "tcp://127.0.0.1:70000"])
async def test_a_malformed_endpoint_is_a_configuration_error(endpoint):
    await fails_to_connect(endpoint, AddressInvalid)


async def test_an_identity_out_of_bounds_is_found_before_anything_is_dialed():
    nameless = msgspec.structs.replace(CONSUMER, engine_id="")
    await fails_to_connect("tcp://127.0.0.1:9", LocalProtocolError, identity=nameless)


async def meet_impostor(answers, error, **options):
    """Dial a ROUTER with the right keys that answers a Hello with ``answers``."""
    async with open_listener("tcp://127.0.0.1:0", SECURITY, LIMITS) as impostor:
        unsaid = list(answers)

        def answer(frames, _key):
            while unsaid:
                impostor.send([frames[0], *unsaid.pop(0)])

        async with running(impostor.read(answer)):
            return await fails_to_connect(impostor.endpoint, error, **options)


async def test_a_refusal_is_passed_on():
    refusal = Refuse(code="version_unsupported", reason="we speak 99..99", remedy="Upgrade.")
    error = await meet_impostor([frames_of(refusal)], ConnectionRefused)
    assert (error.refusal, error.remedy) == ("version_unsupported", "Upgrade.")
    assert "99..99" in str(error)


@pytest.mark.parametrize(
    "answers",
    [
        [[b"garbage"]],
        [frames_of(Ping(nonce=1))],
        [frames_of(Welcome(clock_s=1.5, version=7, identity=PRODUCER))],
        [frames_of(EXAMPLES["welcome"]), frames_of(EXAMPLES["released"])],
    ],
)
async def test_a_server_that_breaks_the_protocol_is_not_met(answers):
    await meet_impostor(answers, RemoteProtocolError, limits=UNANSWERED)


async def test_a_server_that_says_goodbye_within_the_handshake_is_lost():
    await meet_impostor([frames_of(EXAMPLES["bye"])], ConnectionLost, limits=UNANSWERED)


async def test_a_server_that_stops_within_the_handshake_runs_into_its_deadline():
    limits = Limits(handshake_s=0.2, closing_s=0.05)
    error = await meet_impostor([frames_of(EXAMPLES["welcome"])], TimedOut, limits=limits)
    assert error.phase == "handshake"


async def test_the_client_may_refuse_what_the_server_published():
    served, dialed = Recorder(), Recorder()
    async with serving(on_event=served) as server, connected(server.endpoint, on_event=dialed) as client:
        client.refuse("publication_refused", "another model", "Serve the same model.")
        (told,) = await served.wait_of(ConnectionFailed)
        assert told == ConnectionFailed(
            code="publication_refused", reason="another model", remedy="Serve the same model.", refused=True
        )
        ending = await patiently(client.wait_closed())
        assert (ending.code, ending.refused) == ("publication_refused", False)


async def test_a_server_that_leaves_is_an_end_in_peace():
    recorder = Recorder()
    left = asyncio.Event()
    async with asyncio.TaskGroup() as group:

        async def serve_for_a_while(opened):
            async with serving(limits=PATIENT) as server:
                opened.set_result(server.endpoint)
                await recorder.wait_of(PeerReady)
            left.set()

        opened = asyncio.get_running_loop().create_future()
        group.create_task(serve_for_a_while(opened))
        async with connected(await opened, on_event=recorder) as client:
            assert await patiently(client.wait_closed()) == ConnectionClosed(reason="the server is leaving")
        await patiently(left.wait())
    assert [type(event) for (event,) in recorder.seen] == [PeerReady, ConnectionClosed]


async def test_a_client_that_is_told_goodbye_stays_until_the_server_hangs_up():
    """Else a server that leaves would wait for answers that died in the socket."""
    opened = asyncio.get_running_loop().create_future()
    answered, hung_up = asyncio.Event(), asyncio.Event()

    async def host():
        def answer(frames, _key):
            match decode(frames[1:], LIMITS.frame_bytes_max):
                case Hello():
                    impostor.send([frames[0], *frames_of(EXAMPLES["welcome"])])
                    impostor.send([frames[0], *frames_of(EXAMPLES["publish"])])
                case Publish():
                    impostor.send([frames[0], *frames_of(EXAMPLES["bye"])])
                case Bye():
                    answered.set()

        async with open_listener("tcp://127.0.0.1:0", SECURITY, LIMITS) as impostor, running(impostor.read(answer)):
            opened.set_result(impostor.endpoint)
            await patiently(answered.wait())
            async with serving() as server, connected(server.endpoint):
                pass  # something that takes a while, for a client that does not wait
            hung_up.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(host())
        async with connected(await opened) as client:
            assert await patiently(client.wait_closed()) == ConnectionClosed(reason="leaving")
        assert hung_up.is_set()


async def test_a_client_that_says_goodbye_stays_until_it_is_answered():
    """Else its goodbye could die in the socket, and the server would keep a connection of nobody."""
    answered = asyncio.Event()

    async def answer_slowly(key, told):
        async with serving() as server, connected(server.endpoint):
            pass  # something that takes a while, for a client that does not wait
        answered.set()
        impostor.send([key, *frames_of(told)])

    def answer(frames, _key):
        match decode(frames[1:], LIMITS.frame_bytes_max):
            case Hello():
                impostor.send([frames[0], *frames_of(EXAMPLES["welcome"])])
                impostor.send([frames[0], *frames_of(EXAMPLES["publish"])])
            case Bye():
                group.create_task(answer_slowly(frames[0], Bye()))

    async with (
        open_listener("tcp://127.0.0.1:0", SECURITY, LIMITS) as impostor,
        asyncio.TaskGroup() as group,
        running(impostor.read(answer)),
    ):
        async with connected(impostor.endpoint):
            pass
        assert answered.is_set()


async def test_a_program_that_fails_ends_its_own_connection(caplog):
    def on_event(event):
        if isinstance(event, PeerReady):
            raise RuntimeError("a defect of the program")

    served = Recorder()
    async with serving(on_event=served) as server:
        async with connected(server.endpoint, on_event=on_event) as client:
            assert (await patiently(client.wait_closed())).code == "internal_error"
        (told,) = await served.wait_of(ConnectionFailed)
        assert (told.code, told.refused) == ("internal_error", True)
    assert "a defect of the program" in caplog.text


async def test_waiting_for_the_end_may_be_cancelled():
    async with serving() as server, connected(server.endpoint) as client:
        for _ in range(2):
            waiting = asyncio.ensure_future(client.wait_closed())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
    assert await client.wait_closed() == ConnectionClosed(reason="the client is leaving")


def open_contexts():
    return {id(found) for found in gc.get_objects() if issubclass(type(found), zmq.Context) and not found.closed}


async def test_canceling_at_any_moment_leaves_nothing_behind():
    async with serving() as server:
        before = open_contexts()
        entered = 0

        async def visit():
            nonlocal entered
            async with connected(server.endpoint, limits=UNANSWERED):
                entered += 1
                await asyncio.Event().wait()

        turns = 0
        while not entered:
            visiting = asyncio.ensure_future(visit())
            for _ in range(turns):
                await asyncio.sleep(0)
            visiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await visiting
            assert open_contexts() == before
            turns += 1 + turns // 8
            assert turns < 1_000_000, "it was never entered"
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert len(others) == 3, "the server's reader, its doorkeeper, and who counts strangers"
        async with connected(server.endpoint) as client:
            assert client.identity == PRODUCER


async def test_the_error_of_the_block_passes_unchanged():
    async with serving() as server:
        with pytest.raises(KeyError, match="mine"):
            async with connected(server.endpoint):
                raise KeyError("mine")


async def test_a_name_is_looked_up_beside_the_loop_and_within_the_budget(monkeypatch):
    """ZeroMQ looks names up itself, and blocks: a container that is gone stopped the loop for ten seconds."""
    asked = asyncio.Event()

    async def never(*_args, **_kwargs):
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", never)
    error = await fails_to_connect("tcp://gone.invalid:9", TimedOut, limits=Limits(connect_s=0.1))
    assert asked.is_set()
    assert error.phase == "connect"


async def test_a_name_that_does_not_exist_is_a_peer_that_cannot_be_reached(monkeypatch):
    async def unknown(*_args, **_kwargs):
        raise OSError("Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
    error = await fails_to_connect("tcp://gone.invalid:9", ConnectionLost)
    assert "cannot be resolved" in error.message


async def test_an_address_that_is_silent_leaves_time_for_the_next(monkeypatch):
    async def two(*_args, **_kwargs):
        return [(0, 0, 0, "", (address, port)) for address in ("127.0.0.2", "127.0.0.1")]

    async with serving() as server:
        port = int(server.endpoint.rpartition(":")[2])
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", two)
        with silent("127.0.0.2", port):
            async with connected(
                f"tcp://dual.invalid:{port}", limits=msgspec.structs.replace(PATIENT, connect_s=2)
            ) as client:
                assert client.identity == PRODUCER
            addresses = [f"tcp://127.0.0.{last}:{port}" for last in (2, 3, 1)]
            assert await first_open(addresses, 3.0) == addresses[-1]
            assert await first_open(addresses[:2], 0.1) == addresses[0]


@contextmanager
def silent(host, port):
    """Let connections to an address get no answer, as a firewall does: what listens there has no place for them."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((host, port))
        listener.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((host, port))
        yield


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".b"])
async def test_a_name_that_cannot_be_written_is_a_peer_that_cannot_be_reached(host):
    error = await fails_to_connect(f"tcp://{host}:9", ConnectionLost)
    assert "cannot be resolved" in error.message


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_an_address_needs_no_look_up(monkeypatch, host):
    async def never(*_args, **_kwargs):
        raise AssertionError("there is nothing to look up")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", never)
    assert await resolve(f"tcp://{host}:9") == (f"tcp://{host}:9",)
