"""A proxy between clients and servers that answer, fail, hang and hang up."""

import asyncio
import gzip
import json
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import msgspec
import pytest
from aiohttp import web

from kvflow.tools.proxy import ProxyConfig
from kvflow.tools.proxy.completions import ONE_TOKEN
from kvflow.tools.proxy.server import ASKED_OF_ONE, TOLD_BY_ONE, open_proxy
from tests.ports import free_port

from .upstream import DECODED, PREFILLED, TICKET, hang_up, open_upstream, stream, text

PATIENCE_S = 60.0
ASKED = {"model": "tiny", "prompt": "a", "max_tokens": 5}


def closed_url():
    """Return the URL of a port at which nobody listens."""
    return f"http://127.0.0.1:{free_port()}"


class Rig:
    """A proxy, the servers behind it, and a client."""

    def __init__(self, prefill, decode, url, session):
        self.prefill, self.decode = prefill, decode
        self.url, self.session = url, session

    def post(self, path="/v1/completions", headers=None, **fields):
        return self.session.post(f"{self.url}{path}", data=json.dumps({**ASKED, **fields}), headers=headers)

    async def send(self, path="/v1/completions", **fields):
        """Return status and body of the answer."""
        async with self.post(path, **fields) as answer:
            return answer.status, await answer.read()

    async def get(self, path):
        async with self.session.get(self.url + path) as answer:
            return answer.status, await answer.read()

    async def serves(self):
        """Check that the proxy serves the next client."""
        async with self.session.get(f"{self.url}/health") as answer:
            return answer.status == 200


@asynccontextmanager
async def open_rig(*, prefill=(PREFILLED,), decode=(DECODED,), **settings):
    """Open a proxy; None for a behavior is a server that does not listen."""
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        sides = [
            [each and await stack.enter_async_context(open_upstream(each)) for each in behaviors]
            for behaviors in (prefill, decode)
        ]
        urls = [tuple(each.url if each else closed_url() for each in side) for side in sides]
        config = ProxyConfig(prefill=urls[0], decode=urls[1], **settings)
        address = await stack.enter_async_context(open_proxy(config, "127.0.0.1", 0))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Rig(*sides, f"http://{address}", session)


@pytest.mark.parametrize("path", ONE_TOKEN)
async def test_a_ticket_goes_from_server_to_server_unchanged_and_no_further(path):
    async with open_rig() as rig:
        status, body = await rig.send(path)
        assert (status, body) == (200, b'{"id":"cmpl-1","choices":[{"text":"b"}]}')
        [prefill], [decode] = rig.prefill, rig.decode
        [asked] = map(json.loads, prefill.bodies)
        assert {name: asked[name] for name in ONE_TOKEN[path]} == json.loads(msgspec.json.encode(ONE_TOKEN[path]))
        assert asked["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
        [sent] = decode.bodies
        assert b'"kv_transfer_params":' + TICKET.encode() in sent
        assert json.loads(sent)["max_tokens"] == 5


async def test_both_servers_hear_one_name_of_the_request_and_who_asks():
    async with open_rig() as rig:
        for given in ("mine-1", "", "x" * 129, "not\tprintable", "é"):
            headers = {"X-Request-Id": given, "Authorization": "Bearer key", "Cookie": "no"}
            async with rig.post(headers=headers) as answer:
                name = answer.headers["X-Request-Id"]
            assert (name == given) is (given == "mine-1")
            for server in (*rig.prefill, *rig.decode):
                assert server.headers[-1]["X-Request-Id"] == name
                assert server.headers[-1]["Authorization"] == "Bearer key"
                assert "Cookie" not in server.headers[-1]


async def test_a_stream_is_passed_on_as_it_comes():
    read = asyncio.Event()
    parts = [b"data: 1\n\n", b"data: \xc3", b"\xa9\n\ndata: [DONE]\n\n"]
    async with open_rig(decode=[stream(parts[0], read, *parts[1:])]) as rig:
        async with rig.post(stream=True) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert await answer.content.readany() == parts[0]
            read.set()
            assert await answer.read() == b"".join(parts[1:])
        assert json.loads(rig.prefill[0].bodies[0])["stream"] is False


PREFILL_FAILURES = {
    "does not listen": None,
    "fails": text('{"error": {}}', 500),
    "is overloaded": text('{"error": {}}', 503),
    "hangs up": hang_up,
    "says too much": text(json.dumps({"x": "x" * 5000})),
}


@pytest.mark.parametrize("failure", PREFILL_FAILURES)
async def test_another_prefill_server_is_asked_when_one_fails(failure):
    async with open_rig(prefill=[PREFILL_FAILURES[failure], PREFILLED], body_bytes_max=4000) as rig:
        assert (await rig.send())[0] == 200
        assert json.loads(rig.decode[0].bodies[0])["kv_transfer_params"] == json.loads(TICKET)


ALONE = PREFILL_FAILURES | {"has no ticket": text('{"kv_transfer_params": null}'), "speaks no JSON": text("<html>")}


@pytest.mark.parametrize("failure", ALONE)
async def test_the_decode_server_computes_what_no_prefill_server_did(failure):
    async with open_rig(prefill=[ALONE[failure]], body_bytes_max=4000) as rig:
        assert (await rig.send())[0] == 200
        assert json.loads(rig.decode[0].bodies[0]) == ASKED


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429])
async def test_what_a_prefill_server_refuses_nobody_else_is_asked(status):
    refusal = '{"error": {"message": "no"}}'
    async with open_rig(prefill=[text(refusal, status), PREFILLED]) as rig:
        assert await rig.send() == (status, refusal.encode())
        assert not rig.prefill[1].bodies
        assert not rig.decode[0].bodies


