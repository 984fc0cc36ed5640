"""Servers with the HTTP face of vLLM and the connector's own metrics, and routers that make mistakes.

They verify tickets and read parameters with the connector's code, and they count with its classes. No cache is moved.
"""

import asyncio
import importlib
import json
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import ModuleType, SimpleNamespace

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvflow.errors import TicketInvalid
from kvflow.integrations.vllm.messages import PHASES, Tally, empty_counters
from kvflow.routing import LoadWanted, OfferWanted, is_tagged, read_params, wants_transfer
from tests.proxy.upstream import serving
from tests.unit.kvflow.integrations.vllm_like import new_key, new_ticket

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
STATS = "kvflow.integrations.vllm.stats"
LABELS = ["model_name", "engine"]
NBYTES, DESCRIPTORS, SECONDS = 524_288, 4, 0.002
OFFER = {"do_remote_decode": True, "do_remote_prefill": False}


class PromMetrics:
    """What the connector's class expects of vLLM's."""

    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        self._gauge_cls, self._counter_cls = metric_types[Gauge], metric_types[Counter]
        self._histogram_cls = metric_types[Histogram]
        self._labelnames = labelnames
        self.per_engine_labelvalues = per_engine_labelvalues


def metrics_class(monkeypatch):
    """Return the connector's class of metrics, on a base that is not vLLM's."""
    base = ModuleType(BASE)
    base.KVConnectorPromMetrics, base.KVConnectorStats = PromMetrics, object
    monkeypatch.setitem(sys.modules, BASE, base)
    monkeypatch.delitem(sys.modules, STATS, raising=False)
    found = importlib.import_module(STATS).KVFlowMetrics
    monkeypatch.delitem(sys.modules, STATS)
    return found


class Face:
    """A server of vLLM, as its clients see it.

    Attributes:
        url: of the server.
        model: that it serves.
        connected: whether it has kvflow's connector.
        mute: whether it answers no tickets.
        failing: code with which its transfers fail; empty if they do not.
        lessor: the server whose leases it releases.
        keeps: whether it releases no lease.
        asked: requests for completions.
        headers: of them.
    """

    def __init__(self, metrics, *, model="tiny", key=""):
        self.url, self.model, self._key = "", model, key
        self.connected, self.mute, self.failing, self.keeps = metrics is not None, False, "", False
        self.lessor = self
        self.asked, self.headers = [], []
        self._registry = CollectorRegistry()
        types = {kind: partial(kind, registry=self._registry) for kind in (Counter, Gauge, Histogram)}
        self._values = [model, "0"]
        self._success = types[Counter]("vllm:request_success", "Ended.", [*LABELS, "finished_reason"])
        self._running = types[Gauge]("vllm:num_requests_running", "Running.", LABELS).labels(*self._values)
        self._hits = types[Counter]("vllm:external_prefix_cache_hits", "Tokens.", LABELS).labels(*self._values)
        config = SimpleNamespace(kv_transfer_config=None)
        self._metrics = metrics and metrics(config, types, LABELS, {0: self._values})

    def observe(self, counters):
        if self._metrics:
            self._metrics.observe(counters, 0)

    def end(self, name, key):
        """Count one thing."""
        tally = Tally()
        tally.count(name, key)
        self.observe(tally.take())

    def finish(self, number=1):
        """Count requests of somebody else."""
        self._success.labels(*self._values, "length").inc(number)

    def run(self, number):
        """Show requests that are computed."""
        self._running.set(number)

    def exposition(self):
        return generate_latest(self._registry)

    def transfer(self):
        counters = empty_counters()
        for phase in PHASES:
            counters[phase].append(SECONDS if phase == "total_s" else SECONDS / 8)
        counters["nbytes"].append(NBYTES)
        counters["descriptors"].append(DESCRIPTORS)
        self.observe(counters)
        self._hits.inc(256)
        if not self.keeps:
            self.lessor.end("leases", "released")

    def act(self, params, request_id):
        """Do what a request's parameters say; return those of the answer."""
        if not self.connected:
            return None
        if not is_tagged(params):
            self.end("untagged", "absent")
        elif not wants_transfer(params):
            self.end("untagged", "decline")
        try:
            wanted = read_params(params, new_key().read, 1 << 17)
        except TicketInvalid as error:
            self.end("failed", str(error.code))
            return None
        if isinstance(wanted, OfferWanted) and not self.mute:
            return new_ticket(request_id=request_id).to_router_params()
        if isinstance(wanted, LoadWanted) and not self.mute:
            if self.failing:
                self.end("failed", self.failing)
            else:
                self.transfer()
        return None

    async def complete(self, request):
        if self._key and request.headers.get("Authorization") != f"Bearer {self._key}":
            return web.json_response({"error": {"message": "Unauthorized"}}, status=401)
        fields = await request.json()
        self.asked.append(fields)
        self.headers.append(request.headers)
        params = self.act(fields.get("kv_transfer_params"), request.headers.get("X-Request-Id", "r"))
        self.finish()
        choice = {"choices": [{"text": "b", "finish_reason": "length"}]}
        if not fields.get("stream"):
            return web.json_response({**choice, "kv_transfer_params": params})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(choice).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    async def models(self, request):
        return web.json_response({"object": "list", "data": [{"id": self.model, "max_model_len": 4096}]})

    async def health(self, request):
        return web.Response()

    async def metrics(self, request):
        return web.Response(body=self.exposition(), content_type="text/plain")

    def routes(self):
        return [
            web.post("/v1/completions", self.complete),
            web.get("/v1/models", self.models),
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
        ]


