"""Events as structured log records: one per event, named after its type.

``TransferCompleted`` is logged as ``transfer.completed``. A completed or failed transfer is one canonical
record that answers what moved, how, and where the time went; at the producer it is the lease that has ended. Everything
else about it is DEBUG.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import msgspec
import structlog
from msgspec import Struct

from kvflow.cache.leases import LeaseEnded
from kvflow.errors import KvflowError
from kvflow.observability import events as shell
from kvflow.transfer import events as transfer

LEVELS: dict[type[Struct], int] = {
    shell.WorkerOpened: logging.INFO,
    shell.PlaneOmitted: logging.WARNING,
    shell.CalibrationIgnored: logging.WARNING,
    shell.WorkerDrained: logging.INFO,
    shell.WorkerClosed: logging.INFO,
    shell.OfferAdmitted: logging.DEBUG,
    shell.OfferRefused: logging.WARNING,
    shell.PeerConnected: logging.INFO,
    shell.PeerDropped: logging.WARNING,
    shell.BreakerOpened: logging.WARNING,
    shell.BreakerClosed: logging.INFO,
    shell.ReaderRejected: logging.WARNING,
    shell.ReaderReset: logging.WARNING,
    LeaseEnded: logging.INFO,
    transfer.TransferStarted: logging.DEBUG,
    transfer.TransferRetried: logging.DEBUG,
    transfer.TransferCompleted: logging.INFO,
    transfer.TransferFailed: logging.WARNING,
    transfer.TransferQuiesced: logging.DEBUG,
}
"""Every event and its level, but for two: a lease that expires is a WARNING, a peer that we let go is DEBUG."""

LEVEL_NAMES = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning"}

Record = tuple[Struct, Mapping[str, Any]]
"""An event, and what its record says beside."""

Hook = Callable[[Struct], None]
"""Takes every event of a worker, on any thread; must be quick. What it raises is logged and ignored."""

REMEDIES = {
    "plane.omitted": "Nothing, if the other planes are fast enough; else mend what the detail names.",
    "calibration.ignored": "Calibrate again over this transport: kvflow bench descriptors --calibrate.",
    "lease.ended": "Raise lease_s if readers come later than that; else look why none came.",
    "peer.dropped": "Look at the log of that worker; it is met again when it is needed.",
    "breaker.opened": "Look whether a worker listens at this address; it is tried again by itself.",
    "reader.rejected": "Run the same release on both sides; if they do, find out who this reader is.",
    "reader.reset": "Look for peers that hang; raise the limit that is named if they are only slow.",
}
"""What to do about a warning that says neither a remedy nor the code of an error that has one."""

PLAIN = re.compile(r"[\w./:@+%-]+\Z", re.ASCII)
"""Values that stand in a line as they are. Others are quoted, because a peer may have chosen their characters."""

_encoder = msgspec.json.Encoder(enc_hook=repr)


@lru_cache(maxsize=1)
def _second(since_1970: int) -> str:
    """Return a second as ISO 8601 writes it; its records share it."""
    return datetime.fromtimestamp(since_1970, UTC).isoformat()[:19]


@cache
def event_name(kind: type[Struct]) -> str:
    """Return ``transfer.completed`` for ``TransferCompleted``."""
    noun, *verb = re.findall("[A-Z][a-z]+", kind.__name__)
    return f"{noun}.{'_'.join(verb)}".lower()


def event_fields(event: Struct) -> dict[str, Any]:
    """Return an event's fields, a report's and the phases' among them, flat and JSON-safe."""
    fields: dict[str, Any] = msgspec.to_builtins(event)
    if (report := fields.pop("report", None)) is not None:
        fields |= report
    if timings_s := fields.pop("timings_s", None):
        # In nanoseconds; round() takes three times as long.
        rounded = [int(seconds * 1e9 + 0.5) / 1e9 for seconds in timings_s.values()]
        fields.update(zip(_phase_names(tuple(timings_s)), rounded, strict=True))
    return fields


