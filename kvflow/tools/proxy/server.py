"""A proxy for disaggregated prefill: each request goes to a prefill server, then with its ticket to a decode server.

With ``--dispatch concurrent`` it goes to both at once. If the prefill fails, the decode server's part ends; if only the
latter fails, it is repeated with the ticket. A client gets nothing before it is clear which.

Clients see one server with the APIs of OpenAI and Anthropic. If a prefill server fails, the proxy asks the next one; if
all fail, the decode server computes the prompt. The proxy forwards a server's error message for a wrong request
unchanged. If a client hangs up, the proxy ends its request on the servers. A slow client holds one of
``--requests-max`` places until its time is up.
"""

import asyncio
import logging
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from time import monotonic
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from msgspec import Raw, Struct
from structlog.stdlib import BoundLogger

from kvflow.observability.logs import Repeats, record_logger
from kvflow.tools.proxy import ProxyConfig
from kvflow.tools.proxy.completions import (
    ONE_TOKEN,
    Completion,
    EndCause,
    RequestMalformed,
    RequestRecord,
    StreamErrors,
    decode_body,
    early_params,
    error_body,
    error_message,
    prefill_body,
    read_completion,
    read_params,
    shown_error,
    without_params,
)
from kvflow.tools.proxy.conversations import Conversations, digests_of, hint_of

ASKED_OF_ONE: Final = ("/v1/embeddings", "/v1/messages/count_tokens", "/tokenize")  # a decode server answers alone
TOLD_BY_ONE: Final = ("/v1/models", "/version")

CONNECT_S: Final = 10.0
HEALTH_S: Final = 5.0
HEALTH_PAUSE_S: Final = 0.5  # between two questions to the servers, however many clients ask
GRACE_S: Final = 10.0  # for requests in flight when the proxy stops
# For a client to read why its body is refused while it still sends. A connection closed at once may lose that.
LINGER_S: Final = 1.0
PIECE_BYTES: Final = 64 << 10  # part of an answer that a client must take within ``write_timeout_s``

LAST_EVENT: Final = re.compile(
    rb"""(?:data: \[DONE\]|event: (?:message_stop|response\.completed)\r?\ndata: .*)\r?\n\r?\n\Z"""
)

REQUEST_ID: Final = "X-Request-Id"  # vLLM derives its own name of a request from it: the logs of both servers have it
REQUEST_ID_CHARACTERS_MAX: Final = 128
FORWARDED: Final = ("Authorization", "traceparent", "tracestate")
JSON: Final = "application/json"
INVALID: Final = "invalid_request_error"

_log = record_logger("kvflow.proxy")
_http_log = logging.getLogger("kvflow.proxy.http")


@_http_log.addFilter
def _tell_defects_only(record: logging.LogRecord) -> bool:
    """Leave out what clients said that is no HTTP: aiohttp logs a traceback of it, and answers 400."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


class _PrefillRefusal(Struct, frozen=True):
    """A prefill server's answer to a request that is wrong."""

    status: int
    body: bytes
    headers: dict[str, str]


class _PrefillFailed(Exception):
    """A prefill server has failed, and another one may be asked."""


class _DecodeFailed(Exception):
    """A decode server that was asked early has answered an error."""


class _AnswerTooLong(Exception):
    """A server's answer has more bytes than the proxy keeps."""


class _ClientLost(Exception):
    """A client hung up, or takes no more of its answer."""


Prefilled = Raw | _PrefillRefusal | web.StreamResponse | None  # how a prompt was computed, or the answer to it

