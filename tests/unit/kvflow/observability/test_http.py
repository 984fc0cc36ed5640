"""A hostile client of a worker's HTTP server holds a connection, some kilobytes and some seconds, and nothing else."""

import asyncio
from contextlib import suppress

import pytest

from kvflow.errors import ConfigInvalid
from kvflow.observability import http
from kvflow.observability.http import CONNECTIONS_MAX, HEAD_BYTES_MAX, Answer, listened, open_http

PATIENCE_S = 30.0


def broken():
    raise ZeroDivisionError("what went wrong")


PAGES = {"/page": lambda: Answer(b"content\n"), "/broken": broken}


async def exchange(address, sent):
    """Return the head and the body of what a server answers to some bytes."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        try:
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
    return head.decode(), body.decode()


def request(path="/page", method="GET", host="127.0.0.1"):
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


@pytest.fixture
async def address():
    async with open_http("127.0.0.1:0", PAGES) as found:
        yield found


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
        (request("/other\x1b[2J"), 404, "there are /broken, /page"),
        (request(method="POST"), 405, "only GET and HEAD"),
        (request(host="rebound.example:80"), 403, "loopback"),
        (b"GET /page\r\n\r\n", 400, "no request"),
        (b"\x16\x03\x01\r\n\r\n", 400, "no request"),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", 400, "no request"),
        (request("/" + "x" * HEAD_BYTES_MAX), 431, "8192 bytes"),
        (b"x" * (HEAD_BYTES_MAX + 100), 431, "8192 bytes"),
        (request("/broken"), 500, "its log says why"),
    ],
    ids=["path", "method", "host", "short", "binary", "proxy", "long line", "no end", "defect"],
)
async def test_what_is_not_served_is_refused(address, sent, status, words, caplog):
    head, body = await exchange(address, sent)
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert words in body
    assert body.isascii()
    assert "\x1b" not in body
    assert ("ZeroDivisionError" in caplog.text) == (status == 500)


@pytest.mark.parametrize("host", ["localhost:9400", "127.0.0.1", "[::1]:9400", "LOCALHOST"])
async def test_a_loopback_server_is_asked_by_a_loopback_name(address, host):
    assert (await exchange(address, request(host=host)))[1] == "content\n"


async def test_a_public_server_is_asked_by_any_name():
    http_server = http.HttpServer(PAGES, local_only=False)
    server = await asyncio.start_server(http_server.serve, "127.0.0.1", 0)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert (await exchange(address, request(host="kvflow.example:9400")))[1] == "content\n"
    assert [listened(host) for host in ("*", "localhost", "[::1]")] == ["0.0.0.0", "127.0.0.1", "::1"]


async def test_the_oldest_silent_connection_makes_room(address, monkeypatch):
    monkeypatch.setattr(http, "HEAD_S", 10 * PATIENCE_S)
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(PATIENCE_S):
        _, gone = await asyncio.open_connection(host, int(port))
        gone.close()
        assert (await exchange(address, request()))[1] == "content\n"  # by then, the server has seen it go
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(CONNECTIONS_MAX)]
        assert (await exchange(address, request()))[1] == "content\n"
        with suppress(ConnectionError):  # it may be reset
            assert await silent[0][0].read() == b""
        for _, writer in silent:
            writer.close()


async def test_headers_that_do_not_end_are_cut_off(address, monkeypatch):
    monkeypatch.setattr(http, "HEAD_S", 0.05)
    assert await exchange(address, b"GET /page HTTP/1.1\r\n") == ("", "")


async def test_a_client_that_takes_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(http, "WRITE_S", 0.05)
    http_server, ended = http.HttpServer({"/large": lambda: Answer(bytes(64 << 20))}, local_only=True), asyncio.Event()

    async def serve(reader, writer):
        await http_server.serve(reader, writer)
        ended.set()

    async with asyncio.timeout(PATIENCE_S), await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=1024)
        writer.write(request("/large"))
        await ended.wait()
        del reader
        writer.close()


async def test_closing_ends_connections_and_frees_the_port():
    async with open_http("127.0.0.1:0", PAGES) as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET ")
        assert (await exchange(address, request()))[1] == "content\n"  # the server has the connection before it
    async with asyncio.timeout(PATIENCE_S):
        with suppress(ConnectionError):
            await reader.read()
    writer.close()
    async with open_http(address, PAGES) as again:
        assert again == address


async def test_an_address_that_is_taken_is_refused(address):
    with pytest.raises(ConfigInvalid, match=f"http is '{address}', and the worker cannot listen there") as caught:
        async with open_http(address, PAGES):
            pass
    assert "port 0" in caught.value.remedy
