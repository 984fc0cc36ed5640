"""Read records that workers and routers wrote as JSON lines. A file is input from outside: everything is bounded."""

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import msgspec
from msgspec import Meta, Struct

LINE_BYTES_MAX: Final = 8 << 20
"""Of one record. One with every chunk and block of a pull from eight ranks stays below."""

RECORDS_MAX: Final = 1_000_000
"""Records of all files that are kept. Further ones are counted and skipped."""

LISTED_MAX: Final = 4096
"""Chunks of a pull, and runs of a group, as ``TransferTraced`` lists them."""

Name = Annotated[str, Meta(max_length=1024)]
Words = Annotated[str, Meta(max_length=16384)]
Seconds = Annotated[float, Meta(ge=-1e9, le=1e9)]
Moment = Annotated[float, Meta(ge=0, le=1e11)]
Count = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
Index = Annotated[int, Meta(ge=0, le=1 << 20)]


class Record(Struct, frozen=True, kw_only=True):
    """What every record has.

    Attributes:
        timestamp: when it was written, by the clock of its process.
        engine_id: worker that wrote it, with the next two; empty if no worker did.
        rank: see ``engine_id``.
        incarnation: see ``engine_id``.
        request_id: the producer's name of the request, or the router's.
    """

    timestamp: datetime
    engine_id: Name = ""
    rank: Index = 0
    incarnation: Name = ""
    request_id: Name = ""

    @property
    def written_at(self) -> float:
        """Seconds since 1970 when it was written."""
        return (self.timestamp if self.timestamp.tzinfo else self.timestamp.replace(tzinfo=UTC)).timestamp()

    @property
    def worker(self) -> str:
        """``engine/rank/incarnation``; empty if no worker wrote it."""
        return f"{self.engine_id}/{self.rank}/{self.incarnation}" if self.engine_id else ""


class Connected(Record, frozen=True, kw_only=True):
    """``peer.connected``."""

    peer: Name
    clock_ahead_s: Seconds | None = None
    clock_error_s: Seconds | None = None


class Admitted(Record, frozen=True, kw_only=True):
    """``offer.admitted``."""


class Ended(Record, frozen=True, kw_only=True):
    """``lease.ended``."""

    outcome: Name = ""
    held_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0


class Timed(Record, frozen=True, kw_only=True):
    """The phases of a pull, as ``TransferReport`` has them."""

    handshake_s: Seconds = 0.0
    queue_s: Seconds = 0.0
    bind_s: Seconds = 0.0
    post_s: Seconds = 0.0
    wire_s: Seconds = 0.0
    scatter_s: Seconds = 0.0
    fence_s: Seconds = 0.0
    deliver_s: Seconds = 0.0
    total_s: Seconds = 0.0


class Transfer(Timed, frozen=True, kw_only=True):
    """``transfer.completed`` or ``transfer.failed``; see ``kvflow.events`` for the fields."""

    pull_id: Count = 0
    local_request_id: Name = ""
    called_at: Moment | None = None
    issued_at: Moment | None = None
    remote_engine_id: Name = ""
    nbytes: Count = 0
    nbytes_wanted: Count = 0
    descriptors: Count = 0
    merged: Annotated[float, Meta(ge=0, le=1)] = 0.0
    reads: Count = 0
    early: Count = 0
    transport: Name = ""
    plane: Name = ""
    code: Name = ""
    phase: Name = ""
    peer: Name = ""
    detail: Words = ""
    remedy: Words = ""


class Group(Struct, frozen=True):
    """One of the groups of ``transfer.traced``; see ``kvflow.events.TracedGroup``."""

    peer: Index
    source_group: Index
    target_group: Index
    source_units: Annotated[int, Meta(ge=1, le=1 << 20)]
    target_units: Annotated[int, Meta(ge=1, le=1 << 20)]
    unit_bytes: Count
    unit_descriptors: Count
    descriptors: Count
    staged: bool
    pairs: Annotated[list[tuple[Count, Count, Count]], Meta(max_length=LISTED_MAX)]
    pairs_omitted: Count = 0


class Traced(Record, frozen=True, kw_only=True):
    """``transfer.traced``."""

    pull_id: Count
    peers: Annotated[list[Name], Meta(max_length=LISTED_MAX)]
    groups: Annotated[list[Group], Meta(max_length=LISTED_MAX)]
    chunks: Annotated[list[tuple[Index, Seconds, Seconds, Count, Count]], Meta(max_length=LISTED_MAX)]
    chunks_omitted: Count = 0


