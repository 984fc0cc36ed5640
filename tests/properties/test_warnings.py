"""Records say when something was, and of one failure that goes on a warning says now and then how often it came."""

import fcntl
import json
import logging
import os
import select
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.errors import PeerLost, StaleLease
from kvflow.events import BreakerOpened, ConsumerRejected, PeerDropped
from kvflow.integrations.vllm import logs as vllm_logs
from kvflow.observability import logs
from kvflow.observability.logs import REPEATS_S, EventLog, Repeats

from .caches import thorough

PAUSES_S = (0.0, 1.0, REPEATS_S / 2, REPEATS_S)
MOST = 3  # failures that are remembered
steps = st.lists(st.tuples(st.sampled_from(PAUSES_S), st.integers(0, 4)), min_size=5, max_size=40)


class Model:
    """When each failure was last told as a warning, and how often it has come since; the latest last."""

    def __init__(self):
        self.now, self.known = 100.0, {}

    def level_of(self, failure):
        told_at, count = self.known.pop(failure, (-1e9, 0))
        again = self.now - told_at < REPEATS_S
        self.known[failure] = (told_at, count + 1) if again else (self.now, 0)
        while len(self.known) > MOST:
            del self.known[next(iter(self.known))]
        return (logging.INFO, {}) if again else (logging.WARNING, {"repeats": count} if count else {})


@thorough
@given(steps)
def test_a_failure_is_told_once_in_a_while_and_few_are_remembered(steps):
    model = Model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "REPEATS_MAX", MOST)
        real = Repeats(lambda: model.now)
        for pause_s, which in steps:
            model.now += pause_s
            assert real.level_of("failure", which) == model.level_of(("failure", which))


@thorough
@given(st.integers(0, 4 * 10**9), st.integers(0, 10**6 - 1))
def test_a_record_has_the_time_to_the_microsecond(second, microseconds):
    """Any program can read it, and records are in order as texts are."""
    times = [second + microseconds / 1e6, second + 1.0]
    texts = [logs.timestamp_of(each) for each in times]
    assert [datetime.fromisoformat(each).timestamp() for each in texts] == pytest.approx(times, abs=2e-6)
    assert texts == sorted(texts)


class Kept(logging.Handler):
    """Keeps what a logger is given."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


def told_by(logger, call, patch):
    """Return the records that a call has a logger write."""
    kept = Kept()
    patch.setattr(logger, "handlers", [kept])
    patch.setattr(logger, "propagate", False)
    patch.setattr(logger, "level", logging.DEBUG)
    call()
    return kept.records


EVENTS = (
    PeerDropped("a", PeerLost.code, "it has gone"),
    PeerDropped("b", PeerLost.code, "it has gone"),
    PeerDropped("a", StaleLease.code, "it has gone"),
    BreakerOpened("tcp://a:1", 3, 1.0),
    ConsumerRejected("a", PeerLost.code, "it has gone"),
)
ERRORS = (
    PeerLost("gone", peer="a"),
    PeerLost("gone", peer="b"),
    StaleLease("gone", peer="a"),
    ValueError(),
    KeyError(),
)


@thorough
@given(steps)
def test_failures_of_other_peers_and_of_other_kinds_are_told_beside(steps):
    """Both where a worker writes its events, and where vLLM's connector warns of requests."""
    model, told, warned = Model(), [], []
    with pytest.MonkeyPatch.context() as patch:
        log = EventLog()
        for owner, name in ((log, "_repeats"), (vllm_logs, "_repeats")):
            patch.setattr(owner, name, Repeats(lambda: model.now))
        patch.setattr(logs, "REPEATS_MAX", MOST)

        def call():
            for pause_s, which in steps:
                model.now += pause_s
                log(EVENTS[which])

        def warn():
            for pause_s, which in steps:
                model.now += pause_s
                vllm_logs.warn("request %s has failed", "r", error=ERRORS[which])

        for logger, work, found in ((logging.getLogger("kvflow"), call, told), (vllm_logs.logger, warn, warned)):
            found.extend(told_by(logger, work, patch))
    for records in (told, warned):
        model = Model()
        for (pause_s, which), record in zip(steps, records, strict=True):
            model.now += pause_s
            level, repeats = model.level_of(which)
            assert record.levelno == level
            assert records is warned or (" remedy=" in str(record.msg)) == (level == logging.WARNING)
            if records is told:
                assert record.msg.get("repeats", 0) == repeats.get("repeats", 0)
            else:
                assert ("more like this" in record.getMessage()) == bool(repeats)


@thorough
@given(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=4, unique=True), st.booleans(), st.booleans())
def test_a_file_takes_no_record_from_the_handlers_of_the_application(events, passes_on, has_another):
    """Events are written to kvflow's own file directly only if nobody else is to have them."""
    top, root, other = logging.getLogger("kvflow"), Kept(), Kept()
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        file = logs.JsonFile(Path(folder, "records"))
        file.setFormatter(logging.Formatter())
        patch.setattr(top, "handlers", [file, other] if has_another else [file])
        patch.setattr(top, "propagate", passes_on)
        patch.setattr(logging.getLogger(), "handlers", [root])
        log = EventLog()
        for event in events:
            log(event)
        file.close()
        lines = Path(folder, "records").read_text().splitlines()
    assert len(lines) == len(events)
    assert len(root.records) == len(events) * passes_on
    assert len(other.records) == len(events) * has_another


def read_all(descriptor):
    found = b""
    with suppress(BlockingIOError):
        while more := os.read(descriptor, 1 << 16):
            found += more
    return found


@thorough
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.lists(st.sampled_from((1, 300, 1500, 3900)), max_size=4), st.booleans()),
        max_size=12,
    )
)
def test_lines_of_two_writers_of_a_pipe_come_whole_or_are_counted(batches):
    """However slowly somebody reads it: no line is within another, and how many are lost is told."""
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder, ExitStack() as stack:
        patch.setattr(logs, "UNWRITTEN_BYTES_MAX", 2000)
        path = Path(folder, "pipe")
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        stack.callback(os.close, reader)
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, select.PIPE_BUF)
        files, text, told = [logs.JsonFile(path), logs.JsonFile(path)], b"", [0, 0]
        for number, file in enumerate(files):
            file.setFormatter(logging.Formatter(f'{{"writer": {number}, "text": "%(message)s"}}'))
        last = [(which, [1], True) for _ in range(3) for which in (0, 1)]
        for which, sizes, is_read in [*batches, *last]:
            text += read_all(reader) if is_read else b""
            files[which].flush()
            files[which].write_events([{"writer": which, "event": "x" * size} for size in sizes])
            told[which] += len(sizes)
        for _ in range(20):
            text += read_all(reader)
            for file in files:
                file.flush()
        lines = [json.loads(line) for line in text.splitlines()]
        for number, file in enumerate(files):
            mine = [line for line in lines if line["writer"] == number]
            lost = sum(int(line["text"].split()[0]) for line in mine if "text" in line)
            assert sum("event" in line for line in mine) + lost == told[number]
            file.close()
