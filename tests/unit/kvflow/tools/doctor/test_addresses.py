"""Addresses to listen on, to be reached at, and to dial: each cause is made here, on loopback."""

import os
import socket
import threading
from contextlib import ExitStack, contextmanager

import pytest
import zmq

from kvflow.tools.doctor import facts
from tests.helpers.loops import looped
from tests.ports import free_port

FOREIGN = "192.0.2.7"
"""Source: RFC 5737, addresses of no host."""


@contextmanager
def listening(answer=b"", *, close=False):
    """Listen on loopback, and send each that connects some bytes; yield the endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = []

        def serve():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                connection.sendall(answer)
                if close:
                    connection.close()
                else:
                    kept.append(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)  # ends the accept
        thread.join()
        for connection in kept:
            connection.close()


def codes(findings):
    return [finding.code or finding.status for finding in findings]


@pytest.fixture
def soon(monkeypatch):
    """Wait for what does not come for a short time only."""
    monkeypatch.setattr(facts, "CONNECT_S", 0.3)


def test_an_address_of_this_host_can_be_bound():
    assert facts.check_bind(f"127.0.0.1:{free_port()}").status == "ok"
    assert facts.check_bind("*:0").status == "ok"


def test_a_port_that_is_taken_is_named_with_its_process():
    with listening() as endpoint:
        found = facts.check_bind(endpoint.removeprefix("tcp://"))
    assert (found.code, found.status) == ("port_taken", "failed")
    assert f"by process {os.getpid()}: " in found.evidence


@pytest.mark.parametrize("host", [FOREIGN, "no-such-host.invalid"])
def test_an_address_of_another_host_cannot_be_bound(host):
    assert facts.check_bind(f"{host}:7000").code == "bind_impossible"


@looped(
    "address, code",
    [
        ("0.0.0.0", "advertise_unreachable"),
        ("127.0.0.1:0", "advertise_unreachable"),
        ("no-such-host.invalid:7000", "advertise_unreachable"),
        ("127.0.0.1:7000", "advertise_loopback"),
        ("localhost", "advertise_loopback"),
        ("[::1]:7000", "advertise_loopback"),
        (f"{FOREIGN}:7000", "advertise_foreign"),
    ],
)
def test_an_advertised_address_that_others_cannot_use_is_noticed(address, code):
    found = facts.check_advertised(address)
    assert found.code == code
    assert found.remedy


def test_the_address_that_leads_out_may_be_advertised():
    own = facts.own_address()
    if own == "0.0.0.0":
        pytest.skip("no interface leads out")
    assert facts.check_advertised(f"{own}:7000").status == "ok"


def test_a_wildcard_alone_is_not_enough():
    found = list(facts.examine_addresses("0.0.0.0:0", None))
    assert "advertise_unreachable" in codes(found)
    assert "advertise_unreachable" not in codes(facts.examine_addresses("0.0.0.0:0", "127.0.0.1:7000"))


def test_a_port_where_nobody_listens_refuses():
    address, found = facts.dial(f"tcp://127.0.0.1:{free_port()}")
    assert (address, codes(found)) == ("", ["connection_refused"])


def test_a_name_that_does_not_resolve_is_noticed():
    address, found = facts.dial("tcp://no-such-host.invalid:7000")
    assert (address, codes(found)) == ("", ["name_unresolved"])


@pytest.mark.parametrize(
    ("answer", "close", "words"),
    [
        (b"", False, "sends nothing"),
        (b"", True, "sends nothing"),
        (b"HTTP/1.1 400 Bad\r\n\r\n", True, "answers 'HTTP/1.1 400"),
    ],
    ids=["silent", "hangs up", "HTTP"],
)
def test_what_is_no_worker_is_told_from_one(request, answer, close, words):
    if not close:
        request.getfixturevalue("soon")  # of the others, news comes: for it there is time
    with listening(answer, close=close) as endpoint:
        address, found = facts.dial(endpoint)
    assert address == "127.0.0.1"
    assert codes(found) == ["ok", "no_handshake"]
    assert words in found[-1].evidence


def test_zeromq_without_encryption_is_told_from_a_worker():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.linger = 0
        port = server.bind_to_random_port("tcp://127.0.0.1")
        _, found = facts.dial(f"tcp://127.0.0.1:{port}")
    assert codes(found) == ["ok", "no_encryption"]
    assert "NULL" in found[-1].evidence


def test_zeromq_with_encryption_is_as_it_should_be():
    public, private = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.linger, server.curve_server = 0, True
        server.curve_publickey, server.curve_secretkey = public, private
        port = server.bind_to_random_port("tcp://127.0.0.1")
        assert codes(facts.dial(f"tcp://127.0.0.1:{port}")[1]) == ["ok"]


def test_packets_that_are_dropped_are_told_from_a_refusal(soon):
    with ExitStack() as stack, socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)  # the kernel drops what comes when its queue is full, and nobody accepts
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        _, found = facts.dial(f"tcp://127.0.0.1:{server.getsockname()[1]}")
    assert codes(found) == ["connection_timed_out"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TimeoutError(), "connection_timed_out"),
        (ConnectionRefusedError(111, "Connection refused"), "connection_refused"),
        (OSError(101, "Network is unreachable"), "host_unreachable"),
        (OSError(113, "No route to host"), "host_unreachable"),
    ],
)
def test_each_way_of_not_being_reached_has_its_code(error, code):
    assert facts._not_reached("192.0.2.7 port 7000", error).code == code


def test_a_port_that_cannot_be_is_not_dialed():
    assert facts.accepts("tcp://127.0.0.1:99999").endswith("a port from 1 to 65535")
