"""Write every event as one log record, and hand it to the hooks.

The logger ``kvflow.transfer`` logs ``TransferCompleted`` as ``transfer.completed``. At INFO and above, a request has
one record per side: ``transfer.completed`` or ``transfer.failed`` at the consumer, ``lease.ended`` at the producer.
"""

import errno
import inspect
import io
import json
import logging
import os
import re
import select
import stat
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Struct

from kvflow import events
from kvflow.errors import ConfigInvalid, FailureCode, KvflowError
from kvflow.events import Event, Hook, OnlyEvents, event_name

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

LEVELS: dict[type[Event], int] = {
    events.WorkerOpened: logging.INFO,
    events.PlaneOmitted: logging.WARNING,
    events.WorkerDrained: logging.INFO,
    events.WorkerStopped: logging.INFO,
    events.OfferAdmitted: logging.DEBUG,
    events.OfferRefused: logging.WARNING,
    events.PeerConnected: logging.INFO,
    events.LayersOmitted: logging.WARNING,
    events.PeerMeasured: logging.INFO,
    events.PeerSlow: logging.WARNING,
    events.PeerDropped: logging.WARNING,
    events.BreakerOpened: logging.WARNING,
    events.BreakerClosed: logging.INFO,
    events.ConsumerRejected: logging.WARNING,
    events.ReaderReset: logging.WARNING,
    events.LeaseEnded: logging.INFO,
    events.TransferStarted: logging.DEBUG,
    events.TransferRetried: logging.DEBUG,
    events.TransferCompleted: logging.INFO,
    events.PullFailed: logging.WARNING,
    events.PrefixFetched: logging.INFO,
    events.TransferTraced: logging.DEBUG,
    events.TransferQuiesced: logging.DEBUG,
}
"""The usual level of each event. ``lease.ended`` is a WARNING if no reader came in time, ``peer.connected`` if it has a
remedy; ``transfer.failed`` is INFO if the caller canceled the pull, ``peer.dropped`` DEBUG if the worker is closing."""

COSTLY = (events.TransferTraced,)  # take time for each chunk of a pull: a hook of all events does not get these

REPEATS_S = 10.0  # a warning is repeated at INFO for as long
REPEATS_MAX = 1024  # warnings that are remembered: peers may have any number of names

TOP = logging.getLogger("kvflow")
LEVEL_NAMES = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning"}
WHOLE = 1.5 * 2**52  # floats of this size have no fraction, so that adding it rounds
KEPT_MAX = 256  # records of completed pulls that are written together
UNWRITTEN_BYTES_MAX = 1 << 20  # of lines that a full disk or pipe does not take now
CLOSE_S = 1.0  # how long a process that ends waits for the reader of a pipe
Record = tuple[Event, Mapping[str, Any]]  # an event, and further fields of its record

# Of warnings without a field ``remedy`` and without the code of an error that has a default remedy.
REMEDIES = {
    "lease.ended": "Find out why no consumer read in time, or raise lease_s; or unread_s, if it ended unread.",
    "peer.dropped": "Read the log of that worker. kvflow reconnects when a pull needs it.",
    "breaker.opened": "Check that a worker listens at this address. kvflow tries again automatically.",
    "consumer.rejected": "Run the same release on both sides. If they do, find out what connects to this worker.",
    "reader.reset": "Find the peers that hang. If they are only slow, raise the named limit.",
}

PLAIN = re.compile(r"[\w./:@+%-]+\Z", re.ASCII)  # needs no quotes; a peer may choose the characters of other values

# Order of the fields in a line: others are at 0. Those omitted are at its start, or left out.
FIRST = ("request_id", "local_request_id", "code", "phase", "peer", "endpoint", "detail", "remedy")
LAST = ("engine_id", "rank")
ORDER = {key: place for place, key in enumerate(FIRST, -len(FIRST))} | {key: place for place, key in enumerate(LAST, 1)}
FAILURE = ("code", "outcome", "peer", "endpoint")  # fields that tell one failure of one peer from others
OMITTED = ("event", "level", "timestamp", "incarnation")
# Of the record of a completed pull.
COMPLETED = (
    *("pull_id", "request_id", "local_request_id", "remote_engine_id"),
    *("nbytes", "descriptors", "reads", "read_bytes", "merged", "early", "early_bytes"),
    *("ranges", "seal_s"),  # of open offers only
    *("transport", "plane", "trace_id"),
)

_encoder = msgspec.json.Encoder(enc_hook=repr)


@lru_cache(maxsize=1)
def _second(since_1970: int) -> str:
    return datetime.fromtimestamp(since_1970, UTC).isoformat()[:19]


