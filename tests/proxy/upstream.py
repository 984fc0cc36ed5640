"""Small servers of OpenAI's interface, for a proxy to stand before."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from kvflow.tools.proxy.completions import ONE_TOKEN
from kvflow.tools.proxy.server import ASKED_OF_ONE, TOLD_BY_ONE

TICKET = '{"do_remote_prefill" : true, "do_remote_decode":false, "kvflow": {"epoch":"18446744073709551615","mac":"5a"}}'
"""Spaced as no encoder would: who reads and writes it again changes it."""

Behavior = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Upstream:
    """One server.

    Attributes:
        behavior: answers requests for completions.
        url: of the server.
        bodies: of these requests, in order.
        headers: likewise.
        asked: set when there is one.
        cancelled: set when a request has ended because its client hung up.
        checks: how often it was asked for its health.
    """

    behavior: Behavior
    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    checks: int = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        self.headers.append(request.headers)
        self.asked.set()
        try:
            return await self.behavior(request)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def text(content, status=200):
    """Answer with JSON, whatever is asked."""

    async def behavior(request):
        return web.Response(status=status, text=content, content_type="application/json")

    return behavior


PREFILLED = text(f'{{"id": "cmpl-1", "kv_transfer_params": {TICKET}}}')
DECODED = text('{"id": "cmpl-1","choices":[{"text":"b"}],"kv_transfer_params":null}')


async def hang(request):
    """Answer nothing until the client is gone."""
    await asyncio.Event().wait()


async def hang_up(request):
    """End the connection without an answer."""
    request.transport.abort()
    return web.Response()


def stream(*steps):
    """Answer with a stream: bytes are sent, an event is waited for, None ends the connection."""

    async def behavior(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for step in steps:
            match step:
                case bytes():
                    await response.write(step)
                case asyncio.Event():
                    await step.wait()
                case None:
                    request.transport.abort()
        return response

    return behavior


@asynccontextmanager
async def serving(routes: Sequence[web.RouteDef]) -> AsyncIterator[str]:
    """Serve routes; yield the URL."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def open_upstream(behavior: Behavior, routes: Sequence[web.RouteDef] = ()) -> AsyncIterator[Upstream]:
    upstream = Upstream(behavior)

    async def models(request):
        return web.json_response({"object": "list", "data": [{"id": "tiny"}]})

    async def health(request):
        upstream.checks += 1
        return web.Response()

    completions = [web.post(path, upstream.complete) for path in (*ONE_TOKEN, *ASKED_OF_ONE)]
    told = [web.get("/health", health), *(web.get(path, models) for path in TOLD_BY_ONE)]
    async with serving([*completions, *told, *routes]) as upstream.url:
        yield upstream
