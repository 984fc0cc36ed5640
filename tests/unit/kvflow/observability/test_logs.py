"""One record per event, named after it, at its level; a transfer's record answers where the time went."""

import io
import json
import logging
import re
import subprocess
import sys
import typing
import weakref

import msgspec
import pytest
import structlog

from kvflow.events import (
    Event,
    LeaseEnded,
    OnlyEvents,
    PeerDropped,
    PullFailed,
    TransferCompleted,
    TransferStarted,
    TransferTraced,
)
from kvflow.observability.logs import (
    LEVELS,
    REPEATS_MAX,
    EventLog,
    Repeats,
    Reporter,
    configure_logging,
    event_fields,
)

from .examples import EVENTS, PEER

IDENTITY = {"engine_id": "decode-0", "rank": 0, "incarnation": "f" * 32}
CONTEXT = {
    "remote_endpoint": "tcp://127.0.0.1:5000",
    "num_remote_blocks": 4,
    "num_local_blocks": 3,
}
DEBUG, INFO, WARNING = "debug", "info", "warning"


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.DEBUG, "kvflow")
    return EventLog(**IDENTITY)


def test_every_event_has_a_level_and_an_example():
    known = set(typing.get_args(Event))
    assert LEVELS.keys() == known == {type(event) for event in EVENTS.values()}


@pytest.mark.parametrize("name", EVENTS)
def test_every_event_is_one_record_with_identity_and_context(name, log, caplog):
    log(EVENTS[name], **CONTEXT)
    (record,) = caplog.records
    parts = (IDENTITY, CONTEXT, event_fields(EVENTS[name]), {"event", "level", "timestamp"})
    assert len(record.msg) == sum(map(len, parts)), "a field collides with another one"
    assert record.name == f"kvflow.{name.partition('.')[0]}"
    assert record.levelno == LEVELS[type(EVENTS[name])]
    assert record.msg["event"] == name
    assert record.msg.items() >= (IDENTITY | CONTEXT | event_fields(EVENTS[name])).items()
    json.dumps({key: value for key, value in record.msg.items() if not key.startswith("_")})


@pytest.mark.parametrize(
    ("event", "level"),
    [
        (LeaseEnded("r", "released", 1.0), INFO),
        (LeaseEnded("r", "revoked", 1.0), INFO),
        (LeaseEnded("r", "expired", 1.0), WARNING),
        (PeerDropped(PEER, "peer_lost", ""), WARNING),
        (msgspec.structs.replace(EVENTS["peer.connected"], passed_over="nixl: no RDMA device"), INFO),
        (msgspec.structs.replace(EVENTS["peer.connected"], remedy="Check that both have RDMA devices."), WARNING),
        (msgspec.structs.replace(EVENTS["transfer.failed"], code="transfer_cancelled"), INFO),
        (PeerDropped(PEER, "closing", ""), DEBUG),
    ],
)
def test_levels_that_depend_on_what_happened(event, level, log, caplog):
    log(event)
    assert caplog.records[0].msg["level"] == level


def test_failures_that_are_remembered_are_bounded():
    repeats = Repeats(lambda: 0.0)
    for number in range(3 * REPEATS_MAX):
        assert repeats.level_of("peer_lost", str(number)) == (logging.WARNING, {})
    assert repeats.level_of("peer_lost", str(3 * REPEATS_MAX - 1)) == (logging.INFO, {})
    assert len(repeats._told) == REPEATS_MAX


def test_the_record_of_a_transfer_answers_where_the_time_went(log, caplog):
    log(EVENTS["transfer.completed"])
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    answer = record.msg
    assert (answer["nbytes"], answer["descriptors"], answer["reads"], answer["transport"]) == (4096, 3, 2, "cma")
    phases = {key: value for key, value in answer.items() if key.endswith("_s")}
    assert phases == {
        "handshake_s": 0.5,
        "bind_s": 0.0001,
        "queue_s": 0.001,
        "post_s": 0.02,
        "wire_s": 0.03,
        "scatter_s": 0.004,
        "fence_s": 0.000005,
        "total_s": 0.333333333,
    }
    assert not {"report", "timings_s"} & answer.keys()


def test_what_the_level_drops_is_not_even_made(log, caplog):
    caplog.set_level(logging.WARNING, "kvflow")
    log(EVENTS["transfer.completed"])
    log(EVENTS["transfer.failed"])
    assert [record.msg["event"] for record in caplog.records] == ["transfer.failed"]