def timestamp_of(wall_s: float) -> str:
    """Return seconds since 1970 as the text in a record."""
    second = int(wall_s)
    return f"{_second(second)}.{int((wall_s - second) * 1e6):06d}Z"


def event_fields(event: Event) -> dict[str, Any]:
    """Return the fields of an event as one flat dictionary for JSON, with those of its report and its phases."""
    if isinstance(event, events.TransferCompleted):
        return _flat(_completed(event, {}, UNSET, UNSET))
    fields: dict[str, Any] = msgspec.to_builtins(event)
    if traceparent := fields.pop("traceparent", ""):
        fields["trace_id"] = traceparent.split("-")[1]
    if timings_s := fields.pop("timings_s", None):
        fields.update(zip(_phase_names(tuple(timings_s)), rounded(timings_s.values()), strict=True))
    return fields


def _completed(event: events.TransferCompleted, before: Mapping[str, Any], level: object, timestamp: object) -> Struct:
    """Return the record of a completed pull: ``before``, and the event with its report. What is ``UNSET`` is left out.

    There are many, and an object is encoded in a fraction of the time that a dictionary takes.
    """
    report, trace = event.report, event.traceparent
    report.compute()
    timings_s = report.timings_s
    of_open = (report.ranges, report.seal_s) if report.ranges else (UNSET, UNSET)
    return _completed_type(tuple(before), tuple(timings_s))(
        *before.values(),
        event.pull_id,
        event.request_id,
        event.local_request_id,
        event.remote_engine_id,
        report.nbytes,
        report.descriptors,
        report.reads,
        report.read_bytes,
        report.merged,
        report.early,
        report.early_bytes,
        *of_open,
        report.transport,
        report.plane,
        trace.split("-")[1] if trace else UNSET,
        *rounded(timings_s.values()),
        UNSET if level is UNSET else "transfer.completed",
        level,
        timestamp,
    )


@lru_cache(maxsize=64)
def _completed_type(before: tuple[str, ...], phases: tuple[str, ...]) -> Callable[..., Struct]:
    names = (*before, *COMPLETED, *_phase_names(phases), "event", "level", "timestamp")
    return msgspec.defstruct("CompletedRecord", names, gc=False)


def _flat(record: Struct) -> dict[str, Any]:
    return {name: value for name in record.__struct_fields__ if (value := getattr(record, name)) is not UNSET}


def rounded(seconds: Iterable[float]) -> list[float]:
    """Round seconds to nanoseconds; ``round`` takes ten times as long."""
    return [(each * 1e9 + WHOLE - WHOLE) / 1e9 for each in seconds]