class FailedAttempt(Struct, frozen=True):
    """A server that a router asked in vain; see ``kvflow.tools.proxy.completions.FailedAttempt``."""

    role: Name
    server: Name
    error: Words


class Answered(Record, frozen=True, kw_only=True):
    """``request.answered`` or ``request.failed`` of a router, as ``kvflow.tools.proxy.completions.RequestRecord``.

    Engines of the demo write ``request.answered`` without ``called_at`` and ``prefill_s``.
    """

    prefill_s: Seconds | None = None
    elapsed_s: Seconds = 0.0
    first_bytes_s: Seconds | None = None
    called_at: Moment | None = None
    client: Name = ""
    status: Annotated[int, Meta(ge=0, le=999)] = 0
    prefill_server: Name = ""
    decode_server: Name = ""
    failed_attempts: Annotated[list[FailedAttempt], Meta(max_length=LISTED_MAX)] = []
    sent_bytes: Count = 0
    code: Name = ""
    phase: Name = ""
    detail: Words = ""
    remedy: Words = ""

    @property
    def routed(self) -> bool:
        """Whether a router wrote it."""
        return self.prefill_s is not None or self.called_at is not None


class FirstToken(Record, frozen=True, kw_only=True):
    """``token.first`` of an engine: it has the first token that it computed with the cache."""


KINDS: Final[dict[str, type[Record]]] = {
    "peer.connected": Connected,
    "offer.admitted": Admitted,
    "lease.ended": Ended,
    "transfer.completed": Transfer,
    "transfer.failed": Transfer,
    "transfer.traced": Traced,
    "request.answered": Answered,
    "request.failed": Answered,
    "token.first": FirstToken,
}


LINES_TOLD: Final = 10_000
"""Between two calls that report progress: some 50 ms of work."""


class _Head(Struct, frozen=True):
    event: Name = ""


_decode_head = msgspec.json.Decoder(_Head).decode
_decoders = {name: msgspec.json.Decoder(kind) for name, kind in KINDS.items()}

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, ValueError)
"""What a line can raise that is not a record of the expected kind."""


class Reading(Struct):
    """How much was read.

    Attributes:
        files: how many files.
        lines: lines of all files.
        broken: lines that are not records: no JSON object, a field with a wrong type or out of bounds, or too long.
        skipped: records above ``RECORDS_MAX``.
    """

    files: int = 0
    lines: int = 0
    broken: int = 0
    skipped: int = 0


class Sourced(Struct, frozen=True):
    """A record and where it was read.

    Attributes:
        record: the record.
        file: number of the file. A file is written by processes of one machine, so its records share a clock.
    """

    record: Record
    file: int


def read_files(
    paths: Iterable[Path], progress: Callable[[Reading], None] = lambda _: None
) -> tuple[list[Sourced], Reading]:
    """Read the records of files that concern requests; skip and count everything else.

    Args:
        paths: of the files.
        progress: is told how much was read, after every ``LINES_TOLD`` lines.

    Raises:
        OSError: a file cannot be read.
    """
    found: list[Sourced] = []
    reading = Reading()
    for path in paths:
        with path.open("rb") as file:
            for line in _lines(file, reading):
                if reading.lines % LINES_TOLD == 0:
                    progress(reading)
                record = _record(line, reading)
                if record is None:
                    continue
                if len(found) >= RECORDS_MAX:
                    reading.skipped += 1
                else:
                    found.append(Sourced(record, reading.files))
        reading.files += 1
    return found, reading


def _lines(file: BinaryIO, reading: Reading) -> Iterator[bytes]:
    """Return the lines of a file that are not too long."""
    while line := file.readline(LINE_BYTES_MAX + 1):
        reading.lines += 1
        if len(line) <= LINE_BYTES_MAX:
            yield line
            continue
        reading.broken += 1
        while line and not line.endswith(b"\n"):
            line = file.readline(LINE_BYTES_MAX)


def _record(line: bytes, reading: Reading) -> Record | None:
    """Return the record of a line; None if it is of no kind that we need, or broken."""
    if line.isspace():
        return None
    try:
        decoder = _decoders.get(_decode_head(line).event)
        record: Record | None = None if decoder is None else decoder.decode(line)
    except UNREADABLE:
        reading.broken += 1
        return None
    return record
