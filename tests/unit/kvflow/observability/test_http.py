"""A hostile client of a worker's HTTP server holds a connection, some kilobytes and some seconds, and nothing else."""

import asyncio
import re
import socket
import threading
import tracemalloc
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import ConfigInvalid
from kvflow.observability import pages
from kvflow.observability.pages import CONNECTIONS_MAX, HEAD_BYTES_MAX, THREADS, Page, open_pages

PATIENCE_S = 30.0


def broken():
    raise ZeroDivisionError("what went wrong")


def late():
    raise TimeoutError


PAGES = {
    "/page": lambda: Page(b"content\n"),
    "/slow": lambda: Page(b"slow\n"),
    "/broken": broken,
    "/late": late,
    "/large": lambda: Page(bytes(4 << 20)),
}
SLOW = frozenset({"/slow", "/broken", "/late", "/large"})


def connect(address):
    """Open a connection to a server."""
    host, _, port = address.rpartition(":")
    return asyncio.open_connection(host, int(port))


async def exchange(address, sent):
    """Return the head and the body of what a server answers to some bytes."""
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await connect(address)
        try:
            writer.write(sent)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
    return head.decode(), body.decode()


def request(path="/page", method="GET", host="127.0.0.1"):
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


@pytest.fixture
async def address():
    async with open_pages("127.0.0.1:0", PAGES, slow=SLOW) as found:
        yield found


async def connections(address, number, sent=b""):
    """Open connections that never read; return their writers."""
    host, _, port = address.rpartition(":")
    found = []
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(number):
            raw = socket.socket()
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.setblocking(False)
            await asyncio.get_running_loop().sock_connect(raw, (host, int(port)))
            raw.send(sent)
            found.append(raw)
    return found


@contextmanager
def memory():
    """Yield what tells the most memory that Python had while the block ran."""
    tracemalloc.start()
    found = []
    try:
        yield lambda: found[0]
        found.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


async def test_a_page_is_answered_once_for_each_connection(address):
    head, body = await exchange(address, request() + request("/broken"))
    assert head.startswith("HTTP/1.1 200 OK\r\n")
    assert {"Content-Length: 8", "Connection: close", "X-Content-Type-Options: nosniff"} <= set(head.split("\r\n"))
    assert body == "content\n"


async def test_head_and_a_query_are_understood(address):
    assert (await exchange(address, request("/page?x=1", "HEAD"))) == (await exchange(address, request(method="HEAD")))
    assert (await exchange(address, request(method="HEAD")))[1] == ""


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (request("/other\x1b[2J"), 404, "there are /broken, /large, /late, /page, /slow"),
        (request(method="POST"), 405, "only GET and HEAD"),
        (request(host="rebound.example:80"), 403, "loopback"),
        (b"GET /page\r\n\r\n", 400, "not a request"),
        (b"GET /page HTTP/0.9\r\n\r\n", 400, "not a request"),
        (b"GET /page HTTP/2.0\r\n\r\n", 400, "not a request"),
        (b"\r\n\r\n", 400, "not a request"),
        (b"\x16\x03\x01\r\n\r\n", 400, "not a request"),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", 400, "not a request"),
        (request("/" + "x" * HEAD_BYTES_MAX), 431, "8192 bytes"),
        (b"x" * (HEAD_BYTES_MAX + 100), 431, "8192 bytes"),
        (request(host="127.0.0.1\r\nHost: rebound.example"), 403, "loopback"),
        (b"GET /page HTTP/1.1\r\n" + b"a: b\r\n" * 101 + b"\r\n", 431, "headers"),
        (request("/broken"), 500, "its log says why"),
        (request("/late"), 503, "does not answer"),
    ],
    ids=[
        *("path", "method", "host", "short", "old", "new", "empty", "binary", "proxy", "long line", "no end"),
        *("second host", "many headers", "defect", "late"),
    ],
)
async def test_what_is_not_served_is_refused(address, sent, status, words, caplog):
    head, body = await exchange(address, sent)
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert words in body
    assert body.isascii()
    assert "\x1b" not in body
    assert ("ZeroDivisionError" in caplog.text) == (status == 500)