@lru_cache(maxsize=64)
def _phase_names(phases: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(phase + "_s" for phase in phases)


class EventRecord(dict[str, Any]):
    """The message of one log record: the fields of an event, its context, and the identity of its worker.

    Its text is one line: the name of the event, then ``key=value`` pairs, first what failed and the remedy.
    """

    prefix = ""  # of the line: the name of the logger if the application has configured no logging

    def __str__(self) -> str:
        known = {key: value for key, value in self.items() if value not in ("", None) and key not in OMITTED}
        of_code = default_remedies().get(known.get("code", ""))
        remedy = known.pop("remedy", None) or of_code or REMEDIES.get(self["event"])
        if remedy and self["level"] == "warning":
            known["remedy"] = remedy
        pairs = [f"{key}={_quoted(known[key])}" for key in sorted(known, key=lambda key: ORDER.get(key, 0))]
        return " ".join([self.prefix + self["event"], *pairs])


def _quoted(value: object) -> str:
    text = str(value)
    return text if PLAIN.match(text) else json.dumps(text)


@cache
def logger_of(kind: type[Event]) -> logging.Logger:
    """Return the logger of a type of events: ``kvflow.transfer`` for ``TransferCompleted``."""
    return logging.getLogger(f"kvflow.{event_name(kind).partition('.')[0]}")


class Repeats:
    """Holds back warnings: of one failure of one peer there is one in ``REPEATS_S``. Thread: any.

    Args:
        now: returns seconds of a monotonic clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._told: dict[tuple[object, ...], tuple[float, int]] = {}  # when each was last told, and how many followed

    def level_of(self, *failure: object) -> tuple[int, dict[str, int]]:
        """Count a warning; return its level, and as ``repeats`` how many like it were at INFO before."""
        now = self._now()
        told_at, repeats = self._told.pop(failure, (-REPEATS_S, 0))
        if again := now - told_at < REPEATS_S:
            repeats += 1
        self._told[failure] = (told_at, repeats) if again else (now, 0)
        if len(self._told) > REPEATS_MAX:
            self._told.pop(next(iter(self._told), ()), None)
        if again:
            return logging.INFO, {}
        return logging.WARNING, {"repeats": repeats} if repeats else {}


class EventLog:
    """Writes the events of one worker to loggers of the standard library, below ``kvflow``.

    The application chooses levels, handlers and format. Events below the level cost almost nothing. If it configures
    no logging, Python prints warnings alone, each as one line. Formatters of structlog take the message of a record as
    their event dictionary; other formatters write it as a line.

    Args:
        wall: returns seconds since 1970.
        identity: fields of every record.
    """

    def __init__(self, wall: Callable[[], float] = time.time, /, **identity: Any) -> None:
        self.identity = identity
        self._wall = wall
        self._repeats = Repeats()
        self._keeper: JsonFile | None = None  # takes all records, until the next flush

    def __call__(self, event: Event, **context: Any) -> None:
        """Write one record, with the fields of the context."""
        self.write_all([(event, context)])

    def write_all(self, records: Iterable[Record]) -> None:
        """Write the records of one moment."""
        wanted = []
        for event, context in records:
            level, logger, more = _level_of(event), logger_of(type(event)), context
            if level == logging.WARNING:
                level, repeats = self._repeats.level_of(type(event), *(getattr(event, name, "") for name in FAILURE))
                more = {**context, **repeats}
            if logger.isEnabledFor(level):
                wanted.append((level, logger, event, more))
        if not wanted:
            return
        timestamp = timestamp_of(self._wall())
        messages = [self._message(event, context, level, timestamp) for level, _, event, context in wanted]
        files = {only_file(logger) for _, logger, _, _ in wanted}
        only = files.pop()
        if only is not None and not files:
            only.write_events(messages)
            return
        for (level, logger, _, _), message in zip(wanted, messages, strict=True):
            _log(logger, level, EventRecord(_flat(message) if isinstance(message, Struct) else message))

    def keep(
        self, event: Event, wall_s: float, context: Callable[..., Mapping[str, Any]], arguments: tuple[Any, ...]
    ) -> bool:
        """Have a file of JSON lines write a record with others, at the latest at ``flush``; False if none takes all.

        Args:
            event: of a type that is logged at its usual level.
            wall_s: seconds since 1970, for the record.
            context: returns further fields of the record when it is written.
            arguments: what it is called with.
        """
        file = self._keeper
        if file is None or TOP.handlers != [file]:
            self._keeper = file = only_file(logger_of(type(event)))
            if file is None:
                return False
        file.keep(self._kept_message, (event, wall_s, context, arguments))
        return True

    def flush(self) -> None:
        """Write what is kept."""
        file, self._keeper = self._keeper, None
        if file is not None:
            file.flush()

    def _kept_message(self, kept: Any) -> Struct | dict[str, Any]:
        event, wall_s, context, arguments = kept
        return self._message(event, context(*arguments), LEVELS[type(event)], timestamp_of(wall_s))

    def _message(self, event: Event, context: Mapping[str, Any], level: int, timestamp: str) -> Struct | dict[str, Any]:
        """Return all fields of a record."""
        before, level_name = {**self.identity, **context}, LEVEL_NAMES[level]
        if isinstance(event, events.TransferCompleted):
            return _completed(event, before, level_name, timestamp)
        last = {"event": event_name(type(event)), "level": level_name, "timestamp": timestamp}
        return before | event_fields(event) | last


def _log(logger: logging.Logger, level: int, message: EventRecord) -> None:
    if not logger.hasHandlers():  # Python prints the bare message
        message.prefix = f"{logger.name}: "
    extra = {"_logger": logger, "_name": ""}  # for the formatters of structlog
    logger.handle(logger.makeRecord(logger.name, level, "", 0, message, (), None, extra=extra))


def _level_of(event: Event) -> int:
    late = isinstance(event, events.LeaseEnded) and event.outcome in events.TIMED_OUT
    if late or (isinstance(event, events.PeerConnected) and event.remedy):
        return logging.WARNING
    if isinstance(event, events.PullFailed) and event.code == FailureCode.TRANSFER_CANCELLED:
        return logging.INFO
    if isinstance(event, events.PeerDropped) and event.code == FailureCode.CLOSING:
        return logging.DEBUG
    return LEVELS[type(event)]


def check_hooks(hooks: Sequence[Hook]) -> None:
    """Raise ``ConfigInvalid`` if a hook cannot be called, or is a coroutine function."""
    for each in hooks:
        hook = each.hook if isinstance(each, OnlyEvents) else each
        if not callable(hook):
            raise ConfigInvalid(f"hook {hook!r} cannot be called", remedy="Pass functions that take one event.")
        if any(map(inspect.iscoroutinefunction, (hook, type(hook).__call__))):
            remedy = "Pass a plain function. It may start a task on its event loop."
            raise ConfigInvalid(f"hook {hook!r} is a coroutine function, which kvflow never awaits", remedy=remedy)


class Reporter:
    """Gives every event of a worker to its log and to the hooks of the application. Thread: any."""

    def __init__(self, log: EventLog, hooks: Sequence[Hook]) -> None:
        self._log = log
        self.write_all, self.keep, self.flush = log.write_all, log.keep, log.flush  # of the log alone
        takers = [(hook.kind, hook.hook) if isinstance(hook, OnlyEvents) else (None, hook) for hook in hooks]
        self.hooks: dict[type[Event], list[Callable[[Any], None]]] = {
            kind: [hook for only, hook in takers if only is kind or (only is None and kind not in COSTLY)]
            for kind in LEVELS
        }
        self.is_logged = {kind: partial(logger_of(kind).isEnabledFor, level) for kind, level in LEVELS.items()}

    def wants(self, kind: type[Event]) -> bool:
        """Return whether a hook or the log takes events of this type, at its usual level."""
        return bool(self.hooks[kind]) or self.is_logged[kind]()

    def __call__(self, event: Event, **context: Any) -> None:
        """Take one event, and further fields of its record."""
        self.take_all([(event, context)])

    def take_all(self, records: Sequence[Record]) -> None:
        """Take the events of one moment. The log writes them at once."""
        self._log.write_all(records)
        for event, _ in records:
            self.tell(event)

    def tell(self, event: Event) -> None:
        """Give an event to the hooks alone."""
        for hook in self.hooks[type(event)]:
            try:
                hook(event)
            except Exception:  # a defect of a hook must not stop the worker
                logging.getLogger("kvflow").exception("a hook failed", extra={"event_type": type(event).__name__})


@cache
def default_remedies() -> dict[str, str]:
    """Return the default remedy of the error that each code names; finer causes have none."""
    kinds = [KvflowError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {kind.code: kind.default_remedy for kind in reversed(kinds)}


class _JsonFormatter(logging.Formatter):
    """Writes records as structlog does, and events faster."""

    def __init__(self) -> None:
        from structlog import processors, stdlib  # noqa: PLC0415 - loads rich, and only programs write JSON lines

        super().__init__()
        self._by_structlog = stdlib.ProcessorFormatter(
            processors=[
                stdlib.ProcessorFormatter.remove_processors_meta,
                processors.format_exc_info,
                processors.JSONRenderer(),
            ],
            # of records that are plain text
            foreign_pre_chain=[stdlib.add_log_level, processors.TimeStamper(fmt="iso", utc=True)],
        )

    def format(self, record: logging.LogRecord) -> str:
        if type(record.msg) is EventRecord:
            return to_json(record.msg).decode()
        return self._by_structlog.format(record)


class JsonFile(logging.Handler):
    """Appends JSON lines to a file. Each write has whole lines, so that processes may share the file.

    It never waits for a disk that is full or for a pipe that nobody reads. Lines that cannot be written now are kept,
    up to ``UNWRITTEN_BYTES_MAX``; further ones are lost and counted. Thread: any.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._kept: list[tuple[Callable[[Any], object], object]] = []
        self._unwritten = bytearray()
        self._file: io.FileIO | None = None
        self._lost = 0
        self._told = False  # whether it was told that nothing can be written now
        for lines in (self._kept, self._unwritten):  # the parent writes them
            os.register_at_fork(after_in_child=lines.clear)
        if not path.is_fifo():  # which can be opened once a process reads it
            self._file = self._opened()

    def _opened(self) -> io.FileIO:
        file = io.FileIO(self._path, "ab", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666))
        # A pipe takes so much whole, or not at all: otherwise lines of several processes might mix.
        self._write_max = select.PIPE_BUF if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode) else sys.maxsize
        return file

    def keep(self, build: Callable[[Any], object], kept: object) -> None:
        """Write the record ``build(kept)`` with others, before any other record; ``flush`` writes it at once."""
        self._kept.append((build, kept))
        if len(self._kept) >= KEPT_MAX:
            self.flush()

    def flush(self) -> None:
        """Write what is kept and what could not be written before."""
        if self._kept or self._unwritten:
            self.write_events(())

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, after those that are kept."""
        self.flush()
        try:
            self._write(f"{self.format(record)}\n".encode("utf-8", "backslashreplace"))
        except Exception:  # noqa: BLE001 - as every handler of logging
            self.handleError(record)

    def write_events(self, messages: Sequence[object]) -> None:
        """Write events after what is kept, directly, because a ``LogRecord`` takes as long as everything else."""
        self.acquire()
        try:
            kept = self._kept[:]
            del self._kept[: len(kept)]  # another thread may append meanwhile
            self._write(to_lines([*[build(values) for build, values in kept], *messages]))
        except Exception:  # noqa: BLE001
            self.handleError(logging.makeLogRecord({"msg": messages}))
        finally:
            self.release()

    def _write(self, lines: bytes) -> None:
        if len(self._unwritten) < UNWRITTEN_BYTES_MAX:
            self._unwritten += lines
        else:
            self._lost += lines.count(b"\n")
        try:
            # Importing NIXL configures logging, which closes every existing handler.
            if self._file is None or self._file.closed:
                self._file = self._opened()
            while self._unwritten:
                end = self._unwritten.rfind(b"\n", 0, self._write_max) + 1 or self._unwritten.find(b"\n") + 1
                written = self._file.write(self._unwritten[:end])
                if not written:
                    raise BlockingIOError(errno.EAGAIN, "nobody reads the pipe")
                del self._unwritten[:written]
        except OSError as error:
            if self._lost or not isinstance(error, BlockingIOError):
                self._tell(f"cannot be written: {error}; {UNWRITTEN_BYTES_MAX} bytes are kept, and more is lost")
            return
        self._told = False
        if self._lost:
            lost, self._lost = self._lost, 0
            text = f"{lost} records were lost before this one, because the log could not be written"
            self.handle(logging.makeLogRecord({"name": TOP.name, "levelname": "WARNING", "msg": text}))

    def _tell(self, what: str) -> None:
        if not self._told and sys.stderr is not None:
            sys.stderr.write(f"kvflow: the log {self._path} {what}\n")
        self._told = True

    def close(self) -> None:
        """Write what is kept, for at most ``CLOSE_S`` if a pipe is full. The next record opens the file again."""
        self.flush()
        if self._file is not None and not self._file.closed:
            deadline, left = time.monotonic() + CLOSE_S, -1
            writable = select.poll()
            writable.register(self._file, select.POLLOUT)
            while len(self._unwritten) not in {0, left}:
                left = len(self._unwritten)
                writable.poll(max(0.0, deadline - time.monotonic()) * 1000)
                self._write(b"")
            self._file.close()
            self._lost += self._unwritten.count(b"\n")
            self._unwritten.clear()
            self._told = not self._lost
            self._tell(f"lacks {self._lost} records")
        super().close()


def to_lines(messages: Sequence[object]) -> bytes:
    """Return objects as lines of JSON."""
    try:
        return _encoder.encode_lines(messages)
    except UnicodeEncodeError:
        return b"".join([to_json(message) + b"\n" for message in messages])


def to_json(message: object) -> bytes:
    """Return an object as JSON. What JSON cannot express is its ``repr``."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can express
        return json.dumps(msgspec.to_builtins(message, enc_hook=repr, str_keys=True)).encode()