def test_programs_get_json_lines(tmp_path):
    path = tmp_path / "kvflow.jsonl"
    configure_logging(path)
    log = EventLog(**IDENTITY)
    for event in EVENTS.values():
        log(event)
    logging.getLogger("kvflow.reads").warning("registered %d MiB", 4)
    *lines, plain = [json.loads(line) for line in path.read_text().splitlines()]
    assert (plain["event"], plain["level"]) == ("registered 4 MiB", "warning")
    assert sorted(plain) == ["event", "level", "timestamp"]
    names = [line["event"] for line in lines]
    assert {"transfer.completed", "worker.opened", "transfer.failed"} <= set(names)
    assert "transfer.started" not in names
    completed = lines[names.index("transfer.completed")]
    assert (completed["level"], completed["engine_id"], completed["total_s"]) == ("info", "decode-0", 0.333333333)
    assert "timestamp" in completed


def test_a_handler_whose_stream_is_closed_is_replaced(tmp_path):
    stream = io.StringIO()
    logging.getLogger("kvflow").handlers[:] = [logging.StreamHandler(stream)]
    stream.close()
    path = tmp_path / "kvflow.jsonl"
    configure_logging(path)
    logging.getLogger("kvflow").warning("plain words")
    assert "plain words" in path.read_text()


def test_records_of_one_moment_are_one_write(tmp_path, monkeypatch):
    configure_logging(tmp_path / "kvflow.jsonl")
    (handler,) = logging.getLogger("kvflow").handlers
    written, heard = [], []
    monkeypatch.setattr(handler, "_write", written.append)
    report = Reporter(EventLog(**IDENTITY), [heard.append])
    events = [EVENTS[name] for name in ("transfer.completed", "transfer.started", "transfer.failed")]
    report.take_all([(event, CONTEXT) for event in events])
    (lines,) = written
    assert [json.loads(line)["event"] for line in lines.splitlines()] == ["transfer.completed", "transfer.failed"]
    assert heard == events


def test_records_of_a_program_go_nowhere_else(tmp_path, caplog):
    configure_logging(tmp_path / "kvflow.jsonl", level=logging.DEBUG)
    EventLog(**IDENTITY)(EVENTS["transfer.started"])
    assert caplog.records == []
    assert "transfer.started" in (tmp_path / "kvflow.jsonl").read_text()


ORDER = [
    *("engine_id", "rank", "incarnation", "remote_endpoint", "num_remote_blocks", "num_local_blocks"),
    *("pull_id", "request_id", "local_request_id", "remote_engine_id", "nbytes", "descriptors", "reads", "read_bytes"),
    *("merged", "early", "early_bytes", "transport", "plane", "handshake_s", "bind_s", "queue_s", "post_s", "wire_s"),
    *("scatter_s", "fence_s", "total_s", "event", "level", "timestamp"),
]


@pytest.mark.parametrize("filtered", [False, True])
def test_fields_have_one_order_however_they_are_written(tmp_path, filtered):
    path = tmp_path / "kvflow.jsonl"
    configure_logging(path)
    if filtered:  # then the record goes the long way, through logging
        logging.getLogger("kvflow").handlers[0].addFilter(lambda _record: True)
    EventLog(**IDENTITY)(EVENTS["transfer.completed"], **CONTEXT)
    (line,) = path.read_text().splitlines()
    assert list(json.loads(line)) == ORDER
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", json.loads(line)["timestamp"])


def test_formatters_of_structlog_get_the_fields(log, caplog):
    log(EVENTS["transfer.completed"], **CONTEXT)
    formatter = structlog.stdlib.ProcessorFormatter(
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, structlog.processors.JSONRenderer()]
    )
    assert list(json.loads(formatter.format(caplog.records[0]))) == ORDER


def test_names_that_are_no_unicode_are_written_all_the_same(tmp_path):
    path = tmp_path / "kvflow.jsonl"
    configure_logging(path)
    EventLog(**IDENTITY)(LeaseEnded("\ud800", "released", 1.0))
    EventLog(**IDENTITY)(LeaseEnded("Grüße\n", "released", 1.0))
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["request_id"] for line in lines] == ["\ud800", "Grüße\n"]


