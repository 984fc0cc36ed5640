"""A proxy for disaggregated prefill: each request goes to a prefill server, then with its ticket to a decode server.

Clients see one server with OpenAI's interface. If a prefill server fails the next one is asked, and if none is left the
decode server computes the prompt itself. What a client did wrong is answered in the words of the server that says so. A
client that hangs up ends its request on the servers, too.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import Raw, Struct

from kvflow.clock import monotonic
from kvflow.demo.completions import (
    Completion,
    RequestMalformed,
    decode_body,
    error_body,
    prefill_body,
    read_completion,
    read_params,
    without_params,
)
from kvflow.demo.log import demo_logger

PATHS: Final = ("/v1/completions", "/v1/chat/completions")

BODY_BYTES_MAX: Final = 64 << 20
"""Of a request, and of an answer that is not streamed: a million token ids are 8 MiB, a picture may be more."""

REQUESTS_MAX: Final = 1024
"""In flight at once; a server has as many at most by default. What comes above is refused and may come again."""

CONNECT_S: Final = 10.0
HEALTH_S: Final = 5.0
GRACE_S: Final = 10.0
"""How long requests in flight may go on when the proxy is told to stop."""

REQUEST_ID: Final = "X-Request-Id"
"""vLLM makes its own name of a request from it: both servers' logs then have the same."""

REQUEST_ID_CHARACTERS_MAX: Final = 128
FORWARDED: Final = ("Authorization", "traceparent", "tracestate")
JSON: Final = "application/json"

_log = demo_logger()


class ProxyConfig(Struct, frozen=True, kw_only=True):
    """Where the servers are.

    Attributes:
        prefill: base URLs, at least one; taken in turn.
        decode: likewise.
        prefill_timeout_s: after which the next prefill server is asked.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    prefill_timeout_s: float = 300.0


class _Refused(Struct, frozen=True):
    """What a server answered to a request that is wrong."""

    status: int
    body: bytes


class _AnswerTooLong(Exception):
    """A server answered more than a proxy keeps."""


UPSTREAM_ERRORS: Final = (aiohttp.ClientError, TimeoutError, _AnswerTooLong)

NOT_CONNECTED: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class _InTurn:
    """Servers, of which each request begins with another one."""

    def __init__(self, servers: Sequence[str]) -> None:
        self._servers = deque(servers)

    def all(self) -> list[str]:
        """Return all servers, and leave the turn to who has it."""
        return list(self._servers)

    def order(self) -> list[str]:
        """Return all servers, beginning with the next one."""
        order = list(self._servers)
        self._servers.rotate(-1)
        return order


class Proxy:
    """Answers clients. Thread: the loop's."""

    def __init__(self, config: ProxyConfig, session: aiohttp.ClientSession) -> None:
        self._prefill = _InTurn(config.prefill)
        self._decode = _InTurn(config.decode)
        self._prefill_timeout = aiohttp.ClientTimeout(total=config.prefill_timeout_s, sock_connect=CONNECT_S)
        self._decode_timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._session = session
        self._in_flight = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for a completion. Cancellation: ends it on the server that has it."""
        if self._in_flight >= REQUESTS_MAX:
            return _failure(503, f"{REQUESTS_MAX} requests are in flight: try again")
        self._in_flight += 1
        try:
            return await self._complete(request)
        finally:
            self._in_flight -= 1

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            completion = read_completion(await request.read())
        except RequestMalformed as error:
            return _failure(400, str(error), "invalid_request_error")
        headers = _headers(request)
        started = monotonic()
        prefilled = await self._prefill_at_one(request.path, completion, headers)
        if isinstance(prefilled, _Refused):
            _log.info("request.refused", request_id=headers[REQUEST_ID], status=prefilled.status)
            return web.Response(status=prefilled.status, body=prefilled.body, content_type=JSON)
        prefill_s = monotonic() - started
        response = await self._decode_at_one(request, decode_body(completion, prefilled), headers)
        _log.info(
            "request.answered",
            request_id=headers[REQUEST_ID],
            status=response.status,
            prefilled=prefilled is not None,
            prefill_s=round(prefill_s, 6),
            elapsed_s=round(monotonic() - started, 6),
        )
        return response

    async def _prefill_at_one(
        self, path: str, completion: Completion, headers: dict[str, str]
    ) -> Raw | _Refused | None:
        """Have a prompt computed; return its ticket, or None if the decode server must compute it."""
        log = _log.bind(request_id=headers[REQUEST_ID])
        if completion.alone:
            log.info("prefill.left_out", reason=completion.alone)
            return None
        body = prefill_body(completion)
        for server in self._prefill.order():
            try:
                async with self._session.post(
                    server + path, data=body, headers=headers, timeout=self._prefill_timeout
                ) as answer:
                    content = await _read(answer)
            except UPSTREAM_ERRORS as error:
                log.warning("prefill.failed", server=server, error=repr(error))
                continue
            if answer.status < 400:
                params = read_params(content)
                if params is None:
                    log.warning("prefill.no_ticket", server=server)
                return params
            if answer.status < 500:
                return _Refused(answer.status, content)
            log.warning("prefill.failed", server=server, status=answer.status)
        return None

    async def _decode_at_one(self, request: web.Request, body: bytes, headers: dict[str, str]) -> web.StreamResponse:
        """Pass a request to a decode server, and its answer to the client."""
        log = _log.bind(request_id=headers[REQUEST_ID])
        for server in self._decode.order():
            try:
                async with self._session.post(
                    server + request.path, data=body, headers=headers, timeout=self._decode_timeout
                ) as answer:
                    return await _pass_on(request, answer, headers[REQUEST_ID])
            except NOT_CONNECTED as error:
                log.warning("decode.unreachable", server=server, error=repr(error))  # so it has not used the ticket
            except UPSTREAM_ERRORS as error:
                log.warning("decode.failed", server=server, error=repr(error))
                return _failure(502, "the decode server failed")
        return _failure(502, "no decode server can be reached")

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Answer which models there are: those of a decode server."""
        headers, timeout = _headers(request), aiohttp.ClientTimeout(total=HEALTH_S)
        for server in self._decode.all():
            try:
                async with self._session.get(server + request.path, headers=headers, timeout=timeout) as answer:
                    return web.Response(status=answer.status, body=await _read(answer), content_type=JSON)
            except UPSTREAM_ERRORS as error:
                _log.warning("decode.failed", server=server, error=repr(error))
        return _failure(502, "no decode server can be reached")

    async def health(self, request: web.Request) -> web.Response:
        """Answer which servers live; 200 if a request would be answered, which takes a decode server."""
        prefill, decode = self._prefill.all(), self._decode.all()
        lives = await asyncio.gather(*map(self._lives, (*prefill, *decode)))
        alive = dict(zip((*prefill, *decode), lives, strict=True))
        sides = {"prefill": prefill, "decode": decode}
        found = {name: {server: alive[server] for server in side} for name, side in sides.items()}
        status = 200 if any(alive[server] for server in decode) else 503
        return web.Response(status=status, body=msgspec.json.encode(found), content_type=JSON)

    async def _lives(self, server: str) -> bool:
        try:
            async with self._session.get(f"{server}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_S)) as answer:
                return answer.status < 400
        except UPSTREAM_ERRORS:
            return False


@asynccontextmanager
async def open_proxy(config: ProxyConfig, host: str, port: int) -> AsyncIterator[str]:
    """Serve clients while the context is open.

    Args:
        config: where the servers are.
        host: to listen at.
        port: 0 takes a free one.

    Yields:
        ``host:port``.

    Raises:
        OSError: there is no listening there.
    """
    # A connection per request: one that a server closes while it is idle would fail the next request.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        proxy = Proxy(config, session)
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_as_json])
        app.add_routes([web.post(path, proxy.complete) for path in PATHS])
        app.add_routes([web.get("/v1/models", proxy.models), web.get("/health", proxy.health)])
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=GRACE_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            found_host, found_port = runner.addresses[0][:2]
            yield f"{found_host}:{found_port}"
        finally:
            await runner.cleanup()