def only_file(logger: logging.Logger) -> JsonFile | None:
    """Return the file of ``configure_logging`` if it takes all records of a logger below ``kvflow``, unfiltered."""
    handlers = TOP.handlers
    if len(handlers) != 1 or TOP.propagate or TOP.filters or logger.handlers or logger.filters or not logger.propagate:
        return None
    (handler,) = handlers
    return handler if type(handler) is JsonFile and not handler.filters and not handler.level else None


def configure_logging(path: Path | None = None, *, level: int = logging.INFO) -> None:
    """Write kvflow's log records as JSON lines to a file or to stderr. Call it in programs; the library never does.

    Args:
        path: file to append to; None for stderr.
        level: level below which records are dropped.
    """
    handler = logging.StreamHandler() if path is None else JsonFile(path)
    handler.setFormatter(_JsonFormatter())
    for name in ("kvflow", "handshake"):
        logger = logging.getLogger(name)
        for replaced in logger.handlers:
            with suppress(ValueError):  # a stream that its owner has closed
                replaced.flush()
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False


def record_logger(name: str) -> "BoundLogger":
    """Return a logger whose records ``configure_logging`` writes as JSON lines, with their fields.

    Args:
        name: of the standard library's logger, below ``kvflow``.
    """
    import structlog  # noqa: PLC0415 - likewise

    logger: BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
    )
    return logger
