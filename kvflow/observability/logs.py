"""Events as structured log records: one per event, named after its type.

``TransferCompleted`` is logged as ``transfer.completed``. A completed or failed transfer is one canonical
record that answers what moved, how, and where the time went; at the producer it is the lease that has ended. Everything
else about it is DEBUG.
"""

import logging
import re
from pathlib import Path
from typing import Any

import msgspec
import structlog
from msgspec import Struct

from kvflow.cache.leases import LeaseEnded
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
    shell.ReaderRenewed: logging.WARNING,
    LeaseEnded: logging.INFO,
    transfer.TransferStarted: logging.DEBUG,
    transfer.TransferRetried: logging.DEBUG,
    transfer.TransferCompleted: logging.INFO,
    transfer.TransferFailed: logging.WARNING,
    transfer.TransferQuiesced: logging.DEBUG,
}
"""Every event and its level, but for two: a lease that expires is a WARNING, a peer that we let go is DEBUG."""


def event_name(kind: type[Struct]) -> str:
    """Return ``transfer.completed`` for ``TransferCompleted``."""
    noun, *verb = re.findall("[A-Z][a-z]+", kind.__name__)
    return f"{noun}.{'_'.join(verb)}".lower()


def event_fields(event: Struct) -> dict[str, Any]:
    """Return an event's fields, a report's and the phases' among them, flat and JSON-safe."""
    fields: dict[str, Any] = msgspec.to_builtins(event)
    report = fields.pop("report", None)
    if report:
        fields |= report
    timings = fields.pop("timings_s", {})
    return fields | {f"{phase}_s": round(seconds, 9) for phase, seconds in timings.items()}


class EventLog:
    """Write events of one worker to the standard library's logger ``kvflow``, through structlog.

    The library configures nothing: level, handlers and format are the embedder's, and a record that its level
    drops costs next to nothing.

    Attributes:
        identity: fields that every record of this worker carries.
    """

    def __init__(self, **identity: Any) -> None:
        self.identity = identity
        self._standard = logging.getLogger("kvflow")
        self._logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
            self._standard,
            wrapper_class=structlog.stdlib.BoundLogger,
            processors=[
                structlog.stdlib.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
            ],
        )

    def __call__(self, event: Struct, **context: Any) -> None:
        """Write one record: the event's fields, the context's, and the worker's identity."""
        level = LEVELS[type(event)]
        match event:
            case LeaseEnded(outcome="expired"):
                level = logging.WARNING
            case shell.PeerDropped(code="closing"):
                level = logging.DEBUG
            case _:
                pass
        if self._standard.isEnabledFor(level):  # asked through structlog, it costs more than all the rest of this call
            self._logger.log(level, event_name(type(event)), **self.identity, **context, **event_fields(event))


def configure_logging(path: Path | None = None, *, level: int = logging.INFO) -> None:
    """Send kvflow's records as JSON lines to a file or to stderr. For programs; the library never calls it.

    Args:
        path: file to append to; stderr when None.
        level: records below it are dropped.
    """
    handler = logging.StreamHandler() if path is None else logging.FileHandler(path)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(),
            ]
        )
    )
    for name in ("kvflow", "handshake"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False
