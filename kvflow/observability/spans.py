"""Export transfers as spans of OpenTelemetry: ``kvflow.offer`` at the producer, ``kvflow.pull`` at the consumer.

Both are children of the W3C trace context in the ticket, and so in one trace with the request of the engine, if the
engine gave its ``traceparent`` to the offer.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvflow import events
from kvflow.errors import ConfigInvalid
from kvflow.events import Hook, OnlyEvents
from kvflow.report import PHASES
from kvflow.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider


class Spans:
    """Hooks that turn the ends of leases and pulls into spans.

    A span is made when its lease or pull has ended, from the seconds in the event. The phases of a pull are its
    children. Each stands for all of its phase, so they follow each other in the order in which the phases begin.

    Args:
        provider: where the spans go; None takes the global provider of OpenTelemetry.
        model: name of the model, for the attribute ``gen_ai.request.model``; empty leaves it out.

    Raises:
        ConfigInvalid: OpenTelemetry is not installed.

    Thread: any.
    """

    def __init__(self, provider: "TracerProvider | None" = None, *, model: str = "") -> None:
        try:
            from opentelemetry import trace  # noqa: PLC0415 - of an optional extra
        except ImportError as error:
            raise ConfigInvalid(
                "spans need the package opentelemetry-api, which is not installed",
                remedy="Install kvflow[otel], and an SDK with an exporter.",
            ) from error
        self._trace = trace
        self._tracer = trace.get_tracer("kvflow", __version__, provider)
        self._shared = {"gen_ai.request.model": model} if model else {}

    def hooks(self) -> list[Hook]:
        """Return the hooks, for ``open_worker``."""
        return [
            OnlyEvents(events.LeaseEnded, self._on_lease_ended),
            OnlyEvents(events.TransferCompleted, self._on_completed),
            OnlyEvents(events.PullFailed, self._on_failed),
        ]

    def _on_lease_ended(self, event: events.LeaseEnded) -> None:
        kind = self._trace.SpanKind.PRODUCER
        attributes = {"gen_ai.request.id": event.request_id, "kvflow.outcome": event.outcome}
        ended_ns = time.time_ns()
        span = self._tracer.start_span(
            "kvflow.offer",
            self._parent(event.traceparent),
            kind,
            attributes | self._shared,
            start_time=ended_ns - _ns(event.held_s),
        )
        span.end(ended_ns)

    def _on_completed(self, event: events.TransferCompleted) -> None:
        report = event.report
        attributes = {
            "kvflow.bytes": report.nbytes,
            "kvflow.read_bytes": report.read_bytes,
            "kvflow.descriptors": report.descriptors,
            "kvflow.early": report.early,
            "kvflow.transport": report.transport,
            "kvflow.plane": report.plane,
        }
        ended_ns = time.time_ns()
        self._start_pull(event, attributes, report.timings_s, ended_ns).end(ended_ns)

    def _on_failed(self, event: events.PullFailed) -> None:
        attributes = {
            "error.type": event.code,
            "kvflow.phase": event.phase,
            "kvflow.peer": event.peer,
            "kvflow.bytes": event.nbytes,
            "kvflow.bytes_wanted": event.nbytes_wanted,
            "kvflow.quarantined": event.quarantined,
            "kvflow.remedy": event.remedy,
        }
        ended_ns = time.time_ns()
        span = self._start_pull(event, attributes, event.timings_s, ended_ns)
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, event.detail))
        span.end(ended_ns)

    def _start_pull(
        self,
        event: events.TransferCompleted | events.PullFailed,
        attributes: Mapping[str, Any],
        timings_s: Mapping[str, float],
        ended_ns: int,
    ) -> "Span":
        """Return the span of a pull, after making its children."""
        begun_ns = ended_ns - _ns(timings_s.get("total", 0.0))
        shared: dict[str, Any] = {
            "gen_ai.request.id": event.local_request_id or event.request_id,
            "kvflow.request_id": event.request_id,
            "kvflow.pull_id": event.pull_id,
            "kvflow.remote_engine_id": event.remote_engine_id,
        }
        span = self._tracer.start_span(
            "kvflow.pull",
            self._parent(event.traceparent),
            self._trace.SpanKind.CONSUMER,
            {**shared, **attributes, **self._shared},
            start_time=begun_ns,
        )
        if span.is_recording():
            inside = self._trace.set_span_in_context(span)
            for phase in PHASES:
                seconds = timings_s.get(phase, 0.0)
                if seconds > 0:
                    child = self._tracer.start_span(f"kvflow.pull.{phase}", inside, start_time=begun_ns)
                    begun_ns += _ns(seconds)
                    child.end(begun_ns)
        return span

    def _parent(self, traceparent: str) -> "Context | None":
        """Return the context of a ticket; None if it has none: the span then begins a trace."""
        if not traceparent:
            return None
        _, trace_id, span_id, flags = traceparent.split("-")
        trace = self._trace
        parent = trace.SpanContext(int(trace_id, 16), int(span_id, 16), True, trace.TraceFlags(int(flags, 16)))
        context: Context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
        return context


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
