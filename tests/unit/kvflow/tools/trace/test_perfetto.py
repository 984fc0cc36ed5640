"""Traces for Perfetto: what its importer needs of spans and arrows."""

import json

import pytest

from kvflow.tools.trace import export
from kvflow.tools.trace.joining import read_trace
from tests.unit.kvflow.worker.pulling import opened


@pytest.fixture
async def events(log):
    async with opened(ranks=2, inline_s_max=0.0) as world:
        for number in range(3):
            await world.pull(world.ticket(f"r{number}"))
    return json.loads(export.perfetto(read_trace([log])))["traceEvents"]


async def test_spans_of_one_lane_nest(events):
    lanes = {}
    for event in events:
        if event["ph"] == "X":
            start, nanoseconds = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
            lanes.setdefault((event["pid"], event["tid"]), []).append((start, start + nanoseconds))
    for spans in lanes.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        enclosing = []
        for start, end in spans:
            while enclosing and enclosing[-1] <= start:
                enclosing.pop()
            assert not enclosing or end <= enclosing[-1]
            enclosing.append(end)


def test_a_span_that_rounding_makes_overlap_is_cut():
    tracks = export._Tracks(0.0)
    spans = [(0.0, 1e-5), (0.0, 4e-6), (3.999e-6, 3e-6), (6.999e-6, 3.003e-6), (1.1e-5, 1e-6)]
    for number, (at, seconds) in enumerate(spans):
        tracks._span((1, 1), str(number), at, seconds, {})
    found = [(round(event["ts"] * 1e3), round(event["dur"] * 1e3)) for event in tracks.events]
    assert found == [(0, 10_000), (0, 4_000), (4_000, 2_999), (6_999, 3_001), (11_000, 1_000)]


async def test_an_arrow_goes_from_each_lease_to_the_pull(events):
    processes = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) == 3 * 2
    assert all(type(name) is int for name in starts), "Perfetto drops arrows with other ids"
    assert starts.keys() == ends.keys()
    for name, start in starts.items():
        assert processes[start["pid"]].startswith("prefill prefill-0/")
        assert processes[ends[name]["pid"]].startswith("decode decode-0/")
        assert start["ts"] <= ends[name]["ts"]


async def test_each_read_is_a_span_with_its_bytes(events):
    reads = [event for event in events if event["ph"] == "X" and event["name"].startswith("group ")]
    pulls = [event for event in events if event["ph"] == "X" and event["name"] == "pull"]
    assert sum(read["args"]["nbytes"] for read in reads) == sum(pull["args"]["nbytes"] for pull in pulls) > 0