@given(st.binary(max_size=300), st.sampled_from([b"", b"GET ", b"GET /page HTTP/1.1\r\n", b"HEAD /page HTTP/"]))
def test_whatever_is_sent_has_an_answer(sent, start):
    answer = pages._Handler(start + sent + b"\r\n\r\n", PAGES, local_only=True).answer()
    assert re.match(rb"HTTP/1.1 (200|400|403|404|405|431|503) ", answer)


async def test_a_defect_of_the_server_ends_one_connection_only(address, monkeypatch, caplog):
    with monkeypatch.context() as defect:
        defect.setattr(pages, "is_loopback", broken)
        assert await exchange(address, request()) == ("", "")
    assert "a request failed" in caplog.text
    assert (await exchange(address, request()))[1] == "content\n"


@pytest.mark.parametrize("host", ["localhost:9400", "127.0.0.1", "[::1]:9400", "LOCALHOST"])
async def test_a_loopback_server_is_asked_by_a_loopback_name(address, host):
    assert (await exchange(address, request(host=host)))[1] == "content\n"


async def test_a_public_server_is_asked_by_any_name(monkeypatch):
    monkeypatch.setattr(pages, "is_loopback", lambda _: False)
    async with open_pages("127.0.0.1:0", PAGES) as address:
        assert (await exchange(address, request(host="kvflow.example:9400")))[1] == "content\n"


@pytest.mark.parametrize("host", ["*", "localhost", "[::1]"])
async def test_every_form_of_an_address_is_listened_to(host):
    try:
        async with open_pages(f"{host}:0", PAGES) as address:
            name, _, port = address.rpartition(":")
            assert name == host
            reached = {"*": "127.0.0.1", "[::1]": "::1"}.get(host, host)
            assert (await exchange(f"{reached}:{port}", request()))[1] == "content\n"
    except ConfigInvalid:
        assert host == "[::1]"  # this machine has no IPv6