@pytest.mark.parametrize("status", [400, 404, 429])
async def test_what_a_decode_server_refuses_is_passed_on(status):
    refusal = '{"error": {"message": "no"}}'
    async with open_rig(decode=[text(refusal, status), DECODED]) as rig:
        assert await rig.send() == (status, refusal.encode())
        assert not rig.decode[1].bodies


@pytest.mark.parametrize(("role", "status"), [("prefill", 429), ("decode", 429), ("decode", 503)])
async def test_a_client_learns_when_to_ask_again(role, status):
    async def busy(request):
        return web.json_response({"error": {}}, status=status, headers={"Retry-After": "7"})

    async with open_rig(**{role: [busy]}) as rig, rig.post() as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (status, "7")


@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_learns_which_decode_server_failed_and_what_it_said(status, streamed):
    async with open_rig(decode=[text('{"error": {"message": "no room"}}', status), DECODED]) as rig:
        found, body = await rig.send(stream=streamed)
        error = json.loads(body)["error"]
        assert (found, error["code"], error["type"]) == (status, "decode_failed", "server_error")
        assert error["message"].startswith(f"the decode server {rig.decode[0].url} failed: ")
        assert "no room" in error["message"]
        assert not rig.decode[1].bodies


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_no_server_sends_a_prompt_elsewhere(status):
    """A server that answers with a redirect has failed: nobody follows it."""
    elsewhere = []

    async def secret(request):
        elsewhere.append(request.path)
        return web.json_response({"kv_transfer_params": json.loads(TICKET)})

    async with open_upstream(secret) as other:
        redirecting = type("Redirecting", (web.HTTPException,), {"status_code": status})

        async def redirect(request):
            raise redirecting(headers={"Location": other.url + request.path})

        async with open_rig(prefill=[redirect, PREFILLED]) as rig:
            assert (await rig.send())[0] == 200
            assert len(rig.prefill[1].bodies) == 1
        async with open_rig(decode=[redirect]) as rig:
            found, body = await rig.send()
            assert (found, json.loads(body)["error"]["code"]) == (502, "decode_failed")
    assert not elsewhere


@pytest.mark.parametrize("path", ASKED_OF_ONE)
async def test_what_needs_no_cache_is_asked_of_one_server(path):
    async with open_rig() as rig:
        assert (await rig.send(path))[0] == 200
        assert not rig.prefill[0].bodies
        assert [json.loads(body) for body in rig.decode[0].bodies] == [ASKED]


async def test_an_error_that_quotes_the_ticket_does_not_reach_the_client():
    async with open_rig(decode=[text(json.dumps({"error": {"message": f"kv_transfer_params={TICKET}"}}), 400)]) as rig:
        status, body = await rig.send()
        assert status == 400
        assert "5a" not in json.loads(body)["error"]["message"]


