"""A worker serves its metrics, its health and what it holds, where its settings say so."""

import asyncio
import base64
import hashlib
import json
import re
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvflow
from kvflow.errors import ConfigInvalid, StaleLease
from kvflow.events import LeaseEnded, OnlyEvents, WorkerOpened
from kvflow.observability.live import RECENT_MAX, TEXT_MAX, live_page
from kvflow.report import PHASES

from .test_http import PATIENCE_S, exchange, request

SPECS = {"layers.0": kvflow.FullAttention(block_size=16, num_kv_heads=2, head_size=8, dtype="float32")}


def config(engine_id, **settings):
    secret = "a secret of thirty-two characters"
    return kvflow.WorkerConfig(engine_id=engine_id, cluster_secret=secret, transport="loopback", **settings)


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
        assert found["kvflow_connect_seconds_count", "prefill-0"] == 1
        assert 'kvflow_ended_leases_total{outcome="released"} 1.0' in await get(sources, "/metrics")
        assert await get(targets, "/healthz") == "alive\n"
        snapshot = json.loads(await get(targets, "/debug/kvflow"))
        assert (snapshot["pulls"], snapshot["leases"], snapshot["quarantined"]) == (0, 0, [])

        assert await get(targets, "/readyz") == "ready\n"
        await consumer.drain(0.0)
        assert (await exchange(targets, request("/readyz")))[0].startswith("HTTP/1.1 503 ")
        assert await get(targets, "/healthz") == "alive\n"
    with pytest.raises(ConnectionError):
        await exchange(sources, request("/healthz"))


async def first_state(address):
    """Return what the first event of the live page's stream says."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request("/events"))
    assert b"text/event-stream" in await reader.readuntil(b"\r\n\r\n")
    message = await reader.readuntil(b"\n\n")
    writer.close()
    return json.loads(message.removeprefix(b"data: "))


async def test_the_live_page_shows_recent_pulls_and_failures():
    opened, hostile = [], "<img src=x onerror=alert(1)>\n\ndata: {}"
    hooks = [OnlyEvents(WorkerOpened, opened.append)]
    async with (
        asyncio.timeout(PATIENCE_S),
        kvflow.open_worker(config("prefill-0"), cache()) as producer,
        kvflow.open_worker(config("decode-0", http="127.0.0.1:0"), cache(), hooks=hooks) as consumer,
    ):
        address = opened[0].http
        head, page = await exchange(address, request("/"))
        assert "text/html" in head
        assert 'new EventSource("/events")' in page
        report = await consumer.pull(producer.offer(hostile, [[0, 1]], num_tokens=32), [[4, 5]])
        ended = producer.offer("revoked", [[0, 1]], num_tokens=32)
        producer.revoke("revoked")
        with pytest.raises(StaleLease) as caught:
            await consumer.pull(ended, [[4, 5]])
        for n in range(2 * RECENT_MAX):
            consumer.record_refusal("refused", "x" * 2 * TEXT_MAX, remedy="Ask.", request_id=f"refused {n}")
        state = await first_state(address)
    (pull,) = state["pulls"]
    assert (pull["request_id"], pull["peer"], pull["nbytes"]) == (hostile, "prefill-0", report.nbytes)
    assert pull["timings_s"] == pytest.approx(report.timings_s)
    assert state["totals"] == {"pulls": 1, "nbytes": report.nbytes, "failed": 2 * RECENT_MAX + 1}
    assert [failure["request_id"] for failure in state["failures"]] == [
        f"refused {n}" for n in reversed(range(RECENT_MAX, 2 * RECENT_MAX))
    ]
    assert state["failures"][0]["detail"] == "x" * TEXT_MAX
    assert caught.value.code == "stale_lease"
    assert (state["ready"], state["held"]["pulls"], state["worker"]["engine_id"]) == (True, 0, "decode-0")


def test_the_live_page_runs_its_own_script_alone():
    answer = live_page()
    page = answer.body.decode()
    for kind in ("script", "style"):
        (content,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in answer.policy
    assert "default-src 'none'" in answer.policy
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?://", page)
    assert not re.search(r"<[^>]+ (style|on\w+)=", page.partition("<script>")[0])


def test_the_live_page_draws_every_phase():
    (drawn,) = re.findall(r"const PHASES = (\[.*?\]);", live_page().body.decode())
    assert json.loads(drawn) == [*PHASES]


async def test_no_server_is_started_unless_a_setting_says_so():
    opened = []
    async with kvflow.open_worker(config("p"), cache(), hooks=[OnlyEvents(WorkerOpened, opened.append)]):
        assert opened[0].http == ""


@pytest.mark.parametrize("address", ["0.0.0.0:9400", "*:9400", "[::]:0", "192.0.2.1:9400", "example.org:0"])
def test_addresses_that_others_reach_need_a_second_setting(address):
    with pytest.raises(ConfigInvalid, match="which other hosts may reach") as caught:
        config("p", http=address).check()
    assert "http_public" in caught.value.remedy
    config("p", http=address, http_public=True).check()


@pytest.mark.parametrize("address", ["9400", "127.0.0.1", "127.0.0.1:70000", "tcp://127.0.0.1:1", "a b:1:2"])
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
