"""A worker serves its metrics, its health and what it holds, where its settings say so."""

import asyncio
import json
import re
import sys
import time
from http.client import HTTPConnection
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvflow
from kvflow.errors import ConfigInvalid
from kvflow.events import LeaseEnded, OnlyEvents, WorkerOpened
from kvflow.observability import pages
from tests.helpers.loops import looped
from tests.helpers.settings import flat_config

from .test_http import PATIENCE_S, exchange, request

SPECS = {"layers.0": kvflow.FullAttention(block_size=16, num_kv_heads=2, head_size=8, dtype="float32")}


def config(engine_id, **settings):
    secret = "a secret of thirty-two characters"
    return flat_config(engine_id=engine_id, cluster_secret=secret, transport="loopback", **settings)


def cache():
    return kvflow.allocate(SPECS, num_blocks=8)


async def get(address, path):
    """Return the body of a page that is there."""
    head, body = await exchange(address, request(path))
    assert head.startswith("HTTP/1.1 200 "), body
    return body


async def test_a_worker_shows_what_it_does():
    opened, ended = [], asyncio.Event()
    hooks = [OnlyEvents(WorkerOpened, opened.append), OnlyEvents(LeaseEnded, lambda _: ended.set())]
    async with (
        asyncio.timeout(PATIENCE_S),
        kvflow.open_worker(config("prefill-0", http="127.0.0.1:0"), cache(), hooks=hooks) as producer,
        kvflow.open_worker(config("decode-0", http="localhost:0"), cache(), hooks=hooks) as consumer,
    ):
        sources, targets = [event.http for event in opened]
        assert sources.startswith("127.0.0.1:")
        assert targets.startswith("localhost:")
        ticket = producer.offer("request-1", [[0, 1]], num_tokens=32)
        assert "kvflow_leases 1.0" in await get(sources, "/metrics")
        report = await consumer.pull(ticket, [[4, 5]])
        await ended.wait()
        found = {
            (sample.name, sample.labels.get("peer")): sample.value
            for family in text_string_to_metric_families(await get(targets, "/metrics"))
            for sample in family.samples
        }
        assert found["kvflow_pull_seconds_count", "prefill-0"] == 1
        assert found["kvflow_pull_bytes_sum", "prefill-0"] == report.nbytes
        assert found["kvflow_connect_seconds_count", None] == 1
        assert 'kvflow_ended_leases_total{outcome="released"} 1.0' in await get(sources, "/metrics")
        assert await get(targets, "/healthz") == "alive\n"
        snapshot = json.loads(await get(targets, "/debug/kvflow"))
        assert (snapshot["pulls"], snapshot["leases"], snapshot["quarantined"]) == (0, 0, [])
        head, body = await exchange(targets, request("/"))
        assert head.startswith("HTTP/1.1 404 ")
        assert body == "there is no '/'; there are /debug/kvflow, /healthz, /metrics, /readyz\n"

        assert await get(targets, "/readyz") == "ready\n"
        await consumer.drain(0.0)
        assert (await exchange(targets, request("/readyz")))[0].startswith("HTTP/1.1 503 ")
        assert await get(targets, "/healthz") == "alive\n"
    with pytest.raises(ConnectionError):
        await exchange(sources, request("/healthz"))


async def test_a_worker_whose_event_loop_hangs_is_not_alive(monkeypatch):
    silent_s = 0.0
    monkeypatch.setattr(pages, "BEAT_S", 0.01)
    monkeypatch.setattr(pages, "ANSWER_S", 0.0)  # it would hang as long
    monkeypatch.setattr(pages, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + silent_s))
    opened = []
    hooks = [OnlyEvents(WorkerOpened, opened.append)]
    async with kvflow.open_worker(config("p", http="127.0.0.1:0"), cache(), hooks=hooks):
        address = opened[0].http
        silent_s = pages.ALIVE_S + 1.0  # while this function, which the event loop calls, does not return to it
        assert get_while_it_hangs(address, "/readyz") == (200, "ready\n")
        for path, words in (
            ("/healthz", r"has not run for \d+ s"),
            ("/metrics", "does not answer"),
            ("/debug/kvflow", "not answer"),
        ):
            status, body = get_while_it_hangs(address, path)
            assert status == 503
            assert re.search(words, body)
        async with asyncio.timeout(PATIENCE_S):
            while not (await exchange(address, request("/healthz")))[0].startswith("HTTP/1.1 200 "):
                pass


def get_while_it_hangs(address, path):
    """Return the status and the body of a page, while the event loop that calls this hangs."""
    connection = HTTPConnection(address, timeout=PATIENCE_S)
    connection.request("GET", path)
    answer = connection.getresponse()
    try:
        return answer.status, answer.read().decode()
    finally:
        connection.close()


async def test_no_server_is_started_unless_a_setting_says_so():
    opened = []
    async with kvflow.open_worker(config("p"), cache(), hooks=[OnlyEvents(WorkerOpened, opened.append)]):
        assert opened[0].http == ""


@looped("address", ["0.0.0.0:9400", "*:9400", "[::]:0", "192.0.2.1:9400", "example.org:0"])
def test_addresses_that_others_reach_need_a_second_setting(address):
    with pytest.raises(ConfigInvalid, match="which other hosts may reach") as caught:
        config("p", http=address).check()
    assert "http_public" in caught.value.remedy
    config("p", http=address, http_public=True).check()


@looped("address", ["9400", "127.0.0.1", "127.0.0.1:70000", "tcp://127.0.0.1:1", "a b:1:2"])
def test_malformed_addresses_are_refused(address):
    with pytest.raises(ConfigInvalid, match="http"):
        config("p", http=address).check()


async def test_a_taken_port_and_a_missing_package_are_refused(monkeypatch):
    opened = []
    hooks = [OnlyEvents(WorkerOpened, opened.append)]
    async with kvflow.open_worker(config("p", http="127.0.0.1:0"), cache(), hooks=hooks):
        with pytest.raises(ConfigInvalid, match="cannot listen there"):
            async with kvflow.open_worker(config("q", http=opened[0].http), cache()):
                pass
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigInvalid, match="not installed"):
        async with kvflow.open_worker(config("p", http="127.0.0.1:0"), cache()):
            pass
