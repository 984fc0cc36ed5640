"""Clients of a proxy that say nothing, or are slow: each is given up."""

import asyncio
import contextlib
import json
from contextlib import asynccontextmanager

import aiohttp
import pytest

from .test_server import ASKED, PATIENCE_S, open_rig
from .upstream import DECODED, stream

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
SILENT = {
    "no byte": b"",
    "half a head": HEAD,
    "no body": HEAD + b"Content-Length: 100\r\n\r\n",
    "half a body": HEAD + b'Content-Length: 100\r\n\r\n{"prompt"',
    "no chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
}


@asynccontextmanager
async def connected(url, sent, *, number=1):
    """Connect clients that each send something, and then nothing."""
    host, port = url.removeprefix("http://").split(":")
    clients = []
    try:
        for _ in range(number):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            clients.append((reader, writer))
        yield clients
    finally:
        for _, writer in clients:
            writer.transport.abort()


@pytest.mark.parametrize("kind", SILENT)
async def test_a_silent_client_is_given_up(kind):
    asks = b"\r\n\r\n" in SILENT[kind]
    settings = {"headers_timeout_s": PATIENCE_S, "body_timeout_s": 0.1} if asks else {"headers_timeout_s": 0.1}
    async with open_rig(**settings) as rig, connected(rig.url, SILENT[kind]) as [(reader, _)]:
        said = await reader.read()
        assert said.startswith(b"HTTP/1.1 408 ") is asks
        assert not rig.prefill[0].bodies


@pytest.mark.parametrize(
    "line", [b"a: b\r\n", b"a: " + b"b" * 8000 + b"\r\n", b"b" * 1000], ids=["short", "long", "none"]
)
async def test_headers_that_do_not_end_are_cut_off(line):
    """However they are written, the proxy takes 1 MiB of them, and what the kernel buffers."""
    async with open_rig() as rig, connected(rig.url, HEAD) as [(reader, writer)]:
        sent = 0
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof() and sent < 64 << 20:
                writer.write(line * (16384 // len(line)))
                await writer.drain()
                sent += 16384
                await asyncio.sleep(0)
        assert sent < 4 << 20
        assert await rig.serves()


async def test_an_idle_connection_is_closed_after_its_answer():
    async with open_rig(headers_timeout_s=1.0) as rig:
        body = json.dumps(ASKED).encode()
        whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        async with connected(rig.url, whole) as [(reader, _)]:
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("kind", ["half a head", "no body"])
async def test_a_byte_now_and_then_buys_no_time(kind):
    settings = {"headers_timeout_s": 0.2, "body_timeout_s": 0.2, "body_rate_min": 1 << 20}
    async with open_rig(**settings) as rig, connected(rig.url, SILENT[kind]) as [(reader, writer)]:

        async def trickle():
            while True:
                writer.write(b"x")
                await asyncio.sleep(0.01)

        trickling = asyncio.create_task(trickle())
        try:
            await reader.read()
        except ConnectionResetError:
            pass  # it was sending when it was cut off
        finally:
            trickling.cancel()
        assert not rig.prefill[0].bodies


@pytest.mark.parametrize("kind", ["no byte", "half a head"])
async def test_connections_without_a_request_do_not_count(kind):
    async with open_rig(requests_max=1) as rig, connected(rig.url, SILENT[kind], number=5):
        assert (await rig.send())[0] == 200


async def test_requests_that_wait_for_their_bodies_count():
    head = HEAD + b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\n"
    async with open_rig(requests_max=1) as rig, connected(rig.url, head) as [(reader, _)]:
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await rig.send())[0] == 503
        assert (await rig.get("/health"))[0] == 200


async def test_a_body_is_refused_before_it_comes_if_it_says_that_it_is_too_long():
    head = HEAD + b"Content-Length: 1001\r\n\r\n"
    async with open_rig(body_bytes_max=1000) as rig, connected(rig.url, head) as [(reader, _)]:
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")


async def test_a_body_of_unknown_length_is_refused_once_it_is_too_long():
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    async with open_rig(body_bytes_max=1000) as rig, connected(rig.url, head) as [(reader, writer)]:
        writer.write(b"3e9\r\n" + b"x" * 1001 + b"\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        assert not rig.prefill[0].bodies


async def test_a_body_of_wrong_chunks_is_refused():
    head = HEAD + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with open_rig(body_timeout_s=0.1) as rig, connected(rig.url, head) as [(reader, writer)]:
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"xyz\r\n")
        # Some parsers of aiohttp say what is wrong, and with others a body never ends.
        assert (await reader.readline()).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 408 "))
        assert not rig.prefill[0].bodies


LONG_JSON = json.dumps({"choices": [{"text": "x" * (32 << 20)}]}).encode()


@pytest.mark.parametrize("kind", ["stream", "whole"])
async def test_a_client_that_does_not_read_is_given_up(kind, caplog):
    caplog.set_level("INFO")
    body = json.dumps({**ASKED, "stream": kind == "stream"}).encode()
    whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    never = asyncio.Event()
    decode = stream(*[b"x" * (1 << 20)] * 32, never)
    if kind == "whole":

        async def decode(request):
            return aiohttp.web.Response(body=LONG_JSON, content_type="application/json")

    rig_with_both = open_rig(decode=[decode, DECODED], write_timeout_s=0.2)
    async with rig_with_both as rig, connected(rig.url, b"") as [(reader, writer)]:
        reader._transport.pause_reading()
        writer.write(whole)
        while not any("client_lost" in str(record.msg) for record in caplog.records):
            assert (await rig.get("/health"))[0] == 200
        if kind == "stream":
            await rig.decode[0].cancelled.wait()
        assert (await rig.send())[0] == 200
        reader._transport.resume_reading()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(len(LONG_JSON))


async def test_health_asks_the_servers_once_for_all_who_ask():
    async with open_rig() as rig:
        answers = await asyncio.gather(*(rig.get("/health") for _ in range(50)))
        assert {status for status, _ in answers} == {200}
        assert rig.prefill[0].checks < 5
        assert rig.decode[0].checks < 5