@web.middleware
async def _as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Say in JSON what aiohttp says in words: that there is no such path, or that a body is too long."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _failure(error.status, error.text or error.reason, "invalid_request_error")


async def _pass_on(request: web.Request, answer: aiohttp.ClientResponse, request_id: str) -> web.StreamResponse:
    """Give a client what a decode server answers: as it comes if it is a stream, else as a whole.

    Raises:
        ClientError, TimeoutError, _AnswerTooLong: the server fails before anything was given.
    """
    if answer.content_type == JSON:
        content = without_params(await _read(answer), failed=answer.status >= 400)
        return web.Response(status=answer.status, body=content, content_type=JSON, headers={REQUEST_ID: request_id})
    response = web.StreamResponse(status=answer.status, headers={REQUEST_ID: request_id})
    response.headers["Content-Type"] = answer.headers.get("Content-Type", "application/octet-stream")
    await response.prepare(request)
    try:
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
    except UPSTREAM_ERRORS as error:
        # An end in order would tell the client that it has everything.
        _log.warning("decode.broke_off", request_id=request_id, error=repr(error))
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in answer.content.iter_any():
        content += chunk
        if len(content) > BODY_BYTES_MAX:
            raise _AnswerTooLong(f"more than {BODY_BYTES_MAX} bytes")
    return bytes(content)


def _headers(request: web.Request) -> dict[str, str]:
    """Return what a server is told beside the body."""
    request_id = request.headers.get(REQUEST_ID, "")
    sane = request_id.isascii() and request_id.isprintable() and len(request_id) <= REQUEST_ID_CHARACTERS_MAX
    given = {name: request.headers[name] for name in FORWARDED if name in request.headers}
    own = request_id if request_id and sane else secrets.token_hex(8)
    return {**given, REQUEST_ID: own, "Content-Type": JSON, "Accept-Encoding": "identity"}


def _failure(status: int, message: str, kind: str = "server_error") -> web.Response:
    return web.Response(status=status, body=error_body(message, kind), content_type=JSON)
