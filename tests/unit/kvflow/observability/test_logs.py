"""One record per event, named after it, at its level; a transfer's record answers where the time went."""

import json
import logging
import typing

import pytest

from kvflow.cache.leases import LeaseEnded
from kvflow.observability import events as shell
from kvflow.observability.logs import LEVELS, EventLog, configure_logging, event_fields, event_name
from kvflow.transfer.events import TransferEvent

from .examples import EVENTS, PEER

IDENTITY = {"engine_id": "decode-0", "rank": 0, "incarnation": "f" * 32}
CONTEXT = {
    "remote_engine_id": "prefill-0",
    "remote_endpoint": "tcp://127.0.0.1:5000",
    "num_remote_blocks": 4,
    "num_local_blocks": 3,
}
DEBUG, INFO, WARNING = "debug", "info", "warning"


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.DEBUG, "kvflow")
    return EventLog(**IDENTITY)


@pytest.fixture
def loggers():
    """Put the two loggers back as they were."""
    names = ("kvflow", "handshake")
    before = {name: (list(logging.getLogger(name).handlers), logging.getLogger(name).level) for name in names}
    yield
    for name, (handlers, level) in before.items():
        logger = logging.getLogger(name)
        for handler in set(logger.handlers) - set(handlers):
            handler.close()
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = True


def test_every_event_has_a_level_and_an_example():
    known = {*typing.get_args(shell.ShellEvent), *typing.get_args(TransferEvent), LeaseEnded}
    assert LEVELS.keys() == known == {type(event) for event in EVENTS.values()}


@pytest.mark.parametrize("name", EVENTS)
def test_names_follow_from_the_types(name):
    assert event_name(type(EVENTS[name])) == name


@pytest.mark.parametrize("name", EVENTS)
def test_every_event_is_one_record_with_identity_and_context(name, log, caplog):
    """No field of any event collides with the identity or the context: that would be a TypeError here."""
    log(EVENTS[name], **CONTEXT)
    (record,) = caplog.records
    assert record.name == "kvflow"
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
        (shell.PeerDropped(PEER, "peer_lost", ""), WARNING),
        (shell.PeerDropped(PEER, "closing", ""), DEBUG),
    ],
)
def test_levels_that_depend_on_what_happened(event, level, log, caplog):
    log(event)
    assert caplog.records[0].msg["level"] == level


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


def test_the_record_of_a_failure_says_what_to_do_about_it(log, caplog):
    log(EVENTS["transfer.failed"])
    answer = caplog.records[0].msg
    assert (answer["code"], answer["phase"], answer["peer"], answer["quarantined"]) == ("peer_lost", "wire", PEER, True)
    assert answer["remedy"] == "Look whether it runs."


def test_the_record_of_a_failure_says_how_far_it_had_come(log, caplog):
    log(EVENTS["transfer.failed"])
    answer = caplog.records[0].msg
    assert (answer["nbytes"], answer["nbytes_wanted"], answer["transport"]) == (1024, 4096, "cma")
    phases = {key: value for key, value in answer.items() if key.endswith("_s") and key != "lease_ended_s"}
    assert phases == {
        "ticket_age_s": 1.5,
        "handshake_s": 0.25,
        "queue_s": 0.001,
        "wire_s": 0.03,
        "total_s": 0.333333333,
    }
    assert "timings_s" not in answer


def test_what_the_level_drops_is_not_even_made(log, caplog):
    caplog.set_level(logging.WARNING, "kvflow")
    log(EVENTS["transfer.completed"])
    log(EVENTS["transfer.failed"])
    assert [record.msg["event"] for record in caplog.records] == ["transfer.failed"]


def test_programs_get_json_lines(tmp_path, loggers):
    path = tmp_path / "kvflow.jsonl"
    configure_logging(path)
    log = EventLog(**IDENTITY)
    for event in EVENTS.values():
        log(event)
    logging.getLogger("kvflow").warning("plain words")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    names = [line["event"] for line in lines]
    assert names[-1] == "plain words"
    assert {"transfer.completed", "worker.opened", "transfer.failed"} <= set(names)
    assert "transfer.started" not in names
    completed = lines[names.index("transfer.completed")]
    assert (completed["level"], completed["engine_id"], completed["total_s"]) == ("info", "decode-0", 0.333333333)
    assert "timestamp" in completed


def test_records_of_a_program_go_nowhere_else(tmp_path, loggers, caplog):
    configure_logging(tmp_path / "kvflow.jsonl", level=logging.DEBUG)
    EventLog(**IDENTITY)(EVENTS["transfer.started"])
    assert caplog.records == []
    assert "transfer.started" in (tmp_path / "kvflow.jsonl").read_text()