@lru_cache(maxsize=64)
def _phase_names(phases: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the fields of some phases, which are mostly the same."""
    return tuple(phase + "_s" for phase in phases)


class EventRecord(dict[str, Any]):
    """The message of one log record: the fields of an event, its context, and its worker's identity.

    As text it is one line for people: the name, what is known as ``key=value``, and last the remedy of a warning.
    """

    def __str__(self) -> str:
        known = {key: value for key, value in self.items() if value not in ("", None)}
        remedy = known.pop("remedy", None) or _remedies().get(known.get("code", "")) or REMEDIES.get(known["event"])
        if remedy and known["level"] != "info":
            known["remedy"] = remedy
        left_out = ("event", "level", "timestamp", "incarnation")
        words = [f"{key}={_quoted(value)}" for key, value in known.items() if key not in left_out]
        return " ".join([known["event"], *words])


@cache
def _remedies() -> dict[str, str]:
    """Return what to do about each code of our errors."""
    kinds = [KvflowError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {kind.code: kind.default_remedy for kind in reversed(kinds)}


def _quoted(value: object) -> str:
    text = str(value)
    return text if PLAIN.match(text) else json.dumps(text)


class EventLog:
    """Write events of one worker to the standard library's logger ``kvflow``.

    The library configures nothing: level, handlers and format are the embedder's, and a record that its level
    drops costs next to nothing. Formatters of structlog take the record's message as their event dictionary, others
    write it as a line of ``key=value``.

    Attributes:
        identity: fields that every record of this worker carries.
    """

    def __init__(self, **identity: Any) -> None:
        self.identity = identity
        self._standard = logging.getLogger("kvflow")
        self._extra = {"_logger": self._standard, "_name": ""}

    def __call__(self, event: Struct, **context: Any) -> None:
        """Write one record: the event's fields, the context's, and the worker's identity."""
        self.write_all([(event, context)])

    def write_all(self, records: Iterable[Record]) -> None:
        """Write records of one moment."""
        standard = self._standard
        wanted = [(level, each) for each in records if standard.isEnabledFor(level := _level_of(each[0]))]
        if not wanted:
            return
        now = time.time()
        second = int(now)
        timestamp = f"{_second(second)}.{int((now - second) * 1e6):06d}Z"
        alone = _only_handler(standard)
        messages = []
        for level, (event, context) in wanted:
            message = {
                **self.identity,
                **context,
                **event_fields(event),
                "event": event_name(type(event)),
                "level": LEVEL_NAMES[level],
                "timestamp": timestamp,
            }
            if alone is not None:
                messages.append(message)
            else:
                given = (EventRecord(message), (), None)
                standard.handle(standard.makeRecord("kvflow", level, "", 0, *given, extra=self._extra))
        if alone is not None:
            alone.write_events(messages)


def _level_of(event: Struct) -> int:
    """Return the level of an event; that of two kinds depends on what happened."""
    if isinstance(event, LeaseEnded) and event.outcome == "expired":
        return logging.WARNING
    if isinstance(event, shell.PeerDropped) and event.code == "closing":
        return logging.DEBUG
    return LEVELS[type(event)]


@dataclass(frozen=True)
class OnlyEvents:
    """A hook that takes only events of one kind, so that others need not be made for it."""

    kind: type[Struct]
    hook: Hook

    def __call__(self, event: Struct) -> None:
        """Take one event."""
        if type(event) is self.kind:
            self.hook(event)


class Reporter:
    """Takes every event of a worker, for its log and the embedder's hooks.

    Args:
        log: of the worker.
        hooks: take every event, or those of one kind: see ``OnlyEvents``.

    Thread: any.
    """

    def __init__(self, log: EventLog, hooks: Sequence[Hook]) -> None:
        self._log = log
        self._standard = logging.getLogger("kvflow")
        self._hooks = {
            kind: [hook for hook in hooks if not isinstance(hook, OnlyEvents) or hook.kind is kind] for kind in LEVELS
        }

    def wants(self, kind: type[Struct]) -> bool:
        """Tell whether anyone listens to events of this kind. If not, none need be made, but leases that expire."""
        return bool(self._hooks[kind]) or self._standard.isEnabledFor(LEVELS[kind])

    def __call__(self, event: Struct, **context: Any) -> None:
        """Take one event, and what its record says beside."""
        self.take_all([(event, context)])

    def take_all(self, records: Sequence[Record]) -> None:
        """Take events of one moment; their log gets them in one write."""
        self._log.write_all(records)
        for event, _ in records:
            for hook in self._hooks[type(event)]:
                try:
                    hook(event)
                except Exception:  # an observer's defect must not stop what it observes
                    logging.getLogger("kvflow").exception("a hook failed", extra={"event_type": type(event).__name__})


class _JsonFormatter(structlog.stdlib.ProcessorFormatter):
    """Writes every record as structlog does, and an event faster."""

    def __init__(self) -> None:
        super().__init__(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(),
            ]
        )

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of one record."""
        return _json(record.msg).decode() if type(record.msg) is EventRecord else super().format(record)


class _JsonFile(logging.Handler):
    """Appends JSON lines to a file, whole lines with each write, so that processes may share it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._file = path.open("ab", buffering=0)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            self._write(f"{self.format(record)}\n".encode("utf-8", "backslashreplace"))
        except Exception:  # noqa: BLE001 - as every handler of logging
            self.handleError(record)

    def write_events(self, messages: Sequence[dict[str, Any]]) -> None:
        """Write events without records of logging, which take as long as the rest."""
        try:
            self._write(b"".join([_json(message) + b"\n" for message in messages]))
        except Exception:  # noqa: BLE001
            self.handleError(logging.makeLogRecord({"msg": messages}))

    def _write(self, line: bytes) -> None:
        # NIXL's package configures logging when it is imported, and that closes every handler there is.
        if self._file.closed:
            self._file = self._path.open("ab", buffering=0)
        self._file.write(line)

    def close(self) -> None:
        """Close the file; the next record opens it again, as with ``logging.FileHandler``."""
        self._file.close()
        super().close()


def _json(message: dict[str, Any]) -> bytes:
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:  # half of a character, which JSON can only write escaped
        return json.dumps(message, default=repr).encode()


def _only_handler(logger: logging.Logger) -> _JsonFile | None:
    """Return the file of ``configure_logging`` if all that a logger takes goes there, and nothing is filtered."""
    handlers = logger.handlers
    if logger.propagate or len(handlers) != 1 or logger.filters:
        return None
    (handler,) = handlers
    return handler if type(handler) is _JsonFile and not handler.filters and not handler.level else None


def configure_logging(path: Path | None = None, *, level: int = logging.INFO) -> None:
    """Send kvflow's records as JSON lines to a file or to stderr. For programs; the library never calls it.

    Args:
        path: file to append to; stderr when None.
        level: records below it are dropped.
    """
    handler = logging.StreamHandler() if path is None else _JsonFile(path)
    handler.setFormatter(_JsonFormatter())
    for name in ("kvflow", "handshake"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False
