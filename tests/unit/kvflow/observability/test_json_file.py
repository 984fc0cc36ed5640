"""A file of JSON lines keeps records and writes them together; it never waits, and counts what it loses."""

import json
import logging
import os
import threading
from pathlib import Path

import pytest

from kvflow.observability import logs
from kvflow.observability.logs import KEPT_MAX, EventLog, configure_logging

from .examples import EVENTS

PATIENCE_S = 30.0


@pytest.fixture
def kvflow_logger():
    """The logger of kvflow."""
    return logging.getLogger("kvflow")


@pytest.fixture
def path(tmp_path, kvflow_logger):
    configure_logging(tmp_path / "log.jsonl")
    return tmp_path / "log.jsonl"


@pytest.fixture
def file(path, kvflow_logger):
    return kvflow_logger.handlers[0]


def build(number):
    return {"event": number}


def told(path):
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (lambda: EventLog()(EVENTS["transfer.failed"]), "transfer.failed"),
        (lambda: logging.getLogger("kvflow.reads").warning("words"), "words"),
    ],
    ids=["event", "words"],
)
def test_what_is_kept_comes_before_any_other_record(path, file, other, name):
    for number in range(3):
        file.keep(build, number)
    assert told(path) == []
    other()
    file.keep(build, 3)
    file.flush()
    file.flush()
    assert told(path) == [0, 1, 2, name, 3]


@pytest.mark.parametrize("end", ["close", "shutdown", "configure"])
def test_what_is_kept_is_written_at_the_end(path, file, tmp_path, end):
    file.keep(build, "kept")
    if end == "close":
        file.close()
    elif end == "shutdown":
        logging.shutdown([lambda: file])
    else:
        configure_logging(tmp_path / "another.jsonl")
        file._file.close()
    assert told(path) == ["kept"]


def test_as_many_as_may_be_kept_are_one_write(path, file, monkeypatch):
    written, write = [], file._write
    monkeypatch.setattr(file, "_write", lambda lines: (written.append(lines), write(lines)))
    for number in range(KEPT_MAX):
        assert told(path) == []
        file.keep(build, number)
    assert told(path) == list(range(KEPT_MAX))
    assert len(written) == 1


def test_threads_lose_no_record_and_write_none_twice(path, file):
    def work(first):
        for number in range(first, first + 1000):
            file.keep(build, number)
            if number % 50 == 0:
                logging.getLogger("kvflow").warning("words")

    threads = [threading.Thread(target=work, args=(first,)) for first in range(0, 4000, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    file.flush()
    found = [name for name in told(path) if name != "words"]
    assert sorted(found) == list(range(4000))
    assert [name for name in found if name < 1000] == list(range(1000))


def test_a_forked_child_writes_nothing_that_its_parent_keeps(path, file):
    file.keep(build, "parent")
    child = os.fork()
    if child == 0:
        file.flush()
        file.keep(build, "child")
        logging.shutdown()
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert told(path) == ["child"]
    file.flush()
    assert told(path) == ["child", "parent"]


def test_records_that_no_unicode_can_express_cost_no_other(path, file):
    for name in ("before", "\ud800", "after"):
        file.keep(build, name)
    file.flush()
    assert told(path) == ["before", "\ud800", "after"]


@pytest.fixture
def pipe(tmp_path):
    """A pipe that can be opened to read."""
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def read_end(pipe):
    return os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)


def drained(reader):
    """Return all that a pipe holds."""
    found = b""
    try:
        while some := os.read(reader, 1 << 16):
            found += some
    except BlockingIOError:
        pass
    return found


def test_what_an_unread_pipe_loses_is_counted_and_told_once(pipe, kvflow_logger, capsys, monkeypatch):
    monkeypatch.setattr(logs, "UNWRITTEN_BYTES_MAX", 100_000)
    reader = read_end(pipe)
    configure_logging(pipe)
    log, count, found = EventLog(), 2000, b""
    for number in range(count):
        log(EVENTS["transfer.completed"], number=number)
    assert capsys.readouterr().err.count("cannot be written") == 1
    while b"were lost" not in found:
        found += drained(reader)
        log(EVENTS["transfer.completed"], number=count)
        count += 1
    found += drained(reader)
    lines = [json.loads(line) for line in found.splitlines()]
    numbers = [line["number"] for line in lines if "number" in line]
    (lost,) = [line["event"] for line in lines if "number" not in line]
    assert lost.startswith(f"{count - len(numbers)} records were lost before this one")
    assert numbers == sorted(numbers)
    assert 100 < len(numbers) < 2000
    os.close(reader)


def test_a_pipe_that_nobody_has_opened_delays_nothing(pipe, kvflow_logger, capsys):
    configure_logging(pipe)
    log = EventLog()
    log(EVENTS["worker.opened"])
    assert capsys.readouterr().err.count("cannot be written") == 1
    reader = read_end(pipe)
    log(EVENTS["transfer.completed"])
    names = [json.loads(line)["event"] for line in drained(reader).splitlines()]
    assert names == ["worker.opened", "transfer.completed"]
    os.close(reader)


def test_the_end_waits_for_a_reader_that_is_slow(pipe, kvflow_logger):
    reader = read_end(pipe)
    configure_logging(pipe)
    (file,) = kvflow_logger.handlers
    for number in range(KEPT_MAX - 1):
        file.keep(lambda number: {"event": number, "more": "x" * 1000}, number)
    ending = threading.Thread(target=file.close)
    ending.start()
    found, more, alive = b"", b"", True
    while alive or more:
        alive = ending.is_alive()  # before what it has written is read
        more = drained(reader)
        found += more
    assert [json.loads(line)["event"] for line in found.splitlines()] == list(range(KEPT_MAX - 1))
    os.close(reader)


def test_the_end_tells_what_is_missing(pipe, kvflow_logger, capsys, monkeypatch):
    monkeypatch.setattr(logs, "CLOSE_S", 0.0)
    reader = read_end(pipe)
    configure_logging(pipe)
    (file,) = kvflow_logger.handlers
    for number in range(200):
        file.keep(lambda number: {"event": number, "more": "x" * 1000}, number)
    file.close()
    lines = drained(reader).count(b"\n")
    assert f"lacks {200 - lines} records" in capsys.readouterr().err
    os.close(reader)


def test_a_full_disk_is_told_once_and_nothing_is_written_twice(kvflow_logger, capsys):
    configure_logging(Path("/dev/full"))
    log = EventLog()
    for _ in range(10):
        log(EVENTS["transfer.completed"])
    assert capsys.readouterr().err.count("No space left on device") == 1