RETRY_AFTER: Final = "Retry-After"
UPSTREAM_ERRORS: Final = (aiohttp.ClientError, TimeoutError, _AnswerTooLong, _DecodeFailed)
NOT_CONNECTED: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class Proxy:
    """Answers clients. Thread: the loop's."""

    def __init__(self, config: ProxyConfig, session: aiohttp.ClientSession) -> None:
        self._config = config
        self._prefill = deque(config.prefill)
        self._decode = deque(config.decode)
        self._conversations = Conversations()
        self._early: dict[str, Raw] = {}  # by prefill server: what a decode server needs to read a prompt early
        self._prefill_timeout = aiohttp.ClientTimeout(total=config.prefill_timeout_s, sock_connect=CONNECT_S)
        self._decode_timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        # A redirect would send prompts wherever a server likes.
        self._get, self._post = (partial(ask, allow_redirects=False) for ask in (session.get, session.post))
        self._in_flight = 0
        self._stopping = False
        self._checking = asyncio.Lock()
        self._checked_at = -HEALTH_PAUSE_S
        self._alive: dict[str, bool] = {}
        self._repeats = Repeats()

    def stop(self) -> None:
        """Note that the proxy cancels requests from now on, and not their clients."""
        self._stopping = True

    @web.middleware
    async def admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request; a refusal is JSON."""
        try:
            return await handler(request)
        except web.HTTPException as error:
            message = error.text or error.reason
            _log.info("request.refused", status=error.status, error=message)
            return _failure(error.status, message, "server_error" if error.status >= 500 else INVALID)

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """Count a request; raise ``HTTPServiceUnavailable`` if there are too many."""
        if self._in_flight >= self._config.requests_max:
            raise web.HTTPServiceUnavailable(text=f"{self._in_flight} requests are in flight: try again")
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for a completion. Cancellation: ends it on the server that has it."""
        with self._admitted():
            return await self._complete(request, await self._receive(request))

    async def _receive(self, request: web.Request) -> Completion:
        """Read the body of a request; raise ``HTTPException`` if it is refused."""
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise web.HTTPUnsupportedMediaType(text="a compressed body is refused: leave Content-Encoding out")
        config, announced = self._config, request.content_length or 0
        if announced > config.body_bytes_max:  # aiohttp would read that much before it refuses the rest
            raise web.HTTPRequestEntityTooLarge(config.body_bytes_max, announced)
        try:
            async with asyncio.timeout(config.body_timeout_s + announced / config.body_rate_min):
                return read_completion(await request.read())
        except TimeoutError as error:
            raise web.HTTPRequestTimeout(text="the body did not come in time") from error
        except (RequestMalformed, web.RequestPayloadError) as error:
            raise web.HTTPBadRequest(text=str(error)) from error

    async def _complete(self, request: web.Request, completion: Completion) -> web.StreamResponse:
        """Answer a request, and write its record however it ends."""
        headers = _headers(request)
        record = RequestRecord(request_id=headers[REQUEST_ID], client=_client(request))
        try:
            response = await self._answer(request, completion, headers, record)
            record.status = response.status
            keeper = self._config.keepers.get(record.decode_server)
            if keeper is not None and response.status == 200:
                self._conversations.note(digests_of(completion.fields), keeper)
        except asyncio.CancelledError:
            if self._stopping:
                record.fail(EndCause.PROXY_STOPPED, "the proxy was told to stop")
            else:
                record.fail(EndCause.CLIENT_LOST, "the client hung up")
            raise
        finally:
            record.write(_log, self._repeats)
        return response

    async def _answer(
        self, request: web.Request, completion: Completion, headers: dict[str, str], record: RequestRecord
    ) -> web.StreamResponse:
        """Have a prompt computed, and pass the request on with its ticket, or without if a decode server must do it."""
        prefilled: Prefilled = None
        if completion.alone and request.path in ONE_TOKEN:
            _log.info("prefill.left_out", request_id=record.request_id, reason=completion.alone)
        elif request.path in ONE_TOKEN:
            source = self._conversations.find(digests_of(completion.fields)) if self._config.keepers else ""
            body = prefill_body(completion, request.path, hint_of(source) if source else None)
            for server in _in_turn(self._prefill):
                record.prefill_server, early = server, self._early.get(server)
                computing = self._prefill_at(server, request.path, body, headers, record)
                try:
                    if early is None:
                        prefilled = await computing
                        break
                    reading = self._decode_at_one(request, decode_body(completion, early), headers, record, early=True)
                    prefilled = await self._at_once(computing, reading, record)
                    break
                except _PrefillFailed:
                    self._early.pop(server, None)  # it may come back at another address
        if isinstance(prefilled, web.StreamResponse):
            return prefilled
        if isinstance(prefilled, _PrefillRefusal):
            refusal = web.StreamResponse(status=prefilled.status, headers=prefilled.headers)
            return await self._give(request, refusal, prefilled.body, record)
        record.prefill_s, record.phase = record.elapsed_s, "decode"
        response = await self._decode_at_one(request, decode_body(completion, prefilled), headers, record)
        assert response is not None
        return response

    async def _at_once(
        self,
        computing: Coroutine[Any, Any, Prefilled],
        reading: Coroutine[Any, Any, web.StreamResponse | None],
        record: RequestRecord,
    ) -> Prefilled:
        """Ask both servers; return the decode server's answer, or the end of the prefill if there is none.

        A prefill that fails ends the decode server's part, unless that has begun to answer: then it has the prompt.
        """
        legs = prefill, decode = asyncio.ensure_future(computing), asyncio.ensure_future(reading)
        try:
            await asyncio.wait(legs, return_when=asyncio.FIRST_COMPLETED)
            if not (decode.done() and decode.result()):
                await asyncio.wait((prefill,))
                is_computed = prefill.exception() is None and isinstance(prefill.result(), Raw)
                if not (is_computed or record.status):
                    return prefill.result()
            record.prefill_s = record.elapsed_s
            return await decode or prefill.result()
        finally:
            for leg in legs:
                leg.cancel()
            await asyncio.gather(*legs, return_exceptions=True)

    async def _prefill_at(
        self, server: str, path: str, body: bytes, headers: dict[str, str], record: RequestRecord
    ) -> Raw | _PrefillRefusal | None:
        """Have a prompt computed; return its ticket if there is one. Raises ``_PrefillFailed``."""
        log = _log.bind(request_id=record.request_id)
        try:
            async with self._post(server + path, data=body, headers=headers, timeout=self._prefill_timeout) as answer:
                content = await self._read(answer)
        except UPSTREAM_ERRORS as error:
            self._warn(log, "prefill.failed", server, record.attempt_failed("prefill", _why(error)))
            raise _PrefillFailed from error
        if answer.status < 300:
            params = read_params(content)
            if params is None:
                self._warn(log, "prefill.no_ticket", server, record.attempt_failed("prefill", "it answered no ticket"))
            elif self._config.dispatch == "concurrent" and (early := early_params(params)):
                self._early[server] = early
            return params
        shown = record.attempt_failed("prefill", f"HTTP {answer.status}")
        if 400 <= answer.status < 500:
            return _PrefillRefusal(answer.status, content, _retry_after(answer))
        self._warn(log, "prefill.failed", server, shown)
        raise _PrefillFailed

    async def _decode_at_one(
        self, request: web.Request, body: bytes, headers: dict[str, str], record: RequestRecord, *, early: bool = False
    ) -> web.StreamResponse | None:
        """Pass a request to a decode server, and its answer to the client.

        ``early``: the prompt may still be computed. None is then returned if a server fails before anything was given.
        """
        log = _log.bind(request_id=record.request_id)
        for server in _in_turn(self._decode):
            record.decode_server = server
            try:
                async with self._post(
                    server + request.path, data=body, headers=headers, timeout=self._decode_timeout
                ) as answer:
                    return await self._pass_on(request, answer, record, early=early)
            except NOT_CONNECTED as error:  # so it has not used the ticket
                self._warn(log, "decode.unreachable", server, record.attempt_failed("decode", _why(error)))
            except UPSTREAM_ERRORS as error:
                if early:
                    self._warn(log, "decode.failed", server, record.attempt_failed("decode", _why(error)))
                    return None
                self._warn(log, "decode.failed", server, record.fail(EndCause.DECODE_FAILED, _why(error)))
                return _failure(502, f"the decode server {server} failed", code=EndCause.DECODE_FAILED)
        if early:
            return None
        unreachable = "no decode server can be reached"
        record.fail(EndCause.DECODE_UNREACHABLE, unreachable)
        return _failure(502, unreachable, code=EndCause.DECODE_UNREACHABLE)

    def _warn(self, log: BoundLogger, event: str, server: str, error: str) -> None:
        level, further = self._repeats.level_of(event, server)
        log.log(level, event, server=server, error=error, **further)

    async def _pass_on(
        self, request: web.Request, answer: aiohttp.ClientResponse, record: RequestRecord, *, early: bool
    ) -> web.StreamResponse:
        """Give a client a decode server's answer: as it comes if it is a stream, else as a whole.

        Raises ``UPSTREAM_ERRORS`` if the server fails before anything was given; if it was asked ``early``, also if it
        answers an error first.
        """
        redirected = 300 <= answer.status < 400  # which is not followed
        status = 502 if redirected else answer.status
        headers = {REQUEST_ID: record.request_id, **_retry_after(answer)}
        response = web.StreamResponse(status=status, headers=headers)
        if status >= 500:
            said = error_message(await self._read(answer))
            if early:
                raise _DecodeFailed(f"it answered HTTP {answer.status}: {said}")
            shown = record.fail(EndCause.DECODE_FAILED, f"it answered HTTP {answer.status}: {said}")
            message = f"the decode server {record.decode_server} failed: {shown}"
            return await self._give(request, response, error_body(message, code=EndCause.DECODE_FAILED), record)
        if answer.content_type == JSON:
            content = without_params(await self._read(answer), failed=answer.status >= 400)
            return await self._give(request, response, content, record)
        response.headers["Content-Type"] = answer.headers.get("Content-Type", "application/octet-stream")
        chunks, chunk, errors = answer.content.iter_any(), None, StreamErrors()
        if early:
            chunk = await anext(chunks, None)  # a stream begins before its prompt is read
            if error := StreamErrors().find(chunk or b""):
                raise _DecodeFailed(error)
        record.status = answer.status
        with _ending_with_client(request, record):
            try:
                await self._write(response.prepare(request))
                chunk = chunk if early else await anext(chunks, None)
                while chunk is not None:
                    record.on_bytes()
                    record.ended = LAST_EVENT.search(chunk) is not None
                    if error := errors.find(chunk):
                        record.fail(EndCause.DECODE_FAILED, error)
                    await self._write_pieces(response, chunk, record)
                    chunk = await anext(chunks, None)
                await self._write(response.write_eof())
            except UPSTREAM_ERRORS as error:
                # A regular end would mean that the answer is complete.
                record.fail(EndCause.STREAM_BROKEN, _why(error))
                _abort(request)
        return response

    async def _give(
        self, request: web.Request, response: web.StreamResponse, content: bytes, record: RequestRecord
    ) -> web.StreamResponse:
        response.content_type = JSON
        response.content_length = len(content)
        record.status, record.phase = response.status, "answer"
        with _ending_with_client(request, record):
            await self._write(response.prepare(request))
            await self._write_pieces(response, content, record)
            await self._write(response.write_eof())
        return response

    async def _write_pieces(self, response: web.StreamResponse, content: bytes, record: RequestRecord) -> None:
        for begin in range(0, len(content), PIECE_BYTES):
            piece = content[begin : begin + PIECE_BYTES]
            await self._write(response.write(piece))
            record.sent_bytes += len(piece)

    async def _write(self, writing: Awaitable[object]) -> None:
        """Wait until a client has taken enough of its answer; raise ``_ClientLost`` if it does not."""
        try:
            async with asyncio.timeout(self._config.write_timeout_s):
                await writing
        except TimeoutError as error:
            raise _ClientLost(f"it took nothing for {self._config.write_timeout_s} s") from error
        except ConnectionError as error:
            raise _ClientLost("it hung up") from error

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        """Read a whole answer, which aiohttp does not bound; raise ``_AnswerTooLong`` if it exceeds the limit."""
        content = bytearray()
        async for chunk in answer.content.iter_any():
            content += chunk
            if len(content) > self._config.body_bytes_max:
                raise _AnswerTooLong(f"more than {self._config.body_bytes_max} bytes")
        return bytes(content)

    async def ask_one(self, request: web.Request) -> web.StreamResponse:
        """Answer what a decode server says of itself."""
        headers, timeout = _headers(request), aiohttp.ClientTimeout(total=HEALTH_S)
        with self._admitted():
            for server in list(self._decode):
                try:
                    async with self._get(server + request.path, headers=headers, timeout=timeout) as answer:
                        content = await self._read(answer)
                except UPSTREAM_ERRORS as error:
                    self._warn(_log, "decode.failed", server, shown_error(_why(error)))
                else:
                    unwritten = RequestRecord(request_id=headers[REQUEST_ID])
                    return await self._give(request, web.StreamResponse(status=answer.status), content, unwritten)
        return _failure(502, "no decode server can be reached")

    async def health(self, request: web.Request) -> web.Response:
        """Answer which servers live; 200 if a decode server does."""
        del request
        async with self._checking:  # those who wait get the same answer: servers are not flooded
            if monotonic() - self._checked_at >= HEALTH_PAUSE_S:
                servers = (*self._config.prefill, *self._config.decode)
                lives = await asyncio.gather(*map(self._lives, servers))
                self._alive = dict(zip(servers, lives, strict=True))
                self._checked_at = monotonic()
        sides = {"prefill": self._config.prefill, "decode": self._config.decode}
        found = {name: {server: self._alive[server] for server in side} for name, side in sides.items()}
        status = 200 if any(found["decode"].values()) else 503
        return web.Response(status=status, body=msgspec.json.encode(found), content_type=JSON)

    async def _lives(self, server: str) -> bool:
        try:
            async with self._get(f"{server}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_S)) as answer:
                return answer.status < 300
        except UPSTREAM_ERRORS:
            return False


def _why(error: Exception) -> object:
    """Return what to say of a server that failed."""
    match error:
        case TimeoutError():
            return "it gave no answer in time"
        case aiohttp.ClientConnectorError(os_error=ConnectionRefusedError()):
            return "it refused the connection: nothing listens there"
        case aiohttp.ClientConnectorError(os_error=cause):
            return f"it cannot be reached: {cause}"
        case aiohttp.ClientResponseError(message=message):
            return f"it does not speak HTTP: is this the port of its API? {' '.join(message.split())}"
        case _:
            return error


def _retry_after(answer: aiohttp.ClientResponse) -> dict[str, str]:
    """Return the header of an answer that says when to try again, if it has one."""
    return {RETRY_AFTER: answer.headers[RETRY_AFTER]} if RETRY_AFTER in answer.headers else {}


@asynccontextmanager
async def open_proxy(config: ProxyConfig, host: str, port: int) -> AsyncIterator[str]:
    """Serve clients while the context is open, and yield ``host:port``; port 0 takes a free one.

    Raises:
        OSError: it cannot listen there.
    """
    # A connection per request: one that a server closes while it is idle would fail the next request.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        proxy = Proxy(config, session)
        app = web.Application(middlewares=[proxy.admit], client_max_size=config.body_bytes_max)
        app.add_routes([web.post(path, proxy.complete) for path in (*ONE_TOKEN, *ASKED_OF_ONE)])
        app.add_routes([web.get(path, proxy.ask_one) for path in TOLD_BY_ONE])
        app.add_routes([web.get("/health", proxy.health)])
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=GRACE_S,
            auto_decompress=False,
            lingering_time=LINGER_S,
            keepalive_timeout=config.headers_timeout_s,
            logger=_http_log,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, backlog=config.requests_max).start()
            found_host, found_port = runner.addresses[0][:2]
            yield f"{found_host}:{found_port}"
        finally:
            proxy.stop()
            await runner.cleanup()


