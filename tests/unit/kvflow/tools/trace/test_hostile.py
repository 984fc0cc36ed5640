"""Whatever a log holds, a trace of it is made: nothing raises, and phases add up."""

import contextlib
import copy
import json
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.observability.logs import event_fields
from kvflow.tools.trace import export
from kvflow.tools.trace.joining import read_trace
from kvflow.tools.trace.records import Reading, Trace
from kvflow.tools.trace.text import list_lines, waterfall_lines
from tests.unit.kvflow.observability.examples import EVENTS

KINDS = ("peer.connected", "offer.admitted", "lease.ended", "transfer.completed", "transfer.failed", "transfer.traced")
WORKERS = [
    {"engine_id": name, "rank": 0, "incarnation": digit * 32} for name, digit in (("decode", "1"), ("prefill-0", "0"))
]
CONTEXT = {"timestamp": "2026-01-01T00:00:01Z", "called_at": 1767225600.0, "issued_at": 1767225599.0}
LINES = [
    {**CONTEXT, **WORKERS[name in {"offer.admitted", "lease.ended"}], "remote_engine_id": "prefill-0", "event": name}
    | msgspec.to_builtins(event_fields(EVENTS[name]))
    for name in KINDS
] + [
    {**CONTEXT, "event": "request.answered", "request_id": "request-1", "prefill_s": 0.5, "elapsed_s": 2.0},
    {**CONTEXT, **WORKERS[0], "event": "token.first", "request_id": "request-1"},
    {
        **CONTEXT,
        "event": "request.failed",
        "request_id": "request-2",
        "client": "127.0.0.1:5000",
        "status": 200,
        "prefill_server": "http://127.0.0.1:8100",
        "decode_server": "http://127.0.0.1:8200",
        "failed_attempts": [{"role": "prefill", "server": "http://127.0.0.1:8101", "error": "HTTP 500"}],
        "phase": "answer",
        "sent_bytes": 1200,
        "prefill_s": 0.5,
        "first_bytes_s": 0.75,
        "elapsed_s": 2.0,
        "code": "stream_broken",
        "detail": "ClientPayloadError()",
        "remedy": "Read the log of the named decode server.",
    },
]
NUMBERS = st.sampled_from([0, -1, 1, 0.5, -0.5, 1e9, -1e9, 2**53 - 1, 2**20, 2**63, 1e11, 1e300])
VALUES = NUMBERS | st.sampled_from(["", "request-1", "\x1b[2J", "</script>", "cmpl-" * 200, None, True, [], {}, [[]]])


def numbers_in(value, path=()):
    """Return the path to each value in a record, those in its lists as well."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from numbers_in(child, (*path, key))


PATHS = [(number, *path) for number, line in enumerate(LINES) for path in numbers_in(line) if path != ("event",)]


def replaced(lines, path, value):
    """Return the lines with another value at a path; as they are if an earlier change took the path away."""
    lines = copy.deepcopy(lines)
    inner = lines
    with contextlib.suppress(LookupError, TypeError):
        for key in path[:-1]:
            inner = inner[key]
        if not isinstance(inner, list) or path[-1] < len(inner):
            inner[path[-1]] = value
    return lines


def shown(folder, lines):
    """Return the trace of some records, after everything was made of it that the command makes."""
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = read_trace([path])
    text = [*list_lines(trace), *(line for request in trace.requests for line in waterfall_lines(request))]
    assert all(line.isprintable() for line in text)
    assert export.page(trace).count("<") == export.page(Trace([], [], Reading())).count("<")
    json.loads(export.perfetto(trace))
    return trace


def check(trace):
    for request in trace.requests:
        numbers = [number for phase in request.phases for number in (phase.start_s, phase.seconds)]
        assert all(math.isfinite(number) for number in numbers)
        assert all(phase.seconds >= 0.0 for phase in request.phases)
        assert request.total_s == pytest.approx(sum(phase.seconds for phase in request.phases), rel=0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


def test_untouched_records_are_one_request(folder):
    trace = shown(folder, LINES)
    check(trace)
    assert {request.request_id: request.outcome for request in trace.requests} == {
        "request-1": "completed",
        "request-2": "failed",
    }
    assert trace.reading.broken == 0


def test_a_failed_answer_says_when_how_far_and_why(folder):
    request = next(each for each in shown(folder, LINES).requests if each.request_id == "request-2")
    assert request.title == (
        "failed 2000 ms after the request and 1.2 kB of the answer, stream_broken in answer: 500 prefill, "
        "250 decode step, 1250 answer. Read the log of the named decode server."
    )


@settings(max_examples=400)
@given(st.lists(st.tuples(st.sampled_from(PATHS), VALUES), min_size=1, max_size=4))
def test_changed_records_are_shown_or_skipped(folder, changes):
    lines = LINES
    for path, value in changes:
        lines = replaced(lines, path, value)
    trace = shown(folder, lines)
    assert trace.reading.lines == len(LINES)
    check(trace)


def test_the_page_can_count_the_blocks_of_every_run(folder):
    """It adds one until it has passed the last block: above 2**53 a browser never does."""
    [traced] = [number for number, line in enumerate(LINES) if line.get("groups")]
    for most, broken in ((1 << 52, 0), ((1 << 52) + 1, 1), ((1 << 53) - 1, 1)):
        lines = replaced(LINES, (traced, "groups", 0, "pairs"), [[most, most, most]])
        assert shown(folder, lines).reading.broken == broken
        last = float(most) + float(most) - 1
        assert broken or last + 1 > last


@given(st.lists(st.integers(0, len(LINES) - 1), max_size=12))
def test_records_may_lack_and_come_in_any_order(folder, order):
    check(shown(folder, [LINES[number] for number in order]))


@given(st.binary(max_size=400))
def test_any_bytes_are_a_log(folder, content):
    path = folder / "any.jsonl"
    path.write_bytes(content)
    assert read_trace([path]).requests == []