async def test_the_ticket_goes_to_the_next_decode_server_if_one_is_down():
    async with open_rig(decode=[None, DECODED]) as rig:
        assert (await rig.send())[0] == 200
        assert TICKET.encode() in rig.decode[1].bodies[0]


async def test_servers_are_taken_in_turn():
    async with open_rig(prefill=[PREFILLED] * 2, decode=[DECODED] * 3) as rig:
        for _ in range(6):
            await rig.send()
        assert [len(server.bodies) for server in (*rig.prefill, *rig.decode)] == [3, 3, 2, 2, 2]


async def test_several_prompts_are_not_prefilled():
    async with open_rig() as rig:
        assert (await rig.send(prompt=["a", "b"]))[0] == 200
        assert not rig.prefill[0].bodies
        assert json.loads(rig.decode[0].bodies[0]) == {**ASKED, "prompt": ["a", "b"]}


HOSTILE = {
    "nothing": (b"", 400),
    "no JSON": (b"\x00\xff" * 100, 400),
    "no object": (b"[1]", 400),
    "deep": (b'{"prompt":' + b"[" * 50_000, 400),
    "a ticket": (json.dumps({**ASKED, "kv_transfer_params": json.loads(TICKET)}).encode(), 400),
    "too long": (json.dumps({"prompt": "x" * 200_000}).encode(), 413),
}


@pytest.mark.parametrize("body", HOSTILE)
async def test_a_hostile_body_is_refused_with_a_reason_and_reaches_no_server(body):
    data, expected = HOSTILE[body]
    async with open_rig(body_bytes_max=100_000) as rig:
        async with rig.session.post(f"{rig.url}/v1/completions", data=data) as answer:
            assert answer.status == expected
            assert (await answer.json())["error"]["message"]
        assert not rig.prefill[0].bodies
        assert not rig.decode[0].bodies
        assert (await rig.send())[0] == 200


async def test_a_body_that_would_swell_is_refused_packed():
    packed = gzip.compress(json.dumps({"prompt": "x" * 10_000_000}).encode())
    async with open_rig() as rig:
        headers = {"Content-Encoding": "gzip"}
        async with rig.session.post(f"{rig.url}/v1/completions", data=packed, headers=headers) as answer:
            assert answer.status == 415
        assert not rig.prefill[0].bodies
        assert await rig.serves()


async def test_more_requests_than_can_be_kept_may_come_again():
    go = asyncio.Event()
    async with open_rig(decode=[stream(b"data: 1\n\n", go)], requests_max=1) as rig:
        async with rig.post(stream=True) as answer:
            assert answer.status == 200
            assert (await rig.send())[0] == 503
            go.set()
            await answer.read()
        while (await rig.send())[0] == 503:
            pass  # the proxy hears of the end of a stream after its client


@pytest.mark.parametrize(
    ("prefill", "decode", "status"),
    [
        ((PREFILLED,), (DECODED,), 200),
        ((None,), (DECODED,), 200),
        ((PREFILLED,), (None, DECODED), 200),
        ((PREFILLED,), (None,), 503),
    ],
    ids=["all", "no prefill", "one of two", "no decode"],
)
async def test_health_tells_who_lives_and_whether_a_request_would_be_answered(prefill, decode, status):
    async with open_rig(prefill=prefill, decode=decode) as rig:
        found_status, body = await rig.get("/health")
        assert found_status == status
        found = json.loads(body)
        assert sorted(found["prefill"].values()) == sorted(each is not None for each in prefill)
        assert sorted(found["decode"].values()) == sorted(each is not None for each in decode)


@pytest.mark.parametrize("path", TOLD_BY_ONE)
async def test_models_are_those_of_a_decode_server_that_lives(path):
    async with open_rig(decode=[None, DECODED]) as rig:
        assert json.loads((await rig.get(path))[1])["data"] == [{"id": "tiny"}]
    async with open_rig(decode=[None]) as rig:
        assert (await rig.get(path))[0] == 502


@pytest.mark.parametrize(("path", "status"), [("/metrics", 404), ("/v1/completions", 405)])
async def test_other_requests_are_refused_in_json(path, status):
    async with open_rig() as rig:
        found_status, body = await rig.get(path)
        assert found_status == status
        assert json.loads(body)["error"]["message"]