def unconfigured(*words):
    """Return what a program prints that configures no logging, or calls ``logging.basicConfig``."""
    code = (
        "import logging, sys\n"
        "from kvflow.observability.logs import EventLog\n"
        "from tests.unit.kvflow.observability.examples import EVENTS\n"
        f"{chr(10).join(words)}\n"
        f"log = EventLog(**{IDENTITY!r})\n"
        "for event in EVENTS.values(): log(event)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_without_any_configuration_only_warnings_are_printed_as_lines():
    lines = unconfigured()
    warnings = {name for name, event in EVENTS.items() if LEVELS[type(event)] >= logging.WARNING}
    assert {line.split()[1] for line in lines} == warnings
    assert all(re.fullmatch(r"kvflow\.[a-z]+: [a-z.]+( \w+=([^\s\"]+|\"[^\"]*\"))+", line) for line in lines)
    assert all(line.endswith(" engine_id=decode-0 rank=0") for line in lines)
    assert all(re.search(r' remedy=([^\s"]+|"[^"]+") ', line) for line in lines)


def test_a_program_that_asks_for_more_gets_lines_too():
    lines = unconfigured("logging.basicConfig(level=logging.INFO)")
    completed = [line for line in lines if "transfer.completed" in line]
    assert completed
    assert all(line.startswith("INFO:kvflow.transfer:transfer.completed request_id=") for line in completed)
    assert all(line.endswith(" engine_id=decode-0 rank=0") for line in completed)
    assert not any("{" in line for line in lines)


def test_what_a_peer_says_stays_within_its_line(log, caplog):
    log(PeerDropped("a b", "peer_lost", 'x"\nkvflow is fine\u2028'))
    line = str(caplog.records[0].msg)
    assert 'peer="a b"' in line
    assert 'detail="x\\"\\nkvflow is fine\\u2028"' in line
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize(("level", "wanted"), [(logging.INFO, True), (logging.WARNING, False)])
def test_an_event_is_wanted_only_if_its_level_is(caplog, level, wanted):
    caplog.set_level(level, "kvflow")
    report = Reporter(EventLog(**IDENTITY), [])
    assert report.wants(TransferCompleted) is wanted
    assert not report.wants(TransferStarted)
    assert report.wants(PullFailed)
    assert report.wants(LeaseEnded) is wanted


def test_an_event_is_wanted_by_hooks_of_its_kind(caplog):
    caplog.set_level(logging.WARNING, "kvflow")
    heard = []
    report = Reporter(EventLog(**IDENTITY), [OnlyEvents(TransferCompleted, heard.append)])
    assert report.wants(TransferCompleted)
    assert not report.wants(TransferStarted)
    for event in EVENTS.values():
        report(event)
    assert {type(event) for event in heard} == {TransferCompleted}
    everything = Reporter(EventLog(**IDENTITY), [heard.append])
    assert {kind for kind in LEVELS if not everything.wants(kind)} == {TransferTraced}
    assert Reporter(EventLog(**IDENTITY), [OnlyEvents(TransferTraced, heard.append)]).wants(TransferTraced)


def test_a_hook_that_fails_stops_no_other(log, caplog):
    def fail(_event):
        raise ZeroDivisionError

    heard = []
    report = Reporter(log, [fail, heard.append])
    report(EVENTS["transfer.completed"])
    assert heard == [EVENTS["transfer.completed"]]
    assert caplog.records[-1].getMessage() == "a hook failed"


def test_a_line_starts_with_the_request_what_failed_and_the_remedy(log, caplog):
    log(EVENTS["transfer.failed"], **CONTEXT)
    line = str(caplog.records[0].msg)
    assert line.startswith(
        "transfer.failed request_id=request-1 local_request_id=cmpl-1 code=peer_lost phase=wire peer="
    )
    assert ' detail=gone remedy="Look whether it runs." remote_endpoint=' in line
    assert line.endswith(" engine_id=decode-0 rank=0")


@pytest.mark.parametrize("silenced", ["kvflow.transfer", "kvflow"])
def test_one_kind_of_events_can_be_silenced(tmp_path, silenced):
    configure_logging(tmp_path / "kvflow.jsonl")
    before = logging.getLogger(silenced).level
    logging.getLogger(silenced).setLevel(logging.CRITICAL)
    try:
        log = EventLog(**IDENTITY)
        log.write_all([(EVENTS["transfer.failed"], {}), (EVENTS["peer.dropped"], {})])
    finally:
        logging.getLogger(silenced).setLevel(before)
    lines = (tmp_path / "kvflow.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == (["peer.dropped"] if silenced != "kvflow" else [])


def test_a_handler_of_one_kind_of_events_gets_them(tmp_path):
    configure_logging(tmp_path / "all.jsonl")
    handler, heard = logging.Handler(), []
    handler.emit = heard.append
    logging.getLogger("kvflow.transfer").addHandler(handler)
    try:
        EventLog(**IDENTITY)(EVENTS["transfer.failed"])
    finally:
        logging.getLogger("kvflow.transfer").removeHandler(handler)
    assert [record.msg["event"] for record in heard] == ["transfer.failed"]
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) == 1


def test_a_log_goes_on_after_another_library_has_closed_every_handler(tmp_path):
    """``logging.config.dictConfig`` does so, and NIXL's package calls it when it is imported."""
    path = tmp_path / "kvflow.jsonl"
    configure_logging(path)
    logging.shutdown([weakref.ref(handler) for handler in logging.getLogger("kvflow").handlers])
    EventLog(**IDENTITY)(EVENTS["worker.opened"])
    logging.getLogger("kvflow").warning("words")
    assert len(path.read_text().splitlines()) == 2
