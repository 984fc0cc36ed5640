"""Transfers become spans of OpenTelemetry, in the trace of the ticket."""

import asyncio
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import kvflow
from kvflow.errors import ArgumentInvalid, ConfigInvalid, StaleLease
from kvflow.events import LeaseEnded, OnlyEvents, TransferCompleted
from kvflow.observability.logs import event_fields
from kvflow.observability.spans import Spans
from kvflow.report import PHASES

from .examples import EVENTS, REPORT
from .test_pages import PATIENCE_S, cache, config

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Spans(provider, model="org/model")


class Pair:
    """Two workers with spans, and what they have reported."""

    def __init__(self, spans, **settings):
        self.completed, self.ended = [], asyncio.Event()
        self.leases = []
        collect = [OnlyEvents(TransferCompleted, self.completed.append), OnlyEvents(LeaseEnded, self._on_end)]
        hooks = [*spans.hooks(), *collect]
        self.producing = kvflow.open_worker(config("prefill-0", **settings), cache(), hooks=hooks)
        self.consuming = kvflow.open_worker(config("decode-0"), cache(), hooks=hooks)

    def _on_end(self, event):
        self.leases.append(event)
        self.ended.set()

    async def __aenter__(self):
        self.producer = await self.producing.__aenter__()
        self.consumer = await self.consuming.__aenter__()
        return self

    async def __aexit__(self, *error):
        await self.consuming.__aexit__(*error)
        await self.producing.__aexit__(*error)


async def test_both_sides_are_in_the_trace_of_the_request(spans, exporter):
    async with asyncio.timeout(PATIENCE_S), Pair(spans) as pair:
        ticket = pair.producer.offer("request-1", [[0, 1]], num_tokens=32, traceparent=TRACEPARENT)
        ticket = kvflow.Ticket.from_params(ticket.to_params())
        report = await pair.consumer.pull(ticket, [[4, 5]], local_request_id="cmpl-1")
        await pair.ended.wait()
    found = {span.name: span for span in exporter.get_finished_spans()}
    offer, pull = found.pop("kvflow.offer"), found.pop("kvflow.pull")
    for span, kind in ((offer, SpanKind.PRODUCER), (pull, SpanKind.CONSUMER)):
        assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
        assert (span.kind, span.attributes["gen_ai.request.model"]) == (kind, "org/model")
    assert offer.attributes["kvflow.outcome"] == "released"
    assert (pull.attributes["gen_ai.request.id"], pull.attributes["kvflow.request_id"]) == ("cmpl-1", "request-1")
    assert (pull.attributes["kvflow.bytes"], pull.attributes["kvflow.remote_engine_id"]) == (report.nbytes, "prefill-0")
    assert pull.end_time - pull.start_time == int(report.timings_s["total"] * 1e9)
    phases = [name for name in PHASES if report.timings_s.get(name, 0) > 0]
    assert sorted(found) == sorted(f"kvflow.pull.{name}" for name in phases)
    begun = pull.start_time
    for name in phases:
        child = found[f"kvflow.pull.{name}"]
        assert (child.parent.span_id, child.start_time) == (pull.context.span_id, begun)
        assert child.end_time - begun == int(report.timings_s[name] * 1e9)
        begun = child.end_time
    records = [event_fields(event) for event in (pair.completed[0], pair.leases[0])]
    assert [record["trace_id"] for record in records] == [TRACE, TRACE]


async def test_a_failed_pull_is_an_error(spans, exporter):
    async with asyncio.timeout(PATIENCE_S), Pair(spans) as pair:
        ticket = pair.producer.offer("request-1", [[0, 1]], num_tokens=32, traceparent=TRACEPARENT)
        pair.producer.revoke("request-1")
        with pytest.raises(StaleLease):
            await pair.consumer.pull(ticket, [[4, 5]])
    (pull,) = [span for span in exporter.get_finished_spans() if span.name == "kvflow.pull"]
    assert (pull.status.status_code, pull.attributes["error.type"]) == (StatusCode.ERROR, "stale_lease")
    assert (f"{pull.context.trace_id:032x}", pull.attributes["kvflow.phase"]) == (TRACE, "fence")


async def test_a_worker_draws_a_trace_for_offers_without_one(spans, exporter):
    async with asyncio.timeout(PATIENCE_S), Pair(spans, trace_offers=True) as pair:
        first = pair.producer.offer("request-1", [[0, 1]], num_tokens=32)
        other = pair.producer.offer("request-2", [[2, 3]], num_tokens=32)
        given = await pair.producer.offer_when_possible("request-3", [[6]], num_tokens=16, traceparent=TRACEPARENT)
        await pair.consumer.pull(first, [[4, 5]])
        await pair.ended.wait()
    traces = [ticket.grants[0].trace.split("-") for ticket in (first, other, given)]
    assert traces[0][1] != traces[1][1]
    assert traces[0][3] == "01"
    assert traces[2][1] == TRACE
    found = exporter.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in found if span.name == "kvflow.pull"} == {traces[0][1]}


async def test_without_a_trace_the_ticket_is_as_before_and_a_span_begins_one(spans, exporter):
    async with asyncio.timeout(PATIENCE_S), Pair(spans) as pair:
        ticket = pair.producer.offer("request-1", [[0, 1]], num_tokens=32)
        assert kvflow.Ticket.from_params(ticket.to_params()).grants[0].traceparent is None
        assert ticket.grants[0].trace == ""
        await pair.consumer.pull(ticket, [[4, 5]])
        for malformed in ("x", TRACEPARENT + "0", f"00-{'0' * 32}-{PARENT}-01", f"01-{TRACE}-{PARENT}-01"):
            with pytest.raises(ArgumentInvalid, match="traceparent"):
                pair.producer.offer("request-2", [[2, 3]], num_tokens=32, traceparent=malformed)
    (pull,) = [span for span in exporter.get_finished_spans() if span.name == "kvflow.pull"]
    assert pull.parent is None
    assert "trace_id" not in event_fields(pair.completed[0])


def test_every_phase_of_a_report_has_a_span():
    assert set(REPORT.timings_s) - {"total"} <= set(PHASES)


def test_spans_that_are_not_sampled_have_no_children(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    unsampled = TRACEPARENT.removesuffix("01") + "00"
    for hook in Spans(provider).hooks():
        hook(kvflow.events.TransferCompleted(1, "r", REPORT, traceparent=unsampled))
        hook(EVENTS["transfer.started"])
    assert exporter.get_finished_spans() == ()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigInvalid, match="opentelemetry-api, which is not installed") as caught:
        Spans()
    assert "kvflow[otel]" in caught.value.remedy
