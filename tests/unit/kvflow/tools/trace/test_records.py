"""Files from outside: a line that is no record is skipped and counted."""

import json

import msgspec
import pytest

from kvflow.observability.logs import event_fields
from kvflow.tools.trace import records
from kvflow.tools.trace.joining import read_trace
from tests.unit.kvflow.observability.examples import EVENTS

STAMP = {"timestamp": "2026-01-01T00:00:00Z"}


def line(event="transfer.completed", **fields):
    known = STAMP | msgspec.to_builtins(event_fields(EVENTS[event])) if event in EVENTS else STAMP
    return json.dumps(known | {"event": event, "request_id": "r", "engine_id": "d", "total_s": 1.0} | fields) + "\n"


(GROUP,) = msgspec.to_builtins(event_fields(EVENTS["transfer.traced"]))["groups"]

BROKEN = {
    "no JSON": "transfer.completed\n",
    "half a line": line()[:40] + "\n",
    "a list": "[1]\n",
    "a name that is no text": line(request_id=7),
    "a name that is too long": line(request_id="x" * 2000),
    "a negative size": line(nbytes=-1),
    "a size that is too large": line(nbytes=2**60),
    "a field less": line().replace("nbytes", "bytes"),
    "a remedy that is too long": line("transfer.failed", remedy="x" * 20_000),
    "a time that is no number": line(wire_s="1"),
    "a time without an end": line().replace('"total_s": 1.0', '"total_s": 1e999'),
    "no time": line().replace("timestamp", "time"),
    "bytes that are no text": line().encode().replace(b'"r"', b'"\xff"'),
    "half of a surrogate pair": line().replace('"r"', '"\\ud800"'),
    "a nest of lists": '{"event": "transfer.completed", "x": ' + "[" * 100_000 + "\n",
    "too many chunks": line("transfer.traced", chunks=[[0, 0, 0, 0, 0]] * 5000),
    "too many runs": line("transfer.traced", groups=[GROUP | {"pairs": [[0, 0, 1]] * 5000}]),
    "units of no block": line("transfer.traced", groups=[GROUP | {"target_units": 0}]),
    "a group of no number": line("transfer.traced", groups=[GROUP | {"source_group": 1 << 21}]),
    "a name of a peer that is too long": line("transfer.traced", peers=["x" * 2000]),
    "a status of no answer": line("request.answered", status=1000),
    "an attempt that is no object": line("request.failed", failed_attempts=["gone"]),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_line_is_counted_and_its_neighbors_are_read(tmp_path, broken):
    path = tmp_path / "log.jsonl"
    as_bytes = broken if isinstance(broken, bytes) else broken.encode()
    path.write_bytes(line(request_id="before").encode() + as_bytes + b"\n \n" + line(request_id="after").encode())
    trace = read_trace([path])
    assert [request.request_id for request in trace.requests] == ["before", "after"]
    assert trace.reading.broken == 1


def test_a_line_without_an_end_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "LINE_BYTES_MAX", 1000)
    path = tmp_path / "log.jsonl"
    path.write_text(line(request_id="before") + "x" * 5000 + "\n" + line(request_id="after") + "y" * 5000)
    trace = read_trace([path])
    assert [request.request_id for request in trace.requests] == ["before", "after"]
    assert (trace.reading.broken, trace.reading.lines) == (2, 4)


def test_records_are_counted_above_their_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RECORDS_MAX", 2)
    path = tmp_path / "log.jsonl"
    path.write_text("".join(line(request_id=f"r{number}") for number in range(5)))
    trace = read_trace([path])
    assert (len(trace.requests), trace.reading.skipped) == (2, 3)


def test_records_of_other_programs_are_ignored(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(line("scenario.completed") + line("request.answered", kind="Prefill") + '{"level": "info"}\n')
    trace = read_trace([path])
    assert (trace.requests, trace.reading.broken) == ([], 0)


@pytest.mark.parametrize("name", sorted(set(records.KINDS) & set(EVENTS)))
def test_an_event_is_read_as_it_was_logged(tmp_path, name):
    path = tmp_path / "log.jsonl"
    times = {"timestamp": "2026-01-01T00:00:00Z", "called_at": 2.0, "issued_at": 1.0}
    fields = {"event": name, "engine_id": "d", "rank": 3, "incarnation": "i"} | event_fields(EVENTS[name])
    path.write_bytes(msgspec.json.encode(times | fields))
    (logged,), reading = records.read_files([path])
    assert type(logged.event) is type(EVENTS[name])
    assert event_fields(logged.event) == event_fields(EVENTS[name])
    assert (logged.worker, logged.called_at, logged.issued_at, reading.broken) == ("d/3/i", 2.0, 1.0, 0)