async def test_the_oldest_silent_connection_makes_room(address, monkeypatch):
    monkeypatch.setattr(pages, "REQUEST_S", 10 * PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        silent = [await connect(address) for _ in range(CONNECTIONS_MAX)]
        assert (await exchange(address, request()))[1] == "content\n"
        with suppress(ConnectionError):  # it may be reset
            assert await silent[0][0].read() == b""
        for _, writer in silent:
            writer.close()


async def test_a_connection_that_has_ended_takes_no_room(address, monkeypatch):
    monkeypatch.setattr(pages, "REQUEST_S", 10 * PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        reader, oldest = await connect(address)
        (gone,) = await connections(address, 1)
        gone.close()
        assert (await exchange(address, request()))[1] == "content\n"  # by then, the server has seen it go
        others = await connections(address, CONNECTIONS_MAX - 2)
        assert (await exchange(address, request()))[1] == "content\n"
        oldest.write(request())
        assert (await reader.read()).endswith(b"content\n")
        oldest.close()
        for each in others:
            each.close()


@pytest.mark.parametrize(
    "sent", [b"", b"G", request("/slow"), request("/large")], ids=["silent", "byte", "slow", "large"]
)
async def test_a_flood_delays_no_quick_page(sent, address, monkeypatch):
    """Connections that send nothing, a byte, or a request whose answer they do not take, more than the server keeps."""
    monkeypatch.setattr(pages, "REQUEST_S", 10 * PATIENCE_S)
    monkeypatch.setattr(pages, "ANSWER_S", 10 * PATIENCE_S)
    flood = []
    for _ in range(3):
        flood += await connections(address, CONNECTIONS_MAX // 2, sent)
        assert (await exchange(address, request()))[1] == "content\n"
    for each in flood:
        each.close()


@pytest.mark.parametrize("honest_first", [True, False])
async def test_a_client_in_a_crowd_of_silent_ones_is_answered(honest_first):
    """They all connect while the server is busy: nobody is turned away, and who asks is answered before it is old."""
    busy, free = threading.Event(), threading.Event()

    def wait():
        busy.set()
        free.wait(PATIENCE_S)
        return Page(b"late\n")

    async with open_pages("127.0.0.1:0", {"/wait": wait, **PAGES}) as address, asyncio.timeout(PATIENCE_S):
        waiting = asyncio.create_task(exchange(address, request("/wait")))
        await asyncio.to_thread(busy.wait, PATIENCE_S)
        crowd = [] if honest_first else await connections(address, 2 * CONNECTIONS_MAX)
        (honest,) = await connections(address, 1, request())
        crowd += await connections(address, 2 * CONNECTIONS_MAX) if honest_first else []
        free.set()
        assert (await asyncio.get_running_loop().sock_recv(honest, 4096)).endswith(b"content\n")
        assert (await waiting)[1] == "late\n"
        for each in (honest, *crowd):
            each.close()


async def test_silent_clients_cost_no_more_than_the_page_says(address):
    """Each holds 8 KiB of a request, and a file descriptor here; further ones take the places of those before them."""
    with memory() as most:
        flood = await connections(address, 2 * CONNECTIONS_MAX, b"x" * HEAD_BYTES_MAX)
        assert (await exchange(address, request()))[1] == "content\n"
    assert CONNECTIONS_MAX * HEAD_BYTES_MAX / 2 < most() < 2 * CONNECTIONS_MAX * HEAD_BYTES_MAX
    for each in flood:
        each.close()


async def test_headers_that_do_not_end_are_cut_off(address, monkeypatch):
    monkeypatch.setattr(pages, "REQUEST_S", 0.05)
    assert await exchange(address, b"GET /page HTTP/1.1\r\n") == ("", "")


async def test_clients_that_take_nothing_are_cut_off(address, monkeypatch):
    monkeypatch.setattr(pages, "ANSWER_S", 0.05)
    flood = await connections(address, THREADS, request("/large"))
    assert (await exchange(address, request("/slow")))[1] == "slow\n"
    for each in flood:
        each.close()


async def test_more_requests_than_may_wait_are_not_answered():
    release = threading.Event()
    slow = {"/slow": lambda: Page(b"slow\n" if release.wait(PATIENCE_S) else b""), "/page": PAGES["/page"]}
    async with open_pages("127.0.0.1:0", slow, slow=frozenset({"/slow"})) as address, asyncio.timeout(PATIENCE_S):
        opened = []
        for number in range(CONNECTIONS_MAX + THREADS):
            if not number % THREADS:
                assert (await exchange(address, request()))[1] == "content\n"  # the server has those before it
            opened.append(await connect(address))
            opened[-1][1].write(request("/slow"))
        waiting, refused = {asyncio.create_task(reader.read()) for reader, _ in opened}, set()
        while len(refused) < THREADS:
            ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            refused |= ended
        assert (await exchange(address, request()))[1] == "content\n"
        release.set()
        assert {each.result() for each in refused} == {b""}
        assert {(await each).rpartition(b"\r\n")[2] for each in waiting} == {b"slow\n"}
        for _, writer in opened:
            writer.close()


async def test_closing_ends_connections_and_threads_and_frees_the_port(monkeypatch):
    monkeypatch.setattr(pages, "ANSWER_S", 10 * PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        async with open_pages("127.0.0.1:0", PAGES, slow=SLOW) as address:
            reader, writer = await connect(address)
            writer.write(b"GET ")
            flood = await connections(address, 2 * THREADS, request("/large"))
            assert (await exchange(address, request()))[1] == "content\n"  # the server has the others before it
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        assert not [
            each.name for each in threading.enumerate() if each.name.startswith(("kvflow-http", "kvflow-pages"))
        ]
        async with open_pages(address, PAGES) as again:
            assert again == address
        for each in flood:
            each.close()