@asynccontextmanager
async def opened(*faces):
    async with AsyncExitStack() as stack:
        for face in faces:
            face.url = await stack.enter_async_context(serving(face.routes()))
        yield faces


class Router:
    """A router before two servers. Its methods are one right way and many wrong ones.

    Args:
        prefill: a server.
        decode: another one.
        behavior: name of the method that answers.
    """

    def __init__(self, prefill, decode, behavior):
        self._prefill, self._decode = prefill, decode
        self._behavior = getattr(self, behavior)

    async def answer(self, request):
        async with aiohttp.ClientSession() as self._session:
            return await self._behavior(request, await request.json())

    async def _post(self, server, fields):
        async with self._session.post(f"{server.url}/v1/completions", json=fields) as answer:
            return await answer.read()

    async def _ticket(self, fields):
        asked = {**fields, "max_tokens": 1, "stream": False, "kv_transfer_params": OFFER}
        return json.loads(await self._post(self._prefill, asked))["kv_transfer_params"]

    async def _give(self, fields):
        content = await self._post(self._decode, fields)
        return web.Response(body=content, content_type="text/event-stream")

    async def does_not_ask(self, request, fields):
        await self._post(self._prefill, {**fields, "max_tokens": 1, "stream": False})
        return await self._give(fields)

    async def declines(self, request, fields):
        for server in (self._prefill, self._decode):
            last = {**fields, "kv_transfer_params": {"do_remote_prefill": False, "do_remote_decode": False}}
            content = await self._post(server, last)
        return web.Response(body=content, content_type="text/event-stream")

    async def skips_prefill(self, request, fields):
        return await self._give(fields)

    async def skips_decode(self, request, fields):
        await self._ticket(fields)
        return web.Response(body=b"data: {}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    async def skips_both(self, request, fields):
        return web.json_response({"choices": []})

    async def drops_the_ticket(self, request, fields):
        await self._ticket(fields)
        return await self._give(fields)

    async def changes_the_ticket(self, request, fields):
        params = await self._ticket(fields)
        text = params["kvflow"]
        params["kvflow"] = f"{text[:-9]}{'B' if text[-9] == 'A' else 'A'}{text[-8:]}"
        return await self._give({**fields, "kv_transfer_params": params})

    async def carries(self, request, fields):
        return await self._give({**fields, "kv_transfer_params": await self._ticket(fields)})

    async def cuts_the_stream(self, request, fields):
        await self._give({**fields, "kv_transfer_params": await self._ticket(fields)})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": []}\n\n')
        request.transport.abort()
        return response

    async def ends_the_stream_early(self, request, fields):
        return web.Response(body=b'data: {"choices": []}\n\n', content_type="text/event-stream")

    async def streams_an_error(self, request, fields):
        content = b'data: {"error": {"message": "EngineCore died"}}\n\ndata: [DONE]\n\n'
        return web.Response(body=content, content_type="text/event-stream")

    async def fails(self, request, fields):
        return web.json_response({"error": {"message": "no worker \x1b[2J"}}, status=503)

    async def hangs(self, request, fields):
        await asyncio.Event().wait()

    async def says_too_much(self, request, fields):
        return web.Response(body=b"x" * (1 << 20))

    def routes(self):
        return [web.post("/v1/completions", self.answer)]