@contextmanager
def _ending_with_client(request: web.Request, record: RequestRecord) -> Iterator[None]:
    """End a request whose client hung up, or takes no more of its answer."""
    try:
        yield
    except _ClientLost as error:
        record.fail(EndCause.CLIENT_LOST, str(error))
        _abort(request)


def _in_turn(servers: deque[str]) -> list[str]:
    """Return all servers, beginning with the next one."""
    order = list(servers)
    servers.rotate(-1)
    return order


def _client(request: web.Request) -> str:
    """Return ``host:port`` of who asks; empty if the connection is gone."""
    name = None if request.transport is None else request.transport.get_extra_info("peername")
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) and len(name) > 1 else ""


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _headers(request: web.Request) -> dict[str, str]:
    request_id = request.headers.get(REQUEST_ID, "")
    sane = request_id.isascii() and request_id.isprintable() and len(request_id) <= REQUEST_ID_CHARACTERS_MAX
    given = {name: request.headers[name] for name in FORWARDED if name in request.headers}
    own = request_id if request_id and sane else secrets.token_hex(8)
    return {**given, REQUEST_ID: own, "Content-Type": JSON, "Accept-Encoding": "identity"}


def _failure(status: int, message: str, kind: str = "server_error", code: str | None = None) -> web.Response:
    return web.Response(status=status, body=error_body(message, kind, code), content_type=JSON)
