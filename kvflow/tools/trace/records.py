"""What logs say, read with bounds, as a file is input from outside; and what a trace says of each request."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, TypeVar

import msgspec
from msgspec import NODEFAULT, UNSET, Meta, Struct, UnsetType, defstruct
from msgspec import inspect as kinds

from kvflow.events import (
    LeaseEnded,
    OfferAdmitted,
    PeerConnected,
    PullFailed,
    TracedGroup,
    TransferCompleted,
    TransferTraced,
    event_name,
)
from kvflow.report import PHASES, TransferReport
from kvflow.tools.proxy.completions import FailedAttempt, RequestRecord
from kvflow.validation import Name

T = TypeVar("T")

LINE_BYTES_MAX: Final = 8 << 20
"""Of one record. One with every chunk and block of a pull from eight ranks stays below."""

RECORDS_MAX: Final = 1_000_000
"""Of all files. Further records are counted and skipped."""

Words = Annotated[str, Meta(max_length=16384)]
Duration = Annotated[float, Meta(ge=-1e9, le=1e9)]
Moment = Annotated[float, Meta(ge=0, le=1e11)]
SafeCount = Annotated[int, Meta(ge=0, le=1 << 52)]  # so that the page can count from one to the sum of two
SmallNumber = Annotated[int, Meta(ge=0, le=1 << 20)]
UnitCount = Annotated[int, Meta(ge=1, le=1 << 20)]
Listed = Meta(max_length=4096)
"""``TransferTraced`` lists no more chunks of a pull, and runs of a group."""

BOUNDS: Final[dict[type[kinds.Type], Any]] = {
    kinds.BoolType: bool,
    kinds.NoneType: None,
    kinds.StrType: Name,
    kinds.LiteralType: Name,  # a later release may know more outcomes
    kinds.IntType: SafeCount,
    kinds.FloatType: Duration,
}
NARROWER: Final = {
    "detail": Words,
    "error": Words,
    "held_s": Annotated[float, Meta(ge=0, le=1e9)],
    "merged": Annotated[float, Meta(ge=0, le=1)],
    "remedy": Words,
    "source_group": SmallNumber,
    "source_units": UnitCount,
    "status": Annotated[int, Meta(ge=0, le=999)],
    "target_group": SmallNumber,
    "target_units": UnitCount,
}
"""Fields whose bounds are not those of their type."""

TIMES: Final = tuple(f"{phase}_s" for phase in (*PHASES, "total"))

NOT_LOGGED: Final[dict[type, set[str]]] = {RequestRecord: {"started", "ended", "outcome"}}
"""Fields that a record has not, or under other names."""


class FirstToken(Struct, frozen=True, kw_only=True):
    """``token.first`` of an engine: it has the first token that it computed with the cache."""

    request_id: str


class TraceRecord(Struct, frozen=True, kw_only=True):
    """Fields that records have beside those of their event. ``called_at`` and ``issued_at`` are moments since 1970."""

    timestamp: datetime
    engine_id: Name = ""
    rank: SmallNumber = 0
    incarnation: Name = ""
    request_id: Name = ""
    called_at: Moment | None = None
    issued_at: Moment | None = None
    elapsed_s: Duration = 0.0
    code: Name = ""
    remedy: Words = ""


PullEnded = TransferCompleted | PullFailed
Traceable = PeerConnected | OfferAdmitted | LeaseEnded | PullEnded | TransferTraced | RequestRecord | FirstToken


class Logged(Struct, frozen=True, kw_only=True):
    """An event of a worker, or a record of a router, as a file has it: bounded, and not checked further.

    Attributes:
        worker: ``engine/rank/incarnation``; empty if no worker wrote it.
        written_at: seconds since 1970, by the clock of its process.
        file: number of the file. A file is written by processes of one machine, so its records share a clock.
    """

    event: Traceable
    worker: str
    written_at: float
    called_at: float | None
    issued_at: float | None
    elapsed_s: float
    code: str
    remedy: str
    file: int


KINDS: Final[dict[str, type[Traceable]]] = {
    **{
        event_name(kind): kind
        for kind in (PeerConnected, OfferAdmitted, LeaseEnded, TransferCompleted, PullFailed, TransferTraced)
    },
    "request.answered": RequestRecord,
    "request.failed": RequestRecord,
    "token.first": FirstToken,
}


def _fields_of(kind: type) -> tuple[kinds.Field, ...]:
    info = kinds.type_info(kind)
    assert isinstance(info, kinds.StructType | kinds.DataclassType)
    return info.fields


def _bounded(kind: kinds.Type) -> Any:
    """Return the same type with a bound for every text, list and number in it."""
    match kind:
        case kinds.ListType(item_type=item):
            return Annotated[list[_bounded(item)], Listed]  # type: ignore[misc]
        case kinds.VarTupleType(item_type=item):
            return Annotated[tuple[_bounded(item), ...], Listed]  # type: ignore[misc]
        case kinds.TupleType(item_types=items):
            return tuple[tuple(map(_bounded, items))]  # type: ignore[misc]
        case kinds.UnionType(types=types):
            return reduce(or_, map(_bounded, types))
        case kinds.StructType(cls=cls, fields=its):
            fields = [(each.name, _bounded_field(each), msgspec.field(default=each.default)) for each in its]
            return defstruct(cls.__name__, fields, bases=(cls,), frozen=True)
        case _:
            return BOUNDS[type(kind)]


def _bounded_field(field: kinds.Field) -> Any:
    return NARROWER.get(field.name) or _bounded(field.type)


def _flat_fields(kind: type) -> Iterator[tuple[str, Any, Any]]:
    """Yield the fields of an event as ``kvflow.observability.logs.event_fields`` writes them, with bounds."""
    left_out = NOT_LOGGED.get(kind, set()).union(TraceRecord.__struct_fields__)
    for each in _fields_of(kind):
        if each.name == "report":
            yield from _flat_fields(TransferReport)
        elif each.name == "timings_s":
            yield from ((name, Duration | UnsetType, UNSET) for name in TIMES)
        elif each.name not in left_out:
            bounded = _bounded_field(each)
            yield (each.name, bounded, NODEFAULT) if each.required else (each.name, bounded | UnsetType, UNSET)


def _decoder(kind: type) -> msgspec.json.Decoder[TraceRecord]:
    fields = [(name, bounded, msgspec.field(default=default)) for name, bounded, default in _flat_fields(kind)]
    return msgspec.json.Decoder(defstruct(kind.__name__, fields, bases=(TraceRecord,), frozen=True, kw_only=True))


class _Head(Struct, frozen=True):
    event: Name = ""


_decode_head = msgspec.json.Decoder(_Head).decode
_decoders = {name: _decoder(kind) for name, kind in KINDS.items()}
_names: dict[type, list[str]] = {
    kind: [each.name for each in _fields_of(kind)] for kind in (TransferReport, *KINDS.values())
}


def _from_record(kind: type[Traceable], record: TraceRecord, file: int) -> Logged:
    values = msgspec.structs.asdict(record)
    known = {name: value for name, value in values.items() if value is not None and value is not UNSET}
    known["timings_s"] = {name.removesuffix("_s"): known[name] for name in TIMES if name in known}
    if kind is TransferCompleted:
        known["report"] = _made(TransferReport, known)
    return Logged(
        event=_made(kind, known),
        worker=f"{record.engine_id}/{record.rank}/{record.incarnation}" if record.engine_id else "",
        written_at=(record.timestamp if record.timestamp.tzinfo else record.timestamp.replace(tzinfo=UTC)).timestamp(),
        called_at=record.called_at,
        issued_at=record.issued_at,
        elapsed_s=record.elapsed_s,
        code=record.code,
        remedy=record.remedy,
        file=file,
    )


def _made(kind: type[T], known: Mapping[str, Any]) -> T:
    return kind(**{name: known[name] for name in _names[kind] if name in known})


LINES_PER_REPORT: Final = 10_000
"""Some 50 ms of work."""


UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, ValueError)
"""What a line can raise that is not a record of the expected kind."""


class Reading(Struct):
    """How much was read: files, lines, lines that are no records or too long, and records above ``RECORDS_MAX``."""

    files: int = 0
    lines: int = 0
    broken: int = 0
    skipped: int = 0


def read_files(
    paths: Iterable[Path], progress: Callable[[Reading], None] = lambda _: None
) -> tuple[list[Logged], Reading]:
    """Read the records of files that concern requests; skip and count everything else.

    Raises:
        OSError: a file cannot be read.
    """
    found: list[Logged] = []
    reading = Reading()
    for path in paths:
        with path.open("rb") as file:
            for line in _lines(file, reading):
                if reading.lines % LINES_PER_REPORT == 0:
                    progress(reading)
                logged = _logged(line, reading)
                if logged is None:
                    continue
                if len(found) >= RECORDS_MAX:
                    reading.skipped += 1
                else:
                    found.append(logged)
        reading.files += 1
    return found, reading


def _lines(file: BinaryIO, reading: Reading) -> Iterator[bytes]:
    while line := file.readline(LINE_BYTES_MAX + 1):
        reading.lines += 1
        if len(line) <= LINE_BYTES_MAX:
            yield line
            continue
        reading.broken += 1
        while line and not line.endswith(b"\n"):
            line = file.readline(LINE_BYTES_MAX)


def _logged(line: bytes, reading: Reading) -> Logged | None:
    """Return what a line says; None if it is not needed, or broken."""
    if line.isspace():
        return None
    try:
        name = _decode_head(line).event
        return _from_record(KINDS[name], _decoders[name].decode(line), reading.files) if name in KINDS else None
    except UNREADABLE:
        reading.broken += 1
        return None


class Phase(Struct, frozen=True):
    """A part of a request's time. The phases of a request follow each other and add up to its whole.

    ``ticket`` goes from the offer to the pull; then come those of ``TransferReport``; ``answer`` goes from the first
    token to the end of an answer that failed.
    """

    name: str
    start_s: float
    seconds: float


class Failure(Struct, frozen=True):
    """Why a pull or a request failed."""

    code: str
    phase: str
    peer: str
    detail: str
    remedy: str


class PullTrace(Struct, frozen=True, kw_only=True):
    """One pull of a request; names as in ``kvflow.events.TransferTraced`` and ``TransferReport``.

    The data plane alternates ``bind``, ``post``, ``wire`` and ``scatter``; ``traced``: chunks and blocks are known.
    """

    worker: str
    local_request_id: str
    start_s: float
    total_s: float
    phases: list[Phase]
    nbytes: int
    nbytes_wanted: int
    descriptors: int
    merged: float
    reads: int
    early: int
    transport: str
    plane: str
    failure: Failure | None = None
    traced: bool = False
    peers: tuple[str, ...] = ()
    groups: tuple[TracedGroup, ...] = ()
    chunks: tuple[tuple[int, float, float, int, int], ...] = ()
    chunks_omitted: int = 0
    ranges: tuple[tuple[int, int, float, float], ...] = ()

    @property
    def end_s(self) -> float:
        """When it ended."""
        return self.start_s + self.total_s

    @property
    def moving(self) -> tuple[float, float]:
        """When its first read left the queue, and when its last byte had arrived."""
        reading = [phase for phase in self.phases if phase.name in READING]
        if not reading:
            return self.end_s, self.end_s
        return reading[0].start_s, reading[-1].start_s + reading[-1].seconds


READING = ("bind", "post", "wire", "scatter")
"""Phases in which the data plane moves bytes."""


class Offer(Struct, frozen=True, kw_only=True):
    """A lease that a producer held for a request; the fields after ``start_s`` only if its end was recorded."""

    worker: str
    start_s: float
    held_s: float | None = None
    outcome: str = ""
    advances: tuple[tuple[float, int], ...] = ()


class Routed(Struct, frozen=True, kw_only=True):
    """What a router did for a request, which starts with it. Texts and the status of HTTP are empty if not recorded.

    Attributes:
        prefill_s: when the prefill server had answered, or when the request ended before.
        elapsed_s: when the answer was complete, or the request failed.
        failure: None if the client has the whole answer.
    """

    prefill_s: float
    first_bytes_s: float | None
    elapsed_s: float
    client: str = ""
    prefill_server: str = ""
    decode_server: str = ""
    failed_attempts: list[FailedAttempt] = []
    status: int = 0
    sent_bytes: int = 0
    failure: Failure | None = None


class RequestTrace(Struct, kw_only=True):
    """One request. What is None was not recorded, or cannot be known.

    Attributes:
        request_id: the producer's name of it; the router's or the consumer's if no producer is known.
        outcome: ``completed``, ``failed`` (the answer, or else every pull), ``offered`` (no pull is recorded) or
            ``answered`` (neither is).
        start_at: seconds since 1970, on the clock of the trace.
        total_s: from the start to the first token, or to the last that is known.
        clock_error_s: largest error of times that two clocks measured.
        gb_per_s: rate of all pulls together, in 10**9 bytes per second; 0 if nothing was moved.
    """

    request_id: str
    outcome: str
    start_at: float
    total_s: float
    phases: list[Phase]
    clock_error_s: float | None = None
    router: Routed | None = None
    first_token_s: float | None = None
    offers: list[Offer]
    pulls: list[PullTrace]
    nbytes: int = 0
    reads: int = 0
    gb_per_s: float = 0.0
    title: str = ""

    @property
    def failure(self) -> Failure | None:
        """Why the answer failed, or else the last pull; None if a pull has delivered."""
        if self.router is not None and self.router.failure is not None:
            return self.router.failure
        return self.pulls[-1].failure if self.outcome == "failed" else None


class ComparedClock(Struct, frozen=True):
    """The clock of one process beside a reference, which is one of the workers that it has met.

    References that have not met are taken as equal. That concerns no single request. ``error_s`` is None if nothing was
    measured and both clocks are taken as equal; ``basis``: ``reference``, ``handshake``, ``file`` (a worker of the same
    machine), ``order`` (of events of both) or ``nothing``.
    """

    name: str
    reference: str
    ahead_s: float
    error_s: float | None
    basis: str


class Trace(Struct):
    """All requests of some logs by their start, and the clocks of all processes."""

    requests: list[RequestTrace]
    clocks: list[ComparedClock]
    reading: Reading
